"""`llmforge shadow`: a trace and clients through two servers, files and exit codes; canaries decided rightly."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from llmforge.cli import cli

from ..servers.chat_server import chat_server, say
from ..servers.keyed_server import keyed_server

GATES = {"agreement": {"min": 0.8}, "error_rise": {"max": 0.1}, "behaviour.ended": {"min": -0.1}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace of 300 prompts and gates."""
    lines = [{"prompt": f"Count to {number}", "output_length": 8} for number in range(300)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "gates.yaml").write_text(json.dumps({"gates": GATES}))
    return tmp_path


def shadow(folder: Path, a: str, b: str, *options: object) -> Result:
    named = [a, b, "--trace", folder / "trace.jsonl", "--gates", folder / "gates.yaml", "--quiet", *options]
    return CliRunner().invoke(cli, ["shadow", *map(str, named)])


def test_equal_servers_pass_and_the_record_is_sealed(folder: Path) -> None:
    out = folder / "shadowed"
    with chat_server(say("one two three")) as a, chat_server(say("one two three")) as b:
        result = shadow(folder, a.url, b.url, "-o", out)
        assert result.exit_code == 0, result.output
        assert len(b.asked) < 200  # it stopped
    assert result.output.startswith("PASS: ")
    [record] = (out / "evidence").glob("*.json")
    suite = ElementTree.parse(out / "junit.xml").getroot()
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("llmforge shadow", "3", "0")
    assert "All" not in (out / "report.html").read_text()[:15]
    again = CliRunner().invoke(cli, ["shadow", "--verify", str(out), "--json"])
    assert again.exit_code == 0
    assert again.output.strip() == record.read_text().strip()


def test_a_damaged_server_fails_and_a_slow_one_too(folder: Path) -> None:
    with chat_server(say("one two three")) as a, chat_server(say("none")) as b:
        result = shadow(folder, a.url, b.url, "--text", "-o", folder / "out")
        assert result.exit_code == 3, result.output
        assert "FAIL  agreement" in result.output
        assert "none" in (folder / "out" / "report.html").read_text()
        (folder / "gates.yaml").write_text('{"gates": {"latency_change": {"max": 0.2}}}')
        b.delay_s = 0.02
        assert shadow(folder, a.url, b.url, "--concurrency", "2").exit_code == 3


def test_what_is_not_decided_by_the_end_is_inconclusive(folder: Path) -> None:
    with chat_server(say("one")) as a, chat_server(say("one")) as b:
        result = shadow(folder, a.url, b.url, "--requests", "9", "--seconds", "60")
        assert result.exit_code == 4, result.output
        assert len(b.asked) <= 9


def test_options_that_say_nothing_are_refused(folder: Path) -> None:
    url = "http://127.0.0.1:9"
    for words, said in (
        ([url, url], "either --trace or --listen"),
        ([url, url, "--trace", "t", "--listen", "0"], "either --trace or --listen"),
        ([url, url, "--trace", "t", "--stay"], "--stay requires --listen"),
        ([url, url, "--listen", "0", "--model", "m"], "--model requires --trace"),
    ):
        result = CliRunner().invoke(cli, ["shadow", *words])
        assert result.exit_code == 2, result.output
        assert said in result.output
    assert shadow(folder, url, url).exit_code == 8  # nobody answers


def test_hints_name_the_options_of_the_server_that_they_are_about(folder: Path) -> None:
    with chat_server(say("one")) as open_, keyed_server() as keyed, keyed_server(open_models=True, models=()) as empty:
        for a, b, said in (
            (keyed, open_.url, "give one with --api-key, or in the environment variable OPENAI_API_KEY"),
            (open_.url, keyed, "give one with --shadow-key, or in the environment variable LLMFORGE_SHADOW_KEY"),
            (empty, open_.url, "name it with --model"),
            (open_.url, empty, "name it with --shadow-model"),
        ):
            result = shadow(folder, a, b)
            assert result.exit_code == 8, result.output
            assert said in " ".join(result.output.split())


def test_help_names_options_that_shadow_has() -> None:
    said = " ".join(CliRunner().invoke(cli, ["shadow", "--help"]).output.split())
    assert "Key of A" in said
    assert "`serve --record DIR --record-text`" in said
    assert "--url" not in said


@pytest.mark.thorough
@pytest.mark.parametrize("stay", [False, True])
def test_it_listens_until_it_is_decided_or_told_to_stop(folder: Path, stay: bool) -> None:
    options = ["--gates", str(folder / "gates.yaml"), *(["--stay"] if stay else []), "--shadow-model", "m"]
    with chat_server(say("one two")) as a, chat_server(say("one two")) as b:
        code = "from llmforge.cli import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "shadow", a.url, b.url, "--listen", "0", "--json", *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with process:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            url = next(match[1] for line in lines if (match := re.search(r"requests at (http://\S+) on to", line)))
            for _ in range(400):
                try:
                    assert json.loads(_ask(url))["choices"][0]["text"] == "one two"
                except OSError:
                    break
                if stay and len(b.asked) > 150:
                    break
            if stay:
                process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            made = json.loads(process.stdout.read())
            assert process.wait(20) == 0
    assert made["verdict"] == "pass"
    assert made["requests"] < 150


def _ask(url: str) -> bytes:
    body = json.dumps({"prompt": "a", "temperature": 0, "max_tokens": 2}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        found: bytes = answer.read()
    return found


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[dict[str, str]]:
    """Three servers in this process, of the trained sample: as it is, as int8 by blocks, at 3 bits."""
    from ..samples.served_sample import DAMAGED, INT8, build, served

    folder = tmp_path_factory.mktemp("canary")
    artifacts = {
        "prod": build(folder / "prod", sample_checkpoint, None),
        "equal": build(folder / "equal", sample_checkpoint, INT8),
        "damaged": build(folder / "damaged", sample_checkpoint, DAMAGED),
    }
    with ExitStack() as stack:
        yield {name: stack.enter_context(served(artifact)) for name, artifact in artifacts.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("other", "code"), [("equal", 0), ("damaged", 3)])
def test_a_canary_is_decided_rightly_in_20_of_20(
    servers: dict[str, str], other: str, code: int, data: Path, folder: Path
) -> None:
    """Each time other texts, held against the checkpoint's own weights. Equal is int8 by blocks of 32, damaged 3 bits
    by blocks of 128. Seen: 56 requests to a PASS each time, 8 to 12 to a FAIL.
    """
    import random

    documents = [json.loads(line)["text"] for line in (data / "evaluation.jsonl").read_text().splitlines()]
    (folder / "gates.yaml").write_text('{"gates": {"agreement": {"min": 0.5}, "error_rise": {"max": 0.1}}}')
    ended: list[Any] = []
    for seed in range(20):
        rng = random.Random(seed)
        texts = [text[at : at + 80] for text in documents for at in range(0, len(text) - 80, 80)]
        chosen = rng.sample(texts, min(400, len(texts)))
        lines = [{"prompt": text, "output_length": 12} for text in chosen]
        (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = shadow(folder, servers["prod"], servers[other], "--json")
        ended.append((result.exit_code, json.loads(result.stdout.partition("\nerror")[0])["requests"]))
    print(other, ended)
    assert [each for each, _ in ended] == [code] * 20
