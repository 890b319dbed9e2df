"""Names and meaning of the graph's inputs and outputs (docs/dialect.md), stated once for every stage.

Canonical graphs take `past_lengths` (and `position_ids` where rotary embedding stands alone); after the
`flash-attention` pass they take `seqlens_k` and `total_sequence_length` as GroupQueryAttention wants them.
The interface passes put `attention_mask` in their place, which is what runtimes of others feed; a graph that
`optimum-interface` wrote takes caches that hold the past alone and grow in every step (`grows`).
`feeds` serves them all, so that verification, evaluation and serving drive every stage of a build the same way.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx_ir as ir

INPUT_IDS = "input_ids"  # int64 [batch, sequence]
INPUTS_EMBEDS = "inputs_embeds"  # fp32 [batch, sequence, hidden]: in the place of tokens whose id is negative
POSITION_IDS = "position_ids"  # int64 [batch, sequence]
PAST_LENGTHS = "past_lengths"  # int32 [batch]
LENGTHS = "lengths"  # int32 [batch]: tokens of the step that are no padding; where a layer keeps a state
TEXT_LENGTHS = "text_lengths"  # int64 [batch]: tokens of the text that the step is a part of; where angles depend on it
SEQLENS_K = "seqlens_k"  # int32 [batch]: past + sequence - 1
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"  # int32 scalar: longest past + sequence
ATTENTION_MASK = "attention_mask"  # int64 [batch, longest past + sequence]: 1 where a row has a token, else 0
# Of a graph that reads blocks of a pool by a table (contrib.PagedAttention), whose `input_ids` are [1, tokens]:
CUMULATIVE_LENGTHS = "cumulative_sequence_length"  # int32 [batch + 1]: where the tokens of each row begin
PAST_SEQLENS = "past_seqlens"  # int32 [batch]
BLOCK_TABLE = "block_table"  # int32 [batch, blocks of the longest text]
ATTENTION_METADATA = "attention_metadata"  # int32 [3]: most tokens of a row, most and least of the longest text
PAGED = frozenset({CUMULATIVE_LENGTHS, PAST_SEQLENS, BLOCK_TABLE, ATTENTION_METADATA})
# What tells a graph of places; without them, and without caches, tokens know their own step alone.
PLACES = frozenset(
    {
        POSITION_IDS,
        PAST_LENGTHS,
        LENGTHS,
        TEXT_LENGTHS,
        SEQLENS_K,
        TOTAL_SEQUENCE_LENGTH,
        ATTENTION_MASK,
    }
    | PAGED
)
# Of a head that drafts by what its target computed (docs/dialect.md): a target gives the first, a head takes it.
HIDDEN_STATES = "hidden_states"  # fp32 [batch, sequence, widths]: what enters some layers, side by side
DRAFT_STATES = "draft_states"  # fp32 [batch, sequence, hidden]: in their place, of tokens that the head drafted itself
NEXT_STATES = "next_draft_states"  # fp32 [batch, sequence, hidden]: what a head gives for those
ADAPTER_IDS = "adapter_ids"  # int64 [batch]: the adapter of each row, from 1 on; 0: none
# Of a graph that reads whole sequences side by side, without a cache; its `input_ids` are [1, tokens]:
SEQUENCE_STARTS = "sequence_starts"  # int32 [sequences + 1]: where the tokens of each begin, and the last one ends
TOKEN_TYPE_IDS = "token_type_ids"  # int64 [1, tokens]: of a pair of texts, which one a token is of
EMBEDDINGS = "embeddings"  # fp32 [sequences, dimensions]; a graph that scores has `logits` [sequences, labels]
LOGITS_ROWS = "logits_rows"  # int64 [rows], default [-1]
LOGITS = "logits"  # [batch, rows, vocabulary]
# What a graph for GPUs also takes and gives, so that a step need not copy its logits (`TopLogits`).
TEMPERATURES = "temperatures"  # fp32 [batch]
TOP_LOGITS = "top_logits"  # fp32 [batch, head], of the last row of logits
TOP_IDS = "top_ids"  # int32 [batch, head]
MASSES = "masses"  # fp32 [batch, blocks]
# What it takes and gives so that the next step can begin before the host has decided its tokens (`Draw`).
DRAWS = "draws"  # fp32 [batch, fields of `Draw`]
CHOSEN_IDS = "chosen_ids"  # int64 [rows]: that of row n in the place of an id of -1 - n
NEXT_IDS = "next_ids"  # int64 [batch]: where the next step has its `chosen_ids`
HEAD = 256  # most probable tokens of a head; of text at 6 nats a token, they hold some 70% of the probability
BLOCKS = 64  # of a vocabulary, about, that masses are summed over: 2,004 ids of 128,256, which are 8 KB of logits
PAST = re.compile(r"past_key_values\.(\d+)\.(key|value|latent|conv|recurrent)")  # a cache, its layer and part
STATES = ("conv", "recurrent")  # parts of a cache that every token replaces, instead of adding to them

ADAPTERS = "llmforge.adapters"  # metadata_props key of a model: JSON list of the adapters' names, number 1 first
FALLBACK = "llmforge.fallback"  # metadata_props key of a model: why its own attention was traced, in plain words


@dataclass(frozen=True, eq=False)
class TopLogits:
    """What a device gives of B rows of logits: the largest H of each, and sums of those that are not above all of them.

    `logits` [B, H] descend; `ids` [B, H] are their tokens, equals in any order; `masses` [B, blocks] sum
    exp((logit - largest) / temperature) over the ids of each of `mass_blocks(vocabulary)` whose logits are not above
    the least of the H, in any order. H is `HEAD`, or the vocabulary if that is less: then they are `whole`, and nothing
    lies behind.
    """

    logits: NDArray[np.float32]
    ids: NDArray[np.int32]
    masses: NDArray[np.float32]
    vocabulary: int

    @property
    def whole(self) -> bool:
        """Whether nothing lies behind."""
        return self.vocabulary <= HEAD

    def is_finite(self, row: int) -> bool:
        """Say whether no logit of a row is NaN or +inf, and not all are -inf: what a head lacks, its masses have."""
        return bool(np.isfinite(self.logits[row, 0]) and np.isfinite(self.masses[row]).all())

    def of(self, rows: list[int]) -> TopLogits:
        """Give those of some different rows, in ascending order."""
        if len(rows) == len(self.logits):
            return self
        return TopLogits(self.logits[rows], self.ids[rows], self.masses[rows], self.vocabulary)


@functools.cache
def mass_blocks(vocabulary: int) -> tuple[int, int]:
    """Say how many blocks of neighbours the masses of a row are of, and how many ids each has; the last may have fewer.

    As many as divide the vocabulary, if a number from half of `BLOCKS` to its double does.
    """
    divisors = [count for count in range(BLOCKS // 2, 2 * BLOCKS + 1) if vocabulary % count == 0]
    size = vocabulary // min(divisors, key=lambda count: abs(count - BLOCKS)) if divisors else -(-vocabulary // BLOCKS)
    return -(-vocabulary // size), size


N = TypeVar("N")


class Draw(NamedTuple, Generic[N]):
    """What a device guesses a row's next token with; temperature comes by itself, and greedy rows have 0 of 1.

    `uniform` and `second` in [0, 1) are the random numbers that the host will decide with: among all, and within a
    block of those behind the head. The head is cut to `top_k`, at most `HEAD`, and what weighs `min_p` of its largest;
    what lies behind it counts `behind`: 1, or 0 where top-k and min-p leave it out.
    """

    uniform: N
    second: N
    top_p: N
    top_k: N
    min_p: N
    behind: N


GREEDY = Draw(0.0, 0.0, 1.0, float(HEAD), 0.0, 0.0)


def past_part(layer: int, part: str) -> str:
    """Name the graph input that holds a part of the cache of `layer`: key, value, latent, conv or recurrent."""
    return f"past_key_values.{layer}.{part}"


def present_part(layer: int, part: str) -> str:
    """Name the graph output that holds a part of the cache of `layer` after the step."""
    return f"present.{layer}.{part}"


def is_state(name: str) -> bool:
    """Say whether a cache input or output is a state of fixed size, without an axis of tokens."""
    return name.rpartition(".")[2] in STATES


def present_of(past: str) -> str:
    """Name the output that continues the cache input `past`."""
    return past.replace("past_key_values.", "present.", 1)


def past_of(present: str) -> str:
    """Name the cache input that the output `present` continues."""
    return present.replace("present.", "past_key_values.", 1)


def grows(past: Sequence[object], present: Sequence[object]) -> bool:
    """Say whether a cache [batch, kv_heads, slots, head_dim] grows: its present has other slots than its past."""
    return past[2] != present[2]


def encodes(model: ir.Model) -> bool:
    """Say whether `model` reads whole sequences, and gives an embedding or scores of each: it has no cache."""
    return any(value.name == SEQUENCE_STARTS for value in model.graph.inputs)


def encoded(model: ir.Model) -> str:
    """Name what such a graph gives: embeddings or logits."""
    return str(model.graph.outputs[0].name)


LONGEST_TEXT = "llmforge.longest_text"  # metadata_props key of a model: JSON of a `TextLimit`


class TextLimit(NamedTuple):
    """The longest text in tokens, and why a longer one would be computed otherwise."""

    tokens: int
    reason: str


def record_limit(model: ir.Model, limit: TextLimit) -> None:
    """Write `limit` into `model`."""
    model.metadata_props[LONGEST_TEXT] = json.dumps(limit._asdict())


def recorded_limit(model: ir.Model) -> TextLimit | None:
    """Read the limit of `model`; None: there is none but the model's own."""
    facts = model.metadata_props.get(LONGEST_TEXT)
    return None if facts is None else TextLimit(**json.loads(facts))
