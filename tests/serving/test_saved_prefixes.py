"""Prefixes that outlast a process: computed once, read back from files, and never wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llmforge import targets
from llmforge.artifact import Artifact
from llmforge.base.errors import InputError, UnsupportedError, UsageError
from llmforge.cli import cli
from llmforge.compile import prefixes
from llmforge.recipe import ServingSpec
from llmforge.serving import Engine, EngineOptions, EngineProcess, Request, Sampling
from llmforge.serving.prefix_cache import BLOCK, Prefix
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.saved_prefixes import FOLDER, INDEX, PrefixStore, read_prefixes

from ..samples.small_artifact import publish_small

IDS = tuple(np.random.default_rng(3).integers(20, 8000, 3 * BLOCK + 5).tolist())
ASKED = Request((*IDS, 21, 22, 23), Sampling(max_tokens=12, ignore_eos=True))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("prefixes"), sample_checkpoint)


def served(artifact: Artifact, options: EngineOptions) -> tuple[list[int], int, tuple[str, ...]]:
    """Give the tokens of one answer, how many of its prompt were read from the cache, and the notes."""
    with Engine.load(artifact.path, options) as engine:
        tokens = [chunk.token_id for chunk in engine.stream(ASKED) if chunk.token_id is not None]
        stats = engine.stats()
    return tokens, stats.prefix_hit_tokens, stats.notes


def options(folder: Path | None, **changes: Any) -> EngineOptions:
    return replace(EngineOptions(prefixes=(Prefix("system", IDS),), prefix_store=folder), **changes)


def test_what_was_computed_once_is_read_back(artifact: Artifact, tmp_path: Path) -> None:
    plain, hits, _ = served(artifact, EngineOptions())
    assert hits == 0
    first, hits, notes = served(artifact, options(tmp_path))
    (file,) = tmp_path.iterdir()
    assert (first, hits) == (plain, 3 * BLOCK)
    assert notes[-1] == f"prefix system: {3 * BLOCK} tokens computed, and written to {file}"
    again, hits, notes = served(artifact, options(tmp_path))
    assert (again, hits) == (plain, 3 * BLOCK)
    assert notes[-1] == f"prefix system: {3 * BLOCK} tokens from {file}"


@pytest.mark.parametrize("damage", ["byte", "cut", "empty", "other"])
def test_what_is_damaged_is_computed_again(artifact: Artifact, tmp_path: Path, damage: str) -> None:
    plain = served(artifact, options(tmp_path))[0]
    (file,) = tmp_path.iterdir()
    data = bytearray(whole := file.read_bytes())
    if damage == "byte":
        data[-100] ^= 1
    if damage == "other":  # arrays of another model, intact
        store = PrefixStore(tmp_path, artifact.path)
        store.save(IDS[: 3 * BLOCK], {"past": np.zeros((3, 2), np.float32)})
    else:
        file.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "byte": data}[damage])
    tokens, _, notes = served(artifact, options(tmp_path))
    assert tokens == plain
    assert "computed, and written" in notes[-1]
    assert file.read_bytes() == whole


def test_other_tokens_and_other_artifacts_have_other_files(
    artifact: Artifact, tmp_path: Path, sample_checkpoint: Path
) -> None:
    other = publish_small(tmp_path / "other", sample_checkpoint, context=128)
    stores = [PrefixStore(tmp_path, each.path) for each in (artifact, other)]
    assert len({store.file(ids) for store in stores for ids in (IDS, IDS[1:])}) == 4


def test_what_has_no_room_is_said(artifact: Artifact, tmp_path: Path) -> None:
    block = Engine.load(artifact.path, EngineOptions())
    with block:
        assert block._scheduler.prefix_cache is not None
        size = block._scheduler.prefix_cache.block_bytes
    assert (
        "32 of 96 tokens fit into the prefix cache"
        in served(artifact, options(tmp_path, prefix_cache_bytes=size))[2][-1]
    )
    assert "there is no prefix cache" in served(artifact, options(tmp_path, prefix_cache_bytes=0))[2][-1]
    short = options(tmp_path, prefixes=(Prefix("short", IDS[:9]),))
    assert "not kept, it has 9 tokens, and a block 32" in served(artifact, short)[2][-1]
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="288 tokens"):
        Engine.load(artifact.path, options(None, prefixes=(Prefix("long", IDS * 3),)))


def test_prefixes_of_chats_are_what_all_their_prompts_begin_with(artifact: Artifact, tmp_path: Path) -> None:
    encoder = PromptEncoder.read(artifact.path)
    messages = [{"role": "system", "content": "Be brief, and never lie."}]
    file = tmp_path / "prefixes.jsonl"
    file.write_text(
        f"{json.dumps({'name': 'chat', 'messages': messages})}\n\n{json.dumps({'prompt': 'Once upon a time'})}\n"
    )
    chat, text = read_prefixes(file, encoder)
    assert (chat.name, text.name) == ("chat", "line 2")
    for asked in ("Why?", "zebras", "42"):
        prompt = encoder.encode_chat([*messages, {"role": "user", "content": asked}])
        assert tuple(prompt[: len(chat.ids)]) == chat.ids
    assert len(chat.ids) > len(encoder.encode("Be brief, and never lie."))
    assert text.ids == tuple(encoder.encode("Once upon a time")[:-1])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "0 prefixes"), ("{", "line 1: no JSON"), ("[]", "either prompt or messages"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"), ('{"messages": 3}', "expected a list"),
        ('{"messages": [{"role": 1}]}', "line 1: messages"), ("[" * 100_000, "line 1: no JSON"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_refused(artifact: Artifact, tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "prefixes.jsonl"
    file.write_text(line)
    with pytest.raises(InputError, match=says):
        read_prefixes(file, PromptEncoder.read(artifact.path))


def test_a_process_of_the_engine_has_them_too(artifact: Artifact, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.jsonl"
    file.write_text(json.dumps({"prompt": "word " * 60}))
    with EngineProcess(artifact.path, EngineOptions(prefix_store=tmp_path / "store"), prefixes=file) as engine:
        assert "computed, and written" in engine.stats().notes[-1]
    assert len(list((tmp_path / "store").iterdir())) == 1


def test_a_folder_without_prefixes_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli, ["serve", str(artifact.path), "--prefix-store", str(tmp_path)])
    assert (refused.exit_code, "--prefixes" in refused.stderr) == (2, True)


SYSTEM = "Be brief, and never lie. " * 6


def spec(prefixes: Any) -> ServingSpec:
    """Make a recipe's section."""
    return ServingSpec.model_validate_json(json.dumps({"prefixes": prefixes}))


@pytest.fixture
def shipped(artifact: Artifact, tmp_path: Path) -> Callable[..., Path]:
    """Give what puts prefixes into a copy of the artifact, as a build does."""

    def ship(**given: Any) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(artifact.path, copy)
        for each in (copy, *copy.rglob("*")):
            each.chmod(0o755 if each.is_dir() else 0o644)
        notes = prefixes.write(copy, spec(given or {"support": SYSTEM}), targets.local())
        assert not any("at each start" in note for note in notes)
        return copy

    return ship


def chat(folder: Path, **changes: Any) -> tuple[list[int], int, tuple[str, ...]]:
    """Give the tokens of an answer to a chat, how many of its prompt were read from the cache, and the notes."""
    with Engine.load(folder, EngineOptions(**changes)) as engine:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Why?"}]
        request = Request(tuple(engine.encoder.encode_chat(messages)), Sampling(max_tokens=12, ignore_eos=True))
        tokens = [chunk.token_id for chunk in engine.stream(request) if chunk.token_id is not None]
        stats = engine.stats()
    return tokens, stats.prefix_hit_tokens, stats.notes


def test_prefixes_of_an_artifact_are_there_from_the_start(artifact: Artifact, shipped: Callable[..., Path]) -> None:
    plain, hits, _ = chat(artifact.path)
    assert hits == 0
    copy = shipped()
    (file,) = (copy / "engine" / FOLDER).glob("*.prefix")
    tokens, hits, notes = chat(copy)
    assert tokens == plain
    assert hits >= BLOCK
    assert notes[-1] == f"prefix support: {hits} tokens from {file}"
    with EngineProcess(copy) as engine:  # as `serve` and Triton's model load it
        assert engine.stats().notes[-1] == notes[-1]
    before = file.read_bytes()
    file.unlink()
    shutil.rmtree(copy / "engine" / FOLDER)
    prefixes.write(copy, spec({"support": SYSTEM}), targets.local())
    assert file.read_bytes() == before  # so versions of builds stay the same


def test_prefixes_of_another_engine_are_not_used(artifact: Artifact, shipped: Callable[..., Path]) -> None:
    plain = chat(artifact.path)[0]
    copy = shipped()
    runtime = copy / "engine" / "runtime.json"
    runtime.write_text(runtime.read_text().replace("\n", " \n", 1))  # as little as can change
    tokens, hits, notes = chat(copy)
    assert (tokens, hits >= BLOCK) == (plain, True)
    assert "tokens computed (the artifact has none of this engine" in notes[-1]
    kept = copy.parent / "kept"
    assert f"computed, and written to {kept}" in chat(copy, prefix_store=kept)[2][-1]
    assert f"tokens from {kept}" in chat(copy, prefix_store=kept)[2][-1]


@pytest.mark.parametrize(
    ("index", "says"),
    [("{", "JSON"), ("{}", "prefixes"), ('{"prefixes": [{"name": "a", "ids": ["b"]}]}', "ids"), (None, "no such file")],
)
def test_a_damaged_index_is_refused(shipped: Callable[..., Path], index: str | None, says: str) -> None:
    file = shipped() / "engine" / FOLDER / INDEX
    file.unlink() if index is None else file.write_text(index)
    with pytest.raises(InputError, match=f"(?is){INDEX}.*{says}"):
        Engine.load(file.parents[2])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": "Be."}, "prefixes.a: 1?[0-9] tokens; expected 32 to 254"),
        ({"b": SYSTEM * 99}, "prefixes.b: .* tokens"),
        ({"c": {"messages": [{"role": 7}]}}, "prefixes.c: messages"),
    ],
)
def test_prefixes_that_cannot_be_computed_end_a_build(shipped: Callable[..., Path], given: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        shipped(**given)


def test_prefixes_that_the_day_stands_in_end_a_build(artifact: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(artifact.path, copy)
    template = copy / "tokenizer" / "chat_template.jinja"
    template.chmod(0o644)
    template.write_text("{{ strftime_now('%d') }}" + template.read_text())
    with pytest.raises(UnsupportedError, match="writes the day"):
        prefixes.write(copy, spec({"a": SYSTEM}), targets.local())


def test_run_reads_what_the_artifact_has_of_a_prompt(
    artifact: Artifact, tmp_path: Path, sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "word " * 60

    def put(folder: Path) -> None:
        assert prefixes.write(folder, spec({"words": {"prompt": text}}), targets.local())

    ships = publish_small(tmp_path, sample_checkpoint, finish=put)
    answers = []
    for path in (artifact.path, ships.path):
        ran = CliRunner().invoke(cli, ["run", str(path), text + "and more", "--max-tokens", "9", "--json"])
        assert ran.exit_code == 0, ran.stderr
        answers.append(json.loads(ran.stdout))
    plain, fast = answers
    assert plain["token_ids"] == fast["token_ids"]
    assert (plain["usage"]["cached_tokens"], fast["usage"]["cached_tokens"] >= BLOCK) == (0, True)
