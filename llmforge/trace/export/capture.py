"""From a skeleton to a raw graph: a dry run that learns the caches, torch.export, translation to ONNX."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import onnx_ir as ir
import torch
from onnxscript import opset18
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from llmforge.base.errors import UnsupportedError
from llmforge.ir import interface
from llmforge.trace.export import depth
from llmforge.trace.export.pattern import Irregular, Pattern
from llmforge.trace.hooks import internals, lightning, looped_experts, modules, norms, recurrent, rotary
from llmforge.trace.hooks.attention import AttentionHook, CacheLayer

H = TypeVar("H", bound=AttentionHook)
W = TypeVar("W", bound=nn.Module)
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
    with internals.third_party("tracing"), torch.no_grad(), prepared(model, attention, Traced) as traced:
        shapes = dry_run(traced, mode, layers)
        longest = attention.positions // 2 - 1 if attention.bounded else None
        pattern = _pattern(traced, mode, shapes) if shorten else Irregular("all layers were asked for")
        if isinstance(pattern, Irregular):
            return _translate(_export(traced, shapes, longest), shapes), pattern
        shapes = shapes[: pattern.traced]
        with depth.only(depth.stack_of(model, layers)[1], pattern.traced):
            return _translate(_export(traced, shapes, longest), shapes), pattern


@contextmanager
def prepared(
    model: PreTrainedModel, attention: H, wrap: Callable[[PreTrainedModel, H, rotary.Tables], W]
) -> Iterator[W]:
    """Substitute what `model` computes by what the dialect says, and `wrap` it, which gives it the dialect's inputs."""
    norms.substitute(model)
    norms.substitute_gated(model)
    modules.substitute(model)
    looped_experts.substitute(model)
    with attention.tables(model) as tables, recurrent.substituted(model, attention):
        attention.choose(model, tables)
        lightning.substitute(model, attention)
        yield wrap(model, attention, tables)


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
    inputs = example_inputs(shapes)
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


def example_inputs(shapes: Shapes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[dict[str, Tensor]]]:
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
    inputs = example_inputs(shapes)
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
    concatenate(program)
    fold(program)
    return program


def _cache_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Add batch, and capacity where there is one, to the shape of a part of a cache."""
    return (BATCH, *shape) if part in interface.STATES else (BATCH, shape[0], CAPACITY, shape[1])


def _translate(program: torch.export.ExportedProgram, shapes: Sequence[Mapping[str, object]]) -> ir.Model:
    inputs = [*INPUTS]
    outputs = [interface.LOGITS]
    for layer, parts in enumerate(filter(None, shapes)):
        inputs += [interface.past_part(layer, part) for part in parts]
        outputs += [interface.present_part(layer, part) for part in parts]
    return translate(program, inputs, outputs)


def translate(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """Translate to ONNX, unoptimized: its optimizer would bake transposed weights and lose parameter names."""
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
            input_names=[*inputs],
            output_names=[*outputs],
            custom_translation_table={
                torch.ops.aten.softplus.default: _softplus,
                torch.ops.aten.linalg_vector_norm.default: _vector_norm,
            },
        )
    translated = cast(torch.onnx.ONNXProgram, translated)  # None without `dynamo` alone
    translated.model.ir_version = IR_VERSION
    return translated.model


LACKING = (torch.ops.aten.erfinv.default,)  # the quantile of a normal distribution, of a sparsity (Gemma 3n)


def fold(program: torch.export.ExportedProgram) -> None:
    """Replace each scalar that an operator of `LACKING` makes of constants by its value; others are left."""
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if node.target in LACKING]:
        value = _constant_value(program, node)
        if not isinstance(value, Tensor) or value.dim():
            continue
        with graph.inserting_before(node):
            made = graph.call_function(
                torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _constant_value(program: torch.export.ExportedProgram, node: fx.Node) -> Any:
    """Compute what `node` makes; None where it depends on something else than constants of the program."""
    if node.op == "placeholder":
        name = program.graph_signature.inputs_to_lifted_tensor_constants.get(node.name)
        constant = None if name is None else program.constants.get(name)
        return None if internals.is_fake(constant) else constant
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    known = {source: _constant_value(program, source) for source in node.all_input_nodes}
    if any(value is None for value in known.values()):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    with internals.real_tensors():
        return node.target(*args, **kwargs)


_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.new_empty.default)


@dataclass(frozen=True)
class _Piece:
    """`source`, written to [start, stop) of dimension `dim`."""

    dim: int
    start: int
    stop: int
    source: fx.Node
    write: fx.Node


def concatenate(program: torch.export.ExportedProgram) -> None:
    """Replace every empty tensor of `program` that is then filled completely, along one dimension, by a `cat`.

    Fires where the empty tensor is sliced along one dimension only, each slice is written once and as a whole, the
    slices cover it without gap or overlap, and everything else reads it after the last write. Others stay.
    """
    graph = program.graph_module.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _EMPTY:
            continue
        slices = [user for user in node.users if user.target is _aten.slice.Tensor]
        readers = [user for user in node.users if user not in slices]
        pieces = sorted(filter(None, map(_piece, slices)), key=lambda piece: piece.start)
        if len(pieces) != len(slices) or not _cover(node, pieces):
            continue
        last = max((piece.write for piece in pieces), key=order.__getitem__)
        if any(order[reader] < order[last] for reader in readers):
            continue
        with graph.inserting_after(last):
            whole = graph.call_function(_aten.cat.default, ([piece.source for piece in pieces], pieces[0].dim))
        whole.meta = {**last.meta, "val": node.meta["val"]}
        for reader in readers:
            reader.replace_input_with(node, whole)
        for unused in (*(piece.write for piece in pieces), *slices, node):
            graph.erase_node(unused)
        changed = True
    if changed:
        program.graph_module.recompile()


def _piece(view: fx.Node) -> _Piece | None:
    """Read a slice that one `copy_` fills with a tensor of its own shape; None for anything else."""
    (write,) = view.users if len(view.users) == 1 else (None,)
    if write is None or write.target is not _aten.copy_.default or write.users or write.args[0] is not view:
        return None
    source = write.args[1]
    whole = view.args[0]
    if not isinstance(source, fx.Node) or not isinstance(whole, fx.Node):
        return None
    target: Any = view.meta["val"]
    given: Any = source.meta["val"]
    if given.shape != target.shape or given.dtype != target.dtype:
        return None
    given_or_default: list[Any] = [*view.args, *(whole, 0, None, None, 1)[len(view.args) :]]
    dim, start, stop, step = given_or_default[1:]
    size = whole.meta["val"].shape[dim] if isinstance(dim, int) else None
    if not (isinstance(dim, int) and isinstance(size, int) and isinstance(start, int | None) and step == 1):
        return None
    start = start or 0
    end = size if stop is None or not isinstance(stop, int) or stop > size else stop
    return _Piece(
        dim % target.dim(), start % size if start < 0 else start, end % size if end < 0 else end, source, write
    )


def _cover(node: fx.Node, pieces: list[_Piece]) -> bool:
    """Say whether `pieces`, in order, cover `node` along one dimension."""
    if not pieces or len({piece.dim for piece in pieces}) != 1:
        return False
    borders = [0, *(piece.stop for piece in pieces)]
    size = node.meta["val"].shape[pieces[0].dim]
    return [piece.start for piece in pieces] == borders[:-1] and borders[-1] == size
