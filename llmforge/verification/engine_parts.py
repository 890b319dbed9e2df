"""Run an engine for ONNX Runtime part by part, from its files: so that a build never holds it as a whole.

A server holds the weights of an engine twice while it loads them, as they are stored and as kernels want them. A build
of a large model does not: it reads the files that it wrote, and runs a block of them at a time, as the runtime would.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from llmforge.metrics.tokens import require_finite
from llmforge.verification import probe, streamed_execution

STEPS = (2, 1)  # tokens of each: a prompt, and a token behind it


def run(file: Path, context: int, threads: int) -> None:
    """Run the steps of `STEPS` that `context` has room for through the engine in `file`, `model.onnx`.

    Raises:
        UnsupportedError: ONNX Runtime refuses a block.
        VerificationError: a logit is NaN or infinite.
    """
    model = ir.load(file)
    for initializer in model.graph.initializers.values():
        if isinstance(tensor := initializer.const_value, ir.ExternalTensor):
            initializer.const_value = _unmapped(tensor)
    lengths = [(tokens,) for tokens in STEPS][: context - 1]
    steps = probe.schedule("engine", [np.zeros(sum(tokens for (tokens,) in lengths), np.int64)], lengths)
    [made] = streamed_execution.drive(model, [steps], threads=threads, optimize=True)
    for number, logits in enumerate(made):
        require_finite("engine", logits[0], steps.where(number))


def _unmapped(tensor: ir.ExternalTensor) -> ir.LazyTensor:
    """Map the same bytes anew for each reader: an external tensor keeps the pages that it has read."""
    again = partial(
        ir.ExternalTensor,
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=str(tensor.name),
        base_dir=tensor.base_dir,
    )
    return ir.LazyTensor(again, tensor.dtype, tensor.shape, name=tensor.name)
