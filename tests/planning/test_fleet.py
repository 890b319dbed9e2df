"""Fleets: the scheduler in virtual time, step times, the search for the smallest fleet, KEDA's values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from llmforge import targets
from llmforge.base.errors import DataError, UsageError
from llmforge.measure.load.workload import LoadRequest
from llmforge.metrics import catalog
from llmforge.metrics.latency import Conditions, Footprint, LatencyPoint, TimedSide
from llmforge.metrics.serving import Objective, RequestOutcome
from llmforge.planning import families, scheme
from llmforge.planning.fleet import keda, parse_rate, sizing
from llmforge.planning.fleet.load import PoissonLoad, RecordedLoad
from llmforge.planning.fleet.simulation import SimulatedEngine, simulate
from llmforge.planning.fleet.sizing import FleetGoal, FleetSize
from llmforge.planning.fleet.steps import MeasuredSteps, RooflineSteps, chunks
from llmforge.planning.roofline import Placement
from llmforge.rewrite.traits import Storage
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK

from ..models.shapes import PUBLIC

MANIFEST = Path(__file__).parents[2] / "docs" / "deploy" / "kubernetes" / "autoscaling.yaml"


@dataclass(frozen=True)
class Known:
    """Steps of known length, which are noted: 1 ms a token of a prompt, 10 ms a decode step and 1 ms for each row."""

    basis: str = "known"
    noted: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def seconds(self, tokens: Sequence[int], pasts: Sequence[int]) -> float:
        self.noted.append((tuple(tokens), tuple(pasts)))
        read = sum(count for count in tokens if count > 1)
        decoded = sum(count == 1 for count in tokens)
        return (read + (10 + decoded if decoded else 0)) / 1e3


def engine(slots: int = 2, **changes: Any) -> SimulatedEngine:
    return SimulatedEngine(changes.pop("steps", Known()), slots, 2048, 1, **changes)


def ask(prompt: int, output: int, at_s: float = 0.0) -> LoadRequest:
    return LoadRequest((0,) * prompt, output, at_s)


def load(rate: float, **changes: Any) -> PoissonLoad:
    return PoissonLoad(**{"rate": rate, "prompt": 50, "output": 4, "variation": 0.5, "limit": 1024, **changes})


def goal(text: str = "ttft=400ms,tpot=30ms", percentile: float = 95.0) -> FleetGoal:
    return FleetGoal(Objective.parse(text), percentile)


def approximately(seconds: Sequence[float]) -> Any:
    return pytest.approx(list(seconds), abs=1e-9)


# simulation


@pytest.mark.parametrize("blocks", [None, 400])
def test_one_request_alone_takes_the_sum_of_its_steps(blocks: int | None) -> None:
    steps = Known()
    run = simulate(engine(steps=steps, blocks=blocks, block_tokens=16), [ask(1200, 4, at_s=3.0)])
    [outcome] = run.outcomes
    assert steps.noted == [
        ((512,), (0,)), ((512,), (512,)), ((176,), (1024,)), ((1,), (1200,)), ((1,), (1201,)), ((1,), (1202,))
    ]  # fmt: skip
    assert outcome.token_s == approximately([4.2, 4.211, 4.222, 4.233])
    assert (outcome.ttft_ms, outcome.tpot_ms) == (pytest.approx(1200), pytest.approx(11))
    assert [tokens for tokens, _ in steps.noted[:3]] == [(count,) for count, _ in chunks(1200)]


def test_requests_run_in_the_order_of_the_scheduler() -> None:
    steps = Known()
    run = simulate(engine(steps=steps), [ask(100, 3), ask(50, 2, at_s=0.05), ask(10, 1, at_s=0.06)])
    # The first is read before the second comes; then the second is read after the step that decodes the first.
    assert steps.noted == [
        ((100,), (0,)),
        ((1,), (100,)), ((50,), (0,)),
        ((1, 1), (101, 50)),  # both end
        ((10,), (0,)),
    ]  # fmt: skip
    first, second, third = run.outcomes
    assert first.token_s == approximately([0.1, 0.111, 0.173])
    assert second.token_s == approximately([0.161, 0.173])
    assert third.token_s == approximately([0.183])  # it waited for a slot
    assert run.usages[2].queue_ms == pytest.approx(113)
    assert [each.ended_s for each in run.outcomes] == approximately([0.173, 0.173, 0.183])
    assert run.running == pytest.approx((0.173 + 0.123 - run.usages[1].queue_ms / 1e3 + 0.01) / 0.183)


def test_blocks_run_what_decodes_and_what_is_read_in_one_step() -> None:
    steps = Known()
    simulate(engine(steps=steps, blocks=400, block_tokens=16), [ask(100, 3), ask(50, 2, at_s=0.05)])
    assert steps.noted == [((100,), (0,)), ((1, 50), (100, 0)), ((1, 1), (101, 50))]


def test_the_order_of_steps_is_that_of_a_real_decoder(tmp_path: Path, sample_checkpoint: Path) -> None:
    """The scheduler over the small engine runs what it runs in simulation, at the same arrivals by step."""
    from llmforge.serving import EngineOptions, Request, Sampling
    from llmforge.serving.scheduler import SlotScheduler

    from ..models.small_engines import Received, prompt, small_runner

    runner = small_runner(tmp_path, sample_checkpoint)
    lengths = [(40, 6, 0), (20, 3, 0), (30, 8, 2), (5, 4, 3)]  # prompt, answer, step before which it comes

    real: list[tuple[list[int], int]] = []
    ran = runner.session.step

    def noting(inputs: Any, cache: Any, out: Any = None) -> Any:
        real.append((inputs.past_lengths.tolist(), inputs.ids.shape[1]))
        return ran(inputs, cache, out)

    runner.session.step = noting  # type: ignore[method-assign]
    options = EngineOptions(max_queue=8, prefix_cache_bytes=0)
    scheduler = SlotScheduler(runner.session, runner.session.allocate(2, 64), runner.samplers, options)
    number = 0
    while number < 4 or scheduler.busy:
        for each, (length, answer, step) in enumerate(lengths):
            if step == number:
                sampling = Sampling(max_tokens=answer, ignore_eos=True)
                scheduler.add(Request(prompt(length, each), sampling), Received().receive)
        scheduler.step()
        number += 1
    # In simulation, at times between the steps before which they come. Steps end at .06, .102, .144, …
    steps = Known()
    at_s = {0: 0.0, 2: 0.07, 3: 0.08}
    simulate(engine(steps=steps), [ask(length, answer, at_s[step]) for length, answer, step in lengths])
    assert [(list(pasts), tokens[0]) for tokens, pasts in steps.noted] == real


def test_prefixes_of_a_trace_are_found() -> None:
    long = tuple(i % 16 for i in range(64))
    requests = [LoadRequest(long, 1, 0.0), LoadRequest((*long, 3, 5), 1, 5.0)]
    read = [each.ttft_ms for each in simulate(engine(prefix_cache_bytes=1 << 20), requests).outcomes]
    assert read == [pytest.approx(64), pytest.approx(2)]  # two tokens of the second are not in the cache
    kept = simulate(engine(prefix_cache_bytes=1 << 20, keeps_state=True), requests).outcomes
    assert kept[1].ttft_ms == pytest.approx(66)


# step times


def placed() -> Placement:
    shape, target = families.shape("llama-3.1-8b", PUBLIC["llama-3.1-8b"]), targets.load("h200")
    return Placement(shape, target, scheme.choose(target, "tensorrt", shape.dtype, Storage()))


def test_roofline_steps_are_those_of_the_plan() -> None:
    steps, plan = RooflineSteps(placed()), placed()
    assert steps.seconds([700], [0]) == pytest.approx(plan.prefill(700).seconds)
    assert steps.seconds([1] * 64, [900] * 64) == pytest.approx(plan.decode(64, 900).seconds)
    both = plan.pieces([512], [0]), plan.pieces([512], [512])
    assert sum(each.operations for each in both) > plan.prefill(1024).operations  # the head for one more row
    assert sum(each.compute_s for each in both) == pytest.approx(plan.prefill(1024).compute_s, rel=0.01)
    assert "unverified" in steps.basis


def point(batch: int, prompt: int, milliseconds: list[float]) -> LatencyPoint:
    footprint = Footprint(artifact_bytes=1, weight_bytes_per_token=1, kv_bytes_per_token=1)
    side = TimedSide([np.array(milliseconds)] * 2, batch)
    return catalog.point(prompt, side, None, Conditions(footprint=footprint, bandwidth=None))


def test_measured_steps_are_recovered_from_answers() -> None:
    """10 + 2 rows + .001 for each cached token of decoding; 1 a token of a prompt, .0001 for each pair before it."""

    def decoded(batch: int, prompt: int) -> list[float]:
        return [10 + 2 * batch + 0.001 * batch * (prompt + i) for i in range(8)]

    points = [
        point(1, 32, [32.0, *decoded(1, 32)]),
        point(4, 32, [128.0, *decoded(4, 32)]),
        point(1, 512, [512.0, *decoded(1, 512)]),
        point(1, 1024, [1024.0 + 0.0001 * 512 * 512, *decoded(1, 1024)]),
    ]
    steps = MeasuredSteps.of(points, "an artifact")
    assert steps.seconds([1], [100]) == pytest.approx(0.0121)
    assert steps.seconds([1] * 4, [100] * 4) == pytest.approx(0.0184)
    assert steps.seconds([1] * 2, [0] * 2) == pytest.approx(0.014)  # between those timed
    assert steps.seconds([32], [0]) == pytest.approx(0.032)
    assert steps.seconds([512], [512]) == pytest.approx(0.512 + 0.0001 * 512 * 512 / 1e3)
    # beyond, a row costs what a token of a prompt does
    assert steps.seconds([1] * 8, [0] * 8) == pytest.approx(0.018 + (32 - 18) * (8 - 4) / (32 - 4) / 1e3, rel=0.05)
    assert "1, 4 rows" in steps.basis


def test_one_batch_is_enough_and_none_is_refused() -> None:
    steps = MeasuredSteps.of([point(1, 2048, [2048.0, 5.0, 5.0])], "an artifact")
    assert steps.seconds([PREFILL_CHUNK], [0]) == pytest.approx(PREFILL_CHUNK / 1e3)
    assert steps.seconds([1] * 2, [0] * 2) > steps.seconds([1], [0])
    assert "each further row as a token of a prompt" in steps.basis
    with pytest.raises(UsageError, match="no times of tokens"):
        MeasuredSteps.of([], "an artifact")


# the smallest fleet


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulations be short."""
    monkeypatch.setattr(sizing, "REQUESTS", 80)
    monkeypatch.setattr(sizing, "TAIL", 4)
    monkeypatch.setattr(sizing, "TURNS", 1)


def test_equal_seeds_give_equal_fleets(few: None) -> None:
    one, two = (sizing.smallest(load(40), goal(), engine(), [1, 2, 4]) for _ in range(2))
    assert (one.replicas, one.slots, one.outcomes) == (two.replicas, two.slots, two.outcomes)
    other = sizing.smallest(load(40, seed=1), goal(), engine(), [1, 2, 4])
    assert other.outcomes != one.outcomes


def test_more_requests_need_no_fewer_replicas_and_wait_no_shorter(few: None) -> None:
    sizes = [sizing.smallest(load(rate), goal(), engine(), [4]).replicas for rate in (5, 40, 320)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    waits = [
        np.percentile([each.ttft_ms or 0.0 for each in simulate(engine(4), load(rate).split(1, 200)[0]).outcomes], 95)
        for rate in (2, 6, 10)
    ]
    assert waits == sorted(waits)


def test_one_replica_fewer_misses_the_goal(few: None) -> None:
    wanted, found = goal(), sizing.smallest(load(60), goal(), engine(), [2, 4])
    assert not wanted.exceeded(found.outcomes)
    assert found.replicas > 1
    for slots in (2, 4):
        [part] = load(60).split(found.replicas - 1, 80)
        assert wanted.exceeded(simulate(engine(slots), part).outcomes[16:])


def test_of_slots_that_need_as_few_replicas_the_smallest_number_is_taken(few: None) -> None:
    found = sizing.smallest(load(0.5), goal(), engine(), [1, 2, 4, 8])
    assert (found.replicas, found.slots) == (1, 1)


def test_what_is_too_slow_alone_is_refused_with_the_figure() -> None:
    with pytest.raises(
        UsageError, match=r"one request alone is too slow: p95 of TTFT is 94.0 ms, 4.70 times the 20.0 ms"
    ):
        sizing.smallest(load(1), goal("ttft=20ms"), engine(), [4])
    with pytest.raises(UsageError, match=r"p95 of TPOT is 11.0 ms, 1.10 times the 10.0 ms that are allowed"):
        sizing.smallest(load(1), goal("tpot=10ms"), engine(), [4])


def test_lengths_have_their_mean_and_their_variation() -> None:
    drawn = load(5, prompt=300, output=100, limit=100_000).split(1, 20_000)[0]
    prompts = np.array([len(each.prompt) for each in drawn])
    assert prompts.mean() == pytest.approx(300, rel=0.02)
    assert prompts.std() / prompts.mean() == pytest.approx(0.5, rel=0.05)
    assert np.diff([each.at_s or 0.0 for each in drawn]).mean() == pytest.approx(0.2, rel=0.05)
    alike = load(5, variation=0.0).split(2, 10)[0]
    assert {(len(each.prompt), each.output_tokens) for each in alike} == {(50, 4)}
    assert load(5, limit=60).longest == 60


def test_rates_have_units() -> None:
    assert [parse_rate(text) for text in ("50/s", "300/min", "1800/h", "0.5/s")] == [50, 5, 0.5, 0.5]
    for text in ("50", "50/d", "0/s", "-1/s", "nan/s", "1e9/s", "9999999/s", "/s", ""):
        with pytest.raises(UsageError, match="expected requests above 0 per s, min or h"):
            parse_rate(text)


def test_a_trace_is_split_over_all_replicas_and_scaled(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"at_s": 0.5 * i, "prompt_tokens": 20, "output_tokens": 2} for i in range(41)]
    path.write_text("\n".join(map(json.dumps, lines)))
    recorded = RecordedLoad.read(path, None)
    assert (recorded.rate, recorded.longest) == (pytest.approx(2), 22)
    parts = recorded.split(3, 0)
    assert len(parts) == 3
    assert sorted(each.at_s or 0.0 for part in parts for each in part) == [0.5 * i for i in range(41)]
    assert RecordedLoad.read(path, 8.0).rate == pytest.approx(8)
    path.write_text(json.dumps({"at_s": 0, "prompt": "text", "output_tokens": 2}))
    with pytest.raises(DataError, match="a plan knows no tokenizer"):
        RecordedLoad.read(path, None)


# KEDA


def size(replicas: int, running: float, ttft: float) -> FleetSize:
    outcome = RequestOutcome(0.0, (1.0,), 1.0, 1, 1)
    return FleetSize(replicas, 8, (outcome,), running, {"TTFT": ttft})


def test_scaling_values_ask_for_the_fleet_at_its_rate() -> None:
    values = keda.ScalingValues.of(size(5, 3.456, 100.0), goal("ttft=600ms"), rate=20.0)
    assert (values.least, values.most, values.running) == (1, 5, 3.45)
    assert values.waiting == 2  # .5 s to spare, 4 requests a second on each replica
    assert keda.ScalingValues.of(size(5, 3.456, 590.0), goal("ttft=600ms"), 20.0).waiting == 1
    assert keda.ScalingValues.of(size(5, 3.456, 100.0), goal("tpot=60ms"), 20.0).waiting == keda.WAITING


def test_scaling_values_have_the_place_that_they_have_in_the_manifest() -> None:
    manifest = next(YAML(typ="safe").load_all(MANIFEST))["spec"]
    written = keda.ScalingValues(1, 4, 4, 6.0).spec()
    assert written == {name: manifest[name] for name in ("minReplicaCount", "maxReplicaCount", "triggers")}
