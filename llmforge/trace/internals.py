"""The private parts of torch and transformers that tracing needs, each with the reason; both are pinned exactly.

Everything else that `llmforge.trace` calls is public. A test checks that each of these still exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils.generic import GeneralInterface

__all__ = ["FakeTensor", "FakeTensorMode", "fake_mode", "parameters_on_meta", "real_tensors", "registered"]


def fake_mode() -> FakeTensorMode:
    """Make a mode under which tensors have shapes and no memory.

    Private: torch offers no public way to give a module fake parameters before `torch.export`. Parameters on the
    meta device do not do: torch.export then finds two devices, because buffers (rotary frequencies) stay real.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Leave the modes of an enclosing trace, so that tensors made inside hold numbers and are not recorded.

    Private: masks, rotary tables and probes are evaluated from inside the model's forward pass.
    """
    with _disable_current_modes(), torch.no_grad():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers on the meta device, and leave buffers alone.

    Replaces a method of `torch.nn.Module`: `torch.device("meta")` would take the buffers too, and what a model
    computes for them in its constructor (frequencies, scales) would be lost.
    """
    original = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # a tied parameter is on meta already: keep it shared
            meta = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            module._parameters[name] = meta

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextmanager
def registered(name: str, attention: object, mask: object) -> Iterator[None]:
    """Register an attention implementation and its mask in transformers' public registries, and remove them after.

    Private: the registries can be added to, not removed from.
    """
    registries: list[tuple[type[GeneralInterface], object]] = [(AttentionInterface, attention), (AttentionMaskInterface, mask)]
    for registry, function in registries:
        registry.register(name, function)
    try:
        yield
    finally:
        for registry, _ in registries:
            del registry._global_mapping[name]
