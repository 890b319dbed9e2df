"""What a build asks of transformers and torch: what a configuration says, a trace, and the proof of it.

To import both and to trace takes seconds of one interpreter, in which no other thread of it runs. A build that needs
torch for nothing else lets a process of its own do that, and goes on beside it. Graphs cross as the cache keeps them
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
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from llmforge.base import process
from llmforge.base.errors import EnvironmentLacks

if TYPE_CHECKING:  # the process is started before this one imports anything else
    from llmforge.checkpoint import Checkpoint
    from llmforge.checkpoint.adapters import AdapterSource
    from llmforge.recipe import Recipe
    from llmforge.rewrite.pass_base import Pass

    Origin = tuple[Path, tuple[AdapterSource, ...]]  # `Checkpoint.opened_from`

_START = "import sys; sys.path[:] = {path!r}; from llmforge.compile.frontend import serve; serve()"


class Frontend:
    """The process that imports torch, from when it is started, or something is first asked of it.

    Leaving the block ends it, whatever it does. It ends by itself when this process does.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0  # of its resident memory; once it has ended
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._asked = False
        self._grown_bytes = 0  # of the process that proves, beyond what it has in common with this one

    @staticmethod
    def is_loaded() -> bool:
        """Whether this process has imported what another would have to import first."""
        return "torch" in sys.modules

    @property
    def is_starting(self) -> bool:
        """Whether it was started and is asked for nothing yet."""
        return self._process is not None and not self._asked

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

            self.peak_bytes = machine.peak_resident_bytes(self._process.pid) + self._grown_bytes
            self._process.kill()
            self._process.communicate()
            self._process = None

    def configuration(self, folder: Path, adapters: Sequence[AdapterSource] = ()) -> dict[str, Any]:
        """Return what `Checkpoint.configuration` says, as plain data.

        Raises:
            CheckpointError, UnsupportedError: as `Checkpoint.open`.
        """
        made: dict[str, Any] = self._ask("configuration", (folder, tuple(adapters)))
        return made

    def trace(self, folder: Path, adapters: Sequence[AdapterSource] = ()) -> dict[str, bytes]:
        """Trace the model of the checkpoint in `folder`, and return the files of the kept graph, by name.

        Raises:
            CheckpointError, UnsupportedError: as `llmforge.trace.trace`.
        """
        files: dict[str, bytes] = self._ask("trace", (folder, tuple(adapters)))
        return files

    def prove(
        self, folder: Path, files: Mapping[str, bytes], threads: int, adapters: Sequence[AdapterSource] = ()
    ) -> str:
        """Hold a kept graph to transformers, and return a note of what was found.

        Raises:
            UnsupportedError, VerificationError: as `llmforge.verification.trace_verifier.verify_trace`.
        """
        note, self._grown_bytes = self._ask("prove", (folder, tuple(adapters)), dict(files), threads)
        return str(note)

    def _ask(self, name: str, *given: object) -> Any:
        with self._turn:
            self.start()
            self._asked = True
            assert self._process is not None
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                pickle.dump((name, given), self._process.stdin)
                self._process.stdin.flush()
                answer, error = pickle.load(self._process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError) as ended:
                raise _ended(self._process.wait(), "traces the model") from ended
        if error is not None:
            raise error
        return answer


def _ended(code: int, does: str) -> Exception:
    """Say how the process that `does` something came to its end."""
    if code < 0:
        name = signal.Signals(-code).name
        return EnvironmentLacks(
            f"the process that {does} was ended by {name}",
            hint="out of memory? `llmforge plan RECIPE` says how much a build needs" if name == "SIGKILL" else None,
        )
    return RuntimeError(f"the process that {does} ended with exit code {code}; standard error says why")


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

    with process.unwatched(), imports.unused_left_out():
        from llmforge.trace.export import strategy  # noqa: F401  what tracing imports, and transformers
    provers: list[_Prover] = []  # one at most: whoever has run threads is not to be copied

    def trace(origin: Origin) -> dict[str, bytes]:
        if not provers:
            provers.append(_Prover(origin))
        return _trace(origin)

    def prove(origin: Origin, files: Mapping[str, bytes], threads: int) -> tuple[str, int]:
        if provers and provers[0].origin == origin:
            return provers[0].prove(files, threads)
        return _prove(origin, files, threads), 0

    functions: dict[str, Callable[..., Any]] = {"configuration": _configuration, "trace": trace, "prove": prove}
    while True:
        name, given = asked.get()
        try:
            answer, error = functions[name](*given), None
        except Exception as raised:  # noqa: BLE001  the process that asked raises it
            answer, error = None, _portable(raised)
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((answer, error), answers)
            answers.flush()


class _Prover:
    """A copy of the process that traces: it runs what the graph will be held against, and then holds the graph to it.

    It is made before torch has threads, which no copy would have, and ends with the process that it was made by.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        (asked, self._ask), (self._answered, answer) = os.pipe(), os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._ask)
            os.close(self._answered)
            try:
                _be_prover(origin, os.fdopen(asked, "rb"), os.fdopen(answer, "wb"))
            finally:
                os._exit(1)
        os.close(asked)
        os.close(answer)
        self._questions, self._answers = os.fdopen(self._ask, "wb"), os.fdopen(self._answered, "rb")

    def prove(self, files: Mapping[str, bytes], threads: int) -> tuple[str, int]:
        """Hold a kept graph to transformers; return the note of it, and by how much the copy grew, bytes.

        Raises:
            UnsupportedError, VerificationError: as `verify_trace`.
        """
        try:
            pickle.dump((files, threads), self._questions)
            self._questions.flush()
            answer, error = pickle.load(self._answers)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as ended:
            code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
            raise _ended(code, "proves the trace") from ended
        if error is not None:
            raise error
        note, grown_bytes = answer
        return note, grown_bytes


def _be_prover(origin: Origin, questions: BinaryIO, answers: BinaryIO) -> None:
    """Be the copy: compute what can be foreseen, and answer what comes, until nobody is there to ask."""
    asked: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(questions, asked), daemon=True).start()
    from llmforge.measure import machine
    from llmforge.trace.export import kept_graph
    from llmforge.verification.trace_verifier import foresee, verify_trace

    checkpoint, before = _checkpoint(origin), machine.peak_resident_bytes()
    try:
        foreseen = foresee(checkpoint)
    except Exception:  # noqa: BLE001  the proof does it again, and raises it where it can be answered
        foreseen = None
    while True:
        files, threads = asked.get()
        try:
            model = kept_graph.load(files, checkpoint)
            assert model is not None, "a graph of other ties"
            given, foreseen = foreseen, None
            note = verify_trace(checkpoint, model, threads=threads, foreseen=given).note()
            answer, error = (note, max(0, machine.peak_resident_bytes() - before)), None
        except Exception as raised:  # noqa: BLE001  the process that asked raises it
            answer, error = None, _portable(raised)
        pickle.dump((answer, error), answers)
        answers.flush()


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


def _prove(origin: Origin, files: Mapping[str, bytes], threads: int) -> str:
    from llmforge.trace.export import kept_graph
    from llmforge.verification.trace_verifier import verify_trace

    model = kept_graph.load(files, _checkpoint(origin))
    assert model is not None, "a graph of other ties"
    return verify_trace(_checkpoint(origin), model, threads=threads).note()
