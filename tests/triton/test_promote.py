"""`llmforge promote --triton` and a real Triton that polls the repository: what loads, what never does, what ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.recipe import ServingSpec

from ..samples import published, stored
from ..servers.triton_server import Server, environment_or_skip, launched

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("triton-promote")]

TEXTS = {"old": "old words of a model ", "new": "new words of a model ", "bad": "bad words of a model "}
LONG = 60_000  # tokens: longer than a version takes to load, on quiet cores too
LOADS_S = 60.0  # a poll a second, and a start of the model's process, on busy cores


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> dict[str, Artifact]:
    """Three versions of one model; a gate of the last one failed."""
    out = tmp_path_factory.mktemp("promoted")
    return {
        name: published.scripted(
            out, sample_checkpoint, text, max_context=65_536, serving=ServingSpec(),
            gates=stored.FAILS if name == "bad" else stored.PASSES,
        )
        for name, text in TEXTS.items()
    }  # fmt: skip


def promote(artifacts: dict[str, Artifact], models: Path, name: str | None) -> Result:
    words = ["promote", "scripted", *([artifacts[name].path.name] if name else ["--rollback"]), "--to", "prod"]
    out = artifacts["old"].path.parent.parent
    return CliRunner().invoke(cli, [*words, "--triton", str(models), "--out", str(out)])


@pytest.fixture(scope="module")
def server(
    artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path
) -> Iterator[tuple[Server, Path]]:
    env = environment_or_skip()
    models = tmp_path_factory.mktemp("triton") / "repository"
    assert promote(artifacts, models, "old").exit_code == 0
    other = published.random_decoder(  # with which the server starts; it has nothing to do with the rest
        tmp_path_factory.mktemp("other"), sample_checkpoint, max_context=256, max_batch=2, serving=ServingSpec()
    )
    polls = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with launched(env, other.path, models, *polls) as running:
        yield running, models


def says(server: Server) -> str:
    reply = server.generate("scripted", text_input="a", max_tokens=8)
    found: str = reply.json["text_output"] if reply.status == 200 else f"status {reply.status}"
    return next((name for name in TEXTS if name in found), found)


def wait_until(server: Server, name: str) -> None:
    end = time.monotonic() + LOADS_S
    while (said := says(server)) != name:
        assert time.monotonic() < end, f"it says {said}, not {name}: {server.log.read_text()[-2000:]}"
        time.sleep(0.2)


def states(server: Server) -> dict[str, str]:
    index: list[dict[str, Any]] = server.request("/v2/repository/index", {}).json
    return {each["version"]: each["state"] for each in index if each["name"] == "scripted" and "version" in each}


def stream(server: Server, pieces: list[dict[str, Any]]) -> None:
    """Read a long answer, piece by piece."""
    body = {"text_input": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with server.open("/v2/models/scripted/generate_stream", body) as response:
        assert response is not None
        pieces += [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]


def test_promote_loads_a_failed_gate_does_not_a_rollback_returns_and_streams_end(
    server: tuple[Server, Path], artifacts: dict[str, Artifact]
) -> None:
    triton, models = server
    wait_until(triton, "old")

    # The new version loads while a stream of the old one goes on, and that stream comes to its own end.
    pieces: list[dict[str, Any]] = []
    reader = threading.Thread(target=stream, args=(triton, pieces))
    reader.start()
    triton.wait_for("scripted", requests_running=1)
    assert promote(artifacts, models, "new").exit_code == 0
    wait_until(triton, "new")
    during = reader.is_alive()
    reader.join(300)
    assert during, "the stream ended before the new version was there: it shows nothing"
    text = "".join(piece["text_output"] for piece in pieces)
    assert (pieces[-1]["finish_reason"], sum(piece["num_output_tokens"] for piece in pieces)) == ("length", LONG)
    assert "old words" in text
    assert "new" not in text

    # One whose gate failed is refused, and is nowhere that Triton looks.
    refused = promote(artifacts, models, "bad")
    assert refused.exit_code == 3, refused.output
    assert sorted(each.name for each in (models / "scripted").iterdir() if each.name.isdecimal()) == ["1", "2"]
    time.sleep(3)  # three polls
    assert says(triton) == "new"
    assert "3" not in states(triton)

    # A rollback brings the old one back, as a version of its own; again, and nothing changes.
    assert promote(artifacts, models, None).exit_code == 0
    wait_until(triton, "old")
    assert (models / "scripted" / "3" / "manifest.json").read_bytes() == (
        artifacts["old"].path / "manifest.json"
    ).read_bytes()
    again = promote(artifacts, models, "old")
    assert again.exit_code == 0
    assert not (models / "scripted" / "4").exists()
    end = time.monotonic() + LOADS_S
    while (found := states(triton)).get("3") != "READY" or found.get("2") == "READY":
        assert time.monotonic() < end, found
        time.sleep(0.2)
