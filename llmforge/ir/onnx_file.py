"""Graphs as ONNX files beside one file of weights."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_ir.serde import SerdeError

from llmforge.base import folders
from llmforge.base.errors import InputError, UsageError
from llmforge.ir import graph as g

SUFFIX = ".onnx"
INLINE_BELOW_BYTES = 1024  # constants: shape inference of other tools reads them in the graph itself
IN_FLIGHT_BYTES = 2**28  # of weights between reading and writing
ALIGNMENT_BYTES = 4096  # a page, so that a runtime can map a weight where it lies
_HINT = "`llmforge trace -o GRAPH.onnx` writes one, and every artifact has engine/model.onnx"


def save(model: ir.Model, path: Path, *, weights: bool = True) -> tuple[Path, ...]:
    """Write `model` to `path` (.onnx) and its larger initializers, one after the other, to `path` + ".data".

    Memory grows with the largest tensor, not with the model. Without `weights` the graph alone is written, and refers
    to a file of weights that is not there: enough to look at it and to compare it. Returns the files written.

    Raises:
        UsageError: `path` does not end in .onnx.
    """
    if path.suffix != SUFFIX:
        raise UsageError(f"{path}: the file name must end in {SUFFIX}")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{path.name}.data"
    if weights:
        ir.save(
            model,
            path,
            external_data=data,
            size_threshold_bytes=INLINE_BELOW_BYTES,
            max_workers=1,
            max_in_flight_bytes=IN_FLIGHT_BYTES,
            alignment=ALIGNMENT_BYTES,
        )
        written = path.parent / data
        return (path, written) if written.exists() else (path,)
    clone = model.clone()
    g.detach(clone, data, INLINE_BELOW_BYTES)
    path.write_bytes(ir.to_proto(clone).SerializeToString(deterministic=True))
    return (path,)


def load(path: Path) -> ir.Model:
    """Read the graph at `path`; its weights stay on disk, in its folder, and may be absent.

    Raises:
        InputError: there is no such file, it is no ONNX model, or its weights are not where it says.
    """
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "no such file"
        raise InputError(f"{path}: {what}", hint="give a graph, such as engine/model.onnx of an artifact")
    try:
        model = ir.load(path, format="protobuf")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}", hint="check the permissions of the file"
        ) from error
    except (DecodeError, SerdeError, ValueError) as error:
        raise InputError(f"{path}: not an ONNX model: {error}", hint=_HINT) from error
    if not model.opset_imports:  # protobuf takes almost any bytes for an empty message
        raise InputError(f"{path}: not an ONNX model: it imports no operators", hint=_HINT)
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _placed(path, name, value.const_value)
    return model


def _placed(path: Path, name: str, tensor: ir.ExternalTensor) -> ir.ExternalTensor:
    """Point weight `name` of the graph at `path` at its file, checked.

    The path is absolute and `base_dir` empty: below a `base_dir` onnx-ir refuses files with several hard links, which
    `llmforge triton` makes of an artifact's. That the file lies in the graph's folder is checked here in its place.
    """
    folder = folders.followed(path.parent)
    file = folders.followed(folder / tensor.location)
    if not file.is_relative_to(folder):
        raise InputError(
            f"{path}: weights of {name} are outside its folder, in {tensor.location}",
            hint="a graph and its weights must be in one folder",
        )
    offset, size_bytes = tensor.offset or 0, tensor.length or tensor.nbytes
    if file.is_file() and file.stat().st_size < offset + size_bytes:
        raise InputError(
            f"{file}: ends at byte {file.stat().st_size:,}, but {name} ends at {offset + size_bytes:,}",
            hint="copy the file again",
        )
    return ir.ExternalTensor(str(file), offset, size_bytes, tensor.dtype, shape=tensor.shape, name=name)
