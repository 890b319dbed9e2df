"""A lowered graph on disk: `model.onnx`, and its larger initializers in `model.onnx.data`; or those of several ranks.

The same graph gives the same bytes: nothing of the machine, of paths or of time is written. Weights stream one tensor
at a time, so that memory grows with the largest tensor and not with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import onnx_ir as ir

from llmforge.base.errors import VerificationError
from llmforge.base.progress import Progress
from llmforge.ir import graph
from llmforge.runtime.config import DATA_FILE, MODEL_FILE, rank_file

# Tensors below this size stay in model.onnx: scales, row defaults, shapes, which shape inference must see as constants.
INLINE_BELOW_BYTES = 1024
# Offsets in the data file. 64: a cache line, so that no kernel meets an unaligned float in a mapped file.
# 4096: a page, so that a large tensor shares none with its neighbours when the file is mapped.
ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
PAGE_ALIGNED_FROM_BYTES = 1 << 20


@runtime_checkable
class _Writable(Protocol):
    """What tensors of onnx_ir do besides their protocol."""

    def tofile(self, file: BinaryIO) -> None: ...


def write(model: ir.Model, folder: Path, progress: Progress) -> None:
    """Write `model.onnx` and stream its larger initializers, in the order of their names, to `model.onnx.data`."""
    _write([model], [MODEL_FILE], [DATA_FILE], folder, progress)


def write_ranks(models: Sequence[ir.Model], folder: Path, progress: Progress) -> None:
    """Write the graph of each rank (`rank_file`), and its larger initializers.

    Those that are one tensor in the graphs of all ranks, under one name, are written once, to `model.onnx.data`; what
    a rank has for itself lies beside its graph.
    """
    files = [rank_file(rank) for rank in range(len(models))]
    _write(models, files, [f"{file}.data" for file in files], folder, progress)


def _write(
    models: Sequence[ir.Model], graphs: Sequence[str], data: Sequence[str], folder: Path, progress: Progress
) -> None:
    """Write graphs, and the initializers of each to its file in `data`; what all share to `DATA_FILE`."""
    written = [model.clone() for model in models]
    large = [_inlined(each) for each in written]
    shared = {
        name for name, tensor in large[0].items() if len(large) > 1 and all(each.get(name) is tensor for each in large)
    }
    own = [{name: tensor for name, tensor in each.items() if name not in shared} for each in large]
    total = sum(tensor.nbytes for each in own for tensor in each.values())
    total += sum(large[0][name].nbytes for name in shared)
    count = 0

    def advance(size: int) -> None:
        nonlocal count
        count += size
        progress.advance(count, total)

    if shared or DATA_FILE not in data:
        together = {name: tensor for name, tensor in large[0].items() if name in shared}
        placed = _append(together, folder, DATA_FILE, advance)
        for model in written:
            for name, tensor in placed.items():
                model.graph.initializers[name].const_value = tensor
    for model, tensors, file, graph_file in zip(written, own, data, graphs, strict=True):
        for name, tensor in _append(tensors, folder, file, advance).items():
            model.graph.initializers[name].const_value = tensor
        (folder / graph_file).write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def _inlined(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Read the small initializers of `model` into it, strip it, and return the larger ones in the order of names."""
    _strip(model)
    initializers = model.graph.initializers
    tensors = {name: graph.tensor(initializers[name]) for name in sorted(initializers)}
    large = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= INLINE_BELOW_BYTES}
    for name in tensors.keys() - large.keys():  # inlined: what is in the checkpoint's file would be a path of this host
        tensor = tensors[name]
        initializers[name].const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    return large


def _append(
    tensors: Mapping[str, ir.TensorProtocol], folder: Path, name_of_file: str, advance: Callable[[int], None]
) -> dict[str, ir.ExternalTensor]:
    """Stream tensors to a file and say where each lies."""
    placed = {}
    with (folder / name_of_file).open("wb") as file:
        for name, tensor in tensors.items():
            page = tensor.nbytes >= PAGE_ALIGNED_FROM_BYTES
            offset = _align(file.tell(), PAGE_BYTES if page else ALIGNMENT_BYTES)
            file.write(bytes(offset - file.tell()))
            if isinstance(tensor, _Writable):
                tensor.tofile(file)  # a file is copied piecewise, an array without a second copy
            else:
                file.write(tensor.tobytes())
            if file.tell() - offset != tensor.nbytes:
                raise VerificationError(
                    f"initializer {name} declares {tensor.dtype.name} {tensor.shape} and wrote {file.tell() - offset} "
                    f"bytes instead of {tensor.nbytes}"
                )
            placed[name] = ir.ExternalTensor(
                name_of_file,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                base_dir=folder,
            )
            advance(tensor.nbytes)
    return placed


def _strip(model: ir.Model) -> None:
    """Drop what no runtime reads and what may differ between two builds: texts, metadata, producers."""
    model.producer_name, model.producer_version, model.domain, model.doc_string = "llmforge", None, None, None
    model.metadata_props.clear()
    model.graph.doc_string = None
    model.graph.metadata_props.clear()
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph.all_nodes():
        node.doc_string = None
        node.metadata_props.clear()
        values += node.outputs
    for value in values:
        value.doc_string = None
        value.metadata_props.clear()


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
