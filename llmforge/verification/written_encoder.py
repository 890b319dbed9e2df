"""The engine of an encoder as it lies there, held to the graph that was proven last (see `written_engine`)."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from llmforge.backends import loading
from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import operators
from llmforge.ir.operators.standard import QuantizeLinear
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.verification import encoder_runs, probe

# In root mean squares, as `encoder_trace.MOST`: kernels and fusions add in another order.
MOST = 1e-4
# Where kernels round activations to int8, a number between two codes lands on either: 2 layers of 128 moved by 3e-4.
MOST_ROUNDED = 2e-2


def require_same(checkpoint: Checkpoint, model: ir.Model, folder: Path, digest: str, *, threads: int) -> str:
    """Hold the engine in `folder` to `model`, and say in a line for the report what was run.

    `digest`, of the engine's files in hexadecimal, seeds what is drawn.

    Raises:
        VerificationError: the engine gives other embeddings or scores.
    """
    config = RuntimeConfig.read(folder / FILE)
    engine = loading.open_encoder(folder, config, threads)
    assert checkpoint.encoding is not None
    proven = encoder_runs.open_graph(model, checkpoint.encoding, threads, probe.InitializerArrays())
    most, count, longest = 0.0, 0, 0
    allowed = MOST_ROUNDED if _rounds(model) else MOST
    borders = [64, 128] if engine.config.max_tokens > 128 else []
    for run in encoder_runs.make_runs(config.vocabulary, engine.config.max_tokens, borders, int(digest[:16], 16), []):
        types = run.types if engine.config.token_types else None
        found = encoder_runs.deviation(proven.encode(run.sequences, types), engine.encode(run.sequences, types))
        if not found <= allowed:
            raise VerificationError(
                f"the engine that was written does not compute what was proven: {run.name} differ by {found:.3g} of "
                f"the mean; allowed are {allowed:g}",
                hint="this is a bug in llmforge, or something else wrote to the engine; nothing was published",
            )
        most, count = max(most, found), count + len(run.sequences)
        longest = max(longest, *map(len, run.sequences))
    return (
        f"engine: as written, it computes what was proven, on {count} sequences of up to {longest} tokens "
        f"(largest difference: {most:.2g} of the mean)"
    )


def _rounds(model: ir.Model) -> bool:
    """Say whether a kernel of `model` rounds what it reads."""
    views = [operators.view(node) for node in model.graph]
    return any(isinstance(view, QuantizeLinear) or (view is not None and view.rounds) for view in views)
