"""The command `mlflow`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path

import click

from llmforge.base import extras
from llmforge.cli import output
from llmforge.cli.parameters import ARTIFACT, keep_quiet

_EXAMPLES = """\b
Examples:
  llmforge mlflow NAME/VERSION --experiment releases
  llmforge mlflow NAME:prod --experiment releases --tracking-uri http://mlflow.example.com
"""


@click.command("mlflow", epilog=_EXAMPLES)
@click.argument("artifact", type=ARTIFACT)
@click.option(
    "--experiment", metavar="NAME", default="llmforge", help="Experiment of the run; made if it is not there."
)
@click.option(
    "--tracking-uri", "uri", metavar="URI", envvar="MLFLOW_TRACKING_URI", show_envvar=True,
    help="The tracking server.",
)  # fmt: skip
@click.option("--run-name", "name", metavar="NAME", help="Name of the run. Default: NAME/VERSION of ARTIFACT.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide notes.")
def mlflow(artifact: Path, experiment: str, uri: str | None, name: str | None, as_json: bool, quiet: bool) -> None:
    """Write the evidence of ARTIFACT as a run of MLflow.

    Figures with their intervals, options of the recipe, lineage and gates as tags, report and manifest as files. What
    was written before is not written again. The last line of standard output is the run's id.
    """
    from llmforge.cli import console
    from llmforge.gates import confirmed, records

    opened = confirmed.open_artifact(artifact)
    extras.require("mlflow")
    from llmforge.report import mlflow_run

    written = mlflow_run.write(opened, records.read(opened), uri=uri, experiment=experiment, name=name)
    if as_json:
        output.write_json({"experiment": written.experiment, "run": written.run, "made": written.made})
        return
    if not written.made and not quiet:
        console.say("note: this evidence is there already")
    output.write_lines(written.run)
