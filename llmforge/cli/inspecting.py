"""The commands that show: artifacts, checkpoints, graphs, passes, targets, the schema of recipes."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path

import click

from llmforge.base import extras
from llmforge.base.errors import InputError, UsageError, VerificationError
from llmforge.cli import output
from llmforge.cli.hub import REVISION, on_hub
from llmforge.cli.parameters import ARTIFACT, PATH

_INSPECT = """\b
Examples:
  llmforge inspect NAME:prod --verify
  llmforge inspect CHECKPOINT
  llmforge inspect model-q4_0.gguf --json
"""


@click.command(epilog=_INSPECT)
@click.argument("artifact", type=ARTIFACT)
@click.option("--json", "as_json", is_flag=True, help="Print manifest, verdict and records of evidence as JSON.")
@click.option("--verify", is_flag=True, help="Do what `llmforge verify` does first.")
@REVISION
def inspect(artifact: Path, as_json: bool, verify: bool, revision: str | None) -> None:
    """Show what ARTIFACT is: manifest, evidence and newest report.

    In place of ARTIFACT it takes a checkpoint, a GGUF file or an adapter, and shows how it is stored and what a build
    would do with it.
    """
    from llmforge.cli import describe, provenance
    from llmforge.gates import confirmed
    from llmforge.gates import records as model
    from llmforge.report import render

    if (snapshot := on_hub(artifact, revision)) is not None:
        artifact = snapshot.fetch()
    if _is_no_artifact(artifact):
        _inspect_checkpoint(artifact, as_json, verify)
        return
    opened = confirmed.open_artifact(artifact)
    verified = provenance.verified(opened) if verify else []
    report = model.read(opened)
    if as_json:
        evidence = [
            {"record": each.path, "created": each.created.isoformat(), "verdict": each.verdict}
            for each in opened.evidence
        ]
        digest = {"content_digest": opened.manifest.content_digest, "verdict": opened.verdict, "evidence": evidence}
        output.write_json({**json.loads(opened.manifest.to_json()), **digest})
        return
    try:
        summary = render.summary(report)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(  # of figures that no measurement gives
            f"{artifact}: its newest report cannot be shown: {type(error).__name__}: {error}",
            hint="run `llmforge verify ARTIFACT`; fetch or build the artifact again",
        ) from error
    output.write_lines(*describe.artifact_lines(opened, report.versions), *verified, "")
    output.write(summary, output.SUMMARY_WIDTH)


def _is_no_artifact(path: Path) -> bool:
    """Say whether `path` is there and is neither an artifact nor the folder of one's versions."""
    from llmforge.artifact.sealed import MANIFEST

    try:
        if not path.is_dir() or path.name.startswith("."):  # the latter of unfinished builds
            return path.is_file()
        return not (path / MANIFEST).exists() and not any(path.glob(f"[!.]*/{MANIFEST}"))
    except OSError:  # who opens it says so
        return False


def _inspect_checkpoint(path: Path, as_json: bool, verify: bool) -> None:
    """Show a checkpoint, a GGUF file or an adapter."""
    extras.require("build")
    from llmforge import passes
    from llmforge.checkpoint import inspection
    from llmforge.cli import inspected

    found = inspection.inspect(path, {step.writes_codes: step.name for step in passes.ALL if step.writes_codes})
    if verify:
        raise UsageError(f"{path}: not an artifact; only artifacts can be verified", hint="leave out --verify")
    if as_json:
        output.write_json(inspected.data(found))
    else:
        output.write_lines(*inspected.lines(found))


_TRACE = """\b
Examples:
  llmforge trace CHECKPOINT
  llmforge trace CHECKPOINT -o graph.onnx --no-weights    # to look at in a viewer
"""


@click.command(epilog=_TRACE)
@click.argument("checkpoint", type=PATH)
@click.option(
    "-o", "--output", "path", type=PATH, metavar="GRAPH.onnx",
    help="Write the graph to GRAPH.onnx, with its fp32 weights in files next to it.",
)  # fmt: skip
@click.option(
    "--no-weights", is_flag=True, help="With --output: write the graph without its weights, to view or to compare."
)
@REVISION
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON.")
def trace(checkpoint: Path, path: Path | None, no_weights: bool, revision: str | None, as_json: bool) -> None:
    """Trace CHECKPOINT to a graph and show its statistics.

    The graph is verified against the checkpoint before it is written.
    """
    extras.require("build")
    from llmforge.checkpoint import Checkpoint
    from llmforge.cli import describe
    from llmforge.ir import onnx_file, summary
    from llmforge.trace import trace
    from llmforge.trace.export import pattern
    from llmforge.verification.trace_verifier import prove_candidate

    if no_weights and path is None:
        raise UsageError("--no-weights requires --output")
    if path is not None:
        output.check_file(path, onnx_file.SUFFIX, makes_folders=True)
    snapshot = on_hub(checkpoint, revision)
    opened = Checkpoint.open(checkpoint if snapshot is None else snapshot.fetch())
    model = trace(opened)
    prove_candidate(opened, model)
    files: tuple[Path, ...] = ()
    if path is not None:
        with output.writing(path):
            files = onnx_file.save(model, path, weights=not no_weights)
    facts = summary.facts(model)
    if as_json:
        layers = json.loads(model.metadata_props[pattern.LAYERS])
        output.write_json({**vars(facts), "layers": layers, "files": [str(file) for file in files]})
    else:
        output.write_lines(*describe.graph_text(facts, pattern.recorded(model)).split("\n"))
        for file in files:
            output.write_lines(str(file))


_DIFF_GRAPH = """\b
Examples:
  llmforge diff-graph a.onnx b.onnx
  llmforge diff-graph a.onnx b.onnx > /dev/null && echo same
"""


@click.command("diff-graph", epilog=_DIFF_GRAPH)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def diff_graph(a: Path, b: Path, as_json: bool) -> None:
    """Compare two ONNX graphs, A and B.

    Compares operators, nodes by name, attributes and initializers. Initializers larger than 64 KiB are compared by
    dtype and shape only. Ends with exit code 7 if the graphs differ.
    """
    from llmforge.ir import diff, onnx_file

    difference = diff.diff(onnx_file.load(a), onnx_file.load(b))
    if as_json:
        output.write_json(vars(difference))
    else:
        output.write_lines(*diff.text(difference))
    if difference:
        click.get_current_context().exit(VerificationError.exit_code)


_PASSES = """\b
Examples:
  llmforge passes
  llmforge passes quantize-weights
"""


@click.command(epilog=_PASSES)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def passes(name: str | None, as_json: bool) -> None:
    """List the passes, or describe the pass NAME and its options."""
    from llmforge import passes as registry
    from llmforge.cli import describe
    from llmforge.rewrite import pass_base

    if name is None:
        rows = [{**describe.pass_row(cls), "package": "llmforge"} for cls in registry.ALL]
        rows += describe.pass_rows_of_plugins([cls.name for cls in registry.ALL])
        if as_json:
            output.write_json(rows)
        else:
            output.write_columns(describe.with_packages(rows))
        return
    known = {cls.name: cls for cls in registry.ALL}
    if (loaded := pass_base.SEAM.find(name, known)) is not None:
        known[name] = loaded
    if name not in known:
        from llmforge.recipe.errors import meant

        names = [*known, *pass_base.SEAM.names()]
        hint = meant(name.lower(), names) or "see `llmforge passes`"
        raise UsageError(f"no pass is named {name!r}; known: {', '.join(names)}", hint=hint)
    if as_json:
        output.write_json(describe.pass_facts(known[name]))
    else:
        output.write_lines(*describe.pass_text(known[name]).split("\n"))


_TARGETS = """\b
Examples:
  llmforge targets
  llmforge targets h200
  llmforge targets local --json
"""


@click.command(epilog=_TARGETS)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def targets(name: str | None, as_json: bool) -> None:
    """List the targets, or show the figures of the target NAME.

    NAME is a listed target, `local` for the CPU of this machine, or a file written by `llmforge doctor --write`.
    """
    from llmforge import targets
    from llmforge.cli import describe

    if name is not None:
        found = targets.find(name)
        if as_json:
            output.write_json(describe.target_facts(found))
        else:
            output.write_lines(*describe.target_text(found).split("\n"))
        return
    listed, broken = describe.targets_here()
    if as_json:
        output.write_json([*map(describe.target_facts, listed), *broken])
    else:
        rows = [
            {"name": each.name, "kind": each.kind, "title": each.title, **describe.of_package(each)} for each in listed
        ]
        output.write_columns(describe.with_packages([*rows, *broken]))


_SCHEMA = """\b
Example:
  llmforge schema > recipe.schema.json
"""


@click.command(epilog=_SCHEMA)
def schema() -> None:
    """Print the JSON Schema of recipes, for editor completion."""
    from llmforge import passes as registry
    from llmforge import recipe
    from llmforge.cli import describe
    from llmforge.cli.console import say

    passes, methods, broken = describe.loaded([cls.name for cls in registry.ALL])
    for problem in broken:
        say(f"left out: {problem.message}", always=True)
    output.write_json(recipe.json_schema([*registry.ALL, *passes], methods))


_PAGES = Path(__file__).resolve().parents[1] / "docs"
_DOCS = """\b
Examples:
  llmforge docs
  llmforge docs gates | less
"""


@click.command(epilog=_DOCS)
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """List the pages of the documentation, or print PAGE.

    PAGE is a name of the list, or docs/NAME.md, as messages and help texts name it.
    """
    pages = {path.relative_to(_PAGES).with_suffix("").as_posix(): path for path in sorted(_PAGES.rglob("*.md"))}
    if page is None:
        titles = [(name, path.read_text(encoding="utf-8").split("\n", 1)[0]) for name, path in pages.items()]
        output.write_columns([(name, title.removeprefix("# ").replace("`", "")) for name, title in titles])
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        near = get_close_matches(name, pages, n=1)
        hint = f"did you mean `llmforge docs {near[0]}`?" if near else "`llmforge docs` lists the pages"
        raise UsageError(f"there is no page {name}", hint=hint)
    output.write_script(pages[name].read_text(encoding="utf-8"))
