"""Artifacts: content-addressed folders, published by one rename, and the manifest that vouches for each."""

from llmforge.artifact.store import (
    REPORT,
    Artifact,
    Manifest,
    check_name,
    content_digest,
    publish,
    staging,
    tool_versions,
    version_of,
)

__all__ = [
    "REPORT",
    "Artifact",
    "Manifest",
    "check_name",
    "content_digest",
    "publish",
    "staging",
    "tool_versions",
    "version_of",
]
