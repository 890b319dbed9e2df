"""The shape of a decoder, as far as bytes and operations depend on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one layer, with what llmforge caches for it; sizes are elements of a head.

    Latent attention reads its latents as the keys and values of one head (`LatentAttention` of docs/dialect.md).
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # keys that a query sees at most; None: all before it
    latent: int | None = None  # elements of the latent that is cached for a token; None: its keys and values are

    def kv_elements(self, ranks: int = 1) -> int:
        """Count what is cached of a token on one of `ranks` devices: they split the heads, and each has all latents."""
        if self.latent is not None:
            return self.latent
        return self.ranked_kv_heads(ranks) * (self.key_dim + self.value_dim)

    def ranked_kv_heads(self, ranks: int) -> int:
        """Count the heads of keys and values on one of `ranks` devices."""
        return -(-self.kv_heads // ranks)

    def seen(self, context: float) -> float:
        """Return how many of `context` tokens a query sees."""
        return context if self.window is None else min(context, float(self.window))


@dataclass(frozen=True)
class LayerSizes:
    """One decoder layer: its parameters by what is done with them, its attention, its state."""

    matrices: int  # parameters of products that every token takes part in
    vectors: int  # norms, biases, sinks
    width: int  # elements of the widest row of activations
    expert: int = 0  # parameters of one routed expert
    experts: int = 0
    chosen: int = 0  # experts of a token
    attention: AttentionShape | None = None
    state: int = 0  # elements of a state of fixed size, of one sequence

    @property
    def parameters(self) -> int:
        """Count all parameters."""
        return self.matrices + self.vectors + self.expert * self.experts

    @property
    def active(self) -> int:
        """Count the parameters that one token uses."""
        return self.matrices + self.vectors + self.expert * self.chosen


@dataclass(frozen=True)
class Shape:
    """A decoder: runs of equal layers, what stands around them, and the tokens it knows."""

    name: str
    architecture: str  # model_type of its configuration
    layers: tuple[tuple[int, LayerSizes], ...]  # (how many, of which)
    hidden: int
    vocabulary: int
    context: int | None  # tokens that it is made for; None: not bounded
    embedding: int  # parameters of tables that are looked up
    head: int  # parameters of the product that gives logits; 0 where `tied`
    vectors: int  # outside of the layers
    tied: bool  # the head is the embedding table
    dtype: str  # that the checkpoint says it is in: "bf16", "fp16", "fp32"

    @property
    def depth(self) -> int:
        """Count the layers."""
        return sum(count for count, _ in self.layers)

    @property
    def parameters(self) -> int:
        """Count all parameters, shared ones once."""
        return self.embedding + self.head + self.vectors + sum(count * layer.parameters for count, layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Count the parameters that one token uses: of experts the chosen ones; all of the tables."""
        return self.embedding + self.head + self.vectors + sum(count * layer.active for count, layer in self.layers)

    @property
    def all_vectors(self) -> int:
        """Count the parameters of vectors, in the layers and outside of them."""
        return self.vectors + sum(count * layer.vectors for count, layer in self.layers)

    @property
    def head_matrix(self) -> int:
        """Count the parameters of the product that gives logits, shared or not."""
        return self.vocabulary * self.hidden

    def attentions(self) -> Iterator[tuple[int, AttentionShape]]:
        """Yield the attention of the layers that have one, and how many they are."""
        for count, layer in self.layers:
            if layer.attention is not None:
                yield count, layer.attention

    def state_elements(self) -> int:
        """Count the elements of fixed-size states of one sequence."""
        return sum(count * layer.state for count, layer in self.layers)


def runs(layers: Sequence[LayerSizes]) -> tuple[tuple[int, LayerSizes], ...]:
    """Join equal neighbours."""
    return tuple((len(list(group)), layer) for layer, group in groupby(layers))
