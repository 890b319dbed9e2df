"""Take embeddings from outside beside token ids: what a vision tower makes of an image, for one.

    x = Gather(table, input_ids), and what else the embedding's own module computes of it
    becomes
    x' = Where(input_ids < 0, inputs_embeds, Gather(table, Max(input_ids, 0)) …)

The graph gets the input `inputs_embeds` fp32 [batch, sequence, hidden]. Where a token id is negative, its row of
`inputs_embeds` takes the place of the embedding; elsewhere the row is not read. What it replaces is what transformers'
`inputs_embeds` replaces: the output of the embedding's module, scaled where that scales it. The input has a default, a
row of zeros: who has token ids alone feeds nothing, and runs the artifact as any other.

Fires for a graph in which one lookup, and nothing else, reads `input_ids`. Others are refused: a model that looks up
more than one table by its tokens, or computes with their ids, wants ids that an embedding does not tell.

Numerics: exact, token ids that are not negative give the same numbers.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir
from pydantic.dataclasses import dataclass

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface, operators
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

_LENGTHS_OF_IDS = ("Shape",)  # what reads the size of a step, not its tokens


@dataclass(frozen=True)
class AcceptEmbeddings(Pass):
    """Accept embeddings as an input: a negative token id is replaced by its row of them."""

    name: ClassVar[str] = "accept-embeddings"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite the embedding of `model`.

        Raises:
            UnsupportedError: the target has no ONNX Runtime, or something else than one lookup reads token ids.
        """
        context.require_onnxruntime(self.name, "an input that may be left out is ONNX Runtime's")
        if any(value.name == interface.INPUTS_EMBEDS for value in model.graph.inputs):
            return Changes(skipped=[Skipped(interface.INPUTS_EMBEDS, "the graph takes embeddings already")])
        ids = graph.input_named(model, interface.INPUT_IDS)
        lookup = self._lookup(ids)
        embedded = _end_of_module(lookup)
        *_, hidden = graph.dims(embedded) or (None,)
        if not isinstance(hidden, int) or embedded.dtype is None:
            raise UnsupportedError(f"{self.name}: {lookup.name} makes {graph.dims(embedded)}, of no known width")
        given = _add_input(model, hidden)
        readers = tuple(embedded.uses())
        zero = graph.initializer(model, "embeddings.zero", np.array(0, np.int64))
        at = lookup.inputs.index(ids)
        (held,) = graph.insert(lookup, "Max", [ids, zero], {}, name="embeddings/Max")
        held.type, held.shape = ids.type, ids.shape
        lookup.replace_input_with(at, held)
        chosen = _chosen(model, ids, given, embedded)
        for node, index in readers:
            node.replace_input_with(index, chosen)
        return Changes([Rewritten(str(lookup.name), f"rows of {interface.INPUTS_EMBEDS} where a token id is negative")])

    def _lookup(self, ids: ir.Value) -> ir.Node:
        """Return the one node that looks up embeddings by `ids`."""
        readers = [node for node, _ in ids.uses() if node.op_type not in _LENGTHS_OF_IDS]
        lookups = [node for node in readers if operators.view(node).lookup]
        if len(readers) != 1 or len(lookups) != 1:
            names = ", ".join(sorted(f"{node.op_type} {node.name}" for node in readers))
            raise UnsupportedError(
                f"{self.name}: token ids are read by {names}; embeddings stand for them where one lookup reads them",
                hint=f"leave {self.name} out of the recipe",
            )
        return lookups[0]


def _end_of_module(lookup: ir.Node) -> ir.Value:
    """Follow `lookup` to the last value that its own module makes of it alone."""
    module = str(lookup.name).rpartition("/")[0]
    value = lookup.outputs[0]
    while module and len(uses := value.uses()) == 1:
        ((node, _),) = uses
        if str(node.name).rpartition("/")[0] != module or len(node.outputs) != 1:
            break
        value = node.outputs[0]
    return value


def _add_input(model: ir.Model, hidden: int) -> ir.Value:
    """Add the input `inputs_embeds`, a row of zeros where it is left out."""
    dims: list[int | str | None] = [
        "embeds_batch",
        "embeds_sequence",
        hidden,
    ]  # of the default 1 and 1, else those of a step
    given = ir.val(interface.INPUTS_EMBEDS, ir.DataType.FLOAT, dims)
    given.const_value = ir.Tensor(np.zeros((1, 1, hidden), np.float32), name=interface.INPUTS_EMBEDS)
    model.graph.inputs.append(given)
    model.graph.register_initializer(given)
    return given


def _chosen(model: ir.Model, ids: ir.Value, given: ir.Value, embedded: ir.Value) -> ir.Value:
    """Return rows of `given` where `ids` are negative, else of `embedded`, whose readers come behind."""
    front = next(node for node in model.graph if node in {each for each, _ in embedded.uses()})
    zero = graph.initializer(model, "embeddings.zero", np.array(0, np.int64))
    (negative,) = graph.insert(front, "Less", [ids, zero], {}, name="embeddings/Less")
    target = graph.initializer(model, "embeddings.rows", np.array([0, 0, 1], np.int64))
    (rows,) = graph.insert(front, "Reshape", [negative, target], {}, name="embeddings/Reshape")
    batch, sequence = graph.dims(ids) or (None, None)
    negative.type, negative.shape = ir.TensorType(ir.DataType.BOOL), ids.shape
    rows.type, rows.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([batch, sequence, 1])
    if embedded.dtype != ir.DataType.FLOAT:
        cast = {"to": int(embedded.dtype or ir.DataType.FLOAT)}
        (cast_given,) = graph.insert(front, "Cast", [given], cast, name="embeddings/Cast")
        cast_given.type, cast_given.shape, given = embedded.type, given.shape, cast_given
    (chosen,) = graph.insert(front, "Where", [rows, given, embedded], {}, name="embeddings/Where")
    chosen.type, chosen.shape = embedded.type, embedded.shape
    return chosen
