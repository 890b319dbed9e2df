"""A lowered graph on disk: `model.onnx`, and its larger initializers in `model.onnx.data`.

The same graph gives the same bytes: nothing of the machine, of paths or of time is written. Weights stream one tensor
at a time, so that memory grows with the largest tensor and not with the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import onnx_ir as ir

from llmforge.base.errors import VerificationError
from llmforge.base.progress import Progress
from llmforge.ir import graph
from llmforge.runtime.backends.config import DATA_FILE, MODEL_FILE

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
    written = model.clone()
    _strip(written)
    initializers = written.graph.initializers
    tensors = {name: graph.tensor(initializers[name]) for name in sorted(initializers)}
    large = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= INLINE_BELOW_BYTES}
    for name in tensors.keys() - large.keys():  # inlined: what is in the checkpoint's file would be a path of this host
        tensor = tensors[name]
        initializers[name].const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    total, done = sum(tensor.nbytes for tensor in large.values()), 0
    with (folder / DATA_FILE).open("wb") as file:
        for name, tensor in large.items():
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
            initializers[name].const_value = ir.ExternalTensor(
                DATA_FILE,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                base_dir=folder,
            )
            done += tensor.nbytes
            progress.advance(done, total)
    (folder / MODEL_FILE).write_bytes(ir.to_proto(written).SerializeToString(deterministic=True))


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
