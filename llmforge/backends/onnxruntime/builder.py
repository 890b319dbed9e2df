"""The engine for ONNX Runtime on the CPU: `model.onnx`, `model.onnx.data` and `runtime.json`.

The same model and options give the same bytes: nothing of the machine, of paths or of time is written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as registry

from llmforge import native
from llmforge.backends import onnx_file, signatures
from llmforge.backends.engines import WHOLE_BYTES, BuildRequest, BuiltEngine
from llmforge.backends.onnxruntime import kernels
from llmforge.backends.onnxruntime.encoder import OnnxEncoder
from llmforge.backends.onnxruntime.kernels import Kernel
from llmforge.backends.onnxruntime.session import PROVIDER, Session
from llmforge.backends.ranks import group
from llmforge.backends.ranks import session as rank_session
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, graph, moved_weights, operators
from llmforge.ir.operators import canonical, cpu
from llmforge.ir.operators.contrib import FusedMatMul, MatMulIntegerToFloat
from llmforge.ir.operators.record import CANONICAL
from llmforge.ir.operators.standard import Constant, DequantizeLinear, MatMul, QuantizeLinear, Transpose
from llmforge.ir.recurrence import Recurrence
from llmforge.recipe import EngineSpec
from llmforge.rewrite import cpu_attention
from llmforge.rewrite.pass_base import Changes, Rewritten
from llmforge.runtime.artifact_files import TEMPLATE_FILE, TOKENIZER_FILES
from llmforge.runtime.config import FILE, MODEL_FILE, SessionConfig, SessionOptions
from llmforge.runtime.interface import C, Decoder, StepInputs
from llmforge.targets import Isa, Target

_AS_STORED = {"session.disable_prepacking": "1"}


def require_host(target: Target, spec: EngineSpec) -> None:
    """Return if this machine has the target's instruction set: an engine is run as it is built.

    Raises:
        EnvironmentLacks: it has not, ONNX Runtime is not installed, or several ranks are wanted and cannot meet here.
    """
    target.require_here()
    if spec.tensor_parallel > 1:
        group.require()


def lower(model: ir.Model, target: Target, spec: EngineSpec | None = None) -> tuple[ir.Model, Changes]:
    """Rewrite what the passes left into operators that ONNX Runtime runs on the CPU; `spec` changes nothing
    but that `engine.tensorrt` is refused.

    Operators of the canonical dialect are expanded to standard ONNX, but for LinearAttention, which ONNX Runtime has a
    kernel for; `MatMul(x, Transpose(W))` of a tied head becomes FusedMatMul(x, W), so that the file holds the embedding
    once and loading makes no transposed copy; products of int8 codes become MatMulIntegerToFloat; what is computed from
    small constants alone becomes one.
    The given model is left alone, and its tensors are shared.

    Raises:
        UnsupportedError: the target is no CPU, or no CPU kernel exists for an operator of the graph.
    """
    if target.kind != "cpu":
        raise UnsupportedError(f"target {target.name} is a {target.kind}; this engine runs on CPUs")
    if spec is not None and spec.tensorrt:
        raise UnsupportedError(f"engine.tensorrt: target {target.name} is a CPU", hint="choose a GPU, or leave it out")
    changes = Changes()
    meeting = _with_collectives(model)
    lowered, changes.rewritten = expand(meeting)
    changes.rewritten += write_integer_products(lowered)
    check_operators(lowered)
    return lowered, changes


def _with_collectives(model: ir.Model) -> ir.Model:
    """Clone the graph of a rank with the collectives of our own kernels; any other is returned as it is."""
    if not any(operators.is_a(node, canonical.AllReduce, canonical.AllGather) for node in model.graph):
        return model
    meeting = model.clone()
    for node in list(meeting.graph):
        view = operators.view(node)
        if isinstance(view, canonical.AllReduce | canonical.AllGather):
            own = cpu.CpuAllReduce if isinstance(view, canonical.AllReduce) else cpu.CpuAllGather
            made = own.insert(node, {"x": view.x}, {"ranks": view.ranks}, name=str(node.name))
            graph.replace_value(node.outputs[0], made.node.outputs[0])
    graph.drop_unused(meeting)
    return meeting


def expand(model: ir.Model) -> tuple[ir.Model, list[Rewritten]]:
    """Clone `model` in operators that ONNX Runtime has kernels for on any of its providers, and list what changed."""
    own = [node for node in model.graph.all_nodes() if node.domain == CANONICAL]
    rewritten = [Rewritten(str(node.name), _becomes(node)) for node in own]
    lowered = model.clone()
    for attention in canonical.EncoderAttention.all(lowered) if native.library() is not None else []:
        cpu_attention.lower_encoder(attention)
    recurrence = Recurrence(lowered)
    for layer in canonical.LinearAttention.all(lowered):
        recurrence.call_kernel(layer)
    lowered = dialect.expand(lowered) if own else lowered
    rewritten += fuse_transposed_weights(lowered)
    if folded := moved_weights.fold_constants(lowered):
        rewritten.append(Rewritten(folded[0], f"{len(folded)} constant nodes folded"))
    return lowered, rewritten


def _becomes(node: ir.Node) -> str:
    if canonical.EncoderAttention.matches(node) and native.library() is not None:
        return f"{node.op_type} lowered to the operator of llmforge.cpu"
    if canonical.LinearAttention.matches(node):  # four times faster than the expansion, six in a prefill
        return f"{node.op_type} lowered to ONNX Runtime's operator"
    return f"{node.op_type} expanded to standard ONNX"


def fuse_transposed_weights(model: ir.Model) -> list[Rewritten]:
    """Make `MatMul(x, Transpose(W))` of an initializer W one FusedMatMul, in place; list where."""
    rewritten = []
    for product in MatMul.all(model):
        transpose = Transpose.made(product.w)
        if transpose is None or not transpose.x.is_initializer() or len(graph.dims(transpose.x) or ()) != 2:
            continue
        inputs = {"a": product.x, "b": transpose.x}
        fused = FusedMatMul.insert(product.node, inputs, {"transB": 1}, name=product.name)
        graph.replace_value(product.output, fused.output)
        rewritten.append(Rewritten(product.name, f"MatMul and Transpose of {transpose.x.name} fused into FusedMatMul"))
    if rewritten:
        graph.drop_unused(model)
    return rewritten


def check_operators(model: ir.Model) -> None:
    """Return if ONNX Runtime has a CPU kernel, or a decomposition, for every operator of `model`.

    Raises:
        UnsupportedError: names the operators that it cannot run, and a node of each.
    """
    table: dict[tuple[str, str], list[Kernel]] = {}
    for known in registry.get_all_opkernel_def():
        if known.provider == PROVIDER:
            first, last = known.version_range
            kernel = Kernel(first, None if last == np.iinfo(np.int32).max else last, {})
            table.setdefault((known.domain, known.op_name), []).append(kernel)
    missing: dict[str, str] = {}
    for node in model.graph.all_nodes():
        opset = model.opset_imports.get(node.domain, 1)
        if node.domain == native.DOMAIN and native.library() is not None:
            continue
        version = kernels.since(node, opset)
        runs = any(kernel.covers(version) for kernel in table.get(operators.identity(node), ()))
        if not runs and not _decomposes(node, opset) and node.op_identifier() not in model.functions:
            missing.setdefault(f"{operators.qualified(node)} (opset {opset})", str(node.name))
    if missing:
        listed = ", ".join(f"{operator}, node {node}" for operator, node in missing.items())
        raise UnsupportedError(
            f"ONNX Runtime {onnxruntime.__version__} has no CPU kernel for {listed}",
            hint="use passes whose operators the target supports",
        )


def _decomposes(node: ir.Node, opset: int) -> bool:
    """Say whether ONNX Runtime does without a kernel for this operator of ONNX."""
    if node.domain:
        return False
    if Constant.matches(node):  # becomes an initializer when the graph is loaded
        return True
    known = onnx.defs.has(node.op_type, max_inclusive_version=opset)
    return known and bool(onnx.defs.get_schema(node.op_type, max_inclusive_version=opset).has_function)


def build(request: BuildRequest) -> BuiltEngine:
    """Write `model.onnx`, its data and `runtime.json`, load them once, and run two steps.

    The target changes nothing, but for graphs that round activations to int8 (`session_options`).

    Loading and running is what `request.prove` is given.

    Weights stream one tensor at a time: memory grows with the largest tensor, not with the model. An engine of more
    than `WHOLE_BYTES` is loaded with its weights as they are stored, which costs no memory and would run slowly; the
    steps are run part by part.

    Raises:
        UnsupportedError: an operator has no CPU kernel, ONNX Runtime refuses the graph, or `spec.max_context` is more
            than the rotary tables of the model reach.
        VerificationError: the engine yields logits that are not finite.
    """
    model, folder, spec = request.model, request.folder, request.spec
    if request.ranks:
        return _build_ranks(request)
    check_operators(model)
    signatures.check_context(model, spec.max_context)
    folder.mkdir(parents=True, exist_ok=True)
    written = onnx_file.write(model, folder, request.progress)
    rounds = any(QuantizeLinear.all(model)) and request.target.isa in (Isa.AVX2, Isa.AVX512)
    options = session_options(spec.threads, exact_int8=rounds)
    session_config, notes = options.resolve(), []
    in_parts = request.run_in_parts if graph.weight_bytes(model) > WHOLE_BYTES else None
    if in_parts is not None:
        notes.append(
            f"engine: {graph.weight_bytes(model) / 1e9:.1f} GB of weights: this build loaded it without bringing them "
            "into the order that kernels want, and ran it part by part"
        )

    def run() -> None:
        if in_parts is not None:
            Session(folder / MODEL_FILE, replace(session_config, entries={**session_config.entries, **_AS_STORED}))
            in_parts(folder / MODEL_FILE, spec.max_context, session_config.threads)
        else:
            _prove(request, folder / MODEL_FILE, session_config)

    request.prove(run, {"session": repr(session_config), "context": str(spec.max_context)})
    own_kernels = native.VERSION if native.DOMAIN in model.opset_imports else None
    config = replace(signatures.config(request, options), onnxruntime=onnxruntime.__version__, kernels=own_kernels)
    (folder / FILE).write_text(config.to_json(), encoding="utf-8")
    return BuiltEngine.built(request, config, notes=notes, written=written)


def _prove(request: BuildRequest, file: Path, session_config: SessionConfig) -> None:
    """Load the engine once, and run it."""
    if request.encoding is None:
        session = Session(file, session_config)
        prove(session, session.allocate(1, request.spec.max_context))
        return
    facts = signatures.encoder(request.model, request.encoding, request.spec.max_context)
    encoder = OnnxEncoder(file, session_config, facts, own_kernels=facts.packed)
    if not np.isfinite(encoder.encode([np.zeros(2, np.int64), np.zeros(1, np.int64)])).all():
        raise VerificationError("the engine gives NaN or infinite numbers for two tokens of id 0")


def _build_ranks(request: BuildRequest) -> BuiltEngine:
    """Write the graphs of all ranks, their data and `runtime.json`, start the ranks once, and run two steps."""
    folder, spec = request.folder, request.spec
    for model in request.ranks:
        check_operators(model)
        signatures.check_context(model, spec.max_context)
    folder.mkdir(parents=True, exist_ok=True)
    written = onnx_file.write_ranks(request.ranks, folder, request.progress)
    options = session_options(spec.threads)
    config = replace(
        signatures.config(request, options),
        onnxruntime=onnxruntime.__version__,
        kernels=native.VERSION,
        ranks=len(request.ranks),
    )

    def run() -> None:
        session = rank_session.open_engine(folder, config, None)
        try:
            prove(session, session.allocate(1, spec.max_context))
        finally:
            session.close()

    request.prove(run, {"session": repr(options), "context": str(spec.max_context), "ranks": str(config.ranks)})
    (folder / FILE).write_text(config.to_json(), encoding="utf-8")
    return BuiltEngine.built(request, config, {"ranks": f"{config.ranks} processes"}, written=written)


def prove(session: Decoder[C], cache: C) -> None:
    """Read two tokens and generate on from them, so that a kernel that refuses at run time does so in the build.

    Raises:
        VerificationError: logits are not finite.
    """
    for past, ids in ((0, [[0, 0]]), (2, [[0]]))[: cache.capacity - 1]:
        logits = session.step(StepInputs(np.array(ids, np.int64), np.array([past], np.int32)), cache)
        if not np.isfinite(logits).all():
            raise VerificationError(f"the engine returns NaN or infinite logits after {past} tokens of id 0")


def session_options(threads: int | None, *, exact_int8: bool = False) -> SessionOptions:
    """Choose how ONNX Runtime runs an engine. Every entry is written down, where it is ONNX Runtime's default too.

    Measured with int4 weights and int8 KV, hidden size 1024, 6 layers, 2 threads, context 512, time of a decode step:

    - `session.intra_op.allow_spinning` 1: between operators, threads wait by spinning. The fastest tenth of steps takes
      4.2 ms, and 4.8 ms without. Where other processes compete for the cores, without is the faster one.
    - `session.set_denormal_as_zero` 0: 1 changes nothing measurable (3.8 ms both), and would flush what verification
      computes in full.

    With `exact_int8`, `session.x64quantprecision` 1: products of int8 do not saturate on processors without VNNI,
    where pairs of them are added in 16 bits (ONNX Runtime, kOrtSessionOptionsAvx2PrecisionMode). With VNNI they never
    do, and prompts take twice as long so: 2048 × 2048, 64 tokens, one thread, 1.8 ms, not .9.
    """
    entries = {"session.intra_op.allow_spinning": "1", "session.set_denormal_as_zero": "0"}
    if exact_int8:
        entries["session.x64quantprecision"] = "1"
    return SessionOptions(threads=threads, optimize=True, entries=entries)


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy into `folder` (created) what the runtime reads of a checkpoint's tokenizer, and its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(checkpoint).items():
        (folder / name).write_bytes(content)  # a copy: a Hub snapshot holds symbolic links


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Make the files that the runtime reads of a checkpoint's tokenizer, and its chat template, by name."""
    sources = {name: checkpoint.path / name for name in TOKENIZER_FILES}
    made = {name: source.read_bytes() for name, source in sources.items() if source.exists()}
    if checkpoint.chat_template is not None:
        made[TEMPLATE_FILE] = checkpoint.chat_template.encode()
    return made


_CENTER = 128
_INT8 = ir.DataType.INT8


def write_integer_products(model: ir.Model) -> list[Rewritten]:
    """Rewrite every product of int8 codes of `model` in place; list where."""
    rewritten = []
    unsigned: dict[ir.Value, ir.Value] = {}
    for product in MatMul.all(model):
        read, weight = DequantizeLinear.made(product.x), DequantizeLinear.made(product.w)
        if read is None or weight is None or weight.codes.dtype != _INT8 or weight.axis not in (1, -1):
            continue
        rounded = QuantizeLinear.made(read.codes)
        if rounded is None or read.codes.dtype != _INT8 or read.zero_points or weight.zero_points:
            continue
        center = graph.initializer(model, "integer_products.center", np.uint8(_CENTER))
        if read.codes not in unsigned:
            inputs = {"x": rounded.x, "scale": rounded.scale, "zero_point": center}
            codes = QuantizeLinear.insert(rounded.node, inputs, name=f"{rounded.name}.unsigned").output
            codes.name, codes.shape = f"{read.codes.name}.unsigned", read.codes.shape
            codes.type = ir.TensorType(ir.DataType.UINT8)
            unsigned[read.codes] = codes
        operands = {
            "a": unsigned[read.codes],
            "b": weight.codes,
            "a_scale": read.scales,
            "b_scale": weight.scales,
            "a_zero_point": center,
        }
        made = MatMulIntegerToFloat.insert(product.node, operands, name=product.name)
        graph.replace_value(product.output, made.output)
        rewritten.append(Rewritten(product.name, "MatMul of int8 codes to MatMulIntegerToFloat"))
    if rewritten:
        graph.drop_unused(model)
    return rewritten
