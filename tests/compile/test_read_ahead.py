"""Reading a checkpoint in the background: the same digest, the same refusal, and an end with the build."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llmforge.base.errors import CheckpointError
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint, safetensors_file
from llmforge.compile.read_ahead import ReadAhead

from ..models.checkpoints import write_checkpoint


def test_the_digest_is_that_of_a_walk_in_the_foreground(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with ReadAhead() as ahead:
        checkpoint = ahead.begin(tmp_path)
        assert ahead.begin(tmp_path) is checkpoint
        ahead.finish(Silent())
        assert checkpoint.digest == Checkpoint.open(tmp_path).verify()


def test_what_is_wrong_is_said_when_it_is_waited_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"
    file.write_bytes(content)
    with ReadAhead() as ahead:
        ahead.begin(tmp_path)
        with pytest.raises(CheckpointError, match="NaN"):
            ahead.finish(Silent())


def test_it_ends_with_a_build_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    reading, go_on, chunks = threading.Event(), threading.Event(), []
    walk = safetensors_file._chunks

    def slowly(*arguments: object) -> object:
        if threading.current_thread() is threading.main_thread():  # reads headers
            yield from walk(*arguments)  # type: ignore[arg-type]
            return
        for chunk in walk(*arguments):  # type: ignore[arg-type]
            reading.set()
            go_on.wait(20)
            chunks.append(len(chunk))
            yield chunk

    monkeypatch.setattr(safetensors_file, "_chunks", slowly)
    with ReadAhead() as ahead:
        ahead.begin(tmp_path)
        assert reading.wait(20)
        threading.Timer(0.2, go_on.set).start()
    assert len(chunks) == 1  # the file has many more
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]
