"""The parts of TensorRT's Python API that llmforge's runtime uses, over ONNX Runtime on a CPU and `FakeCuda`.

A context runs the graph on what lies at the addresses that it was given, when the stream does it: now, or at every
launch of what was recorded. Calls that a GPU would answer by garbage fail an assertion here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from llmforge.ir import interface

from .fake_cuda import FakeCuda

_DTYPES = {"tensor(float)": "FLOAT", "tensor(int8)": "INT8", "tensor(int32)": "INT32", "tensor(int64)": "INT64"}
_NUMPY = {"FLOAT": "float32", "INT8": "int8", "INT32": "int32", "INT64": "int64"}
MEMORY_BYTES = 4096


class ILogger:
    """A base for loggers, as the library wants it: with its own constructor called."""

    ERROR, INTERNAL_ERROR, WARNING, INFO = "error", "internal error", "warning", "info"

    def __init__(self) -> None:
        self.ready = True


def fake_api(engine: FakeEngine | None, *, rtx: bool, complaint: str = "") -> Any:
    """Make the module; its runtime gives `engine` for whatever it is asked to deserialize."""
    names = {"__name__": "tensorrt_rtx" if rtx else "tensorrt", "__version__": "11.4.0"}

    class Runtime:
        def __init__(self, logger: ILogger) -> None:
            assert logger.ready
            self._logger = logger

        def deserialize_cuda_engine(self, content: Any) -> FakeEngine | None:
            assert bytes(content[:4]) == b"plan"
            if engine is None:
                self._logger.log(ILogger.INFO, "not of interest")
                self._logger.log(ILogger.ERROR, complaint)
            return engine

    api = SimpleNamespace(
        ILogger=ILogger,
        Runtime=Runtime,
        TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
        TensorLocation=SimpleNamespace(DEVICE="device", HOST="host"),
        ExecutionContextAllocationStrategy=SimpleNamespace(STATIC="static", USER_MANAGED="user"),
        **names,
    )
    if rtx:
        api.CudaGraphStrategy = SimpleNamespace(DISABLED="disabled", WHOLE_GRAPH_CAPTURE="whole")
        api.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager", LAZY="lazy")
    if engine is not None:
        engine.rtx = rtx
    return api


class FakeEngine:
    """An engine of a decoder graph, of two profiles [(batch, sequence)] and caches of `capacity` slots."""

    def __init__(
        self, model: bytes, cuda: FakeCuda, capacity: int, profiles: Sequence[tuple[int, int]] = ((1, 8), (4, 1))
    ) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.cuda, self.capacity, self.profiles, self.rtx = cuda, capacity, list(profiles), False
        inputs = [*self.session.get_inputs(), *self.session.get_overridable_initializers()]
        self.inputs = {each.name: each for each in inputs}
        self.outputs = {each.name: each for each in self.session.get_outputs()}
        self.contexts: list[FakeContext] = []
        self.copied: set[str] = set()  # outputs that are no input in place
        self.device_memory_size_v2 = MEMORY_BYTES

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def _of(self, name: str) -> Any:
        return self.inputs.get(name) or self.outputs[name]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=_DTYPES[self._of(name).type])

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name in self.inputs else "out"

    def get_tensor_location(self, name: str) -> str:
        return "host" if name == interface.TOTAL_SEQUENCE_LENGTH else "device"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        sizes = {"capacity": self.capacity}
        return tuple(size if isinstance(size, int) else sizes.get(size, -1) for size in self._of(name).shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        assert name == interface.INPUT_IDS
        return [(1, 1), self.profiles[profile], self.profiles[profile]]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        past = interface.past_of(name)
        return past if past != name and name not in self.copied else None

    def create_runtime_config(self) -> Any:
        assert self.rtx
        settings = SimpleNamespace(cuda_graph_strategy="disabled")
        settings.set_execution_context_allocation_strategy = lambda strategy: setattr(settings, "strategy", strategy)
        settings.create_runtime_cache = lambda: FakeRuntimeCache(self)
        settings.set_runtime_cache = lambda cache: setattr(settings, "cache", cache)
        return settings

    def create_execution_context(self, how: Any) -> FakeContext:
        assert (how.strategy if self.rtx else how) == "user"
        made = FakeContext(self, how.cuda_graph_strategy if self.rtx else None)
        if self.rtx:
            made.specialization, made.cache = how.dynamic_shapes_kernel_specialization_strategy, how.cache
        self.contexts.append(made)
        return made


class FakeRuntimeCache:
    """Compiled kernels: of what shapes. What another library left is refused."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.compiled: set[str] = set()

    def deserialize(self, content: bytes) -> bool:
        if not content.startswith(b"kernels"):
            return False
        self.compiled = set(content.decode().split("\n")[1:])
        return True

    def serialize(self) -> bytes:
        return "\n".join(["kernels", *sorted(self.compiled)]).encode()


class FakeContext:
    """An execution context."""

    def __init__(self, engine: FakeEngine, strategy: str | None) -> None:
        self.engine, self.strategy = engine, strategy
        self.profile: int | None = None
        self.memory: tuple[int, int] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.enqueued = 0
        self.compiled = 0  # kernels that were in no cache
        self.specialization: str | None = None
        self.cache: FakeRuntimeCache | None = None
        self.fails = False
        self.communicator: Any = None

    def set_communicator(self, communicator: Any) -> bool:
        self.communicator = communicator
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0
        assert size >= self.engine.device_memory_size_v2
        self.memory = (memory, size)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        most_rows, most_tokens = self.engine.profiles[self.profile]
        declared = self.engine.get_tensor_shape(name)
        if len(shape) != len(declared) or any(d not in (-1, s) for s, d in zip(shape, declared, strict=True)):
            return False
        if name == interface.INPUT_IDS and (shape[0] > most_rows or shape[1] > most_tokens):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self.engine.inputs or name in self.engine.outputs
        assert address % 256 == 0, f"{name} lies at an address that TensorRT does not take"
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        batch, _ = self.shapes[interface.INPUT_IDS]
        declared = self.engine.outputs[name].shape
        if name == interface.LOGITS:
            return (batch, self.shapes[interface.LOGITS_ROWS][-1], declared[-1])
        return (batch, *declared[1:])

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def execute_async_v3(self, stream: int) -> bool:
        assert self.memory is not None
        assert not self.infer_shapes()
        if self.fails:
            return False
        self.enqueued += 1
        if self.cache is not None and (shape := str(self.shapes[interface.INPUT_IDS])) not in self.cache.compiled:
            self.compiled += 1
            self.cache.compiled.add(shape)
        # What is enqueued is fixed by the call: shapes, addresses, and the values that the host holds.
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        hosted = {
            name: self._array(name, addresses[name], shapes[name]).copy()
            for name in self.engine.inputs
            if self.engine.get_tensor_location(name) == "host"
        }
        self.engine.cuda.send(lambda: self._compute(shapes, addresses, hosted))
        return True

    def _array(self, name: str, address: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype(_NUMPY[self.engine.get_tensor_dtype(name).name])
        memory = (ctypes.c_uint8 * (int(np.prod(shape)) * dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape)

    def _compute(self, shapes: dict[str, Any], addresses: dict[str, int], hosted: dict[str, np.ndarray]) -> None:
        feeds = {name: self._array(name, addresses[name], shapes[name]) for name in self.engine.inputs} | hosted
        for name, value in zip(self.engine.outputs, self.engine.session.run(None, feeds), strict=True):
            past = interface.past_of(name)
            assert past == name or addresses[name] == addresses[past], f"{name} is {past} in place"
            self._array(name, addresses[name], value.shape)[...] = value
