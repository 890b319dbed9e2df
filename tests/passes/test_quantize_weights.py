"""quantize-weights: linear layers, embedding and head in 4 or 8 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from llmforge import targets
from llmforge.base.errors import CheckpointError, UnsupportedError, UsageError
from llmforge.ir import graph
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix, dequantize, pack, round_to_nearest
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import ChannelDemand, InputRange, Statistics, WeightDemand
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.verification import probe
from llmforge.verification.verifier import Verifier

from ..models import graphs

BUDGET = Budget(kld_mean=5.0)
EXACT = {"bits": 4, "embedding_bits": 4, "accuracy_level": 0}  # kernels that do not round activations


def array(model: ir.Model, name: str) -> NDArray[np.float32]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return np.array(tensor.numpy())


def matrices(model: ir.Model, grid: Grid, noise: float = 0.0) -> dict[str, QuantizedMatrix]:
    """Round the decoder's weights as a calibration would return them; `noise` tells them from plain rounding."""
    random = np.random.default_rng(0)
    return {
        name: round_to_nearest(
            array(model, name).T + noise * random.standard_normal(array(model, name).T.shape, np.float32), grid
        )
        for name in model.graph.initializers
        if name.endswith("_proj.weight")
    }


def context(linears: dict[str, QuantizedMatrix]) -> Context:
    return Context(graphs.TARGET, Statistics(samples=1, tokens=1, linears=linears, kv={}))


def logits(model: ir.Model) -> list[NDArray[np.float32]]:
    session = probe.open_session(model, probe.InitializerArrays(), threads=1)
    return [out.logits for run in probe.random_runs(96) for out in probe.drive(session, run, caches=False)]


def with_weights(model: ir.Model, weights: dict[str, NDArray[np.float32]]) -> ir.Model:
    """Give initializers other values."""
    for name, values in weights.items():
        model.graph.initializers[name].const_value = ir.Tensor(np.ascontiguousarray(values), name=name)
    return model


def test_decoder_as_text() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    changes = QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU)
    table, attention = "model.embed_tokens.weight", "model.layers.0.self_attn"
    lines = graphs.lines(model, ["MatMulNBits", "GatherBlockQuantized", "Reshape", "MatMul", "Transpose", "Gather"])
    assert lines[:4] == [
        f"embedded_node/scales = Reshape({table}.scales, {table}.scales.shape)",
        f"embedded_node/blocks = GatherBlockQuantized({table}.codes, input_ids, embedded_node/scales)",
        f"embedded = Reshape(embedded_node/blocks, {table}.codes.row_shape)",
        f"l0_q = MatMulNBits(l0_normed, {attention}.q_proj.weight.codes, {attention}.q_proj.weight.scales, "
        f"{attention}.q_proj.weight.zero_points)",
    ]
    assert lines[-2:] == [
        "selected = Gather(normed, logits_rows)",
        f"logits = MatMulNBits(selected, {table}.codes, {table}.scales)",
    ]
    assert len(lines) == 3 + 7 + 2
    assert [change.node for change in changes.rewritten][:3] == ["embedded_node", "logits_node", "l0_q_node"]
    assert not changes.skipped
    [down] = [node for node in model.graph if node.name == "l0_down_node"]
    attributes = {name: attribute.value for name, attribute in down.attributes.items()}
    assert attributes == {"N": 48, "K": 56, "bits": 4, "block_size": 32, "accuracy_level": 4}
    codes = model.graph.initializers["model.layers.0.mlp.down_proj.weight.codes"]
    assert graph.dims(codes) == (48, 2, 16)
    assert graph.sources(codes) == ["model.layers.0.mlp.down_proj.weight"]
    assert not [name for name in model.graph.initializers if name.endswith("weight") and "norm" not in name]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_rtn_computes_with_the_rounded_weights(block_size: int, symmetric: bool) -> None:
    spec = graphs.Llama(bias=True)
    model, reference = graphs.llama(spec), graphs.llama(spec)
    grid = Grid(4, block_size, symmetric)
    rounded = {name: dequantize(matrix).T for name, matrix in matrices(reference, grid).items()}
    embedding = "model.embed_tokens.weight"
    rounded[embedding] = dequantize(round_to_nearest(array(reference, embedding), Grid(4, 16, True)))
    step = QuantizeWeights(BUDGET, block_size=block_size, symmetric=symmetric, method="rtn", **EXACT)
    changes = step.run(model, graphs.CPU)
    assert len(changes.rewritten) == 7 * spec.layers + 2
    assert not graphs.find(model, "MatMul")
    for got, want in zip(logits(model), logits(with_weights(reference, rounded)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_are_put_together_from_calibrated_ones(bias: bool) -> None:
    spec = graphs.Llama(bias=bias)
    model, reference = graphs.llama(spec), graphs.llama(spec)
    step = QuantizeWeights(BUDGET, **{**EXACT, "embedding_bits": 16})
    calibrated = matrices(reference, step.grid, noise=0.05)
    for packing in (PackQkv(), PackGateUp()):
        assert packing.run(model, graphs.CPU)
    changes = step.run(model, context(calibrated))
    assert [node.op_type for node in model.graph].count("MatMulNBits") == 4 * spec.layers
    assert [change.node for change in changes.skipped] == ["embedded_node", "logits_node"]
    if bias:
        [first, *_] = graphs.find(model, "MatMulNBits")
        assert first.inputs[5] is not None
        assert first.inputs[5].name == "model.layers.0.self_attn.qkv_proj.bias"
        assert not [node for node in graphs.find(model, "Add") if "qkv" in str(node.name)]
    with_weights(reference, {name: dequantize(matrix).T for name, matrix in calibrated.items()})
    for got, want in zip(logits(model), logits(reference), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
    "given",
    [{}, {"bits": 8}, {"embedding_bits": 4}, {"symmetric": True, "block_size": 128}, {"scales": "fp16"}],
    ids=["defaults", "8 bits", "4-bit embedding", "symmetric", "fp16 scales"],
)
@pytest.mark.parametrize("lowered", [True, False])
def test_the_numerics_hold(given: dict[str, object], lowered: bool, tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(bias=True))
    if lowered:
        FlashAttention().run(model, graphs.CPU)
    text = np.random.default_rng(0).integers(0, 96, 40)
    verifier = Verifier(model, promises=graphs.PROMISES, folder=tmp_path, texts=[text])
    step = options.make(QuantizeWeights, {"budget": {"kld_mean": 0.5}, "method": "rtn", **given})
    changes = step.run(model, graphs.CPU)
    verification = verifier.check(step, model, changes)
    assert verification.kld_mean is not None
    assert verification.kld_mean > 1e-6
    before = graph.fingerprint(model)
    assert not step.run(model, graphs.CPU)
    assert graph.fingerprint(model) == before


def untied(model: ir.Model) -> ir.Model:
    """Give the head a weight of its own, [K, V]."""
    head = next(node for node in model.graph if node.name == "logits_node")
    random = np.random.default_rng(7)
    weight = graph.initializer(model, "lm_head.weight", random.standard_normal((48, 96)).astype(np.float32))
    graph.set_sources(weight, ["lm_head.weight"])
    head.replace_input_with(1, weight)
    graph.drop_unused(model)
    return model


def test_an_untied_head_and_its_embedding_are_rounded_apart() -> None:
    model, reference = untied(graphs.llama()), untied(graphs.llama())
    decoder = ("model.layers.*",)
    changes = QuantizeWeights(BUDGET, method="rtn", exclude=decoder, **EXACT).run(model, graphs.CPU)
    assert [change.node for change in changes.rewritten] == ["embedded_node", "logits_node"]
    assert len(changes.skipped) == 14
    assert "is excluded by 'model.layers.*'" in changes.skipped[0].reason
    assert not graphs.find(model, "Reshape")
    [gather] = graphs.find(model, "GatherBlockQuantized")
    assert gather.inputs[0] is not None
    assert graph.dims(gather.inputs[0]) == (96, 24)
    grid, table = Grid(4, 16, True), "model.embed_tokens.weight"
    rounded = {
        table: dequantize(round_to_nearest(array(reference, table), grid)),
        "lm_head.weight": dequantize(round_to_nearest(array(reference, "lm_head.weight").T, grid)).T,
    }
    for got, want in zip(logits(model), logits(with_weights(reference, rounded)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_nothing_is_read_before_writing_and_each_matrix_is_computed_once() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    reads: list[str] = []
    for name, value in model.graph.initializers.items():
        if name.endswith("_proj.weight"):
            values = array(model, name)

            def read(name: str = name, values: NDArray[np.float32] = values) -> ir.TensorProtocol:
                reads.append(name)
                return ir.Tensor(values, name=name)

            value.const_value = ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape(values.shape), name=name)
    expected = pack(round_to_nearest(array(model, "model.layers.0.mlp.up_proj.weight").T, Grid(4, 32, False)))
    reads.clear()
    QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU)
    assert not reads
    for _ in range(2):  # a second walk over the graph computes again: nothing is kept
        for part in ("scales", "zero_points", "codes"):
            got = array(model, f"model.layers.0.mlp.up_proj.weight.{part}")
            np.testing.assert_array_equal(got, getattr(expected, part))
    assert reads == ["model.layers.0.mlp.up_proj.weight"] * 2


def reasons(model: ir.Model, step: QuantizeWeights, given: Context = graphs.CPU) -> dict[str, str]:
    return {skipped.node: skipped.reason for skipped in step.run(model, given).skipped}


def test_what_stays_says_why() -> None:
    rounding = QuantizeWeights(BUDGET, method="rtn")
    model = graphs.llama(graphs.Llama(layers=1))
    weight = model.graph.initializers["model.layers.0.mlp.up_proj.weight"]
    graph.insert(next(iter(model.graph)), "Identity", [weight])
    half = model.graph.initializers["model.layers.0.mlp.down_proj.weight"]
    half.type = ir.TensorType(ir.DataType.FLOAT16)
    assert reasons(model, rounding) == {
        "l0_up_node": "model.layers.0.mlp.up_proj.weight has other readers",
        "l0_down_node": "model.layers.0.mlp.down_proj.weight is FLOAT16 (56, 48); expected an fp32 matrix",
    }
    keeps = reasons(graphs.llama(graphs.Llama(layers=1)), replace(rounding, embedding_bits=16))
    assert keeps == {
        "embedded_node": "embedding_bits is 16",
        "logits_node": "tied to the embedding, which is not quantized",
    }
    odd = reasons(graphs.llama(graphs.Llama(layers=1, hidden=40)), rounding)
    assert odd["embedded_node"] == "its 40 features are not a multiple of 16, the smallest block"


def test_a_table_with_a_third_reader_stays() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    table = model.graph.initializers["model.embed_tokens.weight"]
    [extra] = graph.insert(next(iter(model.graph)), "Identity", [table], name="extra")
    model.graph.outputs.append(extra)
    found = reasons(model, QuantizeWeights(BUDGET, method="rtn"))
    assert found["embedded_node"].startswith("model.embed_tokens.weight is read by ")
    assert found["embedded_node"].endswith("only the embedding and a tied head may")
    assert found["logits_node"] == "tied to the embedding, which is not quantized"


def test_linears_without_statistics_stay() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    step = QuantizeWeights(BUDGET)
    calibrated = matrices(model, step.grid)
    del calibrated["model.layers.0.self_attn.k_proj.weight"]
    found = reasons(model, step, context(calibrated))
    assert found == {"l0_k_node": "calibration has no result for model.layers.0.self_attn.k_proj.weight"}
    assert len(reasons(graphs.llama(graphs.Llama(layers=1)), step)) == 7  # and without a calibration all of them


@pytest.mark.parametrize("tied", [True, False])
def test_calibrated_tables_are_taken_as_they_are(tied: bool) -> None:
    model, reference = (graphs.llama() if tied else untied(graphs.llama()) for _ in range(2))
    step = QuantizeWeights(BUDGET, **EXACT)
    table, head, grid = "model.embed_tokens.weight", "lm_head.weight", Grid(4, 16, True)
    calibrated = matrices(reference, step.grid)
    calibrated[table] = round_to_nearest(array(reference, table) + np.float32(0.05), grid)
    if not tied:
        calibrated[head] = round_to_nearest(array(reference, head).T - np.float32(0.05), grid)
    changes = step.run(model, context(calibrated))
    assert not changes.skipped
    assert changes.rewritten[0].what.startswith("embedding, gptq, 4 bits, blocks of 16")
    exact = {name: dequantize(matrix) for name, matrix in calibrated.items()}
    with_weights(reference, {name: w if name == table else w.T for name, w in exact.items()})
    for got, want in zip(logits(model), logits(reference), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_tables_that_calibration_has_not_seen_are_rounded_to_nearest() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    step = QuantizeWeights(BUDGET)
    changes = step.run(model, context(matrices(model, step.grid)))
    assert changes.rewritten[0].what.startswith("embedding, rtn, 8 bits")


def test_each_matrix_has_the_format_that_calibration_gave_it() -> None:
    model, reference = graphs.llama(), graphs.llama()
    step = QuantizeWeights(BUDGET, **{**EXACT, "embedding_bits": 16})
    calibrated = matrices(reference, step.grid)
    other = matrices(reference, Grid(4, 64, True))
    mixed = {name: other[name] if "down_proj" in name else matrix for name, matrix in calibrated.items()}
    step.run(model, context(mixed))
    formats = {
        str(node.name): (node.attributes["block_size"].value, len([i for i in node.inputs if i is not None]))
        for node in graphs.find(model, "MatMulNBits")
    }
    assert {form for name, form in formats.items() if "down" in name} == {(64, 3)}
    assert {form for name, form in formats.items() if "down" not in name} == {(32, 4)}
    with_weights(reference, {name: dequantize(matrix).T for name, matrix in mixed.items()})
    for got, want in zip(logits(model), logits(reference), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_one_matrix_of_several_formats_stays() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    step = QuantizeWeights(BUDGET)
    calibrated = matrices(model, step.grid)
    query = "model.layers.0.self_attn.q_proj.weight"
    calibrated[query] = matrices(model, Grid(8, 32, True))[query]
    PackQkv().run(model, graphs.CPU)
    [reason] = reasons(model, step, context(calibrated)).values()
    assert reason.endswith("are one matrix, and have 2 formats")


def test_an_excluded_part_keeps_its_packed_weight() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    PackQkv().run(model, graphs.CPU)
    found = reasons(model, QuantizeWeights(BUDGET, method="rtn", exclude=("*.v_proj.*", "model.embed*")))
    packed, table = "model.layers.0.self_attn.v_proj.weight", "model.embed_tokens.weight"
    assert sorted(found.values()) == [
        f"{table} is excluded by 'model.embed*'",
        f"{packed} is excluded by '*.v_proj.*'",
        "tied to the embedding, which is not quantized",
    ]


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    name = "model.layers.0.mlp.up_proj.weight"
    values = array(model, name)
    values[3, 3] = np.nan
    with_weights(model, {name: values})
    QuantizeWeights(BUDGET, method="rtn").run(model, graphs.CPU)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight cannot be quantized: the matrix holds NaN"):
        array(model, f"{name}.codes")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_methods_give_a_trellis(method: str) -> None:
    options_ = {"budget": {"kld_mean": 0.1}, "method": method, "codes": "trellis", "symmetric": True, "scales": "int8"}
    assert options.make(QuantizeWeights, options_).grid == Grid(4, 32, True, "int8", True)
    assert options.make(QuantizeWeights, {**options_, "bits": 5}).grid == Grid(5, 32, True, "int8", True)
    with pytest.raises(ValidationError, match="codes: trellis has bits: 4 or 5"):
        options.make(QuantizeWeights, {**options_, "bits": 6})


def test_layers_of_a_trellis_may_have_its_other_width() -> None:
    model = graphs.llama(graphs.Llama(layers=3))
    of_layers = {"model.layers.1.*": 5, "model.layers.2.*": 6}  # of 6 bits there is no trellis
    options_ = {"method": "rtn", "codes": "trellis", "symmetric": True, "scales": "int8", "embedding_bits": 6}
    changes = QuantizeWeights(BUDGET, layer_bits=of_layers, **options_).run(model, graphs.CPU)
    said = {change.node: change.what for change in changes.rewritten}
    assert said["l0_o_node"].startswith("rtn, 4 bits, blocks of 32, trellis")
    assert said["l1_o_node"].startswith("rtn, 5 bits, blocks of 32, trellis")
    assert said["l2_o_node"].startswith("rtn, 6 bits, blocks of 32, symmetric")


def test_inputs_that_were_seen_choose_codes() -> None:
    """Of a linear layer, and of the head for the table that it shares; others are rounded to nearest."""
    names = ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"]
    plain, model = graphs.llama(graphs.Llama(layers=1)), graphs.llama(graphs.Llama(layers=1))
    random = np.random.default_rng(0)
    read = {}
    for name in names:
        k = {"model.embed_tokens.weight": 1}.get(name, 0)
        x = random.standard_normal((50, graph.dims(model.graph.initializers[name])[k])) ** 3
        totals = x.sum(0).astype(np.float32), np.square(x).sum(0).astype(np.float32)
        read[name] = InputRange(np.abs(x).max(0), None, *totals, len(x))
    step = QuantizeWeights(BUDGET, method="importance")
    assert step.demands() == (ChannelDemand(),)
    changes = step.run(model, Context(graphs.TARGET, Statistics(1, 50, {}, {}, read)))
    said = {change.node: change.what for change in changes.rewritten}
    assert said["embedded_node"].startswith("embedding, importance")
    assert said["l0_down_node"].startswith("importance, 4 bits")
    assert said["l0_q_node"].startswith("rtn, 4 bits")
    QuantizeWeights(BUDGET, method="rtn").run(plain, graphs.CPU)
    for name, differ in ((names[0], True), (names[1], True), ("model.layers.0.self_attn.q_proj.weight", False)):
        assert np.array_equal(array(model, f"{name}.codes"), array(plain, f"{name}.codes")) is not differ


def test_options() -> None:
    assert QuantizeWeights(BUDGET, method="rtn").demands() == ()
    step = options.make(QuantizeWeights, {"budget": {"kld_mean": 0.1}, "block_size": 64, "exclude": ["*.k_proj.*"]})
    assert step.demands() == (WeightDemand(Gptq(), Grid(4, 64, False), ("*.k_proj.*",), tables=Grid(8, 64, True)),)
    auto = {"budget": {"kld_mean": 0.1}, "method": "auto", "scales": "int8", "weight_bits": 4.5}
    [demand] = options.make(QuantizeWeights, auto).demands()
    wanted = Grid(4, 32, False, "int8"), Grid(8, 32, True, "int8")
    assert demand == WeightDemand(Gptq(), wanted[0], tables=wanted[1], weight_bits=4.5)
    [demand] = options.make(QuantizeWeights, {**auto, "weight_bits": None}).demands()
    assert demand == WeightDemand(Gptq(), wanted[0], tables=wanted[1], weight_loss=0.1), "the smallest for the budget"
    with pytest.raises(ValidationError, match="budget"):
        options.make(QuantizeWeights, {})
    for bad in (
        {"bits": 7},
        {"codes": "trellis"},
        {"bits": 5, "accuracy_level": 1},
        {"block_size": 16},
        {"damping": 0.0},
        {"method": "awq"},
        {"weight_bits": 4.5},
        {"method": "auto", "weight_bits": 4.5, "weight_bytes": 10**6},
        {"method": "auto", "weight_bits": 4.5, "accuracy_level": 0},
        {"embedding_bits": 2},
        {"codes": "gguf", "embedding_block_size": 64},
    ):
        with pytest.raises(ValidationError):
            options.make(QuantizeWeights, {"budget": {"kld_mean": 0.1}, **bad})


def test_layers_have_bits_of_their_own() -> None:
    given = {"model.layers.0.*": 8, "model.embed_tokens.weight": 4}
    model = graphs.llama(graphs.Llama(layers=2))
    QuantizeWeights(BUDGET, method="rtn", layer_bits=given).run(model, graphs.CPU)
    found: dict[str, set[int]] = {}
    for name, value in model.graph.initializers.items():
        if name.endswith(".codes"):
            found.setdefault(name[:14], set()).add(value.consumers()[0].attributes["bits"].as_int())
    assert found == {"model.layers.0": {8}, "model.layers.1": {4}, "model.embed_to": {4}}
    [demand] = QuantizeWeights(BUDGET, layer_bits=given).demands()
    assert isinstance(demand, WeightDemand)
    assert demand.grid_of(["model.layers.0.a", "model.layers.0.b"]) == Grid(8, 32, False)
    assert demand.grid_of(["model.layers.1.a"]) == Grid(4, 32, False)
    assert demand.table_grid("model.embed_tokens.weight", 64) == Grid(4, 32, True)
    assert demand.table_grid("lm_head.weight", 64) == Grid(8, 32, True)
    with pytest.raises(UnsupportedError, match=r"a, model\.layers\.1\.b read the same and have one format"):
        replace(demand, layer_bits=(("*.a", 8),)).grid_of(["model.layers.1.a", "model.layers.1.b"])
    with pytest.raises(UsageError, match=r"no parameter of the checkpoint matches 'model\.layer\.0") as missed:
        QuantizeWeights(BUDGET, method="rtn", layer_bits={"model.layer.0.*": 8}).run(graphs.llama(), graphs.CPU)
    assert "the closest is model.layers.0." in str(missed.value.hint)


def test_a_retreat_comes_after_other_globs_of_its_layer() -> None:
    """The last glob that matches counts: a layer that had bits of its own has those of the retreat."""
    step = QuantizeWeights(budget=BUDGET, bits=6, scales="int8", layer_bits={"layers.1.*": 5, "layers.*.mlp.*": 4})
    assert [*step.retreated({"layers.1.*": 8}).layer_bits.items()] == [("layers.*.mlp.*", 4), ("layers.1.*", 8)]


def test_retreats_are_refused_where_no_kernel_has_their_bits() -> None:
    own = {"budget": {"kld_mean": 0.1}, "method": "rtn", "retreat": {"bits": [5], "max_bytes": 1}}
    step = options.make(QuantizeWeights, own)
    with pytest.raises(UnsupportedError, match="retreat to 5 bits, blocks of 32"):
        step.run(graphs.llama(), Context(target=targets.load("l4")))
    for bad in ({"method": "stored"}, {"accuracy_level": 0, "embedding_bits": 4}, {"method": "auto", "weight_bits": 5}):
        with pytest.raises(ValidationError, match="retreat"):
            options.make(QuantizeWeights, {**own, **bad})


@pytest.mark.parametrize(
    ("given", "blamed"),
    [({"bits": 8, "accuracy_level": 0}, "bits"), ({"accuracy_level": 1}, "embedding_bits")],
)
def test_slow_kernels_are_refused(given: dict[str, object], blamed: str) -> None:
    with pytest.raises(ValidationError, match=f"{blamed}: 8 bits run 400 times slower"):
        options.make(QuantizeWeights, {"budget": {"kld_mean": 0.1}, **given})


def test_targets_without_the_kernels_are_refused() -> None:
    rtx = targets.load("l4").model_copy(update={"name": "rtx", "engines": ("tensorrt-rtx",)})
    with pytest.raises(UnsupportedError, match="quantize-weights: target rtx runs tensorrt-rtx; MatMulNBits is"):
        QuantizeWeights(BUDGET, method="rtn").run(graphs.llama(), Context(target=rtx))
