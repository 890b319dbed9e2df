"""Bytes, operations and times of a decoder's steps: the roofline of one device, or of several that share the model.

    decode  bytes = weights read + batch · (context + 1) · bytes of a token's cache + 2 · batch · state
            operations = batch · (2 · parameters in products + Σ layers 2 · heads · (key + value) · context)
    prefill bytes as decode; operations = tokens · 2 · parameters in products + Σ layers heads · (key + value) · tokens²
    step    max(bytes / bandwidth, operations / rate) + all-reduces + layers · overhead

(Pope et al. 2022, "Efficiently Scaling Transformer Inference", sections 2 and 3.1; Williams et al. 2009, "Roofline".)
Of routed experts a step reads those that its tokens choose: E · (1 - (1 - k/E)^tokens) of E, with choices taken to be
even and independent. Traffic of activations is not counted. Everything here is pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from llmforge.base.errors import UsageError
from llmforge.planning.scheme import BITS, DtypeScheme
from llmforge.planning.shape import AttentionShape, Shape
from llmforge.targets import Rate, Target, matrix_share_of

Bound = Literal["memory", "compute", "links", "overhead"]
LARGEST_BATCH = 1 << 20  # beyond it a decode step is said never to be bound by compute
ALL_REDUCES = 2  # of a layer: behind attention, and behind the MLP (Shoeybi et al. 2019, "Megatron-LM", section 3)


@dataclass(frozen=True)
class RooflineCeilings:
    """What one device could do at best, and which part of it a decoder reaches; bytes, operations and seconds."""

    bandwidth: float
    rate: float  # of products of weights
    attention_rate: float  # of products of attention
    bandwidth_share: float
    rate_share: float
    attention_share: float
    layer_s: float
    link: float  # between devices, reached; 0: there is none
    collective_s: float

    @classmethod
    def of(cls, target: Target, scheme: DtypeScheme) -> RooflineCeilings:
        """Read them off a target.

        Raises:
            UsageError: its file lacks the bandwidth or a rate.
        """
        if target.bandwidth_gbs is None:
            raise _lacks(target, "memory bandwidth")
        link = target.interconnect
        return cls(
            bandwidth=target.bandwidth_gbs.value * 1e9,
            rate=_rate(target, scheme.product),
            attention_rate=_rate(target, scheme.compute),
            bandwidth_share=target.share("bandwidth").value,
            rate_share=target.share(matrix_share_of(scheme.product)).value * scheme.instructions,
            attention_share=target.share(matrix_share_of(scheme.compute)).value,
            layer_s=target.share("layer_us").value / 1e6,
            link=0.0 if link is None else link.gbs.value * 1e9 * target.share("link").value,
            collective_s=target.share("collective_us").value / 1e6,
        )

    @property
    def balance(self) -> float:
        """Operations that the device can do for each byte that it reads, at best (ops:byte)."""
        return self.rate / self.bandwidth


@dataclass(frozen=True)
class StepCost:
    """One step on one device: what it moves and computes, and the time of each part in seconds."""

    bytes: float
    operations: float
    memory_s: float
    compute_s: float
    links_s: float
    overhead_s: float
    ceilings: RooflineCeilings

    @property
    def seconds(self) -> float:
        """Time of the step; memory and compute overlap, the rest does not."""
        return max(self.memory_s, self.compute_s) + self.links_s + self.overhead_s

    @property
    def bound(self) -> Bound:
        """The part that takes longest."""
        parts: tuple[Bound, ...] = ("memory", "compute", "links", "overhead")
        return max(parts, key=lambda part: float(getattr(self, f"{part}_s")))

    @property
    def intensity(self) -> float:
        """Operations for each byte (arithmetic intensity)."""
        return self.operations / self.bytes

    @property
    def mbu(self) -> float:
        """Model bandwidth utilization: bytes over time over the peak bandwidth."""
        return self.bytes / self.seconds / self.ceilings.bandwidth

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: operations over time over the peak rate."""
        return self.operations / self.seconds / self.ceilings.rate


@dataclass(frozen=True)
class Workload:
    """What is asked of the deployment: `batch` sequences at once, each a prompt and an answer, in tokens."""

    prompt: int = 1024
    output: int = 256
    batch: int = 1

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.output

    @property
    def mean_context(self) -> float:
        """Tokens that a cache holds half way through the answer."""
        return self.prompt + self.output / 2


@dataclass(frozen=True)
class Placement:
    """A decoder in its dtypes, split over `ranks` devices of a target; bytes and times are those of one of them."""

    shape: Shape
    target: Target
    scheme: DtypeScheme
    ranks: int = 1

    @cached_property
    def ceilings(self) -> RooflineCeilings:
        """The ceilings of one device."""
        return RooflineCeilings.of(self.target, self.scheme)

    def decode(self, batch: int, context: float) -> StepCost:
        """Time a step that gives one token to each of `batch` sequences, each with `context` tokens in its cache."""
        attentions = list(self.shape.attentions())
        seen = sum(count * self.scheme.kv_bytes(each, self.ranks) * each.seen(context) for count, each in attentions)
        cached = batch * (seen + self.scheme.kv_bytes_per_token(self.shape, self.ranks))
        attended = batch * sum(count * 2 * _pair(each) * each.seen(context + 1) for count, each in attentions)
        return self._step(rows=batch, heads=batch, cached=cached, attended=attended)

    def prefill(self, tokens: int) -> StepCost:
        """Time the step that reads a prompt of `tokens` tokens and gives the first token."""
        cached = tokens * self.scheme.kv_bytes_per_token(self.shape, self.ranks)
        attended = sum(count * 2 * _pair(each) * _pairs(tokens, each.window) for count, each in self.shape.attentions())
        return self._step(rows=tokens, heads=1, cached=cached, attended=attended)

    def pieces(self, tokens: Sequence[int], pasts: Sequence[int]) -> StepCost:
        """Time a step over several texts: of each, `tokens[b]` tokens after `pasts[b]` in its cache, one with logits.

        `prefill` is the step of one text without a past, `decode` that of one token of texts that are equally long.
        """
        scheme, ranks = self.scheme, self.ranks
        ends = [past + count for past, count in zip(pasts, tokens, strict=True)]
        cached, attended = float(sum(tokens) * scheme.kv_bytes_per_token(self.shape, ranks)), 0.0
        for count, each in self.shape.attentions():
            cached += count * scheme.kv_bytes(each, ranks) * sum(map(each.seen, pasts))
            pairs = sum(_pairs(end, each.window) for end in ends) - sum(_pairs(past, each.window) for past in pasts)
            attended += count * 2 * _pair(each) * pairs
        return self._step(rows=sum(tokens), heads=len(tokens), cached=cached, attended=attended)

    def request_seconds(self, workload: Workload) -> tuple[float, float]:
        """Return what one request takes of the devices' time when a batch is served at once: reading and writing.

        Prompts are read one at a time between decode steps (in-flight batching), with caches half full on average.
        """
        step = self.decode(workload.batch, workload.mean_context).seconds
        return self.prefill(workload.prompt).seconds, workload.output * step / workload.batch

    def turning_batch(self, context: float) -> int | None:
        """Find the smallest batch whose decode step takes compute as long as memory; None where no batch does.

        Every sequence brings its own cache, so that with a long context no batch ever does.
        """

        def bound(batch: int) -> bool:
            step = self.decode(batch, context)
            return step.compute_s >= step.memory_s

        found = 1 + bisect_left(range(1, LARGEST_BATCH + 1), True, key=bound)
        return found if found <= LARGEST_BATCH else None

    def weights_read(self, rows: float) -> float:
        """Return the bytes of weights that a step over `rows` tokens reads."""
        shape, scheme = self.shape, self.scheme
        split = sum(
            count * (layer.matrices + layer.expert * _touched(layer.experts, layer.chosen, rows))
            for count, layer in shape.layers
        )
        products = scheme.bytes_of(split) + scheme.head_bytes(shape)
        return products / self.ranks + scheme.bytes_of(shape.all_vectors, scheme.compute)

    def product_operations(self, rows: int, heads: int) -> int:
        """Count operations of products of weights in a step over `rows` tokens, `heads` of which get logits."""
        layers = sum(count * (each.matrices + each.expert * each.chosen) for count, each in self.shape.layers)
        return 2 * rows * layers + 2 * heads * self.shape.head_matrix

    def _step(self, *, rows: int, heads: int, cached: float, attended: float) -> StepCost:
        """Put a step over `rows` tokens together, `heads` of which get logits."""
        shape, ceilings, ranks = self.shape, self.ceilings, self.ranks
        moved = self.weights_read(rows) + cached + 2 * heads * self.scheme.state_bytes(shape, ranks)
        products = self.product_operations(rows, heads)
        products += 2 * rows * shape.state_elements()  # a state is updated and read once a token
        compute_s = products / ranks / (ceilings.rate * ceilings.rate_share)
        compute_s += attended / ranks / (ceilings.attention_rate * ceilings.attention_share)
        return StepCost(
            bytes=moved,
            operations=(products + attended) / ranks,
            memory_s=moved / (ceilings.bandwidth * ceilings.bandwidth_share),
            compute_s=compute_s,
            links_s=self._all_reduces(rows),
            overhead_s=shape.depth * ceilings.layer_s,
            ceilings=ceilings,
        )

    @property
    def sent_per_token(self) -> int:
        """Count the bytes that a device sends for each token of a decode step: the sums of all layers, and logits.

        In a ring, 2 · (n - 1) / n of what is summed and (n - 1) / n of what is gathered.
        """
        shape = self.shape
        numbers = 2 * ALL_REDUCES * shape.depth * shape.hidden + shape.vocabulary
        return int((self.ranks - 1) * numbers * BITS[self.scheme.compute] // (8 * self.ranks))

    def _all_reduces(self, rows: int) -> float:
        """Time the all-reduces of a step: in a ring, 2 · (n - 1) / n of the bytes leave each device."""
        if self.ranks == 1:
            return 0.0
        size = rows * self.shape.hidden * BITS[self.scheme.compute] / 8
        one = 2 * (self.ranks - 1) / self.ranks * size / self.ceilings.link + self.ceilings.collective_s
        return ALL_REDUCES * self.shape.depth * one


def degrees(shape: Shape, target: Target, asked: int = 1) -> list[int]:
    """List the numbers of devices, powers of two and `asked`, that heads and matrices can be split over."""
    domain = 1 if target.interconnect is None else target.interconnect.domain
    heads = [attention.heads for _, attention in shape.attentions()]
    wanted = sorted({1, 2, 4, 8, asked})
    return [ranks for ranks in wanted if ranks <= domain and all(each % ranks == 0 for each in heads)]


def _touched(experts: int, chosen: int, rows: float) -> float:
    """Return how many of `experts` are chosen by any of `rows` tokens, on average."""
    return experts * (1 - (1 - chosen / experts) ** rows) if experts else 0.0


def _pair(attention: AttentionShape) -> int:
    """Count the multiplications of one query with one key and its value, over all heads."""
    return attention.heads * (attention.key_dim + attention.value_dim)


def _pairs(tokens: int, window: int | None) -> float:
    """Count the pairs of a query and a key that it sees in a prompt."""
    full = tokens if window is None else min(tokens, window)
    return full * (full + 1) / 2 + (tokens - full) * full


def _rate(target: Target, dtype: Rate) -> float:
    figure = target.rates.get(dtype)
    if figure is None:
        raise _lacks(target, f"{dtype} rate")
    return figure.value * 1e12


def _lacks(target: Target, what: str) -> UsageError:
    hint = (
        "run `llmforge doctor --measure --write machine.yaml`, then use --target machine.yaml"
        if target.kind == "cpu"
        else "add it to the target file"
    )
    return UsageError(f"target {target.name} has no {what}, so its speed cannot be predicted", hint=hint)
