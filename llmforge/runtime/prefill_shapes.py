"""The numbers of tokens that reach a device at once: a few, so that kernels that are made for each are made at load.

From SM 90 on cuDNN's attention builds, and keeps, a plan for each exact length: 55 to 400 ms, in the middle of an
answer, and for as many lengths as prompts have. So a piece of a prompt is padded to the next shape. What stands after
its end is causal attention's future: no token sees it, and the next one's keys overwrite it.

Pieces of several prompts run in one step, as rows of one shape. A GPU reads all weights for any step, and takes no
longer for some 300 tokens (H100 in fp16: 989 TFLOP/s over 3.35 TB/s) than for a few; beyond, padding costs what it is.
So a step of several prompts has no more tokens than the longest of one, and each row a quarter of them at most.
"""

from __future__ import annotations

from dataclasses import dataclass

# Tokens of a prompt that run at once. It bounds the memory of activations and of the attention scores.
PREFILL_CHUNK = 512
# Doubling wastes half of a piece's work at most; what is shorter than the first costs a GPU no less.
SHAPES = tuple(64 << i for i in range(6) if 64 << i <= PREFILL_CHUNK)
ROWS = (2, 4, 8)  # of steps of several prompts


def together(shapes: tuple[int, ...] = SHAPES) -> tuple[tuple[int, int], ...]:
    """List rows and tokens of the steps that read several prompts, where those of one have some `shapes`."""
    most = max(shapes, default=0)
    return tuple((rows, tokens) for rows in ROWS for tokens in shapes if rows * tokens <= most and 4 * tokens <= most)


@dataclass(frozen=True)
class PaddedPiece:
    """Tokens `start` … `start + tokens - 1` of a step, which run as `padded` tokens."""

    start: int
    tokens: int
    padded: int


def pieces(tokens: int, room: int, shapes: tuple[int, ...] = SHAPES) -> list[PaddedPiece]:
    """Cut a step of `tokens` tokens a row, for which a cache has `room`, into pieces of some `shapes`, or of one token.

    One piece, where the padding has room: elsewhere as many tokens as fill a shape, and the last ones alone.

    Raises:
        ValueError: the tokens have no room.
    """
    if tokens > room:
        raise ValueError(f"{tokens} tokens, and room for {room}")
    found, start = [], 0
    while start < tokens:
        left = tokens - start
        padded = next((shape for shape in shapes if left <= shape <= room - start), 0)
        whole = max((shape for shape in shapes if shape <= left), default=1)
        found.append(PaddedPiece(start, left, padded) if padded and left > 1 else PaddedPiece(start, whole, whole))
        start += found[-1].tokens
    return found
