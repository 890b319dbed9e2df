"""Artifacts: content-addressed folders, published by one rename, the manifest that vouches for each, and evidence."""

from llmforge.artifact.hashing import Hashing
from llmforge.artifact.manifest import records, seal, tool_versions
from llmforge.artifact.references import resolve
from llmforge.artifact.store import Artifact, check_name, publish, staging
from llmforge.base.sealed import CARD, PROVENANCE, REPORT, SIGNATURE, EvidenceRecord, FileRecord, Manifest, version_of

__all__ = [
    "CARD",
    "PROVENANCE",
    "REPORT",
    "SIGNATURE",
    "Artifact",
    "EvidenceRecord",
    "FileRecord",
    "Hashing",
    "Manifest",
    "check_name",
    "publish",
    "records",
    "resolve",
    "seal",
    "staging",
    "tool_versions",
    "version_of",
]
