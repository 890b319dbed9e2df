"""Every option of sampling through the engine, on the trained sample checkpoint: what clients get."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import Constraint
from llmforge.serving import Engine, EngineOptions, Request, Runner, Sampling
from llmforge.serving.scheduler import SlotScheduler
from llmforge.serving.speculation import PromptLookup, Speculation

from ..models.small_engines import AlwaysPays, Received, sample_runner

pytestmark = pytest.mark.xdist_group("sampling_engine")  # its fixtures take seconds: they are made once

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "default": {"type": "boolean"}},
    "required": ["name", "default"],
    "additionalProperties": False,
}
SAMPLINGS = {
    "greedy": Sampling(max_tokens=40),
    "drawn": Sampling(max_tokens=40, temperature=1.0, seed=1),
    "truncated": Sampling(max_tokens=40, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=2),
    "penalized": Sampling(max_tokens=40, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "with log probabilities": Sampling(max_tokens=40, temperature=0.5, seed=3, logprobs=4),
    "constrained": Sampling(max_tokens=200, temperature=1.5, seed=4, constraint=Constraint.json_schema(SCHEMA)),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory, sample_checkpoint) -> Runner:
    return sample_runner(tmp_path_factory.mktemp("sampling"), sample_checkpoint)


@pytest.fixture(scope="module")
def prompt(runner) -> tuple[int, ...]:
    return tuple(runner.encode("If the file does not exist, the file is not opened. If the file"))


def answers(runner: Runner, prompt: tuple[int, ...], *, speculate: bool) -> dict[str, Received]:
    """Answer `prompt` under each of the samplings, all together."""
    scheduler = SlotScheduler(
        runner.session,
        runner.session.allocate(8, runner.config.max_context),
        runner.samplers,
        EngineOptions(max_queue=0, prefix_cache_bytes=0),
        speculation=Speculation(PromptLookup(), AlwaysPays()) if speculate else None,
    )
    received = {name: Received() for name in SAMPLINGS}
    for name, sampling in SAMPLINGS.items():
        scheduler.add(Request(prompt, sampling), received[name].receive)
    while scheduler.step():
        pass
    return received


@pytest.fixture(scope="module")
def plain(runner, prompt) -> dict[str, Received]:
    return answers(runner, prompt, speculate=False)


def test_speculation_changes_no_token_of_any_sampling(runner, prompt, plain):
    drafted = answers(runner, prompt, speculate=True)
    for name, each in drafted.items():
        assert each.tokens == plain[name].tokens, name
        assert each.text == plain[name].text, name
    accepted = {name: each.chunks[-1].usage.accepted_tokens for name, each in drafted.items()}
    assert accepted["greedy"] > 5
    assert accepted["with log probabilities"] > 0


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_answers_are_the_same_with_drafts(runner, data, count):
    """Prompts of real text, of which what follows often stands before: 48 tokens of each, token for token."""
    texts = [json.loads(line)["text"] for line in (data / "evaluation.jsonl").read_text().splitlines()]
    ids = [tuple(runner.encode(text)) for text in texts]
    prompts = [each[at : at + 64] for at in range(0, 4096, 64) for each in ids if len(each) >= at + 64][:count]
    assert len(prompts) == count
    tokens, totals = {}, {}
    for speculate in (False, True):
        scheduler = SlotScheduler(
            runner.session,
            runner.session.allocate(8, runner.config.max_context),
            runner.samplers,
            EngineOptions(max_queue=count, prefix_cache_bytes=0),
            speculation=Speculation(PromptLookup(), AlwaysPays()) if speculate else None,
        )
        received = [Received() for _ in prompts]
        for prompt, each in zip(prompts, received, strict=True):
            scheduler.add(Request(prompt, Sampling(max_tokens=48, ignore_eos=True)), each.receive)
        while scheduler.step():
            pass
        tokens[speculate], totals[speculate] = [each.tokens for each in received], scheduler.stats()
    assert sum(a == b for a, b in zip(tokens[False], tokens[True], strict=True)) == count
    assert totals[True].accepted_tokens > count


class _Likeliest:
    """Drafts the token that is likeliest after a text of its own, so that many stand and many do not."""

    def __init__(self, runner: Runner) -> None:
        self._known: dict[tuple[int, ...], int] = {}
        self._runner = runner

    def propose(self, key: object, tokens: list[int], most: int) -> list[int]:
        text = tuple(tokens)
        if text not in self._known:
            self._known[text] = int(self._runner.logits(text)[-1].argmax())
        return [self._known[text]]

    def forget(self, key: object) -> None:
        pass


@pytest.mark.thorough
def test_drawn_tokens_are_distributed_as_the_model_says(runner, prompt):
    """At T = 1, of 3000 answers: the second token given the first, which a verification gives, by chi-squared."""
    scheduler = SlotScheduler(
        runner.session,
        runner.session.allocate(8, runner.config.max_context),
        runner.samplers,
        EngineOptions(max_queue=3000, prefix_cache_bytes=1 << 24),
        speculation=Speculation(_Likeliest(runner), AlwaysPays()),
    )
    received = [Received() for _ in range(3000)]
    for seed, each in enumerate(received):
        sampling = Sampling(max_tokens=3, temperature=1.0, top_k=8, seed=seed, ignore_eos=True)
        scheduler.add(Request(prompt, sampling), each.receive)
    while scheduler.step():
        pass
    assert 500 < scheduler.stats().accepted_tokens < 2900
    pairs = Counter(tuple(each.tokens[:2]) for each in received)
    statistic, freedom = 0.0, 0
    for first in {first for first, _ in pairs}:
        seen = {second: count for (one, second), count in pairs.items() if one == first}
        logits = runner.logits((*prompt, first))[-1].astype(np.float64)
        kept = np.argsort(logits)[-8:]
        shares = np.exp(logits[kept] - logits[kept].max())
        expected = dict(zip(kept.tolist(), shares / shares.sum() * sum(seen.values()), strict=True))
        assert seen.keys() <= expected.keys()
        common = [token for token, count in expected.items() if count >= 5]
        rest = [
            (
                sum(seen.get(t, 0) for t in expected if t not in common),
                sum(expected[t] for t in expected if t not in common),
            )
        ]
        cells = [(seen.get(token, 0), expected[token]) for token in common] + [each for each in rest if each[1] >= 5]
        if len(cells) > 1:
            whole = sum(count for _, count in cells) / sum(count for count, _ in cells)
            statistic += sum((count * whole - wanted) ** 2 / wanted for count, wanted in cells)
            freedom += len(cells) - 1
    assert freedom > 10
    assert stats.chi2.sf(statistic, freedom) > 1e-3


def test_options_do_what_they_say(plain):
    greedy, penalized = plain["greedy"].tokens, plain["penalized"].tokens
    assert len(set(penalized)) > len(set(greedy)), "penalties bring more different tokens"
    assert len({tuple(each.tokens) for each in plain.values()}) == len(plain)
    record = json.loads(plain["constrained"].text)
    assert record.keys() == {"name", "default"}
    assert plain["constrained"].reason == "stop"


def test_log_probabilities_come_with_each_token(plain):
    chunks = [chunk for chunk in plain["with log probabilities"].chunks if chunk.token_id is not None]
    for chunk in chunks:
        assert chunk.logprob.token_id == chunk.token_id
        best = [value for _, value in chunk.logprob.top]
        assert len(best) == 4
        assert best == sorted(best, reverse=True)
        assert chunk.logprob.logprob <= best[0] <= 0
    assert any(chunk.logprob.top[0][0] != chunk.token_id for chunk in chunks)
    assert all(chunk.logprob is None for chunk in plain["greedy"].chunks)


def test_stop_strings_and_stop_tokens(runner, prompt):
    whole = list(runner.generate(prompt, Sampling(max_tokens=40)))
    text, tokens = "".join(chunk.text for chunk in whole), [chunk.token_id for chunk in whole[:-1]]
    stop = text[len(text) // 2 :][:6]
    place = text.find(stop)

    def ended(**options: object) -> tuple[str, str | None]:
        chunks = list(runner.generate(prompt, Sampling(max_tokens=40, **options)))
        return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    assert ended(stop=(stop,)) == (text[:place], "stop")
    assert ended(stop=(stop,), include_stop=True) == (text[: place + len(stop)], "stop")
    assert ended(stop=(text[:3],), min_tokens=len(tokens))[0] == text
    token = tokens[7]
    at = tokens.index(token)
    assert ended(stop_token_ids=(token,)) == (runner.tokenizer.decode(tokens[:at]), "stop")
    assert ended(stop_token_ids=(token,), min_tokens=at + 1)[0] != runner.tokenizer.decode(tokens[:at])


def test_a_regular_expression_holds_through_the_engine(runner, prompt):
    sampling = Sampling(temperature=1.5, max_tokens=50, constraint=Constraint("regex", r"[A-Z][a-z]{2,9}: \d{4}"))
    requests = Request(prompt, sampling).repeated(8)
    with Engine(runner) as engine:
        streams = [engine.stream(request) for request in requests]
        texts = ["".join(chunk.text for chunk in stream) for stream in streams]
    assert len(set(texts)) > 4
    assert all(re.fullmatch(r"[A-Z][a-z]{2,9}: [0-9]{4}", text) for text in texts)


def test_what_makes_no_sense_is_refused_when_it_is_submitted(runner, prompt):
    with Engine(runner) as engine:
        for sampling, message in [
            (Sampling(logit_bias=((8192, 1.0),)), "logit_bias: token id 8192; the vocabulary has 8192"),
            (Sampling(constraint=Constraint("regex", "(")), "regex: "),
        ]:
            with pytest.raises(UsageError, match=message):
                engine.submit(Request(prompt, sampling), Received().receive)
        assert engine.alive
