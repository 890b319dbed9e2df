"""Which extra of this package brings which module, and what is wrong where a module is missing.

The list is the package's own metadata, or pyproject.toml where it runs from its source tree.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from llmforge.base.errors import EnvironmentLacks, VersionMismatch

ALWAYS = ""  # in place of an extra: what every installation has
RUNTIME = "onnxruntime"  # the module that all engines run on
DEVELOPMENT = "dev"  # the extra that repeats what others bring
_ON_RUNTIME = ("build", "serve")  # extras that are of no use without a runtime
_PACKAGE = "llmforge"
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# Where the module is not called as its distribution is.
_MODULES = {
    "cuda-bindings": "cuda.bindings",
    "nvidia-ml-py": "pynvml",
    "onnxruntime-gpu": RUNTIME,
    "ruamel.yaml": "ruamel.yaml",
    "cyclonedx-python-lib": "cyclonedx",
    "mlflow-skinny": "mlflow",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-sdk": "opentelemetry.sdk.trace",
    "pyOpenSSL": "OpenSSL",
    "python-dxf": "dxf",
}
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[^\]]*\])?(==(?P<pin>[^;,\s]+))?")
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)["']""")


@dataclass(frozen=True)
class Requirement:
    """One line of the package's requirements."""

    extra: str  # or ALWAYS
    text: str  # as pip reads it
    distribution: str
    module: str
    pin: str | None  # the one version that it allows


@cache
def requirements() -> tuple[Requirement, ...]:
    """List what this package requires, for every extra in the order of pyproject.toml; empty where nothing says so."""
    import tomllib  # these two take longer to import than `llmforge --help` may
    from importlib import metadata

    if _PROJECT.is_file():
        project = tomllib.loads(_PROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == _PACKAGE:
            extras = {ALWAYS: project["dependencies"], **project["optional-dependencies"]}
            return tuple(_read((extra, text) for extra, lines in extras.items() for text in lines))
    try:
        lines = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return ()
    return tuple(_read(map(_parts, lines)))


def hint(*extras: str) -> str:
    """Say how to install extras; those that are of no use without a runtime come with one, where there is none."""
    wanted = set(extras) - {ALWAYS}
    if wanted.intersection(_ON_RUNTIME) and _origin(RUNTIME) is None:
        wanted.add("cpu")
    return f"pip install '{_PACKAGE}[{','.join(sorted(wanted))}]'" if wanted else f"pip install {_PACKAGE}"


def missing(extra: str) -> list[str]:
    """List the distributions of an extra whose modules are not here."""
    return [each.distribution for each in requirements() if each.extra == extra and _origin(each.module) is None]


def require(*extras: str) -> None:
    """Return if all that some extras bring is here, and what runs engines beside it; nothing is imported.

    Raises:
        EnvironmentLacks: something is missing, or not whole.
    """
    lacking = {extra: absent for extra in extras if (absent := missing(extra))}
    if absent := list(dict.fromkeys(name for names in lacking.values() for name in names)):
        verb = "is" if len(absent) == 1 else "are"
        raise EnvironmentLacks(f"{', '.join(absent)} {verb} not installed", hint=hint(*lacking))
    if (lack := trouble(RUNTIME)) is not None:
        raise lack


def trouble(module: str, extra: str | None = None) -> EnvironmentLacks | None:
    """Say what is wrong with the installation of a module that this package requires; None: nothing is known.

    `extra` is what the hint names, of several that bring the module.
    """
    sources = _bringing(module)
    if not sources:
        return None
    installed = {each.distribution: version for each in sources if (version := _version(each.distribution))}
    if len(installed) > 1:
        both = " and ".join(sorted(installed))
        return EnvironmentLacks(
            f"{both} are both installed, but provide the same module and overwrite each other",
            hint=f"pip uninstall -y {' '.join(sorted(installed))}, then {hint('cpu')} or {hint('cuda')}",
        )
    first = next((each for each in sources if each.distribution in installed), sources[0])
    if _origin(first.module) is None:
        if installed:
            return EnvironmentLacks(
                f"{first.distribution} is installed, but some of its files are missing",
                hint=f"pip install --force-reinstall --no-deps '{first.text}'",
            )
        named = [each.extra for each in sources if each.extra != DEVELOPMENT]
        return EnvironmentLacks(
            f"{first.distribution} is not installed", hint=hint(extra or next(iter(named), DEVELOPMENT))
        )
    return None


def explain(error: ImportError | AttributeError) -> EnvironmentLacks | None:
    """Say what the environment lacks where an import fails or a module is not whole; None: the error is another."""
    if isinstance(error, ImportError):
        module = error.name
    else:
        module = error.obj.__name__ if isinstance(error.obj, ModuleType) else None
    return None if module is None else trouble(module) or _mismatch(module)


def _bringing(module: str) -> list[Requirement]:
    """List the requirements that bring `module`, a part of it, or what it is a part of."""
    pairs = ((each, sorted((f"{each.module}.", f"{module}."), key=len)) for each in requirements())
    return [each for each, (short, long) in pairs if long.startswith(short)]


def _mismatch(module: str) -> VersionMismatch | None:
    """Say that a package is there in another version than the one that it is pinned to."""
    for each in _bringing(module):
        version = _version(each.distribution)
        if version is not None and each.pin is not None and version.partition("+")[0] != each.pin:
            return VersionMismatch(
                f"{each.distribution} {version} is installed; this llmforge requires {each.pin}",
                hint=f"pip install '{each.text}'",
            )
    return None


def _parts(line: str) -> tuple[str, str]:
    """Read a line of the metadata: 'onnx==1.23.2; extra == "build"'."""
    text, _, marker = line.partition(";")
    extra = _EXTRA.search(marker)
    return ALWAYS if extra is None else extra[1], text.strip()


def _read(lines: Iterable[tuple[str, str]]) -> Iterator[Requirement]:
    for extra, text in lines:
        match = _REQUIREMENT.match(text)
        assert match is not None, text
        name = match["name"]
        if name != _PACKAGE:  # an extra that includes another
            yield Requirement(extra, text, name, _MODULES.get(name, name.replace("-", "_")), match["pin"])


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _origin(module: str) -> str | None:
    """Find the file that importing `module` would run; None where there is none, as in a folder that was emptied."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of the package that it is in
        return None
    return None if spec is None else spec.origin
