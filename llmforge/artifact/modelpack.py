"""Artifacts in an OCI registry, in the CNCF ModelPack format (model-spec v0.0.7).

An artifact is one OCI manifest. Its layers are the files as they are, one layer a file: `manifest.json`, the records of
evidence, `model.sig` where the artifact is signed, then the files that manifest and records list, sorted by path. So
a blob's digest is the SHA-256 that they have for the file, files that the registry has already are not uploaded again,
and the same artifact gives the same OCI manifest, to the byte.

`pull` reads the OCI manifest and what goes first, and from then on knows what every layer must be: one whose path,
size or digest is another is refused. Where the bytes came from does not matter: each blob is hashed as it arrives.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import IO, Any, NoReturn

from llmforge.artifact import oci, sealed, transfer
from llmforge.artifact.oci import MANIFEST_TYPE, OciReference, Repository
from llmforge.artifact.sealed import MANIFEST, SIGNATURE
from llmforge.artifact.store import Artifact, staging
from llmforge.artifact.transfer import Inventory
from llmforge.base.errors import InputError, UnsupportedError
from llmforge.base.progress import Progress

_MODEL = "application/vnd.cncf.model."
ARTIFACT_TYPE = f"{_MODEL}manifest.v1+json"
CONFIG_TYPE = f"{_MODEL}config.v1+json"
FILE_PATH = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"  # by which `oras pull` names files
_LAYER_TYPE = re.compile(rf"{re.escape(_MODEL)}(weight|weight\.config|doc|code|dataset)\.v1\.raw")
_SETTINGS = (".json", ".jinja", ".pbtxt", ".txt", ".yaml")  # what a model's files of configuration end in
_FORMATS = {".onnx": "onnx", ".plan": "tensorrt", ".engine": "tensorrt"}
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MIB = 1 << 20


@dataclass(frozen=True)
class Pushed:
    """What a push did."""

    digest: str  # of the OCI manifest, `sha256:…`
    files: int
    size_bytes: int
    uploaded: int  # files that the registry did not have
    uploaded_bytes: int


@dataclass(frozen=True)
class _Layer:
    """A file of an artifact as a blob."""

    path: str
    sha256: str
    size_bytes: int

    def descriptor(self) -> dict[str, Any]:
        """Describe it as the OCI manifest does."""
        return {
            "mediaType": f"{_MODEL}{_kind(self.path)}.v1.raw",
            "digest": f"sha256:{self.sha256}",
            "size": self.size_bytes,
            "annotations": {FILE_PATH: self.path, TITLE: self.path},
        }


def push(opened: Artifact, reference: OciReference, progress: Progress, *, insecure: bool = False) -> Pushed:
    """Upload an artifact, and give its manifest the tag of `reference`.

    Raises:
        InputError: a file is not what the manifest says, or the registry refuses something.
        EnvironmentLacks: the registry cannot be reached, or wants other credentials.
        UnsupportedError: the artifact has more files than an OCI manifest can list.
    """
    first = {path: _whole(opened, path) for path in transfer.unlisted(opened)}
    layers = _layers(Inventory(opened.manifest, first, dict(sorted(opened.listed.items()))))
    config = _json(_config(opened, layers))
    raw = _json(_oci_manifest(config, layers))
    if len(raw) > oci.LARGEST_MANIFEST:
        raise UnsupportedError(
            f"{opened.path}: {len(layers):,} files need an OCI manifest of {len(raw):,} bytes; registries take "
            f"{oci.LARGEST_MANIFEST:,}",
            hint="use `llmforge export`",
        )
    progress.stage(f"Push {opened.manifest.name}/{opened.manifest.version} (MiB)")
    total = sum(layer.size_bytes for layer in layers)
    advance = _meter(progress, total)
    uploaded: list[_Layer] = []
    with Repository(reference, insecure=insecure) as repository:
        for layer in layers:
            with _unchanged(opened, layer) as source:
                if repository.upload(layer.sha256, source, layer.size_bytes, advance):
                    uploaded.append(layer)
        repository.upload(transfer.sha256(config), io.BytesIO(config), len(config), _ignore)
        assert reference.tag is not None
        repository.put_manifest(reference.tag, raw)
    return Pushed(
        digest=f"sha256:{transfer.sha256(raw)}",
        files=len(layers),
        size_bytes=total,
        uploaded=len(uploaded),
        uploaded_bytes=sum(layer.size_bytes for layer in uploaded),
    )


def pull(
    reference: OciReference,
    out: Path,
    progress: Progress,
    *,
    insecure: bool = False,
    check: transfer.Check | None = None,
) -> tuple[Artifact, str]:
    """Publish an artifact of a registry as `out/<name>/<version>`; return it and the digest of its OCI manifest.

    Nothing is visible before every byte was compared with both manifests, and nothing is written outside of the hidden
    folder that builds use. `check` may refuse what is whole, such as for its signature.

    Raises:
        InputError: the reference is not there or of another program, or the registry sent other bytes than it says.
        UsageError: the version is there with other content or evidence.
        EnvironmentLacks: the registry cannot be reached or wants other credentials; the disk has no room.
    """

    def refuse(why: str) -> NoReturn:
        raise InputError(
            f"{reference}: not an artifact that llmforge pushed, or damaged: {why}",
            hint="push the artifact again with `llmforge push`",
        )

    with Repository(reference, insecure=insecure) as repository:
        raw, media_type = repository.manifest()
        layers = _read(raw, media_type, reference, refuse)
        contents = {layer.path: _fetched(repository, layer) for layer in _first(layers, refuse)}
        stock = transfer.take_stock(contents, str(reference), refuse)
        manifest = stock.manifest
        _compare(layers, _layers(stock), refuse)
        total = sum(layer.size_bytes for layer in layers)
        progress.stage(f"Pull {manifest.name}/{manifest.version} (MiB)")
        advance = _meter(progress, total)
        with staging(out, manifest.name) as folder:
            transfer.require_room(folder, total, str(reference))
            transfer.write(folder, contents)
            advance(sum(map(len, contents.values())))
            for layer in layers[len(contents) :]:
                with transfer.writing(folder / layer.path, str(reference)) as target:
                    repository.download(layer.sha256, layer.size_bytes, target, advance)
            return transfer.publish(folder, manifest, str(reference), check), f"sha256:{transfer.sha256(raw)}"


def _first(layers: list[_Layer], refuse: Callable[[str], NoReturn]) -> list[_Layer]:
    """List the layers that go first; refuse those that are too large to be read into memory."""
    found: list[_Layer] = []
    for layer in layers:
        if not (largest := transfer.largest(layer.path)):
            break
        if layer.size_bytes > largest:
            refuse(f"{layer.path} has {layer.size_bytes:,} bytes; at most {largest:,} are allowed")
        found.append(layer)
    total = sum(layer.size_bytes for layer in found if transfer.is_record(layer.path))
    if total > transfer.LARGEST_EVIDENCE:
        refuse(f"its evidence has {total:,} bytes; at most {transfer.LARGEST_EVIDENCE:,} are allowed")
    return found


def _layers(stock: Inventory) -> list[_Layer]:
    """List the layers of an artifact in their order."""
    first = (_Layer(path, transfer.sha256(content), len(content)) for path, content in stock.unlisted.items())
    return [*first, *(_Layer(path, file.sha256, file.size_bytes) for path, file in stock.listed.items())]


def _kind(path: str) -> str:
    """Say which of ModelPack's kinds a file is of."""
    suffix = Path(path).suffix
    if path == SIGNATURE or not (path == MANIFEST or sealed.is_content(path)):
        return "doc"
    if suffix == ".py":
        return "code"
    return "weight.config" if suffix in _SETTINGS else "weight"


def _config(opened: Artifact, layers: list[_Layer]) -> dict[str, Any]:
    """Describe the model as ModelPack does; of what it has fields for, what is known for sure."""
    manifest, built = opened.manifest, opened.evidence[-1].created.astimezone(UTC)
    formats = {_FORMATS[suffix] for path in manifest.files if (suffix := Path(path).suffix) in _FORMATS}
    return {
        "descriptor": {
            "createdAt": built.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "name": manifest.name,
            "version": manifest.version,
        },
        "config": {
            **({"format": ",".join(sorted(formats))} if formats else {}),
            "capabilities": {"inputTypes": ["text"], "outputTypes": ["text"]},
        },
        "modelfs": {"type": "layers", "diffIds": [f"sha256:{layer.sha256}" for layer in layers]},
    }


def _oci_manifest(config: bytes, layers: list[_Layer]) -> dict[str, Any]:
    described = {"mediaType": CONFIG_TYPE, "digest": f"sha256:{transfer.sha256(config)}", "size": len(config)}
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": described,
        "layers": [layer.descriptor() for layer in layers],
    }


def _json(value: dict[str, Any]) -> bytes:
    """Write JSON that is the same bytes for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _read(raw: bytes, media_type: str, reference: OciReference, refuse: Callable[[str], NoReturn]) -> list[_Layer]:
    """Read the layers of an OCI manifest, of which nothing is believed yet."""
    try:
        data = json.loads(raw)
        kind = str(data.get("mediaType") or media_type)
        of = str(data.get("artifactType") or data.get("config", {}).get("mediaType") or kind)
    except (ValueError, AttributeError, RecursionError):
        refuse("its OCI manifest is not JSON")
    if kind != MANIFEST_TYPE or of != ARTIFACT_TYPE:
        many = kind == oci.INDEX_TYPE or kind.endswith(".list.v2+json")
        whose = "an image index" if many else f"of type {of[:120]!r}"
        raise InputError(
            f"{reference}: not an artifact of llmforge: it is {whose}; expected {ARTIFACT_TYPE}",
            hint="give what `llmforge push` pushed; use other tools for other contents",
        )
    layers: list[_Layer] = []
    try:
        for each in data["layers"]:
            path, size = each["annotations"][FILE_PATH], each["size"]
            digest = _DIGEST.fullmatch(each["digest"])
            if digest is None or type(size) is not int or size < 0 or not _LAYER_TYPE.fullmatch(each["mediaType"]):
                refuse(f"layer {len(layers)} ({str(path)[:80]!r}) is not one raw file with a size and a SHA-256")
            layers.append(_Layer(str(path), digest[1], size))
    except (KeyError, TypeError):
        refuse(f"layer {len(layers)} has no path, type, size or digest")
    if not layers or layers[0].path != MANIFEST:
        what = f"it begins with {layers[0].path[:80]!r}" if layers else "it has no layers"
        refuse(f"it is of ModelPack, but {what}; {MANIFEST} comes first")
    return layers


def _compare(found: list[_Layer], expected: list[_Layer], refuse: Callable[[str], NoReturn]) -> None:
    """Refuse layers that are not the files of the manifest, in their order."""
    for there, must in zip(found, expected, strict=False):
        if there.path != must.path:
            refuse(f"a layer for {there.path[:80]!r} where {must.path!r} must be")
        if there != must:
            refuse(f"the layer of {must.path} is sha256:{there.sha256} of {there.size_bytes:,} bytes; {MANIFEST} says "
                   f"sha256:{must.sha256} of {must.size_bytes:,}")  # fmt: skip
    if len(found) != len(expected):
        refuse(f"it has {len(found):,} layers; {MANIFEST} makes {len(expected):,}")


def _fetched(repository: Repository, layer: _Layer) -> bytes:
    """Read a small blob."""
    stream = io.BytesIO()
    repository.download(layer.sha256, layer.size_bytes, stream, _ignore)
    return stream.getvalue()


def _whole(opened: Artifact, path: str) -> bytes:
    with transfer.reading(opened, path) as source:
        return source.read()


@contextmanager
def _unchanged(opened: Artifact, layer: _Layer) -> Iterator[IO[bytes]]:
    """Open a file to upload; where that fails, say if it is because the file is not what the manifest says."""
    with transfer.reading(opened, layer.path) as source:
        if source.seek(0, 2) != layer.size_bytes:
            raise transfer.changed(opened, layer.path)
        source.seek(0)
        try:
            yield source
        except InputError:
            source.seek(0)
            if hashlib.file_digest(source, "sha256").hexdigest() != layer.sha256:  # type: ignore[arg-type]
                raise transfer.changed(opened, layer.path) from None
            raise


def _meter(progress: Progress, total: int) -> oci.Advance:
    """Count bytes, and tell progress whole mebibytes."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if before // _MIB != done // _MIB or done == total:
            progress.advance(-(-done // _MIB), max(1, -(-total // _MIB)))

    return advance


def _ignore(count: int) -> None:
    pass
