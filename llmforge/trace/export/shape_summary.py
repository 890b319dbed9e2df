"""The layers of a configuration's model, for those who need no graph: no checkpoint is read.

The model is built without weights and run once without numbers, as a trace begins: parameters are counted on its
modules, and the dry run tells what each layer caches and how many experts a token takes. 80 layers take about a second
besides the import of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmforge.base.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class LayerShape:
    """One layer: parameters by what is done with them, and what it caches, by part (`llmforge.ir.interface`).

    A part "key" or "value" is (kv_heads, head_dim), a state its shape without the batch.
    """

    matrices: int
    vectors: int
    width: int  # elements that its widest product yields for a token, gate and up together
    expert: int  # parameters of one routed expert
    experts: int
    chosen: int
    caches: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ShapeSummary:
    """A model: its layers, and the parameters around them, shared ones once."""

    layers: tuple[LayerShape, ...]
    tables: int  # parameters that are looked up: of tokens, and of positions where they are learned
    head: int  # 0 where it is the table of tokens
    matrices: int  # of other products outside of the layers
    vectors: int


def summarize(config: PretrainedConfig, layers: int, context: int | None) -> ShapeSummary:
    """Summarize the model of `config`, which has `layers` layers and is made for `context` tokens (None: not bounded).

    Raises:
        UnsupportedError: the frontend cannot build it, or cannot tell its layers.
    """
    import torch

    from llmforge.trace.export import capture, strategy
    from llmforge.trace.export.pattern import Irregular
    from llmforge.trace.hooks import internals

    way, chosen = strategy.substituted(config, context), _Chosen()
    with way.model(config, chosen) as (model, mode):
        try:
            stack = _stack(model, layers)
        except Irregular as error:
            raise UnsupportedError(f"the layers of {config.model_type} cannot be told apart: {error}") from error
        counted = [_count(layer) for layer in stack]
        around = _around(model, stack)
        with (
            internals.third_party("running the model without numbers"),
            torch.no_grad(),
            capture.prepared(model, way.attention, capture.Traced) as traced,
        ):
            shapes = capture.dry_run(traced, mode, layers)
    found: list[LayerShape] = []
    each = layers // len(stack)
    for index, (counts, layer) in enumerate(zip(counted, stack, strict=True)):
        first, *others = shapes[index * each : (index + 1) * each]
        found.append(LayerShape(*counts, chosen.of(layer), dict(first)))
        found += [LayerShape(0, 0, 0, 0, 0, 0, dict(shape)) for shape in others]
    return ShapeSummary(tuple(found), *around)


def _stack(model: nn.Module, layers: int) -> nn.ModuleList:
    """Find the modules that are the layers of `model`, each one or, in LongCat, two with caches of their own.

    Parameters of a module are counted with the first of its layers.
    """
    from llmforge.trace.export import depth
    from llmforge.trace.export.pattern import Irregular

    try:
        return depth.stack_of(model, layers)[1]
    except Irregular:
        if layers % 2 == 0:
            with suppress(Irregular):
                return depth.stack_of(model, layers // 2)[1]
        raise


class _Chosen:
    """Stands in for the computation of experts, and remembers how many of each module a token takes."""

    def __init__(self) -> None:
        self._by_module: dict[int, int] = {}

    def __call__(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return something of the shape of what the experts would give."""
        self._by_module[id(module)] = ids.shape[-1]
        return x.clone()

    def of(self, layer: nn.Module) -> int:
        """Return how many experts a token takes in `layer`; 0 where it has none."""
        return max((self._by_module.get(id(module), 0) for module in layer.modules()), default=0)


def _count(layer: nn.Module) -> tuple[int, int, int, int, int]:
    """Count the parameters of products and of vectors of `layer`, its widest row, those of an expert, its experts."""
    from llmforge.trace.hooks.experts import marked

    expert = experts = 0
    routed: set[int] = set()
    for module in layer.modules():
        if marked(module):
            held = list(module.parameters())
            routed |= {id(parameter) for parameter in held}
            experts = held[0].shape[0]
            expert = sum(parameter.numel() for parameter in held) // experts
    rest = [parameter for parameter in layer.parameters() if id(parameter) not in routed]
    matrices = sum(parameter.numel() for parameter in rest if parameter.dim() >= 2)
    width = 2 * max((parameter.shape[0] for parameter in rest if parameter.dim() == 2), default=0)
    return matrices, sum(parameter.numel() for parameter in rest if parameter.dim() < 2), width, expert, experts


def _around(model: Any, stack: nn.ModuleList) -> tuple[int, int, int, int]:
    """Count what stands outside of the layers: tables, head, other matrices, vectors."""
    from torch import nn

    inside = {id(parameter) for parameter in stack.parameters()}
    tables = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
        if id(parameter) not in inside
    }
    output = model.get_output_embeddings()
    heads = {} if output is None else {id(parameter): parameter for parameter in output.parameters()}
    head = sum(each.numel() for key, each in heads.items() if key not in tables and each.dim() >= 2)
    counted = inside | set(tables) | {key for key, each in heads.items() if each.dim() >= 2}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in counted]
    matrices = sum(parameter.numel() for parameter in rest if parameter.dim() >= 2)
    return sum(tables.values()), head, matrices, sum(each.numel() for each in rest if each.dim() < 2)
