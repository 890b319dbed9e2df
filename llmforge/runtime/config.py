"""`engine/runtime.json`: what a runtime must know about an engine, written by the builder and read strictly."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from llmforge import native
from llmforge.errors import InputError, VersionMismatch
from llmforge.runtime.session import CacheInput, SessionConfig

FORMAT = 2
FILE = "runtime.json"
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"  # the larger initializers of the model


@dataclass(frozen=True)
class SessionOptions:
    """Options of ONNX Runtime that the builder chose. `threads` null: the physical cores of the serving machine."""

    threads: int | None
    optimize: bool
    entries: Mapping[str, str]

    def resolve(self, threads: int | None = None) -> SessionConfig:
        """Make the options of a session on this machine; `threads` overrides what was chosen."""
        return SessionConfig(threads or self.threads or physical_cores(), self.optimize, self.entries)


@dataclass(frozen=True)
class RuntimeConfig:
    """Content of `runtime.json`.

    `max_context` bounds prompt and answer together, in tokens; `max_batch` bounds the sequences that run at once.
    """

    format: int
    onnxruntime: str  # the version that the engine was built and proved with
    kernels: int | None  # the version of the CPU kernels (llmforge.native) that the engine needs; null: none
    max_context: int
    max_batch: int
    vocabulary: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    caches: tuple[CacheInput, ...]
    session: SessionOptions

    def to_json(self) -> str:
        """Write the file's text: sorted keys, one trailing newline."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> RuntimeConfig:
        """Read `path`.

        Raises:
            InputError: the file is missing, is no JSON, or has unknown, missing or wrong entries.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(f"{path} is missing: {path.parent.parent} is not an artifact") from error
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise InputError(f"{path}: not a JSON file: {error}") from error
        if isinstance(data, dict) and data.get("format") != FORMAT:
            raise InputError(
                f"{path}: format {data.get('format')!r}; this llmforge reads format {FORMAT}",
                hint="build the artifact again, or run it with the llmforge that built it",
            )
        top = _entries(cls, data, str(path))
        caches = [_entries(CacheInput, entry, f"{path}: caches[{i}]") for i, entry in enumerate(top.pop("caches"))]
        session = _entries(SessionOptions, top.pop("session"), f"{path}: session")
        return cls(
            **{**top, "eos_token_ids": tuple(top["eos_token_ids"])},
            caches=tuple(CacheInput(**cache) for cache in caches),
            session=SessionOptions(**session),
        )

    def check_versions(self) -> None:
        """Refuse an ONNX Runtime of another minor release: its contrib operators and kernels change between them.

        Raises:
            VersionMismatch: always names both versions.
            EnvironmentLacks: the engine needs the CPU kernels, and they are not compiled here.
        """
        if self.kernels not in (None, native.VERSION):
            raise VersionMismatch(
                f"the artifact was built with version {self.kernels} of the CPU kernels, and this llmforge has version "
                f"{native.VERSION}",
                hint="build the artifact again, or run it with the llmforge that built it",
            )
        if self.kernels is not None:
            native.require()
        wanted, installed = self.onnxruntime.split(".")[:2], onnxruntime.__version__.split(".")[:2]
        if wanted != installed:
            raise VersionMismatch(
                f"the artifact was built and validated with onnxruntime {self.onnxruntime}, "
                f"and {onnxruntime.__version__} is installed",
                hint=f"pip install 'onnxruntime=={self.onnxruntime}', or build the artifact again",
            )


def _entries(kind: Any, data: Any, where: str) -> dict[str, Any]:
    """Check that `data` has exactly the entries of dataclass `kind`, of the right JSON types; return a copy."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: {type(data).__name__}; wanted an object")
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if unknown := sorted(data.keys() - fields.keys()):
        raise InputError(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(fields)}")
    if missing := sorted(fields.keys() - data.keys()):
        raise InputError(f"{where}: {', '.join(missing)} missing")
    for name, annotation in fields.items():
        if not _fits(data[name], annotation):
            raise InputError(f"{where}: {name} is {json.dumps(data[name])}; wanted {annotation}")
    return dict(data)


def _fits(value: Any, annotation: str) -> bool:
    """Say whether a JSON value is what a field's annotation, as written above, stands for."""
    match annotation:
        case "int":
            return type(value) is int  # not a bool, which Python counts among the integers
        case "int | None":
            return value is None or type(value) is int
        case "str":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "tuple[int, ...]":
            return isinstance(value, list) and all(type(item) is int for item in value)
        case "Mapping[str, str]":
            return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
        case "tuple[CacheInput, ...]":
            return isinstance(value, list)
        case "SessionOptions":
            return isinstance(value, dict)
    raise AssertionError(annotation)


def physical_cores() -> int:
    """Count the physical cores that this process may use: hyper-threads share one, a container's quota limits them."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)  # macOS
    siblings = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(siblings), _quota(Path("/sys/fs/cgroup/cpu.max"), len(allowed))))


def _siblings(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return topology.read_text() if topology.exists() else str(cpu)


def _quota(cpu_max: Path, unlimited: int) -> int:
    """Read the CPUs that a control group grants: `cpu.max` holds "quota period" in µs, or "max period"."""
    if not cpu_max.exists():
        return unlimited
    quota, period = cpu_max.read_text().split()
    return unlimited if quota == "max" else max(1, int(quota) // int(period))
