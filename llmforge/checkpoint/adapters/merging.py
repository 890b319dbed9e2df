"""Tensors of a checkpoint with adapters merged into them, computed whenever one is read.

All steps on a tensor are computed in fp32 (fp64 where the checkpoint is), some rows at a time, and rounded once to the
dtype in which the checkpoint stores it, to nearest even. peft's `merge_and_unload` rounds each adapter's product, and
each sum, to that dtype: of a checkpoint in fp32 both are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint.adapters.folder import Adapter, LowRankUpdate
from llmforge.checkpoint.adapters.source import CONFIG, AdapterSource
from llmforge.checkpoint.quantized import QuantizedTensor
from llmforge.checkpoint.safetensors_file import TensorEntry, external, listed

if TYPE_CHECKING:
    import onnx_ir as ir

_BLOCK = 1 << 22  # elements of a tensor that are computed at once: 16 MiB of fp32
_ALONE = "give it the weight 1: it does not add up with others"
DIGEST_FORMAT = b"llmforge merged 1\n"

_Array = NDArray[Any]


@dataclass(frozen=True)
class _Replace:
    """Takes the place of what is there."""

    entry: TensorEntry


@dataclass(frozen=True)
class _Add:
    """Adds scale·vector, of a bias."""

    entry: TensorEntry
    scale: float


@dataclass(frozen=True)
class Product:
    """Adds scale·B·A, as the tensor is stored: [N, K], or [K, N] where it is `swapped`."""

    low_rank: LowRankUpdate
    scale: float
    swapped: bool


_Step = _Replace | _Add | Product
Base = TensorEntry | QuantizedTensor  # a tensor of the checkpoint


@dataclass(eq=False)
class Merge:
    """Adapters that are merged into a checkpoint, and what each does to which tensor, in the recipe's order."""

    adapters: tuple[Adapter, ...]
    steps: Mapping[str, tuple[_Step, ...]] = field(repr=False)
    of_codes: frozenset[str] = frozenset()  # adapters that change a tensor which is stored as codes

    @classmethod
    def of(cls, sources: Sequence[AdapterSource], tensors: Mapping[str, Base], base: Path) -> Merge:
        """Open the adapters of `sources`, and find what they change among the `tensors` of the checkpoint `base`.

        Raises:
            CheckpointError: one is no adapter, or is of another base.
            UnsupportedError: one asks for what is not applied, or two cannot be merged together.
        """
        adapters = tuple(map(Adapter.open, sources))
        steps: dict[str, list[_Step]] = {}
        replaced: dict[str, str] = {}
        of_codes: set[str] = set()
        for adapter in adapters:
            for name, step in _steps(adapter, tensors, base):
                if isinstance(step, _Replace) and (other := replaced.setdefault(name, adapter.name)) != adapter.name:
                    raise UnsupportedError(
                        f"{adapter.path}: the adapters {other} and {adapter.name} both replace {name!r}",
                        hint="merge one of them",
                    )
                steps.setdefault(name, []).append(step)
                if not isinstance(tensors[name], TensorEntry):
                    of_codes.add(adapter.name)
        return cls(adapters, {name: tuple(each) for name, each in sorted(steps.items())}, frozenset(of_codes))

    def apply(self, tensor: ir.ExternalTensor | ir.LazyTensor) -> ir.ExternalTensor | ir.LazyTensor:
        """Return what becomes of a tensor of the checkpoint, lazily; one that no adapter changes stays as it is."""
        import onnx_ir as ir

        steps = self.steps.get(str(tensor.name))
        if steps is None:
            return tensor
        return ir.LazyTensor(
            lambda: ir.Tensor(_merged(tensor, steps), dtype=tensor.dtype, name=tensor.name),
            dtype=tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name,
        )

    def digest(self, base: str) -> str:
        """SHA-256 of the checkpoint with the digest `base` and of what is merged into it, hexadecimal."""
        lines = "".join(f"{adapter.digest} {adapter.source.weight!r}\n" for adapter in self.adapters)
        return hashlib.sha256(DIGEST_FORMAT + f"{base}\n{lines}".encode()).hexdigest()

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Say for each adapter how many tensors it changes, and how."""
        return tuple(map(self._note, self.adapters))

    def _note(self, adapter: Adapter) -> str:
        parts = [f"{len(adapter.low_rank)} modules by a product of rank {adapter.largest_rank} at most"]
        if not adapter.low_rank:
            parts = []
        if any(each.magnitude is not None for each in adapter.low_rank.values()):
            parts[0] += " with DoRA"
        if adapter.saved:
            parts.append(f"{len(adapter.saved)} parameters replaced")
        weight = "" if adapter.source.weight == 1 else f" with weight {adapter.source.weight:g}"
        return (
            f"adapter {adapter.name} merged{weight}: {', '.join(parts)}; computed in fp32, each tensor rounded once to "
            "the checkpoint's dtype"
            + ("; weights that are stored as codes are dequantized first" if adapter.name in self.of_codes else "")
        )


def _steps(adapter: Adapter, tensors: Mapping[str, Base], base: Path) -> Iterator[tuple[str, _Step]]:
    """Name the tensors that `adapter` changes, and how; what replaces one comes before what is added to it."""
    weight = adapter.source.weight
    for name, entry in adapter.saved.items():
        if weight != 1:
            raise UnsupportedError(f"{adapter.path}: it replaces {name!r}, which has no weight {weight:g}", hint=_ALONE)
        stored = _named(adapter, name, tensors, base)
        _same_shape(adapter, name, entry.shape, stored, tensors)
        yield stored, _Replace(entry)
    for module, low_rank in adapter.low_rank.items():
        stored = _named(adapter, f"{module}.weight", tensors, base)
        if low_rank.magnitude is not None and weight != 1:
            raise UnsupportedError(f"{adapter.path}: {module}: DoRA has no weight {weight:g}", hint=_ALONE)
        yield stored, Product(low_rank, low_rank.scale * weight, swapped(adapter, low_rank, tensors[stored]))
        if low_rank.bias is not None:
            stored = _named(adapter, f"{module}.bias", tensors, base)
            _same_shape(adapter, f"{module}.bias", low_rank.bias.shape, stored, tensors)
            yield stored, _Add(low_rank.bias, low_rank.scale * weight)


def swapped(adapter: Adapter, low_rank: LowRankUpdate, entry: Base) -> bool:
    """Say whether a weight is stored as [K, N]: tables of embeddings are, and the matrices of transformers' Conv1D.

    Raises:
        CheckpointError: it has another shape altogether.
    """
    n, k = low_rank.shape
    if low_rank.embedding:
        fits, result = entry.shape == (k, n), True
    elif n == k:
        fits, result = entry.shape == (n, k), adapter.swaps_axes
    else:
        fits, result = entry.shape in ((n, k), (k, n)), entry.shape == (k, n)
    if not fits:
        raise _other_base(adapter, f"{low_rank.module}: its product is [{n}, {k}], {entry.name!r} {list(entry.shape)}")
    if not entry.dtype.is_floating_point() or entry.dtype.bitwidth < 16:
        raise UnsupportedError(
            f"{adapter.path}: {entry.name!r} of the checkpoint is {entry.dtype.name}; adapters are merged into fp32, "
            "fp16 and bf16",
            hint="keep it apart: `mode: apart`",
        )
    return result


def _named(adapter: Adapter, name: str, tensors: Mapping[str, Base], base: Path) -> str:
    """Find the tensor of a parameter; checkpoints of a model without its head leave out what its name begins with.

    Raises:
        CheckpointError: there is none.
    """
    for candidate in (name, name.partition(".")[2]):
        if candidate in tensors:
            return candidate
    raise _other_base(adapter, f"{name!r}, which it changes, is not in {base.name}")


def _same_shape(adapter: Adapter, name: str, shape: tuple[int, ...], stored: str, tensors: Mapping[str, Base]) -> None:
    if tensors[stored].shape != shape:
        raise _other_base(adapter, f"it has {name!r} {list(shape)}, the checkpoint {list(tensors[stored].shape)}")


def _other_base(adapter: Adapter, what: str) -> CheckpointError:
    trained = f"it was trained on {adapter.base}" if adapter.base else f"{CONFIG} does not say what it was trained on"
    return CheckpointError(f"{adapter.path}: adapter {adapter.name}: {what}", hint=f"{trained}; is it of another base?")


def unmergeable(merge: Merge, shared: Sequence[tuple[str, str]]) -> UnsupportedError | None:
    """Say why adapters cannot be merged where pairs of parameters share one tensor; None: they can.

    To change one is to change the other: that is not what the adapter was trained for.
    """
    touched = sorted(name for pair in shared for name in pair if name in merge.steps)
    if not touched:
        return None
    return UnsupportedError(
        f"{listed(touched)} is changed by an adapter, and shared by embedding and head (tie_word_embeddings): merging "
        "would change both",
        hint="untie them in the checkpoint first",
    )


def read(entry: TensorEntry) -> _Array:
    """Map a tensor of an adapter."""
    return external(entry).numpy()


def _merged(tensor: ir.TensorProtocol, steps: Sequence[_Step]) -> _Array:
    """Compute `tensor` after `steps`, in its own dtype.

    Raises:
        CheckpointError: a number is beyond the dtype.
    """
    stored = tensor.numpy()
    with np.errstate(all="ignore"):  # what is not finite is refused
        result = _computed(stored, steps)
    if not np.isfinite(result).all():
        raise CheckpointError(f"{tensor.name}: with adapters merged, it leaves the range of {tensor.dtype.name}")
    return result


def _computed(stored: _Array, steps: Sequence[_Step]) -> _Array:
    wide = np.dtype(np.float64 if stored.dtype == np.float64 else np.float32)
    prepared = [_prepared(stored, step, wide) for step in steps]
    result = np.empty(stored.shape, stored.dtype)
    for rows in _blocks(stored.shape):
        block = np.array(stored[rows], wide)  # a copy
        for change in prepared:
            block = change(block, rows)
        result[rows] = block
    return result


def _prepared(stored: _Array, step: _Step, wide: np.dtype[Any]) -> Callable[[_Array, slice], _Array]:
    """Read what `step` adds, and return what applies it to some rows of the tensor."""
    if isinstance(step, _Replace):
        new = read(step.entry)
        return lambda block, rows: new[rows].astype(wide)
    if isinstance(step, _Add):
        bias = read(step.entry).astype(wide) * wide.type(step.scale)
        return lambda block, rows: block + bias[rows]
    a, b = read(step.low_rank.a).astype(wide), read(step.low_rank.b).astype(wide)
    left, right = (a.T, b.T) if step.swapped else (b, a)
    scale = wide.type(step.scale)

    def product(rows: slice) -> _Array:
        made: _Array = (left[rows] @ right) * scale
        return made

    if step.low_rank.magnitude is None:
        return lambda block, rows: block + product(rows)
    axis = 0 if step.swapped else 1  # along which an output's weights lie
    squares = np.zeros(b.shape[0], np.float64)
    for rows in _blocks(stored.shape):
        part = np.square(stored[rows].astype(wide) + product(rows), dtype=np.float64).sum(axis)
        if step.swapped:
            squares += part
        else:
            squares[rows] = part
    factor = (read(step.low_rank.magnitude).astype(wide) / np.sqrt(squares).astype(wide)).astype(wide)

    def scaled(block: _Array, rows: slice) -> _Array:
        own = factor[None] if step.swapped else factor[rows, None]
        made: _Array = own * (block + product(rows))
        return made

    return scaled


def _blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Divide the first axis so that at most `_BLOCK` elements are computed at once, or one row."""
    count = shape[0]
    rows = max(1, _BLOCK // max(1, int(np.prod(shape[1:]))))
    for at in range(0, count, rows):
        yield slice(at, min(at + rows, count))
