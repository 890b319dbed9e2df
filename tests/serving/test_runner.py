"""The runner on a small engine with random weights and the sample checkpoint's tokenizer."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.base.errors import InputError, UsageError, VersionMismatch
from llmforge.recipe import EngineSpec
from llmforge.runtime.interface import StepInputs
from llmforge.serving import Chunk, Runner, Sampling, load, runner

from ..models.decoder_graph import decoder

VOCABULARY = 8192
EOS = 5
SPEC = EngineSpec(max_context=96, max_batch=3, threads=1)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, sample_checkpoint) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    model, _ = engine.lower(decoder(VOCABULARY), targets.local())
    engine.build(BuildRequest(model, folder / "engine", SPEC, targets.local(), (EOS,), 0))
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
        shutil.copy(sample_checkpoint / name, folder / "tokenizer" / name)
    return folder


@pytest.fixture(scope="module")
def loaded(artifact) -> Runner:
    return load(artifact)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCABULARY, length).tolist()


def tokens(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.token_id for chunk in chunks if chunk.token_id is not None]


def greedy_by_definition(loaded: Runner, ids: list[int], count: int) -> list[int]:
    """Read the whole text again for each token, in one step over an empty cache."""
    text = list(ids)
    for _ in range(count):
        cache = loaded.session.allocate(1, len(text))
        logits = loaded.session.step(StepInputs(np.array([text]), np.zeros(1, np.int32)), cache)
        text.append(int(logits[0, 0].argmax()))
    return text[len(ids) :]


def test_greedy_generation_is_the_argmax_of_the_whole_text(loaded):
    ids = prompt(9)
    chunks = list(loaded.generate(ids, Sampling(max_tokens=12, ignore_eos=True)))
    assert tokens(chunks) == greedy_by_definition(loaded, ids, 12)
    assert len(set(tokens(chunks))) > 3
    last = chunks[-1]
    assert (last.token_id, last.finish_reason) == (None, "length")
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (9, 12)
    assert last.usage.ttft_ms > 0
    assert last.usage.tpot_ms > 0
    text = "".join(chunk.text for chunk in chunks)
    assert text == loaded.tokenizer.decode(tokens(chunks))
    assert text


def test_a_text_prompt_is_its_tokens(loaded):
    text = "def main():\n    return "
    options = Sampling(max_tokens=6, temperature=1.0)
    from_text, from_ids = list(loaded.generate(text, options)), list(loaded.generate(loaded.encode(text), options))
    assert tokens(from_text) == tokens(from_ids)
    assert from_text[-1].usage.prompt_tokens == len(loaded.encode(text)) > 3


def test_a_long_prompt_in_chunks_gives_the_same_tokens(loaded, monkeypatch):
    ids = prompt(50, seed=1)
    options = Sampling(max_tokens=10, ignore_eos=True)
    whole = tokens(list(loaded.generate(ids, options)))
    monkeypatch.setattr(runner, "PREFILL_CHUNK", 7)
    assert tokens(list(loaded.generate(ids, options))) == whole == greedy_by_definition(loaded, ids, 10)


def test_logits_of_a_text_come_in_chunks(loaded):
    ids = prompt(30, seed=2)
    whole = loaded.logits(ids)
    assert whole.shape == (30, VOCABULARY)
    pieces = list(loaded.logits_chunks(ids, step_tokens=8))
    assert [piece.shape[0] for piece in pieces] == [8, 8, 8, 6]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-4)
    np.testing.assert_allclose(loaded.logits(ids, step_tokens=1), whole, atol=1e-4)
    assert tokens(list(loaded.generate(ids, Sampling(max_tokens=1, ignore_eos=True)))) == [whole[-1].argmax()]
    np.testing.assert_array_equal(loaded.logits(prompt(SPEC.max_context)).shape, (SPEC.max_context, VOCABULARY))


def batch_tokens(loaded: Runner, prompts: list[list[int]], samplings: list[Sampling]) -> tuple[list, list]:
    rows: list[list[int]] = [[] for _ in prompts]
    reasons: list[str | None] = [None] * len(prompts)
    for step in loaded.generate_batch(prompts, samplings):
        for b, token in enumerate(step.token_ids):
            assert (token is None) == (reasons[b] is not None)
            if token is not None:
                rows[b].append(token)
            reasons[b] = step.finish_reasons[b] or reasons[b]
    return rows, reasons


# Each order lets another row end first, last and in the middle.
@pytest.mark.parametrize("limits", [(3, 14, 8), (14, 3, 8), (8, 14, 3), (14, 3, 3), (1, 1, 5)])
def test_rows_of_a_batch_get_what_they_would_get_alone(loaded, limits):
    prompts = [prompt(5, seed=3), prompt(31, seed=4), prompt(12, seed=5)]
    samplings = [
        Sampling(max_tokens=limits[0], ignore_eos=True),
        Sampling(max_tokens=limits[1], ignore_eos=True, temperature=1.0, seed=11),
        Sampling(max_tokens=limits[2], ignore_eos=True, temperature=0.7, top_k=20, top_p=0.9, seed=12),
    ]
    alone = [tokens(list(loaded.generate(ids, sampling))) for ids, sampling in zip(prompts, samplings, strict=True)]
    rows, reasons = batch_tokens(loaded, prompts, samplings)
    assert rows == alone
    assert [len(row) for row in rows] == list(limits)
    assert reasons == ["length"] * 3


def test_batches_that_make_no_sense_are_refused(loaded):
    with pytest.raises(UsageError, match="stop strings are not supported"):
        loaded.generate_batch([prompt(3)], [Sampling(stop=("x",))])
    with pytest.raises(ValueError, match="2 prompts, 1 samplings"):
        loaded.generate_batch([prompt(3)] * 2, [Sampling()])
    with pytest.raises(ValueError, match="0 prompts"):
        loaded.generate_batch([], [])


def with_eos(loaded: Runner, eos: int) -> Runner:
    config = dataclasses.replace(loaded.config, eos_token_ids=(eos,))
    return Runner(loaded.session, config, loaded.tokenizer, loaded.template)


def test_an_end_of_sequence_token_ends_and_is_not_shown(loaded):
    ids = prompt(9)
    free = tokens(list(loaded.generate(ids, Sampling(max_tokens=8, ignore_eos=True))))
    eos = free[4]
    first = free.index(eos)
    stopping = with_eos(loaded, eos)
    chunks = list(stopping.generate(ids, Sampling(max_tokens=8)))
    assert tokens(chunks) == free[:first]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].usage.output_tokens == first + 1
    assert "".join(chunk.text for chunk in chunks) == loaded.tokenizer.decode(free[:first])
    assert tokens(list(stopping.generate(ids, Sampling(max_tokens=8, ignore_eos=True)))) == free
    rows, reasons = batch_tokens(stopping, [ids, prompt(4)], [Sampling(max_tokens=8)] * 2)
    assert (rows[0], reasons[0]) == (free[: first + 1], "stop")


def test_a_stop_string_ends_before_itself(loaded):
    ids = prompt(9)
    whole = "".join(chunk.text for chunk in loaded.generate(ids, Sampling(max_tokens=12, ignore_eos=True)))
    stop = whole[len(whole) // 2 - 2 : len(whole) // 2 + 3]
    chunks = list(loaded.generate(ids, Sampling(max_tokens=12, ignore_eos=True, stop=(stop, "never seen"))))
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].usage.output_tokens < 12


def test_generation_ends_with_the_context(loaded):
    ids = prompt(90)
    chunks = list(loaded.generate(ids, Sampling(ignore_eos=True)))
    assert len(tokens(chunks)) == 6
    assert chunks[-1].finish_reason == "length"
    rows, _ = batch_tokens(loaded, [ids, prompt(95)], [Sampling(ignore_eos=True, max_tokens=3)] * 2)
    assert [len(row) for row in rows] == [3, 1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        (prompt(96), r"96 tokens; this artifact allows at most 95"),
        ([3, VOCABULARY], "token id 8192; the vocabulary has 8192"),
        ([-1], "token id -1"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(loaded, ids, message):
    with pytest.raises(UsageError, match=message):
        next(loaded.generate(ids))
    if len(ids) != 96:
        with pytest.raises(UsageError, match=message):
            loaded.logits(ids)


def test_answers_at_once_do_not_disturb_each_other_and_are_limited(loaded):
    options = Sampling(max_tokens=9, ignore_eos=True)
    alone = [tokens(list(loaded.generate(prompt(6 + i, seed=i), options))) for i in range(3)]
    running = [loaded.generate(prompt(6 + i, seed=i), options) for i in range(3)]
    interleaved = [list(chunks) for chunks in zip(*running, strict=True)]
    assert [tokens([step[i] for step in interleaved]) for i in range(3)] == alone

    running = [loaded.generate(prompt(4), options) for _ in range(3)]
    for answer in running:
        next(answer)
    with pytest.raises(UsageError, match="1 sequences requested while 3 are running; this artifact runs at most 3"):
        next(loaded.generate(prompt(4), options))
    running[1].close()
    assert tokens(list(loaded.generate(prompt(6), options))) == alone[0]
    with pytest.raises(UsageError, match="2 sequences requested while 2 are running"):
        next(loaded.generate_batch([prompt(4)] * 2, [options] * 2))
    del running, answer
    gc.collect()  # an answer that nobody holds gives its rows back
    assert len(list(loaded.generate_batch([prompt(4)] * 3, [options] * 3))) == 9


def test_a_conversation_goes_through_the_template(loaded):
    ids = loaded.encode_chat([{"role": "user", "content": "What is a symlink?"}])
    text = loaded.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nWhat is a symlink?<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == loaded.tokenizer.token_to_id("<|im_start|>")


def copy_of(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def test_an_artifact_without_a_template_refuses_conversations(artifact, tmp_path):
    copy = copy_of(artifact, tmp_path)
    (copy / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="the artifact has no chat template"):
        load(copy).encode_chat([{"role": "user", "content": "hello"}])


def test_broken_artifacts_are_refused(artifact, tmp_path):
    with pytest.raises(InputError, match="is not an artifact"):
        load(tmp_path)
    copy = copy_of(artifact, tmp_path)
    config = copy / "engine" / "runtime.json"
    data = json.loads(config.read_text())
    config.write_text(json.dumps({**data, "onnxruntime": "1.2.3"}))
    with pytest.raises(VersionMismatch, match=r"with onnxruntime 1\.2\.3, and \S+ is installed") as caught:
        load(copy)
    assert caught.value.exit_code == 8
    config.write_text(json.dumps({**data, "vocabulary": 100}))
    with pytest.raises(InputError, match="vocabulary or caches differ"):
        load(copy)
    config.write_text(json.dumps(data))
    (copy / "engine" / "model.onnx.data").unlink()
    with pytest.raises(InputError, match=r"model\.onnx\.data is missing"):
        load(copy)
    shutil.copy(artifact / "engine" / "model.onnx.data", copy / "engine")
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer"):
        load(copy)
    (copy / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        load(copy)


def test_the_tokenizers_own_truncation_and_padding_are_off(artifact, tmp_path):
    copy = copy_of(artifact, tmp_path)
    path = copy / "tokenizer" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    path.write_text(json.dumps(data))
    text = "one two three four five six seven eight nine ten eleven twelve thirteen"
    assert load(copy).encode(text) == load(artifact).encode(text)
    assert len(load(copy).encode("one")) < 12


def test_serving_imports_no_training_library():
    program = (
        "import sys, llmforge.runtime, llmforge.triton.backend.inputs, llmforge.triton.backend.settings; "
        "unwanted = 'torch transformers onnx onnx_ir ml_dtypes pydantic click rich psutil ruamel'.split(); "
        "print([name for name in unwanted if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
