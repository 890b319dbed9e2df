"""How a command ends that came to a verdict: nothing, or the error that gives its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmforge.base.errors import EnginePending, ForgeError, GateFailed, GateInconclusive
from llmforge.cli import output

if TYPE_CHECKING:
    from llmforge.gates.decision import GateResult, Verdict
    from llmforge.gates.records import Report


def end(
    verdict: Verdict, said: Sequence[str], *, artifact: Path, pending: bool, failed: str | None, undecided: str | None
) -> None:
    """Raise what a verdict is to a pipeline; `said` are the lines of it. PASS, and no gates, raise nothing.

    `failed` and `undecided` are the hints of those; an engine that is not built yet (`pending`) has its own.

    Raises:
        GateFailed: a gate failed.
        EnginePending: no gate failed, and one is undecided for the engine of `artifact` is not built yet.
        GateInconclusive: the same with an engine.
    """
    from llmforge.gates.decision import Verdict

    message = "\n".join(said)
    if verdict is Verdict.FAIL:
        raise _whole(GateFailed(message), failed)
    if verdict is Verdict.INCONCLUSIVE and pending:
        raise EnginePending(message, hint=f"on the target: llmforge build --finish {artifact}")
    if verdict is Verdict.INCONCLUSIVE:
        raise _whole(GateInconclusive(message), undecided)


def _whole(error: ForgeError, hint: str | None) -> ForgeError:
    """Give an error a hint that is not shortened: a command in it is there to be pasted."""
    error.hint = hint
    return error


def end_of(
    report: Report, artifact: Path, hint: str | None = None, *, gates: Sequence[GateResult] | None = None
) -> None:
    """End a command that has built or measured `artifact`; its report says how the gates ended.

    `gates` are those that the command decided, where these are not all.

    Raises:
        GateFailed, EnginePending, GateInconclusive: as `end`.
    """
    from llmforge.gates import relaxed
    from llmforge.gates.decision import Verdict, overall

    verdict = report.verdict if gates is None else overall(gates)
    excesses = report.excesses if gates is None else ()
    pending = report.engine.pending
    ended = "the engine is not built yet" if pending else "a gate is inconclusive"
    if verdict is Verdict.FAIL:
        ended = "a pass exceeds its budget" if excesses else "a gate failed"
    of_verdict = [*excesses] + [
        gate.explanation for gate in (report.gates if gates is None else gates) if gate.verdict is verdict
    ]
    ways = relaxed.ways(report, output.called(artifact)) if gates is None else ()
    hint = "\n".join(["; or ".join(ways), *([hint] if hint else [])]) if ways else hint
    end(verdict, [ended, *of_verdict], artifact=artifact, pending=pending, failed=hint, undecided=hint)
