"""What lies beside an engine, held to what it was made of: tokenizer, chat template, `runtime.json`, Triton's model.

Of an engine that is deferred, `pending.json` stands for `runtime.json`; who finishes it has no checkpoint, and holds
what it copies to the manifest of the artifact that it finishes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llmforge.artifact import Hashing, Manifest, sealed
from llmforge.backends import pending
from llmforge.backends.onnxruntime.builder import tokenizer_files
from llmforge.backends.pending import Pending
from llmforge.base import hashed_files
from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.recipe import EngineSpec
from llmforge.runtime.artifact_files import PENDING_FILE
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.triton import repository

TOKENIZER = "tokenizer/"


@dataclass(frozen=True)
class Expected:
    """What the files beside an engine must be: SHA-256 by path, of all below `tokenizer/`; and facts, by name."""

    files: Mapping[str, str]
    facts: Mapping[str, object]
    vocabulary: int | None = None  # None: nobody knows it beside the graph

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, spec: EngineSpec) -> Expected:
        """Take it from the checkpoint and the recipe's section `engine`."""
        made = {TOKENIZER + name: content for name, content in tokenizer_files(checkpoint).items()}
        facts = _facts(checkpoint.eos_token_ids, checkpoint.bos_token_id, spec)
        return cls(_hashes(made), facts, checkpoint.geometry.vocabulary)

    @classmethod
    def of_pending(cls, manifest: Manifest, waiting: Pending) -> Expected:
        """Take it from the `manifest` of the artifact in which the engine is `waiting`."""
        hashes = {path: file.sha256 for path, file in manifest.files.items() if path.startswith(TOKENIZER)}
        return cls(hashes, _facts(waiting.eos_token_ids, waiting.bos_token_id, waiting.spec))

    def also(self, files: Mapping[str, bytes]) -> Expected:
        """Expect further `files`, by path in the artifact."""
        return replace(self, files={**self.files, **_hashes(files)})


def require_right(
    staging: Path, expected: Expected, config: RuntimeConfig, model: repository.TritonModel | None
) -> None:
    """Compare the files of `staging` with what is `expected`, the engine's `config` and what Triton loads, the `model`.

    None: another server than Triton reads the engine, or one of its own backends does.

    Raises:
        VerificationError: names the first that differs.
    """
    _require_files(staging, None, _hashes({f"engine/{FILE}": config.to_json().encode()}))
    written = RuntimeConfig.read(staging / "engine" / FILE)
    _require_facts(expected, f"engine/{FILE}", vars(written))
    if expected.vocabulary not in (None, written.vocabulary):
        raise _differs(f"engine/{FILE}: vocabulary is {written.vocabulary}, must be {expected.vocabulary}")
    _require_files(staging, TOKENIZER, expected.files)
    if model is not None:
        below = f"{repository.FOLDER}/{model.name}/"
        made = {below + path: content for path, content in repository.files(model).items()}
        _require_files(staging, f"{repository.FOLDER}/", _hashes(made))


def require_pending(staging: Path, expected: Expected, waiting: Pending) -> None:
    """Compare the files of `staging`, whose engine is `waiting`, with what is `expected`.

    Raises:
        VerificationError: names the first that differs.
    """
    _require_files(staging, None, _hashes({f"engine/{PENDING_FILE}": waiting.to_json().encode()}))
    written = pending.read(staging / "engine")
    _require_facts(expected, f"engine/{PENDING_FILE}", {**vars(written), **vars(written.spec)})
    _require_files(staging, TOKENIZER, expected.files)


def require_written(staging: Path, written: Mapping[str, str], hashing: Hashing) -> None:
    """Compare the engine's files, as they were hashed, with what was `written` to them: SHA-256 by name.

    Raises:
        VerificationError: names the first that changed in between, or since.
    """
    for name, digest in written.items():
        file = staging / "engine" / name
        if not file.is_file() or hashing.sha256(file) != digest:
            raise _differs(f"engine/{name} differs from what was written to it")


def _hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}


def _facts(eos: tuple[int, ...], bos: int | None, spec: EngineSpec) -> dict[str, object]:
    return {
        "eos_token_ids": eos,
        "bos_token_id": bos,
        "max_context": spec.max_context,
        "max_batch": spec.max_batch,
    }


def _require_facts(expected: Expected, path: str, written: Mapping[str, object]) -> None:
    for name, wanted in expected.facts.items():
        if written[name] != wanted:
            raise _differs(f"{path}: {name} is {written[name]}, must be {wanted}")


def _require_files(staging: Path, folder: str | None, wanted: Mapping[str, str]) -> None:
    """Compare files with the SHA-256 `wanted`, by path in the artifact; no others may lie below a `folder`."""
    for path, digest in wanted.items():
        file = staging / path
        if not file.is_file() or hashed_files.sha256(file) != digest:
            raise _differs(f"{path} differs from what it was made of")
    if folder is None:
        return
    if more := sorted({f"{folder}{path}" for path in sealed.walk(staging / folder)} - wanted.keys()):
        raise _differs(f"{more[0]} is a file that nothing wrote")


def _differs(what: str) -> VerificationError:
    return VerificationError(
        f"what was written is not what was built: {what}",
        hint="this is a bug in llmforge, or something else wrote to the folder of the build; nothing was published",
    )
