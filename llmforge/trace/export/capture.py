"""From a skeleton to a raw graph: a dry run that learns the caches, torch.export, translation to ONNX."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import onnx_ir as ir
import torch
from onnxscript import opset18
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmforge.base.errors import UnsupportedError
from llmforge.ir import interface
from llmforge.trace.export import concatenations, depth, untranslated
from llmforge.trace.export.pattern import Irregular, Pattern
from llmforge.trace.hooks import gated_norms, internals, lightning, looped_experts, modules, norms, recurrent, rotary
from llmforge.trace.hooks.attention import AttentionHook, CacheLayer

Shapes = Sequence[Mapping[str, tuple[int, ...]]]  # of the cache's parts, layer by layer, without batch and capacity

OPSET, IR_VERSION = 24, 12  # ONNX 1.19, which brought TensorScatter and this opset
# Sizes of the example inputs: all different, so that no two dimensions are taken for one, and none 0 or 1, which
# torch.export would take for a constant.
BATCH, SEQUENCE, CAPACITY, ROWS = 2, 3, 7, 5
SOFTPLUS_THRESHOLD = 20.0  # torch's default: e⁻²⁰ < 20 · 2⁻²⁴, so that fp32 has log(1 + eˣ) = x beyond it
MODEL = "model."  # the attribute of `Traced` that holds the model: prefix of every parameter's name
REGISTRATION_LOGGER = "torch.onnx._internal.exporter._registration"  # says that torchvision is not installed


# Inputs of `Traced.forward`, in its order; the caches follow.
INPUTS = (
    interface.INPUT_IDS,
    interface.POSITION_IDS,
    interface.PAST_LENGTHS,
    interface.LENGTHS,
    interface.TEXT_LENGTHS,
    interface.LOGITS_ROWS,
)


class _Selection:
    """The rows that get logits; apart from the module, whose attributes torch.export does not let a trace set."""

    rows: Tensor | None = None

    def apply(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep the selected rows of the head's input [B, S, hidden]; all of them in a dry run."""
        return inputs if self.rows is None else (inputs[0].index_select(1, self.rows), *inputs[1:])


class Traced(nn.Module):
    """The model with the inputs and outputs of the canonical dialect (docs/dialect.md)."""

    def __init__(self, model: PreTrainedModel, attention: AttentionHook, tables: rotary.Tables) -> None:
        super().__init__()
        self.model = model
        self.rotary = tables
        self._attention = attention
        self._selection = _Selection()
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None:
            raise UnsupportedError("the model has no output embedding that llmforge could find")
        head.register_forward_pre_hook(self._selection.apply)
        self._cache = internals.cache_argument(model)

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_lengths: Tensor,
        lengths: Tensor,
        text_lengths: Tensor,
        past: Sequence[Any],
    ) -> tuple[Tensor, Sequence[CacheLayer]]:
        """Run the model once; `past` holds the cache tensors of each layer, or None in a dry run."""
        cache = internals.own_cache(self.model, self._attention.step(past, past_lengths, lengths))
        self.rotary.step.position_ids, self.rotary.step.text_lengths = position_ids, text_lengths
        self._attention.places.position_ids = position_ids
        with self._attention.uniform, self._attention.places:
            given = {"input_ids": input_ids, "position_ids": position_ids, self._cache: cache}
            output = self.model(**given, use_cache=True)
        for layer in self._attention.layers:
            layer.complete()
        if not any(layer.shapes or layer.present for layer in self._attention.layers):
            raise UnsupportedError(
                "no layer caches keys and values or a state",
                hint="needed: a model that takes transformers' cache, or an operator with the state that it keeps",
            )
        return output.logits, self._attention.layers

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_lengths: Tensor,
        lengths: Tensor,
        text_lengths: Tensor,
        logits_rows: Tensor,
        caches: list[dict[str, Tensor]],
    ) -> tuple[Tensor, list[Tensor]]:
        """Trace one step: logits [batch, rows, vocabulary] and the caches after it."""
        self._selection.rows = logits_rows
        logits, layers = self.run(input_ids, position_ids, past_lengths, lengths, text_lengths, caches)
        return logits, [layer.present[part] for layer, parts in zip(layers, caches, strict=True) for part in parts]


def capture(
    model: PreTrainedModel, mode: internals.FakeTensorMode, attention: AttentionHook, layers: int, *, shorten: bool
) -> tuple[ir.Model, Pattern | Irregular]:
    """Trace one step of `model`, whose fake parameters live in `mode`; initializers are named `MODEL` + parameter.

    The model has `layers` layers. Where they provably repeat and `shorten` allows it, only the first of them are in the
    graph: as many as the pattern, which is returned, wants traced.

    Raises:
        UnsupportedError: it cannot be traced.
    """
    with internals.third_party("tracing"), torch.no_grad(), prepared(model, attention) as traced:
        shapes = dry_run(traced, mode, layers)
        longest = attention.positions // 2 - 1 if attention.bounded else None
        pattern = _pattern(traced, mode, shapes) if shorten else Irregular("all layers were asked for")
        if isinstance(pattern, Irregular):
            return _translate(_export(traced, shapes, longest), shapes), pattern
        shapes = shapes[: pattern.traced]
        with depth.only(depth.stack_of(model, layers)[1], pattern.traced):
            return _translate(_export(traced, shapes, longest), shapes), pattern


@contextmanager
def prepared(model: PreTrainedModel, attention: AttentionHook) -> Iterator[Traced]:
    """Substitute what `model` computes by what the dialect says, and give it the dialect's inputs."""
    norms.substitute(model)
    gated_norms.substitute(model)
    modules.substitute(model)
    looped_experts.substitute(model)
    with attention.tables(model) as tables, recurrent.substituted(model, attention):
        attention.choose(model, tables)
        lightning.substitute(model, attention)
        yield Traced(model, attention, tables)


def dry_run(traced: Traced, mode: internals.FakeTensorMode, layers: int) -> Shapes:
    """Run `traced` without numbers, which tells what each of its layers caches."""
    with mode:
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
        lengths = torch.zeros(BATCH, dtype=torch.int32)
        _, cached = traced.run(ids, ids, lengths, lengths, lengths.long(), [None] * layers)
    return [layer.shapes for layer in cached]  # empty where a layer caches nothing


def _pattern(traced: Traced, mode: internals.FakeTensorMode, shapes: Shapes) -> Pattern | Irregular:
    """Find how the layers of `traced`, each with a cache of its own, repeat; or why that cannot be proven."""
    if not all(shapes):
        return Irregular(f"{sum(not shape for shape in shapes)} of {len(shapes)} layers cache nothing")
    try:
        name, stack = depth.stack_of(traced.model, len(shapes))
        with mode:
            return depth.find(traced, name, stack, lambda count: _step(traced, shapes[:count]))
    except Irregular as reason:
        return reason


def _step(traced: Traced, shapes: Shapes) -> depth.ExampleStep:
    """Make a step of `traced` on the example inputs."""
    inputs = _inputs(shapes)
    *given, caches = inputs
    parts = [tuple(cache.values()) for cache in caches]
    return depth.ExampleStep(dict(zip(INPUTS, given, strict=True)), parts, lambda: traced(*inputs))


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Translate softplus without torch's threshold, beyond which fp32 has x for log(1 + eˣ) anyway."""
    if beta != 1.0 or threshold < SOFTPLUS_THRESHOLD:
        raise UnsupportedError(f"softplus with beta {beta} and threshold {threshold}")
    return opset18.Softplus(x)


def _vector_norm(x: Any, ord: float = 2.0, dim: Sequence[int] = (), keepdim: bool = False, dtype: int = -1) -> Any:
    """Translate Σ|x| and √Σx² along axes into operators of the dialect."""
    if float(ord) not in (1.0, 2.0) or not dim:
        raise UnsupportedError(f"a norm of order {ord} along {list(dim) or 'all axes'}")
    axes = opset18.Constant(value_ints=list(dim))
    if float(ord) == 1.0:
        return opset18.ReduceSum(opset18.Abs(x), axes, keepdims=int(keepdim))
    return opset18.Sqrt(opset18.ReduceSum(opset18.Mul(x, x), axes, keepdims=int(keepdim)))


def _inputs(shapes: Shapes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[dict[str, Tensor]]]:
    """Make example inputs of `Traced`."""
    caches = [{part: torch.empty(_cache_shape(part, shape)) for part, shape in parts.items()} for parts in shapes]
    return (
        torch.zeros(BATCH, SEQUENCE, dtype=torch.int64),
        torch.zeros(BATCH, SEQUENCE, dtype=torch.int64),
        torch.zeros(BATCH, dtype=torch.int32),
        torch.zeros(BATCH, dtype=torch.int32),
        torch.zeros(BATCH, dtype=torch.int64),
        torch.zeros(ROWS, dtype=torch.int64),
        caches,
    )


def _export(traced: Traced, shapes: Shapes, longest: int | None) -> torch.export.ExportedProgram:
    """Export `traced` with dynamic batch, sequence, capacity and rows; sequence and capacity up to `longest`."""
    batch, rows = (torch.export.Dim(name) for name in ("batch", "rows"))
    sequence, capacity = (torch.export.Dim(name, max=longest) for name in ("sequence", "capacity"))
    inputs = _inputs(shapes)
    dims = (
        {0: batch, 1: sequence},
        {0: batch, 1: sequence},
        {0: batch},
        {0: batch},
        {0: batch},
        {0: rows},
        [
            {part: {0: batch} if part in interface.STATES else {0: batch, 2: capacity} for part in parts}
            for parts in shapes
        ],
    )
    program = torch.export.export(
        traced, inputs, dynamic_shapes=dims, strict=False, prefer_deferred_runtime_asserts_over_guards=True
    )
    concatenations.concatenate(program)
    untranslated.fold(program)
    return program


def _cache_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Add batch, and capacity where there is one, to the shape of a part of a cache."""
    return (BATCH, *shape) if part in interface.STATES else (BATCH, shape[0], CAPACITY, shape[1])


def _translate(program: torch.export.ExportedProgram, shapes: Sequence[Mapping[str, object]]) -> ir.Model:
    """Translate to ONNX, unoptimized: its optimizer would bake transposed weights and lose parameter names."""
    inputs = [*INPUTS]
    outputs = [interface.LOGITS]
    for layer, parts in enumerate(filter(None, shapes)):
        inputs += [interface.past_part(layer, part) for part in parts]
        outputs += [interface.present_part(layer, part) for part in parts]
    with (
        warnings.catch_warnings(),
        internals.quiet(REGISTRATION_LOGGER, logging.ERROR),
        internals.idle_decomposition_skipped(),
        internals.translations_listed(),
    ):
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        translated = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            input_names=inputs,
            output_names=outputs,
            custom_translation_table={
                torch.ops.aten.softplus.default: _softplus,
                torch.ops.aten.linalg_vector_norm.default: _vector_norm,
            },
        )
    translated = cast(torch.onnx.ONNXProgram, translated)  # None without `dynamo` alone
    translated.model.ir_version = IR_VERSION
    return translated.model
