"""Kernels of the CUDA provider as data, types of values, and what no kernel runs."""

from __future__ import annotations

import json
import runpy
from importlib import resources
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.onnxruntime import kernels
from llmforge.base.errors import VerificationError

from ...models import graphs

RECORD = json.loads(resources.files("llmforge.backends.onnxruntime").joinpath(kernels.FILE).read_text(encoding="utf-8"))
TYPES = {
    *("bfloat16", "bool", "double", "float", "float16", "int16", "int32", "int64", "int8", "int4", "uint4"),
    *("uint16", "uint32", "uint64", "uint8", "float4e2m1", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2"),
    *("float8e5m2fnuz", "float8e8m0", "string", "complex64", "complex128"),
}


def test_the_record_says_where_it_comes_from() -> None:
    assert kernels.cuda().wheel == RECORD["wheel"] == "onnxruntime-gpu==1.31.1"
    assert RECORD["provider"] == "CUDAExecutionProvider"
    assert RECORD["read_by"] == "benchmarks/cuda_wheel.py"


def test_the_record_has_the_shape_that_is_documented() -> None:
    assert set(RECORD) == {"wheel", "provider", "read_by", "machine_code", "ptx", "kernels"}
    assert len(RECORD["kernels"]) > 200
    for operator, rows in RECORD["kernels"].items():
        assert operator.rpartition("::")[0] in ("", "com.microsoft")
        for first, last, types in rows:
            assert first >= 1
            assert last is None or last >= first
            assert {kind for kinds in types.values() for kind in kinds.split()} <= TYPES, operator


def test_targets_load_onnxruntime_where_the_wheel_has_code_for_them() -> None:
    gpus = [target for target in map(targets.load, targets.names()) if target.kind == "gpu"]
    code = set(map(str, RECORD["machine_code"]))
    assert {target.name for target in gpus if target.sm not in code} >= {"b200", "gb200"}
    for target in gpus:
        assert ("onnxruntime" in target.engines) == (target.sm in code), target.name


@pytest.mark.parametrize(
    ("row", "since", "covered"),
    [((13, None), 13, True), ((13, None), 14, False), ((9, 12), 11, True), ((9, 12), 13, False), ((9, 12), 8, False)],
)
def test_versions_that_a_kernel_serves(row: tuple[int, int | None], since: int, covered: bool) -> None:
    assert kernels.Kernel(*row, {}).covers(since) is covered


def of(text: str, tensors: dict[str, np.ndarray] | None = None) -> ir.Model:
    return graphs.parse(f'<ir_version: 12, opset_import: ["" : 24, "com.microsoft" : 1]> agraph {text}', tensors or {})


def missing(model: ir.Model) -> list[tuple[str, str]]:
    return [(str(node.name), what) for node, what in kernels.missing(model, kernels.cuda(), kernels.infer(model))]


def test_attention_has_no_kernel_in_fp32() -> None:
    text = """(float[b, s, 64] q, {0}[b, 2, c, 16] k, {0}[b, 2, c, 16] v, int32[b] lengths, int32 total)
        => (float[b, s, 32] y) {{
        [attention] y, pk, pv = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (
            q, "", "", k, v, lengths, total) }}"""
    [(node, what)] = missing(of(text.format("float")))
    assert node == "attention"
    assert what.startswith("no kernel with M int32, T float, T_CACHE float; it has M: int32, T: bfloat16, T_CACHE:")
    assert missing(of(text.replace("(float[b, s, 64] q", "(float16[b, s, 64] q").format("float16"))) == []
    assert missing(of(text.replace("(float[b, s, 64] q", "(float16[b, s, 64] q").format("int8"))) == []


def test_an_operator_and_a_type_without_a_kernel_are_found_in_subgraphs_too() -> None:
    model = of(
        """(bool[] yes, bfloat16[n] x) => (bfloat16[n] y) {
        [branch] y = If (yes) <
            then_branch = a () => (bfloat16[n] t) { [inner] t = Floor (x) },
            else_branch = b () => (bfloat16[n] e) { [other] e = Neg (x) }> }"""
    )
    found = dict(missing(model))
    assert found["inner"].startswith("no kernel with T bfloat16; it has T: double or float or float16")
    assert set(found) == {"inner"}


def test_types_follow_from_inputs_whatever_nodes_declare() -> None:
    model = of(
        """(float16[n] x, int64[n] at) => (float[n] y) {
        picked = Gather (x, at)
        shape = Shape (picked)
        wide = Cast <to = 1> (picked)
        values, places = TopK (wide, shape)
        twos = ConstantOfShape <value = int32[1] {2}> (shape)
        less = Less (wide, values)
        y = Where (less, wide, values) }"""
    )
    for node in model.graph:  # a pass that changed types and told nobody
        node.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
    found = {value.name: dtype for value, dtype in kernels.infer(model).items()}
    wanted = {
        "picked": "FLOAT16",
        "shape": "INT64",
        "wide": "FLOAT",
        "places": "INT64",
        "twos": "INT32",
        "less": "BOOL",
        "y": "FLOAT",
    }
    assert {name: found[name].name for name in wanted} == wanted


def test_operands_of_two_types_are_found() -> None:
    model = of("(float16[n] x, float[n] w) => (float16[n] y) { [sum] y = Add (x, w) }")
    with pytest.raises(VerificationError, match="node sum: input B of Add is FLOAT, another one of type T is FLOAT16"):
        kernels.infer(model)


def test_an_operator_that_nobody_defines_is_found() -> None:
    model = of("(float16[n] x) => (float16[n] y) { [odd] y = Tahn (x) }")
    with pytest.raises(VerificationError, match=r"node odd: ONNX Runtime has no operator ai\.onnx::Tahn \(opset 24\)"):
        kernels.infer(model)


def test_every_operator_that_a_pass_may_write_is_known_to_the_schemas() -> None:
    assert onnx.defs.onnx_opset_version() >= 24
    assert kernels.since(ir.Node("com.microsoft", "QMoE", []), 1) == 1


def test_rows_that_differ_in_one_parameter_are_one() -> None:
    """The record says the same combinations of types as the wheel, in fewer rows."""
    script = Path(__file__).parents[3] / "benchmarks" / "cuda_wheel.py"
    merged = runpy.run_path(str(script))["_merged"]
    rows = [{"T": frozenset({t}), "S": frozenset({s})} for t, s in ("ax", "ay", "bx", "by", "cz")]

    def combinations(given: list[dict[str, frozenset[str]]]) -> set[tuple[str, str]]:
        return {(t, s) for row in given for t in row["T"] for s in row["S"]}

    found = merged(rows)
    assert len(found) == 2
    assert combinations(found) == combinations(rows)
    assert merged(list(reversed(rows))) == found
