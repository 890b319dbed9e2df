"""A decoder in ONNX Runtime over a device's memory: caches and inputs bound by address, decode steps recorded.

`runtime.backends.session` hands arrays of the host to ONNX Runtime; here caches, inputs and logits lie on a GPU, and
ONNX Runtime is told their addresses. All of it but the provider's own kernels runs on a CPU, too: with `HostDevice`
the same calls bind the host's memory to the CPU provider.

**Recorded steps** (CUDA graphs). A step whose kernels were recorded runs them again in one call, on the addresses that
they had: so a decode step has a fixed number of rows (a bucket), inputs and logits at places that never move, and
`total_sequence_length`, which the host reads and which kernels are chosen by, fixed at the end of its length class. A
step gets the recording of the least class that its longest row fits into. Of ONNX Runtime's CUDA provider, 1.31:

- `gpu_graph_id` of the run options names a recording; -1 records and replays nothing. The first run of a new id runs
  the graph until it is recorded. A session whose nodes do not all run on the GPU is not made at all.
- A recording belongs to the thread that made it. So one thread of this session's own makes every run.
- A replay looks at nothing that is bound to it: neither shapes nor addresses.
"""

from __future__ import annotations

import contextlib
import io
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from llmforge import native
from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.ir import interface
from llmforge.runtime.backends import device_cache
from llmforge.runtime.backends.config import Capture, GraphPlan, RuntimeConfig
from llmforge.runtime.backends.cuda_graph_capture import ONE, Probe, Recording, probe_feeds, prove
from llmforge.runtime.backends.device import Buffer, Device, how_to_install
from llmforge.runtime.backends.device_cache import DeviceCache, Memory
from llmforge.runtime.backends.device_inputs import Inputs, Place
from llmforge.runtime.backends.session import LOAD_FAILURES, SessionConfig, open_graph, session_options
from llmforge.runtime.backends.signature import Signature
from llmforge.runtime.backends.steps import Stepping

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
FLOAT = 1  # TensorProto.DataType of logits
WIDEST_BYTES = 8  # of what is fed for each row of a decode step: int64
UNRECORDED = -1


class DeviceSession(Stepping[DeviceCache]):
    """A decoder graph (docs/dialect.md) in ONNX Runtime, over the memory of `device`.

    Args:
        model: path of `model.onnx`, its external data beside it, or a serialized model.
        config: threads and options of ONNX Runtime.
        device: where it runs.
        provider_options: of ONNX Runtime's provider for that device.
        buckets: numbers of rows that decode steps are padded to, ascending.
        graphs: which decode steps are recorded; None: none.

    Raises:
        InputError: the model cannot be read, or is not a decoder graph.
        UnsupportedError: ONNX Runtime refuses the graph, or it cannot be run here.
        EnvironmentLacks: this ONNX Runtime cannot use the device.
    """

    def __init__(
        self,
        model: Path | bytes,
        config: SessionConfig,
        device: Device,
        *,
        provider_options: Mapping[str, str] | None = None,
        buckets: Sequence[int] = (),
        graphs: GraphPlan | None = None,
    ) -> None:
        self.device = device
        self._buckets = tuple(buckets)
        self._captures = () if graphs is None or graphs.mode == "off" else graphs.captures
        self._required = graphs is not None and graphs.mode == "require"
        where = str(model) if isinstance(model, Path) else "the model in memory"
        # One thread makes all runs, for recordings belong to the thread that made them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"llmforge-{device.kind}")
        self._session = self._on_thread(lambda: self._open(model, config, provider_options or {}, where))
        inputs = [*self._session.get_inputs(), *self._session.get_overridable_initializers()]
        self.signature = signature = Signature.of(inputs, self._session.get_outputs(), where)
        if signature.growing:
            raise UnsupportedError(f"{where}: its caches grow in every step, and only the CPU's session copies them")
        if self._captures and interface.ATTENTION_MASK in signature.inputs:
            raise UnsupportedError(f"{where}: {interface.ATTENTION_MASK} grows with the text, so no step is recorded")
        self.recordings: tuple[Recording, ...] = ()  # of the cache that was allocated last
        self._fed = tuple(name for name in signature.inputs if name not in signature.cache_types)
        self._hosted = self._read_on_host()
        if self._captures and (kept := self._hosted - {interface.TOTAL_SEQUENCE_LENGTH, interface.LOGITS_ROWS}):
            raise UnsupportedError(
                f"{where}: {', '.join(sorted(kept))} is read on the host: a recorded step would keep its first value",
                hint="engine.cuda_graphs: off",
            )
        self._most_rows = most = max((1, *self._buckets, *(capture.batch for capture in self._captures)))
        self._decode_inputs = Inputs(device, self._fed, self._hosted, most * WIDEST_BYTES)
        self._inputs = Inputs(device, self._fed, self._hosted, WIDEST_BYTES)  # of all other steps; grows
        self._decode_logits = device.allocate(most * self.vocabulary * 4)
        self._logits = device.allocate(self.vocabulary * 4)
        self._bindings: weakref.WeakKeyDictionary[Memory, dict[tuple[int, int], _Binding]]
        self._bindings = weakref.WeakKeyDictionary()
        self._recorded: weakref.WeakKeyDictionary[Memory, dict[int, list[tuple[int, int]]]]
        self._recorded = weakref.WeakKeyDictionary()  # batch → (length, id), ascending
        self._last_id = 0  # none is used twice: a recording outlives the cache that it was made for
        self._run_options = {UNRECORDED: _run_options(UNRECORDED)}

    @property
    def buckets(self) -> tuple[int, ...] | None:
        """Batch sizes that decode steps are padded to; None: they run exactly the rows that they need."""
        return self._buckets or None

    @property
    def longest_step(self) -> None:
        """None: a step may have any number of tokens."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Which steps are not recorded though they were planned to be, and why."""
        return tuple(each.note for each in self.recordings if each.obstacle is not None)

    def allocate(self, batch: int, capacity: int) -> DeviceCache:
        """Reserve caches for `batch` sequences of at most `capacity` tokens, and record steps over those that fit.

        Raises:
            EnvironmentLacks: the device has no room for them.
            VerificationError: a step that must be recorded is not.
        """
        cache = device_cache.allocate(self.device, self.signature, batch, capacity)
        if self._captures and all(c.batch <= batch and c.length <= capacity for c in self._captures):
            self._on_thread(lambda: self._record(cache))
        return cache

    def logits_array(self, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        """Make an array for `out` of `step` in memory that the device writes to by itself."""
        array: NDArray[np.float32] = self.device.host(shape, "float32")
        return array

    def _open(self, model: Path | bytes, config: SessionConfig, options: Mapping[str, str], where: str) -> Any:
        """Open the session on its provider: ONNX Runtime goes on with the CPU alone where it cannot load another."""
        entries, provider = session_options(config), PROVIDERS[self.device.kind]
        if self.device.kind == "cpu":
            native.register(entries)
            return open_graph(model, entries, [provider], where)
        said = _preload()
        if provider not in ort.get_available_providers():
            raise EnvironmentLacks(
                f"the installed onnxruntime {ort.__version__} has no {provider}: it is the one for CPUs",
                hint=f"pip uninstall onnxruntime, then {how_to_install()}",
            )
        graphs = {"enable_cuda_graph": "1" if self._captures else "0"}
        own = {"device_id": str(self.device.index), **graphs, **options}
        session = open_graph(model, entries, [(provider, own)], where)
        if provider not in session.get_providers():
            raise EnvironmentLacks(
                f"onnxruntime {ort.__version__} could not load its {provider} on {self.device.name}: "
                f"{said or 'it gives no reason'}",
                hint=f"its libraries must match the driver: {how_to_install()}",
            )
        return session

    def _read_on_host(self) -> set[str]:
        """Name the inputs whose values are read on the host, wherever the graph runs.

        ONNX Runtime copies an input that is bound elsewhere than it is read, once, and never looks at it again.
        """
        if self.device.kind == "cpu":  # where all are: those of GroupQueryAttention on a GPU
            return {interface.TOTAL_SEQUENCE_LENGTH} & set(self._fed)
        infos = zip(self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True)
        return {value.name for value, info in infos if info.name == "Cpu"}

    def _on_thread(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _run_rows(self, *step: Any) -> None:
        run = super()._run_rows
        self._on_thread(lambda: run(*step))

    def _run(
        self,
        feeds: Mapping[str, NDArray[Any]],
        past_lengths: NDArray[np.int32],
        cache: DeviceCache,
        out: NDArray[np.float32],
    ) -> None:
        batch, tokens = feeds[interface.INPUT_IDS].shape
        if tokens == 1 and out.shape[1] == 1 and batch <= self._most_rows:
            length, number = self._recording(cache, int(past_lengths.max()) + 1)
            self._decode(feeds, cache, out, length, number)
        else:
            self._run_long(feeds, cache, out)

    def _recording(self, cache: DeviceCache, longest: int) -> tuple[int | None, int]:
        """Find what was recorded for the rows of `cache` and texts of up to `longest` tokens: its length and id."""
        if cache.start == 0:
            for length, number in self._recorded.get(cache.memory, {}).get(cache.batch, ()):
                if longest <= length:
                    return length, number
        return None, UNRECORDED

    def _decode(
        self,
        feeds: Mapping[str, NDArray[Any]],
        cache: DeviceCache,
        out: NDArray[np.float32],
        length: int | None,
        number: int,
    ) -> None:
        """Run one token of every row at places that never move; kernels are chosen by `length`, if not by the text."""
        if length is not None and interface.TOTAL_SEQUENCE_LENGTH in feeds:
            feeds = {**feeds, interface.TOTAL_SEQUENCE_LENGTH: np.array(length, np.int32)}
        places = self._decode_inputs.fill(feeds)
        self._go(self._binding(cache), places, self._decode_logits, out, number)

    def _run_long(self, feeds: Mapping[str, NDArray[Any]], cache: DeviceCache, out: NDArray[np.float32]) -> None:
        """Run any other step: several tokens, or several rows of logits; never recorded."""
        most = max(value.nbytes for value in feeds.values())
        if most > self._inputs.each_bytes:
            self._inputs = Inputs(self.device, self._fed, self._hosted, most)
        if out.nbytes > self._logits.size:
            self._logits = self.device.allocate(out.nbytes)
        self._go(self._binding(cache), self._inputs.fill(feeds), self._logits, out, UNRECORDED)

    def _binding(self, cache: DeviceCache) -> _Binding:
        bindings = self._bindings.setdefault(cache.memory, {})
        key = (cache.start, cache.batch)
        if key not in bindings:
            bindings[key] = _Binding(self._session, self.device, cache)
        return bindings[key]

    def _go(
        self, binding: _Binding, places: Mapping[str, Place], logits: Buffer, out: NDArray[np.float32], number: int
    ) -> None:
        """Run the graph once the device has its inputs, and bring its logits to `out`."""
        in_place = self.signature.declared_rows in (None, out.shape[1])
        binding.bind_inputs(places)
        binding.bind_logits(logits if in_place else None, out.shape)
        self.device.synchronize()
        options = self._run_options.setdefault(number, _run_options(number))
        self._session.run_with_iobinding(binding.binding, options)  # returns when it is done
        if in_place:
            self.device.read(logits, 0, out)
        else:
            out[...] = binding.binding.get_outputs()[-1].numpy()  # in the order in which outputs were bound first

    def _record(self, cache: DeviceCache) -> None:
        """Record the planned steps over the rows of `cache`, in the order of the plan, and prove each."""
        numbers: dict[int, list[tuple[int, int]]] = {}
        recordings = []
        for capture in self._captures:
            number = self._last_id + capture.id
            probe = self._probe(capture, number, cache.rows(0, capture.batch))
            recording = prove(capture, probe, lambda: self.device.memory()[0], LOAD_FAILURES)
            logger.info("%s", recording)
            if self._required:
                recording.require()
            if recording.obstacle is None:
                numbers.setdefault(capture.batch, []).append((capture.length, number))
            recordings.append(recording)
        self._last_id += max(capture.id for capture in self._captures)
        self._recorded[cache.memory] = {batch: sorted(found) for batch, found in numbers.items()}
        self.recordings = tuple(recordings)

    def _probe(self, capture: Capture, number: int, cache: DeviceCache) -> Probe:
        """Make what runs a probe's step over `cache`."""
        out = np.empty((capture.batch, 1, self.vocabulary), np.float32)

        def feeds(token: int) -> dict[str, NDArray[Any]]:
            return probe_feeds(self.signature, token, capture)

        def probe(token: int, *, recorded: bool, elsewhere: bool = False) -> NDArray[np.float32]:
            which = number if recorded else UNRECORDED
            if not elsewhere:
                self._decode(feeds(token), cache, out, capture.length, which)
                return out.copy()
            self._decode_inputs.fill(feeds(ONE))
            places = Inputs(self.device, self._fed, self._hosted, self._decode_inputs.each_bytes)
            binding = _Binding(self._session, self.device, cache)
            self._go(binding, places.fill(feeds(token)), self._decode_logits, out, which)
            return out.copy()

        return probe


class _Binding:
    """Inputs and outputs of a session bound to the rows of a cache by address."""

    def __init__(self, session: Any, device: Device, cache: DeviceCache) -> None:
        self.binding = session.io_binding()
        self._device = device
        self._inputs: dict[str, Place] = {}
        self._logits: tuple[Buffer | None, tuple[int, ...]] | None = None
        for name, part in cache.memory.parts.items():
            place = (device.kind, device.index, part.onnx, cache.shape(name), cache.address(name))
            self.binding.bind_input(name, *place)
            self.binding.bind_output(interface.present_of(name), *place)

    def bind_inputs(self, places: Mapping[str, Place]) -> None:
        """Bind what has another place or shape than before."""
        for name, place in places.items():
            if self._inputs.get(name) != place:
                kind, index = ("cpu", 0) if place.on_host else (self._device.kind, self._device.index)
                self.binding.bind_input(name, kind, index, place.onnx, place.shape, place.address)
                self._inputs[name] = place

    def bind_logits(self, buffer: Buffer | None, shape: tuple[int, ...]) -> None:
        """Let logits of `shape` go to `buffer`; None: to memory of ONNX Runtime's own."""
        wanted = (buffer, shape if buffer is not None else ())
        if wanted == self._logits:
            return
        kind, index = self._device.kind, self._device.index
        if buffer is None:
            self.binding.bind_output(interface.LOGITS, kind, index)
        else:
            buffer.at(0, int(np.prod(shape)) * 4)
            self.binding.bind_output(interface.LOGITS, kind, index, FLOAT, shape, buffer.address)
        self._logits = wanted


def _run_options(number: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


def _preload() -> str:
    """Load CUDA and cuDNN out of the packages that pip installs; return what ONNX Runtime prints about it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ort.preload_dlls()
    return said.getvalue().strip()


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: Device) -> DeviceSession:
    """Open the engine whose graph is in `file` (llmforge.base.backends, Provider.session)."""
    return DeviceSession(
        file,
        config.session.resolve(threads),
        gpu,
        provider_options=config.provider_options,
        buckets=config.buckets,
        graphs=config.graphs,
    )
