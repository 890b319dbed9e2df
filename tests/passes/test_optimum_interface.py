"""optimum-interface: attention over caches that grow, under a mask with padding on the left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import InputError, UnsupportedError, VerificationError
from llmforge.ir import dialect, graph, interface
from llmforge.passes import FlashAttention, FuseNorms, OptimumInterface, PackGateUp, PackQkv
from llmforge.rewrite.pass_base import Context
from llmforge.runtime.config import SessionConfig
from llmforge.runtime.interface import StepInputs, feeds
from llmforge.verification.probe import InitializerArrays, open_session

from ..models import graphs

PAST, PRESENT = "past_sequence_length", "past_sequence_length + sequence_length"


def open_(model: ir.Model) -> Session:
    return open_session(model, InitializerArrays(), 1)


def shapes(values: object) -> dict[str, tuple[int | str | None, ...] | None]:
    return {str(value.name): graph.dims(value) for value in values}  # type: ignore[attr-defined]


def test_decoder_as_text(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1, window=4))
    changes, _ = graphs.prove(OptimumInterface(), model, tmp_path)
    assert graphs.lines(model, ["GrowingAttention", "Attention"]) == [
        "l0_attended, present.0.key, present.0.value = GrowingAttention("
        "l0_q_rotary, l0_k_rotary, l0_v, past_key_values.0.key, past_key_values.0.value, attention_mask)"
    ]
    assert [(change.node, change.what) for change in changes.rewritten] == [
        ("selected_node", "logits of every token"),
        ("l0_attention", "growing KV cache, masked by attention_mask"),
    ]
    [attention] = graphs.find(model, "GrowingAttention")
    assert (attention.attributes.get_int("window"), attention.attributes.get_int("kv_num_heads")) == (4, 2)
    assert shapes(model.graph.inputs) == {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", PRESENT),
        "position_ids": ("batch", "sequence"),
        "past_key_values.0.key": ("batch", 2, PAST, 16),
        "past_key_values.0.value": ("batch", 2, PAST, 16),
    }
    assert shapes(model.graph.outputs) == {
        "logits": ("batch", "sequence", 96),
        "present.0.key": ("batch", 2, PRESENT, 16),
        "present.0.value": ("batch", 2, PRESENT, 16),
    }


# Probes are ragged, right-padded batches, continuations and decodes over rows of unequal pasts.
@pytest.mark.parametrize(
    "spec",
    [
        graphs.Llama(),
        graphs.Llama(window=4),
        graphs.Llama(softcap=3.0, sinks=True, window=5),
        graphs.Llama(value_dim=24, rotary_dim=0),
        graphs.Llama(head_dim=12, query_norm=True, bias=True, rotary_dim=8),
    ],
)
@pytest.mark.parametrize("logits", ["all", "last"])
def test_variants_keep_their_numbers(spec: graphs.Llama, logits: str, tmp_path: Path) -> None:
    model = graphs.llama(spec)
    _, verification = graphs.prove(OptimumInterface(logits=logits), model, tmp_path)  # type: ignore[arg-type]
    assert verification.allowed is not None
    assert verification.largest_difference <= 0.1 * verification.allowed
    assert open_(model).signature.inputs[:2] == ("input_ids", "attention_mask")


def test_it_follows_the_other_passes(tmp_path: Path) -> None:
    model = graphs.llama()
    for change in (FuseNorms(), PackQkv(), PackGateUp(), OptimumInterface()):
        graphs.prove(change, model, tmp_path)
    assert len(graphs.find(model, "MatMul")) == 9


@pytest.mark.parametrize("window", [0, 3])
def test_padding_on_the_left_changes_nothing(window: int) -> None:
    """Feed the graph as transformers does: a padded batch gives each row what it gets alone."""
    model = graphs.llama(graphs.Llama(window=window))
    OptimumInterface().run(model, graphs.CPU)
    executable = ir.to_proto(dialect.expand(model)).SerializeToString()
    session = ort.InferenceSession(executable, providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]

    def step(ids: np.ndarray, mask: np.ndarray, past: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
        fed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
        return dict(zip(outputs, session.run(outputs, fed), strict=True))

    def empty(batch: int) -> dict[str, np.ndarray]:
        names = [value.name for value in session.get_inputs() if value.name.startswith("past_key_values.")]
        return {name: np.zeros((batch, 2, 0, 16), np.float32) for name in names}

    rng = np.random.default_rng(0)
    long, short = rng.integers(0, 96, (1, 7)), rng.integers(0, 96, (1, 4))
    padded = np.concatenate([long, np.pad(short, ((0, 0), (3, 0)))])
    mask = np.array([[1] * 7, [0] * 3 + [1] * 4])
    batch = step(padded, mask, empty(2))
    assert np.isfinite(batch["logits"]).all()
    rows = [step(row, np.ones_like(row), empty(1)) for row in (long, short)]
    np.testing.assert_allclose(batch["logits"][0], rows[0]["logits"][0], atol=1e-5)
    np.testing.assert_allclose(batch["logits"][1, 3:], rows[1]["logits"][0], atol=1e-5)
    # One decode step further.
    past = {name: batch[interface.present_of(name)] for name in empty(2)}
    assert past["past_key_values.0.key"].shape == (2, 2, 7, 16)
    after = step(np.array([[11], [12]]), np.pad(mask, ((0, 0), (0, 1)), constant_values=1), past)
    for b, (row, ids) in enumerate(zip(rows, (long, short), strict=True)):
        alone_past = {name: row[interface.present_of(name)] for name in empty(1)}
        alone = step(np.array([[11 + b]]), np.ones((1, ids.shape[1] + 1), np.int64), alone_past)
        np.testing.assert_allclose(after["logits"][b], alone["logits"][0], atol=1e-5)


def test_a_mask_of_growing_caches_stands_at_the_end() -> None:
    names = [interface.ATTENTION_MASK]
    fed = feeds(names, StepInputs(np.zeros((3, 2), np.int64), np.array([3, 0, 1], np.int32)), growing=True)
    assert fed[interface.ATTENTION_MASK].tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]


def test_what_was_lowered_to_shared_caches_is_refused() -> None:
    model = graphs.llama()
    FlashAttention().run(model, graphs.CPU)
    before = graph.fingerprint(model)
    with pytest.raises(UnsupportedError, match="node l0_attention, GroupQueryAttention, reads") as caught:
        OptimumInterface().run(model, graphs.CPU)
    assert caught.value.hint == "leave flash-attention out of the recipe, or this pass"
    assert graph.fingerprint(model) == before


def test_target_without_onnxruntime_is_refused() -> None:
    target = graphs.TARGET.model_copy(update={"engines": ("tensorrt",)})
    with pytest.raises(UnsupportedError, match="ORTModelForCausalLM runs ONNX Runtime's engines"):
        OptimumInterface().run(graphs.llama(), Context(target))


def test_the_dialect_knows_the_caches_that_growing_attention_wants() -> None:
    model = graphs.llama()
    OptimumInterface().run(model, graphs.CPU)
    dialect.check(model)
    [attention, _] = graphs.find(model, "GrowingAttention")
    attention.replace_input_with(3, attention.inputs[4])
    with pytest.raises(VerificationError, match=r"layer 0 must read past_key_values\.0\.key"):
        dialect.check(model)


def test_caches_that_grow_beside_others_that_do_not_are_refused() -> None:
    model = graphs.llama()
    OptimumInterface().run(model, graphs.CPU)
    expanded = dialect.expand(model)
    for value in (*expanded.graph.inputs, *expanded.graph.outputs):
        if value.name in ("past_key_values.1.key", "present.1.key"):
            value.shape = ir.Shape(["batch", 2, "slots", 16])
    with pytest.raises(InputError, match=r"past_key_values\.1\.key keeps its size, and others grow"):
        Session(ir.to_proto(expanded).SerializeToString(), SessionConfig(threads=1))
