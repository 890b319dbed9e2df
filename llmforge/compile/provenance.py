"""The origin of an artifact, which is no part of its content: lock, SLSA statement, bill of materials, model card."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from llmforge import artifact
from llmforge.artifact.sealed import MANIFEST
from llmforge.base import extras
from llmforge.compile.lock import FILE, Lock
from llmforge.gates.records import Report
from llmforge.report import card
from llmforge.runtime.encoder import EncoderConfig

STATEMENT, BOM = "statement.json", "bom.cdx.json"  # in the folder `artifact.PROVENANCE`, with the lock
EXTRA = "provenance"
# Of https://in-toto.io/Statement/v1 and https://slsa.dev/spec/v1.0/provenance.
_STATEMENT, _PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
_BUILD_TYPE, _BUILDER = "urn:llmforge:build:1", "urn:llmforge:builder"
_LOCK = "every input: checkpoint, texts, recipe, seeds, code, packages, threads, processor"


def write(
    staging: Path, report: Report, lock: Lock, manifest: artifact.Manifest, encoder: EncoderConfig | None = None
) -> None:
    """Write the folder `provenance` and the card of content that `manifest` lists; `encoder`: see `card.write`.

    The bill of materials needs the extra `provenance`; without it there is none, and the card says so.
    """
    folder = staging / artifact.PROVENANCE
    folder.mkdir()
    (folder / FILE).write_text(lock.to_json(), encoding="utf-8")
    subjects = {path: record.sha256 for path, record in sorted(manifest.files.items())}
    subjects[MANIFEST] = manifest.content_digest
    _write_json(folder / STATEMENT, statement(report, lock, subjects))
    missing = extras.missing(EXTRA)
    if not missing:
        (folder / BOM).write_text(bill_of_materials(report, lock) + "\n", encoding="utf-8")
    origin = [
        (f"{artifact.PROVENANCE}{FILE}", _LOCK),
        (f"{artifact.PROVENANCE}{STATEMENT}", "in-toto statement with SLSA provenance of the content"),
        (
            f"{artifact.PROVENANCE}{BOM}",
            f"not written: {', '.join(missing)} was not installed ({extras.hint(EXTRA)})"
            if missing
            else "CycloneDX bill of materials",
        ),
    ]
    source = lock.checkpoint
    text = card.write(report, repository=source.repository, revision=source.revision, encoder=encoder, origin=origin)
    (staging / artifact.CARD).write_text(text, encoding="utf-8")


def prepare() -> None:
    """Import what the bill of materials is written with, which takes a sixth of a second, where it is installed."""
    if not extras.missing(EXTRA):
        import cyclonedx.output.json  # noqa: F401


def statement(report: Report, lock: Lock, subjects: Mapping[str, str]) -> dict[str, Any]:
    """Make the in-toto statement about the files `subjects`, path → SHA-256, with SLSA provenance v1.

    It is not signed by itself: the signature of the artifact covers its file.
    """
    ended = datetime.fromisoformat(report.created)
    checkpoint: dict[str, Any] = {
        "name": lock.checkpoint.name,
        "digest": {"llmforgeCheckpoint": lock.checkpoint.digest},
    }
    if lock.checkpoint.revision is not None:
        checkpoint["digest"]["gitCommit"] = lock.checkpoint.revision
    if lock.checkpoint.repository is not None:
        checkpoint["uri"] = f"pkg:huggingface/{lock.checkpoint.repository}"
    dependencies = [
        checkpoint,
        *({"name": f"{text.role}: {text.name}", "digest": {"sha256": text.sha256}} for text in lock.texts),
        {"name": "llmforge", "digest": {"llmforgePackage": lock.code.sha256}},
        *(
            {"name": f"plug-in {each.package} {each.version}", "digest": {"llmforgePackage": each.sha256}}
            for each in lock.plugins
        ),
        *({"uri": _purl(name, version)} for name, version in lock.packages.items()),
    ]
    return {
        "_type": _STATEMENT,
        "subject": [{"name": path, "digest": {"sha256": digest}} for path, digest in subjects.items()],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"recipe": lock.recipe},
                "internalParameters": {"seeds": lock.seeds, "threads": lock.threads.model_dump(mode="json")},
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": _BUILDER, "version": {"llmforge": lock.code.version}},
                "metadata": {
                    "startedOn": _utc(ended - timedelta(seconds=round(report.build.seconds))),
                    "finishedOn": _utc(ended),
                },
                "byproducts": [{"name": f"{artifact.PROVENANCE}{FILE}"}, {"name": f"{artifact.REPORT}report.html"}],
            },
        },
    }


def bill_of_materials(report: Report, lock: Lock) -> str:
    """Write the CycloneDX 1.6 bill of materials: the model, its checkpoint, its texts, and the packages that built it.

    Equal inputs at one time give equal bytes: the serial number is made of the content digest.
    """
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL

    def part(kind: ComponentType, name: str, version: str | None, digest: str | None, **more: Any) -> Component:
        hashes = [] if digest is None else [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
        return Component(type=kind, name=name, version=version, hashes=hashes, bom_ref=f"{kind.value}:{name}", **more)

    model = ComponentType.MACHINE_LEARNING_MODEL
    # The SHA-256 of the manifest, or over all tensors: neither is that of one file of the model, so properties say it.
    whole = part(
        model, report.name, report.version, None, properties=[Property(name="llmforge:content", value=report.content)]
    )
    source = part(
        model, f"checkpoint {lock.checkpoint.name}", lock.checkpoint.revision, None,
        properties=[Property(name="llmforge:checkpoint", value=lock.checkpoint.digest)],
    )  # fmt: skip
    texts = [part(ComponentType.DATA, f"{text.role} {text.name}", None, text.sha256) for text in lock.texts]
    packages = [
        part(ComponentType.LIBRARY, name, version, None, purl=PackageURL("pypi", name=name, version=version))
        for name, version in {"llmforge": lock.code.version, **lock.packages}.items()
    ]
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, report.content), components=[source, *texts, *packages])
    bom.metadata.component = whole
    bom.metadata.timestamp = datetime.fromisoformat(report.created)
    bom.register_dependency(whole, [source, *texts, *packages])
    written: str = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    return written


def _purl(name: str, version: str) -> str:
    """Name a package as https://github.com/package-url/purl-spec does."""
    return f"pkg:pypi/{name.lower()}@{version.replace('+', '%2B')}"


def _utc(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
