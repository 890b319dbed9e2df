"""Which adapter, and by which factor: all that a recipe says of one, before it is opened."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from llmforge.base.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIGEST_FORMAT = b"llmforge adapter 1\n"


@dataclass(frozen=True)
class AdapterSource:
    """An adapter in the folder `path`; `name` is what requests and messages call it."""

    name: str
    path: Path  # absolute
    weight: float = 1.0  # factor of what it adds

    def digest(self) -> str:
        """SHA-256 of its two files, hexadecimal; reads them.

        Raises:
            CheckpointError: one cannot be read.
        """
        return digest(_hash(self.path / CONFIG), _hash(self.path / WEIGHTS))


def digest(config: str, weights: str) -> str:
    """Hash the SHA-256 of the two files of an adapter."""
    return hashlib.sha256(DIGEST_FORMAT + f"{CONFIG} {config}\n{WEIGHTS} {weights}\n".encode()).hexdigest()


def _hash(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
