"""A model's own attention, traced as it is: for architectures whose attention, masks or positions cannot be hooked.

The model runs its eager attention over a cache that writes into the preallocated buffers (TensorScatter), under the
mask that transformers describes, evaluated for every row's own positions. Rotary embedding is the model's own. The
graph is larger than one of `llmforge::Attention`, and what a model does beside transformers' interfaces is unknown.
So it is taken only where the other way is refused, and only once its numbers were compared with the model's (`prove`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from llmforge import expansion, interface
from llmforge.checkpoint import Checkpoint
from llmforge.errors import NotADecoder, UnsupportedError
from llmforge.trace import attention, internals, masks

IMPLEMENTATION = "eager"  # transformers' name for attention in a model's own code
EXPERTS = "batched_mm"  # transformers' experts that no data decides about
# Parameters of the largest model that is proved: in fp32 four bytes each, twice, and a protobuf holds at most 2 GiB.
PROVED_PARAMETERS = 400_000_000
TOLERANCE = 1e-4  # largest |Δlogit|, in standard deviations of the logits
LOOK_AHEAD = 1e-3  # the same, of a token's logits when what follows is left out: beyond rounding
# Rows of a ragged batch: a prompt longer than the other, then two steps of decoding and a continuation.
PROMPTS, FURTHER = (7, 19), (1, 1, 4)
CAPACITY = 31  # a number that no model has as a size
GARBAGE = np.float32(7.0)  # in slots that were never written


class Layer(attention.Layer):  # type: ignore[no-untyped-call]  # transformers is untyped in parts
    """The cache of one layer: hands on the whole buffer, with new keys and values written into it."""

    def __init__(self, past: tuple[Tensor, Tensor] | None, past_lengths: Tensor) -> None:
        super().__init__(past)
        self._past_lengths = past_lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, kv_heads, S, D] behind each row's past; return the buffers [B, kv_heads, C, D]."""
        new = super().update(key_states, value_states)
        if self.past is None:
            self.keys, self.values = new
            return new
        slots = self._past_lengths.to(torch.int64)
        key, value = (_written(past, states, slots) for past, states in zip(self.past, new, strict=True))
        self.present = self.keys, self.values = key, value
        return self.present

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many slots a query meets, and the first of them."""
        return (query_length if self.past is None else self.past[0].shape[2]), 0


def _written(past: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    if new.dtype != past.dtype:
        raise UnsupportedError(f"a layer caches {new.dtype}")
    return torch.onnx.ops.symbolic(
        "TensorScatter", (past, new.contiguous(), slots), {"axis": 2}, dtype=past.dtype, shape=past.shape, version=24
    )


class OwnAttention(attention.Attention):
    """What a model with its own attention gets from transformers: the cache, and masks as numbers."""

    def __init__(self, context: int | None) -> None:
        super().__init__(context)
        self._lengths: Tensor | None = None

    def step(self, past: Sequence[tuple[Tensor, Tensor] | None], past_lengths: Tensor) -> Cache:
        """Begin one run of the model: make its cache from the graph inputs of each layer (None: a dry run)."""
        self._lengths = past_lengths
        layers = [Layer(pair, past_lengths) for pair in past]
        self.layers = layers
        return Cache(layers=[*layers])

    def numbers(
        self,
        *,
        q_length: int,
        mask_function: masks.MaskFunction,
        attention_mask: object = None,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the mask [B, 1, S, C] that transformers asks for: 0 where a query sees a slot, else the lowest."""
        self.refuse_padding(attention_mask)
        masks.refuse_encoders(mask_function)
        assert self._lengths is not None
        slots = self.layers[0].get_mask_sizes(q_length)[0]
        queries = (self._lengths.to(torch.int64)[:, None] + torch.arange(q_length))[:, None, :, None]
        keys, zero = torch.arange(slots)[None, None, None, :], torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        seen = mask_function(zero, zero, queries, keys).expand(self._lengths.shape[0], 1, q_length, slots)
        return torch.where(seen, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


@contextmanager
def eager(own: OwnAttention) -> Iterator[None]:
    """Let `own` make the masks of eager attention while the context lasts."""
    with internals.mask_replaced(IMPLEMENTATION, own.numbers):
        yield


def choose_experts(model: PreTrainedModel) -> None:
    """Let experts, where the model has transformers', be computed without decisions about data."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS)


def refuse_encoders(checkpoint: Checkpoint) -> None:
    """Refuse a small model that is an encoder, by what it computes; used where tracing gives no plainer reason.

    Raises:
        NotADecoder: it is.
    """
    if checkpoint.parameters <= PROVED_PARAMETERS:
        try:
            reference(checkpoint.path, _texts(checkpoint.geometry.vocabulary))
        except NotADecoder:
            raise
        except UnsupportedError:  # transformers cannot run it: no plainer reason
            return


def prove(graph: ir.Model, checkpoint: Checkpoint) -> None:
    """Compare `graph` with transformers on its `checkpoint`.

    Both run a ragged batch of random tokens: prompts, decoding, a continuation; transformers every row alone, at once
    and without a cache.

    Raises:
        NotADecoder: logits of a token change with what follows it.
        UnsupportedError: the logits differ, or the model is too large to compare them.
    """
    parameters = checkpoint.parameters
    if parameters > PROVED_PARAMETERS:
        raise UnsupportedError(
            f"it has {parameters:,} parameters; its own attention is only compiled where it can be proved by running "
            f"it, up to {PROVED_PARAMETERS:,}"
        )
    texts = _texts(checkpoint.geometry.vocabulary)
    wanted = reference(checkpoint.path, texts)
    spread = float(np.concatenate(wanted).std())
    worst = _largest(_session(expansion.expand(graph)), texts, wanted)
    if not worst <= TOLERANCE * spread:
        raise UnsupportedError(
            f"its own attention, traced, computes other logits than transformers: they differ by up to {worst:.1e}, "
            f"of a standard deviation of {spread:.1e}"
        )


def _texts(vocabulary: int) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, prompt + sum(FURTHER)) for prompt in PROMPTS]


def reference(folder: Path, texts: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
    """Run transformers on every text, and return logits [tokens, vocabulary] of each.

    Raises:
        NotADecoder: logits of a token change with what follows it.
        UnsupportedError: transformers fails.
    """
    with internals.third_party("running the model in transformers"), torch.no_grad():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=IMPLEMENTATION, local_files_only=True
        )
        model.eval()
        whole = [model(torch.from_numpy(text[None]), use_cache=False).logits[0].numpy() for text in texts]
        half = len(texts[-1]) // 2
        part = model(torch.from_numpy(texts[-1][None, :half]), use_cache=False).logits[0].numpy()
    if not np.abs(whole[-1][:half] - part).max() <= LOOK_AHEAD * whole[-1].std():
        raise NotADecoder("the logits of a token change with later tokens: it is an encoder, not a decoder")
    return whole


def _largest(
    session: ort.InferenceSession, texts: Sequence[NDArray[np.int64]], wanted: Sequence[NDArray[np.float32]]
) -> float:
    """Run the graph over the schedule and return the largest |Δlogit| of every valid row; NaN counts as infinite."""
    names = [value.name for value in session.get_inputs()]
    cache: dict[str, NDArray[np.generic]] = {
        value.name: np.full((len(texts), value.shape[1], CAPACITY, value.shape[3]), GARBAGE, np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    past, worst = np.zeros(len(texts), np.int32), 0.0
    for step in (PROMPTS, *((count,) * len(texts) for count in FURTHER)):
        ids = np.zeros((len(texts), max(step)), np.int64)
        for row, count in enumerate(step):
            ids[row, :count] = texts[row][past[row] : past[row] + count]
        feeds = interface.feeds(names, ids, past, np.arange(max(step)))
        logits, *presents = session.run(None, {**feeds, **cache})
        cache = dict(zip(cache, presents, strict=True))
        for row, count in enumerate(step):
            difference = np.abs(logits[row, :count] - wanted[row][past[row] : past[row] + count]).max()
            worst = max(worst, float(difference) if np.isfinite(difference) else np.inf)
        past = past + np.array(step, np.int32)
    return worst


def _session(model: ir.Model) -> ort.InferenceSession:
    """Load standard ONNX whose weights are lazy, without ONNX Runtime's own graph optimizations."""
    loaded = model.clone()
    for name, value in loaded.graph.initializers.items():
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy(), name=name)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors: TensorScatter warns whenever past and present are not one buffer
    return ort.InferenceSession(ir.to_proto(loaded).SerializeToString(), options, ["CPUExecutionProvider"])
