"""Plug-ins: passes, quantization methods, metrics, targets and backends of other packages, by entry points.

A package declares them in its metadata, in the groups `llmforge.v2.passes`, `llmforge.v2.methods`, … (`KINDS`), under
the names that recipes use. The number is the version of the interface that it is written for (`INTERFACE`), so that
another one is refused before any of its code runs. What nobody names is not imported (docs/plugins.md).

A `Seam` is what one kind needs: who asks it for a name gets the object, or one `PluginError`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks, ForgeError, PluginError
from llmforge.base.wording import plain

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
_LONGEST = 200  # characters that a message takes of metadata

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
    """All entry points of groups that begin as ours do, and what is wrong with the metadata of packages."""

    plugins: tuple[Plugin, ...]
    problems: tuple[str, ...]


def found() -> Found:
    """List what the installed packages declare; nothing of theirs is imported."""
    return _found(tuple(sys.path))


@cache
def _found(path: tuple[str, ...]) -> Found:
    from importlib import metadata  # takes longer to import than `llmforge --help` may

    plugins: dict[str, list[Plugin]] = {}  # by distribution; of one that lies twice, those of the first
    problems: list[str] = []
    for distribution in metadata.distributions(path=list(path)):
        try:
            if f"[{_PREFIX}" not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name, version = distribution.metadata["Name"], distribution.metadata["Version"]
            entries = [entry for entry in distribution.entry_points if entry.group.startswith(_PREFIX)]
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:  # importlib.metadata checks nothing
            where = getattr(distribution, "_path", distribution.locate_file(""))
            problems.append(plain(f"{where}: its metadata cannot be read: {_words(error)}", _LONGEST))
            continue
        package = Package(str(name or "a package without a name"), str(version or "?"))
        if normal(package.name) in plugins:
            continue
        mine = plugins[normal(package.name)] = []
        for entry in entries:
            match = _GROUP.fullmatch(entry.group)
            if match is None or match["kind"] not in KINDS:
                problems.append(f"{package}: nothing reads the entry-point group {plain(entry.group, _LONGEST)}")
                continue
            interface, home = int(match["interface"]), str(distribution.locate_file(""))
            mine.append(Plugin(match["kind"], entry.name, entry.value, package, interface, home, entry))
    every = [plugin for those in plugins.values() for plugin in those]
    every.sort(key=lambda each: (list(KINDS).index(each.kind), each.name, each.package, each.interface))
    return Found(tuple(every), tuple(dict.fromkeys(problems)))


def normal(distribution: str) -> str:
    """Spell the name of a distribution in the one way by which two are compared."""
    return distribution.lower().replace("_", "-")


def step_class(plugin: Plugin, given: Any, base: type[Any]) -> Any:
    """Return what `plugin` gives, if it is a class of `base` that a recipe can name and give options to.

    Raises:
        ValueError: it is not, in words.
    """
    if not (isinstance(given, type) and issubclass(given, base)):
        raise ValueError(f"{given!r:.60} is no subclass of {base.__module__}.{base.__qualname__}")
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
        origins = [*([OURS] if name in built_in else []), *(str(each.package) for each in usable)]
        if usable and len(origins) > 1:
            raise PluginError(
                f"{KINDS[self.kind]} {name}: both {' and '.join(origins)} bring one of this name",
                hint=f"uninstall one: {' or '.join(f'pip uninstall {each.package.name}' for each in usable)}",
            )
        if name in built_in or not here:
            return None
        if not usable:
            raise other_interface(here[0])
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
                with contextlib.redirect_stdout(sys.stderr):  # standard output is for data
                    self._loaded[plugin] = self.check(plugin, plugin.entry.load())
            except (Exception, SystemExit) as error:
                # Kept, for what was imported by halves may look whole the second time.
                self._loaded[plugin] = refused = _not_loaded(plugin, error)
                raise refused from error
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


def _not_loaded(plugin: Plugin, error: BaseException) -> PluginError:
    """Say why a plug-in does not load, or what is wrong with what it gave."""
    if isinstance(error, ForgeError):
        return refusal(plugin, error.message, error.hint)
    place = _inside(plugin, error)
    if isinstance(error, ValueError) and place is None:  # of `Seam.check`
        return refusal(plugin, str(error))
    lack = extras.explain(error) if isinstance(error, ImportError) else None
    return refusal(plugin, f"it does not load: {_words(error)}{place or ''}", None if lack is None else lack.hint)


def refusal(plugin: Plugin, why: str, hint: str | None = None) -> PluginError:
    """Say what is wrong with a plug-in, and what to do about it."""
    own = f"upgrade it (pip install -U {plugin.package.name}), or pip uninstall {plugin.package.name}"
    return PluginError(f"{plugin}: {why}", hint=hint or own)


def failure(plugin: Plugin, error: BaseException) -> PluginError:
    """Say that code of a plug-in raised what it should not."""
    why = f"it failed: {_words(error)}{_inside(plugin, error) or ''}"
    return refusal(plugin, why, f"report it to the authors of {plugin.package}, or leave it out")


@contextlib.contextmanager
def blamed(plugin: Plugin | None) -> Iterator[None]:
    """Turn what code of `plugin` raises, but for our own errors, into a `PluginError`; None: it is our own code."""
    try:
        yield
    except ForgeError:
        raise
    except (Exception, SystemExit) as error:
        if plugin is None:
            raise
        raise failure(plugin, error) from error


def missing(what: str, package: Package) -> EnvironmentLacks:
    """Say that something needs a plug-in that is not installed."""
    return EnvironmentLacks(
        f"{what} of the plug-in {package}, which is not installed here",
        hint=f"pip install '{package.name}=={package.version}'",
    )


def other_interface(plugin: Plugin) -> PluginError:
    """Say that a plug-in is written for another version of the interface."""
    why = f"it is written for version {plugin.interface} of the plug-in interface; this llmforge has {INTERFACE}"
    newer = "pip install -U llmforge, or install an older " + plugin.package.name
    return refusal(plugin, why, newer if plugin.interface > INTERFACE else None)


def _words(error: BaseException) -> str:
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _inside(plugin: Plugin, error: BaseException) -> str | None:
    """Say at which line of the plug-in's code an error was raised, or passed through; None: at none."""
    import traceback  # takes longer to import than `llmforge --help` may

    lines = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == plugin.module.partition(".")[0]
    ]
    return lines[-1] if lines else None
