"""The backends: what builds and runs engines. Each is a folder here, whose `BACKEND` says all that tells it apart.

A new backend is a folder with its record (llmforge.backends.record) and the modules that the record names, its place in
`_FOLDERS`, an extra of the name of each provider, and an entry in `engines` of the targets that run it. They are listed
and not looked for, because what is imported is what keys of the build cache cover and what Triton's repository carries.

A backend of a plug-in (llmforge.base.plugins) is such a record, too, and found by its name like those here; its
providers are called as it is, or begin with its name and a hyphen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from llmforge.backends import compressed_tensors, gguf, onnxruntime, tensorrt, tensorrt_rtx
from llmforge.backends.record import BackendRecord, ExportFormat, Provider
from llmforge.base.plugins import Plugin, Seam

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_FOLDERS = (onnxruntime, tensorrt, tensorrt_rtx, compressed_tensors, gguf)
BUILT_IN: Mapping[str, BackendRecord] = {each.BACKEND.name: each.BACKEND for each in _FOLDERS}
BUILT_IN_PROVIDERS: Mapping[str, Provider] = {
    each.name: each for backend in BUILT_IN.values() for each in backend.providers
}


def _check(plugin: Plugin, given: Any) -> BackendRecord:
    """Return the record that a plug-in gives, if it is one."""
    if not isinstance(given, BackendRecord):
        raise ValueError(f"it is a {type(given).__name__}, not an instance of llmforge.backends.record.BackendRecord")
    if given.name != plugin.name:
        raise ValueError(f"its record calls itself {given.name!r}")
    if not given.providers:
        raise ValueError("it has no providers")
    for provider in given.providers:
        if provider.name != given.name and not provider.name.startswith(f"{given.name}-"):
            raise ValueError(f"its provider {provider.name!r} must be called {given.name!r}, or {given.name}-SOMETHING")
        if provider.name in BUILT_IN_PROVIDERS:
            raise ValueError(f"llmforge has a provider {provider.name!r} itself")
        if provider.kind not in ("cpu", "gpu", None):
            raise ValueError(f"its provider {provider.name!r} is of kind {provider.kind!r}; expected cpu, gpu or None")
    return given


SEAM = Seam("backends", _check)

K = TypeVar("K")


class _Known(dict[str, K]):
    """Records by name: one of a plug-in is found as well, and not listed."""

    def __init__(self, records: Mapping[str, K], of_plugin: Callable[[str], K | None]) -> None:
        super().__init__(records)
        self._of_plugin = of_plugin

    def __missing__(self, name: str) -> K:
        if (found := self._of_plugin(name)) is None:
            raise KeyError(name)
        return found


def _provider(name: str) -> Provider | None:
    """Find a provider of a plug-in's backend by the beginning of its name."""
    for each in sorted(SEAM.names(), key=len, reverse=True):
        if name == each or name.startswith(f"{each}-"):
            backend = SEAM.find(each, BUILT_IN)
            assert backend is not None
            return next((provider for provider in backend.providers if provider.name == name), None)
    return None


# Those of llmforge; `[name]` finds those of plug-ins, too, and raises PluginError where one is broken.
BACKENDS: Mapping[str, BackendRecord] = _Known(BUILT_IN, lambda name: SEAM.find(name, BUILT_IN))
PROVIDERS: Mapping[str, Provider] = _Known(BUILT_IN_PROVIDERS, _provider)


@dataclass(frozen=True)
class _Named:
    """Annotates a string that names a record, for pydantic and strict_json."""

    records: Mapping[str, Any]
    of_plugins: Callable[[], Sequence[str]]  # names, for a schema

    def allows(self, name: str) -> bool:
        """Say whether there is such a record."""
        if name in self.records:
            return True
        try:
            self.records[name]
        except KeyError:
            return False
        return True

    def choices(self) -> list[str]:
        """List the names that are allowed."""
        return [*self.records, *self.of_plugins()]

    def _checked(self, name: str) -> str:
        from pydantic_core import PydanticKnownError

        if not self.allows(name):
            known = [f"'{each}'" for each in self.choices()]
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(known[:-1])} or {known[-1]}"})
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": self.choices(), "type": "string"}


BackendName = Annotated[str, _Named(BACKENDS, SEAM.names)]
ProviderName = Annotated[str, _Named(PROVIDERS, tuple)]
# As strict_json reads it off annotations; type checkers know no type that is made of values.
if TYPE_CHECKING:
    PlanModule = str
else:
    PlanModule = Literal[tuple(backend.module for backend in BUILT_IN.values() if backend.compiled)]


def plugin_of(name: str) -> Plugin | None:
    """Find the plug-in that brings the backend `name`; None: it is one of llmforge.

    Raises:
        PluginError: several bring it, or it is written for another interface.
    """
    return SEAM.plugin(name, BUILT_IN)


def export_format(name: BackendName) -> ExportFormat | None:
    """Say whose servers load what a backend writes; None: llmforge's own runtime runs it."""
    return BACKENDS[name].export_format


def of_provider(name: ProviderName) -> BackendRecord:
    """Find the backend that a provider is of."""
    provider = PROVIDERS[name]
    for backend in BACKENDS.values():
        if provider in backend.providers:
            return backend
    owners = (each for each in SEAM.names() if name == each or name.startswith(f"{each}-"))
    return next(backend for backend in map(BACKENDS.__getitem__, owners) if provider in backend.providers)


def of_module(module: PlanModule) -> BackendRecord:
    """Find the backend whose Python module this is."""
    return next(backend for backend in BACKENDS.values() if backend.module == module)
