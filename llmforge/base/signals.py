"""SIGHUP, SIGINT and SIGTERM: each ends a command in order, as an exception, until what it makes is published."""

from __future__ import annotations

import signal
from types import FrameType

ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal ended the command; `exit_code` is what a shell reports of a process that it killed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class _Handler:
    """Raises `Interrupted` in the main thread, up to the moment after which there is nothing to interrupt."""

    def __init__(self) -> None:
        self.decided = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.decided:
            raise Interrupted(number)


_handler = _Handler()


def ending() -> tuple[signal.Signals, ...]:
    """List the signals that end this command: not SIGHUP where it is ignored, as nohup has it."""
    return tuple(each for each in ENDING if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN)


def install() -> None:
    """Let the signals that end a command raise `Interrupted`; a program calls it, a library does not."""
    _handler.decided = False
    for number in ending():
        signal.signal(number, _handler)


def decided() -> None:
    """Ignore them from now on: the command has done what it was asked for, and only has to say so."""
    _handler.decided = True
