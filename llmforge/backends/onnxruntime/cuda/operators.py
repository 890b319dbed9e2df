"""Forms of operators that ONNX Runtime's CUDA provider takes, where they are other than for the CPU.

- The fast product of weights in 4 and 8 bits ("fpA_intB") computes a MatMulNBits of a certain layout, without a bias.
  So a bias leaves it, `y = Add(MatMulNBits(x, codes, scales), b)`, where all else fits. What it does not compute runs
  on, slower: `slower` lists it with the reason.
- ONNX Runtime takes every product that fits by its layout for the fast one, also where that fails from 9 tokens on: a
  bias of zeros keeps it out.
- `accuracy_level` is the CPU's: MatMulNBits and QMoE compute in the activations' dtype here, and say so.
- QMoE takes its codes for reordered ones unless `weights_prepacked` is 0.
- Attention norms the heads of its queries and keys itself, before it turns them: a Split and two norms fewer a layer.
  Asked 704 times, the wheel chose the same kernels with norms inside as without, but over int8 rows: there XQA gives
  way to FLASH_ATTENTION, which dequantizes the whole cache first ("Quantized XQA does not support QK-Norm").
- A node without a kernel for its 16-bit type computes in fp32 between two Casts, one without a kernel for bool in
  int32: routers, mostly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from llmforge.backends.onnxruntime import kernels
from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, operators, query_key_norms
from llmforge.ir.operators import canonical, cuda
from llmforge.ir.operators.contrib import ContribMoE, GroupQueryAttention, MatMulNBits, PagedAttention, QMoE
from llmforge.ir.operators.standard import Split
from llmforge.rewrite.pass_base import Rewritten, Skipped

FLOAT, FLOAT16, BFLOAT16, BOOL = (ir.DataType[name] for name in ("FLOAT", "FLOAT16", "BFLOAT16", "BOOL"))
_HALF = frozenset({FLOAT16, BFLOAT16})

# The fast product as the wheel was compiled (onnxruntime 1.31, contrib_ops/cuda/quantization/matmul_nbits.cc, without
# onnxruntime_USE_FPA_INTB_GEMM_FULL). The wheel was asked: with ORT_FPA_INTB_DEBUG=1 it tells of each that it runs.
FAST_BLOCK = 32
FAST_COLUMNS: Mapping[int, int] = {4: 64, 8: 32}  # bits → N is a multiple of
# It takes K of any multiple of 32 and, asked with K of 32 to 608, had no tactic from 9 tokens on where K is no multiple
# of 64: "No valid fpA_intB MatMulNBits GEMM tactic". Its tactics are chosen by the power of two at or above the tokens.
FAST_ROWS = 64

# What the kernel of QMoE refuses when it runs (onnxruntime 1.31, moe_quantization.cc; seen to refuse).
EXPERT_WIDTH, SMALLEST_EXPERT_BLOCK = 64, 32
# FlashAttention's (benchmarks/cuda_attention.py asks the wheel).
AMPERE, FLASH_LARGEST_HEAD = 80, 256
EXPERTS_SINCE_SM = 80  # below, of MoE too: "Arch unsupported for MoE GEMM"


def name_layouts(model: ir.Model) -> list[Rewritten]:
    """Set attributes of MatMulNBits and QMoE, in place; list what that changes when the engine is loaded."""
    for product in MatMulNBits.all(model):
        product.accuracy_level = 0
    rewritten = []
    for experts in QMoE.all(model):
        experts.accuracy_level = experts.weights_prepacked = 0
        rewritten.append(Rewritten(experts.name, "weights are reordered when the engine is loaded"))
    return rewritten


def take_norms(model: ir.Model, *, blocks: bool) -> tuple[list[Rewritten], list[Skipped]]:
    """Move the norms of heads in front of attention into it, in place; list what changes, and what stays and why.

    `blocks`: attention is going to read blocks of a pool (`paged_attention`), whose kernels take norms with any cache.
    """
    rewritten, skipped = [], []
    for layer in GroupQueryAttention.all(model):
        if layer.key is None or layer.value is None:
            continue
        query, key = query_key_norms.both_in_front(layer.query, layer.key, graph.width(layer.past_key))
        if query.weight is None:
            continue
        if layer.past_key.dtype != layer.query.dtype and not blocks:
            skipped.append(Skipped(layer.name, "norms of queries and keys stay: with them XQA reads no int8 cache"))
            continue
        layer.q_norm_weight, layer.k_norm_weight, layer.qk_norm_epsilon = query.weight, key.weight, query.epsilon
        split, packed = Split.made(query.source), ""
        if split is not None and list(split.node.outputs) == [query.source, key.source, layer.value]:
            layer.query, layer.key, layer.value, packed = split.x, None, None, ", which are packed"
        else:
            layer.query, layer.key = query.source, key.source
        rewritten.append(Rewritten(layer.name, f"norms inside attention of queries and keys{packed}"))
    if rewritten:
        graph.drop_unused(model)
    return rewritten, skipped


def any_fast(model: ir.Model) -> bool:
    """Say whether the fast product computes a MatMulNBits of `model`."""
    return any(slow_reason(product) is None for product in MatMulNBits.all(model))


def experts_reason(experts: ContribMoE | QMoE, sm: int) -> str | None:
    """Say what the CUDA kernel of `experts` refuses on a device of `sm` when it runs; None: nothing."""
    if sm < EXPERTS_SINCE_SM:
        return f"products of experts need SM {EXPERTS_SINCE_SM} or above, not SM {sm}"
    if isinstance(experts, ContribMoE):
        return None
    for name, weights in (("inner", experts.fc2_experts_weights), ("hidden", experts.fc1_experts_weights)):
        size = graph.width(weights) * 8 // experts.expert_weight_bits
        if size % EXPERT_WIDTH:
            return f"the {name} width of its experts is {size}, not a multiple of {EXPERT_WIDTH}"
    if experts.fc1_zero_points is not None and experts.block_size < SMALLEST_EXPERT_BLOCK:
        return f"zero points need blocks of {SMALLEST_EXPERT_BLOCK} or more, not {experts.block_size}"
    return None


def int8_reason(head_dim: int, sm: int) -> str | None:
    """Say why no GroupQueryAttention reads an int8 cache of `head_dim` channels a head on a device of `sm`."""
    if sm < AMPERE:
        return f"int8 caches need SM {AMPERE} or above, not SM {sm}"
    if head_dim > FLASH_LARGEST_HEAD:
        return f"int8 caches need heads of up to {FLASH_LARGEST_HEAD} channels, not {head_dim}"
    return None


def blocks_reason(layer: PagedAttention, sm: int) -> str | None:
    """Say why the provider has no kernel for attention over blocks on a device of `sm`; None where it has."""
    head_dim = graph.width(layer.key_cache)
    if layer.head_sink is not None and (sm < AMPERE or head_dim > FLASH_LARGEST_HEAD):
        return (
            f"sinks over blocks need SM {AMPERE} or above and heads of up to {FLASH_LARGEST_HEAD} channels, not SM "
            f"{sm} and {head_dim}"
        )
    return None


def split_biases(model: ir.Model) -> list[Rewritten]:
    """Take the bias out of every MatMulNBits that is otherwise fit for the fast product, in place."""
    rewritten = []
    for product in MatMulNBits.all(model):
        bias = product.bias
        if bias is None or slow_reason(product, without_bias=True) is not None:
            continue
        product.bias = None
        _insert_after(product.output, "Add", [bias], {}, f"{product.name}/bias")
        rewritten.append(Rewritten(product.name, "bias moved to a separate Add: the fast kernel has none"))
    return rewritten


def keep_out(model: ir.Model) -> list[Rewritten]:
    """Give a bias of zeros to products that ONNX Runtime would take for the fast one, which fails at them, in place."""
    rewritten = []
    for product in MatMulNBits.all(model):
        n, k, dtype = product.N, product.K, product.scales.dtype
        taken = product.block_size == FAST_BLOCK and product.zero_points is None and product.bias is None
        if taken and dtype in _HALF and n % FAST_COLUMNS.get(product.bits, n + 1) == 0 and k % FAST_ROWS:
            zeros = ir.tensor([0.0] * n, dtype, name=f"fast.zeros_{n}")
            product.bias = graph.initializer(graph.owner(product.node), f"fast.zeros_{n}", zeros)
            rewritten.append(Rewritten(product.name, f"a bias of zeros: the fast kernel has no tactic for {k} inputs"))
    return rewritten


def slower(model: ir.Model) -> Iterable[tuple[ir.Node, str]]:
    """Yield every MatMulNBits that the fast product does not compute, with the reason and what computes it instead."""
    for product in MatMulNBits.all(model):
        if (reason := slow_reason(product)) is not None:
            few = "up to 16 tokens" if product.bits == 4 else "a token or a few"
            what = f"{reason}; runs on a slower kernel for {few}, else dequantizes its weight in every step"
            yield product.node, what


def slow_reason(product: MatMulNBits, *, without_bias: bool = False) -> str | None:
    """Say why the fast product does not compute `product`; None where it does."""
    bits, block, n, k = product.bits, product.block_size, product.N, product.K
    if product.scales.dtype not in _HALF:
        return f"the fast kernel takes fp16 and bf16, not {product.scales.dtype}"
    if bits not in FAST_COLUMNS:
        return f"the fast kernel takes 4 and 8 bits, not {bits}"
    if block != FAST_BLOCK:
        return f"the fast kernel takes blocks of {FAST_BLOCK}, not {block}"
    if product.zero_points is not None:
        return "the fast kernel takes no zero points"
    if n % FAST_COLUMNS[bits] or k % FAST_ROWS:
        return f"the fast kernel takes multiples of {FAST_COLUMNS[bits]} outputs and {FAST_ROWS} inputs, not [{n}, {k}]"
    if product.bias is not None and not without_bias:
        return "the fast kernel takes no bias"
    return None


def widen(model: ir.Model) -> list[Rewritten]:
    """Let nodes without a kernel for bf16, fp16 or bool compute in fp32 or int32, where that has one, in place."""
    rewritten = []
    known, dtypes = kernels.cuda(), kernels.infer(model)
    for node, _ in list(kernels.missing(model, known, dtypes)):
        narrow = {dtypes[value] for value in node.inputs if value is not None} & (_HALF | {BOOL})
        if node.domain or len(narrow) != 1 or node.graph is not model.graph:
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
                made = _insert_after(output, "Cast", [], {"to": int(dtype)}, f"{node.name}/{output.name}.narrow")
                made.type, output.type = ir.TensorType(dtype), ir.TensorType(wide)
        what = f"{node.op_type} in {wide.name.lower()}: no kernel for {dtype.name.lower()}"
        rewritten.append(Rewritten(str(node.name), what))
    return rewritten


def _insert_after(
    output: ir.Value, op_type: str, more: list[ir.Value], attributes: dict[str, graph.Attribute], name: str
) -> ir.Value:
    """Put a node that reads `output` and `more` behind what makes `output`, and let its result stand for it."""
    node = ir.Node("", op_type, [output, *more], ir.convenience.convert_attributes(attributes), name=name)
    return graph.insert_behind(output, [node], "replaced")


def write_collectives(model: ir.Model) -> list[Rewritten]:
    """Replace the collectives of `model` in place; list what changed.

    Raises:
        UnsupportedError: one gathers another axis than the last.
    """
    rewritten = []
    for node in list(model.graph):
        view = operators.view(node)
        if isinstance(view, canonical.AllReduce):
            made = cuda.CudaAllReduce.insert(node, {"x": view.x}, {"ranks": view.ranks}, name=view.name)
            graph.replace_value(view.output, made.output)
        elif isinstance(view, canonical.AllGather):
            graph.replace_value(view.output, _gather(model, view))
        else:
            continue
        rewritten.append(Rewritten(view.name, f"{view.op_type} of {view.ranks} ranks through NCCL"))
    if rewritten:
        graph.drop_unused(model)
    return rewritten


def _gather(model: ir.Model, view: canonical.AllGather) -> ir.Value:
    """Gather along the last axis."""
    dims = graph.dims(view.x)
    if dims is None or view.axis not in (-1, len(dims) - 1):
        raise UnsupportedError(f"{view.op_type} {view.name}: only the last axis of a tensor of known rank is gathered")
    last, name, node = len(dims) - 1, view.name, view.node
    gathered = cuda.CudaAllGather.insert(node, {"x": view.x}, {"ranks": view.ranks}, name=name).output
    gathered.type, gathered.shape = view.x.type, ir.Shape([view.ranks, *dims])
    turn = [*range(1, last + 1), 0, last + 1]
    [turned] = graph.insert(node, "Transpose", [gathered], {"perm": turn}, name=f"{name}/turn")
    turned.type, turned.shape = view.x.type, ir.Shape([*dims[:-1], view.ranks, dims[-1]])
    shape = graph.initializer(model, f"{name}.shape", np.array([*[0] * last, -1], np.int64))
    [whole] = graph.insert(node, "Reshape", [turned, shape], {}, name=f"{name}/whole")
    return whole
