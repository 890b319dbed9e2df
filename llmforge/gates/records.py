"""The record of a build: everything that a reader needs to trust the artifact, or not to. Written once, never edited.

It is a record of evidence in the artifact, `evidence/<SHA-256>.json`, whose head llmforge.artifact.sealed reads. Its
timings, date and machine differ from build to build; it lies outside the content and names its digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from llmforge.artifact import Artifact, FileRecord, sealed, version_of
from llmforge.artifact import EvidenceRecord as Head
from llmforge.base.errors import InputError
from llmforge.base.wording import quoted
from llmforge.gates import decision
from llmforge.gates.decision import GateResult, Verdict
from llmforge.measure.machine import Machine
from llmforge.metrics.adapters import MOST_ADAPTERS, AdapterQuality
from llmforge.metrics.agreement import RUNTIMES, RuntimeRun
from llmforge.metrics.attribution import Attribution
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.metrics.latency import Latency
from llmforge.metrics.metric import Measured, Sizes
from llmforge.metrics.quality import Quality
from llmforge.metrics.record import ReportRecord
from llmforge.metrics.retrieval.results import RetrievalResult
from llmforge.metrics.tasks import MOST_TASKS, TaskResult
from llmforge.rewrite.pass_base import Numerics, Rewritten, Skipped


def _name(text: str) -> str:
    if not sealed.is_name(text):
        raise ValueError(f"{quoted(text)} cannot be the name of an artifact or target")
    return text


def _word(text: str) -> str:
    if not sealed.is_word(text):
        raise ValueError(f"{quoted(text)} is no package or version")
    return text


Name = Annotated[str, AfterValidator(_name)]
Word = Annotated[str, AfterValidator(_word)]


class CheckpointRecord(ReportRecord):
    """What went in."""

    name: str  # of the folder, without its path
    digest: str  # SHA-256 of the content, hex
    architecture: str  # "LlamaForCausalLM"
    dtypes: tuple[str, ...]  # of the stored tensors
    parameters: int = Field(gt=0)
    size_bytes: int = Field(gt=0)  # of the tensors


class TargetRecord(ReportRecord):
    """What it was built for."""

    name: Name
    title: str
    kind: Literal["cpu", "gpu"]


class VerificationRecord(ReportRecord):
    """What the check after a pass found, on probe inputs and against the graph before the pass.

    Its KLD is what the budget is held against, on as many of its windows as decide it; it is no share of the KLD that
    all passes have together.

    A difference is in standard deviations of what differs: all logits of the probes, a cache, or what a changed
    subgraph makes, where `probes` tell of subgraphs.
    """

    numerics: Numerics  # what the pass declares
    largest_difference: float
    allowed: float | None  # largest `largest_difference` that its numerics allow; None where the budget decides
    kld_mean: float | None  # from the graph before, nats a token; None where it was not measured
    budget: float | None  # the recipe's, nats a token
    probes: tuple[str, ...]  # "prefill", "decode", "ragged"
    seconds: float = 0.0  # that the check took

    @property
    def exceeds(self) -> bool:
        """Whether the pass cost more than its budget: the one declaration that a published pass may have broken."""
        return self.budget is not None and self.kld_mean is not None and not self.kld_mean <= self.budget


class RetreatRecord(ReportRecord):
    """A layer that a build gave more bits, for the pass that quantizes it exceeded its budget."""

    round: int = Field(ge=1)  # all layers of one got their bits at once
    layer: str  # "layer 3", or the parameter of an embedding or head
    before: int  # bits
    after: int
    share: float | None  # of what the pass cost before, that keeping the layer would have gained; None: not measured
    kld_mean: float  # of the pass before, nats a token
    predicted: float  # of it with all layers of the round
    budget: float


class PassRecord(ReportRecord):
    """What one pass did, and what it cost."""

    name: str
    options: dict[str, Any]
    numerics: Numerics
    rewritten: tuple[Rewritten, ...]
    skipped: tuple[Skipped, ...]
    nodes_before: int
    nodes_after: int
    weight_bytes_before: int
    weight_bytes_after: int
    seconds: float
    verification: VerificationRecord
    reused: bool = False  # the proof, and the numbers of the tensors that it made, are those of an earlier build
    retreats: tuple[RetreatRecord, ...] = Field(default=(), max_length=65_536)

    @model_serializer(mode="wrap")
    def _stayed(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out retreats where there are none."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "retreats" or value}

    @property
    def may_lose(self) -> bool:
        """Whether quality may have gone here, so that an attribution has a step for it."""
        return self.numerics is Numerics.LOSSY and bool(self.rewritten)

    @property
    def excess(self) -> str | None:
        """How much more it cost than its budget, in a line; None: it did not."""
        found = self.verification
        if not found.exceeds:
            return None
        return f"pass {self.name}: mean KLD is {found.kld_mean:.3g} nats, its budget {found.budget:.3g}"

    @property
    def retreat_lines(self) -> tuple[str, ...]:
        """Name every layer that got more bits, those of one round in a line, and why."""
        rounds: dict[tuple[int, int, int], list[RetreatRecord]] = {}
        for each in self.retreats:
            rounds.setdefault((each.round, each.before, each.after), []).append(each)
        lines = []
        for (_, before, after), held in rounds.items():
            named = [each.layer if each.share is None else f"{each.layer} ({each.share:.0%})" for each in held]
            why = f"the pass had cost {held[0].kld_mean:.3g} nats, its budget is {held[0].budget:.3g}"
            lines.append(f"pass {self.name}: {', '.join(named)} retreated from {before} to {after} bits: {why}")
        return tuple(lines)


class PluginRecord(ReportRecord):
    """A package from outside that took part: its version, SHA-256 over its files, and with what."""

    package: str
    version: str
    sha256: str
    parts: tuple[str, ...]  # "pass smooth-weights", "metric rank_moved"


class EngineFile(ReportRecord):
    """One file of the engine."""

    name: str
    size_bytes: int


class WeightGroup(ReportRecord):
    """Tensors of the engine's graph that have one name but for the numbers in it, such as one weight of each layer."""

    name: str  # "model.layers.*.mlp.down_proj.weight"
    dtype: str  # as stored: codes of less than a byte may lie in bytes
    tensors: int
    size_bytes: int


class EngineRecord(ReportRecord):
    """What the runtime loads, and how."""

    backend: str
    files: tuple[EngineFile, ...]
    weights: tuple[WeightGroup, ...] = Field(
        default=(), max_length=65_536
    )  # the largest first; none: not an ONNX graph
    session: dict[str, Any]  # the options that the runtime sets, as its configuration has them
    facts: dict[str, str] = Field(default_factory=dict)  # what else its builder knows of it, as text
    pending: bool = False  # the files are what it is built of, later and elsewhere
    unmeasured: str | None = None  # why it was not run: all that takes its device is unverified; None: it was

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)


class CalibrationRecord(ReportRecord):
    """What data the passes have seen."""

    data: str  # name of the file
    digest: str  # SHA-256, hex
    documents: int
    samples: int
    tokens: int


class StageRecord(ReportRecord):
    """A stage of a build, as its progress names it."""

    title: str
    seconds: float
    peak_rss_bytes: int | None = None  # largest resident set in its time; None: the system does not tell


class ReusedRecord(ReportRecord):
    """What a build took from the cache of earlier ones, and did not compute."""

    stages: tuple[Literal["trace", "trace-proof", "engine", "baseline"], ...] = ()
    layers: tuple[int, ...] = ()  # whose calibration was done
    passes: tuple[str, ...] = ()  # whose proofs and tensors were there


class BuildRecord(ReportRecord):
    """What the build itself took, up to the writing of its report."""

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    stages: tuple[StageRecord, ...] = ()  # in their order; their times add up to `seconds`
    reused: ReusedRecord = ReusedRecord()


_WHERE_MEASURED = ("plugins", "adapters", "behaviour", "retrieval")


class Report(ReportRecord):
    """The evidence of one build."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[3] = Field(default=3, alias="schema")
    content: str  # digest of the content that this is evidence about
    previous: str | None = None  # digest of the record before this one; both are known when it is published
    created: str  # UTC, ISO 8601
    verdict: Verdict
    files: dict[str, FileRecord] = Field(default_factory=dict)
    name: Name  # of the recipe and the artifact
    gates: tuple[GateResult, ...]
    quality: Quality | None
    quality_baseline: str | None  # what the quality is held against, as text
    latency: Latency | None
    attribution: Attribution | None = None
    runtimes: tuple[RuntimeRun, ...] = Field(default=(), max_length=len(RUNTIMES))  # others that ran the artifact
    tasks: tuple[TaskResult, ...] = Field(default=(), max_length=MOST_TASKS)
    adapters: tuple[AdapterQuality, ...] = Field(default=(), max_length=MOST_ADAPTERS)  # that requests choose
    behaviour: BehaviourResult | None = None
    retrieval: RetrievalResult | None = None
    checkpoint: CheckpointRecord
    target: TargetRecord
    engine: EngineRecord
    passes: tuple[PassRecord, ...]
    calibration: CalibrationRecord | None
    proven: tuple[str, ...] = ()  # what was proven of the whole: it is no reason to look closer
    notes: tuple[str, ...]  # every fallback and every thing that a reader might miss
    build: BuildRecord
    machine: Machine
    versions: dict[Word, Word]  # of packages, by name
    recipe: dict[str, Any]  # resolved
    plugins: tuple[PluginRecord, ...] = ()

    @model_serializer(mode="wrap")
    def _took_part(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out plug-ins, adapters, behaviour and retrieval where there are none."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name not in _WHERE_MEASURED or value}

    @property
    def excesses(self) -> tuple[str, ...]:
        """What each pass that exceeds its budget cost; published like that, the verdict is FAIL whatever gates say."""
        return excesses(self.passes)

    @property
    def version(self) -> str:
        """Of the artifact."""
        return version_of(self.content)

    @property
    def measured(self) -> Measured:
        """All that a gate can decide on."""
        return measured(
            self.quality,
            self.latency,
            self.engine,
            self.checkpoint,
            self.runtimes,
            self.tasks,
            self.adapters,
            self.behaviour,
            self.retrieval,
        )


def excesses(passes: Sequence[PassRecord]) -> tuple[str, ...]:
    """Say of each pass that exceeds its budget what it cost."""
    return tuple(each.excess for each in passes if each.excess is not None)


def retreated(passes: Sequence[PassRecord]) -> str | None:
    """Count the layers that got more bits, as they are in the end, "3 layers retreated to 5 bits"; None: none did."""
    bits = {(done.name, each.layer): each.after for done in passes for each in done.retreats}
    if not bits:
        return None
    (first, count), *others = sorted(Counter(bits.values()).items())
    more = "".join(f", {number} to {other}" for other, number in others)
    return f"{count} {'layer' if count == 1 else 'layers'} retreated to {first} bits{more}"


def overall(gates: Sequence[GateResult], passes: Sequence[PassRecord]) -> Verdict:
    """Combine: FAIL where a pass exceeds its budget, else what the gates say together."""
    return Verdict.FAIL if excesses(passes) else decision.overall(gates)


def measured(
    quality: Quality | None,
    latency: Latency | None,
    engine: EngineRecord,
    checkpoint: CheckpointRecord,
    runtimes: tuple[RuntimeRun, ...] = (),
    tasks: tuple[TaskResult, ...] = (),
    adapters: tuple[AdapterQuality, ...] = (),
    behaviour: BehaviourResult | None = None,
    retrieval: RetrievalResult | None = None,
) -> Measured:
    """Put together all that a gate can decide on; an engine that is not built yet has no size."""
    sizes = None if engine.pending else Sizes(engine.size_bytes, checkpoint.size_bytes, checkpoint.parameters)
    return Measured(quality, latency, sizes, runtimes, tasks, adapters, behaviour, retrieval)


def read(opened: Artifact, record: Head | None = None) -> Report:
    """Read the report in a record of an artifact; None: the newest.

    Raises:
        InputError: it is no report of this version.
    """
    file = opened.path / (record or opened.evidence[-1]).path
    try:
        return Report.model_validate_json(sealed.read_file(file, sealed.LARGEST_RECORD))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(
            f"{file}: not a report of this version: {where}: {first['msg']}",
            hint="run `llmforge verify ARTIFACT` to list changed files",
        ) from error
