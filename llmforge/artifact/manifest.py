"""The manifest of an artifact: what it is, what it was made of, and the hash of every file in it."""

from __future__ import annotations

import hashlib
import json
import platform
import stat
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json

from llmforge import __version__
from llmforge.base import small_file
from llmforge.base.backends import PROVIDERS
from llmforge.base.errors import InputError
from llmforge.base.wording import quoted, shown

MANIFEST = "manifest.json"
REPORT = "report/"  # timings and dates: listed in the manifest, outside the content digest
PROVENANCE = "provenance/"  # what it was made of and on: neither is it content
CARD = "README.md"  # tells of measurements
SIGNATURE = "model.sig"  # made after publication, of everything else
VERSION_DIGITS = 12  # of the content digest: 48 bits, no collision to be expected below 10 million versions of a name
MOST_BYTES = small_file.SETTINGS_BYTES
CONTENT_FORMAT = b"llmforge content 1\n"
TOOLS = (
    "jinja2", "ml-dtypes", "numpy", "onnx", "onnx-ir", "onnxscript", *(each.package for each in PROVIDERS.values()),
    "tokenizers", "torch", "transformers",
)  # fmt: skip

Verdict = Literal["pass", "fail", "inconclusive", "none"]  # of all gates together (llmforge.evaluation.gates)


def _inside(path: str) -> str:
    plain = PurePosixPath(path)
    if (
        path in ("", ".")
        or str(plain) != path
        or plain.is_absolute()
        or ".." in plain.parts
        or path in (MANIFEST, SIGNATURE)
    ):
        raise ValueError(f"{path!r} is not a plain path inside the artifact")
    return path


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
InsidePath = Annotated[str, AfterValidator(_inside)]


# What becomes the name of a folder or a file, wherever a manifest comes from; what is printed to a terminal.
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,127}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.,+!_~-]{0,127}$")]


class _ManifestPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)


class FileRecord(_ManifestPart):
    """One file of an artifact."""

    sha256: Sha256
    size_bytes: int = Field(ge=0)
    in_content: bool  # counted in the content digest: the same inputs give the same bytes


class Manifest(_ManifestPart):
    """What an artifact is, what it was made of, and the hash of every file in it."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: Name
    version: Name
    content_digest: Sha256
    verdict: Verdict
    created: AwareDatetime  # UTC
    checkpoint: Sha256  # digest of the checkpoint's content
    target: Name
    recipe: dict[str, Any]  # resolved
    tools: dict[Word, Word]  # that it was built with
    requires: dict[Word, Word]  # package → version that the engine must be run with
    files: dict[InsidePath, FileRecord]

    @field_validator("recipe")
    @classmethod
    def _can_be_hashed(cls, recipe: dict[str, Any]) -> dict[str, Any]:
        json.dumps(recipe, allow_nan=False)
        return recipe

    def to_json(self) -> str:
        """Write it as JSON, indented, with a final newline."""
        return self.model_dump_json(indent=1) + "\n"


def read(file: Path) -> Manifest:
    """Read a manifest.

    Raises:
        InputError: it is not one, or of another format version.
    """
    return parse(small_file.read(file, MOST_BYTES), str(file))


def parse(raw: bytes, source: str) -> Manifest:
    """Read the bytes of a manifest; `source` says in messages where they are from.

    Raises:
        InputError: they are not one, or of another format version.
    """
    try:
        data = from_json(raw)
        too_deep = small_file.deeper(data, small_file.DEEPEST)
    except ValueError as error:
        raise InputError(f"{source}: not valid JSON: {error}", hint="fetch the artifact or build it again") from error
    if too_deep:
        raise InputError(f"{source}: JSON nested too deeply: at most {small_file.DEEPEST} levels are allowed")
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != 1:
        raise InputError(
            f"{source}: schema {quoted(schema)} is not supported by llmforge {__version__}, which reads schema 1",
            hint="use the version of llmforge that built the artifact, or build it again",
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{source}: {where}: {first['msg']}, not {shown(first['input'])}",
            hint="fetch the artifact or build it again",
        ) from error


def tool_versions() -> dict[str, str]:
    """List Python, llmforge and the packages that shape an artifact, as installed here."""
    versions = {"python": platform.python_version(), "llmforge": __version__}
    for package in TOOLS:
        try:
            versions[package] = installed_version(package)
        except PackageNotFoundError:  # an extra that is not installed shapes nothing
            continue
    return versions


def content_digest(folder: Path, recipe: Mapping[str, Any]) -> str:
    """Compute the content digest that `folder` will be published with; the report may be written after that."""
    return content_digest_of(records(folder), recipe)


def content_digest_of(files: Mapping[str, FileRecord], recipe: Mapping[str, Any]) -> str:
    """Combine the hashes of the files that count and the resolved recipe: equal for builds from equal inputs.

    SHA-256 over one line `<path> <SHA-256>` a file, sorted by path, and the recipe as canonical JSON.
    """
    digest = hashlib.sha256(CONTENT_FORMAT)
    for path, record in sorted(files.items()):
        if record.in_content:
            digest.update(f"{path} {record.sha256}\n".encode())
    digest.update(json.dumps(recipe, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    return digest.hexdigest()


def version_of(content_digest: str) -> str:
    """Name the version that content gets when the recipe names none."""
    return content_digest[:VERSION_DIGITS]


def walk(folder: Path) -> Iterator[str]:
    """Yield the relative path of everything in `folder` that is not a folder, hidden files and links included."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def sha256(file: Path) -> str:
    """Hash a regular file; anything else, links included, gets a word that equals no hash."""
    if not stat.S_ISREG(file.lstat().st_mode):
        return "not a regular file"
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def counts(path: str) -> bool:
    """Say whether a file of an artifact is content: equal inputs give equal bytes."""
    return path != CARD and not path.startswith((REPORT, PROVENANCE))


def records(folder: Path) -> dict[str, FileRecord]:
    """Hash everything in `folder`."""
    files = {}
    for path in sorted(walk(folder)):
        file = folder / path
        assert stat.S_ISREG(file.lstat().st_mode), f"{file}: an artifact holds regular files only"
        files[path] = FileRecord(sha256=sha256(file), size_bytes=file.stat().st_size, in_content=counts(path))
    return files
