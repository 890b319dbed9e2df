"""From the skeleton of an encoder to a raw graph: whole sequences side by side in, an embedding or scores of each out.

A trace has one row of tokens, [1, T], of several sequences. What a model computes of a token alone is right for all;
attention and pooling are told where sequences begin, and positions come from outside. A head that scores reads the
first token of each sequence, the last one, or their mean, as a row of its own: [sequences, 1, hidden].
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint, Encoding
from llmforge.ir import dialect, interface
from llmforge.ir import graph as g
from llmforge.ir.operators import canonical, standard
from llmforge.trace.canonicalize import simplification, token_axes, tokenwise
from llmforge.trace.canonicalize.rewriting import insert
from llmforge.trace.export import capture, fallback, pattern, skeleton, weights
from llmforge.trace.export.pattern import Irregular
from llmforge.trace.hooks import experts, internals, languages, rotary
from llmforge.trace.hooks.encoder_attention import EncoderAttentionHook
from llmforge.trace.hooks.own_encoder import OwnEncoderAttention
from llmforge.trace.hooks.symbolic import emit

SEQUENCES = 3  # of the example inputs
TOKENS = 11
UNBOUNDED = 8192  # as in `strategy`
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
}
HEADS = {"cls": "cls", "bos": "cls", "mean": "mean"}  # what a head reads, as configurations name it → mode of pooling
SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize


class TracedEncoder(nn.Module):
    """The model with the inputs and outputs of the dialect (docs/dialect.md)."""

    def __init__(
        self, model: PreTrainedModel, attention: EncoderAttentionHook, tables: rotary.Tables, encoding: Encoding
    ) -> None:
        super().__init__()
        self.model = model
        self.rotary = tables
        self.typed = reads_token_types(model)
        self._attention, self._encoding = attention, encoding
        self._base = model if encoding.kind == "embedder" else getattr(model, model.base_model_prefix, None)
        if self._base is None:
            raise UnsupportedError("the model has no part that could be told from its head")
        self._hold = [self._base]  # apart from the module, so that it is no second child
        del self._base

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of `forward`, in its order."""
        types = (interface.TOKEN_TYPE_IDS,) if self.typed else ()
        return (interface.INPUT_IDS, interface.POSITION_IDS, interface.SEQUENCE_STARTS, *types)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, sequence_starts: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Trace one run: [1, T] tokens → embeddings [sequences, dimensions], or scores [sequences, labels]."""
        return self.run(input_ids, position_ids, sequence_starts, token_type_ids, learns=False)

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        sequence_starts: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        learns: bool,
    ) -> Tensor:
        """Run the model once; `learns`: only to see what it calls, before a trace."""
        same: Callable[[bool], None] = torch._check  # untyped in torch
        same(input_ids.shape[1] == position_ids.shape[1])  # one symbol for both, before anything asks
        self._attention.begin(sequence_starts, learns=learns)
        self.rotary.step.position_ids = position_ids
        self.rotary.step.text_lengths = sequence_starts.long()  # nothing of an encoder reads it
        base = self._hold[0]
        given: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        given |= {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        taken = inspect.signature(base.forward).parameters
        with self._attention.watching(position_ids), _positions(base, position_ids):
            given["attention_mask"] = torch.ones_like(input_ids)  # else positions are looked at for several sequences
            given = {name: value for name, value in given.items() if name in taken}
            output = base(**given)
        if not self._attention.attentions:
            raise UnsupportedError("no layer calls attention through transformers' interface")
        if self._encoding.kind == "embedder":
            return self._embed(output.last_hidden_state, sequence_starts)
        return self._score(base, output, sequence_starts)

    def _pool(self, hidden: Tensor, starts: Tensor, mode: str) -> Tensor:
        """[1, T, H] → [sequences, H]."""
        shape = (starts.shape[0] - 1, hidden.shape[2])
        if self._attention.learns:
            return hidden.new_zeros(shape)
        [pooled] = emit(
            canonical.PoolSequences, {"x": hidden, "sequence_starts": starts}, {"mode": mode}, [(hidden.dtype, shape)]
        )
        return pooled

    def _embed(self, hidden: Tensor, starts: Tensor) -> Tensor:
        x = torch.cat([self._pool(hidden, starts, mode) for mode in self._encoding.pooling.split("+")], dim=-1)
        for layer in self._encoding.dense:
            module: Any = self.model.get_submodule(layer.folder)
            x = ACTIVATIONS[layer.activation](module["linear"](x))
        if self._encoding.normalize:
            x = x / (x * x).sum(-1, keepdim=True).sqrt().clamp_min(SMALLEST_NORM)
        return x

    def _score(self, base: nn.Module, output: Any, starts: Tensor) -> Tensor:
        """Let the model's own head read one token of each sequence, [sequences, 1, H], of what `base` gave."""
        head = getattr(self.model, "score", None)
        if isinstance(head, nn.Linear):  # of decoders, which read a sequence with its last token
            last: Tensor = head(self._pool(output.last_hidden_state, starts, "last"))
            return last
        if (pooling := getattr(self.model.config, "classifier_pooling", "cls")) not in HEADS:
            raise UnsupportedError(
                f"its head reads a sequence by classifier_pooling {pooling!r}",
                hint="needed: a head behind llmforge::PoolSequences (docs/new-architecture.md)",
            )
        # The head takes its first token, or the mean of all of them, of one: it.
        picked = self._pool(output.last_hidden_state, starts, HEADS[pooling]).unsqueeze(1)
        given = {"last_hidden_state": picked}
        pooler: Any = getattr(base, "pooler", None)
        if isinstance(pooler, nn.Linear):  # of a token's row, the activation beside it (ALBERT)
            given["pooler_output"] = getattr(base, "pooler_activation", nn.Identity())(pooler(picked[:, 0]))
        elif isinstance(pooler, nn.Module):
            given["pooler_output"] = pooler(picked)
        own = base.forward
        base.forward = lambda *args, **kwargs: type(output)(**given)
        try:
            ids = torch.zeros(picked.shape[:2], dtype=torch.int64)
            scored: Tensor = self.model(input_ids=ids).logits
        finally:
            base.forward = own
        return scored


class _positions:  # noqa: N801  used as a function
    """Let tables of learned positions of `model` read these positions, for a while."""

    def __init__(self, model: nn.Module, position_ids: Tensor) -> None:
        self._tables, self._ids = position_tables(model), position_ids
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for table in self._tables.values():
            self._hooks.append(table.register_forward_pre_hook(functools.partial(_read, self._ids)))

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _read(position_ids: Tensor, table: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
    first = first_position(table)
    return (position_ids + first if first else position_ids,)


def position_tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """Find the tables of learned positions of `model`, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in ("position_embeddings", "position_embedding")
    }


def first_position(table: nn.Module) -> int:
    """Return the row of a table of positions that the first token reads: behind that of padding, where it has one."""
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def longest(model: nn.Module, context: int | None) -> int | None:
    """Return how many tokens a sequence may have; None: any number."""
    rows = [table.num_embeddings - first_position(table) for table in position_tables(model).values()]
    found = [*rows, *([] if context is None or rows else [context])]
    return min(found, default=None)


def reads_token_types(model: nn.Module) -> bool:
    """Say whether a model tells texts of a pair apart."""
    return any(
        isinstance(module, nn.Embedding) and module.num_embeddings > 1
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "token_type_embeddings"
    )


def trace(checkpoint: Checkpoint, encoding: Encoding) -> ir.Model:
    """Trace the encoder of `checkpoint`, and attach its weights.

    Where its attention cannot be substituted, the model's own is traced, and the metadata `interface.FALLBACK` of the
    graph says why.

    Raises:
        CheckpointError: a parameter has no tensor, or one of another shape.
        UnsupportedError: it cannot be traced.
    """
    try:
        return _checked(_traced(checkpoint, encoding, EncoderAttentionHook))
    except (UnsupportedError, VerificationError) as error:
        reason = error
    try:
        fallback.refuse_unprovable(checkpoint)
        graph = _traced(checkpoint, encoding, OwnEncoderAttention)
        graph.metadata_props[interface.FALLBACK] = reason.message
        return _checked(graph)
    except (UnsupportedError, VerificationError) as error:
        raise fallback.refused_too(reason, error) from error


def _checked(graph: ir.Model) -> ir.Model:
    dialect.check(graph)
    return graph


def _traced(checkpoint: Checkpoint, encoding: Encoding, hook: type[EncoderAttentionHook]) -> ir.Model:
    """Trace with this hook of attention, and attach the weights."""
    attention = hook(checkpoint.geometry.context or UNBOUNDED)
    with (
        internals.torch_threads(1),
        attention.registered(),
        internals.registered_experts(experts.NAME, experts.ExpertsHook()),
    ):
        model, mode = skeleton.build(checkpoint.config, attention.NAME, encoding)
        model.set_experts_implementation(experts.NAME)
        sources = weights.plan(model, checkpoint)
        weights.untie(model, sources)
        languages.settle(model)
        with (
            internals.third_party("tracing"),
            torch.no_grad(),
            capture.prepared(model, attention, functools.partial(TracedEncoder, encoding=encoding)) as traced,
        ):
            with mode:
                traced.run(*_inputs(traced), learns=True)
            graph = capture.translate(_export(traced), traced.inputs, [_output(encoding)])
    bound = checkpoint.geometry.context
    if isinstance(attention, OwnEncoderAttention):
        simplification.canonicalize(graph, weights={capture.MODEL + name for name in model.state_dict()})
        bound = attention.positions if attention.reads_distances else bound
    else:
        _canonicalize(graph)
    weights.attach(graph, capture.MODEL, model, checkpoint, sources)
    pattern.record(graph, Irregular("layers of encoders are all traced"))
    if (sparse := _dense_up_to(model)) is not None:
        bound = min(sparse, longest(model, bound) or sparse)
        interface.record_limit(graph, interface.TextLimit(bound, "it reads longer texts by blocks"))
    elif (tokens := longest(model, bound)) is not None:
        interface.record_limit(graph, interface.TextLimit(tokens, "its positions end there"))
    return graph


def _dense_up_to(model: nn.Module) -> int | None:
    """Return how many tokens a model reads with full attention that reads longer texts by blocks (BigBird).

    transformers changes such a model for good once it has read a short text, so that no run would show it.
    """
    config: Any = model.config
    if getattr(config, "attention_type", None) != "block_sparse":
        return None
    return int((5 + 2 * config.num_random_blocks) * config.block_size)  # BigBirdModel.forward


def _canonicalize(graph: ir.Model) -> None:
    """Bring a raw graph whose attention was substituted to the dialect."""
    simplification.canonicalize(graph)
    for product in standard.Gemm.all(graph):
        token_axes.multiply(product)
    for rotary_embedding in standard.RotaryEmbedding.all(graph):
        _turn_alone(graph, rotary_embedding)
    g.drop_unused(graph)
    simplification.name_nodes(graph)
    tokenwise.check(graph)


def _turn_alone(graph: ir.Model, layer: standard.RotaryEmbedding) -> None:
    """Let a RotaryEmbedding read each token as a row: ONNX Runtime refuses rows longer than its tables (1.31)."""
    node, width, dtype = layer.node, g.width(layer.x), layer.x.dtype

    def reshape(x: ir.Value, shape: list[int], dims: tuple[int | str, ...], kind: ir.DataType | None) -> ir.Value:
        name = f"shape_{'_'.join(map(str, shape))}".replace("-1", "all")
        target = g.initializer(graph, name, np.array(shape, np.int64))
        return insert(node, standard.Reshape, {"x": x, "shape": target}, dims=dims, dtype=kind)

    tokens = "sequence"
    x = reshape(layer.x, [-1, 1, width], (tokens, 1, width), dtype)
    ids = reshape(layer.position_ids, [-1, 1], (tokens, 1), layer.position_ids.dtype)
    inputs = {"x": x, "cos": layer.cos, "sin": layer.sin, "position_ids": ids}
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    turned = insert(node, standard.RotaryEmbedding, inputs, attributes, dims=(tokens, 1, width), dtype=dtype)
    g.replace_uses(layer.output, reshape(turned, [1, -1, width], (1, tokens, width), dtype))


def _output(encoding: Encoding) -> str:
    return interface.EMBEDDINGS if encoding.kind == "embedder" else interface.LOGITS


def _inputs(traced: TracedEncoder) -> tuple[Tensor, ...]:
    """Make example inputs of `TracedEncoder`."""
    ids, places, types = (torch.zeros(1, TOKENS, dtype=torch.int64) for _ in range(3))  # one twice would be one input
    return (ids, places, torch.zeros(SEQUENCES + 1, dtype=torch.int32), *([types] * traced.typed))


def _export(traced: TracedEncoder) -> torch.export.ExportedProgram:
    """Export `traced` with any number of tokens and sequences."""
    tokens, starts = torch.export.Dim("sequence"), torch.export.Dim("starts", min=3)
    dims = [{1: tokens}, {1: tokens}, {0: starts}, *([{1: tokens}] * traced.typed)]
    program = torch.export.export(
        traced,
        _inputs(traced),
        dynamic_shapes=tuple(dims),
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    capture.concatenate(program)
    capture.fold(program)
    return program
