from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.ir import graph as g
from llmforge.ir.derived import Derived, Function, side_by_side, to_fp32

TEXT = """
<ir_version: 11, opset_import: ["" : 24]>
two_linears (float[batch, 4] x, float[batch, 4] unread) => (float[batch, 2] y)
<float[4, 3] first = {1,2,3,4,5,6,7,8,9,10,11,12}, float[3, 2] second = {1,2,3,4,5,6}>
{
    hidden = MatMul (x, first)
    y = MatMul (hidden, second)
}
"""


def model(text: str = TEXT) -> ir.Model:
    return ir.from_onnx_text(text)


def only(graph: ir.Model, op_type: str, index: int = 0) -> ir.Node:
    return [node for node in graph.graph if node.op_type == op_type][index]


def test_dims_give_integers_symbols_and_nothing_for_an_unknown_rank() -> None:
    graph = model().graph
    assert g.dims(graph.inputs[0]) == ("batch", 4)
    assert g.dims(ir.Value(name="a", shape=ir.Shape([None, 2]))) == (None, 2)
    assert g.dims(ir.Value(name="a")) is None


def test_initializer_shares_equal_data_and_names_other_data_apart() -> None:
    m = model()
    rows = g.initializer(m, "rows", np.array([-1], np.int64))
    assert rows.dtype == ir.DataType.INT64
    assert g.dims(rows) == (1,)
    assert g.initializer(m.graph, "rows", np.array([-1], np.int64)) is rows
    other = g.initializer(m, "rows", np.array([0], np.int64))
    assert other is g.initializer(m, "rows", np.array([0], np.int64)) is not rows
    assert (rows.name, other.name) == ("rows", "rows_1")
    assert g.tensor(other).name == "rows_1"
    assert g.tensor(other).numpy().tolist() == [0]
    assert m.graph.initializers["rows"] is rows


@pytest.mark.parametrize("data", [np.float32(2.5), np.array(2.5, np.float32), ir.tensor(np.float32(2.5))])
def test_initializer_keeps_a_scalar_without_axes(data: np.ndarray | ir.TensorProtocol) -> None:
    value = g.initializer(model(), "scalar", data)
    assert g.dims(value) == g.tensor(value).shape.numpy() == ()
    assert g.tensor(value).numpy() == 2.5


def unread(name: str = "lazy") -> ir.LazyTensor:
    """Make a lazy fp32 tensor [2, 3] that must not be read."""

    def read() -> ir.TensorProtocol:
        raise AssertionError("the tensor was read")

    return ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape([2, 3]), name=name)


def in_a_file(folder: str = "", offset: int = 0) -> ir.ExternalTensor:
    """Make an fp32 tensor [2, 3] of a file that is not there."""
    shape = ir.Shape([2, 3])
    return ir.ExternalTensor("w.bin", offset, 24, ir.DataType.FLOAT, shape=shape, name="lazy", base_dir=folder)


def doubled(operand: ir.TensorProtocol, function: Function = to_fp32) -> Derived:
    return Derived(function, [operand], ir.DataType.FLOAT, ir.Shape([2, 3]), "lazy")


OPERAND = unread("operand")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (unread(), unread()),
        (unread(), in_a_file()),
        (in_a_file(), ir.tensor(np.zeros((2, 3), np.float32))),
        (in_a_file(), in_a_file(offset=24)),
        (in_a_file("one"), in_a_file("two")),
        (doubled(OPERAND), doubled(unread("operand"))),
        (doubled(OPERAND), doubled(OPERAND, side_by_side)),
        (doubled(OPERAND), doubled(doubled(OPERAND))),
    ],
)
def test_initializer_tells_tensors_apart_that_nobody_has_read(
    first: ir.TensorProtocol, second: ir.TensorProtocol
) -> None:
    """Of one name, dtype and shape: the second must not vanish behind the first."""
    m = model()
    values = [g.initializer(m, "lazy", tensor) for tensor in (first, second)]
    assert [value.const_value for value in values] == [first, second]
    assert [value.name for value in values] == ["lazy", "lazy_1"]
    assert [g.initializer(m, "lazy", tensor) for tensor in (first, second)] == values


@pytest.mark.parametrize(
    "make", [lambda: OPERAND, in_a_file, lambda: doubled(OPERAND), lambda: doubled(doubled(in_a_file()))]
)
def test_initializer_shares_what_is_known_to_be_the_same(make: Callable[[], ir.TensorProtocol]) -> None:
    m = model()
    assert g.initializer(m, "lazy", make()) is g.initializer(m, "lazy", make())


def test_initializer_takes_a_lazy_tensor_without_reading_it() -> None:
    lazy = unread()
    m = model()
    value = g.initializer(m, "lazy", lazy)
    assert value.const_value is lazy
    assert g.dims(value) == (2, 3)
    g.fingerprint(m)


def test_replace_moves_a_graph_output_name_and_the_old_node_can_be_dropped() -> None:
    m = model()
    last = only(m, "MatMul", 1)
    (scaled,) = g.insert(last, "Gemm", [last.inputs[0], last.inputs[1], None], {"alpha": 1.0}, name="new")
    assert len(scaled.producer().inputs) == 2
    g.replace_uses(last.outputs[0], scaled)
    g.drop_unused(m)
    assert [value.name for value in m.graph.outputs] == ["y"]
    assert m.graph.outputs[0] is scaled
    assert g.dims(scaled) == ("batch", 2)
    assert scaled.dtype == ir.DataType.FLOAT
    assert [node.op_type for node in m.graph] == ["MatMul", "Gemm"]


def test_replace_refuses_to_rename_a_graph_input() -> None:
    m = model()
    with pytest.raises(ValueError, match="'y' cannot be renamed onto 'x'"):
        g.replace_uses(m.graph.outputs[0], m.graph.inputs[0])


def test_drop_unused_takes_dead_nodes_initializers_inputs_and_opsets() -> None:
    m = model()
    m.opset_imports["com.microsoft"] = 1
    g.initializer(m, "dead", np.zeros(3, np.float32))
    g.insert(only(m, "MatMul"), "Neg", [m.graph.inputs[1]])
    assert g.nodes(m) == 3
    g.drop_unused(m)
    assert g.nodes(m) == 2
    assert sorted(m.graph.initializers) == ["first", "second"]
    assert [value.name for value in m.graph.inputs] == ["x"]
    assert dict(m.opset_imports) == {"": 24}


def test_drop_unused_keeps_an_input_with_a_default_that_is_read() -> None:
    m = model()
    second = m.graph.initializers["second"]
    m.graph.inputs.append(second)
    g.drop_unused(m)
    assert m.graph.inputs[-1] is second
    assert m.graph.initializers["second"] is second


def test_sources_are_a_list_of_parameter_names() -> None:
    value = model().graph.initializers["first"]
    assert g.sources(value) == []
    g.set_sources(value, ["a.weight", "b.weight"])
    assert g.sources(value) == ["a.weight", "b.weight"]
    assert value.metadata_props["llmforge.sources"] == '["a.weight", "b.weight"]'


def test_fingerprint_ignores_identity_node_names_and_intermediate_names() -> None:
    first, second = model(), model(TEXT.replace("hidden", "other"))
    only(second, "MatMul").name = "renamed"
    assert g.fingerprint(first) == g.fingerprint(second) == g.fingerprint(first.clone())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("MatMul (x, first)", "Gemm (x, first)"),
        ("MatMul (x, first)", "Gemm <alpha = 2.0> (x, first)"),
        ("MatMul (hidden, second)", "MatMul (second, hidden)"),
        ("MatMul (x, first)", "MatMul (unread, first)"),
        ("float[3, 2] second = {1,2,3,4,5,6}", "float[2, 3] second = {1,2,3,4,5,6}"),
        ("first", "renamed"),
        ("float[batch, 4] x", "float[batch, 5] x"),
        ("float[batch, 2] y", "float[batch, rows] y"),
        ("{1,2,3,4,5,6}", "{1,2,3,4,5,7}"),
        ('"" : 24', '"" : 23'),
    ],
)
def test_fingerprint_sees_every_change_of_structure(old: str, new: str) -> None:
    assert old in TEXT
    assert g.fingerprint(model()) != g.fingerprint(model(TEXT.replace(old, new)))


def test_fingerprint_tells_attributes_and_external_places_apart() -> None:
    def with_alpha(alpha: float) -> str:
        return g.fingerprint(model(TEXT.replace("MatMul (x, first)", f"Gemm <alpha = {alpha}> (x, first)")))

    def with_offset(offset: int) -> str:
        m = model()
        m.graph.initializers["first"].const_value = ir.ExternalTensor(
            "missing.safetensors", offset, 48, ir.DataType.FLOAT, shape=ir.Shape([4, 3]), name="first"
        )
        return g.fingerprint(m)

    assert with_alpha(2.0) == with_alpha(2.0) != with_alpha(3.0)
    assert with_offset(8) == with_offset(8) != with_offset(64)
