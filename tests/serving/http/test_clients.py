"""Clients of others talk to `llmforge serve` as users start both: OpenAI's, LangChain's and LiteLLM's.

Each lives in an environment of its own, for their requirements contradict each other. They lie in a folder of the
user's cache, or in that which LLMFORGE_CLIENTS names; where that is set, or under CI, what is not there is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...models import tool_templates
from ...samples.small_artifact import publish_small

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow

CONVERSATION = Path(__file__).with_name("client_conversation.py")
# Of October 2026, all before their packages required a later certifi than most indexes had.
OPENAI = ("openai==3.54.0", "langchain-openai==1.6.7", "certifi==2026.10.18")
LITELLM = ("litellm==1.104.0", "certifi==2026.10.18")  # which requires openai 2
TALKS = {
    "openai": (OPENAI, "models, whole answers, streams, cancel, tools, structured outputs, errors"),
    "langchain": (OPENAI, "invoke, stream, completions, tools, structured outputs"),
    "litellm": (LITELLM, "completion, stream, tools, structured outputs, errors"),
}


def python_with(packages: tuple[str, ...]) -> Path:
    """Give the interpreter of the environment that has these packages; make it, or skip the test."""
    named = os.environ.get("LLMFORGE_CLIENTS")
    cache = Path(os.environ.get("LLMFORGE_TESTS_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256("\n".join((sys.version, *packages)).encode()).hexdigest()[:12]
    folder = (Path(named) if named else cache / "llmforge") / f"clients-{digest}"
    if not (folder / "ready").exists() and not named and not os.environ.get("CI"):
        pytest.skip(f"set LLMFORGE_CLIENTS to a folder, in which {', '.join(packages)} are installed")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(folder / "environment", ignore_errors=True)
            venv.create(folder / "environment", symlinks=True)
            command = [sys.executable, "-m", "pip", "--python", str(folder / "environment"), "install", "--quiet"]
            done = subprocess.run([*command, *packages], capture_output=True, text=True, timeout=1800)
            assert done.returncode == 0, done.stderr
            (folder / "ready").touch()
    return folder / "environment" / "bin" / "python"


def environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "OPENAI"))}
    return {**kept, **more}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("clients")
    shutil.copytree(sample_checkpoint, folder / "checkpoint")
    (folder / "checkpoint" / "chat_template.jinja").write_text(tool_templates.HERMES)
    artifact = publish_small(folder / "artifacts", folder / "checkpoint", eos=(0,), context=1024)
    command = [sys.executable, "-m", "llmforge", "serve", str(artifact.path), "--port", "0"]
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        opened.callback(server.terminate)
        assert server.stderr is not None
        found = re.search(r"at (http://\S+/v1):", server.stderr.readline())
        assert found
        yield found[1]
        server.terminate()
        assert "Traceback" not in server.stderr.read()
        assert server.wait(60) == 0


@pytest.mark.parametrize("client", TALKS)
def test_a_client_talks(client: str, url: str, tmp_path: Path) -> None:
    packages, steps = TALKS[client]
    command = [python_with(packages), str(CONVERSATION), client, url, "small"]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    talk = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=environ(**offline))
    assert talk.returncode == 0, talk.stdout + talk.stderr
    assert talk.stdout.splitlines() == steps.split(", ")
