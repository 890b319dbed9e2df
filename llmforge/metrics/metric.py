"""A metric: one figure of a report, and all that was measured of an artifact, which its figures are read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from llmforge.metrics.adapters import AdapterQuality
from llmforge.metrics.agreement import RuntimeRun
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.metrics.intervals import SMALLEST_SAMPLE
from llmforge.metrics.latency import Latency
from llmforge.metrics.quality import Quality
from llmforge.metrics.retrieval.results import RetrievalResult
from llmforge.metrics.tasks import Score, TaskResult
from llmforge.metrics.units import Unit


@dataclass(frozen=True)
class Sizes:
    """What is shipped, and what it was made of."""

    engine_bytes: int  # all files of the engine
    checkpoint_bytes: int  # all tensors of the checkpoint, as stored
    parameters: int  # of the checkpoint


@dataclass(frozen=True)
class Measured:
    """All that was measured of one artifact; None: it was not."""

    quality: Quality | None = None
    latency: Latency | None = None
    sizes: Sizes | None = None
    runtimes: tuple[RuntimeRun, ...] = ()  # of others, that ran it
    tasks: tuple[TaskResult, ...] = ()
    adapters: tuple[AdapterQuality, ...] = ()  # those that requests choose
    behaviour: BehaviourResult | None = None
    retrieval: RetrievalResult | None = None

    @property
    def scores(self) -> dict[str, Score]:
        """Scores of tasks, by the name of their metric."""
        return {name: score for task in self.tasks for name, score in task.metrics.items()}


@dataclass(frozen=True)
class Metric:
    """One figure of a report."""

    section: ClassVar[Literal["quality", "latency", "runtimes", "tasks", "behaviour", "retrieval"] | None] = (
        None  # of a recipe's `validation` that measures it
    )
    beside_checkpoint: ClassVar[bool] = False  # measured of the checkpoint, too: limits on changes hold against that

    name: str  # in recipes and in a report's JSON
    title: str
    unit: Unit
    better: Literal["lower", "higher", "neither"]
    meaning: str = field(default="", kw_only=True)
    ideal: float | None = field(default=None, kw_only=True)  # the checkpoint's own: nearer is better, on either side
    key: int | None = field(default=None, kw_only=True)  # place among a report's key figures; None: it is none of them

    @property
    def wanted(self) -> str:
        """Say what is better: "lower", "higher", "neither" or, where there is an ideal, "nearer to 0"."""
        return self.better if self.ideal is None else f"nearer to {self.ideal:g}"

    def fewest(self, samples: int) -> int | None:
        """Say how many samples bounds need, where `samples` have none; None: more, and nobody can tell how many."""
        return SMALLEST_SAMPLE if samples < SMALLEST_SAMPLE else None

    @property
    def more(self) -> str:
        """What gives more samples."""
        return ""
