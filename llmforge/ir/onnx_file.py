"""Graphs as ONNX files beside one file of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_ir.serde import SerdeError

from llmforge.base import folders
from llmforge.base.errors import InputError, UsageError, VerificationError
from llmforge.base.progress import Progress, Silent
from llmforge.ir import graph as g

SUFFIX = ".onnx"
INLINE_BELOW_BYTES = 1024  # scales, row defaults, shapes, which shape inference must see as constants in the graph
# Offsets in the data file. 64: a cache line, so that no kernel meets an unaligned float in a mapped file.
# 4096: a page, so that a large tensor shares none with its neighbours when the file is mapped.
ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
PAGE_ALIGNED_FROM_BYTES = 1 << 20
_BYTE_BITS = 8  # numbers of fewer are packed when they are written
_HINT = "`llmforge trace -o GRAPH.onnx` writes one, and every artifact has engine/model.onnx"


@runtime_checkable
class _Writable(Protocol):
    """What tensors of onnx_ir do besides their protocol."""

    def tofile(self, file: _HashedStream) -> None: ...


def save(model: ir.Model, path: Path, *, weights: bool = True) -> tuple[Path, ...]:
    """Write `model` to `path` (.onnx) and its larger initializers, one after the other, to `path` + ".data".

    Without `weights` the graph alone is written, and refers to a file of weights that is not there: enough to look at
    it and to compare it. Returns the files written.

    Raises:
        UsageError: `path` does not end in .onnx.
    """
    if path.suffix != SUFFIX:
        raise UsageError(f"{path}: the file name must end in {SUFFIX}")
    path.parent.mkdir(parents=True, exist_ok=True)
    data, clone = path.with_name(f"{path.name}.data"), model.clone()
    if weights:
        write([clone], [path], [data])
        if data.stat().st_size:
            return path, data
        data.unlink()
    else:
        g.detach(clone, data.name, INLINE_BELOW_BYTES)
        path.write_bytes(_serialized(clone))
    return (path,)


def write(
    models: Sequence[ir.Model],
    paths: Sequence[Path],
    data: Sequence[Path],
    shared: Path | None = None,
    *,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Write graphs, and the larger initializers of each, in the order of their names, to its file in `data`.

    What is one tensor in all graphs, under one name, goes to the file `shared`, where there is one. `models` refer to
    the files afterwards. Weights stream one tensor at a time, so that memory grows with the largest tensor and not with
    the model. The same graphs give the same bytes. Returns the SHA-256 of what was written to each file, by its name:
    nothing is read back.

    Raises:
        VerificationError: a tensor is not as large as it says.
    """
    progress = progress or Silent()
    large = [_inlined(each) for each in models]
    common = set[str]()
    if shared is not None and len(large) > 1:
        common = {name for name, tensor in large[0].items() if all(each.get(name) is tensor for each in large)}
    own = [{name: tensor for name, tensor in each.items() if name not in common} for each in large]
    together = {name: tensor for name, tensor in large[0].items() if name in common}
    total, count = sum(tensor.nbytes for each in (together, *own) for tensor in each.values()), 0

    def advance(size: int) -> None:
        nonlocal count
        count += size
        progress.advance(count, total)

    written: dict[str, str] = {}
    placed = {} if shared is None else _append(together, shared, advance, written)
    for model, tensors, file, path in zip(models, own, data, paths, strict=True):
        for name, tensor in {**placed, **_append(tensors, file, advance, written)}.items():
            model.graph.initializers[name].const_value = tensor
        serialized = _serialized(model)
        path.write_bytes(serialized)
        written[path.name] = hashlib.sha256(serialized).hexdigest()
    return written


def _serialized(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def _inlined(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Read the small initializers of `model` into it, and return the larger ones in the order of names."""
    initializers = model.graph.initializers
    tensors = {name: g.tensor(initializers[name]) for name in sorted(initializers)}
    large = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= INLINE_BELOW_BYTES}
    for name in tensors.keys() - large.keys():  # inlined: what is in the checkpoint's file would be a path of this host
        tensor = tensors[name]
        initializers[name].const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    return large


class _HashedStream:
    """Hashes what is written to a file; it has no descriptor, by which tensors would go past it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        self._digest.update(content)
        return self._file.write(content)

    def tell(self) -> int:
        return self._file.tell()

    def sha256(self) -> str:
        return self._digest.hexdigest()


def _append(
    tensors: Mapping[str, ir.TensorProtocol], path: Path, advance: Callable[[int], None], written: dict[str, str]
) -> dict[str, ir.ExternalTensor]:
    """Stream tensors to a file and say where each lies; put its SHA-256 to those `written`."""
    placed = {}
    with path.open("wb") as stream:
        file = _HashedStream(stream)
        for name, tensor in tensors.items():
            alignment = PAGE_BYTES if tensor.nbytes >= PAGE_ALIGNED_FROM_BYTES else ALIGNMENT_BYTES
            offset = -(-file.tell() // alignment) * alignment
            file.write(bytes(offset - file.tell()))
            if isinstance(tensor, ir.Tensor | ir.LazyTensor) and tensor.dtype.bitwidth >= _BYTE_BITS:
                file.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)  # without a copy
            elif isinstance(tensor, _Writable):
                tensor.tofile(file)  # a file is copied piecewise
            else:
                file.write(tensor.tobytes())
            if file.tell() - offset != tensor.nbytes:
                raise VerificationError(
                    f"initializer {name} declares {tensor.dtype.name} {tensor.shape} and wrote {file.tell() - offset} "
                    f"bytes instead of {tensor.nbytes}"
                )
            placed[name] = ir.ExternalTensor(
                path.name,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                base_dir=path.parent,
            )
            advance(tensor.nbytes)
    written[path.name] = file.sha256()
    return placed


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
