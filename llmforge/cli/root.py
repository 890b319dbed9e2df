"""The command line: the group of all commands, and how they end. Nothing but this room prints.

Exit codes are those of `_EPILOG`, and 141 where the reader of standard output went away (SIGPIPE).

Commands import what they need when they run, so that `llmforge --help` costs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from llmforge.base import extras, resources, signals
from llmforge.base.errors import EnvironmentLacks, ForgeError, UsageError
from llmforge.base.signals import Interrupted
from llmforge.base.wording import bounded
from llmforge.cli import (
    batching,
    bisecting,
    building,
    caching,
    completing,
    endpoints,
    evaluating,
    helping,
    inspecting,
    judging,
    planning,
    provenance,
    registries,
    running,
    serving,
    shadowing,
    starting,
    storing,
    streams,
    tracking,
    tuning,
)
from llmforge.cli.parameters import is_json_log, log_format_option, loudness_options

_INTERRUPTED = 128 + 2  # as a shell reports a process that SIGINT ended
_PIPE_CLOSED = 128 + 13  # … and SIGPIPE
_BUG = 1
_ISSUES = "This is a bug in llmforge. Please report it with the command, the recipe and everything above."
_ISSUES_JSON = _ISSUES.replace("everything above", "the traceback")


class _Root(click.Group):
    """Turns errors into one message on standard error and an exit code.

    A package that is not installed, or not as a whole, is such an error: commands import what they need as they begin.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take `--help all`, which is no option of click's."""
        if helping.asks_for_all(args, ctx.help_option_names):
            helping.list_all(ctx)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section, each with the whole first sentence of its help."""
        for title, names in helping.sections(ctx).items():
            with formatter.section(title):
                summaries = [(name, self.commands[name].get_short_help_str(limit=200)) for name in names]
                formatter.write_dl(summaries, col_max=12)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the command line; --help and --version are written meanwhile."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except OSError as error:
            raise click.exceptions.Exit(_unwritten(error)) from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say at the end where the commands are that were not listed."""
        super().format_epilog(ctx, formatter)
        if (line := helping.last_line(ctx)) is not None:
            formatter.write_paragraph()
            formatter.write_text(line)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except ForgeError as error:
            if resources.out_of_memory(error):
                _end(ctx, resources.explain(error) or error)
            if error.hint is None and type(error) is UsageError:
                error.hint = f"see `{ctx.info_name} {ctx.invoked_subcommand} --help`"
            _end(ctx, error)
        except click.ClickException as error:  # of the arguments of a command
            if not is_json_log():
                raise _bounded(error) from None
            _end(ctx, UsageError(error.format_message()))  # 2, as click's own
        except (click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt as error:
            from llmforge.cli.console import say

            name, code = (str(error), error.exit_code) if isinstance(error, Interrupted) else ("SIGINT", _INTERRUPTED)
            message = ": ".join([f"interrupted by {name}", *getattr(error, "__notes__", ())])
            _tell(lambda: say(message, always=True))  # a terminal that was closed cannot be written
            ctx.exit(code)
        except (BrokenPipeError, streams.OutputClosed) as error:
            ctx.exit(_unwritten(error))
        except Exception as error:
            lack = extras.explain(error) if isinstance(error, ImportError | AttributeError) else None
            if lack is None and isinstance(error, OSError | MemoryError | RuntimeError):
                lack = resources.explain(error)
            if lack is not None:
                _end(ctx, lack)
            if not is_json_log():
                raise  # to `main`
            from llmforge.cli.console import log_bug

            log_bug(error, _ISSUES_JSON, _BUG)
            ctx.exit(_BUG)
        return result


def _bounded(error: click.ClickException) -> click.ClickException:
    """Shorten what click says where it repeats a value whole."""
    message = error.format_message()
    if (short := bounded(message)) == message:
        return error
    return click.UsageError(short, getattr(error, "ctx", None))


def _end(ctx: click.Context, error: ForgeError) -> NoReturn:
    from llmforge.cli.console import show_error

    try:
        sys.stdout.flush()
    except OSError:
        streams.drop(sys.stdout)
    _tell(lambda: show_error(error))
    ctx.exit(error.exit_code)


def _tell(write: Callable[[], None]) -> None:
    """Write to standard error; where that fails nobody can be told, and the exit code remains."""
    try:
        write()
    except OSError:
        streams.drop(sys.stderr)


def _unwritten(error: OSError) -> int:
    """Tell why standard output cannot be written, unless its reader went away, and return the exit code."""
    from llmforge.cli.console import show_error

    streams.drop(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return _PIPE_CLOSED
    why = "it is closed" if isinstance(error, streams.OutputClosed) else error.strerror
    found = EnvironmentLacks(f"standard output cannot be written: {why}", hint="send it to a file, a pipe or /dev/null")
    _tell(lambda: show_error(found))
    return found.exit_code


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from llmforge import __version__

        click.echo(f"llmforge, version {__version__}")
        context.exit()


_EPILOG = """\b
Examples:
  llmforge doctor    # what can this machine build and run?
  llmforge init CHECKPOINT    # write a recipe; then plan, build, run, as it says
  llmforge docs tutorial

\b
Exit codes:
  0  success, gates passed        5  bad checkpoint or data
  1  a bug in llmforge            6  not supported by the target
  2  wrong usage or recipe        7  a verification failed
  3  a gate failed                8  missing package, tool or device
  4  a gate is inconclusive       9  the engine accepts no requests
                                 10  the engine is not built yet
  129, 130, 143  interrupted by SIGHUP, SIGINT (Ctrl-C), SIGTERM
"""


@click.group(
    cls=_Root,
    commands=[
        starting.init,
        starting.up,
        starting.migrate,
        building.build,
        tuning.tune,
        caching.cache,
        running.run,
        serving.serve,
        batching.batch,
        serving.bench,
        serving.triton,
        planning.plan,
        planning.doctor,
        storing.ls,
        storing.tag,
        storing.promote,
        storing.rm,
        storing.gc,
        storing.export,
        storing.import_,
        registries.push,
        registries.pull,
        tracking.mlflow,
        inspecting.inspect,
        provenance.verify,
        provenance.sign,
        provenance.reproduce,
        judging.gate,
        endpoints.judge,
        shadowing.shadow,
        evaluating.evaluate,
        judging.validate,
        judging.diff,
        judging.history,
        bisecting.bisect,
        inspecting.trace,
        inspecting.diff_graph,
        inspecting.passes,
        inspecting.targets,
        inspecting.schema,
        inspecting.docs,
        completing.completion,
        helping.help_,
    ],
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and exit.",
)  # fmt: skip
def cli() -> None:
    """Compile a Hugging Face checkpoint into a quantized, optimized engine.

    A recipe says what to build. llmforge proves that the engine is as good and as fast as you need before you ship it.
    """


cli.params += [log_format_option(), *loudness_options()]
for _command in (*cli.commands.values(), *caching.cache.commands.values()):
    _own = {name for parameter in _command.params for name in parameter.opts}
    _more = [log_format_option(hidden=True), *loudness_options(hidden=True)]
    _command.params += [option for option in _more if not _own.intersection(option.opts)]


def main() -> None:
    """Run the command line; what is not a `ForgeError` is a bug, and ends with a traceback and exit code 1.

    With --log-format json the traceback is a field of an event.
    """
    streams.replace_closed()
    signals.install()
    try:
        cli(prog_name="llmforge")  # also where it is run as a module
    except Exception as error:
        error.add_note(_ISSUES)
        raise
