"""Attention over latents: its expansion and the CPU kernels against keys and values that are made one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from llmforge import native
from llmforge.base.errors import UsageError
from llmforge.ir import dialect
from llmforge.ir import graph as g
from llmforge.ir.operators import canonical, cpu
from llmforge.ir.operators.record import OPSETS
from llmforge.quantization import channels
from tests.samples import references

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
    return references.latent_attention(
        **operands, form=dialect.AttentionForm(kv_num_heads=shape.heads, **attributes(shape))
    )


def model_of(
    shape: Shape, given: dict[str, NDArray[Any]], kernel: type[canonical.LatentAttention | cpu.CpuLatentAttention]
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
    got = run(model_of(shape, given, cpu.CpuLatentAttention), given, shape, threads)
    np.testing.assert_allclose(got[0], y, atol=2e-5)
    np.testing.assert_array_equal(got[1], present)


@pytest.mark.parametrize("step", STEPS)
def test_kernel_with_int8_up_projection(step: str) -> None:
    shape, given = STEPS[step], feeds(STEPS[step])
    block = channels.block_of(shape.rank)
    operands = [given["up"], np.array(block)]
    codes, scales = channels.block_codes(operands), channels.block_scales(operands)
    assert block is not None
    dequantized = codes * scales.repeat(block, 1)
    assert np.abs(dequantized - given["up"]).max() <= scales.max() / 2 * 1.001
    y, present = reference(shape, {**given, "up": dequantized})
    coded = {**given, "up": codes, "up_scale": scales}
    got = run(model_of(shape, coded, cpu.LatentAttentionInt8), coded, shape)
    np.testing.assert_allclose(got[0], y, atol=2e-5)
    np.testing.assert_array_equal(got[1], present)
    assert np.abs(y - reference(shape, given)[0]).max() > 1e-4  # the codes were read


@pytest.mark.parametrize("name", native.INSTRUCTION_SETS)
def test_kernel_of_every_instruction_set(name: str) -> None:
    try:
        native.instruction_set(name)
    except UsageError:
        pytest.skip(f"this processor has no {name}")
    try:
        for step in ("decode, two blocks of keys, ragged", "window, prompt", "softcap and sinks, prompt", "few tokens"):
            shape, given = STEPS[step], feeds(STEPS[step])
            got = run(model_of(shape, given, cpu.CpuLatentAttention), given, shape)
            np.testing.assert_allclose(got[0], reference(shape, given)[0], atol=2e-5)
    finally:
        native.instruction_set()


def test_a_row_is_what_it_is_alone_whatever_lies_behind_it() -> None:
    shape = Shape(past=(130, 5), capacity=256)
    given = feeds(shape)
    given["past_key_values.0.latent"][0, :, 132:] = np.nan
    given["past_key_values.0.latent"][1, :, 7:] = np.inf
    got, _ = run(model_of(shape, given, cpu.CpuLatentAttention), given, shape)
    for row in range(2):
        own = {name: array if name == "up" else array[row : row + 1] for name, array in given.items()}
        alone = replace(shape, past=shape.past[row : row + 1])
        np.testing.assert_array_equal(
            run(model_of(alone, own, cpu.CpuLatentAttention), own, alone)[0], got[row : row + 1]
        )


@pytest.mark.parametrize(("whole", "rest", "past"), [(150, 40, 0), (60, 9, 512), (512, 12, 0), (40, 12, 1024)])
def test_the_rest_of_a_chunk_gets_the_bits_of_the_whole(whole: int, rest: int, past: int) -> None:
    shape = Shape(2, 64, 16, 16, 16, capacity=past + whole, sequence=whole, past=(past,))
    given = feeds(shape)
    y, present = run(model_of(shape, given, cpu.CpuLatentAttention), given, shape)
    behind = replace(shape, sequence=rest, past=(past + whole - rest,))
    own = {**given, "past_lengths": np.array(behind.past, np.int32), "past_key_values.0.latent": present}
    own |= {name: given[name][:, -rest:] for name in ("q", "latent")}
    got, _ = run(model_of(behind, own, cpu.CpuLatentAttention), own, behind)
    np.testing.assert_array_equal(got, y[:, -rest:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past_lengths": np.array([300], np.int32)}, "past_lengths is outside the cache"),
        ({"past_lengths": np.array([-1], np.int32)}, "past_lengths is outside the cache"),
        ({"past_lengths": np.zeros(2, np.int32)}, "do not agree"),
        ({"latent": np.zeros((1, 1, 64), np.float32)}, "do not agree"),
        ({"up": np.zeros((6 * 64, 40), np.float32)}, "multiples of 16"),
        ({"q": np.zeros((1, 1, 193), np.float32)}, "num_heads must divide"),
        ({"sinks": np.zeros(5, np.float32)}, "sinks are"),
    ],
)
def test_kernel_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    shape = Shape()
    given = {**feeds(shape), **change}
    with pytest.raises(Exception, match=message):
        run(model_of(shape, given, cpu.CpuLatentAttention), given, shape)
