"""Parts of a graph, cut out at values, and run on whatever they take: so that no check needs a model as a whole.

A part takes values that other parts make (`given`), inputs of the graph, and its own caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from llmforge import native
from llmforge.base.errors import UnsupportedError
from llmforge.engines.onnxruntime import fuse_transposed_weights
from llmforge.ir import dialect, graph, interface
from llmforge.lowering import emulation
from llmforge.runtime.backends.session import CACHE_DTYPES, LOAD_FAILURES, PROVIDER, grown, ort_value, store_grown
from llmforge.verification import probe

Arrays = dict[str, NDArray[Any]]

_LOG_ERRORS = 3  # severity: errors only
# ONNX Runtime copies every initializer that it is handed, and no input.
_FED_BYTES = 1 << 20
_PACKED_OPERATORS = {"MatMulNBits", "QMoE"}  # which compute otherwise without it


@dataclass(frozen=True, eq=False)
class Index:
    """A graph and its values by name."""

    model: ir.Model
    values: Mapping[str, ir.Value]  # that nodes make
    constant: frozenset[ir.Value]  # of these, those that follow from initializers alone
    position: Mapping[ir.Node, int]

    @classmethod
    def of(cls, model: ir.Model) -> Index:
        """Walk over `model` once."""
        constant: set[ir.Value] = set()
        for node in model.graph:
            if all(value is None or is_fixed(value) or value in constant for value in node.inputs):
                constant.update(node.outputs)
        values = {value.name: value for node in model.graph for value in node.outputs if value.name}
        return cls(model, values, frozenset(constant), {node: index for index, node in enumerate(model.graph)})


def is_fixed(value: ir.Value) -> bool:
    """Say whether `value` is an initializer that no caller can replace."""
    return value.is_initializer() and not value.is_graph_input()


def behind(outputs: Iterable[ir.Value], stops: Collection[str]) -> tuple[list[ir.Node], list[ir.Value]]:
    """Walk from `outputs` up to the values named `stops`: the nodes on the way, unordered, and what was stopped at."""
    nodes: dict[ir.Node, None] = {}
    taken: dict[ir.Value, None] = {}
    waiting = [value.producer() for value in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes[node] = None
        for value in node.inputs:
            if value is None:
                continue
            if value.name in stops and value.producer() is not None:
                taken[value] = None
            else:
                waiting.append(value.producer())
    return list(nodes), list(taken)


def cut_out(index: Index, outputs: Sequence[str], stops: Collection[str]) -> ir.Model:
    """Make a model of what `outputs` need; values named `stops` become inputs. Tensors are shared.

    An output is never a stop of its own part. `input_ids` is always an input, because the expansion of attention
    reads its shape.
    """
    source = index.model.graph
    wanted = [index.values[name] for name in outputs]
    nodes, taken = behind(wanted, set(stops) - set(outputs))
    members = set(nodes)
    copies: dict[ir.Value, ir.Value] = {value: _like(value) for value in taken}
    inputs = list(copies.values())
    initializers = []
    read = {value for node in members for value in node.inputs if value is not None}
    for value in (*source.inputs, *source.initializers.values()):
        if value in copies or (value not in read and value.name != interface.INPUT_IDS):
            continue
        copies[value] = copy = _like(value)
        if value.is_graph_input():
            inputs.append(copy)
        if value.is_initializer():
            copy.const_value = value.const_value
            initializers.append(copy)
    made = []
    for node in sorted(nodes, key=index.position.__getitem__):
        again = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else copies[value] for value in node.inputs],
            node.attributes.values(),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=node.name,
            version=node.version,
        )
        for old, new in zip(node.outputs, again.outputs, strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
            copies[old] = new
        made.append(again)
    body = ir.Graph(
        inputs,
        [copies[value] for value in wanted],
        nodes=made,
        initializers=initializers,
        opset_imports=dict(source.opset_imports),
        name="part",
    )
    return ir.Model(body, ir_version=index.model.ir_version)


def _like(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, shape=value.shape, type=value.type)


def _is_fed(array: NDArray[Any]) -> bool:
    """Say whether a weight is large, and of a dtype of numpy's own: a session takes no other in a feed."""
    return array.nbytes >= _FED_BYTES and array.dtype.isbuiltin == 1


def _feed(model: ir.Model, names: Collection[str]) -> None:
    """Make the initializers `names` inputs, in place."""
    for name in names:
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)


class Part:
    """A part of a graph in ONNX Runtime, with its optimizations off.

    `MatMul(x, Transpose(W))` runs as one operator, or the head of a tied model would be copied in every step.

    Raises:
        UnsupportedError: ONNX Runtime refuses the graph.
    """

    def __init__(self, model: ir.Model, weights: probe.Weights, threads: int) -> None:
        shapes = {str(value.name): graph.dims(value) for value in (*model.graph.inputs, *model.graph.outputs)}
        executable = dialect.expand(emulation.emulate(model))
        fuse_transposed_weights(executable)
        options = ort.SessionOptions()
        options.log_severity_level = _LOG_ERRORS
        options.intra_op_num_threads = threads
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        native.register(options)
        arrays = {name: weights.array(tensor) for name, tensor in probe.strip(executable).items()}
        self._weights: Arrays = {}
        if not any(node.op_type in _PACKED_OPERATORS for node in executable.graph):
            options.add_session_config_entry("session.disable_prepacking", "1")  # which holds a matrix twice
            self._weights = {name: arrays.pop(name) for name in list(arrays) if _is_fed(arrays[name])}
            _feed(executable, self._weights)
        held = [ort_value(array) for array in arrays.values()]
        if held:
            options.add_external_initializers(list(arrays), held)
        self._held = held
        try:
            self._session = ort.InferenceSession(
                ir.serde.serialize_model(executable).SerializeToString(), options, providers=[PROVIDER]
            )
        except LOAD_FAILURES as error:
            raise UnsupportedError(f"ONNX Runtime {ort.__version__} refuses a part of the graph: {error}") from error
        arguments = [*self._session.get_inputs(), *self._session.get_overridable_initializers()]
        self.inputs = tuple(argument.name for argument in arguments if argument.name not in self._weights)
        self.outputs = tuple(argument.name for argument in self._session.get_outputs())
        self._caches = {
            argument.name: (CACHE_DTYPES[argument.type], argument.shape)
            for argument in arguments
            if interface.present_of(argument.name) != argument.name
        }
        self._growing = any(
            interface.grows(past, present)
            for name in self._caches
            if not interface.is_state(name)
            and (past := shapes.get(name)) is not None
            and (present := shapes.get(interface.present_of(name))) is not None
        )

    def allocate(self, batch: int, capacity: int, fill: float = 0.0) -> Arrays:
        """Make caches that hold nothing but `fill`: [batch, kv_heads, capacity, head_dim], states [batch, …]."""
        made = {}
        for name, (dtype, shape) in self._caches.items():
            dims = shape[1:] if interface.is_state(name) else (shape[1], capacity, shape[3])
            made[name] = np.full((batch, *dims), fill, dtype)
        return made

    def run(
        self,
        step: probe.Step,
        given: Mapping[str, NDArray[Any]],
        caches: Arrays,
        rows: NDArray[np.int64] | None = None,
    ) -> Arrays:
        """Run `step` over `caches`, which are brought up to date, and return all outputs.

        `rows` get logits, all by default.
        """
        if interface.LOGITS_ROWS not in self.inputs:
            rows = None
        elif rows is None:
            rows = np.arange(step.ids.shape[1])
        feeds = interface.feeds(
            self.inputs, step.ids, step.past, rows, step.lengths, step.text_lengths, growing=self._growing
        )
        past = grown(caches, step.past) if self._growing else caches
        fed = {name: given[name] for name in self.inputs if name in given}
        results = dict(
            zip(self.outputs, self._session.run(None, {**feeds, **past, **fed, **self._weights}), strict=True)
        )
        for name in caches:
            present = results.get(interface.present_of(name))
            if present is None:
                continue
            if self._growing and not interface.is_state(name):
                store_grown(caches[name], present, step.past)
            else:
                caches[name] = present
        return results
