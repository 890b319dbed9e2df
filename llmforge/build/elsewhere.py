"""Artifacts for servers of others: what of a checkpoint is written, and what stands in for them to be measured.

Their servers load parameters under the name of an architecture, and no graph. Where none of them is at hand, quality
is measured on llmforge's own engine of the same graph, on the CPU here: what was written are the codes of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from llmforge import engines, targets
from llmforge.base.backends import BACKENDS, BackendName
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.engines import BuildRequest, onnxruntime, parameters
from llmforge.engines.parameters import Exported
from llmforge.recipe import EngineSpec
from llmforge.runtime.backends.config import RuntimeConfig
from llmforge.targets import Target
from llmforge.trace.export.weights import BINDINGS, Bindings


def exported(model: ir.Model, traced: ir.Model, checkpoint: Checkpoint) -> Exported:
    """Find what passes made of the parameters of `traced`, whose weights are bound to `checkpoint`.

    Raises:
        UnsupportedError: something that no file of parameters can say.
    """
    bindings: Bindings = traced.meta[BINDINGS]
    bound = {
        name: (source.tensors[0], transposed)
        for name, (source, transposed) in bindings.of.items()
        if source.converted is None and len(source.tensors) == 1
    }
    return parameters.exported(model, traced, checkpoint, bound)


def check(
    spec: EngineSpec, target: Target, passes: Sequence[str], model: ir.Model, traced: ir.Model, checkpoint: Checkpoint
) -> None:
    """Return if what `passes` left of a graph can be written for servers of others, where they are to load it.

    Raises:
        UnsupportedError: it cannot.
    """
    if BACKENDS[spec.backend].elsewhere is not None:
        parameters.check_passes(spec.backend, tuple(passes))
        engines.exporter(spec.backend, target).check(exported(model, traced, checkpoint), spec)


def stand_in(model: ir.Model, spec: EngineSpec, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    """Build llmforge's own engine of `model` for this machine's CPU in `folder`, which may then be loaded."""
    target = targets.local()
    lowered, _ = onnxruntime.lower(model, target)
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    onnxruntime.build(BuildRequest(lowered, folder / "engine", spec, target, *ends, progress))
    onnxruntime.write_tokenizer(checkpoint, folder / "tokenizer")


def note(backend: BackendName, config: RuntimeConfig, runtime: str | None) -> str:
    """Say what quality is of; `runtime` has run what was written."""
    record = BACKENDS[backend].elsewhere
    assert record is not None
    if runtime is not None:
        return f"quality: of the files in engine/, as {runtime} runs them on a CPU; {record.servers} did not run here"
    return (
        f"quality: of the same graph, as llmforge's own engine (ONNX Runtime {config.onnxruntime}) runs it on a CPU; "
        f"neither {record.runtime} nor {record.servers} ran engine/, whose codes were read back and are equal"
    )
