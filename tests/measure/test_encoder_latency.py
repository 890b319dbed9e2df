from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import VerificationError
from llmforge.gates import verdict
from llmforge.measure import latency, turns
from llmforge.measure.latency import Instruments, LatencyRun, TimedLoad, TimedModel, Until
from llmforge.measure.recipe_latency import loads
from llmforge.metrics import catalog
from llmforge.metrics.latency import Compute, Footprint, HourlyPrice, Latency
from llmforge.metrics.metric import Measured
from llmforge.metrics.workload import Slo
from llmforge.recipe import LatencySpec
from llmforge.report import render, view
from tests.fakes.fake_encoder import fake_embedder, fake_reranker
from tests.samples import reports

FOOTPRINT = Footprint(
    artifact_bytes=5000, weight_bytes_per_token=4000, kv_bytes_per_token=0, multiply_adds_per_token=1000
)
LOADS = [TimedLoad(batch, length, 0, 8) for batch in (1, 4) for length in (4, 16)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock: who is timed moves it."""
    found = [0.0]
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: found[0]))
    return found


def side(name: str, clock: list[float], token_ms: float, answers: int = 1) -> TimedModel:
    """Take so long for each token of all texts; a first call of a shape, which warms up, ten times that."""
    seen: set[tuple[int, ...]] = set()

    def encode(ids: NDArray[np.int64], tokens: int) -> Iterator[object]:
        assert tokens == 0
        clock[0] += token_ms * ids.size / 1e3 * (1 if ids.shape in seen else 10)
        seen.add(ids.shape)
        yield from range(answers)

    return TimedModel(name, encode, 0.25)


def run(clock: list[float], **changes: object) -> Latency:
    from llmforge.measure.latency import Facts

    facts = Facts(None, HourlyPrice(usd_per_hour=3.6, source="a list", date="2026-01"), Slo(latency_ms=50.0))
    compute = Compute(dtype="fp32", operations_per_second={"fp32": 1e7}, probe="p")
    given = {
        "vocabulary": 64, "threads": 1, "facts": facts,
        "instruments": Instruments(lambda footprint, context, threads: None, lambda: compute), **changes,
    }  # fmt: skip
    both = side("ours", clock, 1.0), side("theirs", clock, 3.0)
    return latency.measure(*both, FOOTPRINT, LatencyRun(LOADS, **given))  # type: ignore[arg-type]


def test_batches_of_texts_are_timed_in_turns_with_the_checkpoint(clock: list[float]) -> None:
    found = run(clock)
    assert found.encodes
    for point, load in zip(found.points, LOADS, strict=True):
        took = float(load.batch * load.prompt_tokens)
        assert point.artifact.generations_ms == ((took,),) * 8
        assert point.output_tokens == 0
        assert point.artifact.figures["encode_ms"].p50.value == took
        assert point.artifact.figures["texts_per_second"].value == pytest.approx(1e3 * load.batch / took)
        assert point.baseline is not None
        assert point.baseline.figures["texts_per_second"].value == pytest.approx(1e3 * load.batch / took / 3)
        assert point.figures["read_tokens_per_second"].value == pytest.approx(1000)
        assert point.figures["batch_speedup"].value == pytest.approx(3)
        assert point.figures["compute_utilization"] == pytest.approx(2 * 1000 * 1000 / 1e7)
        assert point.figures["usd_per_million"].value == pytest.approx(1.0)  # 1000 tokens/s at 0.001 USD/s
        assert point.figures["good_share"].value == (took <= 50)
        tokens = {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "tokens_per_second"}
        assert not tokens & set(point.artifact.figures)
        assert not {"bandwidth_utilization", "output_tokens_per_second", "tpot_speedup"} & set(point.figures)


def test_gates_name_the_slowest_length_and_the_best_load(clock: list[float]) -> None:
    found = catalog.estimates(Measured(latency=run(clock)))
    assert found["encode_p50_ms"].value == 16  # of one text of 16 tokens
    assert (found["encode_p50_ms"].low, found["encode_p50_ms"].high) == (16, 16)
    assert found["encode_tokens_per_second"].value == pytest.approx(1000)
    assert found["encode_speedup"].value == pytest.approx(3)
    assert found["usd_per_million_tokens"].value == pytest.approx(1)
    assert found["goodput_share"].value == 1  # of loads with one text
    assert not {"ttft_p50_ms", "tpot_p50_ms", "throughput_tokens_per_second"} & set(found)
    of_tokens = catalog.estimates(Measured(latency=reports.LATENCY))
    assert not [name for name in of_tokens if name.startswith("encode_")]


def test_what_a_recipe_must_ask_for_is_known() -> None:
    assert catalog.needed("encode_p95_ms") == catalog.needed("encode_speedup") == "lengths"
    assert catalog.needed("ttft_p95_ms") == catalog.needed("throughput_tokens_per_second") == "output_tokens"
    assert catalog.needed("usd_per_million_tokens") is None


def test_figures_are_made_again_of_the_times(clock: list[float]) -> None:
    report = reports.make(latency=run(clock))
    measured = report.latency
    assert measured is not None
    assert list(verdict._timings(measured)) == []
    first, *rest = measured.points
    forged = first.artifact.model_copy(update={"generations_ms": ((1.0,),) * 8})
    points = (first.model_copy(update={"artifact": forged}), *rest)
    named = list(verdict._timings(measured.model_copy(update={"points": points})))
    assert named
    assert all("of latency point 0" in each for each in named)


def test_a_report_shows_batches_in_every_form(clock: list[float]) -> None:
    report = reports.make(latency=run(clock, until=Until(0.1, 1e6)))
    page, markdown = render.to_html(report), render.to_markdown(report)
    for text in (page, markdown):
        for fact in ("2 loads of one text, 2 of several, random token ids", "a batch ≤ 50 ms", "Encoding speed-up"):
            assert fact in text
        for absent in ("TTFT", "TPOT", "decode step", "MBU"):
            assert absent not in text.partition("Latency")[2].partition("Passes")[0]
    for fact in ("Batch time, median", "Tokens encoded per second", "By batch size and length of text"):
        assert fact in page
    (figure,) = [each for each in view.key_figures(report) if each.section == "latency"]
    assert (figure.title, figure.value) == ("Batch time", "16.0 ms")
    assert figure.notes == ("1 text of 16 tokens: 1,000 tokens/s", "3.0× baseline speed")


def test_another_artifact_takes_turns(clock: list[float]) -> None:
    both = side("ours", clock, 1.5), side("theirs", clock, 1.0)
    found = turns.differences(*both, LOADS[:2], vocabulary=64)
    assert set(found) == {"encode_p50_ms", "encode_p95_ms", "encode_p99_ms"}
    assert found["encode_p50_ms"].value == pytest.approx(8)


def test_runs_give_one_time(clock: list[float]) -> None:
    with pytest.raises(VerificationError, match="expected 0"):
        latency.timed_generation(side("ours", clock, 1.0, answers=2), np.zeros((1, 4), np.int64), 0)


@pytest.mark.parametrize("runner", [fake_embedder(), fake_reranker()], ids=["embedder", "reranker"])
def test_an_engine_encodes_what_it_is_given(runner) -> None:  # type: ignore[no-untyped-def]
    model = TimedModel.of_encoder(runner, description="ours", load_seconds=0.0)
    assert latency.timed_generation(model, np.full((3, 5), 7), 0).shape == (1,)
    assert runner.session.batches == [[5, 5, 5]]


def test_every_batch_at_every_length_is_a_load() -> None:
    spec = LatencySpec(lengths=(16, 4), batches=(8, 1), repetitions=7)
    assert loads(spec) == [TimedLoad(batch, length, 0, 7) for batch in (1, 8) for length in (4, 16)]
