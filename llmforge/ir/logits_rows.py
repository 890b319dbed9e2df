"""Which rows of a step get logits (docs/dialect.md, `logits_rows`), where a runtime of others cannot ask for them.

And where each row of a step asks for its own.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface
from llmforge.ir.operators import standard

Logits = Literal["all", "last"]


def default_to_last(model: ir.Model) -> None:
    """Give the input `logits_rows` of a traced graph its default, the last row."""
    rows = graph.input_named(model, interface.LOGITS_ROWS)
    rows.const_value = ir.Tensor(np.array([-1], np.int64), name=interface.LOGITS_ROWS)
    model.graph.register_initializer(rows)


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
    graph.replace_uses(selection.output, selection.data)
    model.graph.remove(selection.node, safe=True)
    (old,) = graph.dims(rows) or (None,)
    _, sequence = graph.input_named(model, interface.INPUT_IDS).shape or (None, None)
    for value in (value for node in model.graph for value in node.outputs):
        if isinstance(old, str) and old in (dims := graph.dims(value) or ()):
            value.shape = ir.Shape([sequence if dim == old else dim for dim in dims])
    return selection.name


def declare_last(model: ir.Model) -> None:
    """Declare logits [batch, 1, vocabulary], which they are while nobody feeds `logits_rows`.

    Raises:
        UnsupportedError: the selection is not one Gather of the sequence, or its default is not the last row.
    """
    rows, _ = find_selection(model)
    default = rows.const_value
    if default is None or default.numpy().tolist() != [-1]:
        raise UnsupportedError(f"the default of {interface.LOGITS_ROWS} is not [-1], the last row")
    logits = graph.output_named(model, interface.LOGITS)
    batch, _, vocabulary = logits.shape or (None, None, None)
    logits.shape = ir.Shape([batch, 1, vocabulary])


def choose_by_row(model: ir.Model) -> tuple[str, str]:
    """Let each row of a step choose its own tokens; say what became what.

        chosen = Gather(hidden, logits_rows, axis=1)                 # logits_rows [rows], the same tokens of all
        becomes
        chosen = Gather(Reshape(hidden, [-1, H]), logits_rows)       # logits_rows [batch, rows]: batch row · S + token
                                                                     # [batch, S, H] → [batch, rows, H]
    So prompts of different lengths, padded on the right, give the logits of their last tokens in one step. The input
    has no default any more.

    Raises:
        UnsupportedError: the selection is not one Gather of a sequence of a fixed width.
    """
    rows, selection = find_selection(model)
    hidden, dims = selection.data, graph.dims(selection.data) or ()
    width = dims[-1] if len(dims) == 3 else None
    if not isinstance(width, int) or hidden.type is None:
        raise UnsupportedError(f"{selection.name} selects rows of {hidden.name} {list(dims)}; expected [batch, S, H]")
    shape = graph.initializer(model, "logits_rows.tokens", np.array([-1, width], np.int64))
    [tokens] = graph.insert(selection.node, "Reshape", [hidden, shape])
    tokens.type, tokens.shape = hidden.type, ir.Shape([None, width])
    [chosen] = graph.insert(selection.node, "Gather", [tokens, rows], {"axis": 0}, name=selection.name)
    chosen.type, chosen.shape = hidden.type, ir.Shape([dims[0], *(graph.dims(rows) or (None,)), width])
    graph.replace_uses(selection.output, chosen)
    model.graph.remove(selection.node, safe=True)
    model.graph.initializers.pop(interface.LOGITS_ROWS, None)
    rows.const_value = None
    rows.shape = ir.Shape([dims[0], *(graph.dims(rows) or (None,))])
    return selection.name, "each row of a step chooses the tokens that get logits"


def find_selection(model: ir.Model) -> tuple[ir.Value, standard.Gather]:
    """Find `logits_rows` and the one Gather [batch, sequence, …] → [batch, rows, …] that reads it.

    Raises:
        UnsupportedError: something else reads it.
    """
    rows = graph.input_named(model, interface.LOGITS_ROWS)
    selection = standard.Gather.of(graph.only_reader(rows))
    if selection is None or selection.axis != 1:
        readers = ", ".join(f"{node.name} ({node.op_type})" for node, _ in rows.uses()) or "nothing"
        raise UnsupportedError(
            f"{interface.LOGITS_ROWS} is read by {readers}; the rows of the logits are known where one Gather of the "
            "sequence selects them"
        )
    return rows, selection
