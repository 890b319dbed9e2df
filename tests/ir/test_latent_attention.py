"""Attention over latents: its expansion and the CPU kernels against keys and values that are made one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from llmforge import native
from llmforge.ir import dialect
from llmforge.ir import graph as g
from llmforge.ir.operators import canonical, cpu
from llmforge.ir.operators.record import OPSETS

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention, and of a step."""

    heads: int = 6
    rank: int = 32
    rotary: int = 16
    plain: int = 16
    values: int = 48
    capacity: int = 300
    sequence: int = 1
    past: tuple[int, ...] = (0,)
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


STEPS = {
    "decode": Shape(past=(37,)),
    "decode, two blocks of keys, ragged": Shape(past=(250, 3, 128, 127)),
    "prompt": Shape(sequence=150),
    "ragged batch of prompts": Shape(sequence=40, past=(0, 0, 0)),
    "continuation": Shape(sequence=9, past=(130,)),
    "a chunk behind a short and a long past": Shape(sequence=33, past=(200, 0)),
    "few tokens": Shape(sequence=3, past=(126, 0)),
    "window": Shape(past=(280, 4), window=130),
    "window, prompt": Shape(sequence=260, window=20),
    "softcap and sinks": Shape(past=(140, 0), softcap=4.0, sinks=True),
    "softcap and sinks, prompt": Shape(sequence=200, softcap=4.0, sinks=True),
    "one head": Shape(heads=1, past=(20,)),
    "values wider than latents": Shape(rank=16, values=64, plain=32, sequence=20),
    "sizes of DeepSeek-V3": Shape(3, 512, 64, 128, 128, past=(200, 7)),
    "sizes of DeepSeek-V3, prompt": Shape(2, 512, 64, 128, 128, sequence=140),
}


def feeds(shape: Shape, seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    batch, width = len(shape.past), shape.rank + shape.rotary

    def normal(*dims: int) -> Floats:
        return rng.standard_normal(dims).astype(np.float32)

    made: dict[str, NDArray[Any]] = {
        "q": normal(batch, shape.sequence, shape.heads * (shape.plain + shape.rotary)),
        "latent": normal(batch, shape.sequence, width),
        "up": normal(shape.heads * (shape.plain + shape.values), shape.rank) / np.float32(np.sqrt(shape.rank)),
        "past_key_values.0.latent": normal(batch, 1, shape.capacity, width),
        "past_lengths": np.array(shape.past, np.int32),
    }
    return {**made, "sinks": normal(shape.heads)} if shape.sinks else made


def attributes(shape: Shape) -> dict[str, Any]:
    scale = 1 / np.sqrt(shape.plain + shape.rotary)
    return {"num_heads": shape.heads, "scale": float(scale), "softcap": shape.softcap, "window": shape.window}


def reference(shape: Shape, given: dict[str, NDArray[Any]]) -> tuple[Floats, Floats]:
    operands = {name.replace("past_key_values.0.latent", "past"): array for name, array in given.items()}
    return dialect.latent_attention(**operands, **attributes(shape))


def model_of(
    shape: Shape, given: dict[str, NDArray[Any]], kernel: type[canonical.LatentAttention | cpu.LatentAttention]
) -> ir.Model:
    """Write a graph of one node; `input_ids` is there because the expansion counts its tokens."""
    values = {
        name: ir.val(name, ir.DataType.from_numpy(array.dtype), array.shape)
        for name, array in given.items()
        if name not in ("up", "up_scale")
    }
    ids = ir.val("input_ids", ir.DataType.INT64, (len(shape.past), shape.sequence))
    graph = ir.Graph([*values.values(), ids], [], nodes=[], opset_imports=dict(OPSETS), name="attention")
    model = ir.Model(graph, ir_version=10)
    for name in ("up", "up_scale"):
        if name in given:
            values[name] = g.initializer(model, name, given[name])
    inputs = {name.replace("past_key_values.0.latent", "past"): value for name, value in values.items()}
    layer = {"layer": 0} if kernel is canonical.LatentAttention else {}
    made = ir.convenience.convert_attributes({**attributes(shape), **layer})
    node = ir.Node(kernel.domain, kernel.op_type, kernel.ordered(inputs), made, num_outputs=2, name="attention")
    graph.append(node)
    node.outputs[0].name, node.outputs[1].name = "y", "present.0.latent"
    for value in node.outputs:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.extend(node.outputs)
    return model


def run(model: ir.Model, given: dict[str, NDArray[Any]], shape: Shape, threads: int = 1) -> list[Floats]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if any(node.domain == native.DOMAIN for node in model.graph):
        options.register_custom_ops_library(str(native.require()))
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    ids = {"input_ids": np.zeros((len(shape.past), shape.sequence), np.int64)}
    wanted = {each.name for each in session.get_inputs()}
    return session.run(None, {name: array for name, array in {**given, **ids}.items() if name in wanted})  # type: ignore[no-any-return]


@pytest.mark.parametrize("step", STEPS)
def test_expansion(step: str) -> None:
    shape, given = STEPS[step], feeds(STEPS[step])
    y, present = reference(shape, given)
    got = run(dialect.expand(model_of(shape, given, canonical.LatentAttention)), given, shape)
    np.testing.assert_allclose(got[0], y, atol=2e-5)
    np.testing.assert_array_equal(got[1], present)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_kernel(step: str, threads: int) -> None:
    shape, given = STEPS[step], feeds(STEPS[step])
    y, present = reference(shape, given)
    got = run(model_of(shape, given, cpu.LatentAttention), given, shape, threads)
    np.testing.assert_allclose(got[0], y, atol=2e-5)
    np.testing.assert_array_equal(got[1], present)
