"""A device for torch that computes on the CPU, counts what crosses to it and back, and does not mix with the host.

Tensors say that they are on "counted:0". An operation with one of them and one of the host's fails, as it would on a
GPU, unless it copies, or the other is a single number. NumPy cannot read them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "counted"
_CPU = torch.device("cpu")
_COPIES = ("aten::copy_", "aten::_to_copy")


@dataclass
class Traffic:
    """What has crossed, by kind of tensor (dtype and shape), since it was cleared, and what memory is taken."""

    put: Counter[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=Counter)
    fetched: Counter[tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=Counter)
    resident: int = 0  # bytes
    peak: int = 0
    held: Counter[int] = field(default_factory=Counter)  # tensors by address of their memory

    def clear(self) -> None:
        """Count anew; the peak begins with what is there."""
        self.put.clear()
        self.fetched.clear()
        self.peak = self.resident


TRAFFIC = Traffic()


class CountedTensor(torch.Tensor):
    """A tensor on the device; `raw` is the one of the CPU that it is."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> CountedTensor:
        made: CountedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=f"{NAME}:0",
        )
        made.raw = raw
        _hold(made, raw)
        return made

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        device = given.pop("device", None)
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, torch.Tensor)]
        name = func.name()
        if name not in _COPIES and any(not isinstance(each, CountedTensor) and each.dim() for each in tensors):
            raise RuntimeError(f"{name}: tensors are on {NAME}:0 and on the host")
        raw_args, raw_given = tree_map(_raw, (args, given))
        if name == "aten::copy_":
            _crossing(args[1], to_device=isinstance(args[0], CountedTensor))
        if name == "aten::histc" and not raw_args[0].is_floating_point():  # which the CPU has of floats alone
            return CountedTensor(func(raw_args[0].float(), *raw_args[1:], **raw_given).to(raw_args[0].dtype))
        made = func(*raw_args, **raw_given)
        if name == "aten::_local_scalar_dense":
            return made
        if device is not None and torch.device(device) == _CPU:
            _crossing(args[0], to_device=False)
            return made
        own = {id(each.raw): each for each in tensors if isinstance(each, CountedTensor)}

        def wrapped(x: Any) -> Any:
            return own.get(id(x)) or CountedTensor(x) if isinstance(x, torch.Tensor) else x

        return tree_map(lambda x: own[id(x)] if id(x) in own else wrapped(x), made)


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, CountedTensor) else x


def _crossing(x: torch.Tensor, *, to_device: bool) -> None:
    if isinstance(x, CountedTensor) != to_device:
        (TRAFFIC.put if to_device else TRAFFIC.fetched)[x.dtype, tuple(x.shape)] += 1


def _hold(made: CountedTensor, raw: torch.Tensor) -> None:
    storage = raw.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if not TRAFFIC.held[address]:
        TRAFFIC.resident += size
        TRAFFIC.peak = max(TRAFFIC.peak, TRAFFIC.resident)
    TRAFFIC.held[address] += 1
    weakref.finalize(made, _let_go, address, size)


def _let_go(address: int, size: int) -> None:
    TRAFFIC.held[address] -= 1
    if not TRAFFIC.held[address]:
        TRAFFIC.resident -= size


def _empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> CountedTensor:
    return CountedTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> CountedTensor:
    return CountedTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


_registered: list[Any] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Let torch know the device, from now on in this process, and count from 0."""
    if not _registered:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", _empty, "PrivateUse1")
        library.impl("empty_strided", _empty_strided, "PrivateUse1")
        module = getattr(torch, NAME)
        module.get_rng_state, module.set_rng_state = (lambda *_: torch.empty(0)), (lambda *_: None)
        _registered.append(library)
    TRAFFIC.clear()
    yield TRAFFIC
