"""`llmforge judge`: our own server against the artifact that it serves, and files and exit codes of verdicts."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from llmforge import serving
from llmforge.cli import cli
from llmforge.serving import Engine
from llmforge.serving import http as serve
from llmforge.serving.http.server import make_server

from ..samples.small_artifact import publish_small
from ..servers.keyed_server import keyed_server


@dataclass(frozen=True)
class Served:
    url: str
    artifact: Path
    data: Path

    def judge(self, *options: object) -> Result:
        named = ["--url", self.url, "--data", self.data, "--max-tokens", "96", "--answers", "3", "--answer-tokens", "8"]
        return CliRunner().invoke(cli, ["judge", *map(str, (*named, *options)), "--quiet"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("judged")
    artifact = publish_small(folder, sample_checkpoint)
    data = folder / "text.jsonl"
    texts = [f"The parser reads {number} files." for number in range(10)]
    data.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    listening = socket.create_server(("127.0.0.1", 0))
    with Engine(serving.load(artifact.path)) as engine:
        server = make_server(serve.create_app(engine, "small"), serve.Address(grace_s=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.02)
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", artifact.path, data)
        server.should_exit = True
        thread.join()


def gates(folder: Path, limits: Any) -> Path:
    file = folder / "gates.yaml"
    file.write_text(json.dumps({"gates": limits}))
    return file


def test_what_an_artifact_serves_is_itself(served: Served, tmp_path: Path) -> None:
    file = gates(tmp_path, {"kld_mean": {"max": 1e-4}, "perplexity_ratio": {"max": 1.001}})
    result = served.judge("--reference", served.artifact, "--gates", file, "-o", tmp_path / "judged")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("PASS: small at http://127.0.0.1:")
    assert "3 of 3 greedy answers are the same" in result.output
    assert "KLD is estimated without bias" in result.output
    assert "TTFT: p50" in result.output
    [record] = (tmp_path / "judged" / "evidence").glob("*.json")
    page = (tmp_path / "judged" / "report.html").read_text()
    assert "held against the artifact small/" in page
    assert "Answers side by side" in page
    suite = ElementTree.parse(tmp_path / "judged" / "junit.xml").getroot()
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("llmforge judge", "2", "0")
    again = CliRunner().invoke(cli, ["judge", "--verify", str(tmp_path / "judged"), "--json"])
    assert again.exit_code == 0, again.output
    assert again.output.strip() == record.read_text().strip()


def test_chats_are_answered_by_both_and_decide(served: Served, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    asked = [{"messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 6} for number in range(20)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    chats.write_text("".join(json.dumps(each) + "\n" for each in [*asked, {**asked[0], "id": "t", "tools": [tool]}]))
    file = gates(tmp_path, {"behaviour.length_change": {"max": 0.3}, "behaviour.loops": {"rise_max": 0.5}})
    options = ("--reference", served.artifact, "--gates", file, "--behaviour", chats)
    result = served.judge(*options, "-o", tmp_path / "judged")
    assert result.exit_code == 0, result.output
    assert "20 chats; of the reference, of the endpoint, difference:" in result.output
    assert "note: behaviour: 1 of 21 documents are left out (t)" in result.output
    page = (tmp_path / "judged" / "report.html").read_text()
    assert "Endpoint and reference answered the same 20 chats" in page
    assert "Chats side by side" in page
    assert CliRunner().invoke(cli, ["judge", "--verify", str(tmp_path / "judged")]).exit_code == 0
    (record,) = (tmp_path / "judged" / "evidence").glob("*.json")
    forged = json.loads(record.read_text())
    forged["behaviour"]["outcomes"]["length_change"]["figures"]["artifact"]["value"] = -1.0
    text = json.dumps(forged)
    record.unlink()
    name = hashlib.sha256(text.encode()).hexdigest()
    (record.parent / f"{name}.json").write_text(text)
    refused = CliRunner().invoke(cli, ["judge", "--verify", str(tmp_path / "judged")])
    assert "length_change" in refused.output
    alone = served.judge("--tokenizer", served.artifact, "--behaviour", chats, "--json")
    assert set(json.loads(alone.output)["behaviour"]["outcomes"]) == {"loops", "ended"}


@pytest.mark.thorough
def test_chats_are_held_against_a_checkpoint_and_another_server(
    served: Served, sample_checkpoint: Path, tmp_path: Path
) -> None:
    chats = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"Say {n}."}], "max_tokens": 4} for n in range(8)]
    chats.write_text("".join(json.dumps(each) + "\n" for each in lines))
    for options in (("--reference", sample_checkpoint), ("--reference", served.url, "--tokenizer", served.artifact)):
        result = served.judge(*options, "--behaviour", chats, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.output)["behaviour"]
        assert set(found["outcomes"]) == {"loops", "ended", "length_change"}
        assert len(found["documents"]) == 8
        same = all(each["baseline"] == each["artifact"] for each in found["chats"])
        assert same is (options[1] == served.url)  # the artifact's weights are not the checkpoint's


def test_a_gate_that_fails_ends_as_gate_does(served: Served, tmp_path: Path) -> None:
    file = gates(tmp_path, {"perplexity_ratio": {"max": 0.5}})
    result = served.judge("--reference", served.artifact, "--gates", file)
    assert result.exit_code == 3, result.output
    assert "FAIL  perplexity_ratio" in result.output


def test_without_a_reference_there_are_perplexity_answers_and_times(served: Served) -> None:
    result = served.judge("--tokenizer", served.artifact, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert set(found["quality"]["figures"]) == {"perplexity"}
    assert found["latency"]["completed"] == 3
    assert [each["reference"] for each in found["answers"]] == [None] * 3
    assert found["verdict"] == "none"


def test_options_that_say_nothing_are_refused(served: Served, tmp_path: Path) -> None:
    for options, said in (
        (("--gates", gates(tmp_path, {"kld_mean": {"max": 1}})), "--gates requires --reference"),
        ((), "no tokenizer is known"),
        (("--reference", served.url), "no tokenizer is known"),
        (("--reference", served.artifact, "--reference-key", "sk-1"), "--reference-key requires a URL as --reference"),
        (("--reference-model", "m"), "--reference-model requires a URL as --reference"),
    ):
        result = served.judge(*options)
        assert result.exit_code == 2, result.output
        assert said in result.output
    assert CliRunner().invoke(cli, ["judge"]).exit_code == 2
    assert CliRunner().invoke(cli, ["judge", "--verify", str(tmp_path / "none")]).exit_code == 5


def test_a_reference_of_this_machine_leaves_the_key_in_the_environment_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMFORGE_REFERENCE_KEY", "sk-1")
    assert served.judge("--reference", served.artifact).exit_code == 0


def test_hints_name_the_options_of_the_reference(served: Served) -> None:
    with keyed_server() as keyed, keyed_server(open_models=True, models=()) as empty:
        for url, said in (
            (keyed, "give one with --reference-key, or in the environment variable LLMFORGE_REFERENCE_KEY"),
            (empty, "name it with --reference-model"),
        ):
            result = served.judge("--reference", url, "--tokenizer", served.artifact)
            assert result.exit_code == 8, result.output
            assert said in " ".join(result.output.split())


def test_a_server_that_is_not_there(served: Served) -> None:
    result = CliRunner().invoke(
        cli, ["judge", "--url", "http://127.0.0.1:9", "--data", str(served.data), "--reference", str(served.artifact)]
    )
    assert result.exit_code == 8, result.output
    assert "no answer" in result.output
