"""Linear layers of a graph: recognize one, and stack several that read the same tensor into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.derived import Derived, side_by_side
from llmforge.ir.operators.standard import Add, MatMul


@dataclass(frozen=True)
class LinearLayer:
    """`output = input @ weight + bias`, input [..., K], weight [K, N] and bias [N] initializers."""

    matmul: ir.Node
    weight: ir.Value
    add: ir.Node | None = None
    bias: ir.Value | None = None

    @property
    def input(self) -> ir.Value:
        """The tensor that the layer reads."""
        return MatMul(self.matmul).x

    @property
    def output(self) -> ir.Value:
        """The tensor that the layer makes, bias included."""
        return (self.add or self.matmul).outputs[0]


def of(output: ir.Value) -> LinearLayer | None:
    """Recognize the linear layer that makes `output`: `MatMul(x, W)`, or `Add` of that and a bias; else None."""
    if (matmul := MatMul.made(output)) is not None:
        return LinearLayer(matmul.node, matmul.w) if _is_initializer(matmul.w, 2) else None
    if (add := Add.made(output)) is None:
        return None
    for product, bias in add.either_way:
        layer = of(product) if _is_initializer(bias, 1) else None
        if layer is not None and layer.bias is None and len(product.uses()) == 1:
            return LinearLayer(layer.matmul, layer.weight, add.node, bias)
    return None


def _is_initializer(value: ir.Value, rank: int) -> bool:
    return value.is_initializer() and len(graph.dims(value) or ()) == rank


def _reason_against(layers: Sequence[LinearLayer], name: str) -> str | None:
    """Say why `layers` cannot become one layer called `name`; None where they can."""
    if len({layer.input for layer in layers}) > 1:
        return f"they read different tensors: {', '.join(str(layer.input.name) for layer in layers)}"
    if len({layer.matmul for layer in layers}) < len(layers):
        return "two of them are the same MatMul"
    if len({layer.bias is None for layer in layers}) > 1:
        with_bias = [str(layer.bias.name) for layer in layers if layer.bias is not None]
        return f"some have a bias and some have none: {', '.join(with_bias)}"
    if len({layer.weight.dtype for layer in layers}) > 1:
        return f"their dtypes differ: {', '.join(str(layer.weight.dtype) for layer in layers)}"
    if len({bool(graph.sources(layer.weight)) for layer in layers}) > 1:
        return "some of their weights come from the checkpoint and some do not"
    for value in (value for layer in layers for value in (layer.weight, layer.bias) if value is not None):
        if len(value.uses()) > 1 or value.is_graph_output() or value.is_graph_input():
            return f"initializer {value.name} has other readers"
    for taken in (f"{name}.weight", f"{name}.bias"):
        if taken in graph.owner(layers[0].matmul).initializers:
            return f"an initializer is named {taken} already"
    return None


def stack(layers: Sequence[LinearLayer], name: str) -> str | None:
    """Replace `layers` by one MatMul, one Add where they have biases, and a Split; or say why that cannot be.

    With K input features and N₁, N₂, … output features, the weights [K, N₁], [K, N₂], … become `name`.weight
    [K, N₁ + N₂ + …] and the biases `name`.bias: lazy tensors, nothing is read. The outputs keep their names.
    """
    if reason := _reason_against(layers, name):
        return reason
    owner = graph.owner(layers[0].matmul)
    members = {layer.matmul for layer in layers}
    first = next(node for node in owner if node in members)
    widths = [graph.width(layer.weight) for layer in layers]
    weight = _stacked([layer.weight for layer in layers], f"{name}.weight", owner)
    [product] = graph.insert(first, "MatMul", [layers[0].input, weight], name=f"{name}/MatMul")
    _describe(product, layers[0].output, sum(widths), f"{name}.product" if layers[0].bias else name)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases:
        [added] = graph.insert(first, "Add", [product, _stacked(biases, f"{name}.bias", owner)], name=f"{name}/Add")
        _describe(added, product, sum(widths), name)
        product = added
    sizes = graph.initializer(owner, f"split_{'_'.join(map(str, widths))}", np.array(widths, np.int64))
    sections = graph.insert(first, "Split", [product, sizes], {"axis": -1}, outputs=len(layers), name=f"{name}/Split")
    for layer, section in zip(layers, sections, strict=True):
        graph.replace_value(layer.output, section)
    for layer in layers:
        owner.remove([node for node in (layer.add, layer.matmul) if node is not None], safe=True)
        for value in (layer.weight, layer.bias):
            if value is not None and value.name is not None:
                del owner.initializers[value.name]
    return None


def widths(weight: ir.Value) -> list[int]:
    """Return the features of each part of a `weight` [K, N]: of several that are side by side, as `stack` puts them."""
    tensor = graph.tensor(weight)
    if isinstance(tensor, Derived) and tensor.function is side_by_side:
        return [int(operand.shape.numpy()[-1]) for operand in tensor.operands]
    return [graph.width(weight)]


def common_name(layers: Sequence[LinearLayer], member: str) -> str:
    """Name what `layers` become: the dotted prefix that their weights share, and `member`.

    `a.q_proj.weight`, `a.k_proj.weight`, `a.v_proj.weight` with the member `qkv_proj` make `a.qkv_proj`.
    """
    levels = zip(*(str(layer.weight.name).split(".") for layer in layers), strict=False)
    shared = takewhile(lambda parts: len(set(parts)) == 1, levels)
    return ".".join([*(part for part, *_ in shared), member])


def _describe(value: ir.Value, like: ir.Value, width: int, name: str) -> None:
    """Give `value` the type of `like`, its shape with `width` features, and a name."""
    value.name, value.type = name, like.type
    if like.shape is not None:
        value.shape = ir.Shape([*like.shape[:-1], width])


def _stacked(values: Sequence[ir.Value], name: str, owner: ir.Graph) -> ir.Value:
    """Register the initializers `values`, side by side along their last axis, as one lazy initializer."""
    tensors = [graph.tensor(value) for value in values]
    shape = ir.Shape([*graph.static(values[0])[:-1], sum(map(graph.width, values))])
    tensor = Derived(side_by_side, tensors, tensors[0].dtype, shape, name)
    return graph.initializer(owner, name, tensor, [source for value in values for source in graph.sources(value)])
