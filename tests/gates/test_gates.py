from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from llmforge.gates.decision import ALPHA, Earlier, GateResult, Verdict, judge, overall, samples_needed
from llmforge.metrics import catalog
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import EngineStart, LatencyPoint, Noise
from llmforge.metrics.metric import Measured, Sizes
from llmforge.metrics.studentized import Studentized
from llmforge.recipe import GateSpec

from ..samples import reports


def estimate(value: float, low: float | None, high: float | None, samples: int = 50) -> Estimate:
    return Estimate(value=value, low=low, high=high, samples=samples)


def decide(gate: GateSpec, measured: Estimate | None) -> GateResult:
    (result,) = judge({"kld_mean": gate}, {} if measured is None else {"kld_mean": measured})
    return result


@pytest.mark.parametrize(
    ("gate", "measured", "verdict"),
    [
        (GateSpec(max=0.03), estimate(0.02, 0.01, 0.03), Verdict.PASS),  # the bound itself is within
        (GateSpec(max=0.03), estimate(0.02, 0.01, 0.0301), Verdict.INCONCLUSIVE),  # the point alone would pass
        (GateSpec(max=0.03), estimate(0.04, 0.03, 0.05), Verdict.INCONCLUSIVE),
        (GateSpec(max=0.03), estimate(0.04, 0.0301, 0.05), Verdict.FAIL),
        (GateSpec(min=0.9), estimate(0.95, 0.9, 0.97), Verdict.PASS),
        (GateSpec(min=0.9), estimate(0.95, 0.89, 0.97), Verdict.INCONCLUSIVE),
        (GateSpec(min=0.9), estimate(0.85, 0.8, 0.9), Verdict.INCONCLUSIVE),
        (GateSpec(min=0.9), estimate(0.85, 0.8, 0.899), Verdict.FAIL),
        (GateSpec(max=5), Estimate.exact(5), Verdict.PASS),
        (GateSpec(max=5), Estimate.exact(6), Verdict.FAIL),
        (GateSpec(min=5), Estimate.exact(4), Verdict.FAIL),
        (GateSpec(max=0.03), estimate(0.001, None, None, samples=3), Verdict.INCONCLUSIVE),  # too few to tell
        (GateSpec(max=0.03), estimate(math.nan, math.nan, math.nan), Verdict.FAIL),
        (GateSpec(max=0.03), estimate(math.inf, 0.0, math.inf), Verdict.FAIL),
        (GateSpec(max=0.03), None, Verdict.FAIL),  # not measured: closed
    ],
)
def test_the_bound_decides(gate: GateSpec, measured: Estimate | None, verdict: Verdict) -> None:
    result = decide(gate, measured)
    assert result.verdict is verdict
    assert overall([result]) is verdict


@pytest.mark.parametrize(
    ("metric", "limit"), [("delta_p_mean", -0.01), ("eos_shift_at_ends", -1.0)]
)  # figures that may be below 0
def test_a_limit_below_0_decides(metric: str, limit: float) -> None:
    for by, verdict in ((0.005, Verdict.PASS), (-0.005, Verdict.FAIL)):
        value = limit + by
        (result,) = judge({metric: GateSpec(min=limit)}, {metric: estimate(value, value - 0.001, value + 0.001)})
        assert result.verdict is verdict


def test_explanations() -> None:
    assert decide(GateSpec(max=0.03), None).explanation == "kld_mean: not measured, limit: at most 0.03"
    assert (
        decide(GateSpec(max=0.03), estimate(0.02, 0.01, 0.025)).explanation
        == "kld_mean: 0.02 (95% interval 0.01 to 0.025) is at most 0.03"
    )
    assert decide(GateSpec(min=0.9), estimate(0.8, 0.7, 0.85)).explanation.endswith("is below 0.9")
    assert (
        decide(GateSpec(max=0.03), estimate(0.02, 0.005, 0.035)).explanation
        == "kld_mean: 0.02 (95% interval 0.005 to 0.035) includes the limit 0.03; "
        "about 230 documents needed to decide (now 50)"
    )
    assert "too close to the limit" in decide(GateSpec(max=0.03), estimate(0.03, 0.02, 0.04)).explanation
    few = decide(GateSpec(max=0.03), estimate(0.02, None, None, samples=3))
    assert few.explanation == "kld_mean: 0.02 from only 3 documents; an interval needs 8: measure on more documents"
    assert few.samples_needed == 8


def test_two_bounds_give_two_results_and_the_worst_counts() -> None:
    results = judge({"kld_mean": GateSpec(min=0.5, max=2)}, {"kld_mean": estimate(1.9, 1.7, 2.1)})
    assert [(r.bound, r.verdict) for r in results] == [("min", Verdict.PASS), ("max", Verdict.INCONCLUSIVE)]
    assert overall(results) is Verdict.INCONCLUSIVE
    failed = decide(GateSpec(max=1), estimate(1.9, 1.7, 2.1))
    assert overall([*results, failed]) is Verdict.FAIL


def test_what_could_not_be_measured_is_undecided_and_says_why() -> None:
    gates: dict[str, GateSpec] = {"kld_mean": GateSpec(max=0.1), "size_bytes": GateSpec(max=5)}
    missing, known = judge(gates, {"size_bytes": Estimate.exact(6)}, unmeasured="no device here")
    assert missing.verdict is Verdict.INCONCLUSIVE
    assert missing.samples_needed is None
    assert missing.explanation == "kld_mean: not measured: no device here; limit: at most 0.1"
    assert known.verdict is Verdict.FAIL
    broken = Estimate(value=math.nan, low=None, high=None, samples=50)
    (failed,) = judge({"kld_mean": GateSpec(max=1)}, {"kld_mean": broken}, unmeasured="no device here")
    assert failed.verdict is Verdict.FAIL


def test_no_gates_no_verdict() -> None:
    assert judge({}, {"kld_mean": estimate(1, 0, 2)}) == ()
    assert overall(()) is Verdict.NONE


def test_the_named_sample_size_decides_four_times_in_five() -> None:
    """Documents of mean 1 and deviation 0.3 against a limit of 1.05: draw that many, and count the decisions."""
    limit, rng = 1.05, np.random.default_rng(0)
    half = 1.96 * 0.3 / math.sqrt(50)
    needed = samples_needed(50, 1.0, 1 - half, 1 + half, limit)
    assert needed is not None
    passed = 0
    for _ in range(300):
        values = rng.normal(1.0, 0.3, needed)
        passed += values.mean() + 1.96 * values.std(ddof=1) / math.sqrt(needed) <= limit
    assert 0.73 < passed / 300 < 0.87


def test_every_metric_that_a_gate_names_is_measured() -> None:
    """And nothing more: a figure that no gate can name would be dead. Some a recipe must ask for."""
    asked_for = {
        "usd_per_million_tokens", "goodput_share", "load_ms", "peak_host_bytes", "peak_device_bytes", "machine_noise",
    }  # fmt: skip
    # Of chats, where it is known what ends a text, and of answers that the baseline wrote out: tests/measure.
    elsewhere = ("answer_", "eos_shift_", "greedy_ends_", "greedy_length_", "encode_")
    asked_for |= {name for name in catalog.deciding() if name.startswith(elsewhere)}
    asked_for |= {name for name in catalog.deciding() if name.startswith("runtime.")}  # tests/metrics/test_agreement.py
    asked_for |= {name for name in catalog.deciding() if name.startswith("behaviour.")}  # tests/metrics/behaviour
    asked_for |= {name for name in catalog.deciding() if name.startswith("retrieval.")}  # tests/metrics/test_retrieval
    found = catalog.estimates(reports.MEASURED)
    assert set(found) == set(catalog.deciding()) - asked_for
    latency = reports.LATENCY.model_copy(
        update={
            "points": tuple(
                LatencyPoint.model_validate({**dict(point), "usd_per_million": cost, "good_share": cost})
                for point, cost in zip(reports.LATENCY.points, (Estimate.exact(2.0), Estimate.exact(0.5)), strict=True)
            ),
            "starts": (EngineStart(load_ms=3.0, peak_host_bytes=4, peak_device_bytes=5),) * 3,
            "noise": Noise(probe_ms=(1.0, 2.0), stolen_share=None, waits=None, load_average=None),
        }
    )
    more = catalog.estimates(Measured(latency=latency))
    assert {
        name for name in asked_for if not name.startswith(("behaviour.", "retrieval.", "runtime.", *elsewhere))
    } <= set(more)
    assert (more["usd_per_million_tokens"].value, more["goodput_share"].value) == (0.5, 0.5), "lowest cost, worst share"
    assert [more[name].value for name in ("load_ms", "peak_host_bytes", "peak_device_bytes")] == [3, 4, 5]
    assert found["size_bytes"] == Estimate.exact(5_087_122)
    assert found["tpot_p50_ms"].value == 0.611  # the slowest prompt length
    sizes = {name: each.value for name, each in catalog.estimates(Measured(sizes=Sizes(5, 8, 4))).items()}
    assert sizes == {"size_bytes": 5, "size_ratio": 0.625, "weight_bits": 10}


@pytest.mark.parametrize(
    ("metric", "samples", "of", "said"),
    [
        ("tpot_p95_ms", 10, "repetitions", "an interval needs 72: raise validation.latency.repetitions"),
        ("ttft_p99_ms", 10, "repetitions", "an interval needs 368: raise validation.latency.repetitions"),
        ("ttft_p50_ms", 5, "repetitions", "an interval needs 6: raise validation.latency.repetitions"),
        ("itl_p95_ms", 5, "repetitions", "an interval needs 8: raise validation.latency.repetitions"),
        ("itl_p99_ms", 10, "repetitions", "an interval needs more: raise validation.latency.repetitions"),
        ("load_ms", 3, "starts", "an interval needs 6: raise validation.latency.starts"),
        ("greedy_first_difference", 5, "answers", "an interval needs 6: raise validation.quality.samples"),
        ("throughput_tokens_per_second", 3, "runs", "an interval needs 6: raise validation.latency.repetitions, or"),
    ],
)
def test_too_few_samples_say_how_many_are_lacking(metric: str, samples: int, of: str, said: str) -> None:
    """A percentile far out needs more than a median: 10 repetitions were "only 10; an interval needs 8"."""
    few = Estimate(value=1.0, low=None, high=None, samples=samples, of=of)
    better = catalog.deciding()[metric].better
    spec = GateSpec(max=2.0) if better == "lower" else GateSpec(min=0.5)
    (result,) = judge({metric: spec}, {metric: few})
    assert result.verdict is Verdict.INCONCLUSIVE
    assert f"from only {samples} {of}; {said}" in result.explanation
    needed = re.search(r"needs (\d+)", said)
    assert result.samples_needed == (None if needed is None else int(needed[1]))


def test_a_failure_among_many_gates_needs_more_than_one_alone() -> None:
    """Half an interval is 1.96 errors: 2.1 errors above the limit fail alone (p 0.018), not beside others (Holm)."""
    barely, clearly = (estimate(1 + errors / 1.96, errors / 1.96, errors / 1.96 + 2.0) for errors in (2.1, 3.0))
    gates = {"kld_mean": GateSpec(max=1), "perplexity_ratio": GateSpec(max=1), "top1_agreement": GateSpec(min=0.3)}
    held = dict.fromkeys(gates, estimate(0.5, 0.4, 0.6))
    assert decide(GateSpec(max=1), barely).verdict is Verdict.FAIL
    beside = judge(gates, {**held, "kld_mean": barely})
    assert [each.verdict for each in beside] == [Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.PASS]
    assert "of so many gates one may be by chance" in beside[0].explanation
    assert judge(gates, {**held, "kld_mean": clearly})[0].verdict is Verdict.FAIL


def test_a_limit_that_no_figure_can_break_is_underpowered() -> None:
    (result,) = judge({"top1_agreement": GateSpec(min=0.01)}, {"top1_agreement": estimate(0.9, 0.85, 0.95)})
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.underpowered
    (result,) = judge({"top1_agreement": GateSpec(min=0.8)}, {"top1_agreement": estimate(0.9, 0.85, 0.95)})
    assert result.verdict is Verdict.PASS
    assert result.detectable == pytest.approx(0.05 * (1 + 0.8416 / 1.96), rel=1e-3)


def test_a_figure_without_a_bound_on_the_side_of_its_limit_is_undecided_and_says_why() -> None:
    result = decide(GateSpec(max=0.5), estimate(0.1, 0.05, math.inf, 20))
    assert (result.verdict, result.underpowered) == (Verdict.INCONCLUSIVE, True)
    assert result.explanation.endswith("no upper bound, for 20 documents are too few or too uneven")


def test_few_uneven_documents_need_fewer_more_than_their_wide_interval_says() -> None:
    """The interval of 8 skewed documents shrinks faster than with the square root of their number."""
    spread = Studentized(0.1, 0.02, 8, 8.0, 0.3)
    low, high = spread.interval(ALPHA)
    measured = {"kld_mean": estimate(0.1, low, high, 8)}
    (told,) = judge({"kld_mean": GateSpec(max=0.18)}, measured, spreads={"kld_mean": spread})
    assert told.verdict is Verdict.INCONCLUSIVE
    assert told.samples_needed == spread.documents_needed(0.18, ALPHA, 0.8)
    by_interval = samples_needed(8, 0.1, low, high, 0.18)
    assert 8 < told.samples_needed < by_interval / 2
    unbounded = {"kld_mean": Estimate(value=0.1, low=None, high=None, samples=5)}
    (few,) = judge({"kld_mean": GateSpec(max=0.12)}, unbounded, spreads={"kld_mean": replace(spread, documents=5)})
    assert "about" in few.explanation


def test_limits_against_an_earlier_artifact_wait_for_one() -> None:
    spec = {"kld_mean": GateSpec(rise_max=0.1)}
    assert judge(spec, {"kld_mean": estimate(1, 0.9, 1.1)}) == ()
    (missing,) = judge(spec, {}, earlier=Earlier("tiny/0", {}, {}))
    assert missing.verdict is Verdict.FAIL
    (told,) = judge(spec, {}, earlier=Earlier("tiny/0", {"kld_mean": "another text"}, {}))
    assert told.verdict is Verdict.INCONCLUSIVE
    assert told.explanation == "kld_mean: not compared with tiny/0: another text"
    (better,) = judge(spec, {}, earlier=Earlier("tiny/0", {"kld_mean": estimate(-0.2, -0.3, -0.1)}, {"kld_mean": 1}))
    assert better.verdict is Verdict.PASS


def test_a_tail_of_too_few_repetitions_names_how_many_it_needs() -> None:
    few = Estimate(value=3.0, low=None, high=None, samples=40, of="repetitions")
    (result,) = judge({"tpot_p95_ms": GateSpec(max=5)}, {"tpot_p95_ms": few})
    assert (result.verdict, result.samples_needed) == (Verdict.INCONCLUSIVE, 72)
    assert (
        result.explanation
        == "tpot_p95_ms: 3 from only 40 repetitions; an interval needs 72: raise validation.latency.repetitions"
    )


def test_what_looking_often_does_not_change_is_decided_as_if_looked_at_once() -> None:
    """Half an interval below the limit, and a hundredth of α: only the figure of growing documents is undecided."""
    once = {"tpot_p50_ms": Estimate(value=1.0, low=0.5, high=1.5, samples=30, of="repetitions")}
    limits = {"tpot_p50_ms": GateSpec(max=1.6)}
    (result,) = judge(limits, once, alpha=ALPHA / 100)
    assert result.verdict is Verdict.PASS
