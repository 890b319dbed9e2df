"""One decoder layer with its weights: run it, look into it, change its linears."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from llmforge.checkpoint import Checkpoint
from llmforge.errors import UnsupportedError
from llmforge.quantization import Float32

_Module = TypeVar("_Module", bound=torch.nn.Module)
# The keywords by which transformers hands a decoder layer its cache; the second in its older modules.
_CACHES = ("past_key_values", "layer_past")


@dataclass(frozen=True, eq=False)
class Call:
    """What a layer is called with after the hidden states: masks, rotary tables, positions."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _LinearReached(Exception):
    """The linear that was waited for is about to run."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A decoder layer in fp32; `name` is its place in the model, `calls` how it is called with each window.

    Parameter names are those of the checkpoint: "model.layers.0.self_attn.q_proj.weight".
    """

    module: torch.nn.Module
    name: str
    calls: Sequence[Call]

    def run(self, window: int, state: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [1, tokens, hidden] after the layer, of window number `window`."""
        call = self.calls[window]
        return _hidden(self.module(state, *call.args, **call.kwargs))

    def run_recording(self, window: int, state: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Run, and return also the largest magnitude of keys and values as they would be cached, [kv_heads, channels].

        Raises:
            UnsupportedError: the layer does not hand its keys and values, once, to the cache it is called with.
        """
        call, recorder = self.calls[window], _CacheRecorder()
        call = replace(call, kwargs={**call.kwargs, **{name: recorder for name in _CACHES if name in call.kwargs}})
        state = _hidden(self.module(state, *call.args, **call.kwargs))
        if len(recorder.peaks) != 1:
            raise UnsupportedError(
                f"{self.name}: {type(self.module).__name__} caches keys and values {len(recorder.peaks)} times; "
                "their ranges can be calibrated where it does once",
                hint="leave quantize-kv-cache out",
            )
        return state, recorder.peaks[0]

    def groups(self, state: torch.Tensor) -> list[list[str]]:
        """Name the weights of the linears in the order they run, those that read one tensor together.

        `state` are the hidden states of window 0. A linear that does not run is not named.
        """
        seen: list[tuple[torch.Tensor, list[str]]] = []  # holds the inputs, so that no address is used twice

        def note(name: str, x: torch.Tensor) -> None:
            for other, names in seen:
                if x.data_ptr() == other.data_ptr() and x.shape == other.shape and x.stride() == other.stride():
                    names.append(name)
                    return
            seen.append((x, [name]))

        with self._watched(note, list(self._linears())):
            self.run(0, state)
        return [names for _, names in seen]

    def run_noting(
        self, names: Sequence[str], window: int, state: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run, and return also what each of the linears `names` read, [tokens, K].

        Raises:
            UnsupportedError: one of them did not run.
        """
        inputs: dict[str, torch.Tensor] = {}

        def note(name: str, x: torch.Tensor) -> None:
            inputs[name] = x.reshape(-1, x.shape[-1])

        with self._watched(note, names):
            state = self.run(window, state)
        for name in set(names) - set(inputs):
            raise self._unread(name)
        return state, inputs

    def input_of(self, name: str, window: int, state: torch.Tensor) -> torch.Tensor:
        """Return what linear `name` reads, [tokens, K]; the layer runs no further than there.

        Raises:
            UnsupportedError: it does not run.
        """
        inputs: list[torch.Tensor] = []

        def take(_: str, x: torch.Tensor) -> None:
            inputs.append(x.reshape(-1, x.shape[-1]))
            raise _LinearReached

        with self._watched(take, [name]):
            try:
                self.run(window, state)
            except _LinearReached:
                return inputs[0]
        raise self._unread(name)

    def weight(self, name: str) -> Float32:
        """Return the weight of linear `name`, fp32 [N, K]."""
        weight: Float32 = self._linears()[name].weight.detach().numpy()
        return weight

    def set_weight(self, name: str, weight: Float32) -> None:
        """Give linear `name` another weight, fp32 [N, K]."""
        parameter = torch.nn.Parameter(torch.from_numpy(weight), requires_grad=False)
        self._linears()[name].weight = parameter

    @contextmanager
    def _watched(self, note: Callable[[str, torch.Tensor], None], names: Sequence[str]) -> Iterator[None]:
        """Call `note` with the name and the input of each of the linears `names` before it runs."""
        linears = self._linears()
        handles = [
            linears[name].register_forward_pre_hook(lambda _, args, name=name: note(name, args[0])) for name in names
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _unread(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name} does not run for every window of the calibration text, so GPTQ has no inputs for it",
            hint="put it on `exclude`, or use method: rtn",
        )

    def _linears(self) -> dict[str, torch.nn.Linear]:
        return linears_of(self.module, self.name)


class _CacheRecorder:
    """Stands where the cache does: keeps the largest magnitudes of what is cached and hands it back."""

    def __init__(self) -> None:
        self.peaks: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Record `key` and `value`, [1, kv_heads, tokens, channels]."""
        self.peaks.append((key.abs().amax((0, 2)), value.abs().amax((0, 2))))
        return key, value


def copy_with_weights(
    module: _Module, prefix: str, checkpoint: Checkpoint, names: Sequence[str] | None = None
) -> _Module:
    """Copy `module` and give the copy fp32 weights from `checkpoint`, where its parameters begin with `prefix`.

    `names` are the parameters to read, all by default; the others keep none.

    Raises:
        UnsupportedError: the checkpoint stores a parameter under another name or in another layout.
    """
    twin = copy.deepcopy(module)
    stored = stored_names(twin, prefix, checkpoint, names)
    tensors = {
        name: torch.from_numpy(checkpoint.tensor(tensor).numpy().astype(np.float32)) for name, tensor in stored.items()
    }
    twin.load_state_dict(tensors, strict=False, assign=True)
    return twin.requires_grad_(False)


def stored_names(
    module: torch.nn.Module, prefix: str, checkpoint: Checkpoint, names: Sequence[str] | None = None
) -> dict[str, str]:
    """Map the parameters `names` of `module`, all by default, to the tensors of `checkpoint` that hold them.

    Raises:
        UnsupportedError: the checkpoint stores a parameter under another name or in another layout.
    """
    wanted = [name for name, _ in module.named_parameters()] if names is None else list(names)
    stored = {name: f"{prefix}.{name}" if prefix else name for name in wanted}
    for tensor in stored.values():
        if tensor not in checkpoint.tensors:
            raise UnsupportedError(
                f"{checkpoint.path}: cannot be calibrated: {tensor!r} is stored under another name or layout",
                hint="use method: rtn, and leave quantize-kv-cache out",
            )
    return stored


def linears_of(module: torch.nn.Module, name: str) -> dict[str, torch.nn.Linear]:
    """Find the linears of a layer called `name`, by their parameters in the checkpoint."""
    return {
        f"{name}.{local}.weight": part for local, part in module.named_modules() if isinstance(part, torch.nn.Linear)
    }


def _hidden(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Take the hidden states from what a layer returns, which in some architectures is a tuple."""
    return output[0] if isinstance(output, tuple) else output
