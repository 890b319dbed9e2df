"""What runs concurrently with a build: the first proof that fails, in their order, is raised; weights are read once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from llmforge.base.errors import CheckpointError, VerificationError
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint, safetensors_file
from llmforge.compile.overlap import ProofPool, WeightReader

from ..models.checkpoints import write_checkpoint


def test_the_failure_of_the_earlier_one_is_raised() -> None:
    later = threading.Event()

    def first() -> None:
        later.wait(10)
        raise VerificationError("the trace")

    def second() -> None:
        later.set()
        raise VerificationError("a pass")

    with ProofPool() as proofs:
        proofs.begin(nullcontext(), first)
        failed = proofs.begin(nullcontext(), second)
        with pytest.raises(VerificationError, match="a pass"):
            failed.result()
        with pytest.raises(VerificationError, match="the trace"):
            proofs.finish()


def test_what_stumbles_over_a_graph_that_is_refused_is_not_blamed() -> None:
    stumbled = threading.Event()

    def refuse() -> None:
        stumbled.wait(10)
        raise VerificationError("a pass")

    def build(error: Exception) -> None:
        with ProofPool() as proofs:
            proofs.begin(nullcontext(), refuse)
            with proofs.blamed():
                stumbled.set()
                raise error

    with pytest.raises(VerificationError, match="a pass"):
        build(KeyError("no such value"))
    with pytest.raises(OSError, match="full"):
        build(OSError(errno.ENOSPC, "full"))


def test_what_fails_without_a_refusal_is_raised() -> None:
    def build() -> None:
        with ProofPool() as proofs, proofs.blamed():
            proofs.begin(nullcontext(), lambda: None)
            raise KeyError("no such value")

    with pytest.raises(KeyError, match="no such value"):
        build()


def test_what_did_not_run_is_dropped_and_lets_go() -> None:
    begun, go, left, ran = threading.Semaphore(0), threading.Event(), [], []

    @contextmanager
    def held(name: str) -> Iterator[None]:
        try:
            yield
        finally:
            left.append(name)

    def busy() -> None:
        begun.release()
        go.wait(10)

    with ProofPool() as proofs:
        for name in ("one", "two"):
            proofs.begin(held(name), busy, in_turn=name == "two")
            begun.acquire()
        proofs.begin(held("waiting"), lambda: ran.append("waiting"), in_turn=True)
        threading.Timer(0.1, go.set).start()
    assert sorted(left) == ["one", "two", "waiting"]
    assert ran == []


def test_a_proof_may_wait_for_those_before_it() -> None:
    with ProofPool() as proofs:
        first = proofs.begin(nullcontext(), lambda: 20)
        second = proofs.begin(nullcontext(), lambda: first.result() + 1)
        proofs.finish()
        assert second.result() == 21


def test_those_in_turn_follow_one_another_and_leave_room_for_others() -> None:
    go, order = threading.Event(), list[str]()

    def slow() -> None:
        assert go.wait(10), "the other one did not run"
        order.append("first")

    with ProofPool() as proofs:
        for name in ("second", "third", "fourth", "fifth"):
            if name == "second":
                proofs.begin(nullcontext(), slow, in_turn=True)
            proofs.begin(nullcontext(), lambda name=name: order.append(name), in_turn=True)  # type: ignore[misc]
        proofs.prepare(go.set)
        proofs.finish()
    assert order == ["first", "second", "third", "fourth", "fifth"]


def test_what_was_prepared_fails_nothing() -> None:
    ran = threading.Event()

    def refuse() -> None:
        ran.set()
        raise VerificationError("a graph that does not run: its proof will say so")

    with ProofPool() as proofs:
        proofs.prepare(refuse)
        proof = proofs.begin(nullcontext(), lambda: ran.wait(10))
        proofs.finish()
        assert proof.result()


def test_the_digest_is_that_of_a_walk_in_the_foreground(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with WeightReader() as reader:
        checkpoint = reader.begin(tmp_path)
        reader.finish(Silent())
        assert checkpoint.digest == Checkpoint.open(tmp_path).verify()


def test_what_is_wrong_is_said_when_it_is_waited_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"
    file.write_bytes(content)
    with WeightReader() as reader:
        reader.begin(tmp_path)
        with pytest.raises(CheckpointError, match="NaN"):
            reader.finish(Silent())


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
    with WeightReader() as reader:
        reader.begin(tmp_path)
        assert reading.wait(20)
        threading.Timer(0.2, go_on.set).start()
    assert len(chunks) == 1  # the file has many more
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-weights")]
