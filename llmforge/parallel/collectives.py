"""What ranks tell one another in a step, in numbers: no weight is read, and nothing is split."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators.canonical import AllGather, AllReduce
from llmforge.parallel.shard_plan import ShardPlan


@dataclass(frozen=True)
class Collective:
    """One place where ranks meet."""

    node: str  # whose results they put together
    kind: str  # AllReduce or AllGather
    elements: int  # of a token, or of a row that gets logits: of the whole tensor
    by_row: bool  # once for every row that gets logits, not for every token

    def bytes_sent(self, degree: int, element_bytes: int) -> Fraction:
        """Bytes that one rank sends for one token or row, in a ring.

        A ring sends every share `degree - 1` times, twice where it sums first (Patarasuk and Yuan 2009, section 3).
        """
        rounds = 2 if self.kind == AllReduce.op_type else 1
        return Fraction(rounds * (degree - 1) * self.elements * element_bytes, degree)


def meetings(made: ShardPlan) -> tuple[Collective, ...]:
    """List where the ranks of a plan meet, in the order of a step; no weight is read."""
    found = []
    nodes = [*made.rows, *made.experts, *filter(None, (made.head, made.embedding))]
    if not nodes or made.degree == 1:
        return ()
    for node in graph.owner(nodes[0]):
        if node is made.head:
            found.append(Collective(str(node.name), AllGather.op_type, _width(node), by_row=True))
        elif node in made.rows or node in made.experts or node is made.embedding:
            found.append(Collective(str(node.name), AllReduce.op_type, _width(node), by_row=False))
    return tuple(found)


def traffic(layers: int, hidden: int, vocabulary: int, degree: int, element_bytes: int, *, tied: bool) -> Fraction:
    """Bytes that one rank sends for one decoded token of a dense decoder with two all-reduces a layer.

    `element_bytes` are those of activations; `tied`: the embedding is divided with the head.
    """
    reduce = Collective("", AllReduce.op_type, hidden, by_row=False).bytes_sent(degree, element_bytes)
    gather = Collective("", AllGather.op_type, vocabulary, by_row=True).bytes_sent(degree, element_bytes)
    return (2 * layers + tied) * reduce + gather


def _width(node: ir.Node) -> int:
    width = (graph.dims(node.outputs[0]) or (0,))[-1]
    return width if isinstance(width, int) else 0
