"""The metrics of an artifact as a whole: its size, what other runtimes make of it, scores of tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from llmforge.metrics.agreement import DISTRIBUTIONS, RUNTIMES, RuntimeName
from llmforge.metrics.behaviour import outcomes
from llmforge.metrics.behaviour.document import FEWEST_OF_A_SLICE
from llmforge.metrics.behaviour.results import PREFIX as BEHAVIOUR
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.metric import Measured, Metric, Sizes
from llmforge.metrics.retrieval import results as retrieval
from llmforge.metrics.units import BITS, BYTES, CORRELATION, NATS_A_TOKEN, RATIO, SCORE, SHARE, TEXT


@dataclass(frozen=True)
class RuntimeMetric(Metric):
    """How far another runtime gives the same as llmforge's, for the same artifact."""

    section = "runtimes"
    decides = True

    runtime: RuntimeName
    figure: Literal["agreement", "same_answers", "equal_tokens", "kld_mean"]  # of an `Agreement`

    @property
    def more(self) -> str:
        """What gives more samples."""
        return "measure on more documents"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where the runtime did not run it, or failed."""
        runs = [run for run in measured.runtimes if run.runtime == self.runtime]
        if not runs or runs[-1].figures is None:
            return None
        found: Estimate = getattr(runs[-1].figures, self.figure)
        return found


@dataclass(frozen=True)
class SizeMetric(Metric):
    """What the engine's files weigh."""

    decides = True

    figure: Callable[[Sizes], float]

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it, exactly; None where there is no engine."""
        return None if measured.sizes is None else Estimate.exact(self.figure(measured.sizes))


@dataclass(frozen=True)
class TaskMetric(Metric):
    """A score of a task, under `task.NAME.SCORE`: which tasks there are, a recipe or `llmforge eval` says."""

    section = "tasks"
    decides = True
    beside_checkpoint = True

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        score = measured.scores.get(self.name)
        return None if score is None else score.figures.artifact


@dataclass(frozen=True)
class BehaviourMetric(Metric):
    """What chats do, under `behaviour.OUTCOME`, and of one slice of them under `behaviour.OUTCOME.SLICE`."""

    section = "behaviour"
    decides = True
    beside_checkpoint = True

    part: str | None = None  # of which slice; None: all documents

    def fewest(self, samples: int) -> int | None:
        """Say how many documents bounds need: those of a slice are shown, and decide nothing below that."""
        if self.part is not None and samples < FEWEST_OF_A_SLICE:
            return FEWEST_OF_A_SLICE
        return super().fewest(samples)

    @property
    def more(self) -> str:
        """What gives more samples."""
        return "add documents to the data of `validation.behaviour`" + (f", of slice {self.part}" if self.part else "")

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        found = None if measured.behaviour is None else measured.behaviour.metrics.get(self.name)
        return None if found is None else found.artifact

    def of_slice(self, part: str) -> BehaviourMetric:
        """Give the same figure of one slice."""
        return replace(self, name=f"{self.name}.{part}", title=f"{self.title}, {part}", part=part)


@dataclass(frozen=True)
class RetrievalMetric(Metric):
    """What an embedder finds, or how a reranker orders, under `retrieval.NAME`."""

    section = "retrieval"
    decides = True

    @property
    def more(self) -> str:
        """What gives more samples."""
        return "use more queries: `validation.retrieval`"

    def estimate(self, measured: Measured) -> Estimate | None:
        """Read it; None where it was not measured."""
        found = None if measured.retrieval is None else measured.retrieval.metrics.get(self.name)
        return None if found is None else found.artifact


@dataclass(frozen=True)
class FoundMetric(RetrievalMetric):
    """How well what is asked for is found, by the artifact and by its checkpoint."""

    beside_checkpoint = True


# fmt: off

OF_RETRIEVAL: tuple[RetrievalMetric, ...] = (

    FoundMetric(
        f"{retrieval.PREFIX}{retrieval.NDCG}", "nDCG@10", SCORE, "higher",
        meaning="of the first 10 passages for each query; of a reranker, among the candidates",
    ),
    FoundMetric(
        f"{retrieval.PREFIX}{retrieval.RECALL}", "Recall@10", SHARE, "higher",
        meaning="share of the passages that answer a query among its first 10",
    ),
    RetrievalMetric(
        f"{retrieval.PREFIX}{retrieval.COSINE}_mean", "Cosine to the checkpoint, mean", CORRELATION, "higher",
        meaning="of the embeddings of each query and passage",
    ),
    RetrievalMetric(
        f"{retrieval.PREFIX}{retrieval.TAIL_COSINE}", "Cosine to the checkpoint, 1 % quantile", CORRELATION, "higher",
        meaning="of the embeddings of each query and passage: 99 % are closer",
    ),
    RetrievalMetric(
        f"{retrieval.PREFIX}{retrieval.SPEARMAN}", "Spearman's ρ to the checkpoint", CORRELATION, "higher",
        meaning="of the scores of each query's candidates, mean over queries",
    ),
    RetrievalMetric(
        f"{retrieval.PREFIX}{retrieval.KENDALL}", "Kendall's τ to the checkpoint", CORRELATION, "higher",
        meaning="of the scores of each query's candidates, mean over queries",
    ),

)

OF_BEHAVIOUR: tuple[BehaviourMetric, ...] = (

    BehaviourMetric(
        f"{BEHAVIOUR}{outcomes.CHECKS}", "Checks of chats passed", SHARE, "higher",
        meaning=f"share of all checks of all documents that are right: {', '.join(outcomes.of_checks())}",
    ),
    *(
        BehaviourMetric(f"{BEHAVIOUR}{each.name}", each.title, each.unit, each.better, meaning=each.meaning)
        for each in outcomes.OUTCOMES
    ),

)

SIZE = SizeMetric(
    "size_bytes", "Size", BYTES, "lower", lambda sizes: sizes.engine_bytes, meaning="all files of the engine"
)

SIZE_RATIO = SizeMetric(
    "size_ratio", "Size ratio", RATIO, "lower", lambda sizes: sizes.engine_bytes / sizes.checkpoint_bytes,
    meaning="all files of the engine / all tensors of the checkpoint, as stored",
)

WEIGHT_BITS = SizeMetric(
    "weight_bits", "Bits per weight", BITS, "lower", lambda sizes: 8 * sizes.engine_bytes / sizes.parameters,
    meaning="all files of the engine: embedding, scales, zero points and graph too, for each parameter",
)


ARTIFACT: tuple[Metric, ...] = (

    SIZE,
    SIZE_RATIO,
    WEIGHT_BITS,
    *OF_BEHAVIOUR,
    *OF_RETRIEVAL,
    *(
        metric
        for name in RUNTIMES
        for metric in (
            RuntimeMetric(
                f"runtime.{name}.agreement", f"{DISTRIBUTIONS[name]}: agreement", SHARE, "higher", name, "agreement",
                meaning="tokens of our greedy answers where both runtimes have the same most likely token",
            ),
            RuntimeMetric(
                f"runtime.{name}.same_answers", f"{DISTRIBUTIONS[name]}: same answers", SHARE, "higher", name,
                "same_answers", meaning="prompts with the same greedy answer in both runtimes",
            ),
            RuntimeMetric(
                f"runtime.{name}.equal_tokens", f"{DISTRIBUTIONS[name]}: equal tokens, median", TEXT, "higher", name,
                "equal_tokens", meaning="of greedy answers, before their first difference",
            ),
            RuntimeMetric(
                f"runtime.{name}.kld_mean", f"{DISTRIBUTIONS[name]}: mean KLD", NATS_A_TOKEN, "lower", name, "kld_mean",
                meaning="KL(our run ‖ its run) of the same artifact, nats per token",
            ),
        )
    ),

)
# fmt: on
