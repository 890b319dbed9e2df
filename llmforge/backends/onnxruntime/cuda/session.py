"""A decoder in ONNX Runtime over a device's memory: caches and inputs bound by address, decode steps as CUDA graphs.

`llmforge.backends.onnxruntime.session` hands arrays of the host to ONNX Runtime; here caches, inputs and logits lie on
a GPU, and ONNX Runtime is told their addresses. Over a device that is the host the same calls bind the host's memory
to the CPU provider.

**CUDA graphs.** A step whose kernels were captured runs them again in one call, on the addresses that they had: so a
decode step has a fixed number of rows (a bucket), inputs and logits at addresses that never change, and
`total_sequence_length`, which the host reads and which kernels are chosen by, fixed at the end of its length class. A
step gets the graph of the least class that its longest row fits into. Of ONNX Runtime's CUDA provider, 1.31:

- `gpu_graph_id` of the run options names a graph; -1 captures and replays nothing. The first run of a new id runs the
  model until it is captured. A session whose nodes do not all run on the GPU is not made at all.
- A graph belongs to the thread that captured it. So one thread of this session's own makes every run.
- A replay looks at nothing that is bound to it: neither shapes nor addresses.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from llmforge import native
from llmforge.backends.onnxruntime.cuda import tensorrt
from llmforge.backends.onnxruntime.cuda.captured import EAGER, CapturedSession
from llmforge.backends.onnxruntime.session import open_graph, run_bound, session_options
from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.ir import interface
from llmforge.ir.interface import Draw
from llmforge.native import nccl
from llmforge.runtime.config import Capture, GraphPlan, RuntimeConfig, SessionConfig
from llmforge.runtime.device import cache as device_cache
from llmforge.runtime.device.backend import LOGIT_BYTES
from llmforge.runtime.device.cache import DeviceCache
from llmforge.runtime.device.cuda import Buffer, Device, how_to_install
from llmforge.runtime.device.graph_capture import ONE, CaptureProbe, probe_inputs
from llmforge.runtime.device.inputs import BoundInput
from llmforge.runtime.device.top_logits import TopLogitsBuffers
from llmforge.runtime.interface import DecodeRun, StepInputs
from llmforge.runtime.prefill_shapes import SHAPES, pieces, together
from llmforge.runtime.signature import Signature

T = TypeVar("T")
logger = logging.getLogger(__name__)

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
FLOAT = 1  # TensorProto.DataType of logits
WARM_S = 30.0  # that prefills of all shapes may take at load, before a warning says that they took longer
# Of an input of a decode step, for each row, at most: `interface.Draw` in fp32.
DECODE_BYTES = 4 * len(Draw._fields)


class DeviceSession(CapturedSession[DeviceCache]):
    """A decoder graph (docs/dialect.md) in ONNX Runtime, over the memory of `device`.

    Args:
        model: path of `model.onnx`, its external data beside it, or a serialized model.
        config: threads and options of ONNX Runtime.
        device: where it runs.
        provider_options: of ONNX Runtime's provider for that device.
        buckets: numbers of rows that decode steps are padded to, ascending.
        graphs: which decode steps are captured; None: none.
        shapes: numbers of tokens that steps of several are padded to, ascending; none: they run as they are. All, and
            those of several prompts (`prefill_shapes.together`), run once when a cache is allocated; where one fails,
            the graph is opened again with flash attention alone (`sdpa_kernel` 1), and `notes` say so.

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
        shapes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(device, buckets, graphs, provider_options)
        self._shapes = shapes
        self.longest_step = max(shapes, default=None)
        where = str(model) if isinstance(model, Path) else "the model in memory"
        self._opens = lambda: open_on(device, model, config, self._options, where, graphs=bool(self._captures))
        self._session = self._on_thread(self._opens)
        inputs = [*self._session.get_inputs(), *self._session.get_overridable_initializers()]
        self.signature = signature = Signature.of(inputs, self._session.get_outputs(), where)
        if signature.growing:
            raise UnsupportedError(f"{where}: its caches grow in every step, and only the CPU's session copies them")
        if self._captures and interface.ATTENTION_MASK in signature.inputs:
            raise UnsupportedError(f"{where}: {interface.ATTENTION_MASK} grows with the text, so no step is recorded")
        self._prepare_buffers(interface.TOTAL_SEQUENCE_LENGTH, where)
        if self._pads and signature.chooses_by_row:
            self.prompt_shapes = tuple(shape for shape in together(shapes) if shape[0] <= self._most_rows)
        self._decode_inputs = self._input_buffers(self._most_rows * DECODE_BYTES, sets=2)
        self._bindings = weakref.WeakKeyDictionary()  # by first row and number of rows

    def allocate(self, batch: int, capacity: int) -> DeviceCache:
        """Reserve caches for `batch` sequences of at most `capacity` tokens, and capture steps over those that fit.

        Raises:
            EnvironmentLacks: the device has no room for them.
            VerificationError: a step that must be captured is not.
            RunFailed: a prefill of one of the shapes fails, with flash attention alone, too.
        """
        cache = device_cache.allocate(self.device, self.signature, batch, capacity)

        def prepare() -> None:
            if self._pads:
                self._warm(cache)
            if self._captures_fit(batch, capacity):
                self._on_thread(lambda: self._capture(cache))

        self._run_or_without_cudnn(prepare)
        return cache

    @property
    def _pads(self) -> bool:
        """Whether steps of several tokens are padded: where the graph can pick the row that is wanted."""
        return bool(self._shapes) and not self.signature.gives_all_rows and self.signature.declared_rows is None

    def _warm(self, cache: DeviceCache) -> None:
        """Run a step of each shape, so that none waits for its kernels while somebody waits for it."""
        start = time.perf_counter()
        self._run_shapes(cache)
        seconds = time.perf_counter() - start
        level = logging.WARNING if seconds > WARM_S else logging.INFO
        named = [*map(str, self._shapes), *(f"{rows} x {tokens}" for rows, tokens in self.prompt_shapes)]
        logger.log(level, "prefills of %s tokens ran once in %.1f s", ", ".join(named), seconds)

    def _run_shapes(self, cache: DeviceCache) -> None:
        for rows, tokens in (*((1, shape) for shape in reversed(self._shapes)), *self.prompt_shapes):
            if rows <= cache.batch and tokens <= cache.capacity:
                self.step(StepInputs(np.zeros((rows, tokens), np.int64), np.zeros(rows, np.int32)), cache.rows(0, rows))

    def _run_together(self, inputs: StepInputs, cache: DeviceCache, out: NDArray[np.float32]) -> None:
        run = super()._run_together
        self._guessed_rows = 0
        self._on_thread(lambda: run(inputs, cache, out))

    def _run(self, inputs: StepInputs, cache: DeviceCache, out: NDArray[np.float32]) -> None:
        batch, tokens = inputs.ids.shape
        if self._pads and tokens > 1 and (batch, tokens) not in self.prompt_shapes:
            self._run_pieces(inputs, cache, out)
            return
        if tokens == 1 and out.shape[1] == 1 and batch <= self._most_rows:
            length, graph_id = self._find_graph(cache, int(inputs.past_lengths.max()) + 1)
            self._decode(inputs, cache, out, length, graph_id)
        else:
            self._run_long(self._feeds(inputs), cache, out)

    def begin_decode(self, inputs: StepInputs, cache: DeviceCache) -> DecodeRun:
        """Begin a step of one token a row, as `step` runs it; arrays are read before this returns."""
        self._check(inputs, cache)
        if self._runs is None or inputs.ids.shape[1] != 1 or cache.batch > self._most_rows:
            raise ValueError(f"a step of {inputs.ids.shape}; top logits of one token for up to {self._most_rows} rows")
        self._require_guesses(inputs.ids)
        found = self._find_graph(cache, int(inputs.past_lengths.max()) + 1)
        self._runs.make_room()
        staged = self._decode_inputs.stage(self._decode_feeds(inputs, found[0]))
        shape = (cache.batch, 1, self.vocabulary)

        def launch() -> None:
            self._decode_inputs.send(staged)
            self._launch_in_place(self._binding(cache), staged.bound, self._decode_logits, shape, found[1])

        self._guessed_rows = cache.batch if self.guesses_tokens else 0
        return self._runs.begin(launch, cache.batch)

    def begin_prompts(self, inputs: StepInputs, cache: DeviceCache) -> DecodeRun:
        """Begin a step of pieces of several prompts, of one of `prompt_shapes`; arrays are read before this returns."""
        self._check_prompts(inputs, cache)
        assert self._runs is not None
        self._runs.make_room()
        bound, shape = self._upload_long(self._feeds(inputs)), (cache.batch, 1, self.vocabulary)
        self._reserve_logits(shape)
        logits = self._logits
        self._guessed_rows = 0
        return self._runs.begin(
            lambda: self._launch_in_place(self._binding(cache), bound, logits, shape, EAGER), cache.batch, logits
        )

    def _find_graph(self, cache: DeviceCache, longest: int) -> tuple[int | None, int]:
        """Find the CUDA graph for the rows of `cache` and texts of up to `longest` tokens: its length and id."""
        return self._graph_of(cache.memory, cache.batch, longest) if cache.start == 0 else (None, EAGER)

    def _decode(
        self,
        inputs: StepInputs,
        cache: DeviceCache,
        out: NDArray[np.float32],
        length: int | None,
        graph_id: int,
    ) -> None:
        """Run one token of every row at fixed addresses; kernels are chosen by `length`, if not by the text."""
        bound = self._upload_decode(inputs, length)
        self._execute(self._binding(cache), bound, self._decode_logits, out, graph_id)

    def _upload_decode(self, inputs: StepInputs, length: int | None) -> dict[str, BoundInput]:
        """Bring inputs of a decode step to their addresses, when all others have been copied."""
        self.device.synchronize()
        return self._decode_inputs.upload(self._decode_feeds(inputs, length))

    def _decode_feeds(self, inputs: StepInputs, length: int | None) -> dict[str, NDArray[Any]]:
        feeds = self._feeds(inputs)
        if length is not None and interface.TOTAL_SEQUENCE_LENGTH in feeds:
            feeds[interface.TOTAL_SEQUENCE_LENGTH] = np.array(length, np.int32)
        return feeds

    def _feeds(self, inputs: StepInputs) -> dict[str, NDArray[Any]]:
        """Make what lies in input buffers."""
        feeds = inputs.feeds(self.signature)
        feeds.pop(interface.CHOSEN_IDS, None)
        return feeds

    def _run_pieces(self, inputs: StepInputs, cache: DeviceCache, out: NDArray[np.float32]) -> None:
        """Run several tokens of every row in pieces of the few shapes."""
        ids, (batch, tokens) = inputs.ids, inputs.ids.shape
        wanted = np.arange(tokens)[[-1] if inputs.rows is None else inputs.rows]
        own = np.full(batch, tokens) if inputs.lengths is None else inputs.lengths
        whole = inputs.past_lengths + own if inputs.text_lengths is None else inputs.text_lengths
        room = cache.capacity - int(inputs.past_lengths.max())
        for piece in pieces(tokens, room, self._shapes):
            padded = np.zeros((batch, piece.padded), np.int64)
            padded[:, : piece.tokens] = ids[:, piece.start : piece.start + piece.tokens]
            places = np.flatnonzero((wanted >= piece.start) & (wanted < piece.start + piece.tokens))
            rows = wanted[places] - piece.start if len(places) else np.array([piece.tokens - 1])
            lengths = np.clip(own - piece.start, 0, piece.tokens)
            past = (inputs.past_lengths + piece.start).astype(np.int32)
            made = out if len(places) == out.shape[1] else np.empty((batch, len(rows), self.vocabulary), np.float32)
            one = StepInputs(padded, past, rows, lengths, whole, inputs.adapters)
            self._run_long(self._feeds(one), cache, made)
            if made is not out and len(places):
                out[:, places] = made

    def _run_long(self, feeds: Mapping[str, NDArray[Any]], cache: DeviceCache, out: NDArray[np.float32]) -> None:
        """Run any other step: several tokens, or several rows of logits; never a CUDA graph."""
        bound = self._upload_long(feeds)
        self._reserve_logits(out.shape)
        self._execute(self._binding(cache), bound, self._logits, out, EAGER)

    def _upload_long(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, BoundInput]:
        """Bring inputs of a step of several tokens to their addresses."""
        most = max(value.nbytes for value in feeds.values())
        if most > self._inputs.each_bytes:
            self._inputs = self._input_buffers(most)
        return self._inputs.upload(feeds)

    def _reserve_logits(self, shape: tuple[int, ...]) -> None:
        """Make room for logits of a step of several tokens."""
        size = math.prod(shape) * LOGIT_BYTES
        if size > self._logits.size:
            self._logits = self.device.allocate(size)

    def _binding(self, cache: DeviceCache) -> Binding:
        bindings: dict[tuple[int, int], Binding] = self._bindings.setdefault(cache.memory, {})
        key = (cache.start, cache.batch)
        if key not in bindings:
            bindings[key] = self._new_binding(cache)
        return bindings[key]

    def _new_binding(self, cache: DeviceCache) -> Binding:
        binding = Binding(self._session, self.device, cache)
        if self._top_logits is not None:
            binding.bind_top_logits(self._top_logits, cache.batch)
        return binding

    def _execute(
        self,
        binding: Binding,
        inputs: Mapping[str, BoundInput],
        logits: Buffer,
        out: NDArray[np.float32],
        graph_id: int,
    ) -> None:
        """Run the graph once the device has its inputs, and bring its logits to `out`."""
        if self._launch(binding, inputs, logits, out.shape, graph_id):
            self.device.read(logits, 0, out)
        else:
            self.device.synchronize()
            out[...] = binding.binding.get_outputs()[-1].numpy()  # in the order in which outputs were bound first

    def _launch(
        self,
        binding: Binding,
        inputs: Mapping[str, BoundInput],
        logits: Buffer,
        shape: tuple[int, ...],
        graph_id: int,
    ) -> bool:
        """Send the graph to the device, after its inputs; say whether its logits of `shape` will be in `logits`."""
        in_place = self.signature.declared_rows in (None, shape[1])
        binding.bind_inputs(inputs)
        binding.bind_logits(logits if in_place else None, shape)
        run_bound(self._session, binding.binding, run_options(graph_id, waits=self.device.stream is None))
        return in_place

    def _launch_in_place(self, *step: Any) -> None:
        """Send the graph to the device, as `_launch` does, for one row of logits of each text."""
        in_place = self._launch(*step)
        assert in_place  # what declares other rows has top logits of none

    def _capture(self, cache: DeviceCache) -> None:
        """Capture the planned steps over the rows of `cache`."""
        self._capture_all(
            cache.memory, lambda capture, graph_id: self._probe(capture, graph_id, cache.rows(0, capture.batch))
        )

    def _probe(self, capture: Capture, graph_id: int, cache: DeviceCache) -> CaptureProbe:
        """Make what runs a probe's step over `cache`."""
        out = np.empty((capture.batch, 1, self.vocabulary), np.float32)

        def probe(token: int, *, graph: bool, moved: bool = False) -> NDArray[np.float32]:
            which, inputs = graph_id if graph else EAGER, probe_inputs(token, capture)
            if not moved:
                self._decode(inputs, cache, out, capture.length, which)
                return out.copy()
            self._upload_decode(probe_inputs(ONE, capture), None)
            other = self._input_buffers(self._decode_inputs.each_bytes)
            bound = other.upload(self._feeds(inputs))
            self._execute(self._new_binding(cache), bound, self._decode_logits, out, which)
            return out.copy()

        return probe


def open_on(
    device: Device, model: Path | bytes, config: SessionConfig, options: Mapping[str, str], where: str, *, graphs: bool
) -> Any:
    """Open a session on the provider of `device`: ONNX Runtime goes on with the CPU where it cannot load another.

    Raises what `DeviceSession` raises.
    """
    entries, provider = session_options(config), PROVIDERS[device.kind]
    if device.kind == "cpu" or nccl.joined() is not None:
        native.register(entries)
    if device.kind == "cpu":
        return open_graph(model, entries, [provider], where)
    said = _preload()
    if provider not in ort.get_available_providers():
        raise EnvironmentLacks(
            f"the installed onnxruntime {ort.__version__} has no {provider}: it is the CPU package",
            hint=f"pip uninstall onnxruntime, then {how_to_install()}",
        )
    compiled, rest = tensorrt.split(options)
    own = {
        "device_id": str(device.index),
        "enable_cuda_graph": "1" if graphs else "0",
        "user_compute_stream": str(device.stream),
        **rest,
    }
    providers: list[Any] = [(provider, own)]
    if compiled:
        tensorrt.require_here()
        providers.insert(0, tensorrt.provider(compiled, device.index, device.stream))
    session = open_graph(model, entries, providers, where)
    if provider not in session.get_providers():
        raise EnvironmentLacks(
            f"onnxruntime {ort.__version__} could not load its {provider} on {device.name}: "
            f"{said or 'it gives no reason'}",
            hint=f"its libraries must match the driver: {how_to_install()}",
        )
    if compiled:
        tensorrt.require_loaded(session, said)
    return session


class Binding:
    """Inputs and outputs of a session bound to the rows of a cache by address."""

    def __init__(self, session: Any, device: Device, cache: DeviceCache) -> None:
        self.binding = session.io_binding()
        self._device = device
        self._inputs: dict[str, BoundInput] = {}
        self._logits: tuple[Buffer | None, tuple[int, ...]] | None = None
        self._top_rows = 0
        for name, tensor in cache.memory.tensors.items():
            where = (device.kind, device.index, tensor.onnx, cache.shape(name), cache.address(name))
            self.binding.bind_input(name, *where)
            self.binding.bind_output(interface.present_of(name), *where)

    def bind_inputs(self, inputs: Mapping[str, BoundInput]) -> None:
        """Bind what has another address or shape than before."""
        for name, bound in inputs.items():
            if self._inputs.get(name) != bound:
                kind, index = ("cpu", 0) if bound.on_host else (self._device.kind, self._device.index)
                self.binding.bind_input(name, kind, index, bound.onnx, bound.shape, bound.address)
                self._inputs[name] = bound

    def bind_logits(self, buffer: Buffer | None, shape: tuple[int, ...]) -> None:
        """Let logits of `shape` go to `buffer`; None: to memory of ONNX Runtime's own, which it reserves anew."""
        kind, index = self._device.kind, self._device.index
        if buffer is None:  # what the step before left there has its shape, which no other step may have
            self.binding.bind_output(interface.LOGITS, kind, index)
        elif (buffer, shape) != self._logits:
            buffer.at(0, int(np.prod(shape)) * LOGIT_BYTES)
            self.binding.bind_output(interface.LOGITS, kind, index, FLOAT, shape, buffer.address)
        self._logits = (buffer, shape)

    def bind_top_logits(self, buffers: TopLogitsBuffers, rows: int) -> None:
        """Let top logits of so many rows go to `buffers`; where they have no room, to memory of ONNX Runtime's own."""
        if rows == self._top_rows:
            return
        kind, index = self._device.kind, self._device.index
        for name, onnx, shape, address in buffers.outputs(rows):
            where = (onnx, shape, address) if rows <= buffers.most_rows else ()
            self.binding.bind_output(name, kind, index, *where)
        self.bind_inputs(buffers.chosen_ids())
        self._top_rows = rows


@functools.cache
def run_options(graph_id: int, *, waits: bool) -> ort.RunOptions:
    """Make the options of a run through a CUDA graph, or `EAGER`, that `waits` for the device or returns before."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    if not waits:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def _preload() -> str:
    """Load CUDA and cuDNN out of the packages that pip installs; return what ONNX Runtime prints about it.

    ONNX Runtime looks for those packages beside its own (1.31): where they are on the path elsewhere, as under an
    environment that another one extends, it is told where.
    """
    nvidia = importlib.util.find_spec("nvidia")
    folders = [] if nvidia is None else [Path(each) for each in nvidia.submodule_search_locations or ()]
    beside = Path(ort.__file__).parents[1] / "nvidia"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for folder in (each for each in folders if each != beside):
            for libraries in sorted(folder.glob("cu[0-9]*/lib")):
                ort.preload_dlls(cudnn=False, msvc=False, directory=str(libraries))
            if (libraries := folder / "cudnn" / "lib").is_dir():
                ort.preload_dlls(cuda=False, msvc=False, directory=str(libraries))
        said.truncate(said.seek(0))  # what is missing in one folder may be in the next: the last call tells
        ort.preload_dlls()
    return said.getvalue().strip()


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: Device) -> DeviceSession:
    """Open the engine whose graph is in `file` (llmforge.backends, Provider.session)."""
    return DeviceSession(
        file,
        config.session.resolve(threads),
        gpu,
        provider_options=config.provider_options,
        buckets=config.buckets,
        graphs=config.graphs,
        shapes=SHAPES,
    )
