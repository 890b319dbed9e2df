"""`llmforge batch`: files of OpenAI's batch format, answered as the server answers, and gone on with after a kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from llmforge import serving as runtime
from llmforge.artifact import Artifact
from llmforge.base.errors import EnvironmentLacks, Unavailable, UsageError
from llmforge.cli import cli
from llmforge.serving import Engine, EngineOptions, Receiver, Request
from llmforge.serving.http import batch, create_app
from llmforge.serving.sequence import Ticket

from ...samples.small_artifact import publish_small

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("artifacts"), sample_checkpoint)


@pytest.fixture(scope="module")
def engine(small: Artifact) -> Iterator[Engine]:
    with Engine(runtime.load(small.path), EngineOptions(max_queue=1000)) as running:
        yield running


def line(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def lines(count: int) -> list[dict[str, Any]]:
    """Requests with seeds of their own, so that their answers are one and the same whoever gives them."""
    found = []
    for number in range(count):
        more: dict[str, Any] = {"seed": number, "max_tokens": 4 + number % 5}
        if number % 3:
            found.append(line(f"text {number}", prompt=f"Page {number % 4} of the guide, item {number}", **more))
        else:
            asked = [{"role": "user", "content": f"What is item {number}?"}]
            found.append(line(f"chat {number}", CHAT, messages=asked, **more))
    return found


def write(path: Path, asked: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in asked), encoding="utf-8")
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]


def run(engine: Any, asked: Path, out: Path, advance: Callable[[int, int], None] = lambda done, total: None) -> Any:
    requests = batch.read(asked, engine.encoder)
    partial = out.with_name(f"{out.name}.partial")
    with batch.Journal.opened(partial, {"requests": batch.digest_of(asked)}) as journal:
        counts = batch.answer_all(engine, "small", requests, journal, advance)
        journal.finish(out, requests)
    assert not partial.exists()
    return counts


class Recorded:
    """An engine that remembers what it was asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prompts: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, receive: Receiver) -> Ticket:
        self.prompts.append(request.prompt)
        return self._engine.submit(request, receive)


def test_answers_are_those_of_the_server_in_the_order_of_the_requests(engine: Engine, tmp_path: Path) -> None:
    asked = [*lines(20), line("two", prompt="If", n=2, seed=3, max_tokens=3), line("ids", prompt=[5, 6], seed=1)]
    counts = run(engine, write(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl")
    assert counts == batch.Counts(22, 22, 0)
    given = answers(tmp_path / "out.jsonl")
    assert [each["custom_id"] for each in given] == [each["custom_id"] for each in asked]
    with TestClient(create_app(engine, "small")) as server:
        for each, request in zip(given, asked, strict=True):
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            expected = server.post(request["url"], json=request["body"]).json()
            got = each["response"]["body"]
            assert got["id"] == each["response"]["request_id"]
            assert got["choices"] == expected["choices"]
            assert got["object"] == expected["object"]
            for tokens in ("prompt_tokens", "completion_tokens"):
                assert got["usage"][tokens] == expected["usage"][tokens]


def test_what_is_refused_has_the_error_of_the_server(engine: Engine, tmp_path: Path) -> None:
    bad = [
        line("none", prompt=""),
        line("sampling", prompt="If", temperature=-1),
        line("model", prompt="If", model="gpt-4o"),
        line("stream", prompt="If", stream=True),
        line("long", prompt=[5] * 300),
        {"custom_id": "body", "url": TEXT, "body": 3},
        line("tokens", prompt=[9999]),
    ]
    asked = write(tmp_path / "in.jsonl", [line("good", prompt="If", max_tokens=2), *bad])
    assert run(engine, asked, tmp_path / "out.jsonl") == batch.Counts(8, 1, 7)
    good, *refused = answers(tmp_path / "out.jsonl")
    assert good["response"]["status_code"] == 200
    with TestClient(create_app(engine, "small")) as server:
        for each, request in zip(refused, bad, strict=True):
            code, body = each["response"]["status_code"], each["response"]["body"]
            if request["custom_id"] == "stream":
                assert (code, body["error"]["param"]) == (400, "stream")
            else:
                expected = server.post(TEXT, json=request["body"])
                assert (code, body) == (expected.status_code, expected.json())


def test_prompts_that_begin_alike_come_one_after_another(engine: Engine, tmp_path: Path) -> None:
    prompts = [f"{kind} of the guide: item {number}" for number in range(6) for kind in ("Page", "Table", "Figure")]
    recorded = Recorded(engine)
    asked = [line(str(number), prompt=prompt, max_tokens=1) for number, prompt in enumerate(prompts)]
    run(recorded, write(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl")
    assert len(recorded.prompts) == 18
    kinds = [tokens[0] for tokens in recorded.prompts]
    assert sum(one != other for one, other in itertools.pairwise(kinds)) == 2


def test_what_was_answered_is_not_asked_again(engine: Engine, tmp_path: Path) -> None:
    asked, out = write(tmp_path / "in.jsonl", lines(30)), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"

    def interrupted(done: int, total: int) -> None:
        if done >= 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, asked, out, interrupted)
    assert not out.exists()
    kept = partial.read_bytes()
    partial.write_bytes(kept + b'{"custom_id": "text 29", "resp')  # a line that a kill cut short
    recorded = Recorded(engine)
    assert run(recorded, asked, out) == batch.Counts(30, 30, 0)
    assert len(recorded.prompts) == 30 - (len(kept.splitlines()) - 1)
    assert [each["custom_id"] for each in answers(out)] == [each["custom_id"] for each in lines(30)]
    whole = tmp_path / "whole.jsonl"
    run(engine, asked, whole)
    for one, other in zip(answers(out), answers(whole), strict=True):
        assert one["response"]["body"]["choices"] == other["response"]["body"]["choices"]


def test_a_journal_is_of_its_requests_and_has_one_writer(engine: Engine, tmp_path: Path) -> None:
    journal = tmp_path / "out.jsonl.partial"
    with (
        batch.Journal.opened(journal, {"requests": "a"}),
        pytest.raises(UsageError, match="another process writes"),
        batch.Journal.opened(journal, {"requests": "a"}),
    ):
        pass
    with (
        pytest.raises(UsageError, match="answers to other requests") as refused,
        batch.Journal.opened(journal, {"requests": "b"}),
    ):
        pass
    assert "remove it" in str(refused.value.hint)


class Broken:
    """An engine that fails after some requests."""

    def __init__(self, engine: Engine, error: Exception, after: int, *, alive: bool) -> None:
        self._engine, self._error, self._left, self._lives = engine, error, after, alive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def alive(self) -> bool:
        return self._lives or self._left > 0

    def submit(self, request: Request, receive: Receiver) -> Ticket:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return self._engine.submit(request, receive)


@pytest.mark.parametrize(
    ("error", "alive"), [(Unavailable("the engine failed"), False), (EnvironmentLacks("no process"), True)]
)
def test_an_engine_that_ends_is_no_answer(engine: Engine, tmp_path: Path, error: Exception, alive: bool) -> None:
    asked, out = write(tmp_path / "in.jsonl", lines(20)), tmp_path / "out.jsonl"
    with pytest.raises(type(error)):
        run(Broken(engine, error, 12, alive=alive), asked, out)
    assert not out.exists()
    assert run(engine, asked, out) == batch.Counts(20, 20, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it has no requests"),
        ("\n\n", "it has no requests"),
        ("{", "line 1 is not JSON"),
        ("3", "line 1: expected an object"),
        (json.dumps(line("")), "custom_id: expected a string"),
        (json.dumps({"url": TEXT, "body": {}}), "custom_id: expected a string"),
        (json.dumps({**line("a"), "method": "GET"}), "method: expected POST"),
        (json.dumps(line("a", "/v1/embeddings")), "url: expected /v1/chat/completions or /v1/completions"),
        (f"{json.dumps(line('a'))}\n{json.dumps(line('a'))}", "line 2: custom_id 'a' stands in an earlier line"),
    ],
)
def test_files_that_are_none_of_requests(engine: Engine, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(UsageError, match=says):
        batch.read(tmp_path / "in.jsonl", engine.encoder)


def test_the_command(small: Artifact, tmp_path: Path) -> None:
    asked, out = write(tmp_path / "in.jsonl", [*lines(5), line("bad", prompt="")]), tmp_path / "out.jsonl"
    command = ["batch", str(small.path), str(asked), "-o", str(out), "--json", "--quiet"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"output": str(out), "requests": 6, "completed": 5, "failed": 1}
    assert len(answers(out)) == 6
    again = CliRunner().invoke(cli, command)
    assert again.exit_code == 2
    assert "it is there already" in again.output
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_lines_killed_ten_times(small: Artifact, tmp_path: Path) -> None:
    asked, out = write(tmp_path / "in.jsonl", lines(5000)), tmp_path / "out.jsonl"
    partial, rng, kills = tmp_path / "out.jsonl.partial", random.Random(7), 0
    command = [sys.executable, "-m", "llmforge", "batch", str(small.path), str(asked), "-o", str(out), "--quiet"]
    known: dict[str, Any] = {}
    while not out.exists():
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        if kills < 10:
            more = len(known) + rng.randrange(1, 450)
            while running.poll() is None and (not partial.exists() or partial.read_bytes().count(b"\n") - 1 < more):
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            kills += 1
        _, said = running.communicate()
        if running.returncode not in (0, -signal.SIGKILL):
            raise AssertionError(said.decode())
        if partial.exists():
            whole = partial.read_bytes()
            lines_there = whole[: whole.rfind(b"\n") + 1].splitlines()[1:]
            found = {each["custom_id"]: each["id"] for each in map(json.loads, lines_there)}
            assert len(found) == len(lines_there)  # none twice
            assert known.items() <= found.items()  # none lost or written anew
            known = found
    assert kills == 10
    given = answers(out)
    assert [each["custom_id"] for each in given] == [each["custom_id"] for each in lines(5000)]
    assert known.items() <= {each["custom_id"]: each["id"] for each in given}.items()
