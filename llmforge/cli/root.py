"""The command line. Only this module prints, and `cli_serving`, which holds some of its commands.

Exit codes: 0 done, and gates passed; 1 our own bug; 2 usage or recipe; 3 a gate failed; 4 a gate is inconclusive;
5 bad checkpoint or data; 6 not supported by the target; 7 a pass failed its verification; 8 the environment lacks
something; 9 the engine takes no requests; 130 interrupted; 141 the reader of standard output went away.

Commands import what they need when they run, so that `llmforge --help` costs no torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llmforge import __version__
from llmforge.base.errors import ForgeError, GateFailed, GateInconclusive, UsageError
from llmforge.cli import planning, serving

if TYPE_CHECKING:
    from llmforge.report.model import Report
    from llmforge.runtime.sampling.constraints import Constraint

_INTERRUPTED = 128 + 2  # as a shell reports a process that SIGINT ended
_PIPE_CLOSED = 128 + 13  # … and SIGPIPE
_ISSUES = "This is a bug in llmforge. Please report it with the command, the recipe and everything above."


class _Root(click.Group):
    """Turns errors into one message on standard error and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except ForgeError as error:
            from llmforge.cli.console import show_error

            show_error(error)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(_INTERRUPTED)
        except BrokenPipeError:
            # Python would complain once more when it flushes standard output at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(_PIPE_CLOSED)
        return result


_EPILOG = """\b
Exit codes
  0  done; gates passed           5  bad checkpoint or data
  1  a bug of llmforge            6  not supported by the target
  2  usage or recipe              7  a pass failed its verification
  3  a gate failed                8  the environment lacks something
  4  a gate is inconclusive       9  the engine takes no requests
"""


@click.group(
    cls=_Root,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="llmforge")
def cli() -> None:
    """Compile a checkpoint and a recipe into a validated, versioned artifact that a server runs."""


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path), required=False)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("artifacts"), show_default=True,
    help="Folder that receives NAME/VERSION.",
)  # fmt: skip
@click.option(
    "--defer", is_flag=True,
    help="Publish the lowered graph, and build the engine later, on its GPU; the same as --set engine.deferred=true.",
)  # fmt: skip
@click.option(
    "--finish", "pending", type=click.Path(path_type=Path), metavar="ARTIFACT",
    help="Build the engine that was deferred, as a version beside ARTIFACT. With RECIPE, what it asks for is measured.",
)  # fmt: skip
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Change the recipe: passes.quantize-weights.block_size=128, engine.max_context=512. Values are YAML, paths "
    "relative to the recipe.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON instead of a summary.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def build(
    recipe: Path | None,
    out: Path,
    defer: bool,
    pending: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Build the artifact that RECIPE describes.

    Its path is the last line of standard output.
    """
    # Before numpy and torch are imported: their threads spin at barriers, which makes a build whose cores are shared
    # up to ten times slower (512 tokens of the sample checkpoint in torch: 1.3 s against 0.16 s).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "8")  # numpy: spin for 2**8 cycles, not 2**26
    from llmforge import passes
    from llmforge.cli import console
    from llmforge.evaluation.gates import Verdict
    from llmforge.recipe import Recipe

    if recipe is None and pending is None:
        raise UsageError("a recipe is missing", hint="llmforge build RECIPE")
    if pending is not None:
        _refuse_beside_finish()
    chosen = (*overrides, "engine.deferred=true") if defer else overrides
    loaded = None if recipe is None else Recipe.load(recipe, chosen)
    if loaded is not None:
        loaded.instantiate(passes.ALL)  # a recipe that is wrong says so before torch is imported

    with console.progress(quiet=quiet) as progress:
        if pending is not None:
            from llmforge.build import finishing

            result = finishing.finish(pending, loaded, progress)
        else:
            from llmforge.build import pipeline

            assert loaded is not None
            result = pipeline.build(loaded, out, progress)
    if as_json:
        _write_json({"artifact": str(result.path), "report": json.loads(result.report.to_json())})
    else:
        _write_summary(result.report)
        click.echo(str(result.path))
    undecided = [gate.explanation for gate in result.report.gates if gate.verdict is result.report.verdict]
    hint = f"the artifact was built and says so; its evidence is in {result.path / 'report'}"
    if result.report.verdict is Verdict.FAIL:
        raise GateFailed("\n".join(["a gate failed", *undecided]), hint=hint)
    if result.report.verdict is Verdict.INCONCLUSIVE:
        raise GateInconclusive("\n".join(["a gate is inconclusive", *undecided]), hint=hint)


@cli.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="End after N tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens up to this mass.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Keep the K likeliest tokens; 0 keeps all.")
@click.option(
    "--min-p", type=float, default=0.0, show_default=True, help="Drop what is less likely than P times the best."
)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1: repeat less.")
@click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="Above 0: repeat less.")
@click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="Above 0: repeat seldom.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of sampling.")
@click.option("--stop", multiple=True, help="End before this text; may be given again.")
@click.option("--logprobs", type=int, metavar="N", help="With --json: log probabilities, also of the N likeliest.")
@click.option("--json-schema", type=click.Path(path_type=Path), metavar="FILE.json", help="Answer with such JSON.")
@click.option("--regex", help="Answer with a text that matches all of it.")
@click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template, as the user's turn.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object at the end instead of a stream.")
def run(
    artifact: Path, prompt: str, json_schema: Path | None, regex: str | None, chat: bool, as_json: bool, **options: Any
) -> None:
    """Generate from ARTIFACT, as it will be served. PROMPT `-` reads standard input."""
    from llmforge import runtime
    from llmforge.artifact import Artifact

    if options["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs are shown with --json alone")
    # What is left of the options are fields of `Sampling`, by name.
    sampling = runtime.Sampling(**options, constraint=_constraint(json_schema, regex))
    text = _stdin() if prompt == "-" else prompt
    runner = runtime.load(Artifact.open(artifact).path)  # tells more than the runtime what is wrong with a folder
    chunks = []
    for chunk in runner.generate(runner.encode_chat([{"role": "user", "content": text}]) if chat else text, sampling):
        chunks.append(chunk)
        if not as_json:
            click.echo(chunk.text, nl=False)
            sys.stdout.flush()
    if not as_json:
        click.echo()
        return
    last = chunks[-1]
    assert last.usage is not None
    logprobs = [vars(chunk.logprob) for chunk in chunks if chunk.logprob is not None]
    _write_json(
        {
            "text": "".join(chunk.text for chunk in chunks),
            "token_ids": [chunk.token_id for chunk in chunks if chunk.token_id is not None],
            "finish_reason": last.finish_reason,
            "usage": vars(last.usage),
            **({"logprobs": logprobs} if sampling.logprobs is not None else {}),
        }
    )


@cli.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write the manifest as JSON.")
@click.option("--verify", is_flag=True, help="Hash every file and compare with the manifest.")
def inspect(artifact: Path, as_json: bool, verify: bool) -> None:
    """Show what ARTIFACT is, what it was made of, and its evidence."""
    from llmforge.artifact import Artifact
    from llmforge.cli import describe

    opened = Artifact.open(artifact)
    if verify:
        opened.verify()
    if as_json:
        _write_json(json.loads(opened.manifest.to_json()))
        return
    click.echo(describe.artifact_text(opened))
    if verify:
        click.echo(f"verified: {len(opened.manifest.files)} files are what was published")
    record = opened.path / "report" / "report.json"
    if record.is_file():
        from llmforge.report import model

        click.echo()
        _write_summary(model.read(record))


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="GRAPH.onnx",
    help="Write the canonical graph there, and its weights beside it, in fp32.",
)  # fmt: skip
@click.option("--no-weights", is_flag=True, help="Write the graph alone, to look at or to compare.")
@click.option("--json", "as_json", is_flag=True, help="Write the statistics as JSON.")
def trace(checkpoint: Path, output: Path | None, no_weights: bool, as_json: bool) -> None:
    """Trace CHECKPOINT to its canonical graph, and show what it is made of."""
    from llmforge.checkpoint import Checkpoint
    from llmforge.cli import describe
    from llmforge.ir import onnx_file, summary
    from llmforge.trace import trace as traced
    from llmforge.trace.export import pattern
    from llmforge.verification.trace_verifier import prove_candidate

    if no_weights and output is None:
        raise UsageError("--no-weights says how a graph is written; give --output as well")
    opened = Checkpoint.open(checkpoint)
    model = traced(opened)
    prove_candidate(opened, model)
    files = () if output is None else onnx_file.save(model, output, weights=not no_weights)
    facts = summary.facts(model)
    if as_json:
        layers = json.loads(model.metadata_props[pattern.LAYERS])
        _write_json({**vars(facts), "layers": layers, "files": [str(file) for file in files]})
    else:
        click.echo(describe.graph_text(facts, pattern.recorded(model)))
        for file in files:
            click.echo(str(file))


@cli.command("diff-graph")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def diff_graph(a: Path, b: Path, as_json: bool) -> None:
    """Show what differs between two ONNX graphs: operators, nodes by name, attributes, initializers.

    Weights of more than 64 KiB are compared by dtype and shape, not by their numbers.
    """
    from llmforge.ir import diff, onnx_file

    difference = diff.diff(onnx_file.load(a), onnx_file.load(b))
    if as_json:
        _write_json(vars(difference))
    else:
        click.echo("\n".join(diff.text(difference)))


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def passes(name: str | None, as_json: bool) -> None:
    """List the passes, or describe one and its options."""
    from llmforge import passes as registry
    from llmforge.cli import describe

    if name is None:
        rows = [(cls.name, cls.numerics.value, describe.summary(cls)) for cls in registry.ALL]
        if as_json:
            _write_json([dict(zip(("name", "numerics", "summary"), row, strict=True)) for row in rows])
        else:
            _write_columns(rows)
        return
    known = {cls.name: cls for cls in registry.ALL}
    if name not in known:
        from llmforge.recipe.errors import meant

        raise UsageError(f"no pass is named {name!r}; known: {', '.join(known)}", hint=meant(name, list(known)))
    if as_json:
        _write_json(describe.pass_facts(known[name]))
    else:
        click.echo(describe.pass_text(known[name]))


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def targets(name: str | None, as_json: bool) -> None:
    """List the targets, or show the facts of one.

    NAME `local` is the CPU at hand; a file that `doctor` wrote can stand in its place.
    """
    from llmforge import targets as devices
    from llmforge.cli import describe

    found = [devices.find(name)] if name else [devices.load(each) for each in devices.names()]
    if as_json:
        facts = [target.model_dump(mode="json", exclude_none=True) for target in found]
        _write_json(facts[0] if name else facts)
    elif name:
        click.echo(describe.target_text(found[0]))
    else:
        _write_columns([(target.name, target.kind, target.title) for target in found])


@cli.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from llmforge import passes as registry
    from llmforge import recipe

    _write_json(recipe.json_schema(registry.ALL))


cli.add_command(planning.plan)
cli.add_command(planning.doctor)
cli.add_command(serving.serve)
cli.add_command(serving.bench)
cli.add_command(serving.triton)


def main() -> None:
    """Run the command line; what is not a `ForgeError` is a bug, and ends with a traceback and exit code 1."""
    try:
        cli()
    except Exception as error:
        error.add_note(_ISSUES)
        raise


def _refuse_beside_finish() -> None:
    """Refuse what says nothing where an engine is finished: it goes beside its artifact, and is not deferred again."""
    context = click.get_current_context()
    for name in ("out", "defer"):
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise UsageError(f"--{name} says nothing beside --finish", hint="leave one of them out")


def _constraint(json_schema: Path | None, regex: str | None) -> Constraint | None:
    from llmforge.runtime.sampling.constraints import Constraint

    if json_schema is not None and regex is not None:
        raise UsageError("--json-schema and --regex: an answer has one form")
    if regex is not None:
        return Constraint("regex", regex)
    if json_schema is None:
        return None
    try:
        schema = json.loads(json_schema.read_bytes())
    except OSError as error:
        raise UsageError(f"{json_schema}: {error.strerror}") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise UsageError(f"{json_schema}: not a JSON file: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(f"{json_schema}: {type(schema).__name__}; wanted a JSON schema, which is an object")
    return Constraint.json_schema(schema)


def _stdin() -> str:
    """Read the prompt from standard input, less one newline at its end."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input: byte {error.start} is not UTF-8") from error


def _write_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def _write_summary(report: Report) -> None:
    from rich.console import Console

    from llmforge.report.render import summary

    # Where there is no terminal, rich would break lines at 80 columns.
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(summary(report))


def _write_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
