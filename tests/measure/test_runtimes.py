"""Other runtimes as processes: one that agrees, one that does not, and those that crash, hang or reply with garbage."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from llmforge.base.errors import EnvironmentLacks, RunFailed
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure import runtimes
from llmforge.measure.runtimes import Interpreter
from llmforge.metrics.agreement import PROMPTS, TOKENS, RuntimeRun
from llmforge.serving import Runner

from ..models.small_engines import EOS, VOCABULARY, small_runner

DOCUMENTS = 9
PREPARED = 3  # of which a stand-in has replies in most tests
VERSIONS = '{"versions": {"onnxruntime-genai": "9.9", "python": "3.99"}}'

# In place of a Python: it gets `-I runtime_process.py NAME [FOLDER]` as its arguments.
STAND_IN = """#!{python} -S
import json, os, shutil, signal, sys, time
say = lambda text: (sys.stdout.write(text + "\\n"), sys.stdout.flush())
say({versions!r})
if len(sys.argv) < 5:
    sys.exit(0)
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    shutil.copy({replies!r} + f"/{{number}}.f4", asked["logits"])
    answer = json.load(open({replies!r} + f"/{{number}}.json"))
    if number == {at}:
        {does}
    say(json.dumps({{"answer": answer}}))
"""


@dataclass(frozen=True)
class Case:
    """Our own runner, the beginnings of documents, and the folder of a stand-in with replies that agree with ours."""

    runner: Runner
    windows: Sequence[TokenWindow]
    folder: Path

    def fake_runtime(self, does: str = "pass", *, at: int = 0, first: str = VERSIONS) -> Interpreter:
        """Write one that `does` something, a line of Python, at its request number `at`."""
        file = self.folder / "python"
        replies = str(self.folder / "replies")
        file.write_text(STAND_IN.format(python=sys.executable, versions=first, replies=replies, at=at, does=does))
        file.chmod(0o755)
        return Interpreter("onnxruntime-genai", file, {"onnxruntime-genai": "9.9"})

    def run(self, interpreter: Interpreter, *, timeout_s: float = 60.0, documents: int = PREPARED) -> RuntimeRun:
        windows = self.windows[:documents]
        (found,) = runtimes.run(self.folder, self.runner, windows, [interpreter], timeout_s=timeout_s)
        return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Case:
    folder = tmp_path_factory.mktemp("runtimes")
    runner = small_runner(folder / "engine", sample_checkpoint)
    rng = np.random.default_rng(1)
    windows = [TokenWindow(f"document {i}", rng.integers(10, VOCABULARY, 40)) for i in range(DOCUMENTS)]
    (folder / "replies").mkdir()
    for number, window in enumerate(windows):
        prompt = window.ids[:32].tolist()
        answer: list[int] = []
        while len(answer) < TOKENS and EOS not in answer:  # naively, each token from the beginning
            answer.append(int(runner.logits([*prompt, *answer])[-1].argmax()))
        logits = runner.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        logits.tofile(folder / "replies" / f"{number}.f4")
        (folder / "replies" / f"{number}.json").write_text(json.dumps(answer))
    return Case(runner, windows, folder)


def test_one_that_agrees(prepared: Case) -> None:
    found = prepared.run(prepared.fake_runtime(), documents=DOCUMENTS)
    assert found.failure is None
    assert found.title == "onnxruntime-genai 9.9"
    assert found.figures is not None
    assert found.figures.agreement.value == 1.0
    assert found.figures.same_answers.value == 1.0
    assert found.figures.logit_difference_max < 1e-4
    assert found.figures.kld_mean.value < 1e-8
    assert [each.document for each in found.prompts] == [window.document for window in prepared.windows]
    assert {each.prompt_tokens for each in found.prompts} == {32}


def test_one_that_does_not(prepared: Case) -> None:
    """Its logits are others at one place, and so is its answer from there on."""
    ours = json.loads((prepared.folder / "replies/1.json").read_text())
    does = (
        "import struct; answer[5:] = [7]; f = open(asked['logits'], 'r+b'); f.seek(4 * (5 * 8192 + 7)); "
        "f.write(struct.pack('<f', 50.0)); f.close()"
    )
    found = prepared.run(prepared.fake_runtime(does, at=1))
    assert found.failure is None
    assert found.figures is not None
    changed = found.prompts[1]
    assert changed.first_difference == 5
    assert changed.theirs == (*ours[:5], 7)
    assert [at for at in range(len(ours)) if changed.our_top[at] != changed.their_top[at]] == [5]
    assert changed.agreeing == len(ours) - 1
    assert found.near_ties == 0
    logits = np.fromfile(prepared.folder / "replies/1.f4", np.float32).reshape(-1, VOCABULARY)[5].astype(np.float64)
    assert changed.margin == pytest.approx(logits[ours[5]] - logits[7], rel=1e-4)
    assert found.prompts[0].margin is None
    other = logits.copy()
    other[7] = 50.0
    p = np.exp(logits) / np.exp(logits).sum()
    q = np.exp(other - 50) / np.exp(other - 50).sum()
    assert changed.kld[5] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-4)
    assert changed.difference_max[5] == pytest.approx(abs(50 - logits[7]), rel=1e-4)
    assert changed.difference_mean[5] == pytest.approx(abs(50 - logits[7]) / VOCABULARY, rel=1e-2)
    places = sum(len(each.ours) for each in found.prompts)
    assert found.figures.agreement.value == pytest.approx((places - 1) / places)
    assert found.figures.same_answers.value == pytest.approx(2 / 3)


FAILURES = {
    "os.kill(os.getpid(), signal.SIGSEGV)": r"ended by SIGSEGV, after 1 of 3 prompts",
    "sys.exit('no such operator')": r"ended with exit code 1 \(no such operator\), after 1 of 3",
    "os._exit(0)": r"ended with exit code 0, after 1 of 3",
    "raise RuntimeError('out of memory')": r"ended with exit code 1 \(RuntimeError: out of memory\)",
    "say('Loading model…')": r"replied with \"Loading model…\", which is no JSON object",
    "say('[1, 2]')": r"replied with \"\[1, 2\]\", which is no JSON object",
    "say('[' * 100000)": r"which is no JSON object",
    "os.write(1, bytes([255, 254, 10]))": r"which is no JSON object",
    "sys.stdout.write('x' * 2**21); say('')": r"replied with a line of more than 1048576 bytes",
    "say('{}')": r"replied with \{\}, where at most 64 token ids were expected",
    "answer = [1] * 65": r"where at most 64 token ids were expected",
    "answer[2] = 8192": r"gave the token id 8192; the vocabulary has 8192",
    "answer[2] = 1.5": r"gave the token id 1.5",
    "answer[2] = True": r"gave the token id true",
    "os.remove(asked['logits'])": r"wrote no logits that can be read: No such file",
    "os.remove(asked['logits']); os.mkdir(asked['logits'])": r"wrote \d+ bytes of logits, where",
    "os.truncate(asked['logits'], 3000)": r"wrote 3000 bytes of logits, where \d+ tokens of 8192 fp32 numbers",
    "os.truncate(asked['logits'], 2**40)": r"wrote 1099511627776 bytes of logits",
    "f = open(asked['logits'], 'r+b'); f.write(b'\\0\\0\\xc0\\x7f'); f.close()": r"gave logits that are not finite",
    "shutil.copy(asked['logits'] + '/../../../nothing', asked['logits'])": r"ended with exit code 1",
    "os.close(1); os.close(0); time.sleep(60)": r"closed its output without a reply",
}


@pytest.mark.parametrize("does", FAILURES)
def test_one_that_fails_ends_in_words(prepared: Case, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "_GRACE_S", 0.5)
    found = prepared.run(prepared.fake_runtime(does, at=1))
    assert found.failure is not None
    assert re.search(FAILURES[does], found.failure), found.failure
    assert found.failure.endswith("after 1 of 3 prompts")
    assert found.figures is None
    assert len(found.prompts) == 1
    assert len(found.failure) < 500


def test_one_that_hangs_is_ended_with_all_it_started(prepared: Case) -> None:
    pid = prepared.folder / "pid"
    does = f"child = os.fork(); open({str(pid)!r}, 'w').write(str(os.getpid())) if child else None; time.sleep(600)"
    began = time.monotonic()
    found = prepared.run(prepared.fake_runtime(does), timeout_s=1.0)
    assert time.monotonic() - began < 30
    assert found.failure == "did not reply within 1 s, after 0 of 3 prompts"
    assert not psutil.pid_exists(int(pid.read_text()))
    left = [
        each
        for each in psutil.process_iter(["cmdline"])
        if str(prepared.folder / "python") in (each.info["cmdline"] or [])
    ]
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in left)


def test_one_that_is_gone_when_it_is_to_run(prepared: Case) -> None:
    found = prepared.run(Interpreter("optimum", prepared.folder / "nowhere", {}))
    assert found.failure is not None
    assert found.failure.endswith("nowhere cannot be run: No such file or directory")


def test_what_is_found_tells_its_versions(prepared: Case) -> None:
    python = prepared.fake_runtime().python
    (found,) = runtimes.find(["onnxruntime-genai"], {"onnxruntime-genai": python})
    assert found == Interpreter("onnxruntime-genai", python, {"onnxruntime-genai": "9.9", "python": "3.99"})


def test_a_python_without_the_package_is_refused() -> None:
    with pytest.raises(
        EnvironmentLacks, match=r"onnxruntime-genai cannot be imported by .*onnxruntime_genai"
    ) as caught:
        runtimes.find(["onnxruntime-genai"], {})
    assert caught.value.hint is not None
    assert "--runtime onnxruntime-genai=ENV/bin/python" in caught.value.hint
    with pytest.raises(EnvironmentLacks, match="optimum-onnx cannot be imported"):
        runtimes.find(["optimum"], {})  # optimum is here, and its part for ONNX Runtime is not


def test_a_python_that_is_none_is_refused(tmp_path: Path, prepared: Case) -> None:
    with pytest.raises(EnvironmentLacks, match="cannot be run: No such file"):
        runtimes.find(["optimum"], {"optimum": tmp_path / "nowhere"})
    with pytest.raises(EnvironmentLacks, match="cannot be run: Permission denied"):
        runtimes.find(["optimum"], {"optimum": tmp_path})
    broken = prepared.fake_runtime(first="Python 2.7")
    with pytest.raises(EnvironmentLacks, match=r'replied with "Python 2\.7", which is no JSON object'):
        runtimes.find(["optimum"], {"optimum": broken.python})


def test_prompts_are_spread_over_documents(prepared: Case) -> None:
    assert PROMPTS > DOCUMENTS
    many = [TokenWindow(f"{i}", np.arange(3)) for i in range(100)]
    chosen = [window.document for window in runtimes.answers.beginnings(many, PROMPTS)]
    assert len(chosen) == PROMPTS
    assert (chosen[0], chosen[-1]) == ("0", "99")


# In place of a Python, as `STAND_IN`, of a server's engine: it says when each of four tokens is there.
SERVER = """#!{python} -S
import json, sys
say = lambda text: (sys.stdout.write(json.dumps(text) + "\\n"), sys.stdout.flush())
say({{"versions": {{"vllm": "9.9"}}}})
for line in sys.stdin:
    asked = json.loads(line)
    if "loaded" in asked:
        say({loaded!r})
    if "prompt" in asked:
        say({{"answer": [token + 1 for token in asked["prompt"]][:asked["tokens"]]}})
    elif "generate" in asked:
        for number in range(1, asked["tokens"] + 1):
            say({{"token": number * {factor}}})
"""


def server(folder: Path, loaded: dict[str, float], factor: int) -> Interpreter:
    python = folder / "python"
    python.write_text(SERVER.format(python=sys.executable, loaded=loaded, factor=factor))
    python.chmod(0o755)
    return Interpreter("vllm", python, {"vllm": "9.9", "python": "3"})


def test_tokens_of_a_server_are_told_as_they_come(tmp_path: Path) -> None:
    with runtimes.opened(tmp_path, VOCABULARY, server(tmp_path, {"loaded_s": 1.5}, 1)) as other:
        assert other.title == "vllm 9.9"
        assert other.loaded_s() == 1.5
        assert [*other.generate(np.zeros((2, 3), np.int64), 4)] == [1, 2, 3, 4]


def test_a_server_that_tells_something_else_is_refused(tmp_path: Path) -> None:
    with runtimes.opened(tmp_path, VOCABULARY, server(tmp_path, {}, 2)) as other:
        with pytest.raises(RunFailed, match="where seconds were expected") as caught:
            other.loaded_s()
        assert caught.value.hint == "remove `latency` of the recipe's validation"
        with pytest.raises(RunFailed, match="where token 1 was expected"):
            list(other.generate(np.zeros((2, 3), np.int64), 4))


def test_a_server_answers(tmp_path: Path) -> None:
    with runtimes.opened(tmp_path, VOCABULARY, server(tmp_path, {}, 1)) as other:
        assert other.answer(np.array([4, 5, 6]), 2) == [5, 6]
        with pytest.raises(RunFailed, match=r"vllm 9\.9: gave no token"):
            other.answer(np.array([4]), 0)
        with pytest.raises(RunFailed, match=f"gave the token id {VOCABULARY}; the vocabulary has {VOCABULARY}"):
            other.answer(np.array([VOCABULARY - 1]), 1)
