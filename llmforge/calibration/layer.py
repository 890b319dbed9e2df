"""One decoder layer with its weights: run it, look into it, change its linears and experts."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError
from llmforge.calibration import experts as of_experts
from llmforge.calibration.attention import compiled_attention
from llmforge.calibration.device import HOST, ExecutionDevice
from llmforge.calibration.threads import IN_ORDER, WindowMap, has_bf16
from llmforge.checkpoint import Checkpoint
from llmforge.quantization.grids import Float32
from llmforge.quantization.methods import PLAIN
from llmforge.trace.export.weights import ParameterSource, load
from llmforge.trace.hooks.experts import marked

_Module = TypeVar("_Module", bound=torch.nn.Module)
Arguments = tuple[torch.Tensor, ...]  # what a module is called with
# The keywords by which transformers hands a decoder layer its cache; the second in its older modules.
_CACHES = ("past_key_values", "layer_past")


class LayerCall(NamedTuple):
    """What a layer is called with after the hidden states: masks, rotary tables, positions."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Observed(NamedTuple):
    """A run of one window: the hidden states after it, and what some linears or experts read and made, by name."""

    after: torch.Tensor  # [1, tokens, hidden]
    called: Mapping[str, Arguments]  # with [tokens, K]; experts with the ids of their experts and weights, too
    outputs: Mapping[str, torch.Tensor]  # [1, tokens, N]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What each reads, [tokens, K]."""
        return {name: given[0] for name, given in self.called.items()}


ObservedRun = Callable[[int, torch.Tensor], Observed]  # of a window, with its hidden states


class Additions(NamedTuple):
    """Which linears and experts of a layer make what is added to hidden states; `first` to those it is called with."""

    first: tuple[str, ...]
    last: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Selected:
    """Which output and input features of a linear are left where others were pruned; None: all."""

    rows: NDArray[np.intp] | None = None
    columns: NDArray[np.intp] | None = None

    def of(self, weight: Float32) -> Float32:
        """Return what is left of a weight [N, K]."""
        kept = weight if self.rows is None else weight[self.rows]
        return kept if self.columns is None else kept[:, self.columns]

    def spread(self, kept: Float32, n: int, k: int) -> Float32:
        """Put what is left of a weight back in its places of [n, k], zeros elsewhere."""
        whole = np.zeros((n, k), np.float32)
        rows = np.arange(n) if self.rows is None else self.rows
        whole[np.ix_(rows, np.arange(k) if self.columns is None else self.columns)] = kept
        return whole

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is left of inputs [..., K]."""
        return x if self.columns is None else x[..., torch.from_numpy(self.columns).to(x.device)]


_WHOLE = Selected()


class _Reached(Exception):
    """The module that was waited for is about to run."""


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """A decoder layer in fp32; `name` is its place in the model, `calls` how it is called with each window.

    Parameter names are those of the checkpoint: "model.layers.0.self_attn.q_proj.weight". Where features of its linears
    were pruned, `selected` has those that are left, and `kv_heads` the KV heads: weights and inputs are without the
    others, which the module itself keeps, with zeros in what reads them. `each` runs what is done for each window.
    The module is on `device`, and so is what a run makes, wherever the hidden states are that it is given.
    """

    module: torch.nn.Module
    name: str
    calls: Sequence[LayerCall]
    selected: Mapping[str, Selected] = field(default_factory=dict)
    kv_heads: tuple[int, ...] | None = None
    each: WindowMap = IN_ORDER
    device: ExecutionDevice = HOST
    as_transformers: bool = False  # whether a run gives the bits of transformers: attention is torch's

    def run(self, window: int, state: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [1, tokens, hidden] after the layer, of window number `window`."""
        with self.attending():
            return self.forward(window, state)

    def attending(self) -> AbstractContextManager[object]:
        """Make a context in which attention on this thread is as in runs of the layer."""
        return nullcontext() if self.as_transformers else compiled_attention(_is_narrowed(self.module))

    def forward(self, window: int, state: torch.Tensor) -> torch.Tensor:
        """See `run`; the caller is `attending`."""
        call = self.calls[window]
        for recorder in call.kwargs.values():
            if isinstance(recorder, _CacheRecorder):
                recorder.ended = True  # what it recorded is of an earlier run
        return _hidden(self.module(self.device.put(state), *call.args, **call.kwargs))

    def advance(self, states: list[torch.Tensor]) -> None:
        """Carry the hidden states of all windows through the layer, to where they rest."""

        def run(window: int, state: torch.Tensor) -> torch.Tensor:
            return self.device.rest(window, self.run(window, state))

        states[:] = self.each(run, range(len(states)), states)

    def recording(self) -> DecoderLayer:
        """Return the layer with something in place of its cache that notes what is cached, for `cached`."""
        return self.with_cache(_CacheRecorder)

    def with_cache(self, make: Callable[[], object]) -> DecoderLayer:
        """Return the layer with one of what `make` makes in place of its cache, for each window."""

        def caching(call: LayerCall) -> LayerCall:
            cache = make()
            return call._replace(kwargs={**call.kwargs, **{key: cache for key in _CACHES if key in call.kwargs}})

        return replace(self, calls=[caching(call) for call in self.calls])

    def cached(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest magnitude of keys and values as they were cached last, [kv_heads, channels].

        Raises:
            UnsupportedError: the layer does not hand its keys and values, once, to the cache it is called with.
        """
        recorders = [each for each in self.calls[window].kwargs.values() if isinstance(each, _CacheRecorder)]
        peaks = recorders[0].peaks if recorders else []
        if len(peaks) != 1:
            raise UnsupportedError(
                f"{self.name}: {type(self.module).__name__} caches keys and values {len(peaks)} times; "
                "their ranges can be calibrated where it does once",
                hint="leave quantize-kv-cache out",
            )
        if self.kv_heads is None:
            return peaks[0]
        key, value = (peak[list(self.kv_heads)] for peak in peaks[0])
        return key, value

    def kind(self) -> Hashable:
        """Return what layers have in common that call their linears and experts alike: modules and their settings."""
        return tuple(
            (local, type(module), *((name, own) for name, own in vars(module).items() if _is_setting(name, own)))
            for local, module in self.module.named_modules()
        )

    def groups(self, state: torch.Tensor) -> list[list[str]]:
        """Name the weights of the linears in the order they run, those that read one tensor together; experts apart.

        `state` are the hidden states of window 0. Experts are named by their module. What does not run is not named.
        """
        seen: list[tuple[torch.Tensor, list[str]]] = []  # holds the inputs, so that no address is used twice
        experts = self.experts()

        def note(name: str, given: Arguments) -> None:
            x = given[0]
            for other, names in seen:
                same = x.data_ptr() == other.data_ptr() and x.shape == other.shape and x.stride() == other.stride()
                if same and name not in experts and names[0] not in experts:
                    names.append(name)
                    return
            seen.append((x, [name]))

        with self._watched(note, [*self.linears(), *experts]):
            self.run(0, state)
        return [names for _, names in seen]

    def routers(self, groups: Sequence[Sequence[str]], state: torch.Tensor) -> set[str]:
        """Name the linears that choose experts, of `groups` as found with `state`.

        They are those whose output moves the ids or weights that experts are called with, and not their tokens.
        """
        found: set[str] = set()
        for experts in self.experts():
            before = self.arguments_of(experts, 0, state)
            for name in [name for group in groups for name in group if name in self.linears()]:
                with self._shifted(name):
                    after = self.arguments_of(experts, 0, state)
                moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
                if any(moved[1:]) and not moved[0]:
                    found.add(name)
        return found

    @contextmanager
    def observed(self, read: Sequence[str], made: Sequence[str] = ()) -> Iterator[ObservedRun]:
        """Yield what runs the layer and returns also what linears or experts `read` read, and those of `made` made.

        Threads may call it at once. It raises UnsupportedError where one of them did not run.
        """
        own = threading.local()

        def note(name: str, given: Arguments) -> None:
            if hasattr(own, "called"):
                own.called[name] = tuple(x.reshape(-1, x.shape[-1]) for x in given)

        def keep(name: str) -> Callable[..., None]:
            def after(module: torch.nn.Module, args: Any, y: Any) -> None:
                if hasattr(own, "outputs"):
                    own.outputs[name] = _hidden(y)

            return after

        def run(window: int, state: torch.Tensor) -> Observed:
            called, outputs = own.called, own.outputs = dict[str, Arguments](), dict[str, torch.Tensor]()
            after = self.run(window, state)
            if missing := {*read} - {*called} | {*made} - {*outputs}:
                raise self.unread(min(missing))
            shaped = {name: y.reshape(state.shape[0], state.shape[1], -1) for name, y in outputs.items()}
            return Observed(after, called, shaped)

        modules = self.modules()
        with self._watched(note, read) as hooks:
            for name in made:
                hooks.enter_context(modules[name].register_forward_hook(keep(name)))
            yield run

    def additions(self, groups: Sequence[Sequence[str]], state: torch.Tensor) -> Additions:
        """Find the linears and experts whose outputs are added to hidden states, of `groups` as found with `state`.

        `last` are those whose output, shifted, shifts that of the layer by as much; `first` those whose output and
        `state` together are what the `last` ones are added to.
        """
        names = [name for group in groups for name in group]
        with self.observed((), names) as run:
            out, _, made = run(0, state)
        fitting = [name for name, y in made.items() if y.shape == out.shape]
        last = []
        for name in fitting:
            with self._shifted(name):
                after = self.run(0, state)
            shift = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device) * (1 + made[name].abs().amax())
            if torch.allclose(after - out, shift.expand_as(out), rtol=0, atol=float(1e-3 * shift.max())):
                last.append(name)
        between = out - sum((made[name] for name in last), torch.zeros(()))
        room = float(1e-4 * between.abs().amax())
        others = [name for name in fitting if name not in last] if last else []
        first = [name for name in others if torch.allclose(state + made[name], between, rtol=0, atol=room)]
        return Additions(tuple(first), tuple(last))

    def arguments_of(self, name: str, window: int, state: torch.Tensor) -> Arguments:
        """Return what a linear, or experts, are called with, each [tokens, …]; the layer runs no further than there.

        Experts are called with tokens, the ids of their experts, and their weights.

        Raises:
            UnsupportedError: it does not run.
        """
        taken: list[Arguments] = []

        def take(_: str, given: Arguments) -> None:
            taken.append(tuple(x.reshape(-1, x.shape[-1]) for x in given))
            raise _Reached

        with self._watched(take, [name]):
            try:
                self.run(window, state)
            except _Reached:
                return taken[0]
        raise self.unread(name)

    def arguments(self, name: str, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Arguments:
        """Return what linear or experts `name`, which are `module`, are called with, [..., K] and so on."""
        given = args
        if kwargs:
            bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
            given = tuple(bound.arguments.values())[1:]
        x, *others = given
        return (self._left(name).read(x), *others)

    def experts(self) -> dict[str, torch.nn.Module]:
        """Map the names of its experts modules, "model.layers.0.mlp.experts", to them."""
        return {f"{self.name}.{local}": module for local, module in self.module.named_modules() if marked(module)}

    def weight(self, name: str) -> Float32:
        """Return the weight of linear `name`, fp32 [N, K]."""
        weight: Float32 = self.linears()[name].weight.detach().cpu().numpy()
        return self._left(name).of(weight)

    def set_weight(self, name: str, weight: Float32) -> None:
        """Give linear `name` another weight, fp32 [N, K], or experts another parameter, [E·N, K]."""
        if name in (linears := self.linears()):
            if name in self.selected:
                weight = self.selected[name].spread(weight, linears[name].out_features, linears[name].in_features)
            moved = self.device.put(torch.from_numpy(weight))
            linears[name].weight = torch.nn.Parameter(moved, requires_grad=False)
            return
        owner, _, parameter = name.rpartition(".")
        of_experts.assign(self.experts()[owner], parameter, weight)

    def outputs_left(self, names: Sequence[str], moments: tuple[Float32, ...]) -> tuple[Float32, ...]:
        """Return what is left of moments of the outputs of linears `names`, [N, N] each, or of none."""
        kept = [self._left(name).rows for name in names]
        return tuple(
            each if rows is None else each[np.ix_(rows, rows)] for rows, each in zip(kept, moments, strict=False)
        )

    def _watched(self, note: Callable[[str, Arguments], None], names: Sequence[str]) -> ExitStack:
        """Call `note` with the name of each of the linears or experts `names`, and what it is given, before it runs."""
        modules = self.modules()

        def hook(name: str) -> Callable[..., None]:
            def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
                note(name, self.arguments(name, module, args, kwargs))

            return before

        hooks = ExitStack()
        for name in names:
            hooks.enter_context(modules[name].register_forward_pre_hook(hook(name), with_kwargs=True))
        return hooks

    def _shifted(self, name: str) -> AbstractContextManager[object]:
        """Add to what linear or experts `name` makes, to each feature something else."""

        def shift(y: Any) -> Any:
            if isinstance(y, tuple):  # of a router that derives from Linear and returns its choice
                return tuple(map(shift, y))
            if not y.is_floating_point():
                return y
            return y + torch.linspace(0.5, 1.5, y.shape[-1], device=y.device) * (1 + y.abs().amax())

        return self.modules()[name].register_forward_hook(lambda _, args, y: shift(y))

    def unread(self, name: str) -> UnsupportedError:
        """Say that linear or experts `name` did not run."""
        return UnsupportedError(
            f"{name} does not run for every window of the calibration text, so its inputs are unknown",
            hint=f"add it to `exclude`, or use method: {PLAIN.name}",
        )

    def _left(self, name: str) -> Selected:
        return self.selected.get(name, _WHOLE)

    def linears(self) -> dict[str, torch.nn.Linear]:
        """Map the names of its linears to them."""
        return linears_of(self.module, self.name)

    def modules(self) -> dict[str, torch.nn.Module]:
        """Map the names of its linears and experts to them."""
        return {**self.linears(), **self.experts()}


class _CacheRecorder:
    """Stands where the cache does: keeps the largest magnitudes of what a run caches and hands it back.

    A run that stops in front of where the layer caches, or behind it, leaves those of the run before it.
    """

    def __init__(self) -> None:
        self.peaks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ended = False  # the run of which `peaks` are

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Record `key` and `value`, [1, kv_heads, tokens, channels]."""
        if self.ended:
            self.peaks.clear()
            self.ended = False
        self.peaks.append((key.abs().amax((0, 2)), value.abs().amax((0, 2))))
        return key, value


def copy_with_weights(
    module: _Module, prefix: str, checkpoint: Checkpoint, sources: Mapping[str, ParameterSource], names: Sequence[str]
) -> _Module:
    """Copy `module`, which stands at `prefix` in the model, and give its parameters and buffers `names` their numbers.

    Numbers come from `checkpoint`, as `sources` says of the whole model; floating ones become fp32. Others have none.
    """
    twin = copy.deepcopy(module)
    tensors = {}
    for name in names:
        tensor = load(checkpoint, sources[f"{prefix}.{name}" if prefix else name])
        tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    twin.load_state_dict(tensors, strict=False, assign=True)
    return twin.requires_grad_(False)


def linears_of(module: torch.nn.Module, name: str) -> dict[str, torch.nn.Linear]:
    """Find the linears of a layer called `name`, by their parameters in the checkpoint."""
    return {
        f"{name}.{local}.weight": part for local, part in module.named_modules() if isinstance(part, torch.nn.Linear)
    }


def _is_setting(name: str, value: object) -> bool:
    """Say whether an attribute of a module may decide what it calls; transformers' `layer_idx` is a place in caches."""
    return name != "layer_idx" and isinstance(value, bool | int | float | str | None)


def fast(linears: Iterable[torch.nn.Linear]) -> AbstractContextManager[None]:
    """Let `linears` multiply in bf16 where their device does that faster, and attention in layers that they are of.

    What is summed over tokens is coarser than that: gradients of few tokens, and what rounded weights change in what a
    linear reads.
    """
    given = list(linears)
    return narrowed(given) if all(not each.weight.is_cpu or has_bf16() for each in given) else nullcontext()


class _Bf16Product:
    """What stands in for the `forward` of a linear that is narrowed."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        self.linear = linear
        self.held = linear.weight, linear.weight.bfloat16()

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the linear makes of `input`."""
        weight, narrow = self.held
        if self.linear.weight is not weight:  # it was changed
            _, narrow = self.held = self.linear.weight, self.linear.weight.bfloat16()
        y = torch.nn.functional.linear(input.bfloat16(), narrow).float()
        return y if self.linear.bias is None else y + self.linear.bias


def _is_narrowed(module: torch.nn.Module) -> bool:
    """Say whether a linear of `module` is narrowed."""
    return any(isinstance(vars(each).get("forward"), _Bf16Product) for each in module.modules())


@contextmanager
def narrowed(linears: Iterable[torch.nn.Linear]) -> Iterator[None]:
    """Let `linears` multiply in bf16, forwards and backwards, with fp32 sums; what goes in and comes out is fp32.

    So does attention in runs of their layer that begin meanwhile. One that computes something else than a linear is
    left alone.
    """

    plain = [each for each in linears if type(each).forward is torch.nn.Linear.forward and "forward" not in vars(each)]
    for linear in plain:
        linear.forward = _Bf16Product(linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in plain:
            del linear.forward


def _hidden(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Take the hidden states from what a layer returns, which in some architectures is a tuple.

    They are laid out as those are that were kept and read again.
    """
    return (output[0] if isinstance(output, tuple) else output).contiguous()
