"""Prove that a row with an adapter gets the logits of the graph whose weights have that adapter merged into them.

The graph before `add-adapters`, its weights W replaced by W + scale·(B·A)ᵀ in fp32, against the graph after it, in one
batch with rows of no adapter, which must get what the graph before gives. Both run block by block, whatever their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.checkpoint.adapters import Adapter, LowRankUpdate
from llmforge.checkpoint.adapters.merging import read
from llmforge.ir import graph, interface
from llmforge.ir.derived import computed
from llmforge.ir.operators.standard import MatMul
from llmforge.rewrite import linear
from llmforge.verification import comparison, probe, streamed_execution
from llmforge.verification.verifier import TOLERANCE

MOST = 3  # adapters that are run: the first, one in the middle, the last


def prove(before: ir.Model, after: ir.Model, adapters: Sequence[Adapter], *, vocabulary: int, threads: int) -> str:
    """Hold `after` to `before` with each of some adapters merged; return a note of what was found.

    Both graphs are fp32, and may differ as a pass that rounds may make them differ.

    Raises:
        VerificationError: a row has other logits.
        UnsupportedError: ONNX Runtime refuses a graph.
    """
    runs, tolerance = probe.random_runs(vocabulary), TOLERANCE[ir.DataType.FLOAT]
    base = streamed_execution.drive(before, runs, threads=threads)
    chosen = sorted({1, len(adapters) // 2 + 1, len(adapters)})[:MOST]
    largest = 0.0
    for number in chosen:
        adapter = adapters[number - 1]
        expected = streamed_execution.drive(merged(before, adapter), runs, threads=threads)
        feeding = streamed_execution.Feeding(given=partial(_given, number))
        made = streamed_execution.outputs(after, runs, [interface.LOGITS], feeding, threads=threads)
        moved = False
        for run, plain, other, steps in zip(runs, base, expected, made, strict=True):
            chooses = _given(number, run)[interface.ADAPTER_IDS][:, None] == number
            for index, step in enumerate(run.steps):
                logits = steps[index][interface.LOGITS]
                wanted = np.where(chooses[..., None], other[index], plain[index])
                away = comparison.deviation(wanted[step.valid], logits[step.valid])
                if not away <= tolerance:
                    raise VerificationError(
                        f"adapter {adapter.name}: logits are {away:.3g} standard deviations from those of merged "
                        f"weights in {run.where(index)}; allowed is {tolerance:.3g}"
                    )
                largest = max(largest, away)
                moved |= bool((other[index] != plain[index]).any())
        if not moved:
            raise VerificationError(f"adapter {adapter.name} moves no logit: its matrices hold nothing but zeros")
    names = ", ".join(adapters[number - 1].name for number in chosen)
    return (
        f"adapters: rows with {names}, and rows beside them with none, have the logits of merged weights within "
        f"{largest:.2g} of their standard deviation ({len(chosen)} of {len(adapters)} adapters)"
    )


def merged(model: ir.Model, adapter: Adapter) -> ir.Model:
    """Clone `model` with an adapter merged into the weights that its linear layers read, lazily, in fp32."""
    clone = model.clone()
    for product in MatMul.all(clone):
        names = graph.sources(product.w) if product.w.is_initializer() else []
        parts = [adapter.low_rank.get(name.removesuffix(".weight")) for name in names]
        if any(parts):
            weight = graph.tensor(product.w)
            product.w.const_value = _merged(weight, parts, linear.widths(product.w), adapter.source.weight)
    return clone


def _merged(
    tensor: ir.TensorProtocol, parts: Sequence[LowRankUpdate | None], widths: Sequence[int], weight: float
) -> ir.LazyTensor:
    def compute() -> NDArray[np.float32]:
        result = np.array(tensor.numpy(), np.float32)  # [K, N]
        at = 0
        for part, width in zip(parts, widths, strict=True):
            if part is not None:
                a, b = read(part.a).astype(np.float32), read(part.b).astype(np.float32)
                result[:, at : at + width] += np.float32(part.scale * weight) * (b @ a).T
            at += width
        return result

    return computed(compute, ir.DataType.FLOAT, tensor.shape.numpy(), str(tensor.name))


def _given(number: int, run: probe.Run) -> dict[str, NDArray[Any]]:
    """Give the first row of a run the adapter `number`, and every other one after it; the others have none."""
    ids = np.zeros(run.batch, np.int64)
    ids[::2] = number
    return {interface.ADAPTER_IDS: ids}
