"""Traced graphs on disk, without weights: the graph, and for each initializer the tensor of the checkpoint it is.

graph.onnx       all but the checkpoint's weights, which are references to a file that is not there
bindings.json    by initializer: the tensors that it is made of, and whether it holds them transposed; what the
                 checkpoint was asked for; and the attributes whose numbers ONNX's fp32 would round
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.trace.export import weights
from llmforge.trace.export.weights import Bindings, ParameterSource, TensorLookups, WeightPlan

GRAPH, BINDINGS = "graph.onnx", "bindings.json"
_FLOATS = (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)


def write(model: ir.Model, folder: Path) -> None:
    """Write the traced `model` into an existing folder; it stays as it is.

    Raises:
        ValueError: as `dump`.
    """
    store(dump(model), folder)


def store(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files of a kept graph into an existing folder."""
    for name, content in files.items():
        (folder / name).write_bytes(content)


def files_in(folder: Path) -> dict[str, bytes]:
    """Read the files of a kept graph."""
    return {name: (folder / name).read_bytes() for name in (GRAPH, BINDINGS)}


def dump(model: ir.Model) -> dict[str, bytes]:
    """Return the files, by name, that keep the traced `model`, which stays as it is.

    Raises:
        ValueError: it has a tensor that is neither the checkpoint's nor in memory.
    """
    bindings: Bindings = model.meta[weights.BINDINGS]
    clone = model.clone()
    for name, value in clone.graph.initializers.items():
        tensor = graph.tensor(value)
        if name in bindings.of:
            value.const_value = ir.ExternalTensor(
                "weights", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
            )
        elif isinstance(tensor, ir.ExternalTensor | ir.LazyTensor):
            raise ValueError(f"initializer {name} is computed")
    facts = {
        "of": {
            name: [list(source.tensors), source.converted is not None, transposed]
            for name, (source, transposed) in bindings.of.items()
        },
        **asdict(bindings.asked),
        "numbers": [
            [index, name, node.attributes[name].value]
            for index, node in enumerate(model.graph.all_nodes())
            for name in node.attributes
            if node.attributes[name].type in _FLOATS and _rounds(node.attributes[name].value)
        ],
    }
    return {
        GRAPH: ir.to_proto(clone).SerializeToString(deterministic=True),
        BINDINGS: json.dumps(facts).encode(),
    }


def read(folder: Path, checkpoint: Checkpoint) -> ir.Model | None:
    """Read the graph in `folder` and bind it to `checkpoint`, as `load` does."""
    return load(files_in(folder), checkpoint)


def load(files: Mapping[str, bytes], checkpoint: Checkpoint) -> ir.Model | None:
    """Bind the kept graph of `files` to `checkpoint`; None where that supplies parameters otherwise.

    `checkpoint` has the configuration, and tensors of the names, shapes and dtypes, that the graph was traced with.

    Raises:
        CheckpointError: the checkpoint lacks a parameter.
    """
    facts = json.loads(files[BINDINGS])
    shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    asked = TensorLookups(shapes, facts["ties"], facts["found"])
    if checkpoint.require(shapes, asked.ties) != asked.found:  # which tensors are equal depends on their content
        return None
    sources = _converted(checkpoint) if any(converted for _, converted, _ in facts["of"].values()) else {}
    model: ir.Model = ir.from_proto(onnx.load_model_from_string(files[GRAPH]))
    of = {}
    for name, (tensors, converted, transposed) in facts["of"].items():
        value = model.graph.initializers[name]
        source = sources[name] if converted else ParameterSource(tuple(tensors))
        shape = ir.Shape(graph.static(value))
        value.const_value = weights.tensor_of(
            checkpoint, source, shape, graph.dtype(value), name, transposed=transposed
        )
        of[name] = source, transposed
    nodes = list(model.graph.all_nodes())
    for index, name, number in facts["numbers"]:
        node = nodes[index]
        kind = node.attributes[name].type
        node.attributes[name] = ir.Attr(name, kind, tuple(number) if isinstance(number, list) else number)
    model.meta[weights.BINDINGS] = Bindings(asked, of)
    return model


def _converted(checkpoint: Checkpoint) -> WeightPlan:
    """Plan the parameters again whose tensors transformers converts."""
    from llmforge.trace.export import reference, skeleton

    return weights.plan(skeleton.on_meta(checkpoint.config, reference.EAGER, checkpoint.encoding), checkpoint)


def _rounds(value: Any) -> bool:
    """Say whether fp32 does not hold a number, or one of several."""
    numbers = np.asarray(value, np.float64)
    return bool((numbers.astype(np.float32).astype(np.float64) != numbers).any())
