"""Passes, targets and artifacts in words, for the command line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmforge import targets
from llmforge.artifact import Artifact
from llmforge.backends.record import Support, dotted
from llmforge.base import plugins
from llmforge.base.errors import PluginError
from llmforge.quantization import methods
from llmforge.rewrite import options, pass_base
from llmforge.rewrite.pass_base import Pass
from llmforge.runtime.artifact_files import PENDING_FILE
from llmforge.targets import SourcedFigure, Target

if TYPE_CHECKING:
    from llmforge.ir.summary import GraphFacts
    from llmforge.trace.export.pattern import Pattern

_PENDING = f"engine/{PENDING_FILE}"
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "multipleOf": "a multiple of {}",
}


def pass_row(cls: type[Pass]) -> dict[str, str]:
    """Say what a pass does, in one line."""
    summary = (inspect.getdoc(cls) or "").partition("\n")[0]
    return {"name": cls.name, "numerics": cls.numerics.value, "summary": summary}


def pass_rows_of_plugins(known: Collection[str]) -> list[dict[str, str]]:
    """Say what each pass of a plug-in does, and who brings it, in one line; or why it does not load."""
    rows = []
    for name in pass_base.SEAM.names():
        try:
            cls = pass_base.SEAM.find(name, known)
        except PluginError as error:
            rows.append(_broken(pass_base.SEAM, name, "numerics", error))
            continue
        if cls is not None and (plugin := pass_base.of_plugin(cls)) is not None:
            rows.append({**pass_row(cls), "package": str(plugin.package)})
    return rows


def loaded(known: Collection[str]) -> tuple[list[type[Pass]], list[str], list[PluginError]]:
    """Load the passes of plug-ins, and their methods, by name; and say which of them do not load."""
    passes: list[type[Pass]] = []
    usable: list[str] = []
    broken: list[PluginError] = []
    for name in pass_base.SEAM.names():
        try:
            passes += filter(None, [pass_base.SEAM.find(name, known)])
        except PluginError as error:
            broken.append(error)
    for name in methods.SEAM.names():
        try:
            usable += [] if methods.SEAM.find(name, methods.built_in()) is None else [name]
        except PluginError as error:
            broken.append(error)
    return passes, usable, broken


def targets_here() -> tuple[list[Target], list[dict[str, str]]]:
    """Read all targets, those of plug-ins among them; and say which of these do not load, and why."""
    found, broken = [], []
    for name in targets.names():
        try:
            found.append(targets.load(name))
        except PluginError as error:
            broken.append(_broken(targets.SEAM, name, "kind", error))
            if name in targets.built_in():
                found.append(targets.read(targets.FOLDER / f"{name}.yaml"))
    return found, broken


def of_package(target: Target) -> dict[str, str]:
    """Say who brings a target."""
    plugin = None if target.name in targets.built_in() else targets.plugin_of(target.name)
    return {"package": "llmforge" if plugin is None else str(plugin.package)}


def target_facts(target: Target) -> dict[str, Any]:
    """Write the facts of a target as plain data."""
    return {**target.model_dump(mode="json", exclude_none=True), **of_package(target)}


def with_packages(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Leave out the package of each row where all are llmforge's own."""
    if any(row["package"] != "llmforge" for row in rows):
        return [tuple(row.values()) for row in rows]
    return [tuple(value for name, value in row.items() if name != "package") for row in rows]


def _broken(seam: plugins.Seam[Any], name: str, second: str, error: PluginError) -> dict[str, str]:
    packages = [str(each.package) for each in plugins.found().plugins if (each.kind, each.name) == (seam.kind, name)]
    text = {"numerics": "summary", "kind": "title"}[second]
    return {"name": name, second: "–", text: f"cannot be used: {error.message}", "package": ", ".join(packages)}


def pass_facts(cls: type[Pass]) -> dict[str, Any]:
    """Write all about a pass as plain data."""
    return {
        **pass_row(cls),
        "description": _documentation(cls),
        "requires": sorted(cls.requires),
        "provides": sorted(cls.provides),
        "options": options.schema(cls),
    }


def pass_text(cls: type[Pass]) -> str:
    """Write all about a pass for people: what it does, then its options."""
    lines = [f"{cls.name} ({cls.numerics.value})", "", _documentation(cls), ""]
    for title, facts in (("Requires", cls.requires), ("Provides", cls.provides)):
        if facts:
            lines += [f"{title}: {', '.join(sorted(facts))}", ""]
    lines += ["Options", *(_options(options.schema(cls)) or ["  none"])]
    return "\n".join(lines)


def target_text(target: Target) -> str:
    """Write the facts of a target for people, each figure with its source."""
    lines = [f"{target.name} ({target.kind})", target.title, ""]
    if target.isa is not None:
        lines.append(f"instruction set  {target.isa.value}")
    if target.sm is not None:
        lines.append(f"compute capability  {dotted(target.sm)}")
    if target.cores is not None:
        lines.append(f"cores  {target.cores}")
    lines.append(f"engines  {', '.join(target.engines)}")
    for name, unit, figure in _figures(target):
        if figure is not None:
            mark = "" if figure.verified else " (not verified)"
            lines += [f"{name}  {figure.value:g} {unit}{mark}", f"    {figure.source}"]
    for backend in target.engines:
        lines += _support(backend, target.support(backend))
    lines += ["", *(f"- {note}" for note in target.notes)] if target.notes else []
    return "\n".join(lines)


def graph_text(facts: GraphFacts, pattern: Pattern | None) -> str:
    """Write what a traced graph is made of."""
    sparse = facts.active_parameters < facts.parameters
    active = f", {facts.active_parameters:,} active per token" if sparse else ""
    rows = {
        "nodes": f"{facts.nodes:,}",
        "parameters": f"{facts.parameters:,}{active}",
        "weights": f"{facts.weight_bytes:,} bytes in {facts.initializers:,} tensors",
        "KV cache": f"{facts.cache_bytes_per_token:,} bytes per token in {facts.caches:,} tensors",
    }
    if pattern is not None:
        copied = pattern.depth - pattern.traced
        rows["layers"] = f"{pattern.depth}: {pattern.traced} traced, {copied} copied (period {pattern.period})"
    lines = [f"{title:<12}{value}" for title, value in rows.items()]
    return "\n".join([*lines, "", *(f"  {count:>6,}  {name}" for name, count in facts.operators.items())])


def artifact_lines(artifact: Artifact, tools: Mapping[str, str]) -> list[str]:
    """Write what an artifact is, what is known of it, and what it was made of, with `tools` the last time."""
    manifest = artifact.manifest
    evidence = [
        f"{record.created:%Y-%m-%d %H:%M %Z}  {record.verdict:<12}  {record.home}report/report.html"
        for record in artifact.evidence
    ]
    plugins_of = manifest.recipe.get("plugins") or {}
    rows = [
        ("gates", artifact.verdict),
        *zip(("evidence", *[""] * len(evidence)), evidence, strict=False),
        ("target", manifest.target),
        ("content", manifest.content_digest),
        ("checkpoint", manifest.checkpoint),
        *([("engine", "not built yet; run `llmforge build --finish`")] if _PENDING in manifest.files else ()),
        ("requires", ", ".join(f"{package} {version}" for package, version in manifest.requires.items()) or "nothing"),
        *([("plug-ins", ", ".join(f"{name} {version}" for name, version in plugins_of.items()))] if plugins_of else ()),
        ("built with", ", ".join(f"{tool} {version}" for tool, version in tools.items())),
    ]
    lines = [f"{manifest.name} {manifest.version}", *(f"  {title:<12}{value}" for title, value in rows)]
    return [*lines, *(f"  {record.size_bytes:>14,}  {path}" for path, record in artifact.listed.items())]


def _documentation(cls: type[Pass]) -> str:
    """Return the docstring of the pass's file, which enumerates its cases; else that of its class."""
    return inspect.getdoc(sys.modules[cls.__module__]) or inspect.getdoc(cls) or ""


def _options(schema: Mapping[str, Any], indent: str = "  ", root: Mapping[str, Any] | None = None) -> list[str]:
    root = root or schema
    lines: list[str] = []
    for name, written in schema.get("properties", {}).items():
        described = {**_referred(written, root), **written}
        need = "required" if name in schema.get("required", ()) else f"default {_plain(described.get('default'))}"
        lines.append(f"{indent}{name}: {_kind(described, root)}; {need}")
        if "description" in described:
            lines.append(f"{indent}    {described['description']}")
        lines += _options(described, indent + "    ", root)
    return lines


def _kind(described: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Say which values an option takes."""
    if "enum" in described:
        return " or ".join(_plain(value) for value in described["enum"])
    if "const" in described:
        return _plain(described["const"])
    if "anyOf" in described:
        return " or ".join(_kind(_referred(choice, root), root) for choice in described["anyOf"])
    words = [{"object": "mapping", "array": "list"}.get(described.get("type", ""), described.get("type", "value"))]
    words += [text.format(described[key]) for key, text in _BOUNDS.items() if key in described]
    return ", ".join(words)


def _referred(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in node:
        return node
    found: Mapping[str, Any] = root["$defs"][node["$ref"].removeprefix("#/$defs/")]
    return found


def _plain(value: object) -> str:
    """Write a value as a recipe would."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _figures(target: Target) -> Iterator[tuple[str, str, SourcedFigure | None]]:
    """Name the figures of a target, with their units."""
    yield "memory", "GB", target.memory_gb
    yield "bandwidth", "GB/s", target.bandwidth_gbs
    yield "multiprocessors", "", target.multiprocessors
    for dtype, figure in target.rates.items():
        yield f"{dtype}, dense", "TOP/s" if dtype.startswith("int") else "TFLOP/s", figure
    for library, reached in target.kernels.items():
        for dtype, layers in reached.items():
            yield f"{dtype} layers, {library} kernels", "TOP/s", layers.rate
            yield f"{dtype} layers, {library} kernels, one row", "GB/s of weights", layers.read_gbs
    if (link := target.interconnect) is not None:
        yield f"{link.kind}, {link.domain} devices, one direction", "GB/s", link.gbs
    yield "power", "W", target.tdp_w
    if target.usd_per_hour is not None:
        yield f"price, {target.usd_per_hour.date}", "USD per hour", target.usd_per_hour


def _support(backend: str, support: Support) -> list[str]:
    """Say what an engine takes on a target."""
    roles = {"computes in": support.compute, "weights": support.weights, "cache": support.kv}
    taken = "; ".join(f"{role} {', '.join(sorted(dtypes))}" for role, dtypes in roles.items())
    missing = [f"    no {dtype}: {reason}" for dtype, reason in support.why.items()]
    return [f"{backend}{'' if support.verified else ' (not verified)'}  {taken}", *missing]
