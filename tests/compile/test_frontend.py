"""A process of its own for torch: the same configuration, trace and proof, the same errors, and it outlives nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from llmforge.base.errors import CheckpointError, EnvironmentLacks, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.folder import Origin
from llmforge.compile.frontend import Frontend
from llmforge.trace import trace
from llmforge.trace.export import kept_graph

from ..models.checkpoints import write_checkpoint

pytestmark = pytest.mark.thorough


def origin(folder: Path) -> Origin:
    return folder, (), None


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    with Frontend() as made:
        yield made


def test_it_reads_traces_and_proves_as_this_process_does(frontend: Frontend, tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert frontend.configuration(origin(tiny_checkpoint)) == asdict(checkpoint.configuration)
    files = frontend.trace(origin(tiny_checkpoint))
    assert files == kept_graph.dump(trace(checkpoint))
    assert frontend.prove(origin(tiny_checkpoint), files, 1).startswith("trace: logits match transformers within")


def test_it_proves_the_graph_that_it_is_given(frontend: Frontend, tiny_checkpoint: Path) -> None:
    files = frontend.trace(origin(tiny_checkpoint))
    facts = json.loads(files[kept_graph.BINDINGS])
    gate, up = (next(name for name in facts["of"] if f"0.mlp.{part}" in name) for part in ("gate_proj", "up_proj"))
    facts["of"][gate], facts["of"][up] = facts["of"][up], facts["of"][gate]
    with pytest.raises(VerificationError) as raised:
        frontend.prove(origin(tiny_checkpoint), {**files, kept_graph.BINDINGS: json.dumps(facts).encode()}, 1)
    assert "holds other numbers for parameter model.layers.0.mlp" in raised.value.message
    assert "Traceback" in raised.value.__notes__[0]


def test_an_error_crosses_as_it_is(frontend: Frontend, tmp_path: Path, tiny_checkpoint: Path) -> None:
    unknown = tmp_path / "unknown"
    write_checkpoint(unknown)
    settings = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**settings, "model_type": "lama"}))
    with pytest.raises(UnsupportedError) as here:
        Checkpoint.open(unknown)
    with pytest.raises(UnsupportedError) as there:
        frontend.configuration(origin(unknown))
    assert (there.value.message, there.value.hint) == (here.value.message, here.value.hint)
    with pytest.raises(CheckpointError, match="no such folder"):
        frontend.configuration(origin(tmp_path / "nowhere"))
    assert frontend.configuration(origin(tiny_checkpoint))["architecture"] == "LlamaForCausalLM"  # it goes on


def test_that_it_was_killed_is_said(tiny_checkpoint: Path) -> None:
    with Frontend() as frontend:
        frontend.start()
        assert frontend._process is not None
        frontend._process.send_signal(signal.SIGKILL)
        with pytest.raises(EnvironmentLacks, match="ended by SIGKILL") as raised:
            frontend.configuration(origin(tiny_checkpoint))
    assert "memory" in str(raised.value.hint)


def test_it_ends_with_the_block_and_with_the_process_that_started_it() -> None:
    with Frontend() as frontend:
        frontend.start()
        assert frontend._process is not None
        number = frontend._process.pid
    assert not _runs(number)
    code = "import time; from llmforge.compile.frontend import Frontend; f = Frontend(); f.start()\n"
    code += "print(f._process.pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        assert _runs(number)
        parent.kill()
    waited = time.monotonic() + 60
    while _runs(number) and time.monotonic() < waited:
        time.sleep(0.1)
    assert not _runs(number)


def test_a_copy_of_it_traces_and_that_it_was_killed_is_said(tiny_checkpoint: Path) -> None:
    with Frontend() as frontend:
        files = frontend.trace(origin(tiny_checkpoint))
        assert frontend.prove(origin(tiny_checkpoint), files, 1).startswith("trace: logits match transformers within")
        assert frontend._copy_bytes > 0
    with Frontend() as frontend, ThreadPoolExecutor(1) as pool:
        frontend.configuration(origin(tiny_checkpoint))
        assert frontend._process is not None
        asked = pool.submit(frontend.trace, tiny_checkpoint)
        waited = time.monotonic() + 60
        while not (copies := _children(frontend._process.pid)) and time.monotonic() < waited:
            time.sleep(0.001)
        os.kill(copies[0], signal.SIGKILL)
        with pytest.raises(EnvironmentLacks, match="the process that traces the model was ended by SIGKILL"):
            asked.result()


def _children(number: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


@pytest.mark.slow
def test_a_build_without_calibration_leaves_torch_to_it(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"id": "0", "text": "graph engine pass weight " * 40}))
    facts = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": str(tiny_checkpoint),
        "target": "local",
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "calibration": {"data": "texts.jsonl", "samples": 2, "length": 32},
        "passes": [
            "fuse-norms",
            {"quantize-weights": {"bits": 4, "block_size": 32, "method": "rtn", "budget": {"kld_mean": 5.0}}},
        ],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(facts))
    code = "import sys\n{first}from pathlib import Path\nfrom functools import partial\n"
    code += "from llmforge.compile import pipeline\nfrom llmforge.recipe import Recipe\n"
    code += "result = pipeline.build(Recipe.load(Path('tiny.yaml')), Path('{out}'))\n"
    code += "print('torch' in sys.modules, result.path.name)"
    found = {}
    for out, first in (("apart", ""), ("within", "import torch\n")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(first=first, out=out)],
            cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        loaded, name = done.stdout.split()
        found[out] = name
        assert loaded == str(out == "within")
    assert found["apart"] == found["within"]  # the same content


def _runs(number: int) -> bool:
    """Whether there is such a process, other than one that only waits to be asked for its exit code."""
    file = Path(f"/proc/{number}/stat")
    try:
        return file.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
