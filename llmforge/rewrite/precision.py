"""Which nodes of a decoder may compute in half precision, and which stay in fp32.

Records of operators say it (`Precision`): those that carry the work (matrix products, attention, experts, convolutions)
compute in half precision; those whose results a few bits spoil (exponentials, sums of squares, powers) and the states
of recurrent layers stay in fp32; all others follow what they read, and stay in fp32 where any of it is.
Numbers that come from positions and constants alone are fp32, so the angles of a rotary embedding are, and scales by
position; its tables, and what is looked up in a table, are rounded.

Besides, whatever their operators are, these stay in fp32: routers, which choose experts; the decay and the rate of
recurrent layers; what is behind the head. A sum as wide as the residual stream is of the stream's dtype, so that one
fp32 part of it does not widen all layers behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.ir import graph, interface, operators, routing
from llmforge.ir.operators import canonical, contrib, standard
from llmforge.ir.operators.record import FLOATS, Precision


@dataclass(frozen=True, eq=False)
class Assignment:
    """What each node computes in."""

    half: frozenset[ir.Node]
    kept: Mapping[ir.Node, str]  # nodes that stay in fp32 for a reason that is not their operator's, and the reason


def is_float(value: ir.Value | None) -> bool:
    """Say whether `value` holds floating-point numbers; every value has a dtype (`operators.complete_dtypes`)."""
    return value is not None and value.dtype in FLOATS


def keeps_fp32(cache: str) -> bool:
    """Say whether the graph input or output `cache` is fp32 in any graph: a state that sums over all tokens."""
    return cache.rpartition(".")[2] == "recurrent"


def assign(model: ir.Model, *, head_in_fp32: bool) -> Assignment:
    """Choose for every node of `model`, an fp32 graph of the dialect whose values all have a dtype."""
    tail, head = _behind_head(model)
    kept: dict[ir.Node, str] = dict.fromkeys(tail, "after the output head: logits are fp32")
    if head is not None and head_in_fp32:
        kept[head] = "output head, kept by `head: fp32`"
    kept |= {node: f"router of {moe.name}" for node, moe in routing.routers(model).items()}
    kept |= {node: f"it makes a rate of {layer.name}" for node, layer in _rates(model).items()}
    walk = _Walk(kept, _residual_width(model))
    for value in model.graph.inputs:
        if is_float(value) and not keeps_fp32(str(value.name)):
            walk.half_values.add(value)
    for node in model.graph:
        walk.visit(node)
    walk.settle(model)
    return Assignment(frozenset(walk.half), kept)


class _Walk:
    """One walk over a graph, in the order of its nodes."""

    def __init__(self, kept: Mapping[ir.Node, str], width: int | None) -> None:
        self.kept, self.width = kept, width
        self.half: set[ir.Node] = set()
        self.half_values: set[ir.Value] = set()
        self.constant: set[ir.Value] = set()  # what follows from initializers alone
        self.undecided: list[ir.Node] = []  # of those: their readers decide

    def visit(self, node: ir.Node) -> None:
        floats = [value for value in node.inputs if value is not None and is_float(value)]
        if all(value is None or graph.is_constant(value) or value in self.constant for value in node.inputs):
            self.constant.update(node.outputs)
            wide = operators.view(node).precision is Precision.FP32 or any(
                value.producer() is not None and value.producer() not in self.undecided for value in floats
            )
            if floats and not wide:
                self.undecided.append(node)
        elif self._computes_in_half(node, floats):
            self.add(node)

    def add(self, node: ir.Node) -> None:
        self.half.add(node)
        self.half_values.update(value for value in node.outputs if is_float(value))

    def _computes_in_half(self, node: ir.Node, floats: Iterable[ir.Value]) -> bool:
        view = operators.view(node)
        if node in self.kept or view.precision is Precision.FP32:
            return False
        if view.precision is Precision.HALF or _is_guard(node):
            return True
        if isinstance(view, standard.Cast):
            return False  # the model asks for fp32, or makes it of integers
        read = [value for value in floats if not graph.is_constant(value) and value not in self.constant]
        if not read:
            return view.lookup
        halves = [value in self.half_values for value in read]
        return all(halves) or (any(halves) and self._is_residual(node))

    def _is_residual(self, node: ir.Node) -> bool:
        view = operators.view(node)
        dims = graph.dims(view.output)
        return view.adds_residual or (
            standard.Add.matches(node) and dims is not None and len(dims) == 3 and dims[-1] == self.width
        )

    def settle(self, model: ir.Model) -> None:
        """Let constants be what their readers are, fp32 where any is; a table that is fp32 is not kept twice."""
        outputs = set(model.graph.outputs)
        for node in reversed(self.undecided):
            readers = [reader for value in node.outputs for reader, _ in value.uses()]
            if readers and all(reader in self.half for reader in readers) and not outputs & set(node.outputs):
                self.add(node)
        for node in model.graph:
            view = operators.view(node)
            if node not in self.half or not view.lookup:
                continue
            table = view.first_input
            read_in_fp32 = any(reader not in self.half for reader, _ in table.uses())
            if is_float(table) and graph.is_constant(table) and read_in_fp32:
                self.half.discard(node)  # what reads its rows casts them


def _is_guard(node: ir.Node) -> bool:
    """Recognize what keeps the tokens of a com.microsoft::MoE from being overwritten: it must read what that reads."""
    chosen = standard.Where.of(node)
    return chosen is not None and contrib.ContribMoE.made(chosen.x) is not None


def _behind_head(model: ir.Model) -> tuple[list[ir.Node], ir.Node | None]:
    """Walk up from the logits: the nodes behind the head, and the head."""
    tail: list[ir.Node] = []
    waiting = [value.producer() for value in model.graph.outputs if value.name == interface.LOGITS]
    while waiting:
        node = waiting.pop()
        if node is None or node in tail:
            continue
        if operators.view(node).linear:
            behind = {node}  # and not what makes another factor, such as the step of a token
            for each in model.graph:
                if each in tail and any(value is not None and value.producer() in behind for value in each.inputs):
                    behind.add(each)
            return [each for each in tail if each in behind], node
        if _keeps_numbers_apart(node):
            tail.append(node)
            waiting += [value.producer() for value in node.inputs if value is not None]
    return tail, None


def _keeps_numbers_apart(node: ir.Node) -> bool:
    """Recognize what stands between a product and the rate of a recurrent layer, or behind the head."""
    return operators.view(node).pointwise or standard.Reshape.matches(node)


def _rates(model: ir.Model) -> dict[ir.Node, ir.Node]:
    """Map what makes the decay and the rate of a recurrent layer, from the product on, to the layer."""
    found: dict[ir.Node, ir.Node] = {}
    for layer in canonical.LinearAttention.all(model):
        waiting: list[ir.Value | None] = [layer.decay, layer.beta]
        while waiting:
            value = waiting.pop()
            node = None if value is None else value.producer()
            if node is not None and _keeps_numbers_apart(node) and node not in found:
                found[node] = layer.node
                waiting.extend(node.inputs)
    return found


def _residual_width(model: ir.Model) -> int | None:
    """Read the width of the residual stream off the embedding, or off the head's product."""
    for node in model.graph:
        if operators.view(node).lookup and any(
            value is not None and value.name == interface.INPUT_IDS for value in node.inputs
        ):
            for value in (node.outputs[0], *(out for reader, _ in node.outputs[0].uses() for out in reader.outputs)):
                dims = graph.dims(value)
                if dims and len(dims) == 3 and isinstance(dims[-1], int):
                    return dims[-1]
    return None
