"""What operators must look like for ONNX Runtime's CUDA provider, where it is other than for the CPU.

- The fast product of weights in 4 and 8 bits ("fpA_intB") computes a MatMulNBits of a certain layout, without a bias.
  So a bias leaves it, `y = Add(MatMulNBits(x, codes, scales), b)`, where all else fits. What it does not compute runs
  on, slower: `slower` lists it with the reason.
- `accuracy_level` is the CPU's: MatMulNBits and QMoE compute in the activations' dtype here, and say so.
- QMoE takes its codes for reordered ones unless `weights_prepacked` is 0.
- A node without a kernel for its 16-bit type computes in fp32 between two Casts, one without a kernel for bool in
  int32: routers, mostly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from llmforge.engines import kernels
from llmforge.ir import graph
from llmforge.lowering.pass_base import Rewritten

MICROSOFT = "com.microsoft"
FLOAT, FLOAT16, BFLOAT16, BOOL = (ir.DataType[name] for name in ("FLOAT", "FLOAT16", "BFLOAT16", "BOOL"))
_HALF = frozenset({FLOAT16, BFLOAT16})

# The fast product as the wheel was compiled (onnxruntime 1.31, contrib_ops/cuda/quantization/matmul_nbits.cc, without
# onnxruntime_USE_FPA_INTB_GEMM_FULL). The wheel was asked: with ORT_FPA_INTB_DEBUG=1 it tells of each that it runs.
FAST_BLOCK = 32
FAST_COLUMNS: Mapping[int, int] = {4: 64, 8: 32}  # bits → N is a multiple of

# What the kernel of QMoE refuses when it runs (onnxruntime 1.31, moe_quantization.cc; seen to refuse).
EXPERT_WIDTH, SMALLEST_EXPERT_BLOCK = 64, 32


def name_layouts(model: ir.Model) -> list[Rewritten]:
    """Set attributes of MatMulNBits and QMoE, in place; list what that changes when the engine is loaded."""
    rewritten = []
    for node in model.graph:
        if _is(node, "MatMulNBits") or _is(node, "QMoE"):
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
        if _is(node, "QMoE"):
            node.attributes["weights_prepacked"] = ir.AttrInt64("weights_prepacked", 0)
            rewritten.append(Rewritten(str(node.name), "its codes are reordered when the engine is loaded"))
    return rewritten


def any_fast(model: ir.Model) -> bool:
    """Say whether the fast product computes a MatMulNBits of `model`."""
    return any(_is(node, "MatMulNBits") and slow_reason(node) is None for node in model.graph)


def experts_refusal_reason(node: ir.Node) -> str | None:
    """Say what the CUDA kernel of QMoE refuses of `node` when it runs; None: nothing."""
    widths = [graph.dims(value) if value is not None else None for value in (node.inputs[5], node.inputs[2])]
    bits, block = node.attributes.get_int("expert_weight_bits"), node.attributes.get_int("block_size")
    for name, dims in zip(("inner", "hidden"), widths, strict=True):
        size = dims[2] * 8 // bits if dims is not None and isinstance(dims[2], int) else 0
        if size % EXPERT_WIDTH:
            return f"the {name} width of its experts is {size}, and must be a multiple of {EXPERT_WIDTH}"
    if graph.operand(node, 11) is not None and block < SMALLEST_EXPERT_BLOCK:
        return f"zero points want blocks of {SMALLEST_EXPERT_BLOCK} or more, and these have {block}"
    return None


def split_biases(model: ir.Model) -> list[Rewritten]:
    """Take the bias out of every MatMulNBits that is otherwise fit for the fast product, in place."""
    rewritten = []
    for node in [node for node in model.graph if _is(node, "MatMulNBits")]:
        bias = graph.operand(node, 5)
        if bias is None or slow_reason(node, without_bias=True) is not None:
            continue
        name = str(node.name)
        node.resize_inputs(3)
        _behind(node.outputs[0], "Add", [bias], {}, f"{name}/bias")
        rewritten.append(Rewritten(name, "its bias is added behind it: the fast product has none"))
    return rewritten


def slower(model: ir.Model) -> Iterable[tuple[ir.Node, str]]:
    """Yield every MatMulNBits that the fast product does not compute, with the reason and what computes it instead."""
    for node in model.graph:
        if _is(node, "MatMulNBits") and (reason := slow_reason(node)) is not None:
            bits = node.attributes.get_int("bits", 4)
            few = "up to 16 tokens" if bits == 4 else "1 token"
            yield node, f"{reason}; it runs by a plain kernel for {few}, else it dequantizes its weight in every step"


def slow_reason(node: ir.Node, *, without_bias: bool = False) -> str | None:
    """Say why the fast product does not compute the MatMulNBits `node`; None where it does."""
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size")
    n, k = node.attributes.get_int("N"), node.attributes.get_int("K")
    scales = node.inputs[2]
    if scales is None or scales.dtype not in _HALF:
        return f"the fast product takes fp16 and bf16, and this one is {None if scales is None else scales.dtype}"
    if bits not in FAST_COLUMNS:
        return f"the fast product takes 4 and 8 bits, not {bits}"
    if block != FAST_BLOCK:
        return f"the fast product takes blocks of {FAST_BLOCK}, not {block}"
    if graph.operand(node, 3) is not None:
        return "the fast product takes symmetric weights, and this one has zero points"
    if n % FAST_COLUMNS[bits] or k % block:
        return f"the fast product takes multiples of {FAST_COLUMNS[bits]} outputs and {block} inputs, not [{n}, {k}]"
    if graph.operand(node, 5) is not None and not without_bias:
        return "the fast product takes no bias"
    return None


def widen(model: ir.Model) -> list[Rewritten]:
    """Let nodes without a kernel for bf16, fp16 or bool compute in fp32 or int32, where that has one, in place."""
    rewritten = []
    known, dtypes = kernels.cuda(), kernels.infer(model)
    for node, _ in list(kernels.missing(model, known, dtypes)):
        owner = node.graph
        narrow = {dtypes[value] for value in node.inputs if value is not None} & (_HALF | {BOOL})
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
                made = _behind(output, "Cast", [], {"to": int(dtype)}, f"{node.name}/{output.name}.narrow")
                made.type, output.type = ir.TensorType(dtype), ir.TensorType(wide)
        what = f"{node.op_type} in {kernels.NAMES[wide]}: there is none for {kernels.NAMES[dtype]}"
        rewritten.append(Rewritten(str(node.name), what))
    return rewritten


def _behind(
    output: ir.Value, op_type: str, more: list[ir.Value], attributes: dict[str, graph.Attribute], name: str
) -> ir.Value:
    """Put a node that reads `output` and `more` behind what makes `output`, and let its result stand for it."""
    maker = output.producer()
    assert maker is not None
    assert maker.graph is not None
    node = ir.Node("", op_type, [output, *more], ir.convenience.convert_attributes(attributes), name=name)
    maker.graph.insert_after(maker, node)
    graph.supersede(output, node.outputs[0])
    node.replace_input_with(0, output)
    return node.outputs[0]


def _is(node: ir.Node, op_type: str) -> bool:
    return (node.domain, node.op_type) == (MICROSOFT, op_type)
