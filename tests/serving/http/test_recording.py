"""What `serve --record` writes down, what it keeps to itself, and that nobody waits for it; `bench` replays it."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from llmforge.artifact import Artifact
from llmforge.base.errors import UsageError
from llmforge.cli import cli
from llmforge.measure.load.workload import RandomPrompts, read_trace
from llmforge.serving import Engine, load
from llmforge.serving import http as serve
from llmforge.serving.http import recording
from llmforge.serving.http.app import create_app
from llmforge.serving.http.recording import BLOCK_TOKENS, hash_ids
from llmforge.serving.request import Chunk, Request, Usage

from ...samples.small_artifact import publish_small
from .test_serve import post, start

KEY = b"0123456789abcdef"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("recording"), sample_checkpoint)


@pytest.fixture(scope="module")
def engine(small: Artifact) -> Iterator[Engine]:
    with Engine(load(small.path)) as engine:
        yield engine


class Recorded:
    """The application with a recorder."""

    def __init__(self, engine: Engine, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.recorder = serve.Recorder(serve.RecordOptions(folder, **{"key": KEY, **options}), engine.encoder)
        self.client = TestClient(create_app(engine, "small", serve.ServerState(recorder=self.recorder)))

    def complete(self, prompt: str, **fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **fields}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json() if not fields.get("stream") else answer.text

    def files(self) -> list[Path]:
        self.recorder.close()
        return sorted(self.folder.glob("trace-*.jsonl"))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for file in self.files() for line in file.read_text().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_answer_is_a_line_of_mooncakes_form_and_no_text(
    engine: Engine, tmp_path: Path, stream: bool
) -> None:
    recorded = Recorded(engine, tmp_path / "new" / "trace")
    recorded.complete("If the file", stream=stream)
    time.sleep(0.05)
    recorded.complete("If the file", n=2, stream=stream)
    assert recorded.client.post("/v1/completions", json={"prompt": 3}).status_code == 400
    assert 'llmforge_recorded_answers_total{outcome="dropped"} 0.0' in recorded.client.get("/metrics").text
    first, second, third = recorded.lines()
    ids = engine.encoder.encode("If the file")
    assert set(first) == {"timestamp", "input_length", "output_length", "hash_ids", "block_size", "ttft_ms",
                          "latency_ms", "finish_reason"}  # fmt: skip
    assert (first["input_length"], first["output_length"], first["finish_reason"]) == (len(ids), 5, "length")
    assert first["hash_ids"] == hash_ids(ids, KEY) == second["hash_ids"]
    assert first["block_size"] == BLOCK_TOKENS
    assert 0 < first["ttft_ms"] <= first["latency_ms"]
    assert 0 <= first["timestamp"] + 50 <= second["timestamp"] == third["timestamp"]
    [file] = recorded.files()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert recorded.recorder.counts == {"written": 3, "dropped": 0, "failed": 0}
    assert 'llmforge_recorded_answers_total{outcome="written"} 3.0' in recorded.client.get("/metrics").text


def test_text_is_recorded_where_it_is_asked_for_and_what_patterns_match_is_a_keyed_hash(
    engine: Engine, tmp_path: Path
) -> None:
    patterns = tmp_path / "patterns"
    patterns.write_text("# addresses\n\n[\\w.]+@[\\w.]+\\w\n\\d{4}\n")
    recorded = Recorded(engine, tmp_path / "trace", text=True, patterns=serve.read_patterns(patterns))
    said = recorded.complete("Write to ann@example.org or bob@example.org, then ann@example.org 2026")
    [line] = recorded.lines()
    marks = re.findall(r"\[redacted-[0-9a-f]{12}\]", line["prompt"])
    assert len(marks) == 4
    assert marks[0] == marks[2] != marks[1]
    assert "example" not in json.dumps(line)
    assert "2026" not in line["prompt"]
    assert line["answer"] == recorded.recorder.redacted(said["choices"][0]["text"])
    other = Recorded(engine, tmp_path / "other", text=True, patterns=serve.read_patterns(patterns), key=b"x" * 16)
    assert other.recorder.redacted("ann@example.org") != marks[0]


def test_a_share_of_calls_is_recorded(engine: Engine, tmp_path: Path) -> None:
    recorded = Recorded(engine, tmp_path, share=0.25)
    begun = sum(recorded.recorder.begin(_Call()) is not None for _ in range(4000))  # type: ignore[arg-type]
    assert 800 < begun < 1200  # nine standard deviations
    with pytest.raises(UsageError, match="share"):
        Recorded(engine, tmp_path, share=0)


class _Call:
    requests = ()


def answer(prompt: int = 64) -> recording.RecordedAnswer:
    return recording.RecordedAnswer(time.perf_counter(), [1] * prompt, 4, 1.0, 2.0, "stop", None)


def test_nobody_waits_for_a_recorder_that_is_slow_and_drops_are_counted(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 8)
    gate = threading.Event()
    recorded = Recorded(engine, tmp_path)
    write = recorded.recorder._write
    monkeypatch.setattr(recorded.recorder, "_write", lambda line: gate.wait() and write(line))
    began = time.perf_counter()
    for _ in range(2000):
        recorded.recorder.put(answer())
    assert time.perf_counter() - began < 1  # 2,000 calls that find no room
    assert recorded.recorder.counts["dropped"] >= 2000 - 8 - 1
    gate.set()
    assert len(recorded.lines()) + recorded.recorder.counts["dropped"] == 2000


def test_a_disk_that_is_full_is_counted_and_tried_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(engine, tmp_path)
    write, times = recorded.recorder._write, []

    def full(line: bytes) -> None:
        times.append(line)
        if len(times) == 1:
            raise OSError(28, "No space left on device")
        write(line)

    monkeypatch.setattr(recorded.recorder, "_write", full)
    recorded.recorder.put(answer())
    recorded.recorder.put(answer())
    assert len(recorded.lines()) == 1
    assert recorded.recorder.counts == {"written": 1, "dropped": 0, "failed": 1}


def test_the_folder_stays_within_its_size_and_the_oldest_go(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("stays")
    recorded = Recorded(engine, tmp_path, size_bytes=64_000)
    for number in range(1000):
        recorded.recorder.put(answer(prompt=1 + number % 7))
        if number % 100 == 0:
            time.sleep(0.05)
    recorded.recorder.close()
    assert recorded.recorder.counts["written"] > 900
    files = recorded.files()
    assert 1 < len(files) <= 9
    assert sum(file.stat().st_size for file in files) <= 64_000
    last = int(files[-1].stem.rpartition("-")[2])
    assert [int(file.stem.rpartition("-")[2]) for file in files] == list(range(last - len(files) + 1, last + 1))
    assert (tmp_path / "other.jsonl").exists()


def test_hashes_are_equal_as_far_as_prompts_are() -> None:
    one, two = list(range(200)), [*range(130), *range(500, 570)]
    first, second = hash_ids(one, KEY), hash_ids(two, KEY)
    assert len(first) == len(second) == 4
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]
    assert not set(first) & set(hash_ids(one, b"another key of a"))
    assert max(first) < 2**53
    assert hash_ids([], KEY) == []


def test_a_replay_has_the_lengths_the_times_and_the_shared_beginnings(engine: Engine, tmp_path: Path) -> None:
    prompts = [list(range(200)), [*range(130), *range(500, 570)], [7] * 20]
    recorded = Recorded(engine, tmp_path)
    start = recorded.recorder._started_s
    for at, prompt in zip((0.3, 0.1, 0.2), prompts, strict=True):
        recorded.recorder.put(recording.RecordedAnswer(start + at, prompt, 9, 1.0, 2.0, "stop", None))
    [file] = recorded.files()
    made = read_trace(file, lambda text: [], RandomPrompts(1000))
    assert [round(each.at_s or 0, 3) for each in made] == [0, 0.1, 0.2]
    second, third, first = (each.prompt for each in made)
    assert [len(first), len(second), len(third)] == [200, 200, 20]
    assert first[:128] == second[:128]
    assert first[128:192] != second[128:192]
    assert {each.output_tokens for each in made} == {9}
    assert made == read_trace(file, lambda text: [], RandomPrompts(1000))


def test_bench_replays_what_serve_recorded(engine: Engine, small: Artifact, tmp_path: Path) -> None:
    for text in (False, True):
        recorded = Recorded(engine, tmp_path / str(text), text=text)
        counted = [recorded.complete(f"The parser reads {number} files")["usage"] for number in range(3)]
        [file] = recorded.files()
        shown = CliRunner().invoke(cli, ["bench", str(small.path), "--trace", str(file), "--json", "--quiet"])
        assert shown.exit_code == 0, shown.output
        figures = json.loads(shown.output)["points"][0]["figures"]
        assert figures["completed"] == 3
        assert figures["output_tokens"] == 15
        assert figures["prompt_tokens"] == sum(each["prompt_tokens"] for each in counted)


def test_wrong_files_of_patterns_and_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for text, said in (("a\n(", "f:2: no regular expression"), ("a*", "f:1: 'a[*]' matches nothing at all")):
        file.write_text(text)
        with pytest.raises(UsageError, match=said):
            serve.read_patterns(file)
    for key in ("short", "x" * 65):
        file.write_text(key)
        with pytest.raises(UsageError, match="a key of"):
            serve.read_key(file)
    file.write_text("x" * 32 + "\n")
    assert serve.read_key(file) == b"x" * 32


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--record-text"], "--record-text requires --record"),
        (["--record", "d", "--record-redact", "f"], "--record-redact requires --record-text"),
    ],
)
def test_options_that_say_nothing_are_refused(small: Artifact, options: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["serve", str(small.path), *options])
    assert result.exit_code == 2
    assert said in result.output


def test_recording_costs_a_request_little(engine: Engine, tmp_path: Path) -> None:
    """What the event loop does for a recorded answer takes less than .1 ms; a token of this model takes 1 ms."""
    recorded = Recorded(engine, tmp_path, text=True)
    usage = Chunk("", None, "stop", Usage(prompt_tokens=2000, output_tokens=20, ttft_ms=1.0, tpot_ms=1.0))
    took = []
    for _ in range(200):
        began = time.perf_counter()
        call = recording.CallRecording(recorded.recorder, (Request((1,) * 2000),))
        for _ in range(20):
            call.chunk(0, Chunk("word ", 3))
        call.chunk(0, usage)
        took.append(time.perf_counter() - began)
    assert float(np.median(took)) < 1e-4
    assert len(recorded.lines()) + recorded.recorder.counts["dropped"] == 200


def test_a_server_records_what_it_answers_until_it_ends(small: Artifact, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 32)
    (tmp_path / "patterns").write_text("parser\n")
    options = ["--record", tmp_path / "trace", "--record-share", "1", "--record-text", "--record-redact",
               tmp_path / "patterns", "--record-key", tmp_path / "key", "--record-size", "1"]  # fmt: skip
    process, address = start(small, *map(str, options))
    with process:
        body = {"prompt": "The parser reads files", "max_tokens": 4, "ignore_eos": True}
        assert post(address, "/v1/completions", body)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    [file] = (tmp_path / "trace").glob("trace-*.jsonl")
    [line] = map(json.loads, file.read_text().splitlines())
    digest = hashlib.blake2b(b"parser", key=b"k" * 32, digest_size=6).hexdigest()
    assert line["prompt"] == f"The [redacted-{digest}] reads files"
    assert line["output_length"] == 4
