"""The state of a build: what its stages have found and made so far, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from llmforge.artifact import Hashing
from llmforge.backends.engines import BuiltEngine
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import Adapter
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile.attribution import LayerShare
from llmforge.compile.drafts import Draft
from llmforge.compile.evidence import Clock, Evidence
from llmforge.compile.heads import Head
from llmforge.compile.lock import Lock, StageDigests
from llmforge.compile.lossy_parts import LossyStep
from llmforge.compile.overlap import Overlap, PendingProof
from llmforge.compile.preflight import CheckedRecipe
from llmforge.compile.reuse import Reuse
from llmforge.compile.texts import BuildTexts
from llmforge.gates import records, relaxed
from llmforge.gates.comparison import Previous
from llmforge.gates.decision import GateResult
from llmforge.gates.records import PassRecord, Report, ReusedRecord
from llmforge.measure.footprint import BytesRead
from llmforge.measure.runtimes import Interpreter
from llmforge.metrics.attribution import Attribution
from llmforge.quantization.statistics import Demand, Statistics
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Pass
from llmforge.targets import Target

_NAMED = 3  # layers behind an excess


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """What calibration found for the passes that demand it; nothing where none does."""

    statistics: Statistics | None = None
    record: records.CalibrationRecord | None = None
    key: str = ""  # of what it depends on


@dataclass(frozen=True, eq=False)
class PassRun:
    """A pass that ran: its record, which lacks what its proof finds."""

    record: partial[records.PassRecord]
    proof: PendingProof[records.VerificationRecord]

    def proven(self) -> records.PassRecord:
        """Wait for the proof."""
        return self.record(verification=self.proof.result())


@dataclass(frozen=True)
class Excess:
    """A lossy pass that cost more than its budget."""

    number: int  # of the pass in its recipe, from 0
    done: PassRecord
    layers: tuple[LayerShare, ...] = ()  # the largest share first; () where it was not measured
    stays: str | None = None  # why it does not retreat further; None: the recipe does not let it

    @property
    def budget(self) -> float:
        """The budget that it would keep, with a margin."""
        assert self.done.verification.kld_mean is not None
        return relaxed.budget(self.done.verification.kld_mean)

    def __str__(self) -> str:
        most = ", ".join(f"{each.name} {each.share:.0%}" for each in self.layers[:_NAMED])
        moved = records.retreated([self.done])
        ended = None if self.stays is None else f"; {moved or 'no layer retreated'}; {self.stays}"
        return f"{self.done.excess}{f'; most of it in {most}' if most else ''}{ended or ''}"


@dataclass(frozen=True)
class ReportFacts:
    """Those fields of a report that hold wherever the engine is built."""

    name: str
    checkpoint: records.CheckpointRecord
    target: records.TargetRecord
    passes: tuple[records.PassRecord, ...]
    calibration: records.CalibrationRecord | None
    attribution: Attribution | None
    proven: tuple[str, ...]
    notes: tuple[str, ...]
    recipe: dict[str, Any]  # resolved
    plugins: tuple[records.PluginRecord, ...]

    @classmethod
    def of(cls, report: Report, notes: Sequence[str]) -> ReportFacts:
        """Take them from the report of an earlier build, with further `notes`."""
        found = cls(**{each.name: getattr(report, each.name) for each in fields(cls)})
        return replace(found, notes=(*found.notes, *notes))


@dataclass(eq=False)
class CompileState:
    """What a build knows and has made; each stage reads what is there, and adds its own part, in this order."""

    staging: Path  # the hidden folder that becomes the artifact
    target: Target
    clock: Clock  # counts stages, and shows them
    hashing: Hashing
    notes: list[str] = field(default_factory=list)  # for the report
    draft: Draft | Head | None = None  # what drafts tokens for this model

    # recipe
    checked: CheckedRecipe = field(init=False)
    interpreters: Sequence[Interpreter] = field(init=False)  # of other runtimes
    overlap: Overlap = field(init=False)
    reuse: Reuse = field(init=False)
    # checkpoint
    checkpoint: Checkpoint = field(init=False)
    adapters: Sequence[Adapter] = field(init=False)  # that requests choose
    # trace
    model: ir.Model = field(init=False)  # the canonical graph, which passes rewrite
    traced: ir.Model = field(init=False)  # as it was traced
    demands: Sequence[Demand] = field(init=False)
    trace_proof: PendingProof[str] = field(init=False)
    digests: StageDigests = field(default_factory=lambda: StageDigests())
    # passes
    calibration: CalibrationResult = field(init=False)
    texts: BuildTexts = field(init=False)
    windows: Sequence[TokenWindow] = field(init=False)  # of evaluation text
    runs: list[PassRun] = field(default_factory=list)
    adapter_proofs: list[PendingProof[str]] = field(default_factory=list)
    lossy_steps: list[LossyStep] = field(default_factory=list)  # kept for attribution
    retreats: dict[int, tuple[records.RetreatRecord, ...]] = field(default_factory=dict)  # by the number of their pass
    stays: dict[int, str] = field(default_factory=dict)  # why a pass that may retreat does not, or not further
    excesses: Sequence[Excess] = ()  # of budgets, once all proofs have ended
    plugins: tuple[records.PluginRecord, ...] = ()  # that took part
    # engine
    read: BytesRead = field(init=False)  # by a decode step
    engine: BuiltEngine | None = None  # None: it is built later
    engine_proof: PendingProof[str] | None = None  # None: it does not run here, or not as a whole
    # validation
    evidence: Evidence = field(init=False)
    attribution: Attribution | None = None
    # gates
    facts: ReportFacts = field(init=False)
    lock: Lock = field(init=False)
    reused: ReusedRecord = field(default_factory=ReusedRecord)
    engine_record: records.EngineRecord = field(init=False)
    gates: tuple[GateResult, ...] = field(init=False)

    @property
    def recipe(self) -> Recipe:
        """The recipe that is built."""
        return self.checked.recipe

    @property
    def steps(self) -> Sequence[Pass]:
        """The passes of the recipe."""
        return self.checked.steps


@dataclass(frozen=True)
class BuildResult:
    """A published artifact and the evidence of its build."""

    path: Path
    report: Report
    previous: Previous | None = None  # what it was held against: the version before
