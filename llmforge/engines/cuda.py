"""The engine for ONNX Runtime on a GPU: the lowered graph, and `runtime.json` with what its CUDA provider is told.

Nothing here needs a GPU. Whether the provider runs a node is looked up in the record of its kernels
(`llmforge.engines.kernels`); what the graph computes is the CPU's business to prove, on the same graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from llmforge import graph, interface
from llmforge.engines import Engine, cuda_graphs, kernels, onnx_file, require_device
from llmforge.engines import onnxruntime as standard
from llmforge.errors import UnsupportedError
from llmforge.progress import Progress, Silent
from llmforge.recipe import EngineSpec
from llmforge.runtime.config import DATA_FILE, FILE, FORMAT, MODEL_FILE, DeviceFacts, RuntimeConfig, SessionOptions
from llmforge.runtime.signature import CacheInput
from llmforge.targets import Target
from llmforge.transform import Changes, Rewritten, Skipped

MICROSOFT = "com.microsoft"
VERSION = kernels.cuda().wheel.rpartition("=")[2]

# Machine code in the wheel; there is no PTX that a driver could compile for others (cuobjdump of 1.31.1).
COMPILED_FOR = (75, 80, 86, 89, 90, 120)
FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
_HALF = frozenset({FLOAT16, BFLOAT16})

# The fast product of 4-bit and 8-bit weights (fpA_intB) as this wheel was compiled: onnxruntime 1.31,
# contrib_ops/cuda/quantization/matmul_nbits.cc, CheckFpAIntBEligibility, with USE_COMPACT_FPA_INTB_GEMM.
FAST_BLOCK = 32
FAST_COLUMNS: Mapping[int, int] = {4: 64, 8: 32}  # bits → N is a multiple of
FAST_ENTRY, FAST_ROWS_ENTRY = "ep.cuda.fpa_intb_gemm", "ep.cuda.fpa_intb_profile_m"

check_context = standard.check_context


def require_host(target: Target, spec: EngineSpec) -> None:
    """Return if the GPU of `target` is at hand, which proves kernels and recorded steps.

    Raises:
        EnvironmentLacks: it is not.
        UnsupportedError: onnxruntime-gpu has no code for it.
    """
    require_code(target)
    require_device(target, "an engine for ONNX Runtime's CUDA provider is proven on the GPU that runs it")


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Rewrite what the passes left into operators that ONNX Runtime's CUDA provider runs in the graph's dtypes.

    As for the CPU, and then
    - the bias of a MatMulNBits leaves it where the fast product, which has none, computes the rest;
    - QMoE is told that its codes are in the operator's own layout;
    - an operator without a kernel for its 16-bit type, or for bool, computes in fp32, or int32, between two Casts.

    What runs on a slower path than it might is listed as skipped, with the reason.

    Raises:
        UnsupportedError: the wheel has no code for the target, a node no kernel, or `spec` wants CUDA graphs of steps
            that cannot be captured.
    """
    sm = require_code(target)
    changes = Changes()
    lowered, changes.rewritten = standard.expand(model)
    changes.rewritten += _split_biases(lowered)
    changes.rewritten += _name_layouts(lowered)
    changes.rewritten += _widen(lowered)
    changes.skipped += [Skipped(str(node.name), reason) for node, reason in slower(lowered)]
    check(lowered, target)
    cuda_graphs.require(lowered, spec)
    del sm
    return lowered, changes


def require_code(target: Target) -> int:
    """Return the compute capability of `target`, 89, if the wheel has machine code for it.

    Code for 8.6 runs on 8.7 and 8.9; no code runs on another major version.

    Raises:
        UnsupportedError: it has not.
    """
    if target.kind != "gpu" or target.sm is None:
        raise UnsupportedError(f"target {target.name} is a {target.kind}; this engine runs on GPUs")
    sm = int(target.sm)
    if not any(sm // 10 == code // 10 and sm >= code for code in COMPILED_FOR):
        listed = ", ".join(map(str, COMPILED_FOR))
        raise UnsupportedError(
            f"{kernels.cuda().wheel} has machine code for SM {listed} and nothing that a driver could compile for SM "
            f"{sm} (target {target.name}, {target.title})",
            hint="build `engine: {backend: tensorrt}` for this target",
        )
    return sm


def check(model: ir.Model, target: Target) -> None:
    """Return if the CUDA provider has a kernel for every node of the lowered `model`.

    Raises:
        UnsupportedError: names the nodes, their types, and what kernels there are.
    """
    known = kernels.cuda()
    found = list(kernels.missing(model, known, kernels.infer(model)))
    if not found:
        return
    attention = any(node.op_type == "GroupQueryAttention" for node, _ in found)
    lines = {f"{node.domain or 'ai.onnx'}::{node.op_type}: {what}": node for node, what in reversed(found)}
    listed = "; ".join(f"{line} (node {node.name})" for line, node in sorted(lines.items()))
    raise UnsupportedError(
        f"the CUDA provider of {known.wheel} cannot run {len(found)} nodes (target {target.name}): {listed}",
        hint="add `lower-precision: {dtype: fp16}` to the recipe: GroupQueryAttention has no fp32 kernel on CUDA"
        if attention
        else "choose passes whose operators the target runs",
    )


def _split_biases(model: ir.Model) -> list[Rewritten]:
    """Take the bias out of every MatMulNBits that is otherwise fit for the fast product, in place."""
    rewritten = []
    for node in [node for node in model.graph if _is(node, "MatMulNBits")]:
        bias = graph.operand(node, 5)
        if bias is None or _obstacle(node, without_bias=True) is not None:
            continue
        [old] = node.outputs
        product, name = ir.Value(type=old.type, shape=old.shape), str(node.name)
        node.resize_inputs(3)
        add = ir.Node("", "Add", [product, bias], name=f"{name}/bias")
        old_name = str(old.name)
        node.resize_outputs(1)
        model.graph.insert_after(node, add)
        add.outputs[0].type, add.outputs[0].shape = old.type, old.shape
        graph.supersede(old, add.outputs[0])
        old.name = f"{old_name}.product"
        add.replace_input_with(0, old)
        rewritten.append(Rewritten(name, "its bias is added behind it: the fast product has none"))
    return rewritten


def slower(model: ir.Model) -> Iterable[tuple[ir.Node, str]]:
    """Yield every MatMulNBits that the fast product does not compute, with the reason and what computes it instead."""
    for node in model.graph:
        if _is(node, "MatMulNBits") and (reason := _obstacle(node)) is not None:
            bits = node.attributes.get_int("bits", 4)
            few = "up to 16 tokens" if bits == 4 else "1 token"
            yield node, f"{reason}; it runs by a plain kernel for {few}, else it dequantizes its weight in every step"


def _obstacle(node: ir.Node, *, without_bias: bool = False) -> str | None:
    """Say why the fast product does not compute the MatMulNBits `node`; None where it does."""
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size")
    n, k = node.attributes.get_int("N"), node.attributes.get_int("K")
    scales = node.inputs[2]
    if scales is None or scales.dtype != FLOAT16:
        return f"the fast product of the wheel takes fp16, and this one is {None if scales is None else scales.dtype}"
    if bits not in FAST_COLUMNS:
        return f"the fast product takes 4 and 8 bits, not {bits}"
    if block != FAST_BLOCK:
        return f"the fast product takes blocks of {FAST_BLOCK}, not {block}"
    if graph.operand(node, 3) is not None:
        return "the fast product takes symmetric weights, and this one has zero points"
    if n % FAST_COLUMNS[bits] or k % block:
        return (
            f"the fast product takes N of a multiple of {FAST_COLUMNS[bits]} and K of {block}, and this is [{n}, {k}]"
        )
    if graph.operand(node, 5) is not None and not without_bias:
        return "the fast product takes no bias"
    return None


def _name_layouts(model: ir.Model) -> list[Rewritten]:
    """Tell QMoE that its codes are [E, N, K·bits/8] as they stand; without a word CUDA takes them for reordered ones."""
    rewritten = []
    for node in model.graph:
        if _is(node, "QMoE"):
            node.attributes["weights_prepacked"] = ir.AttrInt64("weights_prepacked", 0)
            rewritten.append(Rewritten(str(node.name), "its codes are reordered when the engine is loaded"))
    return rewritten


def _widen(model: ir.Model) -> list[Rewritten]:
    """Let nodes without a kernel for bf16, fp16 or bool compute in fp32 or int32, where that has one, in place."""
    rewritten = []
    known, dtypes = kernels.cuda(), kernels.infer(model)
    for node, _ in list(kernels.missing(model, known, dtypes)):
        owner = node.graph
        narrow = {dtypes[value] for value in node.inputs if value is not None} & (_HALF | {ir.DataType.BOOL})
        if node.domain or len(narrow) != 1 or owner is not model.graph:
            continue
        [dtype] = narrow
        wide = FLOAT if dtype in _HALF else ir.DataType.INT32
        trial = {value: wide if made == dtype else made for value, made in dtypes.items()}
        if not known.runs(node, model.opset_imports[""], trial):
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and dtypes[value] == dtype:
                [cast] = graph.insert(node, "Cast", [value], {"to": int(wide)}, name=f"{node.name}/{value.name}.wide")
                cast.type, cast.shape = ir.TensorType(wide), value.shape
                node.replace_input_with(index, cast)
        for output in node.outputs:
            if dtypes[output] == dtype:
                _narrow(node, output, dtype, wide)
        rewritten.append(
            Rewritten(str(node.name), f"{node.op_type} in {wide.name.lower()}: none for {dtype.name.lower()}")
        )
    return rewritten


def _narrow(node: ir.Node, output: ir.Value, dtype: ir.DataType, wide: ir.DataType) -> None:
    """Cast an output of `node`, which is `wide` from now on, back to `dtype`."""
    cast = ir.Node("", "Cast", [output], [ir.AttrInt64("to", int(dtype))], name=f"{node.name}/{output.name}.narrow")
    made = cast.outputs[0]
    made.type, made.shape = ir.TensorType(dtype), output.shape
    assert node.graph is not None
    node.graph.insert_after(node, cast)
    graph.supersede(output, made)
    cast.replace_input_with(0, output)
    output.type = ir.TensorType(wide)


def build(
    model: ir.Model,
    folder: Path,
    *,
    spec: EngineSpec,
    target: Target,
    eos_token_ids: Sequence[int],
    bos_token_id: int | None,
    progress: Progress | None = None,
) -> Engine:
    """Write a lowered `model` into `folder` (created) with what a session on `target` is told.

    No session is made, here or on a GPU: `llmforge.runtime` proves the engine when it loads it.

    Raises:
        UnsupportedError: a node has no kernel, `spec.max_context` is more than the rotary tables reach, or the device
            has not the memory for what the engine needs.
    """
    check(model, target)
    check_context(model, spec.max_context)
    config = configure(model, spec=spec, target=target, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
    folder.mkdir(parents=True, exist_ok=True)
    onnx_file.write(model, folder, progress or Silent())
    (folder / FILE).write_text(config.to_json(), encoding="utf-8")
    size_bytes = sum((folder / name).stat().st_size for name in (MODEL_FILE, DATA_FILE, FILE))
    return Engine(folder, config, graph.nodes(model), size_bytes)


def configure(
    model: ir.Model,
    *,
    spec: EngineSpec,
    target: Target,
    eos_token_ids: Sequence[int],
    bos_token_id: int | None,
) -> RuntimeConfig:
    """Say how the lowered `model` runs on `target`.

    Raises:
        UnsupportedError: the device has not the memory.
    """
    graphs = cuda_graphs.plan(model, spec)
    memory_bytes = cuda_graphs.memory(model, spec, graphs).total
    assert target.memory_gb is not None
    if memory_bytes > target.memory_gb.value * 1e9:
        raise UnsupportedError(
            f"the engine needs about {memory_bytes / 1e9:.1f} GB: {cuda_graphs.memory(model, spec, graphs)}; target "
            f"{target.name} ({target.title}) has {target.memory_gb.value:g} GB",
            hint="lower engine.max_batch, engine.max_context or the bits of weights and caches",
        )
    buckets = cuda_graphs.decode_batches(spec)
    return RuntimeConfig(
        format=FORMAT,
        onnxruntime=VERSION,
        kernels=None,
        max_context=spec.max_context,
        max_batch=spec.max_batch,
        vocabulary=_vocabulary(model),
        eos_token_ids=tuple(eos_token_ids),
        bos_token_id=bos_token_id,
        caches=caches(model),
        session=session_options(model, buckets),
        provider="cuda",
        provider_options=provider_options(graphs.mode != "off"),
        buckets=buckets,
        device=DeviceFacts(require_code(target), memory_bytes),
        graphs=graphs,
    )


def session_options(model: ir.Model, buckets: Sequence[int]) -> SessionOptions:
    """Choose how ONNX Runtime runs the graph.

    - `session.disable_cpu_ep_fallback`: a node that the CUDA provider does not take fails the load, and is not moved to
      the CPU in silence.
    - `session.use_device_allocator_for_initializers`: weights lie outside of the arena, which never shrinks.
    - `ep.cuda.fpa_intb_gemm`, with the rows that its kernels are chosen for before anything is captured: only where a
      product is fit for it.
    """
    entries = {"session.disable_cpu_ep_fallback": "1", "session.use_device_allocator_for_initializers": "1"}
    if any(_is(node, "MatMulNBits") and _obstacle(node) is None for node in model.graph):
        entries |= {FAST_ENTRY: "1", FAST_ROWS_ENTRY: ",".join(map(str, sorted({*buckets, *_PREFILL_ROWS})))}
    return SessionOptions(threads=1, optimize=True, entries=entries)


# Tokens of a prefill whose fast product is tuned at load; steps between two of them use the tactic of the next one.
_PREFILL_ROWS = (16, 64, 256, 1024)


def provider_options(graphs: bool) -> dict[str, str]:
    """Choose options of the CUDA provider; each is written down, where it is ONNX Runtime's default too.

    - `arena_extend_strategy` kSameAsRequested: the arena grows by what is asked, and not by powers of two, because what
      it takes it keeps.
    - `cudnn_conv_algo_search` HEURISTIC: a convolution of a few taps is not worth a search in its first step.
    - `use_tf32` 0: what is left in fp32 stays exact to fp32.
    - `enable_skip_layer_norm_strict_mode` 1: sums of squares in fp32, whatever the graph computes in.
    """
    return {
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "do_copy_in_default_stream": "1",
        "enable_cuda_graph": "1" if graphs else "0",
        "enable_skip_layer_norm_strict_mode": "1",
        "use_tf32": "0",
    }


def caches(model: ir.Model) -> tuple[CacheInput, ...]:
    """List the caches of keys and values that the lowered `model` takes."""
    found = []
    for value in model.graph.inputs:
        name, dims = str(value.name), graph.dims(value)
        if interface.present_of(name) == name or interface.is_state(name):
            continue
        assert dims is not None
        assert value.dtype is not None
        kv_heads, head_dim = dims[1], dims[3]
        assert isinstance(kv_heads, int)
        assert isinstance(head_dim, int)
        found.append(CacheInput(name, value.dtype.name.lower(), kv_heads, head_dim))
    return tuple(found)


def _vocabulary(model: ir.Model) -> int:
    logits = next(value for value in model.graph.outputs if value.name == interface.LOGITS)
    size = (graph.dims(logits) or (None,))[-1]
    assert isinstance(size, int)
    return size


def _is(node: ir.Node, op_type: str) -> bool:
    return (node.domain, node.op_type) == (MICROSOFT, op_type)
