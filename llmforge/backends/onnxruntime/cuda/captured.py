"""A session of ONNX Runtime whose decode steps are CUDA graphs: what rows and blocks of caches have in common."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmforge.backends.onnxruntime.cuda.decode_runs import DecodeRuns
from llmforge.base.errors import ForgeError, RunFailed, UnsupportedError, VerificationError
from llmforge.ir import interface
from llmforge.runtime.config import Capture, GraphPlan
from llmforge.runtime.device.backend import INPUT_BYTES, LOGIT_BYTES, DeviceDecoder
from llmforge.runtime.device.cache import CacheMemory
from llmforge.runtime.device.cuda import Device, nothing_freed
from llmforge.runtime.device.graph_capture import CaptureProbe
from llmforge.runtime.device.inputs import InputBuffers
from llmforge.runtime.device.top_logits import TopLogitsBuffers
from llmforge.runtime.interface import C

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Provider option: which attention kernels may run, as a sum: 1 flash, 2 memory-efficient, 8 cuDNN, 16 unfused.
_SDPA_KERNEL, _FLASH = "sdpa_kernel", "1"
_ATTENTION = frozenset({"GroupQueryAttention", "PagedAttention"})
EAGER = -1  # the `gpu_graph_id` of steps that are no CUDA graph


class CapturedSession(DeviceDecoder[C], Generic[C]):
    """A decoder in ONNX Runtime whose decode steps may be captured: one thread makes all runs, and finds their graphs.

    A subclass gives `_opens`, with `_options` of the provider, and opens `_session` with it.
    """

    _session: Any
    _opens: Callable[[], Any]
    _bindings: weakref.WeakKeyDictionary[CacheMemory, Any]

    def __init__(
        self,
        device: Device,
        buckets: Sequence[int],
        graphs: GraphPlan | None,
        provider_options: Mapping[str, str] | None,
    ) -> None:
        self.device = device
        self._options = dict(provider_options or {})
        self._without_cudnn: str | None = None  # why
        self.buckets = tuple(buckets)
        self._top_logits: TopLogitsBuffers | None = None
        self._runs: DecodeRuns | None = None
        self._captures = () if graphs is None or graphs.mode == "off" else graphs.captures
        self._graphs_required = graphs is not None and graphs.mode == "require"
        # One thread makes all runs, for CUDA graphs belong to the thread that captured them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"llmforge-{device.kind}")
        self._graphs: weakref.WeakKeyDictionary[CacheMemory, dict[int, list[tuple[int, int]]]]
        self._graphs = weakref.WeakKeyDictionary()  # batch → (length, id), ascending
        self._guessed_rows = 0  # of the step begun last, whose guesses the next one may take
        self._last_id = 0  # none is used twice: a graph outlives the cache that it was captured over

    def _prepare_buffers(self, read_on_hosts: str, where: str) -> None:
        """Make room for inputs and logits of steps, as the signature says; `read_on_hosts` is so on any device."""
        signature = self.signature
        fixed = {*signature.cache_types, interface.CHOSEN_IDS}
        self._input_names = tuple(name for name in signature.inputs if name not in fixed)
        self._host_inputs = self._find_host_inputs(self._input_names, read_on_hosts, where)
        self._most_rows = most = max((1, *self.buckets, *(capture.batch for capture in self._captures)))
        self._inputs = self._input_buffers(INPUT_BYTES)  # of steps that do not decode; grows
        self._decode_logits = self.device.allocate(most * self.vocabulary * LOGIT_BYTES)
        self._logits = self.device.allocate(self.vocabulary * LOGIT_BYTES)  # of others; grows
        if signature.gives_top_logits:
            self._top_logits = TopLogitsBuffers(self.device, most, self.vocabulary, guesses=signature.gives_next_ids)
            self._runs = DecodeRuns(self.device, self._thread, self._top_logits, self._decode_logits)

    def _input_buffers(self, each_bytes: int, sets: int = 1) -> InputBuffers:
        return InputBuffers(self.device, self._input_names, self._host_inputs, each_bytes, sets=sets)

    @property
    def decodes_ahead(self) -> bool:
        """Whether the graph gives top logits."""
        return self._top_logits is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Which steps are not captured though they were planned to be, and what attention goes without; and why."""
        without = () if self._without_cudnn is None else (f"attention runs without cuDNN: {self._without_cudnn}",)
        return (*super().notes, *without)

    def _run_or_without_cudnn(self, run: Callable[[], None]) -> None:
        """Make a run; where attention fails, once more with the graph opened again with flash attention alone.

        The first session ends before the second is made: a device need not have room for the weights of both.

        Raises:
            RunFailed, VerificationError: something else fails, or attention without cuDNN, too.
        """
        try:
            run()
            return
        except (RunFailed, VerificationError) as error:
            blamed = {*_ATTENTION, None} if isinstance(error, RunFailed) else _ATTENTION
            if _SDPA_KERNEL in self._options or self.device.sm is None or failed_operator(error) not in blamed:
                raise
            self._without_cudnn = error.message
        self._options[_SDPA_KERNEL] = _FLASH
        logger.warning("%s", self.notes[-1])
        self._bindings.clear()
        self._graphs.clear()
        self._on_thread(self._end_session)
        self._session = self._on_thread(self._opens)
        run()

    def _end_session(self) -> None:
        self._session = None
        gc.collect()  # what failed may hold it in a cycle

    def _captures_fit(self, batch: int, capacity: int) -> bool:
        """Say whether there are planned captures, and a cache of so many rows and tokens has room for all."""
        return bool(self._captures) and all(c.batch <= batch and c.length <= capacity for c in self._captures)

    @property
    def guesses_tokens(self) -> bool:
        """Whether the graph guesses tokens, too."""
        return self.signature.gives_next_ids

    def _on_thread(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _require_guesses(self, ids: NDArray[np.int64]) -> None:
        """Return if the step before has guessed what negative `ids` take."""
        row = -1 - int(ids.min())
        if row >= self._guessed_rows:
            raise ValueError(f"an id takes the guess of row {row}, of a step before of {self._guessed_rows}")

    def _find_host_inputs(self, names: Sequence[str], always: str, where: str) -> set[str]:
        """Name those of `names` that are read on the host, `always` on any device.

        Raises:
            UnsupportedError: a captured step would keep the first value of one.
        """
        found = read_on_host(self._session, self.device, always) & set(names)
        if self._captures and (frozen := found - {always, interface.LOGITS_ROWS}):
            raise UnsupportedError(
                f"{where}: {', '.join(sorted(frozen))} is read on the host: a recorded step would keep its first value",
                hint="engine.cuda_graphs: off",
            )
        return found

    def _graph_of(self, memory: CacheMemory, batch: int, longest: int) -> tuple[int | None, int]:
        """Find the CUDA graph of `batch` rows for texts of up to `longest` tokens: its length and id."""
        for length, graph_id in self._graphs.get(memory, {}).get(batch, ()):
            if longest <= length:
                return length, graph_id
        return None, EAGER

    def _capture_all(self, memory: CacheMemory, probe_of: Callable[[Capture, int], CaptureProbe]) -> None:
        """Capture the planned steps over `memory`, in the order of the plan, and verify each by its probe."""
        graphs: dict[int, list[tuple[int, int]]] = {}
        self.capture_results = ()
        with nothing_freed():
            for capture in self._captures:
                graph_id = self._last_id + capture.id
                if self._verify_capture(capture, probe_of(capture, graph_id)).reason is None:
                    graphs.setdefault(capture.batch, []).append((capture.length, graph_id))
        self._last_id += max(capture.id for capture in self._captures)
        self._graphs[memory] = {batch: sorted(found) for batch, found in graphs.items()}


def failed_operator(error: ForgeError) -> str | None:
    """Read the operator whose kernel failed out of what ONNX Runtime says of a run; None: it does not say."""
    found = re.search(r"while running (\w+) node", error.message)
    return None if found is None else found[1]


def read_on_host(session: Any, device: Device, always: str) -> set[str]:
    """Name the inputs whose values are read on the host, wherever the graph runs.

    ONNX Runtime copies an input that is bound elsewhere than it is read, once, and never looks at it again. On a CPU,
    where all are, they are those that a GPU's kernels read there: `always`.
    """
    if device.kind == "cpu":
        return {always}
    infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return {value.name for value, info in infos if info.name == "Cpu"}
