"""Prove the norms of a traced graph at all magnitudes: an epsilon shows in small numbers alone, which no text may have.

A norm is named by its module. The model's own module and the graph's node take the same rows, from 1e-4 to 1e3.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.ir import graph
from llmforge.ir.operators import standard
from llmforge.trace.export.reference import ReferenceModel

MAGNITUDES = (1e-4, 1e-3, 1e-2, 1.0, 1e3)  # of the rows; 1e-4² is 1e-8, and epsilons are 1e-12 … 1e-5
TOLERANCE = 1e-4  # of a row's largest number: fp32
SEED = 20_250_607  # any fixed number

HINT = "this is a bug in llmforge's support of this architecture; nothing was built"


def require_right(model: ir.Model, reference: ReferenceModel) -> int:
    """Hold the norms of `model` against those of transformers' `reference` whose numbers are in memory.

    Return how many were; norms that are no modules are left to runs.

    Raises:
        VerificationError: one gives other numbers; names it.
    """
    modules = {norm.name: norm for norm in reference.norms()}
    rng, proven = np.random.default_rng(SEED), 0
    for node in model.graph:
        module = modules.get(str(node.name).split("/")[0])
        norm = standard.RMSNormalization.of(node) or standard.LayerNormalization.of(node)
        if module is None or norm is None or not module.in_memory:
            continue
        scale = _constant(norm.scale)
        bias = graph.operand(node, 2)
        shift = None if bias is None else _constant(bias)
        if scale is None or (bias is not None and shift is None):
            continue
        x = rng.standard_normal((len(MAGNITUDES), len(scale))).astype(np.float32)
        x *= np.array(MAGNITUDES, np.float32)[:, None]
        wanted = module.compute(x)
        got = _norm(x, scale, shift, norm.epsilon, centred=isinstance(norm, standard.LayerNormalization))
        proven += 1
        if not (np.abs(got - wanted).max(-1) <= TOLERANCE * np.abs(wanted).max(-1)).all():
            row = int(np.argmax(np.abs(got - wanted).max(-1) / np.abs(wanted).max(-1)))
            raise VerificationError(
                f"{node.name} (epsilon {norm.epsilon:g}) gives other numbers than the model's {module.kind} "
                f"for a row of magnitude {MAGNITUDES[row]:g}",
                hint=HINT,
            )
    return proven


def _norm(
    x: NDArray[np.float32],
    scale: NDArray[np.float32],
    shift: NDArray[np.float32] | None,
    epsilon: float,
    *,
    centred: bool,
) -> NDArray[np.float64]:
    """Compute ONNX's RMSNormalization, or LayerNormalization, of the last axis."""
    wide = x.astype(np.float64)
    wide -= wide.mean(-1, keepdims=True) if centred else 0.0
    y = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + epsilon) * scale
    return np.asarray(y if shift is None else y + shift)


def _constant(value: ir.Value) -> NDArray[np.float32] | None:
    """Evaluate a vector that is an initializer, or the sum of two; None: it is something else."""
    if graph.is_constant(value):
        return np.asarray(graph.tensor(value).numpy(), np.float32)
    node = value.producer()
    if node is None or standard.Add.of(node) is None:
        return None
    a, b = (None if part is None else _constant(part) for part in node.inputs)
    return None if a is None or b is None else a + b
