"""Hold an artifact in other runtimes against our own run of it, each in a process and an environment of its own.

`runtime_process` runs there. What it does wrong, by a crash, a hang or an answer that is none, ends its run with words
in the record, and never the build.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import EnvironmentLacks, RunFailed
from llmforge.base.wording import cut, shown
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure import answers, runtime_process
from llmforge.metrics import agreement
from llmforge.metrics.agreement import DISTRIBUTIONS, PROMPTS, TOKENS, ComparedPrompt, RuntimeName, RuntimeRun
from llmforge.metrics.quality import PROMPT_TOKENS
from llmforge.serving import Runner, Sampling

TIMEOUT_S = 600.0  # for a runtime to be imported, to load the artifact and give its first answer, and for each further
_GRACE_S = 60.0  # for a process to end that has closed its output: vLLM takes more than 10 on a busy machine
_POINTER = "For further information visit"  # what pydantic ends its messages with, which says nothing of them
_NO_QUALITY = "remove it from `validation.runtimes`"
_NO_LATENCY = "remove `latency` of the recipe's validation"
_LONGEST_LINE = 2**20  # bytes
_Logits = NDArray[np.float32]  # [S, V]
_INSTALL: Mapping[RuntimeName, str] = {
    "onnxruntime-genai": "onnxruntime-genai",
    "optimum": "optimum-onnx onnxruntime",
    "transformers": "transformers compressed-tensors torch",
    "vllm": "vllm",
    "llama-cpp": "llama-cpp-python",
}


class RuntimeFailed(Exception):
    """The process of another runtime ended, or gave no answer; the message says how, for the record."""


@dataclass(frozen=True)
class Interpreter:
    """The Python that a runtime is installed for, and what was found there."""

    runtime: RuntimeName
    python: Path
    versions: Mapping[str, str]


def find(wanted: Sequence[RuntimeName], pythons: Mapping[RuntimeName, Path]) -> tuple[Interpreter, ...]:
    """Look whether each runtime can be imported, by its Python in `pythons`, else by this one.

    Raises:
        EnvironmentLacks: one cannot.
    """
    return tuple(_found(name, pythons.get(name, Path(sys.executable))) for name in wanted)


def _found(runtime: RuntimeName, python: Path) -> Interpreter:
    install = f"ENV/bin/pip install {_INSTALL[runtime]}"
    hint = f"python -m venv ENV; {install}; then add --runtime {runtime}=ENV/bin/python"
    try:
        with _Process(runtime, python, None) as process:
            first = process.read(TIMEOUT_S)
    except OSError as error:
        raise EnvironmentLacks(f"{python}: cannot be run: {error.strerror}", hint=hint) from error
    except RuntimeFailed as error:
        raise EnvironmentLacks(f"{runtime} cannot be imported by {python}: {error}", hint=hint) from error
    if "lacks" in first:
        what = f"{DISTRIBUTIONS[runtime]} cannot be imported by {python}: {shown(first['lacks'], 200)}"
        raise EnvironmentLacks(what, hint=hint)
    return Interpreter(runtime, python, _versions(first))


def _versions(first: Mapping[str, Any]) -> dict[str, str]:
    found = first.get("versions")
    if not isinstance(found, dict):
        return {}
    return {cut(str(name)): cut(str(version)) for name, version in list(found.items())[:16]}


@dataclass(frozen=True)
class _Asked:
    """A prompt, and our own greedy answer to it."""

    document: str
    prompt: list[int]
    answer: list[int]


def run(
    artifact: Path,
    runner: Runner,
    windows: Sequence[TokenWindow],
    interpreters: Sequence[Interpreter],
    *,
    open_: Opened | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[RuntimeRun, ...]:
    """Let each runtime answer the beginnings of documents of `windows`, and hold it against `runner`.

    `runner` runs the same artifact. A runtime in which it is `open_` already is not started again.

    Raises:
        DataError: no document has a token to begin with.
    """
    if not interpreters:
        return ()
    asked = []
    for window in answers.beginnings(windows, PROMPTS):
        prompt = window.ids[:PROMPT_TOKENS].tolist()
        asked.append(_Asked(window.document, prompt, _greedy(runner, prompt)))
    found, total = [], len(interpreters) * len(asked)
    for number, interpreter in enumerate(interpreters):
        began, done, prompts, failure = time.perf_counter(), number * len(asked), list[ComparedPrompt](), None
        try:
            with contextlib.ExitStack() as held:
                other = open_ if open_ is not None and open_.interpreter == interpreter else None
                other = other or held.enter_context(_started(artifact, runner.config.vocabulary, interpreter))
                for prompt in _compared(other, runner, asked, timeout_s):
                    progress(done + len(prompts), total)
                    prompts.append(prompt)
        except RuntimeFailed as error:
            failure = f"{error}, after {len(prompts)} of {len(asked)} prompts"
        except OSError as error:
            failure = f"{interpreter.python} cannot be run: {error.strerror}"
        made = RuntimeRun(
            runtime=interpreter.runtime,
            versions=dict(interpreter.versions),
            asked=len(asked),
            seconds=time.perf_counter() - began,
            failure=failure,
            prompts=tuple(prompts),
        )
        found.append(made.model_copy(update={"figures": agreement.made_of(made)}))
    progress(total, total)
    return tuple(found)


class Opened:
    """An artifact in another runtime, which gives its logits."""

    def __init__(self, process: _Process, interpreter: Interpreter, vocabulary: int, file: Path) -> None:
        self._process, self.interpreter = process, interpreter
        self._vocabulary, self._file = vocabulary, file
        named = ", ".join(f"{name} {version}" for name, version in interpreter.versions.items() if name != "python")
        self.title = named or interpreter.runtime

    def answered(
        self, prompt: Sequence[int], ours: Sequence[int], ends: Sequence[int], timeout_s: float
    ) -> tuple[list[int], _Logits]:
        """Give its own greedy answer to a prompt, and its logits in front of each token of `ours`, fp32 [S, V].

        Raises:
            RuntimeFailed: it ended, was too late, or said what is no answer.
        """
        self._process.write(
            {"prompt": list(prompt), "answer": list(ours), "tokens": TOKENS, "ends": list(ends),
             "logits": str(self._file)}
        )  # fmt: skip
        said = self._process.read(timeout_s)
        logits = _logits(self._file, len(ours), self._vocabulary)
        self._file.unlink()
        return answers.ended(_answer(said, TOKENS, self._vocabulary), ends), logits

    def logits(self, ids: Sequence[int], step_tokens: int | None = None) -> _Logits:
        """Give the logits after every token of `ids`, fp32 [S, V], reading at most `step_tokens` a step.

        Raises:
            RunFailed: it ended, was too late, or said what is no answer.
        """
        with self._answering(_NO_QUALITY):
            self._process.write({"ids": list(ids), "step": step_tokens, "logits": str(self._file)})
            self._process.read(TIMEOUT_S)
            found = _logits(self._file, len(ids), self._vocabulary)
        self._file.unlink()
        return found

    def answer(self, ids: NDArray[np.int64], tokens: int) -> list[int]:
        """Continue a prompt [S] greedily by at most `tokens`; it may end where the runtime takes a text to end.

        Raises:
            RunFailed: it ended, was too late, or said what is no answer.
        """
        with self._answering(_NO_QUALITY):
            self._process.write({"prompt": ids.tolist(), "tokens": tokens, "ends": []})
            if not (made := _answer(self._process.read(TIMEOUT_S), tokens, self._vocabulary)):
                raise RuntimeFailed("gave no token")
        return made

    def generate(self, ids: NDArray[np.int64], tokens: int) -> Iterator[float]:
        """Continue prompts [B, S] greedily by `tokens`; yield the seconds until each prompt had one more, by its clock.

        A busy machine may let several lines lie here unread, which would make their tokens seem one.

        Raises:
            RunFailed: it ended, was too late, or said what is no answer.
        """
        with self._answering(_NO_LATENCY):
            self._process.write({"generate": ids.tolist(), "tokens": tokens})
            last = 0.0
            for number in range(1, tokens + 1):
                said = self._process.read(TIMEOUT_S)
                after = said.get("after_s")
                if said.get("token") != number or not isinstance(after, float) or not last <= after < math.inf:
                    raise RuntimeFailed(f"replied with {shown(said)}, where token {number} and its time were expected")
                last = after
                yield after

    def loaded_s(self) -> float:
        """Wait until the artifact is loaded, and tell how many seconds that took.

        Raises:
            RunFailed: it does not load it.
        """
        with self._answering(_NO_LATENCY):
            self._process.write({"loaded": True})
            said = self._process.read(TIMEOUT_S)
            if not isinstance(seconds := said.get("loaded_s"), float):
                raise RuntimeFailed(f"replied with {shown(said)}, where seconds were expected")
        return seconds

    @contextlib.contextmanager
    def _answering(self, hint: str) -> Iterator[None]:
        """Turn what its process does wrong into an error."""
        try:
            yield
        except RuntimeFailed as error:
            raise RunFailed(f"{self.title}: {error}", hint=hint) from error


@contextlib.contextmanager
def opened(artifact: Path, vocabulary: int, interpreter: Interpreter) -> Iterator[Opened]:
    """Run the artifact in another runtime, for as long as the `with` block lasts.

    Raises:
        RunFailed: it does not load it.
    """
    try:
        with _started(artifact, vocabulary, interpreter) as other:
            yield other
    except RuntimeFailed as error:
        raise RunFailed(f"{interpreter.runtime}: {error}") from error


@contextlib.contextmanager
def _started(artifact: Path, vocabulary: int, interpreter: Interpreter) -> Iterator[Opened]:
    """Start a runtime, which loads the artifact; raises RuntimeFailed where it ends at once."""
    with (
        tempfile.TemporaryDirectory(prefix="llmforge-runtime-") as folder,
        _Process(interpreter.runtime, interpreter.python, artifact / "engine") as process,
    ):
        process.read(TIMEOUT_S)  # its versions
        yield Opened(process, interpreter, vocabulary, Path(folder) / "logits")


def _greedy(runner: Runner, prompt: Sequence[int]) -> list[int]:
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    made = (chunk.token_id for chunk in runner.generate(prompt, sampling))
    return answers.ended((token for token in made if token is not None), runner.config.eos_token_ids)


def _compared(other: Opened, runner: Runner, asked: Sequence[_Asked], timeout_s: float) -> Iterator[ComparedPrompt]:
    """Ask another runtime one prompt after the other.

    Raises:
        RuntimeFailed: it ended, was too late, or said what is no answer.
    """
    ends = list(runner.config.eos_token_ids)
    for each in asked:
        answer, theirs = other.answered(each.prompt, each.answer, ends, timeout_s)
        ours = runner.logits([*each.prompt, *each.answer[:-1]], 1, first_step=len(each.prompt))
        yield _compare(each, answer, ours[len(each.prompt) - 1 :], theirs)


def _compare(asked: _Asked, theirs: list[int], our_logits: _Logits, their_logits: _Logits) -> ComparedPrompt:
    """Compare logits [S, V] in front of each token of our answer."""
    ours, other = our_logits.astype(np.float64), their_logits.astype(np.float64)
    difference = np.abs(ours - other)
    p, q = _log_softmax(ours), _log_softmax(other)
    kld = np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)  # rounding may put it below
    made = ComparedPrompt(
        document=asked.document,
        prompt_tokens=len(asked.prompt),
        ours=tuple(asked.answer),
        theirs=tuple(theirs),
        our_top=tuple(ours.argmax(-1).tolist()),
        their_top=tuple(other.argmax(-1).tolist()),
        kld=_written(kld),
        difference_mean=_written(difference.mean(-1)),
        difference_max=_written(difference.max(-1)),
    )
    at = made.first_difference
    if at is None or at >= min(len(theirs), len(asked.answer)):  # one ends where the other goes on
        return made
    [margin] = _written(ours[at, [asked.answer[at]]] - ours[at, [theirs[at]]])
    return made.model_copy(update={"margin": margin})


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _written(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Round to six digits, which is what fp32 logits are good for: a record has thousands of them."""
    return tuple(float(f"{value:.6g}") for value in values.tolist())


def _answer(said: Mapping[str, Any], tokens: int, vocabulary: int) -> list[int]:
    """Take the answer of a reply, at most `tokens`."""
    ids = said.get("answer")
    if not isinstance(ids, list) or len(ids) > tokens:
        raise RuntimeFailed(f"replied with {shown(said)}, where at most {tokens} token ids were expected")
    if wrong := [each for each in ids if type(each) is not int or not 0 <= each < vocabulary]:
        raise RuntimeFailed(f"gave the token id {shown(wrong[0])}; the vocabulary has {vocabulary}")
    return ids


def _logits(file: Path, tokens: int, vocabulary: int) -> _Logits:
    """Read what it wrote: fp32 [tokens, vocabulary], all finite."""
    try:
        size = file.stat().st_size
        if size != 4 * tokens * vocabulary:
            raise RuntimeFailed(
                f"wrote {size} bytes of logits, where {tokens} tokens of {vocabulary} fp32 numbers were expected"
            )
        found = np.fromfile(file, "<f4")
    except OSError as error:
        raise RuntimeFailed(f"wrote no logits that can be read: {error.strerror}") from error
    if len(found) != tokens * vocabulary or not np.isfinite(found).all():
        raise RuntimeFailed("gave logits that are not finite")
    return found.reshape(tokens, vocabulary)


class _Process:
    """`runtime_process` in a Python of its own. Leaving the `with` block ends it, and all that it started."""

    def __init__(self, runtime: RuntimeName, python: Path, engine: Path | None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        script = str(Path(runtime_process.__file__).absolute())
        command = [str(python), "-I", script, runtime, *([] if engine is None else [str(engine.absolute())])]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **offline},
                start_new_session=True,
            )
        except OSError:
            self._errors.close()
            raise
        self._read = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdout, self._errors):
            assert stream is not None
            stream.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it did not read
            self._process.stdin.close()

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a request.

        Raises:
            RuntimeFailed: nobody reads it.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeFailed(self._ended()) from error

    def read(self, timeout_s: float) -> dict[str, Any]:
        """Read a line of JSON.

        Raises:
            RuntimeFailed: there is none.
        """
        line = self._line(time.monotonic() + timeout_s, timeout_s)
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):  # not UTF-8 either
            said = None
        if not isinstance(said, dict):
            raise RuntimeFailed(f"replied with {shown(line.decode(errors='replace'))}, which is no JSON object")
        return said

    def _line(self, until: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if len(self._read) > _LONGEST_LINE:
                    raise RuntimeFailed(f"replied with a line of more than {_LONGEST_LINE} bytes")
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise RuntimeFailed(f"did not reply within {timeout_s:g} s")
                part = os.read(self._process.stdout.fileno(), 2**16)
                if not part:
                    raise RuntimeFailed(self._ended())
                self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _ended(self) -> str:
        """Say how it ended."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its output without a reply"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2**14))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = [line for line in lines if not line.strip().startswith(_POINTER)][-1:]
        return f"ended with exit code {code}" + (f" ({cut(last[0].strip(), 300)})" if last else "")
