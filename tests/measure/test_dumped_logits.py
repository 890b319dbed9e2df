"""Figures of quality against a computation of their own, from logits on the disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure import quality
from llmforge.measure.quality import QualityRun
from llmforge.metrics import token_records
from llmforge.metrics.quality import Quality

from ..models.logits import V, random_logits

CLOSE = {"rel": 1e-6, "abs": 1e-6}
QUANTILES = {"kld_median": 0.5, "kld_p90": 0.9, "kld_p95": 0.95, "kld_p99": 0.99, "kld_p999": 0.999}
SHIFTS = {"delta_p_p01": 0.01, "delta_p_p05": 0.05, "delta_p_median": 0.5, "delta_p_p95": 0.95, "delta_p_p99": 0.99}


@dataclass(frozen=True)
class Dump:
    """Both sides' logits of every window, [S, V] in a file each."""

    folder: Path
    windows: list[TokenWindow]

    def logits(self, side: str, i: int) -> NDArray[np.float64]:
        return np.load(self.folder / f"{side}-{i}.npy").astype(np.float64)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """Twelve documents of two windows; what was said before changes the logits, so that positions count."""
    folder, rng, table, error = tmp_path_factory.mktemp("logits"), np.random.default_rng(3), *tables()
    windows = [TokenWindow(f"doc-{i // 2}", rng.integers(0, V, rng.choice([40, 40, 23]))) for i in range(24)]
    for i, window in enumerate(windows):
        noise = error[window.ids] * np.sqrt(1 + np.arange(len(window.ids)))[:, None]
        np.save(folder / f"baseline-{i}.npy", table[window.ids])
        np.save(folder / f"artifact-{i}.npy", (table[window.ids] + noise).astype(np.float32))
    return Dump(folder, windows)


def tables() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return random_logits(7, V), random_logits(8, V, 0.1)


def compared(dump: Dump, **options: int) -> Quality:
    def read(side: str):
        def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
            (i,) = [i for i, window in enumerate(dump.windows) if window.ids is ids]
            return np.load(dump.folder / f"{side}-{i}.npy")

        return logits

    return quality.compare(dump.windows, read("baseline"), read("artifact"), QualityRun(**options))


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def expected(dump: Dump, rows_of: dict[int, slice]) -> dict[str, NDArray[np.float64]]:
    """Compute the values of all tokens of rows `rows_of` each window; the last row predicts nothing."""
    columns: dict[str, list[NDArray[np.float64]]] = {}
    for i, rows in rows_of.items():
        p, q = (log_softmax(dump.logits(side, i))[rows] for side in ("baseline", "artifact"))
        at = np.arange(len(dump.windows[i].ids))[rows]
        true = dump.windows[i].ids[at + 1]
        p_true, q_true = (np.take_along_axis(x, true[:, None], 1)[:, 0] for x in (p, q))
        tops = [np.argsort(-x, axis=1)[:, :5] for x in (p, q)]
        found = {
            "p_nll": -p_true,
            "q_nll": -q_true,
            "kld": (np.exp(p) * (p - q)).sum(-1),
            "delta": np.exp(q_true) - np.exp(p_true),
            "top1": (tops[0][:, 0] == tops[1][:, 0]).astype(float),
            "top5": np.array([len(set(a) & set(b)) / 5 for a, b in zip(*map(np.ndarray.tolist, tops), strict=True)]),
            "context": at + 1,
        }
        for name, values in found.items():
            columns.setdefault(name, []).append(values)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def check(got: Quality, raw: dict[str, NDArray[np.float64]]) -> None:
    figure = got.figures
    assert got.tokens == len(raw["kld"])
    assert figure["baseline_perplexity"] == pytest.approx(math.exp(raw["p_nll"].mean()), **CLOSE)
    assert figure["perplexity"] == pytest.approx(math.exp(raw["q_nll"].mean()), **CLOSE)
    assert figure["perplexity_ratio"].value == pytest.approx(math.exp((raw["q_nll"] - raw["p_nll"]).mean()), **CLOSE)
    assert figure["kld_mean"].value == pytest.approx(raw["kld"].mean(), **CLOSE)
    assert figure["kld_max"] == pytest.approx(raw["kld"].max(), **CLOSE)
    assert figure["top1_agreement"].value == pytest.approx(raw["top1"].mean(), **CLOSE)
    assert figure["top5_agreement"].value == pytest.approx(raw["top5"].mean(), **CLOSE)
    assert figure["delta_p_mean"].value == pytest.approx(raw["delta"].mean(), **CLOSE)
    assert figure["delta_p_rms"] == pytest.approx(math.sqrt((raw["delta"] ** 2).mean()), **CLOSE)
    for names, value in ((QUANTILES, "kld"), (SHIFTS, "delta")):
        for name, share in names.items():
            estimate = figure[name]
            assert estimate.value == pytest.approx(np.quantile(raw[value], share), **CLOSE), name
            assert estimate.low <= estimate.value <= estimate.high
    for name, value in (("kld_by_position", "kld"), ("top1_by_position", "top1")):
        curve = figure[name]
        assert sum(segment.tokens for segment in curve) == got.tokens
        for segment in curve:
            there = (segment.first <= raw["context"]) & (raw["context"] <= segment.last)
            assert segment.tokens == there.sum()
            assert segment.figure.value == pytest.approx(raw[value][there].mean(), **CLOSE)
    assert figure["kld_by_position"][-1].figure.value > 2 * figure["kld_by_position"][0].figure.value  # as dumped


def test_every_figure_of_all_tokens(dump: Dump) -> None:
    got = compared(dump)
    raw = expected(dump, {i: slice(0, -1) for i in range(24)})
    check(got, raw)
    assert [(s.first, s.last) for s in got.figures["kld_by_position"]] == [(1, 15), (16, 23), (24, 31), (32, 39)]
    documents = {each.document: each for each in got.per_document}
    for i in range(12):
        mine = expected(dump, {2 * i: slice(0, -1), 2 * i + 1: slice(0, -1)})
        assert documents[f"doc-{i}"].figures["kld"] == pytest.approx(mine["kld"].sum(), **CLOSE)
        assert documents[f"doc-{i}"].figures["delta_p"] == pytest.approx(mine["delta"].sum(), **CLOSE)


def test_llama_cpp_scores_the_second_half_of_full_contexts(dump: Dump) -> None:
    """tools/perplexity/perplexity.cpp: `first = n_ctx / 2`; rows first … n_ctx - 2 predict tokens first + 1 … ."""
    got = compared(dump, half_of=40)
    full = [i for i, window in enumerate(dump.windows) if len(window.ids) == 40]
    assert 0 < len(full) < 24
    assert got.scored == "second-half"
    assert got.windows == len(full)
    assert got.tokens == len(full) * (40 - 1 - 20)  # n_ctx - 1 - first
    raw = expected(dump, {i: slice(20, 39) for i in full})
    assert raw["context"].min() == 21
    figure = got.figures
    for name, mine in (("kld_mean", raw["kld"]), ("delta_p_mean", raw["delta"]), ("top1_agreement", raw["top1"])):
        assert figure[name].value == pytest.approx(mine.mean(), **CLOSE)
    assert figure["perplexity"] == pytest.approx(math.exp(raw["q_nll"].mean()), **CLOSE)
    assert figure["delta_p_rms"] == pytest.approx(math.sqrt((raw["delta"] ** 2).mean()), **CLOSE)
    ordered = sorted(raw["kld"].tolist())
    for name, share in QUANTILES.items():  # its `percentile`, with the places counted from 0
        place = share * (len(ordered) - 1)
        low = int(place)
        weighed = ordered[low] * (1 - (place - low)) + ordered[min(low + 1, len(ordered) - 1)] * (place - low)
        assert figure[name].value == pytest.approx(weighed, **CLOSE)
    assert figure["kld_mean"].value != pytest.approx(compared(dump).figures["kld_mean"].value, rel=0.01)


def test_a_text_without_full_windows_has_no_second_half(dump: Dump) -> None:
    with pytest.raises(DataError, match="no window of 64 tokens"):
        compared(dump, half_of=64)


def test_what_is_kept_of_tokens_is_bounded(dump: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large text, quantiles and curves are of whole windows that are spread over all documents."""
    monkeypatch.setattr(token_records, "KEPT_TOKENS", 400)
    got = compared(dump)
    first = {2 * i: slice(0, -1) for i in range(12)}  # the first window of each document
    assert 0 < got.kept_tokens <= 400
    assert {each.document for each in got.per_token} >= {f"doc-{i}" for i in range(9)}
    kept = dict(list(first.items())[: len(got.per_token)])
    raw = expected(dump, kept)
    assert got.kept_tokens == len(raw["kld"])
    assert got.figures["kld_p90"].value == pytest.approx(np.quantile(raw["kld"], 0.9), **CLOSE)
    whole = expected(dump, {i: slice(0, -1) for i in range(24)})
    assert got.figures["kld_mean"].value == pytest.approx(whole["kld"].mean(), **CLOSE)  # means are of all


def test_decode_steps_show_an_error_that_prefill_does_not(dump: Dump) -> None:
    """A cache that adds noise to what is read from it: the whole text in one step never reads it."""

    def cached(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = tables()[0][ids].copy()
        logits[1:] += 0.2 * random_logits(9, len(ids) - 1)
        return logits

    exact = lambda ids: tables()[0][ids]  # noqa: E731
    got = quality.compare(dump.windows, exact, exact, QualityRun(decode=cached, decode_tokens=10_000)).figures
    assert got["kld_mean"].value == pytest.approx(0, abs=1e-12)
    assert got["kld_decode_prefill"].value == pytest.approx(0, abs=1e-12)
    assert got["kld_decode"].value > 0.01
    assert got["kld_decode_added"].low > 0.01
    wanted = []
    for window in dump.windows:
        p, q = (log_softmax(side(window.ids).astype(np.float64))[:-1] for side in (exact, cached))
        wanted.append((np.exp(p) * (p - q)).sum(-1))
    assert got["kld_decode"].value == pytest.approx(np.concatenate(wanted).mean(), **CLOSE)


def test_decode_steps_read_whole_windows_of_all_documents(dump: Dump) -> None:
    table = tables()[0]
    read: list[int] = []

    def decode(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        read.append(len(ids))
        return table[ids]

    got = quality.compare(
        dump.windows, lambda ids: table[ids], lambda ids: table[ids], QualityRun(decode=decode, decode_tokens=200)
    )
    assert 100 < sum(read) <= 200
    assert [each.document for each in got.per_document_decoded] == [f"doc-{i}" for i in range(len(read))]
    nothing = quality.compare(dump.windows, lambda ids: table[ids], lambda ids: table[ids], QualityRun(decode=decode))
    assert "kld_decode" not in nothing.figures
