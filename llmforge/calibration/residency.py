"""How much memory calibration takes on a device, by the widths of layers: an upper bound, and the windows that fit.

All is fp32, but copies of weights in bf16. At one time there are the weights of one layer; of each window that stays,
its hidden states and what the layer's linears read and make of it; the work of one window; and sums over tokens: of
what one linear reads those of three parts of the windows (the total, the last share that was added, and the one that is
being summed), or one for each linear, and the gradients of a few windows that are not counted yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = 4  # bytes, of fp32
LOGITS = 1 << 24  # that are in memory at a time
MOST_TOKENS = 16384  # that gradients are taken of
USABLE = 0.9  # of the free memory: the rest is for what torch's allocator cannot fill
PARTS = 3  # of the windows, whose sums there are at one time
TOGETHER = 8  # windows whose gradients are held before they are summed, each linear on a thread
STATES = 4  # hidden states of a window: the checkpoint's, the quantized layers', and what each of them adds to
LOGITS_HELD = 6  # [tokens, vocabulary] at one time: logits, softmax, their gradient, and what is made on the way
SCORES = 4  # matrices [heads, tokens, tokens] of attention that is not fused: scores, mask added, softmax, a copy


@dataclass(frozen=True)
class LayerWidths:
    """A decoder layer with so many parameters, and the shapes [N, K] of its linears, or of experts' products."""

    hidden: int
    parameters: int
    linears: tuple[tuple[int, int], ...]
    heads: int = 1

    @property
    def weights_bytes(self) -> int:
        """Of its weights, one of them twice while it is exchanged, and of copies in bf16 that are multiplied with."""
        return NUMBER * (self.parameters + max((n * k for n, k in self.linears), default=0)) + 2 * self.parameters

    def sums_bytes(self, longest: int) -> int:
        """Of sums over tokens: of what one linear reads, where codes are chosen, or of all linears, on the way back.

        The former are H and C, [K, K], and R, [N, K]; the latter g gᵀ, [N, N], and, where formats are priced, x xᵀ with
        and without weights, [K, K], besides what windows of up to `longest` tokens have left to be counted.
        """
        chosen = max((2 * k * k + n * k for n, k in self.linears), default=0)
        backwards = sum(n * n + 2 * k * k for n, k in self.linears)
        return max(NUMBER * PARTS * chosen, NUMBER * backwards + TOGETHER * longest * self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """Of what is held of a token: what linears read in the checkpoint, and what a run that waits has made."""
        return NUMBER * (STATES * self.hidden + sum(n + k for n, k in self.linears))

    def work_bytes(self, tokens: int) -> int:
        """Of the run of one window, forwards or backwards, besides what is held of it."""
        return 2 * tokens * self.token_bytes + NUMBER * SCORES * self.heads * tokens * tokens


@dataclass(frozen=True)
class ModelWidths:
    """A decoder whose head makes `vocabulary` logits of a token, of `chunk` tokens at a time."""

    layers: tuple[LayerWidths, ...]
    vocabulary: int
    chunk: int

    def resident_bytes(self, lengths: Sequence[int], windows: int) -> int:
        """Return how much a calibration on windows of these `lengths` takes, of which the first `windows` stay."""
        longest, held = max(lengths), sum(lengths[:windows])
        calls = NUMBER * sum(2 * length * (length + layer.hidden) for layer in self.layers[:1] for length in {*lengths})
        walks = (
            layer.weights_bytes + layer.sums_bytes(longest) + layer.work_bytes(longest) + held * layer.token_bytes
            for layer in self.layers
        )
        return calls + max(max(walks), self._loss_bytes(lengths))

    def _loss_bytes(self, lengths: Sequence[int]) -> int:
        """Return what the loss takes: the head, the layer before it, hidden states of all windows, some logits."""
        last = self.layers[-1]
        matrices = self.vocabulary * last.hidden + PARTS * last.hidden * last.hidden
        longest = max(lengths)
        rows = STATES * last.hidden * min(sum(lengths), MOST_TOKENS + longest)
        rows += LOGITS_HELD * min(self.chunk, longest) * self.vocabulary
        return last.weights_bytes + NUMBER * (matrices + rows)

    def windows_within(self, free_bytes: int, lengths: Sequence[int]) -> int:
        """Return how many windows of these `lengths` may stay on a device with so much free memory; 0: none."""
        counts = range(len(lengths), 0, -1)
        return next((n for n in counts if self.resident_bytes(lengths, n) <= USABLE * free_bytes), 0)
