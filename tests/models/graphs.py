"""Canonical graphs (docs/dialect.md) for tests: written as ONNX text, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import targets
from llmforge.ir import graph
from llmforge.quantization import structure
from llmforge.quantization.statistics import Statistics
from llmforge.quantization.structure import PrunedStructure
from llmforge.rewrite import pruning
from llmforge.rewrite.pass_base import Budget, Changes, Context, Pass
from llmforge.verification.promises import Promises
from llmforge.verification.verifier import PassVerification, Verifier

TARGET = targets.load("cpu-avx2")
CPU = Context(TARGET)
MAX_POSITION = 64
PROMISES = Promises(context=MAX_POSITION, batch=3, vocabulary=96)


@dataclass(frozen=True)
class Llama:
    """Sizes of a decoder of the Llama family; the defaults exercise grouped-query attention on whole heads."""

    layers: int = 2
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None  # None: head_dim
    mlp: int = 56
    vocabulary: int = 96
    rotary_dim: int | None = None  # None: head_dim; 0: no rotary embedding
    interleaved: int = 0
    bias: bool = False  # of query, key and value
    query_norm: bool = False  # one RMSNormalization per head of query and key
    sinks: bool = False
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    activation: str = "silu"  # or an ONNX operator of one tensor, "Gelu"
    experts: int = 0  # of each layer, of which a token chooses two, `mlp` wide, with biases; 0: a dense MLP
    interleaved_gates: int = 0  # of experts
    positions: int = MAX_POSITION  # that the rotary tables reach
    seed: int = 0


@dataclass
class _Text:
    """Lines of the graph, shapes of its values and tensors of its initializers, in order."""

    lines: list[str] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def node(self, output: str, shape: str, call: str) -> str:
        """Add `output = call`, a node named by its output; `shape` describes the output."""
        self.lines.append(f'[{output}_node] "{output}" = {call}')
        self.shapes[output] = shape
        return output

    def weight(self, name: str, *shape: int, scale: float = 1.0, offset: float = 0.0) -> str:
        self.tensors[name] = (offset + scale * self.rng.standard_normal(shape)).astype(np.float32)
        return name

    def linear(self, x: str, output: str, name: str, k: int, n: int, bias: bool = False) -> str:
        weight = self.weight(f"{name}.weight", k, n, scale=k**-0.5)
        product = f"{output}_product" if bias else output
        self.node(product, f"float[batch, sequence, {n}]", f'MatMul ("{x}", "{weight}")')
        if not bias:
            return product
        self.weight(f"{name}.bias", n, scale=0.1)
        return self.node(output, f"float[batch, sequence, {n}]", f'Add ("{product}", "{name}.bias")')

    def norm(self, x: str, output: str, name: str, hidden: int) -> str:
        self.weight(f"{name}.weight", hidden, scale=0.1, offset=1.0)
        attributes = "<axis: int = -1, epsilon: float = 0.000001>"
        call = f'RMSNormalization {attributes} ("{x}", "{name}.weight")'
        return self.node(output, f"float[batch, sequence, {hidden}]", call)


def llama(spec: Llama | None = None) -> ir.Model:
    """Write the canonical graph of a small decoder with random weights and provenance, as the frontend would."""
    spec = spec or Llama()
    text = _Text(rng=np.random.default_rng(spec.seed))
    text.weight("model.embed_tokens.weight", spec.vocabulary, spec.hidden, scale=0.5)
    rotary = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
    if rotary:
        angles = np.arange(spec.positions)[:, None] / 100.0 ** (np.arange(rotary // 2) / (rotary // 2))
        text.tensors["cos"] = np.cos(angles).astype(np.float32)
        text.tensors["sin"] = np.sin(angles).astype(np.float32)
    hidden = f"float[batch, sequence, {spec.hidden}]"
    x = text.node("embedded", hidden, 'Gather <axis: int = 0> ("model.embed_tokens.weight", input_ids)')
    for layer in range(spec.layers):
        x = _layer(text, spec, layer, x, rotary)
    x = text.norm(x, "normed", "model.norm", spec.hidden)
    x = text.node("selected", f"float[batch, rows, {spec.hidden}]", f'Gather <axis: int = 1> ("{x}", logits_rows)')
    text.node(
        "head",
        f"float[{spec.hidden}, {spec.vocabulary}]",
        'Transpose <perm: ints = [1, 0]> ("model.embed_tokens.weight")',
    )
    text.lines.append(f'[logits_node] logits = MatMul ("{x}", head)')
    return _parse(text, spec, rotary)


def _layer(text: _Text, spec: Llama, layer: int, x: str, rotary: int) -> str:
    name, short = f"model.layers.{layer}", f"l{layer}_"
    hidden = f"float[batch, sequence, {spec.hidden}]"
    value_dim = spec.value_dim or spec.head_dim
    normed = text.norm(x, f"{short}normed", f"{name}.input_layernorm", spec.hidden)
    inputs = []
    for role, heads, width in (
        ("q", spec.heads, spec.head_dim),
        ("k", spec.kv_heads, spec.head_dim),
        ("v", spec.kv_heads, value_dim),
    ):
        n = heads * width
        y = text.linear(normed, f"{short}{role}", f"{name}.self_attn.{role}_proj", spec.hidden, n, spec.bias)
        if spec.query_norm and role != "v":
            y = _head_norm(text, y, f"{short}{role}", f"{name}.self_attn.{role}_norm", heads, width)
        if rotary and role != "v":
            partial = f", rotary_embedding_dim: int = {rotary}" if rotary < spec.head_dim else ""
            attributes = f"<num_heads: int = {heads}, interleaved: int = {spec.interleaved}{partial}>"
            call = f'RotaryEmbedding {attributes} ("{y}", cos, sin, position_ids)'
            y = text.node(f"{short}{role}_rotary", f"float[batch, sequence, {n}]", call)
        inputs.append(f'"{y}"')
    inputs += [f'"past_key_values.{layer}.key"', f'"past_key_values.{layer}.value"', "past_lengths"]
    if spec.sinks:
        inputs.append(f'"{text.weight(f"{name}.self_attn.sinks", spec.heads)}"')
    attributes = (
        f"num_heads: int = {spec.heads}, kv_num_heads: int = {spec.kv_heads}, layer: int = {layer}, "
        f"scale: float = {spec.head_dim**-0.5}, softcap: float = {spec.softcap}, window: int = {spec.window}"
        + (f", chunk: int = {spec.chunk}" if spec.chunk else "")
    )
    text.shapes[f"{short}attended"] = f"float[batch, sequence, {spec.heads * value_dim}]"
    outputs = f'"{short}attended", "present.{layer}.key", "present.{layer}.value"'
    text.lines.append(f"[{short}attention] {outputs} = llmforge.Attention <{attributes}> ({', '.join(inputs)})")
    out = text.linear(f"{short}attended", f"{short}o", f"{name}.self_attn.o_proj", spec.heads * value_dim, spec.hidden)
    x = text.node(f"{short}sum", hidden, f'Add ("{x}", "{out}")')
    normed = text.norm(x, f"{short}normed2", f"{name}.post_attention_layernorm", spec.hidden)
    if spec.experts:
        return text.node(f"{short}sum2", hidden, f'Add ("{x}", "{_experts(text, spec, name, short, normed)}")')
    gate = text.linear(normed, f"{short}gate", f"{name}.mlp.gate_proj", spec.hidden, spec.mlp)
    up = text.linear(normed, f"{short}up", f"{name}.mlp.up_proj", spec.hidden, spec.mlp)
    wide = f"float[batch, sequence, {spec.mlp}]"
    if spec.activation == "silu":
        sigmoid = text.node(f"{short}sigmoid", wide, f'Sigmoid ("{gate}")')
        active = text.node(f"{short}active", wide, f'Mul ("{gate}", "{sigmoid}")')
    else:
        active = text.node(f"{short}active", wide, f'{spec.activation} ("{gate}")')
    product = text.node(f"{short}gated", wide, f'Mul ("{active}", "{up}")')
    down = text.linear(product, f"{short}down", f"{name}.mlp.down_proj", spec.mlp, spec.hidden)
    return text.node(f"{short}sum2", hidden, f'Add ("{x}", "{down}")')


def _experts(text: _Text, spec: Llama, name: str, short: str, x: str) -> str:
    """Route each token to two gated experts."""
    count, kept = f"batch, sequence, {spec.experts}", "batch, sequence, 2"
    routed = text.linear(x, f"{short}routed", f"{name}.mlp.router", spec.hidden, spec.experts)
    text.node(f"{short}shares", f"float[{count}]", f'Softmax <axis: int = -1> ("{routed}")')
    text.tensors["two"] = np.array([2], np.int64)
    text.lines.append(f'[{short}choice] "{short}weights", "{short}ids" = TopK ("{short}shares", two)')
    text.shapes |= {f"{short}weights": f"float[{kept}]", f"{short}ids": f"int64[{kept}]"}
    parts = [f'"{x}"', f'"{short}ids"', f'"{short}weights"']
    for part, dims in (("up", (spec.hidden, 2 * spec.mlp)), ("down", (spec.mlp, spec.hidden))):
        parts.append(f'"{text.weight(f"{name}.mlp.experts.{part}", spec.experts, *dims, scale=dims[0] ** -0.5)}"')
    for part, dim in (("up", 2 * spec.mlp), ("down", spec.hidden)):
        parts.append(f'"{text.weight(f"{name}.mlp.experts.{part}_bias", spec.experts, dim, scale=0.1)}"')
    attributes = (
        f'activation: string = "silu", gated: int = 1, interleaved: int = {spec.interleaved_gates}, '
        "alpha: float = 1.0, beta: float = 0.0, limit: float = 0.0"
    )
    hidden = f"float[batch, sequence, {spec.hidden}]"
    return text.node(f"{short}experts", hidden, f"llmforge.MoE <{attributes}> ({', '.join(parts)})")


def _head_norm(text: _Text, x: str, output: str, name: str, heads: int, width: int) -> str:
    """Normalize each head: [B, S, heads·width] → [B, S, heads, width] → norm → back."""
    text.tensors["shape_heads"] = np.array([0, 0, -1, width], np.int64)
    text.tensors["shape_flat"] = np.array([0, 0, -1], np.int64)
    text.node(f"{output}_heads", f"float[batch, sequence, {heads}, {width}]", f'Reshape ("{x}", shape_heads)')
    text.weight(f"{name}.weight", width, scale=0.1, offset=1.0)
    call = f'RMSNormalization <axis: int = -1, epsilon: float = 0.000001> ("{output}_heads", "{name}.weight")'
    text.node(f"{output}_normed", f"float[batch, sequence, {heads}, {width}]", call)
    flat = f"float[batch, sequence, {heads * width}]"
    return text.node(f"{output}_flat", flat, f'Reshape ("{output}_normed", shape_flat)')


def _parse(text: _Text, spec: Llama, rotary: int) -> ir.Model:
    """Parse the text and attach the tensors."""
    inputs = ["int64[batch, sequence] input_ids", "int32[batch] past_lengths", "int64[rows] logits_rows"]
    inputs += ["int64[batch, sequence] position_ids"] if rotary else []
    outputs = [f"float[batch, rows, {spec.vocabulary}] logits"]
    for layer in range(spec.layers):
        for part, width in (("key", spec.head_dim), ("value", spec.value_dim or spec.head_dim)):
            shape = f"float[batch, {spec.kv_heads}, capacity, {width}]"
            inputs.append(f'{shape} "past_key_values.{layer}.{part}"')
            outputs.append(f'{shape} "present.{layer}.{part}"')
    shapes = ", ".join(f'{shape} "{name}"' for name, shape in text.shapes.items())
    model = parse(
        f'<ir_version: 11, opset_import: ["" : 24, "llmforge" : 1]>\n'
        f"decoder ({', '.join(inputs)}) => ({', '.join(outputs)})\n<{shapes}>\n{{\n" + "\n".join(text.lines) + "\n}",
        {**text.tensors, "logits_rows": np.array([-1], np.int64)},
    )
    for name, value in model.graph.initializers.items():
        if name.startswith("model."):
            graph.set_sources(value, [name])
    return model


def parse(text: str, tensors: dict[str, NDArray[np.generic]]) -> ir.Model:
    """Parse ONNX text whose initializers are `tensors`."""
    model = ir.from_onnx_text(text, [ir.Tensor(array, name=name) for name, array in tensors.items()])
    for name, array in tensors.items():
        value = model.graph.initializers[name]
        if not value.is_graph_input():
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
    return model


def operators(model: ir.Model) -> dict[str, int]:
    """Count the nodes of each operator."""
    counts: dict[str, int] = {}
    for node in model.graph:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def find(model: ir.Model, op_type: str) -> list[ir.Node]:
    """List the nodes of one operator, in graph order."""
    return [node for node in model.graph if node.op_type == op_type]


def lines(model: ir.Model, ops: Sequence[str]) -> list[str]:
    """Write the nodes of the operators `ops` as text: `outputs = op(inputs)`, in graph order."""
    return [
        f"{', '.join(v.name or '_' for v in node.outputs)} = {node.op_type}"
        f"({', '.join('_' if v is None else str(v.name) for v in node.inputs)})"
        for node in model.graph
        if node.op_type in ops
    ]


def prove(change: Pass, model: ir.Model, folder: Path, context: Context = CPU) -> tuple[Changes, PassVerification]:
    """Run `change` on `model`, have its numerics proven, its budget kept, and see that a second run changes nothing."""
    verifier = Verifier(model, promises=PROMISES, folder=folder)
    changes = change.run(model, context)
    verification = verifier.check(change, model, changes)
    if isinstance(budget := getattr(change, "budget", None), Budget) and verification.kld_mean is not None:
        assert verification.kld_mean <= budget.kld_mean
    fingerprint = graph.fingerprint(model)
    assert not change.run(model, context)
    assert graph.fingerprint(model) == fingerprint
    return changes, verification


def pruned(form: Llama, kept: PrunedStructure) -> Statistics:
    """What calibration might find for a decoder of `form`: plain cuts, which make up for nothing."""
    weights = {
        graph.sources(value)[0]: graph.tensor(value).numpy().T
        for value in llama(form).graph.initializers.values()
        if graph.sources(value) and len(graph.static(value)) == 2
    }
    outputs = {}
    for block in pruning.find(llama(form)).blocks:
        if block.heads is not None and (heads := kept.of_heads(block.index)) is not None:
            width = block.heads.shared * block.heads.value_dim
            outputs[block.heads.output] = weights[block.heads.output][:, structure.columns(heads, width)]
        if block.channels is not None and (channels := kept.of_channels(block.index)) is not None:
            outputs[block.channels.output] = weights[block.channels.output][:, list(channels)]
    return Statistics(1, 1, {}, {}, kept=kept, pruned=outputs)
