"""The lock of a build: every input that its bytes depend on, and a digest after each stage.

It is written into the artifact, outside the content: two machines that give the same bytes give other locks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from llmforge import __version__, artifact, calibration, native
from llmforge.base import extras, folders, plugins, small_file
from llmforge.base.errors import InputError
from llmforge.base.plugins import Plugin
from llmforge.cache import Code, distributions
from llmforge.checkpoint import Checkpoint, documents
from llmforge.gates.records import PluginRecord
from llmforge.ir import graph
from llmforge.measure import machine
from llmforge.measure.machine import Machine
from llmforge.metrics.record import ReportRecord
from llmforge.quantization.statistics import Statistics
from llmforge.recipe import Recipe

FILE = "lock.json"  # in the folder `artifact.PROVENANCE`
TRACE, CALIBRATION, ENGINE = "trace", "calibration", "engine"  # stages other than passes
_CODE = ("*.py", "*.yaml", "*.jinja", "*.json")
_ROOMS = (
    "llmforge",
    "llmforge.passes",
    "llmforge.recipes",
    "llmforge.targets",
)  # which may be installed in folders of their own
_DOCS = "llmforge/docs/"  # which no build reads
_REVISION = re.compile(r"[0-9a-f]{40}")


class CheckpointLock(ReportRecord):
    """The checkpoint; `repository` and `revision` say where on the Hub it is from, as far as its folder tells."""

    name: str
    digest: str
    revision: str | None = None
    repository: str | None = None


class TextLock(ReportRecord):
    """A text, and the ids of its documents in their order, hashed one a line."""

    role: Literal["calibration", "evaluation"]
    name: str
    sha256: str
    documents: int
    ids_sha256: str


class CodeLock(ReportRecord):
    """The code that built: SHA-256 over the files of the package, and of the native library (None: not compiled)."""

    version: str
    sha256: str
    native_sha256: str | None


class ThreadsLock(ReportRecord):
    """What the products that decide codes were computed on."""

    calibration: int | None  # threads; None: nothing was calibrated
    trace: int = 1
    blas_core: str | None  # the processor whose kernels OpenBLAS ran; None: numpy has another BLAS


class StageLock(ReportRecord):
    """A stage, and what it had made by its end: a graph without its weights, results of calibration, the engine."""

    name: str
    sha256: str


class Lock(ReportRecord):
    """Every input of a build."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    recipe: dict[str, Any]  # resolved
    checkpoint: CheckpointLock
    texts: tuple[TextLock, ...]
    seeds: dict[str, int]
    code: CodeLock
    packages: dict[str, str]  # all that extras and plug-ins require, installed versions
    plugins: tuple[PluginRecord, ...] = ()
    threads: ThreadsLock
    target: str
    machine: Machine
    stages: tuple[StageLock, ...]

    @model_serializer(mode="wrap")
    def _took_part(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out plug-ins where there are none."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "plugins" or value}

    def with_engine(self, files: Mapping[str, artifact.FileRecord]) -> Lock:
        """Add the last stage: the files of the engine, of all `files` of the artifact."""
        lines = "".join(f"{path} {files[path].sha256}\n" for path in sorted(files) if path.startswith("engine/"))
        stage = StageLock(name=ENGINE, sha256=hashlib.sha256(lines.encode()).hexdigest())
        return self.model_copy(update={"stages": (*self.stages, stage)})


@dataclass(frozen=True)
class StageDigests:
    """The digests of stages, as a build goes on."""

    done: list[StageLock] = field(default_factory=list)

    def graph(self, name: str, model: ir.Model) -> None:
        """Note the graph after stage `name`."""
        self.done.append(StageLock(name=name, sha256=graph.fingerprint(model)))

    def statistics(self, found: Statistics | None) -> None:
        """Note what calibration found; nothing where there was none."""
        if found is None:
            return
        digest = hashlib.sha256()
        for name in sorted(found.linears):
            matrix = found.linears[name]
            digest.update(f"{name} {matrix.grid}\n".encode())
            for part in (matrix.codes, matrix.scales, matrix.zero_points):
                digest.update(b"-" if part is None else part.tobytes())
            if matrix.minimums is not None:
                digest.update(matrix.minimums.tobytes())
        for index, each in sorted(found.kv.items()):
            digest.update(f"kv {index}\n".encode() + each.key.tobytes() + each.value.tobytes())
        digest.update(repr(sorted(found.inputs.items())).encode())
        self.done.append(StageLock(name=CALIBRATION, sha256=digest.hexdigest()))


def gather(
    recipe: Recipe,
    resolved: Mapping[str, Any],
    checkpoint: Checkpoint,
    target: str,
    stages: StageDigests,
    others: Sequence[PluginRecord] = (),
) -> Lock:
    """Write down what a build read, and what it ran on; `others` are the plug-ins that took part."""
    blas = calibration.openblas()
    spec, quality = recipe.calibration, recipe.validation.quality
    calibrated = spec is not None and any(stage.name == CALIBRATION for stage in stages.done)
    texts = [
        *(_text("calibration", path) for path in (spec.data if spec is not None else ())),
        *(_text("evaluation", path) for path in (quality.data if quality is not None else ())),
    ]
    return Lock(
        recipe=dict(resolved),
        checkpoint=CheckpointLock(
            name=checkpoint.name,
            digest=checkpoint.digest,
            revision=revision(checkpoint.path),
            repository=repository(checkpoint.path),
        ),
        texts=tuple(texts),
        seeds={} if spec is None else {"calibration": spec.seed},
        code=code(),
        packages=packages(each.package for each in others),
        plugins=tuple(others),
        threads=ThreadsLock(
            calibration=spec.threads if spec is not None and calibrated else None,
            blas_core=None if blas is None else blas.core,
        ),
        target=target,
        machine=machine.describe(),
        stages=tuple(stages.done),
    )


def of_plugins(used: Sequence[Plugin], code: Code) -> tuple[PluginRecord, ...]:
    """Say which packages from outside took part, and with what."""
    packages = sorted({each.package for each in used})
    return tuple(
        PluginRecord(
            package=package.name,
            version=package.version,
            sha256=code.digest_of(package),
            parts=tuple(f"{plugins.KINDS[each.kind]} {each.name}" for each in used if each.package == package),
        )
        for package in packages
    )


def read(opened: artifact.Artifact) -> Lock:
    """Read the lock of an artifact.

    Raises:
        InputError: it has none, or one of another version.
    """
    path = opened.path / artifact.PROVENANCE / FILE
    hint = "build it again with this version"
    if not path.is_file():
        raise InputError(f"{opened.path}: has no {artifact.PROVENANCE}{FILE}: it was built without one", hint=hint)
    try:
        return Lock.model_validate_json(small_file.read(path, small_file.SETTINGS_BYTES, hint=hint))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path}: not a lock of this version: {where}: {first['msg']}", hint=hint) from error


def code() -> CodeLock:
    """Hash the package as it is installed: every file that a build reads, by its path, and the native library."""
    files: dict[str, Path] = {}
    for room in _ROOMS:
        spec = find_spec(room)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        prefix = room.replace(".", "/")
        files |= {
            f"{prefix}/{path.relative_to(folder).as_posix()}": path for kind in _CODE for path in folder.rglob(kind)
        }
    code = [name for name in sorted(files) if not name.startswith(_DOCS)]
    lines = "".join(f"{name} {_sha256(files[name])}\n" for name in code)
    library = native.library()
    return CodeLock(
        version=__version__,
        sha256=hashlib.sha256(lines.encode()).hexdigest(),
        native_sha256=None if library is None else _sha256(library),
    )


def packages(more: Iterable[str] = ()) -> dict[str, str]:
    """List the versions of what llmforge requires, and `more`, and of what that requires, as far as it is installed."""
    named = [each.distribution for each in extras.requirements() if each.extra != extras.DEVELOPMENT]
    return distributions.installed([*named, *more])


def revision(folder: Path) -> str | None:
    """Tell the commit of a checkpoint by how the Hub's client lays it out; None where that cannot be told.

    In its cache the folder is called by the commit; a download into a folder of one's own notes it for each file.
    """
    resolved = folders.followed(folder)
    if resolved.parent.name == "snapshots" and _REVISION.fullmatch(resolved.name):
        return resolved.name
    notes = sorted((resolved / ".cache" / "huggingface" / "download").glob("*.metadata"))
    commits = {note.read_text(encoding="utf-8").partition("\n")[0].strip() for note in notes}
    commit = commits.pop() if len(commits) == 1 else ""
    return commit if _REVISION.fullmatch(commit) else None


def repository(folder: Path) -> str | None:
    """Tell the repository of a checkpoint in the cache of the Hub's client, `models--OWNER--NAME/snapshots/COMMIT`."""
    home = folders.followed(folder).parent.parent.name
    if revision(folder) is None or not home.startswith("models--"):
        return None
    return home.removeprefix("models--").replace("--", "/", 1)


def _text(role: Literal["calibration", "evaluation"], path: Path) -> TextLock:
    read = documents.read_documents(path)
    ids = "".join(f"{document.id}\n" for document in read)
    return TextLock(
        role=role,
        name=path.name,
        sha256=documents.digest(path),
        documents=len(read),
        ids_sha256=hashlib.sha256(ids.encode()).hexdigest(),
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
