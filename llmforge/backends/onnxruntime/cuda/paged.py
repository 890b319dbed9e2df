"""A decoder in ONNX Runtime whose caches are blocks of one pool: texts of any length share a device's memory.

A step runs the tokens of several texts one after the other, prompts and decoding together, none of them padding, and
each reads and writes its own blocks by a table (`contrib.PagedAttention`). Decode steps may be CUDA graphs, as in
`llmforge.backends.onnxruntime.cuda.session`, with a table of fixed size and rows of padding, whose blocks are number 0.
`attention_metadata` is what the host says of lengths: exact in other steps, the class of lengths in a captured one.

Over a device that is the host the same calls bind the host's memory to the CPU provider, which runs the reference of
the operator (`llmforge.ir.paged`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmforge.backends.onnxruntime.cuda.captured import EAGER, CapturedSession
from llmforge.backends.onnxruntime.cuda.session import DECODE_BYTES, Binding, open_on, run_options
from llmforge.backends.onnxruntime.session import run_bound
from llmforge.base.errors import InputError, RunFailed, UsageError
from llmforge.ir import interface
from llmforge.runtime.block_pool import BlockPool, BlockTable, Copy, NoBlocks
from llmforge.runtime.config import Capture, GraphPlan, RuntimeConfig, SessionConfig
from llmforge.runtime.device.backend import INPUT_BYTES, LOGIT_BYTES
from llmforge.runtime.device.cache import CacheMemory, CacheTensor, DeviceCache
from llmforge.runtime.device.cuda import Buffer, Device
from llmforge.runtime.device.graph_capture import ONE, CaptureProbe, probe_inputs
from llmforge.runtime.device.inputs import InputBuffers, StagedInputs
from llmforge.runtime.interface import DecodeRun, RowCopy, Rows, StepInputs
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.runtime.signature import ELEMENTS, Signature

FREE_PART = 0.9  # of a device's free memory that a pool takes at most: scratch memory of kernels needs the rest


class BlockTensor(CacheTensor):
    """The memory of one cache [blocks, block_size, kv_heads, head_dim]: a row is a block, all heads of a token one."""

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.dims[0]


@dataclass(frozen=True, eq=False)
class PagedCache(Rows):
    """A pool of blocks in a device's memory, and rows of texts of at most `capacity` tokens, which take what they hold.

    A scheduler plans `pool` itself and has no use for rows; a row is what runs texts one by one (`Backend.step`). It
    begins anew with a step after no past.
    """

    store: DeviceCache = field(repr=False)  # a row is a block; its first one is nobody's
    pool: BlockPool = field(repr=False)
    tables: list[BlockTable | None] = field(repr=False)  # of all rows, of which this has those from `start` on
    start: int = 0

    def _view(self, start: int, stop: int) -> PagedCache:
        return PagedCache(stop - start, self.capacity, self.store, self.pool, self.tables, self.start + start)

    @property
    def size_bytes(self) -> int:
        """Size of the pool, whatever rows hold of it."""
        return self.store.size_bytes

    @property
    def blocks_of_a_row(self) -> int:
        """Blocks of the longest text."""
        return self.pool.count(self.capacity)

    def make(self, copies: Sequence[Copy]) -> None:
        """Fill blocks from others."""
        if copies:
            made = [RowCopy(copy.target, 0, copy.source, 0, copy.tokens) for copy in copies]
            self.store.copy_all(self.store, made)

    def table(self, row: int, past: int, end: int) -> BlockTable:
        """Give the blocks of a row, which holds `past` tokens and is about to hold `end`.

        Raises:
            RunFailed: the pool has no blocks for them.
        """
        table = self.tables[self.start + row]
        if table is not None and past == 0:
            self.pool.close(table)
            table = None
        if table is None:
            table = self.tables[self.start + row] = self.pool.open(())
        try:
            self.make(self.pool.grow(table, past, end))
        except NoBlocks as error:
            raise RunFailed(f"the KV cache is full: {error}") from error
        return table

    def anew(self) -> PagedCache:
        """Give the same memory with all blocks free; nobody may go on with this object."""
        pool = BlockPool(self.pool.blocks, self.pool.block_size)
        return replace(self, pool=pool, tables=[None] * len(self.tables))

    def copy(self, row: int, start: int, source: PagedCache, source_row: int, source_start: int, tokens: int) -> None:
        """Copy `tokens` tokens from token `source_start` of a row of `source` to `start`."""
        size, given = self.pool.block_size, source.tables[source.start + source_row]
        if tokens and (given is None or len(given.blocks) * size < source_start + tokens):
            raise ValueError(f"row {source_row} does not hold tokens {source_start} … {source_start + tokens}")
        into, done = self.table(row, start, start + tokens), 0
        while given is not None and done < tokens:
            (block, at), (other, place) = divmod(start + done, size), divmod(source_start + done, size)
            count = min(tokens - done, size - at, size - place)
            self.store.copy(into.blocks[block], at, source.store, given.blocks[other], place, count)
            done += count


class Piece(NamedTuple):
    """Tokens of one text in a step: they follow the `past` ones that `table` holds, and it has room for them.

    `wanted`: whether the last of them gets logits.
    """

    tokens: Sequence[int]
    past: int
    table: BlockTable
    wanted: bool


class _Step(NamedTuple):
    """A step whose inputs wait on the host: it gives `rows` of logits to `logits`."""

    buffers: InputBuffers
    inputs: StagedInputs
    logits: Buffer
    rows: int
    graph_id: int


class PagedSession(CapturedSession[PagedCache]):
    """A decoder graph over blocks (docs/paged.md) in ONNX Runtime, over the memory of `device`.

    Args:
        model: path of `model.onnx`, its external data beside it, or a serialized model.
        config: threads and options of ONNX Runtime.
        device: where it runs.
        blocks: of the pool that `allocate` makes, at most; fewer where as many rows of full length take fewer.
        provider_options: of ONNX Runtime's provider for that device.
        buckets: numbers of rows that decode steps are padded to, ascending.
        graphs: which decode steps are captured; None: none.

    Raises:
        InputError: the model cannot be read, or is not a decoder graph over blocks.
        UnsupportedError: ONNX Runtime refuses the graph, or it cannot be run here.
        EnvironmentLacks: this ONNX Runtime cannot use the device.
    """

    def __init__(
        self,
        model: Path | bytes,
        config: SessionConfig,
        device: Device,
        *,
        blocks: int,
        provider_options: Mapping[str, str] | None = None,
        buckets: Sequence[int] = (),
        graphs: GraphPlan | None = None,
    ) -> None:
        super().__init__(device, buckets, graphs, provider_options)
        self.blocks = blocks
        where = str(model) if isinstance(model, Path) else "the model in memory"
        captured = bool(self._captures)
        self._opens = lambda: open_on(device, model, config, self._options, where, graphs=captured)
        self._session = self._on_thread(self._opens)
        inputs = [*self._session.get_inputs(), *self._session.get_overridable_initializers()]
        self.signature = Signature.of(inputs, self._session.get_outputs(), where)
        if self.signature.block_size is None or self.signature.gives_all_rows:
            raise InputError(f"{where}: its caches are no blocks of a pool")
        self.block_size = self.signature.block_size
        self._prepare_buffers(interface.ATTENTION_METADATA, where)
        self._decode_inputs: InputBuffers | None = None  # sized by the table of the first cache
        self._bindings = weakref.WeakKeyDictionary()
        self._fewer: tuple[str, ...] = ()  # what `allocate` has to say of its pool

    def allocate(self, batch: int, capacity: int) -> PagedCache:
        """Reserve a pool for `batch` rows of texts of at most `capacity` tokens, and capture steps over it.

        It has `blocks` blocks, but no more than all rows can fill or than FREE_PART of what the device has left holds
        (`notes` then say so), and no fewer than a text of `capacity` tokens needs.

        Raises:
            EnvironmentLacks: the device has no room for those.
            VerificationError: a step that must be captured is not.
            RunFailed: a step that reads a prompt or decodes fails, with flash attention alone, too.
        """
        if batch < 1 or capacity < 1:
            raise ValueError(f"a cache of {batch} rows of {capacity} tokens")
        of_a_row = -(-capacity // self.block_size)
        planned = max(of_a_row, min(self.blocks, batch * of_a_row))
        free, total = self.device.memory()
        room = int(free * FREE_PART) - self._gathered_bytes(capacity)
        fitting = room // self.block_bytes - 1 if total else planned
        pool = BlockPool(max(of_a_row, min(planned, fitting)), self.block_size)
        self._fewer = (
            (f"a KV cache of {pool.blocks} blocks instead of {planned}: {free / 1e9:.1f} GB of the device were free",)
            if pool.blocks < planned
            else ()
        )
        cache = PagedCache(batch, capacity, self._store(pool.blocks + 1), pool, [None] * batch)

        def prepare() -> None:
            if total:
                self._warm(cache)
            if self._captures_fit(batch, capacity):
                self._capture(cache)

        self._run_or_without_cudnn(lambda: self._on_thread(prepare))
        return cache

    def _warm(self, cache: PagedCache) -> None:
        """Read a prompt of each power of two of tokens, and decode in each bucket: no request waits for what is chosen.

        Products time their tactics in the first step of each number of tokens (fpA_intB, QMoE): other steps need no
        padding. From SM 90 on cuDNN decodes, and refuses a shape when it comes.
        """
        table, out = cache.pool.open(()), np.empty((1, self.vocabulary), np.float32)
        cache.pool.grow(table, 0, cache.capacity)
        longest = 1 << (PREFILL_CHUNK + cache.batch - 1).bit_length()  # of prompts, and of rows that decode beside them
        for tokens in (1 << i for i in reversed(range(min(longest, cache.capacity).bit_length()))):
            self._execute(cache, self._prepare([Piece([0] * tokens, 0, table, wanted=True)], cache), out)
        for rows in self.buckets:
            piece = Piece([0], cache.capacity - 1, table, wanted=True)
            self._execute(cache, self._prepare([piece] * rows, cache), np.empty((rows, self.vocabulary), np.float32))
        cache.pool.close(table)

    @property
    def reads_prompts_alone(self) -> bool:
        """Whether a step that reads a prompt had better hold one text alone.

        Of int8 blocks such a step copies its rows times its longest text in 16 bits, a layer at a time.
        """
        return any(cache.dtype == "int8" for cache in self.signature.caches)

    @property
    def block_bytes(self) -> int:
        """Size of one block, in all layers."""
        token = sum(c.kv_heads * c.head_dim * ELEMENTS[c.dtype].size_bytes for c in self.signature.caches)
        return token * self.block_size

    def _gathered_bytes(self, capacity: int) -> int:
        """Size of what a step with a prompt gathers of int8 blocks, in 16 bits (`cuda.graphs.gathered_bytes`)."""
        channels = [c.kv_heads * c.head_dim for c in self.signature.caches if c.dtype == "int8"]
        return 2 * 2 * capacity * max(channels, default=0)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which steps are not captured though they were planned to be, and why; and of a pool that is smaller."""
        return (*super().notes, *self._fewer)

    def _store(self, blocks: int) -> DeviceCache:
        tensors = {}
        for cache in self.signature.caches:
            element = ELEMENTS[cache.dtype]
            dims = (self.block_size, cache.kv_heads, cache.head_dim)
            token_bytes = cache.kv_heads * cache.head_dim * element.size_bytes
            buffer = self.device.allocate(blocks * self.block_size * token_bytes)
            tensors[cache.name] = BlockTensor(buffer, element.onnx, dims, 1, token_bytes, is_state=False)
        return DeviceCache(blocks, self.block_size, CacheMemory(self.device, tensors))

    def run(self, pieces: Sequence[Piece], cache: PagedCache, out: NDArray[np.float32]) -> None:
        """Run the tokens of several texts in one step; logits of those `wanted` go to `out` [wanted, V], in order.

        Raises:
            UsageError: a text has no room for its tokens.
            RunFailed: a kernel fails.
        """
        self._check_room(pieces, cache)
        shape = (sum(piece.wanted for piece in pieces), self.vocabulary)
        if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}; the logits are fp32 {shape}, C-contiguous")
        self._guessed_rows = 0
        self._on_thread(lambda: self._execute(cache, self._prepare(pieces, cache), out))

    def verify(self, piece: Piece, cache: PagedCache, out: NDArray[np.float32]) -> None:
        """Run tokens of one text in a step; each of them gets logits, which go to `out` fp32 [tokens, V].

        Raises:
            UsageError: the text has no room for its tokens.
            RunFailed: a kernel fails.
        """
        self._check_room([piece], cache)
        self._guessed_rows = 0
        rows = np.arange(len(piece.tokens))
        self._on_thread(lambda: self._execute(cache, self._prepare([piece], cache, rows), out))

    def begin(
        self,
        pieces: Sequence[Piece],
        cache: PagedCache,
        temperatures: NDArray[np.float32],
        draws: NDArray[np.float32] | None = None,
    ) -> DecodeRun:
        """Begin a step, as `run` runs it; what is given is read before this returns.

        Its rows are those `wanted`, in order, at whose `temperatures`, fp32 [wanted], their masses are summed, and
        whose next tokens are guessed with `draws`, as of `begin_decode`; rows of padding follow. Where tokens are
        guessed, a step of one token of each piece may begin while another step runs, whose top logits are asked for
        next; it may have tokens of -1 - n, which are those that the step before guesses for its row n.

        Raises:
            UsageError: a text has no room for its tokens.
        """
        self._check_room(pieces, cache)
        wanted = sum(piece.wanted for piece in pieces)
        if (
            self._top_logits is None
            or self._runs is None
            or temperatures.shape != (wanted,)
            or wanted > self._most_rows
        ):
            raise ValueError(
                f"temperatures {temperatures.shape}; top logits of {wanted} rows, of {self._most_rows} at most"
            )
        self._require_guesses(np.array([min(piece.tokens) for piece in pieces]))
        self._runs.make_room()
        step = self._prepare(pieces, cache, temperatures=temperatures, draws=draws)
        self._guessed_rows = step.rows if self.guesses_tokens else 0
        return self._runs.begin(lambda: self._launch(self._binding(cache), step), step.rows, step.logits)

    def begin_decode(self, inputs: StepInputs, cache: PagedCache) -> DecodeRun:
        """Begin a step of one token a row, as `step` runs it; arrays are read before this returns."""
        self._check(inputs, cache)
        ones = np.ones(cache.batch, np.float32)
        temperatures = ones if inputs.temperatures is None else inputs.temperatures
        return self.begin(self._pieces(inputs, cache), cache, temperatures, inputs.draws)

    def _check_room(self, pieces: Sequence[Piece], cache: PagedCache) -> None:
        for piece in pieces:
            end = piece.past + len(piece.tokens)
            if not piece.tokens or end > min(cache.capacity, len(piece.table.blocks) * self.block_size):
                raise UsageError(f"{len(piece.tokens)} tokens after {piece.past} have no room in their blocks")

    def _pieces(self, inputs: StepInputs, cache: PagedCache) -> list[Piece]:
        """Give rows [B, S] as texts of S tokens each."""
        tokens = inputs.ids.shape[1]
        return [
            Piece(ids, past, cache.table(b, past, past + tokens), wanted=True)
            for b, (ids, past) in enumerate(zip(inputs.ids.tolist(), inputs.past_lengths.tolist(), strict=True))
        ]

    def _run_together(self, inputs: StepInputs, cache: PagedCache, out: NDArray[np.float32]) -> None:
        tokens = inputs.ids.shape[1]
        pieces = self._pieces(inputs, cache)
        rows = np.array([-1]) if inputs.rows is None else inputs.rows
        chosen = (np.arange(len(pieces))[:, None] * tokens + np.where(rows < 0, rows + tokens, rows)).reshape(-1)
        self._guessed_rows = 0
        if not self.reads_prompts_alone or tokens == 1:
            self._on_thread(lambda: self._execute(cache, self._prepare(pieces, cache, chosen), out))
            return
        for b, piece in enumerate(pieces):
            alone, own = chosen.reshape(len(pieces), -1)[b] - b * tokens, out[b]
            self._on_thread(lambda: self._execute(cache, self._prepare([piece], cache, alone), own))  # noqa: B023

    def _run(self, inputs: StepInputs, cache: PagedCache, out: NDArray[np.float32]) -> None:
        self._run_together(inputs, cache, out)

    def _prepare(
        self,
        pieces: Sequence[Piece],
        cache: PagedCache,
        rows: NDArray[np.int64] | None = None,
        temperatures: NDArray[np.float32] | None = None,
        draws: NDArray[np.float32] | None = None,
    ) -> _Step:
        """Stage the inputs of a step; `rows` get logits, or None: the last of pieces that want it.

        Where none wants it, the first one's last row is computed all the same: kernels need not take steps of no rows.
        """
        longest = max(piece.past + len(piece.tokens) for piece in pieces)
        count = sum(piece.wanted for piece in pieces) if rows is None else len(rows)
        decode = count == len(pieces) and all(len(piece.tokens) == 1 for piece in pieces)
        bucket = next((size for size in self.buckets if size >= len(pieces)), None) if decode else None
        if bucket is not None:
            length, graph_id = self._graph_of(cache.store.memory, bucket, longest)
            bound = length or 1 << (longest - 1).bit_length()  # cuDNN builds and keeps a plan for each that it meets
            feeds = self._feeds(pieces, cache, None, bucket, bound, temperatures, draws)
            return self._prepare_decode(feeds, cache, graph_id)
        feeds = self._feeds(pieces, cache, rows, len(pieces), longest, temperatures, draws)
        most, count = max(value.nbytes for value in feeds.values()), max(1, count)
        if most > self._inputs.each_bytes:
            self._inputs = self._input_buffers(most)
        if count * self.vocabulary * LOGIT_BYTES > self._logits.size:
            self._logits = self.device.allocate(count * self.vocabulary * LOGIT_BYTES)
        return _Step(self._inputs, self._inputs.stage(feeds), self._logits, count, EAGER)

    def _feeds(
        self,
        pieces: Sequence[Piece],
        cache: PagedCache,
        rows: NDArray[np.int64] | None,
        batch: int,
        longest: int,
        temperatures: NDArray[np.float32] | None = None,
        draws: NDArray[np.float32] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Make the inputs of a step of `batch` rows; those after `pieces` run one token, in block 0."""
        padding = batch - len(pieces)
        lengths = np.array([*(len(piece.tokens) for piece in pieces), *[1] * padding], np.int32)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        past = np.array([*(piece.past for piece in pieces), *[0] * padding], np.int32)
        table = np.zeros((batch, cache.blocks_of_a_row), np.int32)
        for row, piece in zip(table, pieces, strict=False):
            blocks = piece.table.blocks[: len(row)]
            row[: len(blocks)] = blocks
        if rows is None:
            wanted = np.array([*(piece.wanted for piece in pieces), *[True] * padding])
            rows = (ends[1:] - 1)[wanted if wanted.any() else slice(1)].astype(np.int64)
        given = np.ones(len(rows), np.float32)
        if temperatures is not None:
            given[: len(temperatures)] = temperatures
        drawn = np.tile(np.array(interface.GREEDY, np.float32), (len(rows), 1))
        if draws is not None:
            drawn[: len(draws)] = draws
        ids = np.array([token for piece in pieces for token in piece.tokens] + [0] * padding, np.int64)[None]
        places = np.arange(len(ids[0])) + np.repeat(past - ends[:-1], lengths)
        made: dict[str, NDArray[Any]] = {
            interface.INPUT_IDS: ids,
            interface.POSITION_IDS: places.astype(np.int64)[None],
            interface.CUMULATIVE_LENGTHS: ends,
            interface.PAST_SEQLENS: past,
            interface.BLOCK_TABLE: table,
            interface.ATTENTION_METADATA: np.array([int(lengths.max()), longest, self._at_least(longest)], np.int32),
            interface.LOGITS_ROWS: rows,
            interface.TEMPERATURES: given,
            interface.DRAWS: drawn,
        }
        return {name: value for name, value in made.items() if name in self._input_names}

    def _at_least(self, longest: int) -> int:
        """Give a number of tokens that the longest text has of every step that runs as one of up to `longest`.

        FlashAttention divides texts of more than 512 tokens among blocks of threads only where it is told so: a few
        long texts would keep a few multiprocessors busy. A bound that is too high changes no result.
        """
        if not self._captures:
            return longest // 2 + 1
        return 1 + max((capture.length for capture in self._captures if capture.length < longest), default=0)

    def _prepare_decode(self, feeds: Mapping[str, NDArray[Any]], cache: PagedCache, graph_id: int) -> _Step:
        """Stage the inputs of a step of one token a row, for addresses that never change."""
        buffers = self._decode_inputs
        table_bytes = self._most_rows * cache.blocks_of_a_row * 4
        if buffers is None or buffers.each_bytes < table_bytes:
            most = max(table_bytes, (self._most_rows + 1) * INPUT_BYTES, self._most_rows * DECODE_BYTES)
            buffers = self._input_buffers(most, sets=2)
            self._decode_inputs = buffers
            self._graphs.clear()  # they read the inputs elsewhere
            graph_id = EAGER
        rows = len(feeds[interface.LOGITS_ROWS])
        return _Step(buffers, buffers.stage(feeds), self._decode_logits, rows, graph_id)

    def _binding(self, cache: PagedCache) -> Binding:
        memory = cache.store.memory
        found: Binding | None = self._bindings.get(memory)
        if found is None:
            found = self._bindings[memory] = Binding(self._session, self.device, cache.store)
        return found

    def _launch(self, binding: Binding, step: _Step) -> None:
        """Send the graph to the device, after its inputs."""
        step.buffers.send(step.inputs)
        binding.bind_inputs(step.inputs.bound)
        binding.bind_logits(step.logits, (1, step.rows, self.vocabulary))
        if self._top_logits is not None:
            binding.bind_top_logits(self._top_logits, step.rows)
        run_bound(self._session, binding.binding, run_options(step.graph_id, waits=self.device.stream is None))

    def _execute(
        self, cache: PagedCache, step: _Step, out: NDArray[np.float32], binding: Binding | None = None
    ) -> None:
        """Run the graph, and bring the first rows of its logits to `out` [..., V]."""
        self._launch(self._binding(cache) if binding is None else binding, step)
        if out.size:
            self.device.read(step.logits, 0, out)

    def _capture(self, cache: PagedCache) -> None:
        """Capture the planned steps, whose rows are one text."""
        table = cache.pool.open(())
        cache.pool.grow(table, 0, cache.capacity)
        self._capture_all(cache.store.memory, lambda capture, graph_id: self._probe(capture, graph_id, cache, table))
        cache.pool.close(table)

    def _probe(self, capture: Capture, graph_id: int, cache: PagedCache, table: BlockTable) -> CaptureProbe:
        """Make what runs a probe's step: all rows are the same text, and write the same."""
        out = np.empty((1, capture.batch, self.vocabulary), np.float32)

        def feeds(token: int) -> dict[str, NDArray[Any]]:
            inputs = probe_inputs(token, capture)
            pieces = [Piece((token,), int(past), table, wanted=True) for past in inputs.past_lengths]
            return self._feeds(pieces, cache, None, capture.batch, capture.length)

        def probe(token: int, *, graph: bool, moved: bool = False) -> NDArray[np.float32]:
            which = graph_id if graph else EAGER
            step, binding = self._prepare_decode(feeds(ONE if moved else token), cache, which), None
            if moved:
                step.buffers.send(step.inputs)
                most = step.buffers.each_bytes
                other = self._input_buffers(most)
                binding = Binding(self._session, self.device, cache.store)
                step = step._replace(buffers=other, inputs=other.stage(feeds(token)))
            self._execute(cache, step, out, binding)
            return out.copy()

        return probe


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: Device) -> PagedSession:
    """Open the engine whose graph is in `file` (llmforge.backends, Provider.session)."""
    assert config.kv_blocks is not None
    return PagedSession(
        file,
        config.session.resolve(threads),
        gpu,
        blocks=config.kv_blocks,
        provider_options=config.provider_options,
        buckets=config.buckets,
        graphs=config.graphs,
    )
