"""One ONNX Runtime session of a decoder, driven step by step over preallocated caches.

Past and present of every layer are bound to one buffer, so that a step writes its keys and values in place; separate
buffers would copy the whole cache in every step. Bindings are made once for a cache: a decode step of an unchanged
shape writes its few input numbers into arrays that are bound already.

A graph whose caches grow (docs/dialect.md, Interfaces of other runtimes) cannot write in place: its past is cut out of
the buffers and its new slots are copied back, in every step. It runs here to be proved, not to be fast.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from llmforge import native
from llmforge.base.errors import EnvironmentLacks, InputError, RunFailed, UnsupportedError
from llmforge.ir import interface
from llmforge.runtime.interface import Decoder, Rows, StepInputs
from llmforge.runtime.signature import CACHE_TYPES, ELEMENTS, Signature

if TYPE_CHECKING:
    from llmforge.runtime.config import RuntimeConfig, SessionConfig

PROVIDER = "CPUExecutionProvider"
_FP8 = "float8_e4m3fn"  # which numpy has from another package
_OF_OTHERS = 256  # `dtype.num` of types that other packages register, and above
CACHE_DTYPES = {key: element.name for key, element in CACHE_TYPES.items() if element.on_hosts}

# Severity 3 = errors only: warning 2 tells at every load that `logits_rows`, an input with a default, is not constant.
_LOG_ERRORS = 3
# What ONNX Runtime raises where it refuses a graph, or `run` fails at one; none of them is a RuntimeError.
_FAILURES = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


_LACKS = (
    ort_errors.EPFail,
    ort_errors.NotImplemented,
)  # the graph is whole, and this ONNX Runtime has no kernel for it


@dataclass(frozen=True, eq=False)
class HostCache(Rows):
    """Keys and values of `batch` sequences of at most `capacity` tokens; a row is one sequence.

    `buffers` holds one array [batch, kv_heads, capacity, head_dim] for every cache input of the graph, and one
    [batch, …] for every state, by input name. A row whose past is empty may hold anything: no graph reads it.
    Memory that no token has reached is never touched.
    """

    buffers: Mapping[str, NDArray[Any]] = field(repr=False)

    def _view(self, start: int, stop: int) -> HostCache:
        buffers = {name: buffer[start:stop] for name, buffer in self.buffers.items()}
        return HostCache(stop - start, self.capacity, buffers)

    def copy(self, row: int, start: int, source: HostCache, source_row: int, source_start: int, tokens: int) -> None:
        """Copy `tokens` tokens, and states as a whole, from token `source_start` of a row of `source` to `start`."""
        for name, buffer in self.buffers.items():
            if interface.is_state(name):
                buffer[row] = source.buffers[name][source_row]
            else:
                copied = source.buffers[name][source_row, :, source_start : source_start + tokens]
                buffer[row, :, start : start + tokens] = copied

    def row_arrays(self, row: int) -> Mapping[str, NDArray[Any]]:
        """Give the buffers of one row, which share this cache's memory."""
        return {name: buffer[row] for name, buffer in self.buffers.items()}

    @property
    def size_bytes(self) -> int:
        """Size of all buffers, touched or not."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


class Session(Decoder[HostCache]):
    """A decoder graph (docs/dialect.md) in ONNX Runtime on the CPU.

    Args:
        model: path of `model.onnx`, its external data beside it, or a serialized model.
        config: threads and options of ONNX Runtime.
        initializers: values, by name, of initializers that the model declares as external; they stay in memory here
            and no file is read for them.
        own_kernels: the graph has nodes that kernels of llmforge's own run.

    Raises:
        InputError: the file of the model cannot be read or is damaged, or the graph is not that of a decoder.
        UnsupportedError: ONNX Runtime refuses a graph in memory, or has no kernel for a node.
    """

    def __init__(
        self,
        model: Path | bytes,
        config: SessionConfig,
        *,
        initializers: Mapping[str, NDArray[Any]] | None = None,
        own_kernels: bool = False,
    ) -> None:
        options = session_options(config)
        native.register(options)
        if initializers:
            values = [ort_value(np.asarray(value, order="C")) for value in initializers.values()]
            options.add_external_initializers(list(initializers), values)
            self._initializers = values  # ONNX Runtime keeps pointers into them
        where = str(model) if isinstance(model, Path) else "the model in memory"
        self._session = open_graph(model, options, [PROVIDER], where)
        graph = self._session
        inputs = [*graph.get_inputs(), *graph.get_overridable_initializers()]
        self.signature = signature = Signature.of(inputs, graph.get_outputs(), where, own_kernels=own_kernels)
        for name, dtype in signature.cache_types.items():
            if not ELEMENTS[dtype].on_hosts:
                raise UnsupportedError(f"{where}: {name} is {dtype}, which no CPU kernel supports")
        self._bindings: weakref.WeakKeyDictionary[HostCache, _Binding] = weakref.WeakKeyDictionary()

    def allocate(self, batch: int, capacity: int) -> HostCache:
        """Reserve caches for `batch` sequences of at most `capacity` tokens; pages are taken as tokens reach them."""
        if batch < 1 or capacity < 1:
            raise ValueError(f"a cache of {batch} rows of {capacity} tokens")
        caches, states = self.signature.caches, self.signature.states
        buffers = {c.name: _reserve((batch, c.kv_heads, capacity, c.head_dim), c.dtype) for c in caches}
        buffers |= {state.name: np.zeros((batch, *state.dims), state.dtype) for state in states}
        return HostCache(batch, capacity, buffers)

    def end_profile(self) -> Path:
        """Close the trace that `SessionConfig.profile` asked for, and say where it is: JSON, in Chrome's format."""
        return Path(self._session.end_profiling())

    def read(self, names: Sequence[str], inputs: StepInputs, cache: HostCache) -> dict[str, NDArray[Any]]:
        """Run one step as `step` does, leave `cache` as it is, and return the outputs `names`. For diagnosis: slow."""
        feeds = inputs.feeds(self.signature)
        past = grown(cache.buffers, inputs.past_lengths) if self.signature.growing else cache.buffers
        values = run(self._session, list(names), {**feeds, **past})
        return dict(zip(names, values, strict=True))

    def _run(self, inputs: StepInputs, cache: HostCache, out: NDArray[np.float32]) -> None:
        if self.signature.growing:
            self._grow(inputs, cache, out)
            return
        binding = self._bindings.get(cache)
        if binding is None:
            binding = self._bindings[cache] = _Binding(self._session, cache)
        if (name := self.signature.gives_hidden) is not None:
            shape = (*inputs.ids.shape, self.signature.hidden_widths[name])
            if self.hidden_states is None or self.hidden_states.shape != shape:
                self.hidden_states = np.empty(shape, np.float32)
            binding.give(name, self.hidden_states)
        in_place = self.signature.declared_rows in (None, out.shape[1])
        binding.run(inputs.feeds(self.signature), out, in_place=in_place)

    def _grow(self, inputs: StepInputs, cache: HostCache, out: NDArray[np.float32]) -> None:
        """Run one step over a past that is cut out of `cache`, and copy the tokens that it adds into `cache`."""
        names = [interface.LOGITS, *(interface.present_of(name) for name in cache.buffers)]
        past = grown(cache.buffers, inputs.past_lengths)
        logits, *presents = run(self._session, names, {**inputs.feeds(self.signature), **past})
        out[...] = logits
        for buffer, present in zip(cache.buffers.values(), presents, strict=True):
            store_grown(buffer, present, inputs.past_lengths)


def ort_value(array: NDArray[Any]) -> Any:
    """Hand over an array, whose memory stays in use.

    numpy has no fp8: such an array has a dtype of another package, and goes over as bytes.
    """
    if array.dtype.name != _FP8:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8), ELEMENTS[array.dtype.name].onnx)


def session_options(config: SessionConfig) -> ort.SessionOptions:
    """Make ONNX Runtime's own options of ours."""
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_ERRORS
    options.intra_op_num_threads = config.threads
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL  # a decoder is a chain: nothing runs beside it
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if config.optimize else levels.ORT_DISABLE_ALL
    if config.profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, config.profile
    for key, value in config.entries.items():
        options.add_session_config_entry(key, value)
    return options


def open_graph(model: Path | bytes, options: ort.SessionOptions, providers: Sequence[Any], where: str) -> Any:
    """Open an inference session; raises what `Session` raises.

    A file that does not load was changed since it was published, for it ran then; a graph in memory that does not is
    one that this ONNX Runtime does not run. It never falls back to another provider by itself.
    """
    source = model if isinstance(model, bytes) else str(model)
    try:
        return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)
    except ort_errors.NoSuchFile as error:
        raise InputError(f"{where}: a file is missing: {error}") from error
    except (UnicodeDecodeError, *_FAILURES) as error:  # the former of a message that quotes bytes of the file
        damaged = isinstance(model, Path) and not isinstance(error, _LACKS)
        raise (InputError if damaged else UnsupportedError)(
            f"{where}: ONNX Runtime {ort.__version__} refuses the graph: {error}",
            hint="run `llmforge verify ARTIFACT` to list changed files",
        ) from error


def run(session: Any, names: Sequence[str] | None, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Run `session` on arrays and return the outputs `names`; None: all.

    Raises:
        RunFailed: a kernel fails, or refuses what it is fed.
    """
    foreign = [name for name, array in feeds.items() if array.dtype.num >= _OF_OTHERS]  # a step has many inputs
    fed = {**feeds, **{name: ort_value(feeds[name]) for name in foreign if feeds[name].dtype.name == _FP8}}
    try:
        results: list[NDArray[Any]] = session.run(names, fed)
    except _FAILURES as error:
        raise _run_failed(error, feeds) from error
    return results


def run_bound(
    session: Any, binding: Any, *options: ort.RunOptions, inputs: Mapping[str, NDArray[Any]] | None = None
) -> None:
    """Run `session` on what is bound to it, of which `inputs` are in the host's memory.

    Raises:
        RunFailed: a kernel fails, or refuses what it is fed.
    """
    try:
        session.run_with_iobinding(binding, *options)
    except (RuntimeError, *_FAILURES) as error:  # it makes a plain RuntimeError of each status (1.31)
        raise _run_failed(error, inputs or {}) from error


def _run_failed(error: Exception, inputs: Mapping[str, NDArray[Any]]) -> RunFailed:
    """Say which ids it was given, which may tell whether a graph is wrong or what it was fed."""
    ids = inputs.get(interface.INPUT_IDS)
    fed = "" if ids is None or not ids.size else f"ids {ids.min()} to {ids.max()}, {list(ids.shape)}: "
    return RunFailed(f"ONNX Runtime {ort.__version__} failed to run the graph: {fed}{error}")


def _reserve(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Make an array of zeros that takes a page of memory when it is first written there, and no sooner.

    `np.zeros` asks the kernel for huge pages, so that a few tokens of every head would take the memory of many.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise EnvironmentLacks(
            f"out of memory: a KV cache of {size / 1e9:.1f} GB a layer",
            hint="build the artifact with a smaller max_context or max_batch",
        ) from error
    return np.frombuffer(memory, dtype).reshape(shape)


def grown(buffers: Mapping[str, NDArray[Any]], past_lengths: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """Cut the past out of buffers [B, kv_heads, capacity, head_dim]: each row's at the end of the longest one's."""
    longest = int(past_lengths.max())
    pasts = {}
    for name, buffer in buffers.items():
        pasts[name] = past = np.zeros((*buffer.shape[:2], longest, buffer.shape[3]), buffer.dtype)
        for b, length in enumerate(past_lengths.tolist()):
            past[b, :, longest - length :] = buffer[b, :, :length]
    return pasts


def store_grown(buffer: NDArray[Any], present: NDArray[Any], past_lengths: NDArray[np.int32]) -> None:
    """Copy the slots that a step added at the end of `present` after what each row of `buffer` holds."""
    longest = int(past_lengths.max())
    added = present.shape[2] - longest
    for b, length in enumerate(past_lengths.tolist()):
        buffer[b, :, length : length + added] = present[b, :, longest:]


class _Binding:
    """Inputs and outputs of a session bound to one cache and to arrays that are written in place."""

    def __init__(self, session: ort.InferenceSession, cache: HostCache) -> None:
        self._session = session
        self._binding = session.io_binding()
        for name, buffer in cache.buffers.items():
            value = ort.OrtValue.ortvalue_from_numpy(buffer)  # shares the memory of `buffer` and keeps it alive
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(interface.present_of(name), value)
        self._inputs: dict[str, NDArray[Any]] = {}
        self._out: NDArray[np.float32] | None = None
        self._given: NDArray[np.float32] | None = None

    def give(self, name: str, array: NDArray[np.float32]) -> None:
        """Let steps write the output `name` to `array`."""
        if array is not self._given:
            self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
            self._given = array

    def run(self, feeds: Mapping[str, NDArray[Any]], out: NDArray[np.float32], *, in_place: bool) -> None:
        """Run one step: inputs from `feeds`, logits into `out`, by a copy unless `in_place`."""
        for name, value in feeds.items():
            bound = self._inputs.get(name)
            if bound is not None and bound.shape == value.shape:
                bound[...] = value
                continue
            # Our own copy: `feeds` may hand over an array of the caller, which a later step would write to.
            self._inputs[name] = own = np.array(value, order="C")
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(own))
        if not in_place:
            self._binding.bind_output(interface.LOGITS)
            self._out = None
        elif out is not self._out:
            self._binding.bind_ortvalue_output(interface.LOGITS, ort.OrtValue.ortvalue_from_numpy(out))
            self._out = out
        run_bound(self._session, self._binding, inputs=self._inputs)
        if not in_place:
            out[...] = self._binding.get_outputs()[-1].numpy()  # in the order in which outputs were bound first


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: None) -> Session:
    """Open the engine whose graph is in `file` (llmforge.backends, Provider.session)."""
    return Session(file, config.session.resolve(threads), own_kernels=config.kernels is not None)
