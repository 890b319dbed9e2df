"""Low-rank adapters as the operator of `llmforge.cpu`, which reads the matrices of those alone that rows choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Derived
from llmforge.ir.operators import canonical, cpu
from llmforge.ir.operators.standard import Add


def add_first(layer: canonical.LowRankAdapter) -> None:
    """Let what is added behind an adapter be added in front of it, where the linear layer takes it over.

    Add(r, LowRankAdapter(base, …)) becomes LowRankAdapter(Add(r, base), …).
    """
    add = Add.only_reader(layer.output)
    if add is None or layer.base.producer() is None:
        return
    other = add.b if add.a is layer.output else add.a
    alike = graph.dims(other) is not None and graph.dims(other) == graph.dims(layer.base)
    if not alike or other.is_initializer() or other is layer.output:
        return
    order = {node: place for place, node in enumerate(graph.owner(layer.node))}
    producer = other.producer()
    if producer is not None and order[producer] > order[layer.node]:
        return
    base, total = layer.base, add.output
    summed = Add.insert(layer.node, {"a": other, "b": base}, name=f"{add.name}.first")
    summed.output.name, summed.output.type, summed.output.shape = f"{base.name}.sum", base.type, base.shape
    layer.base = summed.output
    graph.replace_value(total, layer.output)
    graph.owner(add.node).remove(add.node, safe=True)


def lower(layer: canonical.LowRankAdapter) -> str:
    """Put the kernel in the place of an adapter; return what was done."""
    node, stacked = layer.node, graph.tensor(layer.a)
    count, k, rows = stacked.shape.numpy()
    name = f"{layer.a.name}.rows"
    turned = Derived(_rows, [stacked], ir.DataType.FLOAT, ir.Shape((count, rows, k)), name)
    model = graph.owner(node)
    widths = np.array(list(layer.widths), np.int64)
    operands = {
        "base": layer.base,
        "x": layer.x,
        "adapter_ids": layer.adapter_ids,
        "a": graph.initializer(model, name, turned),
        "b": layer.b,
        "widths": graph.initializer(model, f"parts_{'_'.join(map(str, widths))}", widths),
    }
    own = layer.name
    node.name = f"{own}.replaced"
    lowered = cpu.CpuLowRankAdapter.insert(node, operands, name=own)
    graph.replace_value(layer.output, lowered.output)
    return f"LowRankAdapter of rank {layer.rank}, {count - 1} adapters"


def _rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Turn each of several matrices."""
    return np.ascontiguousarray(arrays[0].swapaxes(1, 2))
