"""Reports say how long the answers are that they show, and which of them end."""

from __future__ import annotations

import pytest

from llmforge.metrics.quality import GreedyAnswer
from llmforge.report import render, view

from ..samples import reports

LONG = GreedyAnswer(
    document="guide-0", prompt_tokens=32, tokens=128, first_difference=4,
    ended=False, baseline_tokens=34, baseline_ended=True,
)  # fmt: skip
BROKEN_OFF = GreedyAnswer(document="guide-1", prompt_tokens=32, tokens=90, first_difference=3, ended=True)


def test_lengths_stand_beside_the_answers() -> None:
    quality = reports.QUALITY.model_copy(update={"answers": (LONG, BROKEN_OFF)})
    report = reports.make(quality=quality)
    page, text = render.to_html(report), render.to_markdown(report)
    for told in (
        "<h3>Baseline: 34 tokens, ended</h3>",
        "<h3>Artifact: 128 tokens, not ended</h3>",
        "<h3>Baseline</h3>",
    ):
        assert told in page
    assert "- baseline (34 tokens, ended) goes on: lies within" in text
    assert "- artifact (128 tokens, not ended) goes on: is inside" in text
    assert view.how_long(quality, "guide-1") == ("", "90 tokens, ended")


@pytest.mark.parametrize("document", ["guide-0", "none"])
def test_of_older_records_no_length_is_told(document: str) -> None:
    assert view.how_long(reports.QUALITY, document) == ("", "")
