"""Which rows of a step get logits, where a runtime of others cannot ask for them (docs/dialect.md, `logits_rows`)."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface

Logits = Literal["all", "last"]


def offer(model: ir.Model, logits: Logits) -> tuple[str, str]:
    """Give logits of all rows, or of the last alone; return the node or output that changed, and how.

    Raises:
        UnsupportedError: the selection of rows is not one that can be changed.
    """
    if logits == "all":
        return give_all(model), "logits of every token"
    declare_last(model)
    return interface.LOGITS, "declared as the last token's"


def readers(model: ir.Model) -> set[ir.Node]:
    """Return the nodes that work on the rows that were selected for logits: those behind `logits_rows`."""
    found: set[ir.Node] = set()
    values = [value for value in model.graph.inputs if value.name == interface.LOGITS_ROWS]
    while values:
        behind = set(values.pop().consumers()) - found
        found |= behind
        values.extend(output for node in behind for output in node.outputs)
    return found


def give_all(model: ir.Model) -> str:
    """Take the selection of rows out, so that logits are [batch, sequence, vocabulary]; return its node's name.

    The input `logits_rows` is left without a reader.

    Raises:
        UnsupportedError: the selection is not one Gather of the sequence.
    """
    rows, selection = find_selection(model)
    name, selected, every = str(selection.name), selection.outputs[0], selection.inputs[0]
    assert every is not None
    graph.replace_uses(selected, every)
    model.graph.remove(selection, safe=True)
    (old,), sequence = graph.dims(rows) or (None,), _input(model, interface.INPUT_IDS).shape
    assert sequence is not None
    values = {id(value): value for node in model.graph for value in node.outputs}
    for value in values.values():
        if old is not None and value.shape is not None and old in (graph.dims(value) or ()):
            value.shape = ir.Shape([sequence[1] if _names(dim, old) else dim for dim in value.shape])
    return name


def declare_last(model: ir.Model) -> None:
    """Declare logits [batch, 1, vocabulary], which they are while nobody feeds `logits_rows`.

    Raises:
        UnsupportedError: the selection is not one Gather of the sequence, or its default is not the last row.
    """
    rows, _ = find_selection(model)
    default = rows.const_value
    if default is None or default.numpy().tolist() != [-1]:
        raise UnsupportedError(f"the default of {interface.LOGITS_ROWS} is not [-1], the last row")
    logits = next(value for value in model.graph.outputs if value.name == interface.LOGITS)
    assert logits.shape is not None
    logits.shape = ir.Shape([logits.shape[0], 1, logits.shape[2]])


def find_selection(model: ir.Model) -> tuple[ir.Value, ir.Node]:
    """Find `logits_rows` and the one Gather [batch, sequence, …] → [batch, rows, …] that reads it.

    Raises:
        UnsupportedError: something else reads it.
    """
    rows = _input(model, interface.LOGITS_ROWS)
    uses = tuple(rows.uses())
    node = uses[0].node if len(uses) == 1 else None
    if node is None or (node.domain, node.op_type) != ("", "Gather") or node.attributes.get_int("axis", 0) != 1:
        readers = ", ".join(f"{use.node.name} ({use.node.op_type})" for use in uses) or "nothing"
        raise UnsupportedError(
            f"{interface.LOGITS_ROWS} is read by {readers}; the rows of the logits are known where one Gather of the "
            "sequence selects them"
        )
    return rows, node


def _input(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.inputs if value.name == name)


def _names(dim: int | ir.SymbolicDim, symbol: int | str) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value == symbol
