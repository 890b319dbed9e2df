"""A decoder in a plan of TensorRT or TensorRT-RTX, over a GPU's memory.

A plan has two optimization profiles over one graph: prefill, one row of up to a chunk of tokens, and decode, rows of
one token each. A profile is used through an execution context; all contexts share one piece of memory for what they
compute, for one step runs at a time. Past and present of a cache are one tensor in place, bound at one address; its
capacity is a number of the plan's. A write beyond it would be dropped without a word, so bounds are checked before a
step.

**Recorded steps** (CUDA graphs). TensorRT's work for a decode step is recorded from the stream, with a context of its
own for every number of rows, and proved like any other (`cuda_graph_capture`).
TensorRT-RTX records by itself.

What is verified without a GPU is all that is decided here, against stand-ins for the library and for CUDA; the
library's names are checked against the installed bindings.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import EnvironmentLacks, UnsupportedError
from llmforge.ir import interface
from llmforge.runtime.backends import device_cache
from llmforge.runtime.backends.config import Capture, RuntimeConfig
from llmforge.runtime.backends.cuda_graph_capture import ONE, Probe, Recording, probe_feeds, prove
from llmforge.runtime.backends.device import Buffer, CudaDevice, CudaGraph
from llmforge.runtime.backends.device_cache import DeviceCache, Memory
from llmforge.runtime.backends.device_inputs import ALIGNMENT_BYTES, Inputs, Place
from llmforge.runtime.backends.signature import Signature
from llmforge.runtime.backends.steps import Stepping
from llmforge.runtime.backends.tensorrt_plan import (
    Plan,
    bucket_sizes,
    check_caches,
    check_profiles,
    open_plan,
    read_tensors,
)

logger = logging.getLogger(__name__)

WIDEST_BYTES = 8  # of what is fed for each row and token of a step: int64
FLOAT_BYTES = 4


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A recorded decode step, with the context whose work it is."""

    context: Any
    graph: CudaGraph


class PlanSession(Stepping[DeviceCache]):
    """A decoder in a deserialized plan (`llmforge.runtime.backends.interface.Backend`).

    Args:
        plan: the plan.
        config: what the artifact says of it.
        device: where it runs.

    Raises:
        InputError: the plan is not what `config` says.
        UnsupportedError: the plan does not write its caches in place, or its steps cannot be shown to be recorded.
    """

    rows_alone = True  # the profile of prompts has one row

    def __init__(self, plan: Plan, config: RuntimeConfig, device: CudaDevice) -> None:
        self.device, self._plan = device, plan
        inputs, outputs = read_tensors(plan)
        self.signature = signature = Signature.of(inputs, outputs, plan.where)
        check_caches(plan, inputs, config.max_context)
        prefill, decode = check_profiles(plan, config)
        self._capacity = config.max_context
        self._most_tokens = plan.facts.profiles[prefill].max_sequence
        self._most_rows = most_rows = plan.facts.profiles[decode].max_batch
        # TensorRT-RTX records decode steps by itself, and does not tell.
        self._records_itself = hasattr(plan.api, "CudaGraphStrategy")
        mode = "allow" if config.graphs is None else config.graphs.mode
        if mode == "require" and self._records_itself:
            raise UnsupportedError(
                f"{plan.where}: {plan.title} records steps by itself and does not say which",
                hint="engine.cuda_graphs: allow",
            )
        self._required, self._recording = mode == "require", mode != "off"
        self._buckets = (config.buckets or bucket_sizes(most_rows)) if self._recording else config.buckets
        self._fed = tuple(name for name in signature.inputs if name not in signature.cache_types)
        host = plan.api.TensorLocation.HOST
        self._hosted = {name for name in self._fed if plan.engine.get_tensor_location(name) == host}
        self._scratch = device.allocate(max(1, plan.engine.device_memory_size_v2))
        self._decode_profile = decode
        self._prefill = self._context(prefill, recorded=False)
        self._decode = self._context(decode, recorded=self._recording)
        self._decode_inputs = Inputs(device, self._fed, self._hosted, most_rows * WIDEST_BYTES)
        self._inputs = Inputs(device, self._fed, self._hosted, self._most_tokens * WIDEST_BYTES)
        self._decode_logits = device.allocate(most_rows * self.vocabulary * FLOAT_BYTES)
        self._logits = device.allocate(self.vocabulary * FLOAT_BYTES)  # grows
        self._recorded: weakref.WeakKeyDictionary[Memory, dict[int, _Recorded]] = weakref.WeakKeyDictionary()
        self.recordings: tuple[Recording, ...] = ()  # of the cache that was allocated last

    @property
    def buckets(self) -> tuple[int, ...] | None:
        """Batch sizes that decode steps are padded to; None: they run exactly the rows that they need."""
        return self._buckets or None

    @property
    def longest_step(self) -> int:
        """Most tokens that a row may run in one step: those of the prefill profile."""
        return self._most_tokens

    @property
    def notes(self) -> tuple[str, ...]:
        """Which steps are not recorded, and why."""
        return tuple(each.note for each in self.recordings if each.obstacle is not None)

    def allocate(self, batch: int, capacity: int) -> DeviceCache:
        """Reserve caches for `batch` sequences of at most `capacity` tokens; steps run over the plan's capacity alone.

        Raises:
            EnvironmentLacks: the device has no room for them.
            UnsupportedError: rows would begin at addresses that TensorRT does not take.
            VerificationError: a step that must be recorded is not.
        """
        cache = device_cache.allocate(self.device, self.signature, batch, capacity)
        if capacity != self._capacity:
            return cache
        for name, part in cache.memory.parts.items():
            if batch > 1 and part.row_bytes % ALIGNMENT_BYTES:
                raise UnsupportedError(
                    f"a row of {name} has {part.row_bytes} bytes, and TensorRT takes addresses that are multiples of "
                    f"{ALIGNMENT_BYTES}",
                    hint="build with another engine.max_context: a multiple of 128 always fits",
                )
        if self._recording and not self._records_itself and batch >= self._buckets[-1]:
            self._record(cache)
        return cache

    def logits_array(self, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        """Make an array for `out` of `step` in memory that the device writes to by itself."""
        array: NDArray[np.float32] = self.device.host(shape, "float32")
        return array

    def _check(self, ids: NDArray[np.int64], past_lengths: NDArray[np.int32], cache: DeviceCache) -> None:
        if cache.capacity != self._capacity or ids.shape[1] > self._most_tokens or len(ids) > self._most_rows:
            raise ValueError(
                f"ids {ids.shape} and a cache of {cache.capacity} tokens; the plan takes {self._most_rows} rows, "
                f"{self._most_tokens} tokens of one, and caches of {self._capacity}"
            )
        super()._check(ids, past_lengths, cache)

    def _context(self, profile: int, *, recorded: bool) -> Any:
        """Make a context for a profile, in the memory that all of them share."""
        api, engine = self._plan.api, self._plan.engine
        allocation = api.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._records_itself:
            settings = engine.create_runtime_config()
            settings.set_execution_context_allocation_strategy(allocation)
            strategy = api.CudaGraphStrategy
            settings.cuda_graph_strategy = strategy.WHOLE_GRAPH_CAPTURE if recorded else strategy.DISABLED
            context = engine.create_execution_context(settings)
        else:
            context = engine.create_execution_context(allocation)
        if context is None:
            raise EnvironmentLacks(f"no execution context on {self.device.name}: {self._plan.complaint}")
        context.set_device_memory(self._scratch.address, self._scratch.size)
        self._must(context.set_optimization_profile_async(profile, self.device.stream), f"profile {profile}")
        self.device.synchronize()
        return context

    def _run(
        self,
        feeds: Mapping[str, NDArray[Any]],
        past_lengths: NDArray[np.int32],
        cache: DeviceCache,
        out: NDArray[np.float32],
    ) -> None:
        """Run the plan on `feeds`; it gives exactly the logits of `out`."""
        batch, tokens = feeds[interface.INPUT_IDS].shape
        if tokens > 1 or out.shape[1] > 1:
            if out.nbytes > self._logits.size:
                self._logits = self.device.allocate(out.nbytes)
            self._bind(self._prefill, self._inputs.fill(feeds), cache, self._logits, out)
            self._go(self._prefill)
            self.device.read(self._logits, 0, out)
            return
        places = self._decode_inputs.fill(feeds)
        recorded = self._recorded.get(cache.memory, {}).get(batch) if cache.start == 0 else None
        if recorded is None:
            self._bind(self._decode, places, cache, self._decode_logits, out)
            self._go(self._decode)
        else:
            self.device.replay(recorded.graph)
        self.device.read(self._decode_logits, 0, out)

    def _bind(
        self, context: Any, places: Mapping[str, Place], cache: DeviceCache, logits: Buffer, out: NDArray[np.float32]
    ) -> None:
        """Tell a context the shapes and addresses of all inputs and outputs."""
        for name, place in places.items():
            self._must(context.set_input_shape(name, place.shape), f"{name} {place.shape}")
            self._must(context.set_tensor_address(name, place.address), name)
        for name in cache.memory.parts:
            self._must(context.set_input_shape(name, cache.shape(name)), f"{name} {cache.shape(name)}")
            for bound in (name, interface.present_of(name)):
                self._must(context.set_tensor_address(bound, cache.address(name)), bound)
        self._must(context.set_tensor_address(interface.LOGITS, logits.at(0, out.nbytes)), interface.LOGITS)
        if unknown := context.infer_shapes():
            raise RuntimeError(f"{self._plan.title}: nothing says how large {', '.join(unknown)} are")
        given = tuple(context.get_tensor_shape(interface.LOGITS))
        if given != out.shape:
            raise RuntimeError(f"{self._plan.title}: logits {given}; wanted {out.shape}")

    def _go(self, context: Any) -> None:
        """Send a step to the stream, behind the copy of its inputs."""
        self._must(context.execute_async_v3(self.device.stream), "a step")

    def _must(self, done: bool, what: str) -> None:
        if not done:
            raise RuntimeError(f"{self._plan.title}: {what}: {self._plan.complaint}")

    def _record(self, cache: DeviceCache) -> None:
        """Record decode steps over the rows of `cache`, the largest first, and prove each."""
        found: dict[int, _Recorded] = {}
        recordings = []
        for number, batch in enumerate(sorted(self._buckets, reverse=True), start=1):
            capture = Capture(number, batch, self._capacity)
            probe = self._probe(capture, cache.rows(0, batch), found)
            recording = prove(capture, probe, lambda: self.device.memory()[0], (RuntimeError,))
            logger.info("%s", recording)
            if self._required:
                recording.require()
            if recording.obstacle is not None:
                found.pop(batch, None)
            recordings.append(recording)
        self._recorded[cache.memory] = found
        self.recordings = tuple(recordings)

    def _probe(self, capture: Capture, cache: DeviceCache, found: dict[int, _Recorded]) -> Probe:
        """Make what runs a probe's step over `cache`, and records into `found`."""
        batch = capture.batch
        out = np.empty((batch, 1, self.vocabulary), np.float32)

        def feeds(token: int) -> dict[str, NDArray[Any]]:
            return probe_feeds(self.signature, token, capture)

        def probe(token: int, *, recorded: bool, elsewhere: bool = False) -> NDArray[np.float32]:
            places = self._decode_inputs.fill(feeds(token))
            if not recorded:
                self._bind(self._decode, places, cache, self._decode_logits, out)
                self._go(self._decode)
            else:
                if batch not in found:
                    found[batch] = self._record_one(places, cache, out)
                if elsewhere:  # the recorded place holds another token than the one that was asked for
                    self._decode_inputs.fill(feeds(ONE))
                self.device.replay(found[batch].graph)
            self.device.read(self._decode_logits, 0, out)
            return out.copy()

        return probe

    def _record_one(self, places: Mapping[str, Place], cache: DeviceCache, out: NDArray[np.float32]) -> _Recorded:
        """Record a step with a context of its own, once it has run: what it prepares for new shapes is not recorded."""
        context = self._context(self._decode_profile, recorded=False)
        self._bind(context, places, cache, self._decode_logits, out)
        self._go(context)
        return _Recorded(context, self.device.record(lambda: self._go(context)))


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: CudaDevice) -> PlanSession:
    """Open the engine whose plan is `file` (llmforge.base.backends, Provider.session)."""
    assert config.plan is not None  # `RuntimeConfig.read` saw to it
    return PlanSession(open_plan(file, config.plan), config, gpu)
