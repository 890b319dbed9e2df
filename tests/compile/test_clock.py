"""What the stages of a build take: time and peak memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmforge.base.progress import Silent
from llmforge.compile.evidence import Clock
from llmforge.gates.records import ReusedRecord
from llmforge.measure import machine
from llmforge.report import view

CODE = """
import numpy as np
from llmforge.base import spans
from llmforge.base.progress import Silent
from llmforge.compile.evidence import Clock
from llmforge.gates.records import ReusedRecord
tracer = spans.Tracer(lambda span: None)
with spans.active(tracer), tracer.span("build"):
    clock = Clock(spans.TracedProgress(Silent(), tracer))
    clock.stage("small")
    clock.stage("large")
    np.ones(64 << 20, np.uint8).sum()
    clock.stage("small again")
    clock.stage("last")
    record = clock.record(ReusedRecord())
print(record.peak_rss_bytes, *(stage.peak_rss_bytes for stage in record.stages))
print(*(span.attributes["peak_rss_bytes"] for span in tracer.spans[1:]))
"""


@pytest.mark.skipif(not machine.reset_peak_resident_bytes(), reason="the system does not let peaks begin anew")
def test_peak_memory_by_stage() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    said, in_spans = done.stdout.splitlines()
    whole, *stages = map(int, said.split())
    small, large, again, _ = stages
    assert large - small > 60 << 20
    assert large - again > 60 << 20
    assert whole >= max(stages)
    assert list(map(int, in_spans.split())) == stages


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "reset_peak_resident_bytes", lambda: False)
    clock = Clock(Silent(), by_stage=False)
    clock.stage("Trace")
    record = clock.record(ReusedRecord())
    assert [stage.peak_rss_bytes for stage in record.stages] == [None]
    assert record.peak_rss_bytes >= clock.peak_before
    assert not view.stage_memory(record)
