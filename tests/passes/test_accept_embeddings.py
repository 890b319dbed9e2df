"""accept-embeddings: rows of another model's making in the place of tokens, as with transformers' inputs_embeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect, interface
from llmforge.passes import AcceptEmbeddings
from llmforge.runtime.interface import StepInputs, feeds
from llmforge.trace import trace

from ..models import graphs
from ..models.zoo import standard_session
from ..sweep import shrink
from ..sweep.reference import Reference

TOLERANCE = 1e-5
CAPACITY = 32


def test_where_a_token_id_is_negative_the_row_that_was_given_counts(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    _, verification = graphs.prove(AcceptEmbeddings(), model, tmp_path)

    assert verification.largest_difference == 0.0
    assert graphs.lines(model, ["Max", "Less", "Where"]) == [
        "val_0 = Max(input_ids, embeddings.zero)",
        "val_1 = Less(input_ids, embeddings.zero)",
        "val_3 = Where(val_2, inputs_embeds, embedded)",
    ]
    assert not AcceptEmbeddings().run(model, graphs.CPU)


def test_ids_that_something_else_reads_are_refused() -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    ids = next(value for value in model.graph.inputs if value.name == interface.INPUT_IDS)
    (lookup,) = ids.consumers()
    second = ir.Node("", "Gather", [lookup.inputs[0], ids], num_outputs=1, name="second/Gather")
    model.graph.insert_before(lookup, second)
    with pytest.raises(UnsupportedError, match=r"token ids are read by Gather .*, Gather second/Gather"):
        AcceptEmbeddings().run(model, graphs.CPU)


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["gemma3", "granite"])  # scaled by the embedding's module; by the model
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its models
def test_a_text_with_rows_of_another_model_is_transformers(model_type: str, tmp_path: Path) -> None:
    """Inside of a multimodal checkpoint, too: prefill with rows in the middle, then tokens alone, nothing fed."""
    shrink.write(model_type, tmp_path)
    graph = trace(Checkpoint.open(tmp_path))
    assert AcceptEmbeddings().run(graph, graphs.CPU)
    dialect.check(graph)
    session = standard_session(dialect.expand(graph))
    reference = Reference.load(tmp_path).model
    rng = np.random.default_rng(3)
    ids = rng.integers(5, 250, 14)
    given = rng.standard_normal((5, reference.config.get_text_config().hidden_size)).astype(np.float32)
    with torch.no_grad():
        rows = reference.get_input_embeddings()(torch.from_numpy(ids)[None])
        rows[0, 3:8] = torch.from_numpy(given)
        wanted = reference(inputs_embeds=rows, use_cache=False).logits[0].numpy()
        plain = reference(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()

    marked = ids.copy()
    marked[3:8] = -1
    embeds = np.full((1, 12, given.shape[1]), np.nan, np.float32)  # of tokens with an id nothing is read
    embeds[0, 3:8] = given
    logits, caches = _step(session, {}, marked[:12], 0, {interface.INPUTS_EMBEDS: embeds})
    assert np.abs(logits - wanted[:12]).max() < TOLERANCE * wanted.std() / shrink.SPREAD * 2
    for place in (12, 13):
        logits, caches = _step(session, caches, marked[place : place + 1], place, {})
        assert np.abs(logits - wanted[place]).max() < TOLERANCE * wanted.std() / shrink.SPREAD * 2
    assert np.abs(wanted[12:] - plain[12:]).max() > 0.01  # rows matter

    logits, _ = _step(session, {}, ids[:12], 0, {})
    assert np.abs(logits - plain[:12]).max() < TOLERANCE * wanted.std() / shrink.SPREAD * 2


def _step(
    session: onnxruntime.InferenceSession,
    caches: dict[str, Any],
    ids: NDArray[np.int64],
    past: int,
    more: dict[str, Any],
) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """Run one row over its caches; return logits [tokens, vocabulary] and the caches after."""
    names = [value.name for value in session.get_inputs()]
    past_inputs = [value for value in session.get_inputs() if value.name.startswith("past_key_values.")]
    if not caches:
        caches = {v.name: np.zeros((1, v.shape[1], CAPACITY, v.shape[3]), np.float32) for v in past_inputs}
    fed = feeds(names, StepInputs(ids[None], np.array([past], np.int32), np.arange(len(ids))))
    logits, *presents = session.run(None, {**fed, **more, **caches})
    return logits[0], dict(zip(caches, presents, strict=True))
