"""Checkpoints on the Hugging Face Hub, as commands take them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmforge.checkpoint.hub import HubSnapshot

REVISION = click.option(
    "--revision", metavar="REVISION", help="Branch, tag or commit of a checkpoint on the Hub. Defaults to main."
)


def on_hub(given: Path, revision: str | None) -> HubSnapshot | None:
    """Resolve a checkpoint that is named as on the Hub, ORG/NAME, where no such path is here; None: it is a path.

    Raises:
        UsageError: there is a revision, of a path.
        CheckpointError, EnvironmentLacks: as `hub.find`.
    """
    from llmforge.checkpoint import hub
    from llmforge.cli import console

    found = hub.find(given, revision)
    if found is None and hub.is_name(str(given)) and hub.is_folder(given):
        console.say(f"note: {given} is the folder here, not a model of the Hub")
    return found
