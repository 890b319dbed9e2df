"""The private parts of torch and transformers that tracing needs, each with the reason; both are pinned exactly.

Everything else that `llmforge.trace` calls is public. A test checks that each of these still exists.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from onnxscript._internal.values import TracedOnnxFunction
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.onnx._internal.exporter import _fx_passes, _registration
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.utils._python_dispatch import _disable_current_modes
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import GeneralInterface

from llmforge.base.errors import ForgeError, UnsupportedError

_T = TypeVar("_T", bound=torch.Tensor)
Function = Callable[..., Any]
Replacement = Callable[[str, Function], Function | None]  # a function and its name → what stands for it, if anything


def fake_mode() -> FakeTensorMode:
    """Make a mode under which tensors have shapes and no memory.

    Private: torch offers no public way to give a module fake parameters before `torch.export`. Parameters on the
    meta device do not do: torch.export then finds two devices, because buffers (rotary frequencies) stay real.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def without_storage(kind: type[_T], shape: Sequence[int], dtype: torch.dtype) -> _T:
    """Make a tensor of a class of ours on the CPU, of which torch holds no numbers.

    Private: what PyTorch's notes on extending it make such tensors with.
    """
    made: _T = torch.Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype)
    return made


def without_torch_function() -> AbstractContextManager[Any]:
    """Let torch treat tensors of our classes as its own for a while; private, as above."""
    blocked: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return blocked


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute on `count` torch threads, and give the process its own setting back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet(logger: str, level: int) -> Iterator[None]:
    """Let `logger` log nothing below `level` for a while."""
    named = logging.getLogger(logger)
    before = named.level
    named.setLevel(level)
    try:
        yield
    finally:
        named.setLevel(before)


@contextmanager
def idle_decomposition_skipped() -> Iterator[None]:
    """Let `torch.onnx.export` leave a program alone that decomposing would only trace once more.

    Private: it always decomposes, which takes as long as the export did and, where every operator has a translation
    and writes into none of its inputs, gives the same operators under other names.
    """
    decompose = _fx_passes.decompose_with_registry

    def skip(program: torch.export.ExportedProgram, registry: ONNXRegistry) -> torch.export.ExportedProgram:
        return program if _translates(program, registry) else decompose(program, registry)

    _fx_passes.decompose_with_registry = skip  # type: ignore[assignment]
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = decompose


@contextmanager
def translations_listed() -> Iterator[None]:
    """Let `torch.onnx.export` list the translations that it knows without parsing their source.

    Private: it parses the source of all, a few hundred, for the name of a domain that nothing reads; of those that a
    program needs it does so again.
    """
    translations: Any = _registration.onnxscript_apis  # type: ignore[attr-defined]
    listed = translations.get_torchlib_ops

    def unparsed() -> Any:
        parsed = TracedOnnxFunction.function_ir
        TracedOnnxFunction.function_ir = property(lambda function: function.opset)  # it has a domain
        try:
            return listed()
        finally:
            TracedOnnxFunction.function_ir = parsed

    translations.get_torchlib_ops = unparsed
    try:
        yield
    finally:
        translations.get_torchlib_ops = listed


def _translates(program: torch.export.ExportedProgram, registry: ONNXRegistry) -> bool:
    """Say whether every operator of `program` has a translation of its own, and another trace would keep it as it is.

    It would not where an operator writes into an input, or counts an axis from the end.
    """
    known = {metas[0].fx_target for metas in registry.functions.values()}
    modules = [each for each in program.graph_module.modules() if each is not program.graph_module]
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return not modules and all(node.target in known and _is_kept(node) for node in calls)


def _is_kept(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    schema = node.target._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    axes = [value for name, value in given.items() if name.startswith(("dim", "axis")) and isinstance(value, int)]
    return not schema.is_mutable and all(axis >= 0 for axis in axes)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a progress bar of its own while it loads."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def third_party(stage: str) -> Iterator[None]:
    """Refuse the architecture for whatever its model code, or an exporter that runs it, raises.

    Raises:
        UnsupportedError: with the reason; our own errors pass as they are.
    """
    try:
        with quiet("torch._subclasses.fake_tensor", logging.CRITICAL):  # logs the errors that it raises
            yield
    except ForgeError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise UnsupportedError(
            f"{stage} ends with {type(error).__name__}: {lines[0]}",
            hint="needed: a hook for the module that raises it, or code that torch.export takes "
            "(docs/new-architecture.md)",
        ) from error


@contextmanager
def real_tensors() -> Iterator[None]:
    """Leave the modes of an enclosing trace, so that tensors made inside hold numbers and are not recorded.

    Private: masks, rotary tables and probes are evaluated from inside the model's forward pass.
    """
    with _disable_current_modes(), torch.no_grad():
        yield


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers on the meta device, and leave buffers alone.

    Replaces a method of `torch.nn.Module`: `torch.device("meta")` would take the buffers too, and what a model
    computes for them in its constructor (frequencies, scales) would be lost.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and not param.is_meta:  # a tied parameter is on meta already: keep it shared
            self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextmanager
def _registered(registry: type[GeneralInterface], name: str, function: Function) -> Iterator[None]:
    """Register `function` in a public registry of transformers, and undo it after.

    Private: the registries can be added to, not removed from, and give what was added precedence over their own.
    """
    before = registry._global_mapping.get(name)
    registry.register(name, function)
    try:
        yield
    finally:
        if before is None:
            del registry._global_mapping[name]
        else:
            registry.register(name, before)


@contextmanager
def registered(name: str, attention: Function, mask: Function) -> Iterator[None]:
    """Register an attention implementation and its mask for a while."""
    with _registered(AttentionInterface, name, attention), mask_replaced(name, mask):
        yield


def mask_replaced(name: str, mask: Function) -> AbstractContextManager[None]:
    """Let `mask` make the masks of attention implementation `name` for a while."""
    return _registered(AttentionMaskInterface, name, mask)


def registered_experts(name: str, experts: Function) -> AbstractContextManager[None]:
    """Register an implementation of experts for a while."""
    return _registered(ExpertsInterface, name, experts)


@contextmanager
def functions_replaced(model: nn.Module, replacement: Replacement) -> Iterator[None]:
    """Replace functions of the source files of `model` for a while, by what `replacement` makes of them."""
    files = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
    originals = [
        (file, name, function, new)
        for file in files.values()
        for name, function in vars(file).items()
        if inspect.isfunction(function) and (new := replacement(name, function)) is not None
    ]
    for file, name, _, new in originals:
        setattr(file, name, new)
    try:
        yield
    finally:
        for file, name, function, _ in originals:
            setattr(file, name, function)


def own_cache(model: nn.Module, cache: Cache) -> Cache:
    """Make `cache` one of the class of caches that a source file of `model` defines and wants, where there is one.

    Private: models test for their class by `isinstance`. What is not of transformers' caches stays to be asked for.
    """
    files = {type(module).__module__ for module in model.modules()}
    own = [
        kind
        for file in files
        for kind in vars(sys.modules[file]).values()
        if isinstance(kind, type) and issubclass(kind, Cache) and kind.__module__ == file
    ]
    if len(own) == 1:
        made = own[0].__new__(own[0])
        vars(made).update({**vars(own[0]()), **vars(cache)})
        return made
    return cache


def cache_argument(model: nn.Module) -> str:
    """Name the argument by which `model` takes transformers' cache."""
    taken = inspect.signature(model.forward).parameters
    names = ("past_key_values", "cache_params")  # the latter of pure state space models
    return next((name for name in names if name in taken), names[0])


def takes_attention(config: PretrainedConfig) -> bool:
    """Say whether the causal language model of `config` calls attention through transformers' interface.

    Private: transformers tells by a class method. A configuration without a model is left to the constructor.
    """
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model is None or bool(model._can_set_attn_implementation())


def mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    """Return the fake mode that a fake parameter lives in."""
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


@dataclass(frozen=True)
class ConversionGroup:
    """Tensors of a checkpoint that make one parameter, or, through a converter, several."""

    target: str  # the parameter; with a converter the first of those that it makes
    keys: tuple[str, ...]
    patterns: tuple[str, ...]  # of the converter, one a key; none without one
    converter: WeightConverter | None

    def pieces(self) -> list[ConversionGroup]:
        """Split a group of experts, one tensor each, into groups that make one slice of the first axis each.

        Only where the converter stacks tensors along the first axis and joins what it stacked along another: then the
        slices are independent, and one can be made without the others. Otherwise the group itself is all there is.
        """
        first, *rest = self._operations()
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        if not stacks or not all(isinstance(later, Concatenate) and later.dim > 0 for later in rest):
            return [self]
        keys: dict[str, list[str]] = {}
        for key, pattern in zip(self.keys, self.patterns, strict=True):
            keys.setdefault(pattern, []).append(key)
        if len({len(members) for members in keys.values()}) != 1:
            return [self]
        return [
            replace(self, keys=tuple(members), patterns=tuple(keys)) for members in zip(*keys.values(), strict=True)
        ]

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Name the tensors [N, K] that lie on top of each other in each slice of the parameter.

        (): it is not made so.
        """
        first, *rest = self._operations()
        if not isinstance(first, MergeModulelist) or any(later.dim != 1 for later in rest if later is not None):
            return ()
        pieces = self.pieces()
        if pieces == [self] or len(rest) > 1 or (not rest and len(pieces[0].keys) > 1):
            return ()
        return tuple(piece.keys for piece in pieces)

    def _operations(self) -> list[Any]:
        return list(self.converter.operations) if self.converter is not None else [None]


def sources_by_parameter(model: PreTrainedModel, keys: Sequence[str]) -> dict[str, ConversionGroup]:
    """Group the tensors `keys` of a checkpoint by the parameter that transformers would load them into.

    Private: transformers renames and converts while it loads, and offers no way to ask where a tensor goes. This
    follows `convert_and_load_state_dict_in_model`. Tensors that the model has no place for are left out.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    groups: dict[str, ConversionGroup] = {}
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if target not in known and key in known:
            target, pattern = key, None
        if target not in known:
            continue
        if pattern is None:
            groups[target] = ConversionGroup(target, (key,), (), None)
        else:
            group = groups.get(target, ConversionGroup(target, (), (), by_pattern[pattern]))
            groups[target] = replace(group, keys=(*group.keys, key), patterns=(*group.patterns, pattern))
    return groups
