"""What lies beside an engine, held to what it was made of: tokenizer, chat template, `runtime.json`, Triton's model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.recipe import EngineSpec
from llmforge.runtime.artifact_files import TEMPLATE_FILE, TOKENIZER_FILES
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.triton import repository


def require_right(staging: Path, checkpoint: Checkpoint, spec: EngineSpec, model: repository.TritonModel) -> None:
    """Compare the files of `staging` with `checkpoint`, the engine's `spec` and the Triton `model`.

    Raises:
        VerificationError: names the first that differs.
    """
    written = RuntimeConfig.read(staging / "engine" / FILE)
    facts = {
        "eos_token_ids": (written.eos_token_ids, checkpoint.eos_token_ids),
        "bos_token_id": (written.bos_token_id, checkpoint.bos_token_id),
        "max_context": (written.max_context, spec.max_context),
        "max_batch": (written.max_batch, spec.max_batch),
        "vocabulary": (written.vocabulary, checkpoint.geometry.vocabulary),
    }
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise _differs(f"engine/{FILE}: {name} is {found}, must be {wanted}")
    for path, content in (*_tokenizer(checkpoint), *_served(model)):
        file = staging / path
        if (file.read_bytes() if file.is_file() else None) != content:
            raise _differs(f"{path} differs from what it was made of")


def _tokenizer(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes | None]]:
    """Give each file of the tokenizer and what it must hold; None: it is not there."""
    for name in TOKENIZER_FILES:
        source = checkpoint.path / name
        yield f"tokenizer/{name}", source.read_bytes() if source.exists() else None
    template = checkpoint.chat_template
    yield f"tokenizer/{TEMPLATE_FILE}", None if template is None else template.encode()


def _served(model: repository.TritonModel) -> Iterator[tuple[str, bytes]]:
    """Give the files from which Triton loads the model, and what they must hold."""
    folder = f"{repository.FOLDER}/{model.name}"
    for path, source in repository.own_files(model).items():
        yield f"{folder}/{path}", source
    yield f"{folder}/{repository.CONFIG}", repository.config(model, repository.IN_ARTIFACT).encode()


def _differs(what: str) -> VerificationError:
    return VerificationError(
        f"what was written is not what was built: {what}",
        hint="this is a bug in llmforge, or something else wrote to the folder of the build; nothing was published",
    )
