"""What low-rank correction buys beside as many bytes in the codes: KLD on text held out, fp32 arithmetic.

    python -m benchmarks.low_rank [CHECKPOINT] --bits 3 --ranks 0.5 1 2 --tokens 8192 --held-tokens 4096

Each row calibrates the linears of the decoder anew: codes of `bits`, of more bits, and of `bits` with corrections that
take so many bits for each weight (factors in fp32; in 16 bits they take half). Embedding and head stay as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.calibration import drawn
from llmforge.calibration import calibrate
from llmforge.calibration.quantize import corrected
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import Demand, LowRankDemand, Statistics, WeightDemand

ROOT = Path(__file__).parent.parent
RESAMPLES = 2000


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?", type=Path, default=ROOT / "tests/data/docs-llama-7m")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--larger", type=int, nargs="*", default=[4])
    parser.add_argument("--ranks", type=float, nargs="*", default=[0.5, 1.0, 2.0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--held-tokens", type=int, default=4096)
    given = parser.parse_args()
    checkpoint = Checkpoint.open(given.checkpoint)
    fitted, held = drawn(checkpoint, 512, given.tokens, held=True)
    held = held[:: max(1, sum(len(window.ids) for window in held) // given.held_tokens)]
    tokens = np.array([len(window.ids) for window in held], np.float64)
    rows: list[tuple[str, list[Demand]]] = [(f"{bits} bits", [_codes(bits)]) for bits in (given.bits, *given.larger)]
    for bits in given.ranks:
        demands: list[Demand] = [_codes(given.bits), LowRankDemand(bits, "fp32", 0.01)]
        rows.append((f"{given.bits} bits, low rank within {bits:g}", demands))
    plain: list[float] | None = None
    for name, demands in rows:
        found = calibrate(checkpoint, fitted, demands)
        lost = _lost(checkpoint, held, found)
        plain = plain or lost
        print(f"|{name}|{_bits(found):.2f}|{_interval(lost, tokens)}|{_interval(np.subtract(lost, plain), tokens)}|")


def _codes(bits: int) -> WeightDemand:
    return WeightDemand(Gptq(), Grid(bits, 32, False, "int8"))


def _bits(found: Statistics) -> float:
    """Return bits for each number of the linears, of codes with their scales and of factors."""
    numbers = sum(matrix.codes.size for matrix in found.linears.values())
    codes = sum(matrix.codes.size * matrix.grid.format.bits_per_number for matrix in found.linears.values())
    factors = sum(each.b.size for each in found.low_rank.values())
    factors += sum({each.group: each.a.size for each in found.low_rank.values()}.values())
    return (codes + 32 * factors) / numbers


def _lost(checkpoint: Checkpoint, held: Sequence[TokenWindow], found: Statistics) -> list[float]:
    """Return the KLD of each window, nats, summed over its tokens."""
    skeleton = Skeleton.build(checkpoint)
    ids = [window.ids for window in held]
    with torch.no_grad():
        calls, before = skeleton.enter(ids)
        after = list(before)
        for index in range(len(skeleton.layers)):
            layer = skeleton.load(index, calls[index])
            before = [layer.run(window, state) for window, state in enumerate(before)]
            for name in [name for name in found.linears if name.startswith(f"{skeleton.prefixes[index]}.")]:
                layer.set_weight(name, corrected(found.linears[name], found.low_rank.get(name)))
            after = [layer.run(window, state) for window, state in enumerate(after)]
        leave = skeleton.leaving(ids)
        totals = []
        for window, states in enumerate(zip(before, after, strict=True)):
            p, q = (leave(window, state)[0][0].float().log_softmax(-1) for state in states)
            totals.append(float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)))
    return totals


def _interval(lost: Sequence[float], tokens: NDArray[np.float64]) -> str:
    """Return 1000 times the mean a token, with 95 % of resampled windows."""
    sums, random = np.asarray(lost), np.random.default_rng(0)
    drawn = random.integers(0, len(sums), (RESAMPLES, len(sums)))
    means = 1000 * sums[drawn].sum(1) / tokens[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{1000 * sums.sum() / tokens.sum():.2f} ({low:.2f} … {high:.2f})"


if __name__ == "__main__":
    main()
