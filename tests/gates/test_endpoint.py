"""The judgement of an endpoint: gates on bounds, and its seal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from llmforge.base.errors import ForgedVerdict, InputError, UsageError
from llmforge.gates import decision, endpoint
from llmforge.gates.decision import Verdict
from llmforge.gates.endpoint import EndpointJudgement, JudgedSide
from llmforge.metrics import served_quality
from llmforge.metrics.served_quality import BoundedSums, ServedQuality
from llmforge.recipe import GatesFile


def quality(low: float, high: float, documents: int = 20, sampled: float | None = None) -> ServedQuality:
    """Make a quality whose KLD lies between `low` and `high` nats a token, less a little that moves by document."""

    def sums(number: int) -> BoundedSums:
        exact = {"nll": 20.0 + number % 3, "baseline_nll": 19.0 + number % 3, "same_top": 9.0, "delta_p": -0.1}
        moved = 1 + 0.1 * (number % 5)
        return BoundedSums(
            document=f"d{number}", tokens=10, low={**exact, "kld": 10 * low * moved},
            high={**exact, "kld": 10 * high * moved}, sampled_kld=None if sampled is None else 10 * sampled * moved,
        )  # fmt: skip

    return served_quality.made(
        ServedQuality(
            way="prompt_logprobs", listed=20, vocabulary=100, told_share=0.9, spread=100.0, context=16,
            windows=documents, windows_skipped=0, tokens_untold=0, tokens=10 * documents,
            per_document=tuple(map(sums, range(documents))), figures={},
        )
    )  # fmt: skip


def judgement(made: ServedQuality, **limits: Any) -> EndpointJudgement:
    specs = dict(GatesFile.of(limits).gates)
    results = endpoint.decide(specs, made, None)
    return EndpointJudgement(
        created="2026-11-28T12:00:00+00:00", served=JudgedSide(kind="endpoint", title="m at http://host"),
        reference=JudgedSide(kind="checkpoint", title="folder", digest="0" * 64), data="d.jsonl", data_digest="1" * 64,
        limits=specs, quality=made, unmeasured=None, latency=None, gates=results, verdict=decision.overall(results),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.01, 0.012, Verdict.PASS), (0.03, 0.5, Verdict.FAIL), (0.01, 0.5, Verdict.INCONCLUSIVE)],
)
def test_a_gate_passes_by_the_upper_bound_and_fails_by_the_lower(low: float, high: float, verdict: Verdict) -> None:
    made = judgement(quality(low, high), kld_mean={"max": 0.02})
    assert made.verdict is verdict
    [gate] = made.gates
    if verdict is Verdict.INCONCLUSIVE:
        assert gate.samples_needed is None
        assert "more documents do not decide it" in gate.explanation
        assert "told 90.0% of the probability" in gate.explanation


def test_an_estimate_stands_for_the_bounds_of_kld() -> None:
    made = judgement(quality(0.01, 5.0, sampled=0.015), kld_mean={"max": 0.02})
    assert made.verdict is Verdict.PASS
    assert made.quality is not None
    assert made.quality.kld_truncated is not None
    assert made.quality.kld_truncated.at_most.value > 5


def test_judgements_form_a_line(tmp_path: Path) -> None:
    first, _ = endpoint.seal(tmp_path, judgement(quality(0.01, 0.012), kld_mean={"max": 0.02}))
    _, second = endpoint.seal(tmp_path, judgement(quality(0.03, 0.04), kld_mean={"max": 0.02}))
    assert second.previous == first.stem
    assert [each.verdict for each in endpoint.read(tmp_path)] == [Verdict.PASS, Verdict.FAIL]
    first.unlink()
    with pytest.raises(InputError, match="do not form one line"):
        endpoint.read(tmp_path)


def test_a_record_that_was_changed_is_refused(tmp_path: Path) -> None:
    file, _ = endpoint.seal(tmp_path, judgement(quality(0.03, 0.04), kld_mean={"max": 0.02}))
    file.chmod(0o644)
    text = file.read_text().replace('"verdict": "fail"', '"verdict": "pass"')
    file.write_text(text)
    with pytest.raises(InputError, match="its name is not its SHA-256"):
        endpoint.read(tmp_path)
    file.rename(file.with_name(f"{hashlib.sha256(text.encode()).hexdigest()}.json"))
    with pytest.raises(ForgedVerdict, match="gates; verdict: it says pass, its figures give fail"):
        endpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("quality", "figures", "kld_mean", "at_most", "high"), 0.001, "kld_mean"),
        (("quality", "per_document", 0, "low", "kld"), 9.0, "bounds"),
        (("quality", "tokens"), 7, "tokens"),
        (("limits", "kld_mean", "max"), 0.2, "gates"),
    ],
)
def test_what_does_not_follow_is_refused(path: tuple[Any, ...], value: float, said: str, tmp_path: Path) -> None:
    record = json.loads(judgement(quality(0.03, 0.04), kld_mean={"max": 0.02}).to_json())
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    forged = EndpointJudgement.model_validate_json(json.dumps(record))
    folder = tmp_path / "evidence"
    folder.mkdir()
    text = forged.to_json()
    (folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json").write_text(text)
    with pytest.raises(ForgedVerdict, match=said):
        endpoint.read(tmp_path)


def test_limits_on_what_is_not_measured_are_refused() -> None:
    with pytest.raises(UsageError, match="size_bytes is not measured of an endpoint"):
        endpoint.check(dict(GatesFile.of({"size_bytes": {"max": 10}}).gates), "gates.yaml")
    with pytest.raises(UsageError, match="no earlier version"):
        endpoint.check(dict(GatesFile.of({"kld_mean": {"rise_max": 0.1}}).gates), "gates.yaml")
