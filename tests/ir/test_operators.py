"""The table of operators: complete, true to the definitions of ONNX and ONNX Runtime, and typed access by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as native

from llmforge.base.errors import VerificationError
from llmforge.ir import operators
from llmforge.ir.operators import canonical, contrib, standard
from llmforge.ir.operators.record import CANONICAL, CPU, MICROSOFT, OPSETS, STANDARD, Attribute, Operator

RECORDS = sorted(operators.TABLE.values(), key=lambda each: each.identity)
OWN = {standard.DistCollective, standard.TRT_FP4DynamicQuantize}  # of TensorRT, in ONNX's domain


def _runtime_schemas() -> Mapping[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for schema in native.get_all_operator_schema():
        known = found.get((schema.domain, schema.name))
        if known is None or known.since_version < schema.since_version:
            found[schema.domain, schema.name] = schema
    return found


SCHEMAS = _runtime_schemas()


def _schema(record: type[Operator]) -> Any:
    if record.domain == STANDARD and onnx.defs.has(record.op_type):
        return onnx.defs.get_schema(record.op_type, max_inclusive_version=OPSETS[STANDARD])
    return SCHEMAS[record.identity]


DEFINED = [each for each in RECORDS if each.domain in (STANDARD, MICROSOFT) and each not in OWN]


def _name(record: type[Operator]) -> str:
    return "::".join(record.identity)


def test_every_record_is_in_the_table_once() -> None:
    for module, domain in ((standard, STANDARD), (canonical, CANONICAL), (contrib, MICROSOFT), (operators.cpu, CPU)):
        written = {
            value
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Operator) and value.__module__ == module.__name__
            if not name.startswith("_")
        }
        assert written == {each for each in RECORDS if each.domain == domain}
        assert all(getattr(module, each.__name__) is each for each in written)
        assert all(each.__name__.endswith(each.op_type) for each in written)
    assert all(each.identity == (each.domain, each.op_type) == key for key, each in operators.TABLE.items())


@pytest.mark.parametrize("record", RECORDS, ids=_name)
def test_fields_stand_in_order_and_have_names(record: type[Operator]) -> None:
    assert [field.index for field in record.inputs] == list(range(len(record.inputs)))
    assert [field.index for field in record.outputs if field.name] in ([], list(range(len(record.outputs))))
    named = [*record.inputs, *(field for field in record.outputs if field.name), *record.attributes.values()]
    assert all(getattr(record, field.name) is field for field in named)
    assert len({field.name for field in named}) == len(named)
    optional = [field.optional for field in record.inputs]
    assert all(field.like in {"", *(each.name for each in record.inputs)} for field in record.outputs)
    assert not any(optional) or optional.index(True) > 0 or record in (standard.Loop, standard.Scan)


@pytest.mark.parametrize("record", DEFINED, ids=_name)
def test_a_record_says_what_the_definition_says(record: type[Operator]) -> None:
    """It may leave out what nobody here writes, and want what the definition leaves open; never the other way round."""
    schema = _schema(record)
    assert len(record.inputs) <= len(schema.inputs)
    for field, defined in zip(record.inputs, schema.inputs, strict=False):
        assert field.optional <= ("Optional" in str(defined.option) or record.variadic), field.name
        if record.domain == MICROSOFT:
            assert field.name.lower() == defined.name.lower()
    for defined in schema.inputs[len(record.inputs) :]:
        assert "Optional" in str(defined.option), defined.name
    assert len(record.outputs) <= len(schema.outputs)
    for name, attribute in record.attributes.items():
        defined = schema.attributes[name]
        assert str(defined.type).rpartition(".")[2] == attribute.type.name, name
        assert not defined.required or attribute.required or attribute.default is None, name
        stated = _default(defined)
        if stated is not None and not attribute.required:
            assert attribute.default == pytest.approx(stated), name
    required = {name for name, defined in schema.attributes.items() if defined.required}
    assert required - {"body"} <= set(record.attributes)  # a graph is no option


def _default(defined: Any) -> object:
    """Return the default of an attribute of a schema; None where there is none."""
    held = defined.default_value if hasattr(defined, "default_value") else defined._default_value
    if isinstance(held, bytes):
        held = onnx.AttributeProto.FromString(held)
    if not held.type:
        return None
    value = onnx.helper.get_attribute_value(held)
    return value.decode() if isinstance(value, bytes) else value


# --- views -----------------------------------------------------------------------------------------------------------


def _value(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))


def _product(*inputs: ir.Value | None, **attributes: int) -> contrib.MatMulNBits:
    node = ir.node("MatMulNBits", list(inputs), attributes, domain=MICROSOFT, name="product")
    ir.Graph(
        [value for value in inputs if value is not None],
        list(node.outputs),
        nodes=[node],
        opset_imports={STANDARD: OPSETS[STANDARD]},
    )
    return contrib.MatMulNBits(node)


def test_a_view_names_inputs_and_attributes() -> None:
    a, b, scales, bias = (_value(name) for name in ("a", "b", "scales", "bias"))
    product = _product(a, b, scales, None, None, bias, K=32, N=8, bits=4, block_size=16)
    assert (product.a, product.b, product.scales, product.bias) == (a, b, scales, bias)
    assert (product.zero_points, product.g_idx) == (None, None)
    assert (product.K, product.N, product.bits, product.block_size, product.accuracy_level) == (32, 8, 4, 16, 0)
    assert (product.name, product.output) == ("product", product.node.outputs[0])


def test_nodes_are_told_apart() -> None:
    product = _product(_value("a"), _value("b"), _value("scales"))
    assert contrib.MatMulNBits.matches(product.node)
    assert not standard.MatMul.matches(product.node)
    assert standard.MatMul.of(product.node) is None
    assert contrib.MatMulNBits.of(None) is None
    made = contrib.MatMulNBits.made(product.output)
    assert made is not None
    assert made.node is product.node
    assert contrib.MatMulNBits.made(product.a) is None
    assert isinstance(operators.view(product.node), contrib.MatMulNBits)
    assert operators.is_a(product.node, standard.MatMul, contrib.MatMulNBits)
    assert operators.operand(product.node, 2) is contrib.MatMulNBits.scales
    unknown = ir.node("Tahn", [product.a])
    assert operators.record(unknown) is None
    assert operators.view(unknown).inputs == ()
    assert operators.operand(unknown, 0) is None


def test_assignment_rewires_the_node() -> None:
    other, bias = _value("other"), _value("bias")
    product = _product(_value("a"), _value("b"), _value("scales"))
    product.a, product.bias, product.accuracy_level = other, bias, contrib.INT8_ACTIVATIONS
    assert list(product.node.inputs)[3:] == [None, None, bias]
    assert (product.a, product.bias, product.accuracy_level) == (other, bias, 4)
    product.bias = None
    assert len(product.node.inputs) == 3  # as `insert` would have written it
    product.zero_points = None
    assert len(product.node.inputs) == 3


def test_what_is_missing_is_named() -> None:
    product = _product(_value("a"), _value("b"))
    with pytest.raises(VerificationError, match="node 'product': input 'scales' is missing"):
        _ = product.scales
    with pytest.raises(VerificationError, match="node 'product': attribute 'block_size' is missing"):
        _ = product.block_size


def test_insert_takes_inputs_by_name() -> None:
    before = _product(_value("a"), _value("b"), _value("scales"))
    graph = before.node.graph
    assert graph is not None
    norm = contrib.SkipLayerNormalization.insert(
        before.node,
        {"skip": before.b, "input": before.a, "gamma": before.scales, "beta": None, "bias": None},
        {"epsilon": 1e-5},
        outputs=4,
        name="norm",
    )
    assert list(norm.node.inputs) == [before.a, before.b, before.scales]  # absent ones at the end are left out
    assert (norm.name, norm.sum, norm.epsilon) == ("norm", norm.node.outputs[3], pytest.approx(1e-5))
    assert list(graph) == [norm.node, before.node]
    assert graph.opset_imports == {STANDARD: OPSETS[STANDARD], MICROSOFT: OPSETS[MICROSOFT]}
    with pytest.raises(AssertionError, match="SkipLayerNormalization has no input gama"):
        contrib.SkipLayerNormalization.insert(before.node, {"gama": before.a})


def test_both_orders_of_a_sum() -> None:
    a, b = _value("a"), _value("b")
    assert standard.Add(ir.node("Add", [a, b])).either_way == ((a, b), (b, a))


def test_an_attribute_on_a_record_describes_itself() -> None:
    assert isinstance(contrib.MatMulNBits.bits, Attribute)
    assert contrib.MatMulNBits.attributes["bits"] is contrib.MatMulNBits.bits
