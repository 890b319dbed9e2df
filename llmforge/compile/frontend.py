"""A process that imports transformers and torch for a build: it reads a configuration, traces, and proves the trace.

To import both and to trace takes seconds of one interpreter, in which no other thread of it runs. A build that needs
torch for nothing else lets a process of its own do that, and goes on meanwhile. Graphs cross as the cache keeps them
(`llmforge.trace.export.kept_graph`), and what the other process proves is what this one has read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from llmforge.base import process
from llmforge.base.errors import EnvironmentLacks

if TYPE_CHECKING:  # the process is started before this one imports anything else
    from llmforge.checkpoint import Checkpoint
    from llmforge.checkpoint.folder import Origin
    from llmforge.recipe import Recipe
    from llmforge.rewrite.pass_base import Pass
    from llmforge.verification.magnified import ReferenceRuns

_ANSWERED = object()  # in place of an answer: another process has given it
_START = "import sys; sys.path[:] = {path!r}; from llmforge.compile.frontend import serve; serve()"


class Frontend:
    """The process that imports torch, from when it is started, or something is first asked of it.

    Leaving the block ends it, whatever it does. It ends by itself when this process does.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0  # of its resident memory; once it has ended
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._copy_bytes = 0  # by which its copy that traced grew

    @staticmethod
    def is_loaded() -> bool:
        """Whether this process has imported what another would have to import first."""
        return "torch" in sys.modules

    @staticmethod
    def serves(recipe: Recipe, steps: Sequence[Pass] = (), *, measure: bool = True) -> bool:
        """Whether a build needs torch for no more than this: `steps` demand no calibration, and nothing is measured."""
        return not any(step.demands() for step in steps) and (not measure or recipe.validation.is_empty)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self) -> None:
        """Start it, unless it runs: it imports torch and transformers before it is asked for anything."""
        if self._process is None:
            command = [sys.executable, "-c", _START.format(path=sys.path)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end(self) -> None:
        """End it: it holds nothing that would have to be put in order."""
        if self._process is not None:
            from llmforge.measure import machine

            self.peak_bytes = machine.peak_resident_bytes(self._process.pid) + self._copy_bytes
            self._process.kill()
            self._process.communicate()
            self._process = None

    def configuration(self, origin: Origin) -> dict[str, Any]:
        """Return what `Checkpoint.configuration` of `Checkpoint.opened_from` says, as plain data.

        Raises:
            CheckpointError, UnsupportedError: as `Checkpoint.open`.
        """
        made: dict[str, Any] = self._ask("configuration", origin)
        return made

    def trace(self, origin: Origin) -> dict[str, bytes]:
        """Trace the model of the checkpoint that `origin` opens, and return the files of the kept graph, by name.

        Raises:
            CheckpointError, UnsupportedError: as `llmforge.trace.trace`.
        """
        files: dict[str, bytes] = self._ask("trace", origin)
        return files

    def prove(self, origin: Origin, files: Mapping[str, bytes], threads: int) -> str:
        """Hold a kept graph to transformers, and return a note of what was found.

        Raises:
            UnsupportedError, VerificationError: as `llmforge.verification.trace_verifier.verify_trace`.
        """
        note, self._copy_bytes = self._ask("prove", origin, dict(files), threads)
        return str(note)

    def _ask(self, name: str, *given: object) -> Any:
        with self._turn:
            self.start()
            assert self._process is not None
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                pickle.dump((name, given), self._process.stdin)
                self._process.stdin.flush()
                answer, error = pickle.load(self._process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError) as ended:
                raise _ended(self._process.wait()) from ended
        if error is not None:
            raise error
        return answer


def _ended(code: int) -> Exception:
    """Say how the process came to its end."""
    if code < 0:
        name = signal.Signals(-code).name
        return EnvironmentLacks(
            f"the process that traces the model was ended by {name}",
            hint="out of memory? `llmforge plan RECIPE` says how much a build needs" if name == "SIGKILL" else None,
        )
    return RuntimeError(f"the process that traces the model ended with exit code {code}; standard error says why")


def serve() -> None:
    """Be the other process: answer what comes on standard input, until that ends, on standard output."""
    process.keep_freed_memory()
    process.collect_rarely()
    for number in (signal.SIGHUP, signal.SIGINT):  # of a terminal: whoever asks is told, and ends this process
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what torch prints is no answer
    asked: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, asked), daemon=True).start()
    with process.unwatched():
        from llmforge.trace.hooks import imports

    with process.unwatched(), imports.without_unused_imports():
        from llmforge.trace.export import strategy  # noqa: F401  what tracing imports, and transformers
    server = _Server(answers)
    functions: dict[str, Callable[..., Any]] = {
        "configuration": _configuration, "trace": server.trace, "prove": server.prove,
    }  # fmt: skip
    while True:
        name, given = asked.get()
        server.answer(functions[name], *given)


class _Server:
    """Answers to questions. While a copy of this process traces, this one runs what the graph will be held to."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers
        self._copied = False  # who has run threads of torch is not to be copied
        self._copy_bytes = 0
        self._computed: tuple[Origin, ReferenceRuns] | None = None

    def answer(self, function: Callable[..., Any], *given: object) -> None:
        """Write what `function` returns or raises; nothing where it leaves that to a copy of this process."""
        try:
            made, error = function(*given), None
        except Exception as raised:  # noqa: BLE001  the process that asked raises it
            made, error = None, _portable(raised)
        if made is _ANSWERED:
            return
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((made, error), self._answers)
            self._answers.flush()

    def trace(self, origin: Origin) -> object:
        """Let a copy of this process trace and answer; meanwhile run the model in transformers."""
        if self._copied:
            return _trace(origin)
        self._copied = True
        from llmforge.measure import machine
        from llmforge.verification.trace_verifier import precompute_reference

        beginning, told = os.pipe()
        copy = os.fork()
        if copy == 0:
            try:
                process.end_with_parent()
                os.write(told, machine.peak_resident_bytes().to_bytes(8))  # less than ours: files are not mapped yet
                self.answer(_trace, origin)
            finally:
                os._exit(0)
        with contextlib.suppress(Exception):  # the proof does it again, and raises it where it can be answered
            self._computed = origin, precompute_reference(_checkpoint(origin))
        _, status, usage = os.wait4(copy, 0)
        if os.WIFSIGNALED(status):  # it has not answered: whoever waits is told how this process ended
            os.kill(os.getpid(), os.WTERMSIG(status))
        self._copy_bytes = usage.ru_maxrss * 1024 - int.from_bytes(os.read(beginning, 8))
        os.close(beginning)
        os.close(told)
        return _ANSWERED

    def prove(self, origin: Origin, files: Mapping[str, bytes], threads: int) -> tuple[str, int]:
        """Hold a kept graph to transformers; return a note of it, and by how many bytes the copy that traced grew."""
        from llmforge.trace.export import kept_graph
        from llmforge.verification.trace_verifier import verify_trace

        computed, self._computed = self._computed, None
        runs = computed[1] if computed is not None and computed[0] == origin else None
        model = kept_graph.load(files, _checkpoint(origin))
        assert model is not None, "a graph of other ties"
        return verify_trace(_checkpoint(origin), model, threads=threads, computed=runs).note(), self._copy_bytes


def _listen(questions: BinaryIO, asked: SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    """Take in what is asked; end this process at once when nobody is there any more to ask."""
    while True:
        try:
            asked.put(pickle.load(questions))
        except (EOFError, pickle.UnpicklingError):
            os._exit(0)


def _portable(error: Exception) -> Exception:
    """Make an error that can cross, with where it was raised."""
    where = "".join(traceback.format_exception(error))
    error.__cause__ = error.__context__ = None
    try:
        crossed: Exception = pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):  # what an error of another package has in it
        crossed = RuntimeError(f"{type(error).__name__}: {error}")
    crossed.add_note(f"in the process that traces the model:\n{where}")
    return crossed


@cache
def _checkpoint(origin: Origin) -> Checkpoint:
    from llmforge.checkpoint import Checkpoint

    return Checkpoint.located(*origin)


def _configuration(origin: Origin) -> dict[str, Any]:
    return asdict(_checkpoint(origin).configuration)


def _trace(origin: Origin) -> dict[str, bytes]:
    from llmforge import trace
    from llmforge.trace.export import kept_graph

    with process.unwatched():
        return kept_graph.dump(trace.trace(_checkpoint(origin)))
