"""The response cache: the same answer again, to the same request of the same client, and to no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmforge import serving
from llmforge.base.errors import Unavailable, UsageError
from llmforge.serving import Chunk, Engine, EngineOptions, EngineProcess, Request, Runner, Sampling, response_cache

from ..samples.small_artifact import publish_small

ASKED = Request((21, 22, 23), Sampling(max_tokens=9, ignore_eos=True), client="a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Path:
    return publish_small(tmp_path_factory.mktemp("responses"), sample_checkpoint).path


@pytest.fixture(scope="module")
def runner(folder: Path) -> Runner:
    return serving.load(folder)


def said(engine: Engine | EngineProcess, request: Request) -> list[Chunk]:
    return list(engine.stream(request))


def plain(chunks: list[Chunk]) -> list[tuple[str, int | None, str | None]]:
    return [(chunk.text, chunk.token_id, chunk.finish_reason) for chunk in chunks]


def counted(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.response_cache_hits, stats.response_cache_misses


def test_the_same_request_gets_the_same_answer(runner: Runner) -> None:
    with Engine(runner, EngineOptions(response_cache=4, prefix_cache_bytes=0)) as engine:
        first = said(engine, ASKED)
        again = said(engine, replace(ASKED, sampling=replace(ASKED.sampling, seed=7), timeout_s=60, priority=3))
        assert plain(again) == plain(first)
        assert counted(engine) == (1, 1)
        assert engine.stats().output_tokens == 9  # the second one ran nothing
        usage = again[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (3, 3, 9)
    with pytest.raises(Unavailable):
        engine.stream(ASKED)


@pytest.mark.parametrize(
    "other",
    [
        replace(ASKED, client="b"),
        replace(ASKED, prompt=(21, 22, 24)),
        replace(ASKED, sampling=replace(ASKED.sampling, max_tokens=8)),
        replace(ASKED, sampling=replace(ASKED.sampling, stop=("x",))),
        replace(ASKED, special_tokens=frozenset({5})),
    ],
)
def test_another_request_is_computed(runner: Runner, other: Request) -> None:
    with Engine(runner, EngineOptions(response_cache=4)) as engine:
        said(engine, ASKED)
        said(engine, other)
        assert counted(engine) == (0, 2)


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"logprobs": 1}])
def test_what_differs_or_is_large_is_not_kept(runner: Runner, changes: dict[str, float]) -> None:
    request = replace(ASKED, sampling=replace(ASKED.sampling, **changes))
    with Engine(runner, EngineOptions(response_cache=4)) as engine:
        said(engine, request)
        said(engine, request)
        assert counted(engine) == (0, 0)


def test_what_was_cut_off_is_not_kept(runner: Runner) -> None:
    with Engine(runner, EngineOptions(response_cache=4)) as engine:
        stream = engine.stream(replace(ASKED, sampling=replace(ASKED.sampling, max_tokens=200)))
        next(stream)
        engine.cancel(stream.ticket)
        assert list(stream)[-1].finish_reason == "cancelled"
        said(engine, replace(ASKED, sampling=replace(ASKED.sampling, max_tokens=200)))
        assert counted(engine) == (0, 2)


def test_the_oldest_answers_go(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [replace(ASKED, prompt=(number, 40)) for number in range(21, 24)]
    with Engine(runner, EngineOptions(response_cache=2)) as engine:
        for request in (*asked, asked[2], asked[1], asked[0]):
            said(engine, request)
        assert counted(engine) == (2, 4)
    monkeypatch.setattr(response_cache, "MOST_TOKENS", 15)  # one answer of nine, with its end
    with Engine(runner, EngineOptions(response_cache=9)) as engine:
        for request in (asked[0], asked[1], asked[1], asked[0]):
            said(engine, request)
        assert counted(engine) == (1, 3)


def test_it_is_off_by_default_and_bounded(runner: Runner) -> None:
    with Engine(runner) as engine:
        said(engine, ASKED)
        said(engine, ASKED)
        assert counted(engine) == (0, 0)
        assert engine.stats().output_tokens == 18
    with pytest.raises(UsageError, match="response_cache -1: expected 0"):
        EngineOptions(response_cache=-1)


def test_a_process_of_the_engine_has_one_too(folder: Path) -> None:
    with EngineProcess(folder, EngineOptions(response_cache=4)) as engine:
        assert plain(said(engine, ASKED)) == plain(said(engine, ASKED))
