"""A process that this one starts in its own Python: they talk through one socket, and the end of either is told.

The socket is file 0 of the process that is started. Two ends of our own code send each other pickles (`MessagePipe`);
a process that runs what strangers wrote is sent lines of text (`ChildProcess.ask`), of which nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llmforge.base.errors import EnvironmentLacks

END_S = 10.0  # for a process whose socket was closed, or that was told to end
_KILLED = "its process was killed (SIGKILL): by the system, perhaps, for want of memory"


class ChildEnded(Exception):
    """The process has ended, or was ended for the time it took: the text says why."""


class ChildProcess:
    """A process of this one, which is killed when nobody has this any more. Ctrl-C is for this process alone.

    Args:
        command: of `interpreter`.
        refusal: what an error says first where it cannot be started.
        answers: whether its standard output is the socket, too; else what it prints is dropped.
        quiet: whether its standard error is dropped.
        environment: of the process; None: this one's.
        reasons: why a signal ended it, where its number does not say so.
        files: descriptors that it has, too.

    Raises:
        EnvironmentLacks: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        refusal: str,
        *,
        answers: bool = False,
        quiet: bool = False,
        environment: Mapping[str, str] | None = None,
        reasons: Mapping[int, str] | None = None,
        files: Sequence[int] = (),
    ) -> None:
        self._reasons = {signal.SIGKILL: _KILLED, **(reasons or {})}
        self.socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno() if answers else subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL if quiet else None,
                    env=environment,
                    pass_fds=files,
                    start_new_session=True,
                )
            except OSError as error:
                self.socket.close()
                raise EnvironmentLacks(f"{refusal}: {error.strerror}") from error
        self.kill = weakref.finalize(self, _kill, self._process, self.socket)

    @property
    def id(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """What it ended with: its exit code, or the number of a signal below 0; None: it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.code is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; return whether it has come."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def pipe(self) -> MessagePipe:
        """Talk in messages from now on."""
        return MessagePipe(self.socket.detach())

    def why_ended(self) -> str:
        """Say how the process ended, which nobody asked it to."""
        if not self.wait(END_S):
            self.kill()
            return "its process went silent"
        code = self._process.returncode
        if -code in self._reasons:
            return self._reasons[-code]
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process ended with {name}"

    def ask(self, line: str, timeout_s: float) -> bytes:
        """Send a line of text and return the one that answers it.

        Raises:
            ChildEnded: there is none within `timeout_s`; the process is ended then.
        """
        deadline, answer = time.monotonic() + timeout_s, bytearray()
        try:
            self.socket.settimeout(timeout_s)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.socket.sendall(line.encode() + b"\n")
            while not answer.endswith(b"\n"):
                self.socket.settimeout(max(1e-3, deadline - time.monotonic()))
                try:
                    part = self.socket.recv(1 << 20)
                except ConnectionResetError:  # it ended before it had read all
                    part = b""
                if not part:
                    raise ChildEnded(self.why_ended())
                answer += part
        except TimeoutError:
            self.kill()
            raise ChildEnded(f"it takes more than {timeout_s:g} s") from None
        return bytes(answer)


def _kill(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    """End a process, if it has not ended."""
    ours.close()
    if process.poll() is None:
        process.kill()
    process.wait()


class MessagePipe:
    """Messages, pickled, through one end of a pair of sockets; threads send one after the other.

    Both ends are our own code, started by each other: nothing that a stranger wrote is ever unpickled.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send one message; it is dropped where nobody receives any more."""
        with contextlib.suppress(OSError), self._lock:  # the other end learns of it, or has ended
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: the other end has ended.
        """
        try:
            return self._connection.recv()
        except OSError:
            raise EOFError from None


def end_with(processes: Sequence[int], files: Iterable[Path] = ()) -> None:
    """Wait for the end of one of some processes, then end the others, remove `files`, and end this process.

    One of them may hang in a call into another that is no more, and could not end itself.
    """
    with contextlib.ExitStack() as opened:
        watched = select.poll()
        handles: list[int] = []
        for process in processes:
            try:
                handles.append(os.pidfd_open(process))
            except ProcessLookupError:
                continue  # it has ended: its number is nobody's, or another's, and is not looked at again
            opened.callback(os.close, handles[-1])
            watched.register(handles[-1], select.POLLIN)
        if len(handles) == len(processes):
            watched.poll()
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        # Where the last one goes on for a while, it has them open, and needs their names no more.
        for path in files:
            with contextlib.suppress(OSError):  # it is gone, or another's
                path.unlink()
        os._exit(1)
