"""Chats that an artifact and its checkpoint answer: read as serving reads them, and held beside one another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from llmforge import serving
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint
from llmforge.measure import accepted_length, behaviour
from llmforge.measure.accepted_length import Drafting
from llmforge.measure.baseline import Baseline
from llmforge.measure.scoring import CheckpointSide, EngineSide
from llmforge.measure.tasks import TaskEngine
from llmforge.metrics.behaviour.document import BehaviourDocument
from llmforge.report import behaviour as report
from llmforge.runtime.config import SpeculationFacts
from llmforge.serving import Engine, EngineOptions, Request, Runner, Sampling
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import tool_prompt
from llmforge.serving.protocol.answer import reasoning_of
from llmforge.serving.speculation import Payoff, PromptLookup, Speculation

from ..samples.small_artifact import publish_small

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
TOOL = {"type": "function", "function": {"name": "set_timer", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Runner:
    return serving.load(publish_small(tmp_path_factory.mktemp("small"), sample_checkpoint, context=1024).path)


def document(number: int = 0, content: str = "Count to three.", **more: Any) -> BehaviourDocument:
    return BehaviourDocument.model_validate(
        {"id": f"chat-{number}", "messages": [{"role": "user", "content": content}], "max_tokens": 6, **more}
    )


def read(runner: Runner, text: str, **more: Any) -> Any:
    """Read `text` as an answer."""
    prompts, _ = behaviour.prepare([document(**{"max_tokens": 200, **more})], runner)
    ids = runner.tokenizer.encode(text, add_special_tokens=False).ids
    return behaviour.read_answer(prompts[0], ids, runner, reasoning_of(runner))


def test_answers_many_at_a_time_are_those_that_each_prompt_gets_alone(runner: Runner) -> None:
    prompts = [runner.encode_chat([{"role": "user", "content": "word " * count}]) for count in (1, 9, 3, 20, 5)]
    counts = [6, 3, 8, 2, 5]
    found = EngineSide(runner, "").answers(prompts, counts)
    for prompt, count, said in zip(prompts, counts, found, strict=True):
        chunks = runner.generate(prompt, Sampling(max_tokens=count))
        alone = [chunk.token_id for chunk in chunks if chunk.token_id is not None]
        assert said == [token for token in alone if token not in runner.config.eos_token_ids]
        assert len(said) <= count


def test_an_engine_and_its_checkpoint_answer_the_same_chats(runner: Runner, sample_checkpoint: Path) -> None:
    refusal = {"expected": True, "patterns": ["no"], "openings": ["I am sorry", "Sure"]}
    asked = [document(i, f"Say {i}.", refusal=refusal if i % 2 else None) for i in range(6)]
    asked.append(document(9, tools=[TOOL]))
    found, notes = behaviour.run(
        asked, TaskEngine(runner, "small engine", 1), Checkpoint.open(sample_checkpoint), Silent()
    )
    assert found is not None
    assert found.documents == tuple(f"chat-{i}" for i in range(6))
    (note,) = notes
    assert "1 of 7 documents are left out (chat-9)" in note
    assert "not shown" in note or "cannot be read" in note
    assert (found.engine, found.baseline is None) == ("small engine", False)
    alike = {"answer_odds", "end_shift"}  # the checkpoint's answers, read by both
    assert {"checks", "refusal", "refusal_margin", "loops", "ended", "length_change", *alike} == set(found.outcomes)
    assert min(found.outcomes["end_shift"].artifact) > 0  # its weights are others
    own = found.outcomes["answer_odds"]
    assert own.baseline is not None
    assert all(there > here for there, here in zip(own.baseline, own.artifact, strict=True))
    margin = found.outcomes["refusal_margin"]
    assert margin.documents == (1, 3, 5)
    baseline = Baseline(Checkpoint.open(sample_checkpoint), threads=1)
    theirs = CheckpointSide(lambda: baseline, "", 256, runner.config.eos_token_ids, runner.tokenizer.decode)
    ids = runner.encode_chat(asked[1].messages)
    openings = [runner.tokenizer.encode(text, add_special_tokens=False).ids for text in refusal["openings"]]
    (refuses, _), (answers, _) = theirs.score([(ids, opening) for opening in openings])
    assert margin.baseline is not None
    assert margin.baseline[0] == pytest.approx(refuses - answers, abs=1e-3)


def test_calls_are_read_as_the_server_reads_them(runner: Runner) -> None:
    assert runner.template is not None
    shown = Runner(runner.session, runner.config, runner.tokenizer, tool_prompt.added(runner.template))
    called = '<tool_call>\n{"name": "set_timer", "arguments": {"minutes": 5}}\n</tool_call>'
    answer = read(shown, called, tools=[TOOL])
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("set_timer", {"minutes": 5})]
    assert (answer.text.strip(), answer.finish_reason) == ("", "tool_calls")
    assert read(shown, "Five minutes.", tools=[TOOL]).calls == ()
    assert read(shown, called).calls == ()  # none are offered


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (("<think>", "</think>"), "<think>Let me see.</think>One, two."),
        (
            HARMONY,
            "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>One, two.",
        ),
    ],
)
def test_thoughts_are_read_and_counted_as_the_server_does(runner: Runner, marks: Sequence[str], text: str) -> None:
    tokenizer = Tokenizer.from_str(runner.tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    encoder = PromptEncoder(runner.config, tokenizer, runner.template)
    (prompt,), _ = behaviour.prepare([document(max_tokens=200)], encoder)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    made = behaviour.read_answer(prompt, ids, encoder, reasoning_of(encoder))
    assert (made.reasoning, made.text, made.thinking_open) == ("Let me see.", "One, two.", False)
    thought = text[: text.index("see.") + len("see.")]
    assert made.reasoning_tokens is not None
    inside = len(tokenizer.encode(thought, add_special_tokens=False).ids)
    assert 3 < made.reasoning_tokens <= inside + 1  # with the tags, where there are some
    cut = behaviour.read_answer(prompt, ids[: inside - 1], encoder, reasoning_of(encoder))
    assert cut.thinking_open


def test_an_answer_that_fills_its_tokens_did_not_end(runner: Runner) -> None:
    assert read(runner, "one two three", max_tokens=2).finish_reason == "length"
    assert read(runner, "one two three", max_tokens=90).finish_reason == "stop"


def test_without_a_template_nothing_is_asked(runner: Runner, sample_checkpoint: Path) -> None:
    bare = Runner(runner.session, runner.config, runner.tokenizer, None)
    engine = replace(TaskEngine(runner, "small engine", 1), runner=bare)
    found = behaviour.run([document()], engine, Checkpoint.open(sample_checkpoint), Silent())
    assert found == (None, (behaviour.NO_TEMPLATE,))


def test_what_the_context_does_not_hold_is_left_out(runner: Runner) -> None:
    prompts, (note,) = behaviour.prepare([document(), document(1, "word " * 1100)], runner)
    assert [prompt.document.id for prompt in prompts] == ["chat-0"]
    assert "exceed engine.max_context, 1024" in note


class Repeats:
    """Drafts the token before the last one, again and again."""

    def __init__(self) -> None:
        self.forgotten = 0

    def propose(self, key: object, tokens: Sequence[int], most: int) -> list[int]:
        """Draft."""
        return [tokens[-2]] * most

    def forget(self, key: object) -> None:
        """Count."""
        self.forgotten += 1


def test_the_accepted_length_of_an_answer_follows_from_its_tokens() -> None:
    proposer = Repeats()
    drafting = Drafting(proposer, 2, "prompt-lookup")
    # 7 | 7 5: the draft 7 7 stands once; 1: 7 7 stands nowhere; the last token has no room for a draft.
    assert list(drafting.steps([9, 7], [7, 7, 5, 1, 2])) == [(2, True), (1, True), (1, False)]
    assert drafting.accepted_length([9, 7], [7, 7, 5, 1, 2]) == pytest.approx(4 / 3)
    assert drafting.accepted_length([9, 7], [7]) is None
    assert proposer.forgotten == 3
    lookup = Drafting(PromptLookup(), 7, "prompt-lookup")
    assert lookup.accepted_length([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]) == 3.0  # three in one step


def test_accepted_lengths_are_those_that_the_engine_has(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Payoff, "pays", lambda *_: True)
    prompt, often = runner.encode("one two"), ((20, 40.0), (21, 39.9))  # two tokens that take turns, by and by
    speculation = Speculation(PromptLookup())
    with Engine(runner, EngineOptions(speculation="prompt-lookup")) as engine:
        request = Request(tuple(prompt), Sampling(max_tokens=60, ignore_eos=True, logit_bias=often))
        answer = [chunk.token_id for chunk in engine.stream(request) if chunk.token_id is not None]
        stats = engine.stats()
    drafting = Drafting(speculation.proposer, speculation.max_tokens, "prompt-lookup")
    taken = [tokens for tokens, _ in drafting.steps(prompt, answer)]
    assert sum(taken) == 59
    assert sum(each - 1 for each in taken) == stats.accepted_tokens > 0


def test_drafts_of_an_artifact_are_held_against_those_of_its_checkpoint(
    runner: Runner, sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SpeculationFacts("prompt-lookup", 5)
    drafting = serving.Runner(
        runner.session, replace(runner.config, speculation=facts), runner.tokenizer, runner.template
    )
    monkeypatch.setattr(accepted_length, "TIMED_TOKENS", 4)
    asked = [document(i, f"Say {i}.", slice="ab"[i % 2]) for i in range(6)]
    found, _ = behaviour.run(
        asked, TaskEngine(drafting, "small engine", 1), Checkpoint.open(sample_checkpoint), Silent()
    )
    assert found is not None
    assert found.speculation is not None
    assert (found.speculation.method, found.speculation.max_tokens) == ("prompt-lookup", 5)
    assert found.speculation.speedup is not None
    assert found.speculation.speedup.samples == 6
    outcome = found.outcomes["accepted_length"]
    assert outcome.baseline is not None
    assert min(*outcome.artifact, *outcome.baseline) >= 1
    assert set(outcome.slices) == {"a", "b"}
    assert "Drafts by prompt-lookup, at most 5 tokens; a token after the first came" in report.drafts(found)
    assert [row[0] for row in report.draft_rows(found)] == ["SLICE", "a", "b"]
