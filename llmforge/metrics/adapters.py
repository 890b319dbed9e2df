"""Quality of one adapter that requests choose, against the checkpoint with that adapter merged."""

from __future__ import annotations

from llmforge.metrics.quality import Quality
from llmforge.metrics.record import ReportRecord

PREFIX = "adapter."  # of the name of a metric of an adapter: adapter.NAME.METRIC
MOST_ADAPTERS = 4096


class AdapterQuality(ReportRecord):
    """What was measured with one adapter chosen."""

    adapter: str
    quality: Quality
