"""Artifacts: content-addressed folders, published by one rename, and the manifest that vouches for each."""

from llmforge.artifact.manifest import (
    CARD,
    PROVENANCE,
    REPORT,
    SIGNATURE,
    content_digest,
    records,
    tool_versions,
    version_of,
)
from llmforge.artifact.references import resolve
from llmforge.artifact.store import Artifact, check_name, publish, staging

__all__ = [
    "CARD",
    "PROVENANCE",
    "REPORT",
    "SIGNATURE",
    "Artifact",
    "check_name",
    "content_digest",
    "publish",
    "records",
    "resolve",
    "staging",
    "tool_versions",
    "version_of",
]
