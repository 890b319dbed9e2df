"""A decoder in a plan of TensorRT or TensorRT-RTX, over a GPU's memory.

A plan has optimization profiles over one graph: prefill, one row of up to a chunk of tokens; decode, rows of one token
each; and prompts, several rows of few tokens (`prefill_shapes.together`). A profile is used through an execution
context; all contexts share one piece of memory for what they compute, for one step runs at a time. Past and present of
a cache are one tensor in place, bound at one address; its capacity is a number of the plan's. A write beyond it would
be dropped without a word, so bounds are checked before a step.

**CUDA graphs.** TensorRT's work for a decode step is captured from the stream, with a context of its own for every
number of rows, and verified like any other (`runtime.device.graph_capture`). TensorRT-RTX captures by itself.

**Top logits.** A plan whose steps give them (`interface.TopLogits`) decodes concurrently with the host: `begin_decode`
sends a step to the stream, after its inputs, and one wait brings them. Rows that must be whole are fetched by
themselves. A plan that was built without top logits gives whole rows.

What is verified without a GPU is all that is decided here, against fakes of the library and of CUDA; the
library's names are checked against the installed bindings.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.backends.tensorrt import plan as tensorrt_plan
from llmforge.backends.tensorrt.plan import LoadedPlan
from llmforge.base import remembered, small_file, whole_file
from llmforge.base.errors import EnvironmentLacks, InputError, RunFailed, UnsupportedError
from llmforge.ir import interface
from llmforge.ir.interface import TopLogits
from llmforge.native import nccl
from llmforge.runtime.config import Capture, RuntimeConfig, plan_record
from llmforge.runtime.device import cache as device_cache
from llmforge.runtime.device.backend import INPUT_BYTES, LOGIT_BYTES, DeviceDecoder
from llmforge.runtime.device.cache import CacheMemory, DeviceCache
from llmforge.runtime.device.cuda import Buffer, CudaDevice, CudaGraph
from llmforge.runtime.device.graph_capture import ONE, CaptureProbe, probe_inputs
from llmforge.runtime.device.inputs import ALIGNMENT_BYTES, BoundInput, InputBuffers
from llmforge.runtime.device.top_logits import TopLogitsBuffers
from llmforge.runtime.interface import DecodeRun, StepInputs
from llmforge.runtime.signature import Signature

FOLDER = "tensorrt-rtx-kernels"
MOST_BYTES = 4 << 30  # a file above it is not what was kept here

logger = logging.getLogger(__name__)


class KernelCache:
    """The runtime cache that all contexts of one plan share.

    Args:
        plan: the plan's file. Beside it lies its record, which says its SHA-256; without, nothing is kept.
    """

    def __init__(self, plan: Path) -> None:
        self._file = _file_of(plan)
        self._cache: Any = None
        self._kept = b""
        self.found = False  # whether kernels of an earlier start were taken

    def attach(self, settings: Any) -> None:
        """Let a context that is made with `settings` (IRuntimeConfig) take kernels from the cache, and put them in."""
        if self._cache is None:
            self._cache = settings.create_runtime_cache()
            self._read()
        settings.set_runtime_cache(self._cache)

    def keep(self) -> None:
        """Write what was compiled, if it is more than was read; a folder that takes nothing is said in the log."""
        if self._file is None or self._cache is None:
            return
        content = bytes(self._cache.serialize())
        if content == self._kept:
            return
        try:
            whole_file.write(self._file, lambda file: file.write_bytes(content))
            self._kept = content
        except OSError as error:
            logger.warning("compiled kernels are not kept: %s: %s", self._file, error.strerror)

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            if not self._file.is_file() or self._file.is_symlink() or self._file.stat().st_size > MOST_BYTES:
                return
            content = self._file.read_bytes()
        except OSError:  # as if there were none: they are compiled anew
            return
        self.found = bool(self._cache.deserialize(content))
        self._kept = content if self.found else b""


def _file_of(plan: Path) -> Path | None:
    """Name the file for a plan; None where its record does not say what it is, or there is no home folder."""
    try:
        digest = small_file.read_json(plan.with_name(plan_record(plan.name))).get("sha256")
        home = remembered.home()
    except (InputError, RuntimeError, AttributeError):
        return None
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        return None
    return home / FOLDER / f"{digest}.cache"


# A captured decode step, and the execution context whose work it is.
_CapturedStep = tuple[CudaGraph, Any]


class PlanSession(DeviceDecoder[DeviceCache]):
    """A decoder in a deserialized plan (`llmforge.runtime.interface.Decoder`).

    Args:
        plan: the plan.
        config: what the artifact says of it.
        device: where it runs.

    Raises:
        InputError: the plan is not what `config` says.
        UnsupportedError: the plan does not write its caches in place, or its steps cannot be shown to be captured.
    """

    rows_alone = True  # the profile of prefills has one row
    device: CudaDevice
    longest_step: int  # tokens of the prefill profile

    def __init__(self, plan: LoadedPlan, config: RuntimeConfig, device: CudaDevice) -> None:
        self.device, self._plan = device, plan
        inputs, outputs = tensorrt_plan.read_tensors(plan)
        self.signature = signature = Signature.of(inputs, outputs, plan.where)
        tensorrt_plan.check_caches(plan, inputs, config.max_context)
        places = tensorrt_plan.check_profiles(plan, config)
        prefill, decode = places["prefill"], places["decode"]
        self._capacity = config.max_context
        self.longest_step = longest = plan.facts.profiles[prefill].max_sequence
        self._most_rows = most_rows = plan.facts.profiles[decode].max_batch
        # TensorRT-RTX captures decode steps by itself, and does not tell.
        self._captures_itself = hasattr(plan.api, "CudaGraphStrategy")
        mode = "allow" if config.graphs is None else config.graphs.mode
        if mode == "require" and self._captures_itself:
            raise UnsupportedError(
                f"{plan.where}: {plan.title} records steps by itself and does not say which",
                hint="engine.cuda_graphs: allow",
            )
        self._graphs_required, self._captures = mode == "require", mode != "off"
        self.buckets = (config.buckets or tensorrt_plan.bucket_sizes(most_rows)) if self._captures else config.buckets
        self._input_names = tuple(name for name in signature.inputs if name not in signature.cache_types)
        host = plan.api.TensorLocation.HOST
        self._host_inputs = {name for name in self._input_names if plan.engine.get_tensor_location(name) == host}
        self._scratch = device.allocate(max(1, plan.engine.device_memory_size_v2))
        self._decode_profile = decode
        self._kernels = KernelCache(Path(plan.where))
        self._prefill = self._context(prefill, graphs=False)
        self._decode = self._context(decode, graphs=self._captures)
        self.prompt_shapes = tensorrt_plan.prompt_shapes(plan.facts)
        self._prompts = self._context(places["prompts"], graphs=False) if self.prompt_shapes else None
        self._decode_inputs = InputBuffers(device, self._input_names, self._host_inputs, most_rows * INPUT_BYTES)
        most_tokens = max(longest, *(rows * tokens for rows, tokens in self.prompt_shapes), 1)
        self._inputs = InputBuffers(device, self._input_names, self._host_inputs, most_tokens * INPUT_BYTES)
        self._decode_logits = device.allocate(most_rows * self.vocabulary * LOGIT_BYTES)
        self._logits = device.allocate(self.vocabulary * LOGIT_BYTES)  # grows
        self._top_logits = TopLogitsBuffers(device, most_rows, self.vocabulary) if signature.gives_top_logits else None
        self._graphs: weakref.WeakKeyDictionary[CacheMemory, dict[int, _CapturedStep]] = weakref.WeakKeyDictionary()

    def allocate(self, batch: int, capacity: int) -> DeviceCache:
        """Reserve caches for `batch` sequences of at most `capacity` tokens; steps run over the plan's capacity alone.

        Raises:
            EnvironmentLacks: the device has no room for them.
            UnsupportedError: rows would begin at addresses that TensorRT does not take.
            VerificationError: a step that must be captured is not.
        """
        cache = device_cache.allocate(self.device, self.signature, batch, capacity)
        if capacity != self._capacity:
            return cache
        for name, tensor in cache.memory.tensors.items():
            if batch > 1 and tensor.row_bytes % ALIGNMENT_BYTES:
                raise UnsupportedError(
                    f"a row of {name} has {tensor.row_bytes} bytes, and TensorRT takes addresses that are multiples of "
                    f"{ALIGNMENT_BYTES}",
                    hint="build with another engine.max_context: a multiple of 128 always fits",
                )
        if self._captures_itself:
            self._warm(cache)
        elif self._captures and batch >= self.buckets[-1]:
            self._capture(cache)
        return cache

    def _warm(self, cache: DeviceCache) -> None:
        """Let TensorRT-RTX compile its kernels for pieces of prompts and for every bucket, and keep them."""
        none = np.zeros(self._most_rows, np.int32)
        steps = [(1, min(self.longest_step, self._capacity)), *((rows, 1) for rows in self.buckets or (1,))]
        steps += [(rows, tokens) for rows, tokens in self.prompt_shapes if tokens <= self._capacity]
        for rows, tokens in steps:
            if rows <= cache.batch:
                self.step(StepInputs(np.zeros((rows, tokens), np.int64), none[:rows]), cache.rows(0, rows))
        self._kernels.keep()

    def _check(self, inputs: StepInputs, cache: DeviceCache) -> None:
        rows, tokens = len(inputs.ids), inputs.ids.shape[1]
        if cache.capacity != self._capacity or tokens > self.longest_step or rows > self._most_rows:
            raise ValueError(
                f"ids {inputs.ids.shape} and a cache of {cache.capacity} tokens; the plan takes {self._most_rows} "
                f"rows, {self.longest_step} tokens of one, and caches of {self._capacity}"
            )
        super()._check(inputs, cache)

    def _context(self, profile: int, *, graphs: bool) -> Any:
        """Make a context for a profile, in the memory that all of them share."""
        api, engine = self._plan.api, self._plan.engine
        allocation = api.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._captures_itself:
            settings = engine.create_runtime_config()
            settings.set_execution_context_allocation_strategy(allocation)
            strategy = api.CudaGraphStrategy
            settings.cuda_graph_strategy = strategy.WHOLE_GRAPH_CAPTURE if graphs else strategy.DISABLED
            # Decode steps have few shapes, so each gets its own kernels; prompts have as many as there are lengths.
            specialization = api.DynamicShapesKernelSpecializationStrategy
            eager = profile == self._decode_profile
            settings.dynamic_shapes_kernel_specialization_strategy = (
                specialization.EAGER if eager else specialization.LAZY
            )
            self._kernels.attach(settings)
            context = engine.create_execution_context(settings)
        else:
            context = engine.create_execution_context(allocation)
        if context is None:
            raise EnvironmentLacks(f"cannot create an execution context on {self.device.name}: {self._plan.complaint}")
        context.set_device_memory(self._scratch.address, self._scratch.size)
        self._expect(context.set_optimization_profile_async(profile, self.device.stream), f"profile {profile}")
        if (communicator := nccl.joined()) is not None:  # all ranks make their contexts in one order, and wait here
            self._expect(context.set_communicator(communicator.capsule), "the communicator of the ranks")
        self.device.synchronize()
        return context

    def _run(self, inputs: StepInputs, cache: DeviceCache, out: NDArray[np.float32]) -> None:
        if inputs.ids.shape[1] > 1 or out.shape[1] > 1:
            self._launch_prefill(inputs, cache, out.shape)
            self.device.read(self._logits, 0, out)
        else:
            self._launch_decode(inputs, cache)
            self.device.read(self._decode_logits, 0, out)

    @property
    def decodes_ahead(self) -> bool:
        """Whether the plan gives top logits."""
        return self._top_logits is not None

    def begin_decode(self, inputs: StepInputs, cache: DeviceCache) -> DecodeRun:
        """Begin a step of one token a row, as `step` runs it; arrays are read before this returns."""
        self._check(inputs, cache)
        if self._top_logits is None or inputs.ids.shape[1] != 1:
            raise ValueError(f"a step of {inputs.ids.shape}; top logits of one token a row")
        self._launch_decode(inputs, cache)
        return _PlanDecode(self._top_logits, self._decode_logits, cache.batch)

    def begin_prompts(self, inputs: StepInputs, cache: DeviceCache) -> DecodeRun:
        """Begin a step of pieces of several prompts, of one of `prompt_shapes`; arrays are read before this returns."""
        self._check_prompts(inputs, cache)
        assert self._top_logits is not None
        self._launch_prefill(inputs, cache, (cache.batch, 1, self.vocabulary))
        return _PlanDecode(self._top_logits, self._logits, cache.batch)

    def _launch_prefill(self, inputs: StepInputs, cache: DeviceCache, shape: tuple[int, ...]) -> None:
        """Send a step of several tokens to the stream, after its inputs; `shape`: of its logits."""
        size = math.prod(shape) * LOGIT_BYTES
        if size > self._logits.size:
            self._logits = self.device.allocate(size)
        context = self._prefill if cache.batch == 1 else self._prompts
        self._bind(context, self._inputs.upload(inputs.feeds(self.signature)), cache, self._logits, shape)
        self._enqueue(context)

    def _launch_decode(self, inputs: StepInputs, cache: DeviceCache) -> None:
        """Send a step of one token a row to the stream, after its inputs."""
        bound = self._decode_inputs.upload(inputs.feeds(self.signature))
        captured = self._graphs.get(cache.memory, {}).get(cache.batch) if cache.start == 0 else None
        if captured is None:
            self._bind(self._decode, bound, cache, self._decode_logits, (cache.batch, 1, self.vocabulary))
            self._enqueue(self._decode)
        else:
            self.device.replay(captured[0])

    def _bind(
        self,
        context: Any,
        inputs: Mapping[str, BoundInput],
        cache: DeviceCache,
        logits: Buffer,
        shape: tuple[int, ...],
    ) -> None:
        """Tell a context the shapes and addresses of all inputs and outputs; `shape`: of logits."""
        for name, bound in inputs.items():
            self._expect(context.set_input_shape(name, bound.shape), f"{name} {bound.shape}")
            self._expect(context.set_tensor_address(name, bound.address), name)
        for name in cache.memory.tensors:
            self._expect(context.set_input_shape(name, cache.shape(name)), f"{name} {cache.shape(name)}")
            for either in (name, interface.present_of(name)):
                self._expect(context.set_tensor_address(either, cache.address(name)), either)
        top = () if self._top_logits is None else self._top_logits.outputs(cache.batch)
        outputs = {interface.LOGITS: logits.at(0, math.prod(shape) * LOGIT_BYTES)}
        outputs |= {name: address for name, _, _, address in top}
        for name, address in outputs.items():
            self._expect(context.set_tensor_address(name, address), name)
        if unknown := context.infer_shapes():
            raise RuntimeError(f"{self._plan.title}: nothing says how large {', '.join(unknown)} are")
        for name, expected in [(interface.LOGITS, shape), *((name, expected) for name, _, expected, _ in top)]:
            given = tuple(context.get_tensor_shape(name))
            if given != expected:
                raise RuntimeError(f"{self._plan.title}: {name} {given}; expected {expected}")

    def _enqueue(self, context: Any) -> None:
        """Send a step to the stream, after the copy of its inputs."""
        self._expect(context.execute_async_v3(self.device.stream), "a step")

    def _expect(self, done: bool, what: str) -> None:
        if not done:
            raise RunFailed(f"{self._plan.title}: {what}: {self._plan.complaint}")

    def _capture(self, cache: DeviceCache) -> None:
        """Capture decode steps over the rows of `cache`, the largest first, and verify each."""
        graphs: dict[int, _CapturedStep] = {}
        self.capture_results = ()
        for number, batch in enumerate(sorted(self.buckets, reverse=True), start=1):
            capture = Capture(number, batch, self._capacity)
            if self._verify_capture(capture, self._probe(capture, cache.rows(0, batch), graphs)).reason is not None:
                graphs.pop(batch, None)
        self._graphs[cache.memory] = graphs

    def _probe(self, capture: Capture, cache: DeviceCache, graphs: dict[int, _CapturedStep]) -> CaptureProbe:
        """Make what runs a probe's step over `cache`, and captures it into `graphs`."""
        batch = capture.batch
        out = np.empty((batch, 1, self.vocabulary), np.float32)

        def upload(token: int) -> dict[str, BoundInput]:
            return self._decode_inputs.upload(probe_inputs(token, capture).feeds(self.signature))

        def probe(token: int, *, graph: bool, moved: bool = False) -> NDArray[np.float32]:
            inputs = upload(token)
            if not graph:
                self._bind(self._decode, inputs, cache, self._decode_logits, out.shape)
                self._enqueue(self._decode)
            else:
                if batch not in graphs:
                    graphs[batch] = self._capture_step(inputs, cache)
                if moved:  # the captured address holds another token than the one that was asked for
                    upload(ONE)
                self.device.replay(graphs[batch][0])
            self.device.read(self._decode_logits, 0, out)
            return out.copy()

        return probe

    def _capture_step(self, inputs: Mapping[str, BoundInput], cache: DeviceCache) -> _CapturedStep:
        """Capture a step with a context of its own, after a run: what that prepares for new shapes is not captured."""
        context = self._context(self._decode_profile, graphs=False)
        self._bind(context, inputs, cache, self._decode_logits, (cache.batch, 1, self.vocabulary))
        self._enqueue(context)
        return self.device.capture(lambda: self._enqueue(context)), context


@dataclass(frozen=True, eq=False)
class _PlanDecode(DecodeRun):
    """A step in the stream."""

    _top_logits: TopLogitsBuffers
    _logits: Buffer
    _rows: int

    def top_logits(self) -> TopLogits:
        """Wait for the step, and for the copy of the top logits of its rows."""
        return self._top_logits.read(self._rows)

    def launched(self) -> None:
        """Return: it is in the stream."""

    def logits(self, row: int) -> NDArray[np.float32]:
        """Fetch all logits of a row."""
        return self._top_logits.read_row(self._logits, row)

    def blocks(self, rows: Sequence[int], blocks: Sequence[int]) -> NDArray[np.float32]:
        """Fetch one block of the logits of each of some rows."""
        return self._top_logits.read_blocks(self._logits, rows, blocks)


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: CudaDevice) -> PlanSession:
    """Open the engine whose plan is `file` (llmforge.backends, Provider.session)."""
    assert config.plan is not None  # `RuntimeConfig.read` saw to it
    return PlanSession(tensorrt_plan.open_plan(file, config.plan), config, gpu)
