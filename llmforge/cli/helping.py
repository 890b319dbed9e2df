"""The command `help`, and which commands help lists."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise

import click
from click.shell_completion import CompletionItem

from llmforge.base.errors import UsageError
from llmforge.cli import output

ALL = "all"
# What people use from day to day, as `llmforge --help` lists it.
COMMON = {
    "From a checkpoint to a server": ("init", "plan", "build", "run", "serve"),
    "Measure and decide": ("bench", "eval", "gate", "diff"),
    "Keep and share": ("ls", "push", "pull"),
}
# All commands, as `llmforge --help all` lists them: in the order in which someone comes to need them.
SECTIONS = {
    "From a checkpoint to a server": ("init", "up", "plan", "build", "run", "serve", "batch", "triton"),
    "Measure and decide": ("bench", "eval", "gate", "judge", "shadow", "diff", "validate", "history", "verify"),
    "Improve": ("tune", "bisect", "reproduce", "migrate"),
    "Keep and share": (
        "ls", "tag", "promote", "rm", "gc", "export", "import", "push", "pull", "mlflow", "sign", "cache",
    ),
    "Look up": (
        "help", "docs", "doctor", "inspect", "trace", "diff-graph", "passes", "targets", "schema", "completion",
    ),
}  # fmt: skip
_LISTS_ALL = "llmforge.help_lists_all"  # key in the metadata of click's context
_HELP = """\b
Examples:
  llmforge help all    # every command
  llmforge help build
"""


class _Topic(click.ParamType[str]):
    """The name of a command, or `all`."""

    name = "command"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer names."""
        group = ctx.find_root().command
        assert isinstance(group, click.Group)
        return [CompletionItem(name) for name in (ALL, *group.commands) if name.startswith(incomplete)]


@click.command("help", epilog=_HELP)
@click.argument("command", type=_Topic(), required=False)
@click.pass_context
def help_(context: click.Context, command: str | None) -> None:
    """Show the help of COMMAND, or list the commands; `all` lists every one."""
    home = context.find_root()
    group = home.command
    assert isinstance(group, click.Group)
    if command is None or command == ALL:
        if command == ALL:
            list_all(home)
        output.write_script(group.get_help(home))
        return
    if command not in group.commands:
        near = get_close_matches(command, group.commands, n=1)
        hint = f"did you mean `llmforge help {near[0]}`?" if near else "`llmforge help all` lists the commands"
        raise UsageError(f"there is no command {command}", hint=hint)
    found = group.commands[command]
    output.write_script(found.get_help(click.Context(found, info_name=command, parent=home)))


def list_all(context: click.Context) -> None:
    """Let help list every command from now on."""
    context.meta[_LISTS_ALL] = True


def asks_for_all(words: Sequence[str], options: Sequence[str]) -> bool:
    """Say if the words of a command line have one of the `options` for help with `all` behind it."""
    return any(word in options and after == ALL for word, after in pairwise(words))


def sections(context: click.Context) -> dict[str, tuple[str, ...]]:
    """Give the commands to list, by section."""
    return SECTIONS if _LISTS_ALL in context.meta else COMMON


def last_line(context: click.Context) -> str | None:
    """Say where the other commands are listed; None: here."""
    if _LISTS_ALL in context.meta:
        return None
    return f"These are {_count(COMMON)} of {_count(SECTIONS)} commands: `llmforge --help {ALL}` lists the others."


def _count(listed: dict[str, tuple[str, ...]]) -> int:
    return sum(map(len, listed.values()))
