"""Numbers of a raw graph: any subgraph of it, evaluated on values that the caller makes up."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as refused

from llmforge.base.errors import UnsupportedError
from llmforge.ir import operators
from llmforge.ir.operators import canonical, standard
from llmforge.ir.subgraph import behind, copy_nodes

Array = NDArray[np.generic]

REFUSED = (
    refused.Fail,
    refused.InvalidArgument,
    refused.InvalidGraph,
    refused.NotImplemented,
    refused.RuntimeException,
)


@dataclass
class Origins:
    """What each value of a graph depends on.

    A value is *data* if it depends on the content of a graph input or a weight; sizes of inputs and masks do not count.
    """

    weights: Collection[str]  # names of initializers that stand for tensors of a checkpoint
    _data: dict[ir.Value, bool] = field(default_factory=dict)

    def is_data(self, value: ir.Value) -> bool:
        """Say whether `value` depends on the content of an input or a weight."""
        pending = [value]
        while pending:
            current = pending[-1]
            if current in self._data:
                pending.pop()
                continue
            node = current.producer()
            if node is None:
                self._data[current] = current.is_graph_input() or current.name in self.weights
            elif operators.is_a(node, standard.OnnxShape, canonical.CausalMask):
                self._data[current] = False
            else:
                read = [x for x in node.inputs if x is not None]
                unknown = [x for x in read if x not in self._data]
                if unknown:
                    pending.extend(unknown)
                    continue
                self._data[current] = any(self._data[x] for x in read)
        return self._data[value]


class Evaluation:
    """The subgraph between `inputs` and `outputs`, ready to run on numbers."""

    def __init__(self, model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        nodes, edge = behind(outputs, lambda value: value in inputs)
        roots = [value for value in edge if value not in inputs]
        order = {node: index for index, node in enumerate(model.graph)}
        constants = [value for value in roots if value.is_initializer() and not value.is_graph_input()]
        fed = [*inputs, *(value for value in roots if value.is_graph_input())]
        copies: dict[ir.Value, ir.Value] = {}
        for index, value in enumerate(fed):
            rank_only = None if value.shape is None else ir.Shape([None] * len(value.shape))
            copies[value] = ir.Value(name=f"input_{index}", type=value.type, shape=rank_only)
        for index, value in enumerate(constants):
            if value.const_value is None:
                raise UnsupportedError(f"a part of the graph reads {value.name!r}, which has no numbers")
            tensor = ir.tensor(value.const_value.numpy(), name=f"constant_{index}")
            copies[value] = ir.val(tensor.name, const_value=tensor)
        copied = copy_nodes(sorted(nodes, key=order.__getitem__), copies)
        for number, node in enumerate(copied):  # names of a raw graph may be missing, and its shapes disagree
            for index, value in enumerate(node.outputs):
                value.name, value.shape = f"value_{number}_{index}", None
        graph = ir.Graph(
            [copies[value] for value in fed],
            [copies[value] for value in outputs],
            nodes=copied,
            initializers=[copies[value] for value in constants],
            opset_imports=dict(model.opset_imports),
        )
        self.extra = [value for value in roots if value.is_graph_input()]
        self.nodes = copied
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        proto = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
        with _refusals():
            self._session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        self._names = {value: str(copies[value].name) for value in fed}

    def run(self, feeds: Mapping[ir.Value, Array]) -> list[Array]:
        """Evaluate the outputs."""
        named = {self._names[value]: array for value, array in feeds.items()}
        with _refusals():
            results: list[Array] = self._session.run(None, named)
        return results


@contextmanager
def _refusals() -> Iterator[None]:
    """Say of what ONNX Runtime refuses that it cannot be evaluated."""
    try:
        yield
    except REFUSED as error:
        raise UnsupportedError(f"a part of the graph cannot be evaluated: {str(error).splitlines()[0]}") from error
