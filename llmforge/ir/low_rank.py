"""`llmforge::LowRankAdapter` as standard ONNX: each row gathers the matrices of its adapter, and multiplies by both.

    h = MatMul(x, Gather(a, adapter_ids))          [B, S, P·R]
    y = base + MatMul(h, Gather(b, adapter_ids))   [B, S, N], part by part

Number 0 of both matrices is zero, so a row without an adapter is what it was, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.builder import GraphBuilder
from llmforge.ir.operators import canonical


@dataclass
class LowRankExpansion(GraphBuilder):
    """The expansion of all adapters of one graph."""

    def adapter(self, layer: canonical.LowRankAdapter) -> None:
        """Replace one `llmforge::LowRankAdapter`."""
        node, ids, widths = layer.node, layer.adapter_ids, list(layer.widths)
        hidden = self._add(node, "MatMul", [layer.x, self._add(node, "Gather", [layer.a, ids], {"axis": 0})])
        second = self._add(node, "Gather", [layer.b, ids], {"axis": 0})  # [B, R, N]
        if len(widths) == 1:
            delta = self._add(node, "MatMul", [hidden, second])
        else:
            ranks = self._split(node, hidden, [layer.rank] * len(widths))
            columns = self._split(node, second, widths)
            products = [self._add(node, "MatMul", [h, b]) for h, b in zip(ranks, columns, strict=True)]
            delta = self._add(node, "Concat", products, {"axis": -1})
        graph.replace_outputs(node, [self._add(node, "Add", [layer.base, delta])])

    def _split(self, node: ir.Node, value: ir.Value, sizes: list[int]) -> list[ir.Value]:
        lengths = self._constant(f"parts_{'_'.join(map(str, sizes))}", sizes)
        return graph.insert(node, "Split", [value, lengths], {"axis": -1}, outputs=len(sizes))
