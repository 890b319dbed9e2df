"""What packages from outside bring: passes, quantization methods, metrics, targets and backends, by entry points.

A package declares them in its metadata, in the groups `llmforge.v2.passes`, `llmforge.v2.methods`, … (`KINDS`), under
the names that recipes use. The number is the version of the interface that it is written for (`INTERFACE`), so that
another one is refused before any of its code runs. What nobody names is not imported (docs/plugins.md).

A `Seam` is what one kind needs: who asks it for a name gets the object, or one `PluginError`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks, ForgeError, PluginError
from llmforge.base.wording import plain

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

INTERFACE = 2
KINDS: Mapping[str, str] = {
    "passes": "pass",
    "methods": "quantization method",
    "metrics": "metric",
    "targets": "target",
    "backends": "backend",
}
OURS = "llmforge"
_GROUP = re.compile(r"llmforge\.v(?P<interface>\d{1,4})\.(?P<kind>\w+)")
_PREFIX = "llmforge."
_DISTRIBUTION = re.compile(r"[\w.-]+")
_VALUE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(\s*:\s*[^\W\d]\w*(\.[^\W\d]\w*)*)?")
_LONGEST = 200  # characters that a message takes of metadata
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

T = TypeVar("T")


class Package(NamedTuple):
    """An installed distribution."""

    name: str
    version: str

    def __str__(self) -> str:
        return plain(f"{self.name} {self.version}", _LONGEST)


@dataclass(frozen=True)
class Plugin:
    """One entry point: what it brings, under which name, and from where."""

    kind: str  # of `KINDS`
    name: str
    value: str  # "package.module:attribute", or "package"
    package: Package
    interface: int
    home: str  # the folder that it is installed in
    entry: EntryPoint = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} {plain(self.name, _LONGEST)} of {self.package} ({plain(self.value, _LONGEST)})"

    @property
    def module(self) -> str:
        """The module that it names."""
        return self.value.partition(":")[0].strip()


class Found(NamedTuple):
    """All entry points of groups that begin as ours do, and what is wrong with the metadata of packages, in words."""

    plugins: tuple[Plugin, ...]
    problems: tuple[str, ...]


def found() -> Found:
    """List what the installed packages declare; nothing of theirs is imported."""
    return _found(tuple(sys.path))


@cache
def _found(path: tuple[str, ...]) -> Found:
    from importlib import metadata  # takes longer to import than `llmforge --help` may

    plugins: list[Plugin] = []
    problems: dict[str, None] = {}
    for entry, package, home in _entries(metadata.distributions(path=list(path)), problems):
        match = _GROUP.fullmatch(entry.group)
        if match is None or match["kind"] not in KINDS:
            problems[f"{package}: nothing reads the entry-point group {plain(entry.group, _LONGEST)}"] = None
            continue
        plugins.append(Plugin(match["kind"], entry.name, entry.value, package, int(match["interface"]), home, entry))
    plugins.sort(key=lambda each: (list(KINDS).index(each.kind), each.name, each.package, each.interface))
    return Found(tuple(plugins), tuple(problems))


def _entries(
    distributions: Iterable[Distribution], problems: dict[str, None]
) -> Iterator[tuple[EntryPoint, Package, str]]:
    """List the entry points of groups that begin as ours do; of a distribution that lies twice, those of the first.

    One whose metadata is damaged brings nothing: it is among the `problems`.
    """
    seen: set[str] = set()
    for distribution in distributions:
        try:
            if f"[{_PREFIX}" not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name, version = distribution.metadata["Name"], distribution.metadata["Version"]
            mine = [entry for entry in distribution.entry_points if entry.group.startswith(_PREFIX)]
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:  # importlib.metadata checks nothing
            where = getattr(distribution, "_path", distribution.locate_file(""))
            problems[plain(f"{where}: its metadata cannot be read: {_words(error)}", _LONGEST)] = None
            continue
        package = Package(str(name or "a package without a name"), str(version or "?"))
        if _normal(package.name) in seen:
            continue
        seen.add(_normal(package.name))
        yield from ((entry, package, str(distribution.locate_file(""))) for entry in mine)


def step_class(plugin: Plugin, given: Any, base: type[Any]) -> Any:
    """Return what `plugin` gives, if it is a class of `base` that a recipe can name and give options to.

    Raises:
        ValueError: it is not, in words.
    """
    if not (isinstance(given, type) and issubclass(given, base)):
        raise ValueError(f"{given!r:.60} is no subclass of {base.__module__}.{base.__qualname__}")
    if inspect.isabstract(given):
        raise ValueError(
            f"{given.__name__} does not define {', '.join(sorted(getattr(given, '__abstractmethods__', ())))}"
        )
    if "__is_pydantic_dataclass__" not in vars(given) or not vars(given)["__dataclass_params__"].frozen:
        raise ValueError(f"{given.__name__} is no pydantic.dataclasses.dataclass(frozen=True)")
    if getattr(given, "name", None) != plugin.name:
        raise ValueError(f"{given.__name__}.name is {getattr(given, 'name', None)!r}")
    return given


@dataclass(eq=False)
class Seam(Generic[T]):
    """How things of one kind register: `check` makes what is used of what an entry point gives.

    It raises ValueError, in words, where that is of another type, or contradicts itself.
    """

    kind: str  # of `KINDS`
    check: Callable[[Plugin, Any], T]
    _loaded: dict[Plugin, T | PluginError] = field(default_factory=dict, repr=False)

    def plugin(self, name: str, built_in: Collection[str]) -> Plugin | None:
        """Find who brings `name`; None: llmforge itself, or nobody.

        Raises:
            PluginError: several do, or it is written for another interface.
        """
        here = [each for each in found().plugins if each.kind == self.kind and each.name == name]
        usable = [each for each in here if each.interface == INTERFACE]
        if name in built_in and usable:
            raise _clash(self.kind, name, [OURS, *(str(each.package) for each in usable)])
        if name in built_in or not here:
            return None
        if len(usable) > 1:
            raise _clash(self.kind, name, [str(each.package) for each in usable])
        if not usable:
            raise _other_interface(here[0])
        if not _NAME.fullmatch(name):
            raise refusal(usable[0], "its name must be lower-case letters, digits, `.`, `_` and `-`, at most 64")
        return usable[0]

    def find(self, name: str, built_in: Collection[str]) -> T | None:
        """Load what is called `name`, of a plug-in; None: no plug-in brings it.

        Raises:
            PluginError: as `plugin`, and where it does not load or is not what it should be.
        """
        plugin = self.plugin(name, built_in)
        return None if plugin is None else self.load(plugin)

    def load(self, plugin: Plugin) -> T:
        """Import `plugin`, once in a process, and check what it is.

        Raises:
            PluginError: it does not load, or is not what it should be.
        """
        if plugin not in self._loaded:
            try:
                self._loaded[plugin] = self._load(plugin)
            except PluginError as error:
                self._loaded[plugin] = error  # what was imported by halves may look whole the second time
        loaded = self._loaded[plugin]
        if isinstance(loaded, PluginError):
            raise loaded
        return loaded

    def loaded(self, plugin: Plugin) -> T | None:
        """Give what `plugin` gave; None: it was not asked for, or it failed."""
        found = self._loaded.get(plugin)
        return None if isinstance(found, PluginError) else found

    def names(self) -> list[str]:
        """Name what plug-ins bring, whether it loads or not."""
        return sorted({each.name for each in found().plugins if each.kind == self.kind and each.interface == INTERFACE})

    def _load(self, plugin: Plugin) -> T:
        if not _VALUE.fullmatch(plugin.value):
            raise refusal(plugin, "its entry point names no object: expected package.module:NAME, or a package")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for data
                return self.check(plugin, plugin.entry.load())
        except ValueError as error:
            if (place := _inside(plugin, error)) is not None:
                raise refusal(plugin, f"it does not load: {_words(error)}{place}") from error
            raise refusal(plugin, str(error)) from error
        except ForgeError as error:
            raise refusal(plugin, error.message, error.hint) from error
        except (Exception, SystemExit) as error:
            lack = extras.explain(error) if isinstance(error, ImportError) else None
            hint = None if lack is None else lack.hint
            raise refusal(plugin, f"it does not load: {_words(error)}{_inside(plugin, error) or ''}", hint) from error


def refusal(plugin: Plugin, why: str, hint: str | None = None) -> PluginError:
    """Say what is wrong with a plug-in, and what to do about it."""
    own = f"upgrade it (pip install -U {plugin.package.name}), or pip uninstall {plugin.package.name}"
    return PluginError(f"{plugin}: {why}", hint=hint or own)


def failure(plugin: Plugin, error: BaseException) -> PluginError:
    """Say that code of a plug-in raised what it should not."""
    return refusal(
        plugin,
        f"it failed: {_words(error)}{_inside(plugin, error) or ''}",
        f"report it to the authors of {plugin.package}, or leave it out",
    )


@contextlib.contextmanager
def blamed(plugin: Plugin) -> Iterator[None]:
    """Turn what code of `plugin` raises, but for our own errors, into a `PluginError`."""
    try:
        yield
    except ForgeError:
        raise
    except (Exception, SystemExit) as error:
        raise failure(plugin, error) from error


def problem(plugin: Plugin, seam: Seam[Any], built_in: Collection[str]) -> PluginError | None:
    """Say why a plug-in cannot be used, after importing it; None: it can."""
    try:
        if plugin.interface != INTERFACE:
            raise _other_interface(plugin)
        seam.find(plugin.name, built_in)
    except PluginError as error:
        return error
    return None


def missing(what: str, package: Package) -> EnvironmentLacks:
    """Say that something needs a plug-in that is not installed."""
    return EnvironmentLacks(
        f"{what} of the plug-in {package}, which is not installed here",
        hint=f"pip install '{package.name}=={package.version}'",
    )


def of_module(module: str) -> Package | None:
    """Tell whose plug-in a module is part of, by its top-level package; None: of none."""
    return tops().get(module.partition(".")[0])


def tops() -> Mapping[str, Package]:
    """Give the top-level packages and modules of all distributions with plug-ins, and whose they are."""
    return _tops(tuple(sys.path))


@cache
def _tops(path: tuple[str, ...]) -> Mapping[str, Package]:
    whose: dict[str, Package] = {}
    for plugin in _found(path).plugins:
        tops = {plugin.module.partition(".")[0]}
        if (distribution := plugin.entry.dist) is not None:
            tops |= set((distribution.read_text("top_level.txt") or "").split())
            for file in distribution.files or ():
                if file.suffix == ".py" and ".." not in file.parts:
                    tops.add(file.parts[0].removesuffix(".py"))
        for top in sorted(tops - {OURS}):
            whose.setdefault(top, plugin.package)
    return whose


def requirements(package: Package) -> dict[str, str]:
    """Give the versions of what a distribution with plug-ins requires besides llmforge, as far as it is installed."""
    return _requirements(package.name, tuple(sys.path))


@cache
def _requirements(name: str, path: tuple[str, ...]) -> dict[str, str]:
    return {each: version for each, version in installed([name]).items() if each not in (_normal(name), OURS)}


def installed(names: Iterable[str]) -> dict[str, str]:
    """Give the versions of distributions and of what they require, without extras, as far as it is installed.

    What llmforge requires is not listed as a requirement of others.
    """
    from importlib import metadata

    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except (metadata.PackageNotFoundError, ValueError):
            continue
        found[name] = distribution.version
        for line in () if name == OURS else distribution.requires or []:
            match = _DISTRIBUTION.match(line)
            if match is not None and "extra ==" not in line:
                waiting.append(match[0])
    return dict(sorted(found.items()))


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def folders(top: str) -> tuple[Path, ...]:
    """Find the folders of a top-level package, or the file of a module; several: a namespace. () : there is no file."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ()
    if spec is None:
        return ()
    if spec.submodule_search_locations is not None:
        return tuple(path for path in map(Path, spec.submodule_search_locations) if path.is_dir())
    file = Path(spec.origin or "")
    return (file,) if file.is_file() else ()


def _clash(kind: str, name: str, sources: list[str]) -> PluginError:
    packages = [source.partition(" ")[0] for source in sources if source != OURS]
    return PluginError(
        f"{KINDS[kind]} {name}: both {' and '.join(sources)} bring one of this name",
        hint=f"uninstall one: {' or '.join(f'pip uninstall {package}' for package in packages)}",
    )


def _other_interface(plugin: Plugin) -> PluginError:
    why = f"it is written for version {plugin.interface} of the plug-in interface; this llmforge has {INTERFACE}"
    newer = "pip install -U llmforge, or install an older " + plugin.package.name
    return refusal(plugin, why, newer if plugin.interface > INTERFACE else None)


def _words(error: BaseException) -> str:
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _inside(plugin: Plugin, error: BaseException) -> str | None:
    """Say at which line of the plug-in's code an error was raised, or passed through; None: at none."""
    import traceback  # takes longer to import than `llmforge --help` may

    roots = [str(folder) for folder in folders(plugin.module.partition(".")[0])]
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if any(frame.filename.startswith(r) for r in roots)
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else None
