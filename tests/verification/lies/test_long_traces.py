"""Wrong traces that short texts do not show: single rows of tables, and places far from lengths that are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph
from llmforge.trace import trace
from llmforge.verification.trace_verifier import verify_trace

from ...models import zoo, zoo_classic
from . import mistranslations
from .places import Condition, wrong
from .table import _attentions, _sums

VOCABULARY, CONTEXT = 1024, 1400
SIZES = {"vocab_size": VOCABULARY}


@dataclass(frozen=True)
class LongLie:
    """A wrong trace of a model, with changes to its configuration."""

    model: str
    spoil: Callable[[ir.Model], object]
    changes: dict[str, object] = field(default_factory=lambda: {"max_position_embeddings": CONTEXT})


def row(ending: str, first: int, last: int) -> Callable[[ir.Model], None]:
    """Make some rows of a table half as large again."""

    def spoil(model: ir.Model) -> None:
        [name] = [name for name in model.graph.initializers if name.endswith(ending)]
        value = model.graph.initializers[name]
        array = np.array(graph.tensor(value).numpy())
        along = array if array.shape[0] >= VOCABULARY or array.shape[0] > last else array.T
        assert len(along) > last
        along[first : last + 1] *= np.float32(1.5)
        value.const_value = ir.tensor(array, name=name)

    return spoil


def residuals(where: Condition) -> Callable[[ir.Model], object]:
    return wrong(where, _sums, -1)


def attention(where: Condition) -> Callable[[ir.Model], object]:
    return wrong(where, _attentions, -1)


EMBEDDINGS = ("granite", "phi3", "llama", "deepseek-v3", "gemma2", "qwen3-moe", "mixtral")
LIES: dict[str, LongLie] = {
    **{
        f"one row of the embedding, {model}": LongLie(model, row("embed_tokens.weight", 517, 517), SIZES)
        for model in EMBEDDINGS
    },
    "one row of the embedding, gpt2": LongLie("gpt2", row("wte.weight", 517, 517), SIZES),
    "one row of the head": LongLie("llama", row("lm_head.weight", 517, 517), SIZES),
    "learned positions 1000 to 1399, gpt2": LongLie(
        "gpt2", row("wpe.weight", 1000, 1399), {"max_position_embeddings": 1500}
    ),
    "learned positions 1000 to 1399, opt": LongLie(
        "opt", row("embed_positions.weight", 1000, 1399), {"max_position_embeddings": 1500}
    ),
    "learned position 700, gpt2": LongLie("gpt2", row("wpe.weight", 700, 700), {"max_position_embeddings": 1500}),
    "positions clipped at 1000, gpt2": LongLie(
        "gpt2", mistranslations.positions_clipped(1000), {"max_position_embeddings": CONTEXT}
    ),
    "positions clipped at 600, opt": LongLie("opt", mistranslations.positions_clipped(600)),
    "positions 600 to 670": LongLie("llama", residuals(lambda c: c.within(c.positions, 600, 670))),
    "positions 1000 to 1070, mpt": LongLie(
        "mpt",
        attention(lambda c: c.within(c.in_step, 1000, 1070)),
        {"max_position_embeddings": CONTEXT, "max_seq_len": CONTEXT},
    ),
    "attention of tokens 500 to 570 of a text, bloom": LongLie(
        "bloom", attention(lambda c: c.within(c.in_step, 500, 570))
    ),
    "prompts of more than 1000 tokens": LongLie("phi", attention(lambda c: c.within(c.tokens, 1000, 9999))),
    "token ids 500 to 551 in a layer": LongLie("olmo2", residuals(lambda c: c.within(c.ids, 500, 551)), SIZES),
    "every 20th position": LongLie("stablelm", residuals(lambda c: c.rest(c.positions, 20, 19))),
    "experts of tokens from 900 on": LongLie("qwen3-moe", residuals(lambda c: c.within(c.in_step, 900, 1399))),
    "latents behind 800": LongLie("deepseek-v3", residuals(lambda c: c.within(c.in_step, 800, 870))),
    "a state from token 300 on": LongLie("lfm2", residuals(lambda c: c.within(c.in_step, 300, 370))),
}
QUICK = {"one row of the embedding, gpt2", "positions clipped at 600, opt"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough]) for name in LIES]
)
def test_a_wrong_trace_is_refused(name: str, tmp_path: Path) -> None:
    lie = LIES[name]
    family = zoo if lie.model in zoo.ZOO else zoo_classic
    family.write(lie.model, tmp_path, **lie.changes)
    checkpoint = Checkpoint.open(tmp_path)
    model = trace(checkpoint)
    lie.spoil(model)
    with pytest.raises(VerificationError) as caught:
        verify_trace(checkpoint, model)
    assert caught.value.exit_code == 7
    assert "numbers for parameter" in caught.value.message or "does not match the model" in caught.value.message
