"""EAGLE-3 heads: their model, written for this trace, its graph in the dialect, and what the graph is held to.

    x = fc(hidden_states) + draft_states            # one of the two is 0 at each place
    h = x + attention([norm(embedding), hidden_norm(x)])
    next_draft_states = h + mlp(norm(h)),  logits = lm_head(norm(next_draft_states))

Attention, norms and MLP are transformers' own of Llama, and are substituted as those of any model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint.eagle3 import LAYERS_READ, Eagle3Head
from llmforge.checkpoint.safetensors_file import TensorEntry
from llmforge.ir import interface
from llmforge.trace.export import capture, pattern, skeleton, strategy, weights
from llmforge.trace.export.pattern import Irregular
from llmforge.trace.hooks import internals, rotary
from llmforge.trace.hooks.attention import AttentionHook


class StepStates:
    """The hidden states of a step; apart from modules, whose attributes torch.export does not let a trace set."""

    hidden: Tensor  # [B, S, 3 · target's hidden]
    own: Tensor  # [B, S, hidden]
    next: Tensor  # [B, S, hidden], what the layer gave


class Eagle3Layer(LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """The layer of a head: it is given embeddings, and reads hidden states beside them."""

    def __init__(self, config: Any, head: Eagle3Head, states: StepStates) -> None:
        super().__init__(config, 0)
        size = config.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            old: nn.Linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, old.out_features, bias=old.bias is not None))
        self.fc = nn.Linear(LAYERS_READ * head.target_hidden, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self._states, self._norms_residual = states, head.norms_residual

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Compute the layer; `hidden_states` are embeddings [B, S, hidden]."""
        x = self.fc(self._states.hidden) + self._states.own
        normed = self.hidden_norm(x)
        residual = normed if self._norms_residual else x
        both = torch.cat([self.input_layernorm(hidden_states), normed], -1)
        attended, _ = self.self_attn(hidden_states=both, **kwargs)
        h = residual + attended
        self._states.next = h + self.mlp(self.post_attention_layernorm(h))
        return self._states.next


def model_of(head: Eagle3Head, attention: str) -> tuple[PreTrainedModel, StepStates]:
    """Build the model of `head`, its parameters on the meta device."""
    config, states = head.checkpoint.config, StepStates()
    model: Any = skeleton.on_meta(config, attention)
    with torch.device("meta"):
        model.lm_head = nn.Linear(config.hidden_size, head.draft_vocabulary, bias=False)
        model.model.layers[0] = Eagle3Layer(model.config, head, states)
    model.eval()
    return model, states


class TracedHead(capture.Traced):
    """The head with the inputs and outputs of the dialect."""

    def __init__(
        self, model: PreTrainedModel, attention: AttentionHook, tables: rotary.Tables, states: StepStates
    ) -> None:
        super().__init__(model, attention, tables)
        self._states = states

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_lengths: Tensor,
        lengths: Tensor,
        text_lengths: Tensor,
        logits_rows: Tensor,
        states: list[Tensor],
        caches: list[dict[str, Tensor]],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Trace one step: logits, the states of its places, and the caches after it."""
        self._selection.rows = logits_rows
        self._states.hidden, self._states.own = states
        logits, layers = self.run(input_ids, position_ids, past_lengths, lengths, text_lengths, caches)
        present = [layer.present[part] for layer, parts in zip(layers, caches, strict=True) for part in parts]
        return logits, self._states.next, present


def trace(head: Eagle3Head, positions: int) -> ir.Model:
    """Trace `head` for texts of up to `positions` tokens, and attach its weights; logits are of draft tokens.

    Raises:
        CheckpointError: a parameter has no tensor, or one of another shape.
        UnsupportedError: it cannot be traced.
    """
    checkpoint = head.checkpoint
    chosen = strategy.substituted(checkpoint.config, positions)
    attention = chosen.attention
    with internals.torch_threads(1), attention.registered():
        with internals.third_party("building the model"):
            model, states = model_of(head, attention.NAME)
        mode = skeleton.faked(model)
        sources = weights.plan(model, checkpoint)
        wrap = functools.partial(TracedHead, states=states)
        with (
            internals.third_party("tracing"),
            torch.no_grad(),
            capture.prepared(model, attention, wrap) as traced,
        ):
            widths = LAYERS_READ * head.target_hidden, checkpoint.config.hidden_size
            with mode:
                states.hidden, states.own = (torch.zeros(capture.BATCH, capture.SEQUENCE, each) for each in widths)
            shapes = capture.dry_run(traced, mode, 1)
            graph = _translate(_export(traced, shapes, widths), shapes)
    chosen.canonicalize(graph, {capture.MODEL + name for name in model.state_dict()})
    weights.attach(graph, capture.MODEL, model, checkpoint, sources)
    pattern.record(graph, Irregular("a head has one layer"))
    return graph


def _export(traced: TracedHead, shapes: capture.Shapes, widths: Sequence[int]) -> torch.export.ExportedProgram:
    *inputs, caches = capture.example_inputs(shapes)
    states = [torch.zeros(capture.BATCH, capture.SEQUENCE, width) for width in widths]
    batch, rows, sequence, capacity = (torch.export.Dim(name) for name in ("batch", "rows", "sequence", "capacity"))
    tokens, one = {0: batch, 1: sequence}, {0: batch}
    cached = [{part: {0: batch, 2: capacity} for part in parts} for parts in shapes]
    program = torch.export.export(
        traced,
        (*inputs, states, caches),
        dynamic_shapes=(tokens, tokens, one, one, one, {0: rows}, [tokens, tokens], cached),
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    capture.concatenate(program)
    capture.fold(program)
    return program


def _translate(program: torch.export.ExportedProgram, shapes: capture.Shapes) -> ir.Model:
    names = [(layer, part) for layer, parts in enumerate(shapes) for part in parts]
    inputs = [*capture.INPUTS, interface.HIDDEN_STATES, interface.DRAFT_STATES]
    inputs += [interface.past_part(*name) for name in names]
    outputs = [interface.LOGITS, interface.NEXT_STATES, *(interface.present_part(*name) for name in names)]
    return capture.translate(program, inputs, outputs)


class HeadReference:
    """The model of a head with its real weights in fp32 and transformers' own attention, without a cache."""

    def __init__(self, head: Eagle3Head) -> None:
        with internals.third_party("loading the head"):
            self.model, self.states = model_of(head, "eager")
            values = {name: _read(head.checkpoint.tensors[name]) for name in self.model.state_dict()}
            self.model.load_state_dict(values, assign=True)

    def run(
        self, ids: NDArray[np.int64], hidden: NDArray[np.float32], own: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute one text: ids [S], states [S, …]; return logits [S, draft vocabulary] and next states [S, hidden]."""
        self.states.hidden, self.states.own = torch.from_numpy(hidden)[None], torch.from_numpy(own)[None]
        with internals.third_party("running the head"), torch.inference_mode():
            logits = self.model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits
        return logits[0].numpy(), self.states.next[0].numpy()


def _read(entry: Any) -> Tensor:
    """Read a tensor by the safetensors library, apart from how graphs read it."""
    if not isinstance(entry, TensorEntry):
        return torch.from_numpy(np.asarray(entry.dequantize(), np.float32))
    file: Path = entry.file
    if file.suffix != ".safetensors":
        raise UnsupportedError(f"{file}: heads share embeddings of safetensors, not of {file.suffix}")
    with safe_open(file, "pt") as opened:
        stored: Tensor = opened.get_tensor(entry.name)
        return stored.float()
