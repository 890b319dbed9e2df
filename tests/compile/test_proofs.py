"""Proofs beside a build: what they hold is let go, and the first that fails, in their order, is what is raised."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from llmforge.base.errors import VerificationError
from llmforge.compile.proofs import Proofs


def test_the_failure_of_the_earlier_one_is_raised() -> None:
    later = threading.Event()

    def first() -> None:
        later.wait(10)
        raise VerificationError("the trace")

    def second() -> None:
        later.set()
        raise VerificationError("a pass")

    with Proofs() as proofs:
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
        with Proofs() as proofs:
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
        with Proofs() as proofs, proofs.blamed():
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

    with Proofs() as proofs:
        for name in ("one", "two"):
            proofs.begin(held(name), busy, in_turn=name == "two")
            begun.acquire()
        proofs.begin(held("waiting"), lambda: ran.append("waiting"), in_turn=True)
        threading.Timer(0.1, go.set).start()
    assert sorted(left) == ["one", "two", "waiting"]
    assert ran == []


def test_a_proof_may_wait_for_those_before_it() -> None:
    with Proofs() as proofs:
        first = proofs.begin(nullcontext(), lambda: 20)
        second = proofs.begin(nullcontext(), lambda: first.result() + 1)
        proofs.finish()
        assert second.result() == 21


def test_those_in_turn_follow_one_another_and_leave_room_for_others() -> None:
    go, order = threading.Event(), list[str]()

    def slow() -> None:
        assert go.wait(10), "the one beside did not run"
        order.append("first")

    with Proofs() as proofs:
        for name in ("second", "third", "fourth", "fifth"):
            if name == "second":
                proofs.begin(nullcontext(), slow, in_turn=True)
            proofs.begin(nullcontext(), lambda name=name: order.append(name), in_turn=True)  # type: ignore[misc]
        proofs.beside(go.set)
        proofs.finish()
    assert order == ["first", "second", "third", "fourth", "fifth"]


def test_what_was_computed_beside_fails_nothing() -> None:
    ran = threading.Event()

    def refuse() -> None:
        ran.set()
        raise VerificationError("a graph that does not run: its proof will say so")

    with Proofs() as proofs:
        proofs.beside(refuse)
        proof = proofs.begin(nullcontext(), lambda: ran.wait(10))
        proofs.finish()
        assert proof.result()
