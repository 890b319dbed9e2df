"""What lies beside an engine, held to what it was made of: tokenizer, chat template, `runtime.json`, Triton's model."""

from __future__ import annotations

from pathlib import Path

from llmforge.artifact import sealed
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
    served = {f"{repository.FOLDER}/{model.name}/{path}": made for path, made in repository.files(model).items()}
    made = {**_tokenizer(checkpoint), **served}
    for path, content in made.items():
        file = staging / path
        if (file.read_bytes() if file.is_file() else None) != content:
            raise _differs(f"{path} differs from what it was made of")
    for folder in ("tokenizer", repository.FOLDER):
        if more := sorted({f"{folder}/{path}" for path in sealed.walk(staging / folder)} - made.keys()):
            raise _differs(f"{more[0]} is a file that nothing wrote")


def _tokenizer(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Make the files of the tokenizer, by path."""
    sources = {name: checkpoint.path / name for name in TOKENIZER_FILES}
    made = {f"tokenizer/{name}": source.read_bytes() for name, source in sources.items() if source.exists()}
    if checkpoint.chat_template is not None:
        made[f"tokenizer/{TEMPLATE_FILE}"] = checkpoint.chat_template.encode()
    return made


def _differs(what: str) -> VerificationError:
    return VerificationError(
        f"what was written is not what was built: {what}",
        hint="this is a bug in llmforge, or something else wrote to the folder of the build; nothing was published",
    )
