import re
from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from llmforge.cli import cli
from llmforge.cli.parameters import api_key_option, options_record, server_of
from llmforge.metrics.agreement import RUNTIMES


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


@pytest.mark.parametrize("model", [True, False])
def test_a_server_knows_the_option_of_its_model_where_the_command_has_one(model: bool) -> None:
    @click.command()
    @click.option("--url")
    @api_key_option
    def ask(url: str, api_key: str | None, **more: object) -> None:
        server = server_of(url, api_key)
        assert server is not None
        click.echo(f"{server.options.model}")

    command = click.option("--model")(ask) if model else ask
    done = CliRunner().invoke(command, ["--url", "http://127.0.0.1:9"], catch_exceptions=False)
    assert done.stdout == ("--model\n" if model else "None\n")


@pytest.mark.parametrize("command", ["build", "validate"])
def test_help_of_runtimes_names_them_all(command: str) -> None:
    said = CliRunner().invoke(cli, [command, "--help"]).stdout
    [listed] = re.findall(r"has another runtime \((.*?)\)", " ".join(said.split()))
    assert set(re.split(", | or ", listed)) == set(RUNTIMES)


@pytest.mark.parametrize("command", ["build", "tune"])
def test_help_of_the_store_names_no_option_that_tune_lacks(command: str) -> None:
    said = " ".join(CliRunner().invoke(cli, [command, "--help"]).stdout.split())
    assert "for nodes that do not share the folder of artifacts" in said
    assert command == "build" or not re.search(r"--out\b", said)
