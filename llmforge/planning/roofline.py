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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmforge.base.errors import UsageError
from llmforge.planning.scheme import BITS, Scheme
from llmforge.planning.shape import Attention, Shape
from llmforge.targets import Rate, Target

Bound = Literal["memory", "compute", "links", "overhead"]
LARGEST_BATCH = 1 << 20  # beyond it a decode step is said never to be bound by compute
ALL_REDUCES = 2  # of a layer: behind attention, and behind the MLP (Shoeybi et al. 2019, "Megatron-LM", section 3)


@dataclass(frozen=True)
class Ceilings:
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
    def of(cls, target: Target, scheme: Scheme) -> Ceilings:
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
            rate_share=target.matrix_share(scheme.product).value,
            attention_share=target.matrix_share(scheme.compute).value,
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
    ceilings: Ceilings

    @property
    def seconds(self) -> float:
        """Time of the step; memory and compute overlap, the rest does not."""
        return max(self.memory_s, self.compute_s) + self.links_s + self.overhead_s

    @property
    def bound(self) -> Bound:
        """The part that takes longest."""
        parts: dict[Bound, float] = {
            "memory": self.memory_s,
            "compute": self.compute_s,
            "links": self.links_s,
            "overhead": self.overhead_s,
        }
        return max(parts, key=lambda part: parts[part])

    @property
    def intensity(self) -> float:
        """Operations for each byte (arithmetic intensity)."""
        return self.operations / self.bytes

    @property
    def mbu(self) -> float:
        """Model bandwidth utilization: bytes over time over the peak bandwidth."""
        return utilization(self.bytes, self.seconds, self.ceilings.bandwidth)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: operations over time over the peak rate."""
        return utilization(self.operations, self.seconds, self.ceilings.rate)


def utilization(amount: float, seconds: float, peak: float) -> float:
    """Return which part of `peak` a second is reached by `amount` in `seconds`."""
    return amount / seconds / peak


def decode(shape: Shape, scheme: Scheme, ceilings: Ceilings, batch: int, context: float, ranks: int = 1) -> StepCost:
    """Time a step that gives one token to each of `batch` sequences, each with `context` tokens in its cache."""
    seen = sum(
        count * attention.kv_elements(ranks) * attention.seen(context) for count, attention in shape.attentions()
    )
    cached = batch * (seen * BITS[scheme.kv] / 8 + scheme.kv_bytes_per_token(shape, ranks))
    attended = batch * sum(
        count * 2 * _pair(attention) * attention.seen(context + 1) for count, attention in shape.attentions()
    )
    return _step(shape, scheme, ceilings, rows=batch, heads=batch, cached=cached, attended=attended, ranks=ranks)


def prefill(shape: Shape, scheme: Scheme, ceilings: Ceilings, tokens: int, ranks: int = 1) -> StepCost:
    """Time the step that reads a prompt of `tokens` tokens and gives the first token."""
    cached = tokens * scheme.kv_bytes_per_token(shape, ranks)
    attended = sum(
        count * 2 * _pair(attention) * _pairs(tokens, attention.window) for count, attention in shape.attentions()
    )
    return _step(shape, scheme, ceilings, rows=tokens, heads=1, cached=cached, attended=attended, ranks=ranks)


def weights_read(shape: Shape, scheme: Scheme, rows: float, ranks: int = 1) -> float:
    """Return the bytes of weights that a step over `rows` tokens reads on one of `ranks` devices."""
    split = sum(
        count * (layer.matrices + layer.expert * _touched(layer.experts, layer.chosen, rows))
        for count, layer in shape.layers
    )
    vectors = shape.vectors + sum(count * layer.vectors for count, layer in shape.layers)
    return (scheme.bytes_of(split) + scheme.head_bytes(shape)) / ranks + scheme.bytes_of(vectors, scheme.compute)


def turning_batch(shape: Shape, scheme: Scheme, ceilings: Ceilings, context: float, ranks: int = 1) -> int | None:
    """Find the smallest batch whose decode step takes compute as long as memory; None where no batch does.

    Every sequence brings its own cache, so that with a long context no batch ever does.
    """

    def bound(batch: int) -> bool:
        step = decode(shape, scheme, ceilings, batch, context, ranks)
        return step.compute_s >= step.memory_s

    high = 1
    while not bound(high):
        high *= 2
        if high > LARGEST_BATCH:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) else (middle, high)
    return high


def request_seconds(
    shape: Shape, scheme: Scheme, ceilings: Ceilings, batch: int, prompt: int, output: int, ranks: int = 1
) -> tuple[float, float]:
    """Return what one request takes of the devices' time when `batch` are served at once: reading and writing.

    Prompts are read one at a time between decode steps (in-flight batching), with caches half full on average.
    """
    reading = prefill(shape, scheme, ceilings, prompt, ranks).seconds
    step = decode(shape, scheme, ceilings, batch, prompt + output / 2, ranks).seconds
    return reading, output * step / batch


def degrees(shape: Shape, target: Target) -> Iterator[int]:
    """Yield the numbers of devices, powers of two, that heads and matrices can be split over."""
    ranks = 1
    domain = 1 if target.interconnect is None else target.interconnect.domain
    while ranks <= min(domain, 8) and all(attention.heads % ranks == 0 for _, attention in shape.attentions()):
        yield ranks
        ranks *= 2


def _step(
    shape: Shape,
    scheme: Scheme,
    ceilings: Ceilings,
    *,
    rows: int,
    heads: int,
    cached: float,
    attended: float,
    ranks: int,
) -> StepCost:
    """Put a step over `rows` tokens together, `heads` of which get logits."""
    states = 2 * heads * scheme.state_bytes(shape, ranks)
    moved = weights_read(shape, scheme, rows, ranks) + cached + states
    products = 2 * rows * sum(count * (layer.matrices + layer.expert * layer.chosen) for count, layer in shape.layers)
    products += 2 * heads * shape.head_matrix
    products += 2 * rows * shape.state_elements()  # a state is updated and read once a token
    compute_s = products / ranks / (ceilings.rate * ceilings.rate_share)
    compute_s += attended / ranks / (ceilings.attention_rate * ceilings.attention_share)
    return StepCost(
        bytes=moved,
        operations=(products + attended) / ranks,
        memory_s=moved / (ceilings.bandwidth * ceilings.bandwidth_share),
        compute_s=compute_s,
        links_s=_all_reduces(shape, scheme, ceilings, rows, ranks),
        overhead_s=shape.depth * ceilings.layer_s,
        ceilings=ceilings,
    )


def _all_reduces(shape: Shape, scheme: Scheme, ceilings: Ceilings, rows: int, ranks: int) -> float:
    """Time the all-reduces of a step: in a ring, 2 · (n - 1) / n of the bytes leave each device."""
    if ranks == 1:
        return 0.0
    size = rows * shape.hidden * BITS[scheme.compute] / 8
    one = 2 * (ranks - 1) / ranks * size / ceilings.link + ceilings.collective_s
    return ALL_REDUCES * shape.depth * one


def _touched(experts: int, chosen: int, rows: float) -> float:
    """Return how many of `experts` are chosen by any of `rows` tokens, on average."""
    return experts * (1 - (1 - chosen / experts) ** rows) if experts else 0.0


def _pair(attention: Attention) -> int:
    """Count the multiplications of one query with one key and its value, over all heads."""
    return attention.heads * (attention.key_dim + attention.value_dim)


def _pairs(tokens: int, window: int | None) -> float:
    """Count the pairs of a query and a key that it sees in a prompt."""
    full = tokens if window is None else min(tokens, window)
    return full * (full + 1) / 2 + (tokens - full) * full


def _rate(target: Target, dtype: Rate) -> float:
    figure = target.rates.get(dtype)
    if figure is None:
        raise _lacks(target, f"rate of products in {dtype}")
    return figure.value * 1e12


def _lacks(target: Target, what: str) -> UsageError:
    hint = (
        "`llmforge doctor --measure --write machine.yaml` makes one of this machine: --target machine.yaml"
        if target.kind == "cpu"
        else "add the figure to its file"
    )
    return UsageError(f"target {target.name} has no {what}, so nothing can be timed on it", hint=hint)
