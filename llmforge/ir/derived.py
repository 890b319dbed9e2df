"""The two lazy tensors: what a checkpoint stores (`Stored`), and what is computed from other tensors (`Derived`).

A plain lazy tensor hides how it comes about: only reading it tells what it holds. Of a derived one, its function, which
has a name, and its operands say it: where two layers derive their weights by one function from the corresponding
tensors, what was proven of one holds for the other (`llmforge.verification.changed_subgraphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError
from llmforge.ir.scratch import Scratch

Function = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]


def computed(read: Callable[[], NDArray[Any]], dtype: ir.DataType, shape: Sequence[int], name: str) -> ir.LazyTensor:
    """Make a tensor of what `read` returns, in `dtype` and `shape`, whenever it is read."""
    return ir.LazyTensor(lambda: ir.Tensor(read(), dtype=dtype, name=name), dtype, ir.Shape(shape), name=name)


class Derived(ir.LazyTensor):
    """`function` of the values of `operands`, computed whenever it is read, or once where there is a `scratch`.

    `function` is pure, and one object for all tensors that are made alike: a function of a module, not a closure.
    """

    def __init__(
        self,
        function: Function,
        operands: Sequence[ir.TensorProtocol],
        dtype: ir.DataType,
        shape: ir.Shape,
        name: str,
        *,
        scratch: Scratch | None = None,
    ) -> None:
        super().__init__(self._compute, dtype, shape, name=name)
        self.function = function
        self.operands = tuple(operands)
        self._scratch = scratch

    def _compute(self) -> ir.TensorProtocol:
        if self._scratch is not None and (kept := self._scratch.get(self)) is not None:
            return ir.Tensor(kept, name=self.name)
        try:
            array = self.function([each.numpy() for each in self.operands])
        except OverflowError as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        if self._scratch is not None and not self._scratch.is_idle:
            self._scratch.put(self, array)
        return ir.Tensor(array, name=self.name)


class Stored(ir.LazyTensor):
    """A parameter that is a cast, and perhaps the transpose along its last two axes, of what a checkpoint stores.

    `pieces` reads that, one after the other along the first axis: mostly one, of experts that lie apart one each, of
    which one is in memory at a time. What wants a matrix as it is stored, row by row, need not pay for a whole copy in
    another layout: `stored` gives that. `sources` names, of a matrix and of each of several, the checkpoint's tensors
    that lie on top of each other in it; (): they are made otherwise, or their numbers were changed.
    """

    def __init__(
        self,
        pieces: Callable[[], Iterable[NDArray[Any]]],
        dtype: ir.DataType,
        shape: ir.Shape,
        name: str,
        *,
        transposed: bool = False,
        sources: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        super().__init__(self._read, dtype, shape, name=name)
        self.pieces, self.transposed, self.sources = pieces, transposed, sources

    @property
    def is_matrix(self) -> bool:
        """Whether it has two axes."""
        return len(self.shape) == 2

    def stored(self) -> NDArray[Any]:
        """Read it as it is stored."""
        pieces = [*self.pieces()]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def first(self) -> NDArray[Any]:
        """Read the first piece, as this tensor holds it, in the dtype in which it is stored."""
        piece = next(iter(self.pieces()))
        return piece.swapaxes(-1, -2) if self.transposed else piece

    def _read(self) -> ir.TensorProtocol:
        result = np.empty(self.shape.numpy(), self.dtype.numpy())  # what is written to it is cast on the way: no copy
        as_stored = result.swapaxes(-1, -2) if self.transposed else result
        filled = 0
        for part in self.pieces():
            if not part.ndim:
                return ir.Tensor(part.astype(result.dtype), dtype=self.dtype, name=self.name)
            as_stored[filled : filled + len(part)] = part
            filled += len(part)
        assert filled == len(as_stored)
        return ir.Tensor(result, dtype=self.dtype, name=self.name)


def is_stored(tensor: ir.TensorProtocol) -> bool:
    """Say whether `tensor` [K, N] is stored as [N, K], whole or as several that are side by side."""
    if isinstance(tensor, Derived):
        return tensor.function in (side_by_side, to_fp32) and all(map(is_stored, tensor.operands))
    return isinstance(tensor, Stored) and tensor.is_matrix and tensor.transposed


def by_output(tensor: ir.TensorProtocol, *, transposed: bool) -> NDArray[Any]:
    """Return the weight of a linear layer as [N, K], in the dtype in which it is stored.

    `transposed`: `tensor` is [K, N]. A matrix that is stored as [N, K] is not copied, and no more than its stored bytes
    where several are stacked.
    """
    if isinstance(tensor, Derived) and tensor.function is to_fp32:
        return by_output(tensor.operands[0], transposed=transposed)
    if isinstance(tensor, Stored) and tensor.is_matrix and tensor.transposed == transposed:
        return tensor.stored()
    if isinstance(tensor, Derived) and transposed and is_stored(tensor):
        return np.concatenate([by_output(each, transposed=True) for each in tensor.operands])
    return tensor.numpy().T if transposed else tensor.numpy()


def stored_in(tensor: ir.TensorProtocol, *, transposed: bool) -> tuple[str, ...]:
    """Name the tensors of the checkpoint that `by_output` puts on top of each other, () where it does otherwise."""
    if isinstance(tensor, Stored) and tensor.is_matrix and tensor.transposed == transposed:
        return tensor.sources[0] if tensor.sources else ()
    if isinstance(tensor, Derived) and tensor.function is to_fp32:
        return stored_in(tensor.operands[0], transposed=transposed)
    if isinstance(tensor, Derived) and transposed and is_stored(tensor):
        parts = [stored_in(each, transposed=True) for each in tensor.operands]
        return tuple(name for part in parts for name in part) if all(parts) else ()
    return ()


def by_output_fp32(tensor: ir.TensorProtocol) -> NDArray[np.float32]:
    """Return the weight [K, N] of a linear layer as [N, K], in fp32, which holds what is stored in fp16 and bf16.

    What is stored as [N, K], whole or as several that are side by side, is widened on the way, without another copy.
    """
    k, n = tensor.shape.numpy()
    widened = np.empty((n, k), np.float32)
    _write_by_output(tensor, widened)
    return widened


def _write_by_output(tensor: ir.TensorProtocol, out: NDArray[np.float32]) -> None:
    if isinstance(tensor, Derived) and tensor.function is side_by_side and is_stored(tensor):
        at = 0
        for each in tensor.operands:
            count = int(each.shape.numpy()[-1])
            _write_by_output(each, out[at : at + count])
            at += count
    else:
        out[...] = by_output(tensor, transposed=True)


def side_by_side(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate along the last axis."""
    return np.concatenate(arrays, axis=-1)


def swapped(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Transpose a matrix."""
    return arrays[0].T


def key_projection(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Take what makes keys of latents, [H, N, L], from [H·(N+Dv), L]; the other operand is H and N."""
    up, (heads, plain) = arrays
    return up.reshape(heads, -1, up.shape[1])[:, :plain]


def value_projection(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Take what makes values of latents, transposed, [H, L, Dv], from [H·(N+Dv), L]; the other operand is H and N."""
    up, (heads, plain) = arrays
    return up.reshape(heads, -1, up.shape[1])[:, plain:].swapaxes(1, 2)


def to_fp32(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Cast to fp32: exact for fp16 and bf16."""
    return arrays[0].astype(np.float32)


def to_fp16(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Round to fp16, to nearest even.

    Raises:
        OverflowError: a finite number is beyond the largest that fp16 holds.
    """
    with np.errstate(over="ignore"):
        rounded = arrays[0].astype(np.float16)
    lost = ~np.isfinite(rounded) & np.isfinite(arrays[0])
    if lost.any():
        largest = float(np.abs(arrays[0][lost].astype(np.float64)).max())
        raise OverflowError(f"it holds {largest:.6g}; fp16 ends at {float(np.finfo(np.float16).max):.0f}")
    return rounded


def to_bf16(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Round to bf16, to nearest even."""
    return arrays[0].astype(ml_dtypes.bfloat16)


CASTS: Mapping[ir.DataType, Function] = {
    ir.DataType.FLOAT: to_fp32,
    ir.DataType.FLOAT16: to_fp16,
    ir.DataType.BFLOAT16: to_bf16,
}


def cast(tensor: ir.TensorProtocol, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    """Give `tensor` in another dtype of `CASTS`, rounded to nearest even, lazily but for what is in memory.

    What it is made of stays seen: a stored matrix is one still, and so are several that are side by side.
    A checkpoint that stores `dtype` is read as it is: fp32 in between holds all its numbers.
    """
    if tensor.dtype == dtype:
        return tensor
    if isinstance(tensor, Derived) and tensor.function is side_by_side:
        operands = [cast(each, dtype, str(each.name)) for each in tensor.operands]
        return Derived(side_by_side, operands, dtype, tensor.shape, name)
    if isinstance(tensor, Stored) and tensor.is_matrix:
        return _cast_stored(tensor, dtype, name)
    if not isinstance(tensor, ir.LazyTensor | ir.ExternalTensor):
        return ir.Tensor(_cast_named(tensor.numpy(), dtype, name), dtype=dtype, name=name)
    return Derived(CASTS[dtype], [tensor], dtype, ir.Shape(tensor.shape.numpy()), name)


def _cast_named(array: NDArray[Any], dtype: ir.DataType, name: str) -> NDArray[Any]:
    try:
        return array if array.dtype == dtype.numpy() else CASTS[dtype]([array])
    except OverflowError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _cast_stored(tensor: Stored, dtype: ir.DataType, name: str) -> Stored:
    def pieces() -> Iterable[NDArray[Any]]:
        return (_cast_named(piece, dtype, name) for piece in tensor.pieces())

    return Stored(pieces, dtype, ir.Shape(tensor.shape.numpy()), name, transposed=tensor.transposed)
