"""Hostile checkpoint folders: JSON bombs, links and names that lead elsewhere, code that must not run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import SMALL_FILES, Checkpoint

from ..models.checkpoints import write_checkpoint

JSON_FILES = [
    name for name in SMALL_FILES if name.endswith(".json") and name not in ("tokenizer.json", "special_tokens_map.json")
]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint that reads every kind of JSON file."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, shards=2)
    (folder / "generation_config.json").write_text("{}")
    Checkpoint.open(folder)
    return folder


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    "content",
    [
        b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a": ' * 200_000,
        b'{"a": ' + b"1" * 5_000 + b"}",
        b"\x00" * 64,
        b"null",
        b'"text"',
        b"\xed\xa0\x80",  # a lone surrogate, not UTF-8
    ],
    ids=["lists", "objects", "integer", "zeros", "null", "string", "surrogate"],
)
def test_json(sharded: Path, name: str, content: bytes) -> None:
    (sharded / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(sharded)
    assert str(sharded / name) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_fifo_and_folder(sharded: Path, name: str) -> None:
    (sharded / name).unlink(missing_ok=True)
    os.mkfifo(sharded / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        Checkpoint.open(sharded)
    (sharded / name).unlink()
    (sharded / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("config.json", 4 << 20),
        ("tokenizer.json", 64 << 20),
        ("chat_template.jinja", 64 << 20),
        ("generation_config.json", 4 << 20),
    ],
)
def test_giant(sharded: Path, name: str, limit: int) -> None:
    (sharded / name).touch()
    os.truncate(sharded / name, 1 << 40)
    with pytest.raises(CheckpointError, match=f"1099511627776 bytes; at most {limit} are allowed"):
        Checkpoint.open(sharded)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pickle-was-loaded",)


def test_pickle_and_code_beside_good_weights_are_not_touched(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_checkpoint)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (tiny_checkpoint / name).write_bytes(pickle.dumps(Bomb()))
    code = "import os; os.mkdir('code-was-run')"
    for name in ("__init__.py", "modeling_llama.py", "configuration_llama.py", "tokenization_llama.py", "torch.py"):
        (tiny_checkpoint / name).write_text(code)
    Checkpoint.open(tiny_checkpoint).verify()
    assert [path.name for path in tiny_checkpoint.iterdir() if path.is_dir()] == []
