"""The command `bisect`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras, process
from llmforge.cli import output
from llmforge.cli.parameters import ARTIFACT, PATH, keep_quiet, refuse_given
from llmforge.cli.recorded import Inputs, inputs_options

if TYPE_CHECKING:
    from llmforge.diagnosis.bisecting import Findings, PassFindings
    from llmforge.metrics.intervals import Estimate

_EXAMPLES = """\b
Examples:
  llmforge bisect NAME/VERSION
  llmforge bisect NAME/VERSION -o better.yaml
  llmforge bisect recipes/quickstart.yaml           # whose build failed
  llmforge bisect artifacts/NAME/VERSION --checkpoint CHECKPOINT --text evaluation.jsonl
"""
_SHOWN = 3  # layers that lose most


@click.command(epilog=_EXAMPLES)
@click.argument("artifact", type=ARTIFACT, metavar="ARTIFACT|RECIPE")
@inputs_options
@click.option(
    "-o", "--output", "written", type=PATH, metavar="FILE.yaml",
    help="Write a recipe that keeps what was found in higher precision.",
)  # fmt: skip
@click.option(
    "--documents", type=click.IntRange(min=8), metavar="N", default=48, help="Maximum number of documents to run."
)
@click.option("--tokens", type=click.IntRange(min=8), metavar="N", default=128, help="Maximum tokens of each document.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
def bisect(
    artifact: Path,
    inputs: Inputs,
    written: Path | None,
    documents: int,
    tokens: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Find the layers and tensors of ARTIFACT that explain its loss of quality, or those of a build that failed.

    Rebuilds the graphs of ARTIFACT from its recipe and the build cache, and measures each lossy pass with parts of it
    kept in higher precision. A part stands out if it loses more than its format should; the probability of any false
    find is at most 5 %. RECIPE, a YAML file, stands for a build that exceeded a budget and left no artifact.
    """
    process.prepare()
    extras.require("build")
    of_recipe = artifact.suffix in (".yaml", ".yml")
    if of_recipe:
        refuse_given("RECIPE", "recipe", "checkpoint", "texts")
    else:
        inputs.check()
    if written is not None:
        output.check_file(written, ".yaml", ".yml")
    from tempfile import TemporaryDirectory

    from llmforge import cache
    from llmforge.cli import console
    from llmforge.diagnosis import bisecting, mixed_precision_recipe, rebuilding
    from llmforge.gates import confirmed
    from llmforge.recipe import Recipe
    from llmforge.runtime.config import physical_cores

    with console.progress(quiet=quiet) as progress, TemporaryDirectory() as scratch:
        opened = None if of_recipe else confirmed.open_artifact(artifact)
        loaded = Recipe.load(artifact, inputs.overrides) if of_recipe else inputs.load(artifact, Path(scratch))
        if opened is not None:
            rebuilding.check_recipe(opened, loaded)
        store = partial(cache.Cache, cache.default_folder(), cache.default_size())
        with rebuilding.rebuilt(loaded, store, progress, opened) as built:
            if opened is not None:
                rebuilding.check_stages(opened, built.stages)
            found = bisecting.bisect(
                built.lossy,
                built.windows,
                loaded,
                progress,
                threads=loaded.engine.threads or physical_cores(),
                vocabulary=built.checkpoint.geometry.vocabulary,
                documents=documents,
                tokens=tokens,
            )
        kept = {each.number: each.kept.entries for each in found.passes if each.kept is not None}
        if written is not None and kept:
            with output.writing(written):
                mixed_precision_recipe.write(loaded, kept, written)
    if as_json:
        output.write_json(found.model_dump(mode="json"))
    else:
        output.write_lines(*_lines(found))
        if written is not None and kept:
            output.write_lines(f"recipe: {written}")


def _lines(found: Findings) -> Iterator[str]:
    """Write the findings as text."""
    yield f"{found.documents} documents, {found.tokens:,} tokens; KLD in nats per token, with 95 % intervals"
    for each in found.passes:
        yield f"{each.name}: KLD from the graph before it {_written(each.kld_mean)}"
        yield from (f"  {line}" for line in _of_pass(each, found.alpha))
    if not found.passes:
        yield "no pass is lossy"


def _of_pass(each: PassFindings, alpha: float) -> Iterator[str]:
    if not each.layers:
        yield "has no parts that could be kept"
        return
    for part in each.stands_out:
        times = (
            f", {part.lost.value / part.expected:.3g} times what its format costs there" if part.expected > 0 else ""
        )
        yield f"stands out: {part.name}: loses {_written(part.lost)}{times}"
    if not each.stands_out:
        yield f"nothing stands out: no part loses more than its format should ({each.groups} groups, α {alpha:g})"
    most = ", ".join(f"{part.name} {part.share:.0%}" for part in each.layers[:_SHOWN])
    yield f"largest shares: {most}"
    if each.explains:
        names = "; ".join(part.name for part in each.explains)
        yield f"half of the loss is in {len(each.explains)} of its parts: {names}"
    elif not each.stands_out:
        yield "the loss is spread: no half of its parts explains half of it"
    if each.kept is not None:
        more = f"{each.kept.weight_bytes / 1e6:+.2f} MB of weights"
        if each.kept.kv_bytes_per_token:
            more = f"{each.kept.kv_bytes_per_token:+,} bytes of cache per token"
        reached, gain = _written(each.kept.kld_mean), _written(each.kept.gain)
        yield f"kept {each.kept.how}: predicted KLD {reached}, gain {gain}, {more}"


def _written(figure: Estimate) -> str:
    bounds = "" if figure.low is None or figure.high is None else f" [{figure.low:.3g}, {figure.high:.3g}]"
    return f"{figure.value:.3g}{bounds}"
