"""A GGUF file as a folder: what the rest of llmforge expects of a checkpoint, written once to the user's cache folder.

The folder holds config.json, generation_config.json, tokenizer.json and tokenizer_config.json, made of the file's
metadata, and `llmforge-model.gguf`, a link to the file. It is named after the file, inside of a folder that is named
after all that it was made of.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from llmforge.base import remembered
from llmforge.base.errors import CheckpointError, EnvironmentLacks
from llmforge.checkpoint.gguf import architectures, tokenizer
from llmforge.checkpoint.gguf.header import SUFFIX, Header, read
from llmforge.checkpoint.safetensors_file import listed

WEIGHTS = f"llmforge-model{SUFFIX}"  # no name that a publisher would give a file
_FORMAT = "1"


def file_of(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or that is all the weights in folder `path`; None: there is none.

    Raises:
        CheckpointError: there are several.
    """
    try:
        if path.is_file() and path.suffix == SUFFIX:
            return path
        if not path.is_dir() or (path / WEIGHTS).exists() or any(path.glob("*.safetensors")):
            return None
        files = sorted(path.glob(f"*{SUFFIX}"))
    except PermissionError:  # who reads the folder says so
        return None
    if len(files) > 1:
        raise CheckpointError(
            f"{path}: holds {len(files)} GGUF files: {listed([file.name for file in files])}", hint="give one of them"
        )
    return files[0] if files else None


def folder_of(path: Path) -> Path:
    """Return the folder that stands for `path`: the folder itself, or of a GGUF file the one that is made of it.

    Raises:
        CheckpointError, UnsupportedError: see `header.read` and `architectures.settings`.
        EnvironmentLacks: the cache folder cannot be written.
    """
    file = file_of(path)
    return path if file is None else _made(file.absolute())


def _made(file: Path) -> Path:
    from importlib import metadata

    header = read(file)
    versions = [metadata.version(name) for name in ("transformers", "tokenizers")]
    made_of = "\n".join([_FORMAT, str(file), str(header.size_bytes), header.sha256, _code(), *versions])
    try:
        home = remembered.home() / "gguf" / hashlib.sha256(made_of.encode()).hexdigest()[:32]
        folder = home / file.stem
        if not (folder / WEIGHTS).is_symlink():
            texts = _texts(header)
            home.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=home, prefix=".new-"))
            for name, text in texts.items():
                (scratch / name).write_text(text, encoding="utf-8")
            (scratch / WEIGHTS).symlink_to(file)
            _publish(scratch, folder)
    except (OSError, RuntimeError) as error:
        raise EnvironmentLacks(
            f"{file}: what is made of its metadata cannot be written to the cache folder: {error}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return folder


def _publish(scratch: Path, folder: Path) -> None:
    """Move a folder to its place, unless another process was faster."""
    try:
        scratch.rename(folder)
    except OSError:
        if not (folder / WEIGHTS).is_symlink():
            raise
        for file in scratch.iterdir():
            file.unlink()
        scratch.rmdir()


def _texts(header: Header) -> dict[str, str]:
    made = architectures.settings(header)
    tokens: dict[str, Any] = {key: made[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in made}
    turn = header.metadata.get("tokenizer.ggml.eot_token_id")
    if type(turn) is int and 0 <= turn < made["vocab_size"] and turn != tokens.get("eos_token_id", turn):
        tokens["eos_token_id"] = [tokens["eos_token_id"], turn]  # both end a text, as in llama.cpp
    return {
        "config.json": tokenizer.dump(made),
        "generation_config.json": tokenizer.dump(tokens),
        "tokenizer.json": tokenizer.tokenizer_json(header),
        "tokenizer_config.json": tokenizer.dump(tokenizer.tokenizer_config(header)),
    }


def _code() -> str:
    """Hash what makes the folder, so that another version of it makes another."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
