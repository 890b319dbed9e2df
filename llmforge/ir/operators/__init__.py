"""The table of operators: one record an operator, and typed views of nodes.

`TABLE` is what everything else reads: the verifier of the dialect, dtype inference, the precision plan, sharding,
routers, footprints, tables of support, rules of canonicalization. A new operator is one class in the file of its domain
(`standard`, `canonical`, `contrib`, `cpu`, `cuda`), and its arithmetic; `record` says what a class holds.
"""

from __future__ import annotations

import onnx_ir as ir

from llmforge.ir import operators
from llmforge.ir.operators import canonical, contrib, cpu, cuda, standard
from llmforge.ir.operators.record import Operand, Operator, identity, qualified

__all__ = [
    "TABLE",
    "Operator",
    "canonical",
    "contrib",
    "cpu",
    "cuda",
    "identity",
    "is_a",
    "operand",
    "qualified",
    "record",
    "standard",
    "view",
]


TABLE: dict[tuple[str, str], type[Operator]] = {
    each.identity: each
    for module in (standard, canonical, contrib, cpu, cuda)
    for name, each in vars(module).items()
    if isinstance(each, type) and issubclass(each, Operator) and each.__module__ == module.__name__
    if not name.startswith("_")
}


def record(node: ir.Node) -> type[Operator] | None:
    """Look up the record of `node`'s operator; None where the table has none."""
    return TABLE.get(identity(node))


def view(node: ir.Node) -> Operator:
    """View `node`; where the table lacks its operator, the view has no inputs by name and no traits."""
    return TABLE.get(identity(node), Operator)(node)


def is_a(node: ir.Node | None, *operators: type[Operator]) -> bool:
    """Say whether `node` is of one of `operators`."""
    return any(each.matches(node) for each in operators)


def operand(node: ir.Node, index: int) -> Operand | None:
    """Look up what input `index` of `node` is; None where the table does not say."""
    known = view(node).inputs
    return known[index] if index < len(known) else None


def complete_dtypes(model: ir.Model) -> None:
    """Give every value of `model` that has no dtype the one that its operator makes, where that is known.

    Shapes are left alone. Graphs inside of nodes are not looked at.
    """
    for node in model.graph:
        view = operators.view(node)
        for index, value in enumerate(node.outputs):
            untyped = value.dtype is None and value.name != ""
            if untyped and (dtype := view.output_dtype(index)) is not None:
                value.type = ir.TensorType(dtype)
