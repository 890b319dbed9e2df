"""`llmforge bench`: loops on a subject that answers in known times, the engine, and the command line."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge import serving
from llmforge.artifact import Artifact
from llmforge.base.errors import UsageError
from llmforge.cli import cli
from llmforge.measure.load import BenchReport, LoadSpec, LocalEngine, SweepPlan, run, sweep
from llmforge.measure.load.drive import InProcess, closed_loop, open_loop
from llmforge.measure.load.report import LoadPoint
from llmforge.measure.load.sweep import Setting, measure, utilization
from llmforge.measure.load.workload import LoadRequest, RandomPrompts
from llmforge.metrics.latency import Footprint
from llmforge.metrics.serving import LoadFigures, Objective, RequestOutcome, figures
from llmforge.serving import Engine, EngineOptions

from ...samples.small_artifact import CONTEXT, SLOTS, VOCABULARY, publish_small
from ...servers.keyed_server import KEY, keyed_server

FOOTPRINT = Footprint(artifact_bytes=1, weight_bytes_per_token=10**6, kv_bytes_per_token=64)


@dataclass
class Fake:
    """Answers in `seconds`, and remembers what it was asked and how many requests it held at once."""

    seconds: float = 0.05
    description: str = "fake"
    asked: list[LoadRequest] = field(default_factory=list)
    most: int = 0
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: LoadRequest, due_s: float) -> RequestOutcome:
        with self._lock:
            self.asked.append(request)
            self._running += 1
            self.most = max(self.most, self._running)
        time.sleep(self.seconds)
        with self._lock:
            self._running -= 1
        now = time.perf_counter()
        return RequestOutcome(due_s, (now,) * request.output_tokens, now, len(request.prompt), request.output_tokens)


def load(count: int, gap_s: float | None = None) -> list[LoadRequest]:
    return [LoadRequest((i,), 1, None if gap_s is None else i * gap_s) for i in range(count)]


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    subject, told = Fake(), []
    outcomes = closed_loop(subject, load(12), 3, told.append)
    assert subject.most == 3
    assert len(outcomes) == 12
    assert sorted(request.prompt for request in subject.asked) == [(i,) for i in range(12)]
    assert told == list(range(1, 13))
    with pytest.raises(UsageError, match="expected 1 or more"):
        closed_loop(subject, load(1), 0)


def test_an_open_loop_sends_by_the_clock_whatever_is_in_flight() -> None:
    subject = Fake(seconds=0.5)
    outcomes = open_loop(subject, load(5, gap_s=0.02))
    assert subject.most == 5
    sent = [outcome.sent_s for outcome in outcomes]
    assert [later - sent[0] for later in sent] == pytest.approx([0, 0.02, 0.04, 0.06, 0.08])
    assert all(outcome.latency_ms >= 500 for outcome in outcomes)
    with pytest.raises(UsageError, match="without arrival times"):
        open_loop(subject, load(2))


def test_points_are_measured_in_turn_and_warmed_up() -> None:
    subject, told = Fake(seconds=0), []
    settings = [Setting(4, 1, concurrency=1), Setting(6, 2, rate=500.0)]
    plan = SweepPlan(requests=3, repetitions=2, warmup=2, prefix_tokens=2, objective=Objective(latency_ms=1e6))
    points = measure(subject, settings, RandomPrompts(100), plan, lambda done, total: told.append((done, total)))
    assert [len(request.prompt) for request in subject.asked] == [4] * 5 + [6] * 5 + [4] * 5 + [6] * 5
    assert len({request.prompt for request in subject.asked}) == 20
    assert len({request.prompt[:2] for request in subject.asked}) == 4  # one prefix for each run of each point
    assert told == [(i, 20) for i in range(1, 21)]
    assert [(point.concurrency, point.rate) for point in points] == [(1, None), (None, 500.0)]
    for point in points:
        assert (point.figures.runs, point.figures.completed) == (2, 6)  # the warm-up does not count
        assert point.figures.good_share == 1


def measured(tpot_ms: float) -> LoadFigures:
    return figures([[RequestOutcome(0.0, (0.1, 0.1 + tpot_ms / 1e3), 1.0, 100, 2)]])


def test_utilization_is_bytes_by_time_by_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def bandwidth(size: int, threads: int) -> float:
        asked.append((size, threads))
        return 1e6

    monkeypatch.setattr(sweep, "read_bandwidth", bandwidth)
    points = [
        LoadPoint(prompt_tokens=100, output_tokens=20, concurrency=6, figures=measured(tpot_ms=20)),
        LoadPoint(prompt_tokens=100, output_tokens=20, rate=2.0, figures=measured(tpot_ms=20)),
        LoadPoint(figures=measured(tpot_ms=20)),
    ]
    footprint = Footprint(artifact_bytes=1, weight_bytes_per_token=4000, kv_bytes_per_token=10)
    with_share = utilization(points, footprint, slots=4, threads=2)
    size = 4000 + 4 * 110 * 10  # four rows at once at most
    assert asked == [(size, 2)]
    assert with_share[0].bandwidth is not None
    assert with_share[0].bandwidth.bytes_read_per_step == size
    assert with_share[0].bandwidth.share == pytest.approx(size / 0.020 / 1e6)
    assert [point.bandwidth for point in with_share[1:]] == [None, None]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("artifacts"), sample_checkpoint)


def test_the_engine_answers_all_tokens_and_says_when_it_cannot(small: Artifact) -> None:
    with Engine(serving.load(small.path), EngineOptions(max_queue=0)) as engine:
        subject = InProcess(engine, "small")
        one = subject.answer(LoadRequest((7, 8, 9), 6), time.perf_counter())
        assert (one.prompt_tokens, one.output_tokens, len(one.token_s), one.error) == (3, 6, 6, None)
        assert one.sent_s < one.token_s[0]
        assert list(one.token_s) == sorted(one.token_s)
        assert one.token_s[-1] <= one.ended_s
        wrong = subject.answer(LoadRequest((VOCABULARY,), 1), time.perf_counter())
        assert wrong.error is not None
        assert wrong.output_tokens == 0
        outcomes = closed_loop(subject, load(8 * SLOTS), 4 * SLOTS)
    refused = [outcome for outcome in outcomes if outcome.error is not None]
    assert all("the queue is full" in str(outcome.error) for outcome in refused)
    assert len(refused) < len(outcomes)


@pytest.mark.parametrize(
    ("footprint", "speculation", "shown"),
    [
        (Footprint(artifact_bytes=1, weight_bytes_per_token=10**6, kv_bytes_per_token=64), "off", None),
        (
            Footprint(artifact_bytes=1, weight_bytes_per_token=10**6, kv_bytes_per_token=64),
            "prompt-lookup",
            "speculation",
        ),
        (None, "off", "no footprint"),
    ],
)
def test_bandwidth_is_told_where_it_is_known_and_why_not_where_it_is_not(
    small: Artifact, footprint: Footprint | None, speculation: Any, shown: str | None
) -> None:
    report = run(
        small.path, "small", LoadSpec(concurrency=(1,), prompt_tokens=(32,), output_tokens=(100,)),
        SweepPlan(requests=3), local=LocalEngine(EngineOptions(speculation=speculation), footprint=footprint),
    )  # fmt: skip
    (point,) = report.points
    if shown is None:
        assert point.bandwidth is not None
        assert 0 < point.bandwidth.share < 10
        assert report.notes == ()
    else:
        assert point.bandwidth is None
        assert [note for note in report.notes if shown in note]


def invoke(*args: str) -> Result:
    result = CliRunner().invoke(cli, ["bench", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_shows_a_table_and_writes_a_report(small: Artifact, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    shown = invoke(
        str(small.path), "--concurrency", "1,3", "--prompt-tokens", "8,30", "--output-tokens", "5", "--requests", "6",
        "--warmup", "1", "--slo", "ttft=60s,tpot=60s", "--seed", "4", "-o", str(file),
    )  # fmt: skip
    assert shown.exit_code == 0
    report = BenchReport.model_validate_json(file.read_text())
    assert [(point.prompt_tokens, point.concurrency) for point in report.points] == [(8, 1), (8, 3), (30, 1), (30, 3)]
    for point in report.points:
        assert (point.figures.completed, point.figures.failed) == (6, 0)
        assert (point.figures.prompt_tokens, point.figures.output_tokens) == (6 * (point.prompt_tokens or 0), 30)
        assert point.figures.good_share == 1
        assert point.figures.tpot_ms is not None
        assert point.figures.tpot_ms.p50.value > 0
    assert report.engine is not None
    assert (report.engine.slots, report.engine.threads, report.seed, report.warmup) == (SLOTS, 1, 4, 1)
    assert f"small {small.manifest.version}" in shown.stdout
    assert shown.stdout.count("3 in flight") == 2
    assert "goodput/s" in shown.stdout
    assert "MBU: not known" in shown.stdout
    assert "Send requests" in shown.stderr


def test_the_command_writes_json_alone(small: Artifact) -> None:
    shown = invoke(
        str(small.path), "--rate", "200", "--prompt-tokens", "40", "--prefix-tokens", "32", "--output-tokens", "2",
        "--requests", "4", "--repetitions", "2", "--json", "--quiet",
    )  # fmt: skip
    assert shown.stderr == ""
    (point,) = json.loads(shown.stdout)["points"]
    assert (point["rate"], point["concurrency"], point["figures"]["completed"]) == (200.0, None, 8)
    assert json.loads(shown.stdout)["workload"] == "prompts: random tokens, the first 32 tokens shared"
    assert json.loads(shown.stdout)["engine"]["prefix_hit_share"] > 0.5


def test_the_command_replays_a_trace_and_cuts_prompts_from_text(small: Artifact, data: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entries = [{"at_s": i / 100, "prompt_tokens": 20 + i, "output_tokens": 2 + i} for i in range(4)]
    entries.append({"at_s": 0.05, "prompt": "Wörter", "output_tokens": 1})
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    shown = invoke(str(small.path), "--trace", str(trace), "--data", str(data / "evaluation.jsonl"), "--json")
    (point,) = json.loads(shown.stdout)["points"]
    assert point["figures"]["completed"] == 5
    assert point["figures"]["output_tokens"] == 2 + 3 + 4 + 5 + 1
    words = len(serving.load(small.path).encode("Wörter"))
    assert point["figures"]["prompt_tokens"] == 20 + 21 + 22 + 23 + words
    assert "evaluation.jsonl" in json.loads(shown.stdout)["workload"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--concurrency", "1", "--rate", "2"], "expected one of concurrencies, rates and a trace"),
        (["--concurrency", "0"], "expected whole numbers, 1 or more"),
        (["--concurrency", "a"], "expected comma-separated numbers"),
        (["--rate", "-1"], "expected a finite number of requests per second above 0"),
        (["--prompt-tokens", str(CONTEXT)], f"at most {CONTEXT}"),
        (["--prompt-tokens", "8", "--prefix-tokens", "9"], "a shared part no longer than the prompt"),
        (["--slo", "speed=1s"], "expected ttft, tpot or latency"),
        (["--trace", "x.jsonl", "--repetitions", "2"], "--repetitions cannot be used with --trace"),
        (["--trace", "x.jsonl", "--rate", "1"], "expected one of concurrencies, rates and a trace"),
        (["--url", "http://127.0.0.1:9", "--threads", "2"], "--threads cannot be used with --url"),
        (["--url", "localhost:80"], "is not an address"),
        (["--api-key", "k"], "--api-key requires --url"),
    ],
)
def test_options_that_make_no_sense_are_refused(small: Artifact, options: list[str], says: str) -> None:
    refused = invoke(str(small.path), *options)
    assert refused.exit_code == 2
    assert says in " ".join(refused.stderr.split())


def test_files_that_cannot_be_used_are_refused(small: Artifact, tmp_path: Path) -> None:
    assert invoke(str(small.path), "--trace", str(tmp_path / "none.jsonl")).exit_code == 5
    assert invoke(str(small.path), "--data", str(tmp_path / "none.jsonl")).exit_code == 5
    assert invoke(str(tmp_path)).exit_code == 5


def test_an_endpoint_that_is_not_there_is_said_so(small: Artifact) -> None:
    nobody = invoke(str(small.path), "--url", "http://127.0.0.1:9")
    assert nobody.exit_code == 8
    assert "is the server running?" in nobody.stderr


ONE = ("--concurrency", "1", "--requests", "1", "--warmup", "0", "--prompt-tokens", "4", "--output-tokens", "2")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("in_environment", [True, False])
def test_an_endpoint_gets_the_key_which_nothing_shows(
    small: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool, in_environment: bool
) -> None:
    options = [] if in_environment else ["--api-key", KEY]
    if in_environment:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with keyed_server() as url:
        report = str(tmp_path / "report.json")
        more = ["--json", "--log-format", "json"] if as_json else ["--verbose"]
        done = invoke(str(small.path), "--url", url, *ONE, *options, *more, "--output", report)
    assert done.exit_code == 0, done.output
    assert json.loads(Path(report).read_text())["points"][0]["figures"]["completed"] == 1
    assert KEY not in done.output + Path(report).read_text()


@pytest.mark.parametrize("open_models", [True, False])
def test_an_endpoint_that_denies_access_is_said_so(small: Artifact, open_models: bool) -> None:
    with keyed_server(open_models=open_models) as url:
        denied = invoke(str(small.path), "--url", url, *ONE, "--api-key", "sk-wrong", "--log-format", "json")
    assert denied.exit_code == 8
    (error,) = [each for each in map(json.loads, denied.stderr.splitlines()) if each["event"] == "error"]
    assert "access denied: HTTP 401; it does not take this API key" in error["message"]
    assert "OPENAI_API_KEY" in error["hint"]
    assert "sk-wrong" not in denied.output


def test_an_endpoint_without_a_model_is_said_so_with_no_option_that_bench_lacks(small: Artifact) -> None:
    with keyed_server(open_models=True, models=()) as url:
        found = invoke(str(small.path), "--url", url, *ONE)
    assert found.exit_code == 8
    assert "HTTP 200 and no model at /v1/models" in " ".join(found.stderr.split())
    assert "hint" not in found.stderr


def test_a_load_names_its_points() -> None:
    settings = LoadSpec(rates=(1.0, 2.0), prompt_tokens=(8, 16), output_tokens=(4,)).settings()
    assert settings == [Setting(length, 4, rate=rate) for length in (8, 16) for rate in (1.0, 2.0)]
