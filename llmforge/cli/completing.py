"""The command `completion`, and what the shell completes: names of artifacts, targets and passes."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from llmforge.cli import output

_PROGRAM, _VARIABLE = "llmforge", "_LLMFORGE_COMPLETE"
_COMPLETION = """\b
Examples:
  llmforge completion bash >> ~/.bashrc
  llmforge completion zsh >> ~/.zshrc
  llmforge completion fish > ~/.config/fish/completions/llmforge.fish
"""


@click.command(epilog=_COMPLETION)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that lets SHELL complete commands, options and names."""
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root()
    made = kind(root.command, {}, _PROGRAM, _VARIABLE)
    output.write_script(made.source_template % made.source_vars())
