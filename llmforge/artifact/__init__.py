"""Artifacts: content-addressed folders, published by one rename, the manifest that vouches for each, and evidence."""

from llmforge.artifact.hashing import Hashing
from llmforge.artifact.manifest import records, seal, tool_versions
from llmforge.artifact.sealed import (
    CARD,
    PROVENANCE,
    REPORT,
    SIGNATURE,
    EvidenceRecord,
    FileRecord,
    Manifest,
    version_of,
)
from llmforge.artifact.store import Artifact, check_name, publish, staging

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
    "seal",
    "staging",
    "tool_versions",
    "version_of",
]
