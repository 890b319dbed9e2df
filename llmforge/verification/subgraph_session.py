"""Subgraphs in ONNX Runtime, run on whatever they take: so that no check needs a model as a whole.

A subgraph takes values that other subgraphs make (`given`), inputs of the graph, and its own caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import native
from llmforge.backends.onnxruntime.builder import fuse_transposed_weights
from llmforge.backends.onnxruntime.session import (
    CACHE_DTYPES,
    PROVIDER,
    grown,
    open_graph,
    ort_value,
    run,
    session_options,
    store_grown,
)
from llmforge.ir import graph, interface, operators
from llmforge.ir.derived import by_output_fp32, computed, is_stored
from llmforge.ir.graph import is_constant
from llmforge.ir.operators.contrib import FusedMatMul
from llmforge.ir.operators.standard import MatMul
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs, feeds
from llmforge.verification import probe

Arrays = dict[str, NDArray[Any]]

# ONNX Runtime copies every initializer that it is handed, and no input.
_FED_BYTES = 1 << 20
_REGISTERED = 2  # `dtype.isbuiltin` of ml_dtypes; what is read from a file says 0, for its byte order is spelled out
_GONE: NDArray[Any] = np.empty(0)


def _is_fed(array: NDArray[Any], least_bytes: int) -> bool:
    """Say whether a weight is large, and of a dtype of numpy's own: a session takes no other in a feed."""
    return array.nbytes >= least_bytes and array.dtype.isbuiltin != _REGISTERED


class SubgraphSession:
    """A subgraph in ONNX Runtime; its optimizations are off, unless it is to `optimize`.

    `MatMul(x, Transpose(W))` runs as one operator, or the head of a tied model would be copied in every step.
    Weights of `fed_bytes` and more are handed over in every step; with 0, all, so that others can be loaded.

    Raises:
        UnsupportedError: ONNX Runtime refuses the graph.
    """

    def __init__(
        self,
        model: ir.Model,
        weights: probe.InitializerArrays,
        threads: int,
        *,
        fed_bytes: int = _FED_BYTES,
        optimize: bool = False,
    ) -> None:
        shapes = {str(value.name): graph.dims(value) for value in (*model.graph.inputs, *model.graph.outputs)}
        written = _weights_read(model)
        executable = _executable(model)
        self._order = _read_order(executable)
        options = session_options(SessionConfig(threads=threads, optimize=optimize, entries=probe.QUIET))
        native.register(options)
        tensors = probe.strip(executable)
        self._places = _places(tensors, written)
        arrays = {name: weights.array(tensor) for name, tensor in tensors.items()}
        self._weights: Arrays = {}
        if not any(operators.view(node).prepacked for node in executable.graph):
            options.add_session_config_entry("session.disable_prepacking", "1")  # which holds a matrix twice
            self._weights = {name: arrays.pop(name) for name in list(arrays) if _is_fed(arrays[name], fed_bytes)}
        self.reloads = not arrays
        for name in self._weights:
            value = executable.graph.initializers.pop(name)
            value.const_value = None
            executable.graph.inputs.append(value)
        self._held = [ort_value(array) for array in arrays.values()]
        if arrays:
            options.add_external_initializers(list(arrays), self._held)
        serialized = ir.serde.serialize_model(executable).SerializeToString()
        self._session = open_graph(serialized, options, [PROVIDER], "a part of the graph")
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

    @property
    def has_caches(self) -> bool:
        """Whether it takes caches."""
        return bool(self._caches)

    @property
    def has_states(self) -> bool:
        """Whether it takes states of a fixed size."""
        return any(map(interface.is_state, self._caches))

    @property
    def slot_bytes(self) -> int:
        """Size of what its caches hold of one token of one row."""
        slots = [cache for name, cache in self._caches.items() if not interface.is_state(name)]
        return sum(np.dtype(dtype).itemsize * shape[1] * shape[3] for dtype, shape in slots)

    def unload(self) -> None:
        """Let go of the weights, until others are loaded."""
        self._weights = dict.fromkeys(self._weights, _GONE)

    def load(self, model: ir.Model, weights: probe.InitializerArrays) -> None:
        """Take the weights of `model` from now on, a subgraph of the same nodes; only where it `reloads`."""
        if self._places is not None:
            read = _weights_read(model)
            arrays = {name: weights.array(read[at]) for name, at in self._places.items()}
        else:
            executable = _executable(model)
            order = _read_order(executable)
            tensors = probe.strip(executable)
            arrays = {
                own: weights.array(tensors[other])
                for own, other in zip(self._order, order, strict=True)
                if other in tensors
            }
        assert arrays.keys() == self._weights.keys(), "subgraphs of one kind read other weights"
        self._weights = arrays

    def allocate(self, batch: int, capacity: int, fill: float = 0.0) -> Arrays:
        """Make caches that hold nothing but `fill`: [batch, kv_heads, capacity, head_dim], states [batch, …]."""
        made = {}
        for name, (dtype, shape) in self._caches.items():
            dims = shape[1:] if interface.is_state(name) else (shape[1], capacity, shape[3])
            made[name] = np.full((batch, *dims), fill, dtype)
        return made

    def run(
        self,
        step: probe.ProbeCall,
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
            rows = step.rows
        asked = StepInputs(step.ids, step.past, rows, step.lengths, step.text_lengths, step.adapters)
        made = feeds(self.inputs, asked, growing=self._growing)
        past = grown(caches, step.past) if self._growing else caches
        fed = {name: given[name] for name in self.inputs if name in given}
        values = run(self._session, None, {**made, **past, **fed, **self._weights})
        results = dict(zip(self.outputs, values, strict=True))
        for name in caches:
            present = results.get(interface.present_of(name))
            if present is None:
                continue
            if self._growing and not interface.is_state(name):
                store_grown(caches[name], present, step.past)
            else:
                caches[name] = present
        return results


def _executable(model: ir.Model) -> ir.Model:
    """Write `model`, which stays as it is, in operators that ONNX Runtime has."""
    executable = probe.executable(model)
    fuse_transposed_weights(executable)
    return executable


def _read_order(model: ir.Model) -> list[str]:
    """List the initializers in the order in which nodes read them."""
    read = (value for node in model.graph.all_nodes() for value in node.inputs if value is not None)
    return list(dict.fromkeys(str(value.name) for value in read if value.is_initializer()))


def _weights_read(model: ir.Model) -> list[ir.TensorProtocol]:
    """List the initializers in the order in which nodes read them."""
    return [graph.tensor(model.graph.initializers[name]) for name in _read_order(model)]


def _places(tensors: Mapping[str, ir.TensorProtocol], written: Sequence[ir.TensorProtocol]) -> dict[str, int] | None:
    """Find each of the `tensors` that a session reads among those of the graph as it was written.

    So the weights of a graph of the same nodes are found without writing it anew. None: some were made on the way, or
    it has one under two names, where another graph may have two.
    """
    at = {id(tensor): place for place, tensor in enumerate(written)}
    if len(at) < len(written) or any(id(tensor) not in at for tensor in tensors.values()):
        return None
    return {name: at[id(tensor)] for name, tensor in tensors.items()}


def multiply_as_stored(model: ir.Model) -> None:
    """Make `MatMul(x, W)` with W [K, N], stored as [N, K], one FusedMatMul that reads it so, in place."""
    for product in MatMul.all(model):
        weight, tensor = product.w, product.w.const_value
        if not is_constant(weight) or len(weight.uses()) > 1 or tensor is None or not is_stored(tensor):
            continue
        del model.graph.initializers[str(weight.name)]
        turned = graph.initializer(model, str(weight.name), _as_stored(tensor))
        fused = FusedMatMul.insert(product.node, {"a": product.x, "b": turned}, {"transB": 1}, name=product.name)
        graph.replace_value(product.output, fused.output)
        model.graph.remove(product.node, safe=True)


def _as_stored(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """Make a lazy fp32 [N, K] of a weight [K, N]."""
    k, n = tensor.shape.numpy()
    return computed(lambda: by_output_fp32(tensor), ir.DataType.FLOAT, (n, k), str(tensor.name))
