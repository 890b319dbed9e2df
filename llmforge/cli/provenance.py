"""The commands about where an artifact comes from. Like all commands they import what they need when they run."""

from __future__ import annotations

from pathlib import Path

import click

from llmforge.base import extras, process
from llmforge.base.errors import UsageError, VerificationError
from llmforge.cli import output
from llmforge.cli.parameters import PATH

_REPRODUCE = """\b
Examples:
  llmforge reproduce artifacts/NAME/VERSION --recipe recipes/quickstart.yaml
  llmforge reproduce artifacts/NAME/VERSION --checkpoint CHECKPOINT --text calibration.jsonl
"""


@click.command(epilog=_REPRODUCE)
@click.argument("artifact", type=PATH)
@click.option("--recipe", type=PATH, help="The recipe that the artifact was built from.")
@click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="With --recipe: as for the build. Repeatable."
)
@click.option("--checkpoint", type=PATH, help="Without --recipe: the checkpoint's folder.")
@click.option("--text", "texts", type=PATH, multiple=True, help="Without --recipe: a text of the recipe. Repeatable.")
@click.option("--out", type=PATH, help="Keep what is built in this folder; by default it is deleted.")
@click.option("--json", "as_json", is_flag=True, help="Write the comparison as JSON.")
@click.option("--quiet", is_flag=True, help="Hide progress.")
def reproduce(
    artifact: Path,
    recipe: Path | None,
    overrides: tuple[str, ...],
    checkpoint: Path | None,
    texts: tuple[Path, ...],
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Build ARTIFACT again and compare the two file by file.

    The artifact records its recipe and the digests of its checkpoint and texts, but does not hold them. Nothing is
    measured. If the contents differ, the command says which stage differs first and by how much, and ends with 7.
    """
    process.prepare()
    extras.require("build")
    if (recipe is None) == (checkpoint is None):
        raise UsageError("give either --recipe or --checkpoint with the texts")
    if recipe is None and overrides:
        raise UsageError("--set requires --recipe")
    if recipe is not None and texts:
        raise UsageError("--text cannot be used with --recipe")
    from tempfile import TemporaryDirectory

    from llmforge.build import reproducing
    from llmforge.cli import console
    from llmforge.recipe import Recipe

    with console.progress(quiet=quiet) as progress, TemporaryDirectory() as scratch:
        if recipe is not None:
            loaded = Recipe.load(recipe, overrides)
        else:
            assert checkpoint is not None
            loaded = reproducing.recorded(artifact, checkpoint, texts, Path(scratch))
        found = reproducing.reproduce(artifact, loaded, out, progress)
    if as_json:
        output.write_json({**found.model_dump(mode="json"), "equal": found.equal})
    else:
        click.echo("\n".join(found.lines()))
    if not found.equal:
        raise VerificationError(
            f"{artifact}: was not reproduced: {len(found.files)} files differ",
            hint="the comparison lists what differs in code, packages and machine",
        )
