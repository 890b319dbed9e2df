"""Graphs as ONNX files beside one file of weights."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from llmforge.base.errors import InputError, UsageError
from llmforge.ir import graph as g

SUFFIX = ".onnx"
INLINE_BELOW_BYTES = 1024  # constants: shape inference of other tools reads them in the graph itself
IN_FLIGHT_BYTES = 2**28  # of weights between reading and writing
ALIGNMENT_BYTES = 4096  # a page, so that a runtime can map a weight where it lies


def save(model: ir.Model, path: Path, *, weights: bool = True) -> tuple[Path, ...]:
    """Write `model` to `path` (.onnx) and its larger initializers, one after the other, to `path` + ".data".

    Memory grows with the largest tensor, not with the model. Without `weights` the graph alone is written, and refers
    to a file of weights that is not there: enough to look at it and to compare it. Returns the files written.

    Raises:
        UsageError: `path` does not end in .onnx.
    """
    if path.suffix != SUFFIX:
        raise UsageError(f"{path}: a graph is written as ONNX: the name must end in {SUFFIX}")
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
    """Read the graph at `path`; its weights stay on disk.

    Raises:
        InputError: there is no such file, or it is no ONNX model.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        model = ir.load(path)
    except (DecodeError, ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not an ONNX model: {error}") from error
    if not model.opset_imports:  # protobuf takes almost any bytes for an empty message
        raise InputError(f"{path}: not an ONNX model: it imports no operators")
    return model
