"""Artifacts for servers of others: what of a checkpoint is written, and the proxy that is measured.

Their servers load parameters under the name of an architecture, and no graph. Where none of them is available, quality
is measured on llmforge's own engine of the same graph, on the CPU here: what was written are the codes of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from llmforge import passes, targets
from llmforge.backends import BACKENDS, BackendName, engines, exported_parameters
from llmforge.backends.engines import BuildRequest
from llmforge.backends.exported_parameters import Exported
from llmforge.backends.onnxruntime import builder as onnxruntime
from llmforge.base.errors import UnsupportedError
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.ir.operators.standard import DequantizeLinear, MatMul
from llmforge.metrics.agreement import RuntimeName
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Pass
from llmforge.runtime.config import RuntimeConfig
from llmforge.targets import Target
from llmforge.trace.export.weights import BINDINGS, Bindings


def exported(model: ir.Model, traced: ir.Model, checkpoint: Checkpoint) -> Exported:
    """Find what passes made of the parameters of `traced`, whose weights are bound to `checkpoint`.

    Raises:
        UnsupportedError: something that no file of parameters can say.
    """
    if checkpoint.layout is not None:
        raise UnsupportedError(
            f"{checkpoint.name} is quantized already; servers of others get what is made of unquantized weights",
            hint="build from the checkpoint that it was made of",
        )
    bindings: Bindings = traced.meta[BINDINGS]
    bound = {
        name: (source.tensors[0], transposed)
        for name, (source, transposed) in bindings.of.items()
        if source.converted is None and len(source.tensors) == 1
    }
    stacked = {name: source.matrices for name, (source, _) in bindings.of.items() if source.matrices}
    return exported_parameters.exported(model, traced, checkpoint, bound, stacked)


def check(
    spec: EngineSpec, target: Target, steps: Sequence[Pass], model: ir.Model, traced: ir.Model, checkpoint: Checkpoint
) -> None:
    """Return if what `steps` left of a graph can be written for servers of others, where they are to load it, or here.

    Raises:
        UnsupportedError: it cannot.
    """
    exported_parameters.check_passes(spec.backend, [type(step) for step in steps], passes.ALL)
    if BACKENDS[spec.backend].export_format is not None:
        engines.exporter(spec.backend, target).check(exported(model, traced, checkpoint), spec)


def build(model: ir.Model, spec: EngineSpec, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    """Build llmforge's own engine of `model` for this machine's CPU in `folder`, which may then be loaded."""
    target = targets.local()
    lowered, _ = onnxruntime.lower(_without_fp8_products(model), target)
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    onnxruntime.build(BuildRequest(lowered, folder / "engine", spec, target, *ends, progress))
    onnxruntime.write_tokenizer(checkpoint, folder / "tokenizer")


def _without_fp8_products(model: ir.Model) -> ir.Model:
    """Let products read what is rounded to fp8 through Cast and Mul in place of DequantizeLinear: the same numbers.

    ONNX Runtime (1.31) makes MatMulIntegerToFloat of two DequantizeLinear of fp8 as well, which does not take it.
    """
    copy = model.clone()
    for product in MatMul.all(copy):
        read = DequantizeLinear.made(product.x)
        if read is None or read.codes.dtype != ir.DataType.FLOAT8E4M3FN:
            continue
        place, name, like = product.node, product.name, product.x
        [wide] = graph.insert(place, "Cast", [read.codes], {"to": ir.DataType.FLOAT}, name=f"{name}/codes_fp32")
        [values] = graph.insert(place, "Mul", [wide, read.scales], name=f"{name}/dequantized")
        for value in (wide, values):
            value.type, value.shape = like.type, like.shape
        product.x = values
    graph.drop_unused(copy)
    return copy


def note(backend: BackendName, config: RuntimeConfig, runtime: RuntimeName | None, version: str) -> str:
    """Say what quality is of; a `runtime`, by its `version`, has run what was written."""
    record = BACKENDS[backend].export_format
    assert record is not None
    if runtime is not None:
        emulated = "" if runtime == record.served_by else f"; emulated: {record.servers} did not run here"
        return f"quality: of the files in engine/, as {version} runs them on a CPU{emulated}"
    return (
        f"quality: emulated, of the same graph, as llmforge's own engine (ONNX Runtime {config.onnxruntime}) runs it "
        f"on a CPU; {record.servers} did not run engine/, whose codes were read back and are equal"
    )
