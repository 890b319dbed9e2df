"""A two-layer decoder written by hand in the dialect that engines run: GroupQueryAttention and random weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 4, 2, 16, 48
MICROSOFT = "com.microsoft"


def value(name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def decoder(
    vocabulary: int = 97, capacity: int = 256, *, int8_cache: bool = False, tied_head: bool = False, seed: int = 0
) -> ir.Model:
    """Embedding → 2 × (packed QKV, rotary GroupQueryAttention, residual) → row selection → head."""
    random = np.random.default_rng(seed)
    initializers: list[ir.Value] = []
    nodes: list[ir.Node] = []

    def weight(name: str, array: np.ndarray) -> ir.Value:
        made = value(name, ir.DataType.from_numpy(array.dtype), list(array.shape))
        made.const_value = ir.tensor(array, name=name)
        initializers.append(made)
        return made

    def node(op: str, inputs: list[ir.Value | None], *, domain: str = "", outputs: int = 1, **attributes) -> ir.Node:
        made = ir.node(op, inputs, attributes, domain=domain, num_outputs=outputs, name=f"{op}_{len(nodes)}")
        nodes.append(made)
        return made

    def matrix(name: str, k: int, n: int) -> ir.Value:
        # Twice the usual spread: what earlier tokens say must move the logits by more than rounding does.
        return weight(name, (2 * random.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32))

    ids = value("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    seqlens = value("seqlens_k", ir.DataType.INT32, ["batch"])
    total = value("total_sequence_length", ir.DataType.INT32, [])
    rows = value("logits_rows", ir.DataType.INT64, ["rows"])
    rows.const_value = ir.tensor(np.array([-1], np.int64), name="logits_rows")
    inputs, outputs = [ids, seqlens, total], []

    embedding = weight("embedding", random.standard_normal((vocabulary, HIDDEN)).astype(np.float32))
    angles = np.arange(capacity)[:, None] * 10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    cos, sin = weight("cos", np.cos(angles).astype(np.float32)), weight("sin", np.sin(angles).astype(np.float32))
    scale = weight("kv_scale", np.array([0.03], np.float32)) if int8_cache else None
    cache_dtype = ir.DataType.INT8 if int8_cache else ir.DataType.FLOAT
    quantization = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}

    hidden = node("Gather", [embedding, ids]).outputs[0]
    for layer in range(LAYERS):
        past = [
            value(f"past_key_values.{layer}.{kind}", cache_dtype, ["batch", KV_HEADS, "capacity", HEAD_DIM])
            for kind in ("key", "value")
        ]
        inputs += past
        qkv = node("MatMul", [hidden, matrix(f"qkv.{layer}", HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)]).outputs[0]
        attention = node(
            "GroupQueryAttention",
            [qkv, None, None, *past, seqlens, total, cos, sin, None, None, None, *([scale, scale] if scale else [])],
            domain=MICROSOFT,
            outputs=3,
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            do_rotary=1,
            **(quantization if int8_cache else {}),
        )
        for out, kind in zip(attention.outputs[1:], ("key", "value"), strict=True):
            out.name = f"present.{layer}.{kind}"
            out.type = ir.TensorType(cache_dtype)
            out.shape = ir.Shape(["batch", KV_HEADS, "capacity", HEAD_DIM])
            outputs.append(out)
        mixed = node("MatMul", [attention.outputs[0], matrix(f"out.{layer}", HEADS * HEAD_DIM, HIDDEN)]).outputs[0]
        hidden = node("Tanh", [node("Add", [hidden, mixed]).outputs[0]]).outputs[0]
    hidden.type, hidden.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "sequence", HIDDEN])
    selected = node("Gather", [hidden, rows], axis=1).outputs[0]
    head = node("Transpose", [embedding], perm=[1, 0]).outputs[0] if tied_head else matrix("head", HIDDEN, vocabulary)
    logits = node("MatMul", [selected, head]).outputs[0]
    logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", "rows", vocabulary])
    graph = ir.Graph(
        [*inputs, rows],
        [logits, *outputs],
        nodes=nodes,
        initializers=[*initializers, rows],
        opset_imports={"": 24, MICROSOFT: 1},
        name="decoder",
    )
    return ir.Model(graph, ir_version=10)
