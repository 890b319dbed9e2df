"""Files beside model.onnx for runtimes of others; what they load is tested in test_other_runtimes.py."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import pytest

from llmforge import native
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.onnxruntime import builder as engines
from llmforge.backends.onnxruntime import interop
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.passes import FlashAttention, GenaiInterface, OptimumInterface, QuantizeKvCache
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Pass
from llmforge.serving import Sampling, load
from llmforge.trace import trace

from ...models import graphs
from ...models.checkpoints import write_checkpoint

GENAI: tuple[Pass, ...] = (FlashAttention(), GenaiInterface())
OPTIMUM: tuple[Pass, ...] = (OptimumInterface(),)


@dataclass(frozen=True)
class Built:
    """One engine and what it was made of."""

    checkpoint: Checkpoint
    model: ir.Model
    engine: BuiltEngine
    notes: tuple[str, ...]

    @property
    def files(self) -> set[str]:
        return {file.name for file in self.engine.folder.iterdir()}


@functools.cache
def traced(**changes: int) -> ir.Model:
    """Trace a tiny checkpoint; its weights are in the model."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), **changes)
        model = trace(Checkpoint.open(Path(folder)))
        for value in model.graph.initializers.values():
            assert value.const_value is not None
            value.const_value = ir.Tensor(value.const_value.numpy().copy(), name=value.name)
    return model


def build(source: Path, folder: Path, steps: Sequence[Pass], *, threads: int | None = 1, **changes: int) -> Built:
    """Build an engine for the checkpoint `source`, which was written with `changes`."""
    checkpoint = Checkpoint.open(source)
    model = traced(**changes).clone()
    for step in steps:
        step.run(model, graphs.CPU)
    lowered, _ = engines.lower(model, graphs.TARGET)
    spec = EngineSpec(max_context=96, max_batch=2, threads=threads)
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    engine = engines.build(BuildRequest(lowered, folder / "engine", spec, graphs.TARGET, *ends))
    engines.write_tokenizer(checkpoint, folder / "tokenizer")
    return Built(checkpoint, lowered, engine, interop.write(lowered, engine, checkpoint)[1])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny checkpoint with defaults of generation."""
    folder = tmp_path / "tiny-llama"
    write_checkpoint(folder)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_length": 99, "pad_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_genai_config_holds_what_the_engine_is(tiny: Path, tmp_path: Path) -> None:
    built = build(tiny, tmp_path / "artifact", GENAI)
    assert built.notes == (
        "engine/ also loads in onnxruntime-genai",
        "engine/ also loads in optimum-onnx (ORTModelForCausalLM)",
    )
    assert json.loads((built.engine.folder / "genai_config.json").read_text()) == {
        "model": {
            "type": "decoder",
            "context_length": 96,
            "vocab_size": 264,
            "bos_token_id": 0,
            "eos_token_id": [0, 2],
            "pad_token_id": 1,
            "decoder": {
                "filename": "model.onnx",
                "session_options": {
                    "log_id": "onnxruntime-genai",
                    "provider_options": [],
                    "intra_op_num_threads": 1,
                },
                "head_size": 16,
                "num_key_value_heads": 2,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "max_length": 96,
            "num_beams": 1,
            "past_present_share_buffer": True,
        },
    }
    assert built.files == {
        *("model.onnx", "model.onnx.data", "runtime.json"),
        *("genai_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("config.json", "generation_config.json"),  # of optimum-onnx
    }


def test_genai_config_without_defaults_is_greedy_and_leaves_threads_to_the_machine(tiny: Path, tmp_path: Path) -> None:
    (tiny / "generation_config.json").unlink()
    built = build(tiny, tmp_path / "artifact", GENAI, threads=None)
    config = interop.genai_config(built.model, built.engine, built.checkpoint)
    assert config["search"]["do_sample"] is False
    assert config["model"]["pad_token_id"] == 0  # the first end-of-sequence token
    assert "intra_op_num_threads" not in config["model"]["decoder"]["session_options"]


def test_position_ids_are_an_input_where_rotary_embedding_stays_outside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, head_dim=8)
    built = build(folder, tmp_path / "artifact", GENAI, head_dim=8)
    config = interop.genai_config(built.model, built.engine, built.checkpoint)
    assert config["model"]["decoder"]["inputs"]["position_ids"] == "position_ids"


def test_genai_wants_an_end_of_sequence_token(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, eos_token_id=None, bos_token_id=None)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer["tokenizer_class"]}))
    with pytest.raises(UnsupportedError, match="has no end-of-sequence token"):
        build(folder, tmp_path / "artifact", GENAI)


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not compiled here")
def test_caches_that_only_llmforge_reads_are_refused(tiny: Path, tmp_path: Path) -> None:
    slots = QuantizeKvCache(Budget(kld_mean=1.0), granularity="per_token")
    with pytest.raises(UnsupportedError, match="other runtimes cannot load GroupQueryAttentionSlots, operators that"):
        build(tiny, tmp_path / "artifact", (FlashAttention(), slots, GenaiInterface()))


def test_optimum_gets_the_configurations_as_they_are(tiny: Path, tmp_path: Path) -> None:
    built = build(tiny, tmp_path / "artifact", OPTIMUM)
    assert built.notes == ("engine/ also loads in optimum-onnx (ORTModelForCausalLM)",)
    assert built.files == {
        *("model.onnx", "model.onnx.data", "runtime.json"),
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    }
    for name in ("config.json", "generation_config.json"):
        assert (built.engine.folder / name).read_bytes() == (tiny / name).read_bytes()


def test_heads_that_optimum_would_misread_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, head_dim=32)  # 4 heads of a hidden size of 64
    with pytest.raises(UnsupportedError, match=r"has 2 heads of 32 channels; .* model type llama to have 2 of 16"):
        build(folder, tmp_path / "artifact", OPTIMUM, head_dim=32)
    built = build(folder, tmp_path / "genai", GENAI, head_dim=32)
    assert built.notes[0] == "engine/ also loads in onnxruntime-genai"
    assert built.notes[1].startswith(
        "engine/ does not load in optimum-onnx: cache past_key_values.0.key has 2 heads of"
    )
    assert "config.json" not in built.files


def test_other_engines_get_nothing(tiny: Path, tmp_path: Path) -> None:
    built = build(tiny, tmp_path / "artifact", (FlashAttention(),))
    assert built.notes == ()
    assert built.files == {"model.onnx", "model.onnx.data", "runtime.json"}


def test_the_same_inputs_give_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    first, second = (build(tiny, tmp_path / name, GENAI) for name in ("first", "second"))
    assert first.files == second.files
    for name in first.files:
        assert (first.engine.folder / name).read_bytes() == (second.engine.folder / name).read_bytes()


@pytest.mark.parametrize("steps", [GENAI, OPTIMUM], ids=["genai", "optimum"])
def test_llmforge_runs_the_same_artifact(steps: Sequence[Pass], tiny: Path, tmp_path: Path) -> None:
    answers = []
    for name, change in (("own", (FlashAttention(),)), ("other", steps)):
        build(tiny, tmp_path / name, change)
        runner = load(tmp_path / name)
        prompts = [[5, 9, 200, 31], [7]]
        greedy = [Sampling(max_tokens=24, ignore_eos=True)] * 2
        answers.append([step.token_ids for step in runner.generate_batch(prompts, greedy)])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 24
