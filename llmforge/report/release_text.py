"""A verdict on a release in the forms that pipelines read: text, Markdown for a pull request, JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from xml.etree import ElementTree

from llmforge.base import wording
from llmforge.gates import decision
from llmforge.gates.decision import GateResult, Verdict
from llmforge.gates.release import Judgement
from llmforge.metrics import catalog, units
from llmforge.metrics.intervals import Estimate

_MARKUP = re.compile(r"([\\`*\[\]|<>#~!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def headline(judgement: Judgement) -> str:
    """Say how it ended, in one line."""
    of = len(judgement.gates)
    verdict = judgement.verdict
    said = decision.told(judgement.gates, verdict)
    if verdict is Verdict.FAIL:
        said = failed(sum(gate.verdict is verdict for gate in judgement.gates), of, len(judgement.exceeded))
    against = "" if judgement.against is None else f" against {judgement.against.reference}"
    moved = "" if judgement.retreated is None else f", {judgement.retreated}"
    return f"{verdict.value.upper()}: {judgement.artifact.reference}{against}: {said}{moved}{_marks(judgement)}"


def failed(gates: int, of: int, exceeded: int) -> str:
    """Count the gates that failed, and the passes that exceed their budgets."""
    said = f"{gates} of {of} gates failed"
    if not exceeded:
        return said
    passes = "a pass exceeds its budget" if exceeded == 1 else f"{exceeded} passes exceed their budgets"
    return f"{passes}, {said}" if gates else passes


def text(judgement: Judgement) -> list[str]:
    """Write it for a terminal."""
    lines = [headline(judgement), *(f"FAIL  {each}" for each in judgement.exceeded)]
    for gate in judgement.gates:
        lines.append(f"{gate.verdict.value.upper()}  {gate.explanation}{_post_hoc(gate)}")
        if (could := sensitivity(gate)) is not None:
            lines.append(f"      {could}")
    for look in judgement.looks:
        lines.append(f"look at {look.documents} documents, at α {look.alpha:.3g}: {look.verdict.value}")
    return [*lines, *(f"note: {note}" for note in judgement.notes)]


def sensitivity(gate: GateResult) -> str | None:
    """Say what the sample of a gate could have shown; None: chance has no part in it."""
    if gate.detectable is None:
        return None
    unit = catalog.named(gate.metric).unit
    said = f"a difference of {unit.write(gate.detectable).removeprefix('+')} would have shown with 80 % probability"
    return said if gate.power is None else f"{said}; one that did not change passes with {100 * gate.power:.0f} %"


def markdown(judgement: Judgement) -> str:
    """Write it for a pull request."""
    icons = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.INCONCLUSIVE: "❔", Verdict.NONE: "–"}
    lines = [
        f"### {icons[judgement.verdict]} {_cell(headline(judgement))}",
        "",
        "| gate | verdict | measured | limit | could have shown |",
        "|---|---|--:|--:|--:|",
    ]
    for gate in judgement.gates:
        write = catalog.named(gate.metric).unit.write
        limit, signed = write(gate.limit), write
        if gate.is_relative:  # what was measured is a difference; how far it may move has no sign
            limit, signed = limit.removeprefix("+"), partial(units.signed, write=write)
        found = "–" if gate.measured is None else _measured(gate.measured, signed)
        could = "–" if gate.detectable is None else write(gate.detectable).removeprefix("+")
        cells = (f"{gate.bound}{_post_hoc(gate)}", f"{icons[gate.verdict]} {gate.verdict.value}", found)
        lines.append(f"| `{gate.metric}` {' | '.join(map(_cell, (*cells, limit, could)))} |")
    undecided = [gate.explanation for gate in judgement.gates if gate.verdict is not Verdict.PASS]
    against_it = [*judgement.exceeded, *undecided]
    lines += ["", *(f"- {_cell(each)}" for each in against_it)] if against_it else []
    paired = "" if judgement.paired_documents is None else f"; {judgement.paired_documents} documents paired"
    lines += ["", f"α {judgement.alpha:g} a gate{paired}; measured {_cell(judgement.artifact.created)}"]
    return "\n".join([*lines, *(f"Note: {_cell(note)}" for note in judgement.notes), ""])


def junit(judgement: Judgement) -> str:
    """Write it as JUnit XML: a gate is a test case, a failed one a failure, an undecided one an error."""
    facts = {
        "content": judgement.artifact.content,
        "evidence": judgement.artifact.evidence,
        "against": "" if judgement.against is None else judgement.against.reference,
        "alpha": f"{judgement.alpha:g}",
        "verdict": judgement.verdict.value,
        "post_hoc": str(judgement.post_hoc).lower(),
        "pending": str(judgement.pending).lower(),
    }
    return junit_of("llmforge gate", judgement.artifact.reference, facts, judgement.gates, judgement.exceeded)


def junit_of(
    command: str, judged: str, facts: Mapping[str, str], gates: Sequence[GateResult], exceeded: Sequence[str] = ()
) -> str:
    """Write gates of what was `judged` as JUnit XML; `facts` are properties of the suite."""
    failures = sum(gate.verdict is Verdict.FAIL for gate in gates) + len(exceeded)
    errors = sum(gate.verdict is Verdict.INCONCLUSIVE for gate in gates)
    counts = {"tests": str(len(gates) + len(exceeded)), "failures": str(failures), "errors": str(errors)}
    root = ElementTree.Element("testsuites", {"name": command, **counts})
    reference = _legal(judged)
    suite = ElementTree.SubElement(root, "testsuite", {"name": f"gates of {reference}", **counts, "skipped": "0"})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": _legal(value)})
    for excess in map(_legal, exceeded):
        name = excess.partition(":")[0]
        case = ElementTree.SubElement(suite, "testcase", {"classname": reference, "name": name, "time": "0"})
        ElementTree.SubElement(case, "failure", {"type": Verdict.FAIL.value, "message": excess}).text = excess
    for gate in gates:
        name = f"{gate.metric} {gate.bound} {gate.limit:g}{_post_hoc(gate)}"
        case = ElementTree.SubElement(suite, "testcase", {"classname": reference, "name": name, "time": "0"})
        said = _legal(gate.explanation)
        if gate.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
            kind = "failure" if gate.verdict is Verdict.FAIL else "error"
            ElementTree.SubElement(case, kind, {"type": gate.verdict.value, "message": said}).text = said
        ElementTree.SubElement(case, "system-out").text = "\n".join(filter(None, (said, sensitivity(gate))))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _measured(figure: Estimate, write: Callable[[float], str]) -> str:
    """Write a figure with its interval."""
    if figure.low is None or figure.high is None or figure.is_exact:
        return write(figure.value)
    return f"{write(figure.value)} ({write(figure.low)} – {write(figure.high)})"


def _marks(judgement: Judgement) -> str:
    marks = [
        mark for mark, holds in (("engine not built yet", judgement.pending), ("post hoc", judgement.post_hoc)) if holds
    ]
    return f" ({', '.join(marks)})" if marks else ""


def _post_hoc(gate: GateResult) -> str:
    return " (post hoc)" if gate.post_hoc else ""


def _cell(text: str) -> str:
    """Keep a text in its cell of a Markdown table, without markup of its own, and without calling for anybody."""
    return _MARKUP.sub(r"\\\1", wording.plain(" ".join(text.split()))).replace("@", "@<!-- -->")


def _legal(text: str) -> str:
    """Write out what XML 1.0 does not allow (section 2.2), and what a terminal would obey."""
    return wording.plain(text)
