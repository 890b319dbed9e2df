from dataclasses import dataclass

import click
from click.testing import CliRunner

from llmforge.cli.parameters import options_record


@dataclass(frozen=True)
class Inner:
    deep: int


@dataclass(frozen=True)
class Outer:
    wide: str
    inner: Inner


@click.command()
@click.argument("name")
@click.option("--deep", type=int, default=1, help="How deep.")
@click.option("--wide", default="w")
@options_record(Inner, "inner")
@options_record(Outer)
def command(name: str, options: Outer) -> None:
    """Show them."""
    click.echo(f"{name} {options}")


def test_options_become_a_record_and_records_nest() -> None:
    done = CliRunner().invoke(command, ["x", "--deep", "3"], catch_exceptions=False)
    assert done.stdout == "x Outer(wide='w', inner=Inner(deep=3))\n"


def test_help_is_that_of_the_command_and_its_options() -> None:
    said = CliRunner().invoke(command, ["--help"]).stdout
    assert "Show them." in said
    assert "How deep." in said
