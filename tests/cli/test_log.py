"""The JSON log on standard error, and the trace of a build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmforge.compile
from llmforge.base import spans
from llmforge.base.errors import DataError
from llmforge.cli import cli

from ..samples.reports import make
from .test_commands import BuildResult

RECIPE = Path(__file__).parents[2] / "recipes" / "fp32.yaml"


class Pipeline:
    """Stands for llmforge.compile.pipeline."""

    error: Exception | None = None

    def build(self, recipe: Any, out: Path, progress: Any, cache: Any, **others: Any) -> BuildResult:
        progress.stage("Trace")
        for done in range(1, 1001):
            progress.advance(done, 1000)
        progress.stage("Pass fuse-norms")
        with spans.span("rewrite"):
            spans.annotate(nodes=3)
        if self.error is not None:
            raise self.error
        return BuildResult(out / "x", make(notes=("a fallback",)))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    fake = Pipeline()
    monkeypatch.setattr(llmforge.compile, "pipeline", fake, raising=False)
    return fake


def invoke(*args: str | Path, **env: str) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], env=env)


def events(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize("place", ["group", "command", "environment"])
def test_a_build(fake: Pipeline, tmp_path: Path, place: str) -> None:
    option = ("--log-format", "json")
    words = ("build", RECIPE, "--out", tmp_path)
    done = {
        "group": lambda: invoke(*option, *words),
        "command": lambda: invoke(*words, *option),
        "environment": lambda: invoke(*words, LLMFORGE_LOG_FORMAT="json"),
    }[place]()
    assert done.exit_code == 3  # the figures of `make` fail a gate
    found = events(done)
    assert all(each["time"].endswith("Z") for each in found)
    kinds = [(each["event"], each.get("name") or each["message"].partition("\n")[0]) for each in found]
    assert kinds == [
        ("stage", "Load llmforge"),
        ("span", "Load llmforge"),
        ("stage", "Trace"),
        ("progress", "Trace"),
        ("progress", "Trace"),
        ("span", "Trace"),
        ("stage", "Pass fuse-norms"),
        ("span", "rewrite"),
        ("span", "Pass fuse-norms"),
        ("span", "build"),
        ("note", "a fallback"),
        ("error", "a gate failed"),
    ]
    assert (found[4]["done"], found[4]["total"]) == (1000, 1000)
    by_name = {each["name"]: each for each in found if each["event"] == "span"}
    assert by_name["rewrite"]["parent_span_id"] == by_name["Pass fuse-norms"]["span_id"]
    assert by_name["rewrite"]["attributes"] == {"nodes": 3}
    assert by_name["Trace"]["parent_span_id"] == by_name["build"]["span_id"]
    assert len({each["trace_id"] for each in by_name.values()}) == 1
    assert found[-1]["exit_code"] == 3
    assert done.stdout.splitlines()[-1] == str(tmp_path / "x")


def test_errors_are_events(fake: Pipeline, tmp_path: Path) -> None:
    fake.error = DataError("the text is damaged", hint="fetch it again")
    done = invoke("--log-format", "json", "build", RECIPE, "--out", tmp_path, "--quiet")
    (event,) = events(done)
    del event["time"]
    assert event == {
        "event": "error", "message": "the text is damaged", "hint": "fetch it again", "kind": "DataError",
        "exit_code": 5,
    }  # fmt: skip
    assert done.exit_code == 5
    for words in (("no-such-command",), ("build", "--no-such-option"), ("run",), ("targets", "nothing-like-it")):
        done = invoke("--log-format", "json", *words)
        (event,) = events(done)
        assert (event["event"], event["exit_code"], done.exit_code) == ("error", 2, 2)


@pytest.mark.parametrize("bug", [ZeroDivisionError("division by zero"), AttributeError("a name"), OSError("a disk")])
def test_a_bug_is_one_event_with_its_traceback(fake: Pipeline, tmp_path: Path, bug: Exception) -> None:
    fake.error = bug
    done = invoke("--log-format", "json", "build", RECIPE, "--out", tmp_path, "--quiet")
    (event,) = events(done)
    assert done.exit_code == event["exit_code"] == 1
    assert (event["event"], event["kind"]) == ("error", "bug")
    assert event["message"] == f"{type(bug).__name__}: {bug}"
    assert event["hint"].startswith("This is a bug in llmforge. Please report it")
    lines = event["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == event["message"]
    assert any("in build" in line for line in lines)
    text = invoke("build", RECIPE, "--out", tmp_path, "--quiet")
    assert text.exception is bug  # which `main` lets through, with a note
    assert text.stderr == ""


def test_text_stays_the_default(fake: Pipeline, tmp_path: Path) -> None:
    done = invoke("build", RECIPE, "--out", tmp_path)
    assert done.stderr.startswith("Load llmforge\nTrace\n")
    assert invoke("--log-format", "xml", "targets").exit_code == 2


def test_a_trace_is_written_however_the_build_ends(fake: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert invoke("build", RECIPE, "--out", tmp_path, "--trace", file).exit_code == 3
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert names == [
        "process_name", "build", "Load llmforge", "Trace", "Pass fuse-norms", "rewrite"
    ]  # fmt: skip
    fake.error = DataError("bad")
    assert invoke("build", RECIPE, "--out", tmp_path, "--trace", file).exit_code == 5
    by_name = {event["name"]: event for event in json.loads(file.read_text())["traceEvents"]}
    assert by_name["build"]["args"]["error"] == "DataError"
    assert "error" not in by_name["rewrite"]["args"]
    done = invoke("build", RECIPE, "--out", tmp_path, "--trace", tmp_path / "no" / "trace.json")
    assert done.exit_code == 2
    assert "there is no folder" in done.stderr
