"""From a skeleton to a raw graph: a dry run that learns the caches, torch.export, translation to ONNX."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmforge import interface
from llmforge.errors import UnsupportedError
from llmforge.trace import internals, norms, rotary
from llmforge.trace.attention import Attention, CacheShape, Layer

OPSET, IR_VERSION = 24, 12  # ONNX 1.19, which brought TensorScatter and this opset
# Sizes of the example inputs: all different, so that no two dimensions are taken for one, and none 0 or 1, which
# torch.export would take for a constant.
BATCH, SEQUENCE, CAPACITY, ROWS = 2, 3, 7, 5
MODEL = "model."  # the attribute of `Traced` that holds the model: prefix of every parameter's name
REGISTRATION_LOGGER = "torch.onnx._internal.exporter._registration"  # says that torchvision is not installed


class _Selection:
    """The rows that get logits; apart from the module, whose attributes torch.export does not let a trace set."""

    rows: Tensor | None = None

    def apply(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep the selected rows of the head's input [B, S, hidden]; all of them in a dry run."""
        return inputs if self.rows is None else (inputs[0].index_select(1, self.rows), *inputs[1:])


class Traced(nn.Module):
    """The model with the inputs and outputs of the canonical dialect (docs/dialect.md)."""

    def __init__(self, model: PreTrainedModel, attention: Attention, tables: rotary.Tables) -> None:
        super().__init__()
        self.model = model
        self.rotary = tables
        self._attention = attention
        self._selection = _Selection()
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None:
            raise UnsupportedError("the model has no output embedding that llmforge could find")
        head.register_forward_pre_hook(self._selection.apply)

    def run(
        self, input_ids: Tensor, position_ids: Tensor, past_lengths: Tensor, past: Sequence[Any]
    ) -> tuple[Tensor, Sequence[Layer]]:
        """Run the model once; `past` holds the cache tensors of each layer, or None in a dry run."""
        cache = self._attention.step(past, past_lengths)
        with self._attention.ones:
            output = self.model(input_ids=input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
        return output.logits, self._attention.layers

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_lengths: Tensor,
        logits_rows: Tensor,
        caches: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[Tensor]]:
        """Trace one step: logits [batch, rows, vocabulary] and the caches after it."""
        self._selection.rows = logits_rows
        logits, layers = self.run(input_ids, position_ids, past_lengths, caches)
        presents: list[Tensor] = []
        for index, layer in enumerate(layers):
            if layer.present is None:
                raise UnsupportedError(f"layer {index} caches keys and values that no attention reads")
            presents += layer.present
        return logits, presents


Substitution = Callable[[nn.Module, int | None], AbstractContextManager[rotary.Tables]]


def capture(
    model: PreTrainedModel,
    mode: internals.FakeTensorMode,
    attention: Attention,
    context: int | None,
    layers: int,
    substituted: Substitution = rotary.substituted,
) -> ir.Model:
    """Trace one step of `model`, whose fake parameters live in `mode`; initializers are named `MODEL` + parameter.

    The model has `layers` layers and contexts up to `context` tokens (None: its configuration does not say);
    `substituted` substitutes its rotary embedding.

    Raises:
        UnsupportedError: it cannot be traced.
    """
    with internals.third_party("tracing"), torch.no_grad():
        norms.substitute(model)
        with substituted(model, context) as tables:
            traced = Traced(model, attention, tables)
            with mode:
                ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
                lengths = torch.zeros(BATCH, dtype=torch.int32)
                _, cached = traced.run(ids, ids, lengths, [None] * layers)
            return _translate(_export(traced, [layer.shape() for layer in cached]), layers)


def _export(traced: Traced, shapes: Sequence[CacheShape]) -> torch.export.ExportedProgram:
    """Export `traced` with dynamic batch, sequence, capacity and rows."""
    batch, sequence, capacity, rows = (torch.export.Dim(name) for name in ("batch", "sequence", "capacity", "rows"))
    caches = [
        (
            torch.empty(BATCH, shape.kv_heads, CAPACITY, shape.key_dim),
            torch.empty(BATCH, shape.kv_heads, CAPACITY, shape.value_dim),
        )
        for shape in shapes
    ]
    inputs = (
        torch.zeros(BATCH, SEQUENCE, dtype=torch.int64),
        torch.zeros(BATCH, SEQUENCE, dtype=torch.int64),
        torch.zeros(BATCH, dtype=torch.int32),
        torch.zeros(ROWS, dtype=torch.int64),
        caches,
    )
    cache_dims = {0: batch, 2: capacity}
    dims = (
        {0: batch, 1: sequence},
        {0: batch, 1: sequence},
        {0: batch},
        {0: rows},
        [(cache_dims, cache_dims)] * len(shapes),
    )
    return torch.export.export(
        traced, inputs, dynamic_shapes=dims, strict=False, prefer_deferred_runtime_asserts_over_guards=True
    )


def _translate(program: torch.export.ExportedProgram, layers: int) -> ir.Model:
    """Translate to ONNX, unoptimized: its optimizer would bake transposed weights and lose parameter names."""
    inputs = [interface.INPUT_IDS, interface.POSITION_IDS, interface.PAST_LENGTHS, interface.LOGITS_ROWS]
    outputs = [interface.LOGITS]
    for layer in range(layers):
        inputs += [interface.past_key(layer), interface.past_value(layer)]
        outputs += [interface.present_key(layer), interface.present_value(layer)]
    with warnings.catch_warnings(), internals.quiet(REGISTRATION_LOGGER, logging.ERROR):
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        translated = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            input_names=inputs,
            output_names=outputs,
        )
    assert translated is not None
    translated.model.ir_version = IR_VERSION
    return translated.model
