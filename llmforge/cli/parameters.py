"""Parameters that several commands have in common, and how they become the records of lower rooms."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from llmforge import backends
from llmforge.base import folders, small_file
from llmforge.base.errors import UsageError
from llmforge.base.http_server import KEY_VARIABLE, HttpServer, ServerOptions
from llmforge.base.progress import without_bars
from llmforge.base.wording import shown

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from llmforge.artifact.remote import Url


class FilePath(click.Path):
    """A path that the system can have."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what is too long, before anything looks at it."""
        if (why := small_file.why_no_path(value)) is not None:
            self.fail(f"{shown(str(value))}: {why}", param, ctx)
        return super().convert(value, param, ctx)


PATH = FilePath()
NATURAL, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)


Command = TypeVar("Command", bound=Callable[..., Any])
Record = TypeVar("Record")


class ArtifactPath(click.ParamType[Path]):
    """The folder of an artifact, by its path, NAME, NAME/VERSION, NAME:TAG or the beginning of a version.

    Names are looked up in the folder of the option --out before it, else in that of the environment.
    """

    name = "artifact"

    def __init__(self, *, newest: bool = True) -> None:
        self._newest = newest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Find the folder."""
        from llmforge.artifact.references import resolve

        if (why := small_file.why_no_path(str(value))) is not None:
            self.fail(f"{shown(str(value))}: {why}", param, ctx)
        given = None if ctx is None or param is None or param.name == "pending" else ctx.params.get("out")
        return resolve(str(value), folders.artifacts(given), newest=self._newest)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer names, versions of the name that is there, and paths."""
        from click.shell_completion import CompletionItem

        from llmforge.artifact import versions

        out = folders.artifacts(ctx.params.get("out"))
        name, slash, _ = incomplete.partition("/")
        found = versions.names(out) if not slash else [f"{name}/{each}" for each in versions.version_names(out / name)]
        items = [CompletionItem(each) for each in found if each.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="dir")]


ARTIFACT = ArtifactPath()
VERSION = ArtifactPath(newest=False)  # of what is removed: no name stands for a version that was not seen


class TargetName(click.ParamType[str]):
    """The name of a target, or the file of one."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take it as it is: what names no target is refused where it is looked up."""
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer names, and files."""
        from click.shell_completion import CompletionItem

        from llmforge import targets

        items = [CompletionItem(name) for name in (targets.LOCAL, *targets.names()) if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]


TARGET = TargetName()


class BackendName(click.ParamType[str]):
    """The name of a backend, of a plug-in's, too."""

    name = "backend"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Name those of llmforge, as help shows them; what plug-ins bring is not looked for."""
        return f"[{'|'.join(backends.BUILT_IN)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what no backend is called.

        Raises:
            PluginError: a plug-in brings it, and fails.
        """
        known = [*backends.BUILT_IN, *(() if value in backends.BUILT_IN else backends.SEAM.names())]
        return str(click.Choice(known).convert(value, param, ctx))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer names."""
        from click.shell_completion import CompletionItem

        names = [*backends.BUILT_IN, *backends.SEAM.names()]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


BACKEND = BackendName()


_LOG_FORMAT = "llmforge.log_format"  # key in the metadata of click's context, which subcommands share


def _choose_log_format(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.meta[_LOG_FORMAT] = value
    if value == "json":
        context.with_resource(without_bars())


def log_format_option(*, hidden: bool = False) -> click.Option:
    """Make the option --log-format, which the group and each of its commands take."""
    return click.Option(
        ["--log-format"],
        type=click.Choice(["text", "json"]),
        envvar=None if hidden else "LLMFORGE_LOG_FORMAT",
        is_eager=True,
        expose_value=False,
        hidden=hidden,
        callback=_choose_log_format,
        help="Standard error as text, or as one JSON object per line: stages, progress, spans, notes, errors.",
    )


_QUIET, _VERBOSE = "llmforge.quiet", "llmforge.verbose"  # likewise


def keep_quiet(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Remember --quiet, as a callback of that option; libraries draw no progress bars then."""
    if value:
        context.meta[_QUIET] = True
        context.with_resource(without_bars())
    return value


def _be_verbose(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    if value:
        context.meta[_VERBOSE] = True
    return value


def loudness_options(*, hidden: bool = False) -> list[click.Option]:
    """Make the options --quiet and --verbose, which the group and each of its commands take."""
    quiet = click.Option(
        ["-q", "--quiet"], is_flag=True, is_eager=True, expose_value=False, hidden=hidden, callback=keep_quiet,
        help="Hide progress and notes on standard error; errors are shown.",
    )  # fmt: skip
    verbose = click.Option(
        ["-v", "--verbose"], is_flag=True, is_eager=True, expose_value=False, hidden=hidden,
        callback=_be_verbose,
        help="Also show how long each stage and pass took, and where an error came from.",
    )  # fmt: skip
    return [quiet, verbose]


_GOES_ON = "llmforge.goes_on"  # likewise


def go_on() -> None:
    """Let the commands that follow leave out what could be done next: the one that runs them does it."""
    click.get_current_context().meta[_GOES_ON] = True


def goes_on() -> bool:
    """Say if another command follows by itself."""
    return _is_set(_GOES_ON)


def is_quiet() -> bool:
    """Say if the command that runs is to write nothing but results and errors."""
    return _is_set(_QUIET)


def is_verbose() -> bool:
    """Say if the command that runs is to write more than usual."""
    return _is_set(_VERBOSE)


def _is_set(key: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and key in context.meta


def is_json_log() -> bool:
    """Say if the command that runs writes standard error as JSON."""
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(_LOG_FORMAT) == "json"


def out_option(help: str) -> Callable[[Command], Command]:
    """Add the option --out, the folder of artifacts; it is read before what is looked up in it."""
    return click.option(
        "--out", type=PATH, metavar="DIR", default=folders.ARTIFACTS,
        envvar=folders.ARTIFACTS_VARIABLE, show_envvar=True, is_eager=True, help=help,
    )  # fmt: skip


class Location(click.ParamType[Any]):
    """A file: a `Path`, or the `Url` of one that is elsewhere."""

    name = "location"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | Url:
        """Tell a URL from a path."""
        from llmforge.base import extras

        text = str(value)
        if "://" not in text:
            return PATH.convert(value, param, ctx)  # type: ignore[no-any-return]
        if (lack := extras.trouble("fsspec")) is not None:
            raise lack
        from llmforge.artifact import remote

        return remote.Url(text) if remote.is_url(text) else PATH.convert(value, param, ctx)


LOCATION = Location()


class RuntimePython(click.ParamType[Any]):
    """NAME=PYTHON: another runtime, and the Python that it is installed for."""

    name = "runtime"
    envvar_list_splitter = os.pathsep

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        """Tell the name from the path."""
        if isinstance(value, tuple):
            return value
        from llmforge.metrics.agreement import RUNTIMES

        name, equals, python = str(value).partition("=")
        if name not in RUNTIMES or not equals or not python:
            self.fail(f"{shown(str(value))}: expected NAME=PYTHON; names: {', '.join(RUNTIMES)}", param, ctx)
        return name, PATH.convert(python, param, ctx)


def api_key_option(command: Command) -> Command:
    """Add the option --api-key, of commands that take --url; `server_of` reads both."""
    return click.option(
        "--api-key", metavar="KEY", envvar=KEY_VARIABLE, show_envvar=True,
        help="With --url: key of that server, sent as `Authorization: Bearer KEY`. Other users of this machine may see "
        "the options of a command, but not its environment.",
    )(command)  # fmt: skip


def server_of(url: str | None, api_key: str | None) -> HttpServer | None:
    """Make the server that --url and --api-key name; None without --url."""
    if url is None:
        require_given("--url", "api_key")
        return None
    has_model = any(each.name == "model" for each in click.get_current_context().command.params)
    return HttpServer(url, api_key, ServerOptions(model="--model" if has_model else None))


def chat_template_option(command: Command) -> Command:
    """Add the option --chat-template."""
    return click.option(
        "--chat-template", type=PATH, metavar="FILE", help="Jinja template for chats, in place of the artifact's."
    )(command)


def tool_prompt_option(command: Command) -> Command:
    """Add the option --tool-prompt."""
    return click.option(
        "--tool-prompt", is_flag=True,
        help="Where the chat template knows no tools, describe them in the system message, as Hermes and Qwen do.",
    )(command)  # fmt: skip


def runtime_option(command: Command) -> Command:
    """Add the option --runtime."""
    return click.option(
        "--runtime", "runtimes", type=RuntimePython(), multiple=True, metavar="NAME=PYTHON",
        envvar="LLMFORGE_RUNTIMES", show_envvar=True,
        help="Python of an environment that has another runtime (onnxruntime-genai, optimum, transformers, vllm or "
        "llama-cpp); repeatable.",
    )(command)  # fmt: skip


class Numbers(click.ParamType[Any]):
    """Numbers separated by commas."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | float, ...]:
        """Read `1,4,16`."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: expected comma-separated numbers, such as 1,4,16", param, ctx)


def record(kind: type[Record], options: Mapping[str, Any], **more: Any) -> Record:
    """Make the dataclass `kind` of those `options` that are called as its fields are, and of `more`."""
    return kind(**{name: value for name, value in options.items() if name in _fields(kind)}, **more)


def grouped(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Add several options to a command, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def options_record(kind: type[Any], name: str = "options") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take its options as one frozen dataclass, its parameter `name`.

    The options that are called as the fields of `kind` are go into it; others reach the command by themselves. It
    stands below the options of a command. Above another of its kind, it fills a field `name` of the other's record.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(**options: Any) -> Any:
            names = _fields(kind)
            others = {each: value for each, value in options.items() if each not in names}
            return command(**others, **{name: record(kind, options)})

        return call

    return decorate


def _fields(kind: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


def first_given(*names: str) -> str | None:
    """Give the option, as it is typed, of the first of these parameters that the command line has; None: it has none.

    "First" is in the order of the command's help.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if parameter.name in names and given:
            return parameter.opts[0]
    return None


def refuse_given(beside: str, *names: str) -> None:
    """Refuse parameters that were given and would say nothing beside the option `beside`."""
    if (option := first_given(*names)) is not None:
        raise UsageError(f"{option} cannot be used with {beside}", hint="remove one of them")


def require_given(needed: str, *names: str) -> None:
    """Refuse parameters that were given and say nothing without the option `needed`."""
    if (option := first_given(*names)) is not None:
        raise UsageError(f"{option} requires {needed}", hint=f"add {needed}, or leave it out")
