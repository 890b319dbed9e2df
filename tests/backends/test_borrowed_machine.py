"""The checks of a pack, where neither torch nor a network is, and every call has its limits: packed, sent and run."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ..fakes.borrowed_machine import IMAGE, TREE, BorrowedMachine, Refused

PROGRAM = "benchmarks.verify_gpu.borrowed"
BEYOND_TREE_BYTES = 4 << 20  # so that a pack takes several calls


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TREE))
    monkeypatch.chdir(TREE)


def test_a_pack_is_cut_and_put_together_again(tmp_path: Path):
    from benchmarks.verify_gpu import parts

    archive, content = tmp_path / "archive", bytes(range(250)) * 10
    archive.write_bytes(content)
    uploads = parts.cut(archive, tmp_path / "cut", 1000)
    assert [each.name for each in uploads] == ["upload-1", "upload-2", "upload-3"]
    whole = tmp_path / "whole"
    assert parts.receive(uploads[2], tmp_path / "parts", whole) == ["part-1", "part-2"]
    assert parts.receive(uploads[0], tmp_path / "parts", whole) == ["part-2"]
    assert parts.receive(uploads[1], tmp_path / "parts", whole) == []
    assert whole.read_bytes() == content
    assert not (tmp_path / "parts").exists()
    (uploads[1] / "part-2").write_bytes(bytes(1000))
    parts.receive(uploads[0], tmp_path / "parts", whole)
    parts.receive(uploads[1], tmp_path / "parts", whole)
    with pytest.raises(SystemExit, match="not those of one pack"):
        parts.receive(uploads[2], tmp_path / "parts", whole)
    assert not whole.exists()


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Write device code as a library holds it: kind, compute capability, code."""
    made = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", sm) + bytes(32) + code
        for kind, sm, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(made)) + made


def test_device_code_for_others_becomes_zeros_and_nothing_moves(tmp_path: Path):
    from benchmarks.verify_gpu import slim

    entries = [(2, 80, b"a" * 24), (2, 90, b"b" * 16), (1, 90, b"c" * 8)]
    content = b"host" + fatbin(*entries) + b"code" + fatbin((2, 75, b"d" * 8))
    wanted = b"host" + fatbin((2, 80, bytes(24)), *entries[1:]) + b"code" + fatbin((2, 75, bytes(8)))
    changed = bytearray(content)
    assert slim.slim(changed, 90) == (24, 32)
    assert bytes(changed) == wanted
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("onnxruntime/capi/libonnxruntime_providers_cuda.so", content)
        archive.writestr("onnxruntime/capi/libonnxruntime_providers_tensorrt.so", content)
        archive.writestr("onnxruntime/__init__.py", "")
    slim.unpack(wheel, tmp_path / "site", 90)
    files = {each.name: each.read_bytes() for each in (tmp_path / "site").rglob("*") if each.is_file()}
    assert files == {"libonnxruntime_providers_cuda.so": wanted, "__init__.py": b""}


def test_a_graph_without_weights_says_what_is_to_be_drawn_and_reads_none(tmp_path: Path):
    from benchmarks.verify_gpu import carried, packing

    def read() -> ir.TensorProtocol:
        raise AssertionError("a weight was read")

    big, small = ir.Shape([512, 256]), ir.tensor(np.ones(3, np.float32), name="small")
    tensors = [
        small,
        ir.LazyTensor(read, ir.DataType.BFLOAT16, big, name="floats"),
        ir.LazyTensor(read, ir.DataType.UINT8, big, name="codes"),
    ]
    values = [
        ir.Value(name=each.name, shape=each.shape, type=ir.TensorType(each.dtype), const_value=each) for each in tensors
    ]
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 21})
    model = ir.Model(graph, ir_version=10)
    packing._write_graph(model, tmp_path)
    told = json.loads((tmp_path / carried.WEIGHTS).read_text())
    assert told == [[0, 131072, "UINT8"], [131072, 262144, "BFLOAT16"]]
    engine = tmp_path / "engines" / "8b-bf16" / "engine"
    engine.mkdir(parents=True)
    for name in ("model.onnx", carried.WEIGHTS):
        (tmp_path / name).rename(engine / name)
    (engine.parent / carried.FACTS).write_text('{"kv_bytes_per_token": 1}')
    facts = carried.draw(SimpleNamespace(work=tmp_path), "8b", "bf16")  # type: ignore[arg-type]
    assert facts == {"kv_bytes_per_token": 1, "size_bytes": 393216}
    drawn = {name: each.const_value for name, each in ir.load(engine / "model.onnx").graph.initializers.items()}
    assert drawn["small"].numpy().tolist() == [1, 1, 1]
    floats = drawn["floats"].numpy().astype(np.float32)
    assert np.isfinite(floats).all()
    assert floats.std() == pytest.approx(carried.SPREAD, rel=0.02)
    assert len(np.unique(drawn["codes"].numpy())) == 256


@pytest.mark.parametrize("wrong", ["head", "mass"])
def test_heads_and_masses_that_are_wrong_are_found(wrong: str):
    from benchmarks.verify_gpu import carried
    from llmforge.base.errors import VerificationError
    from llmforge.ir.interface import HEAD, TopLogits, mass_blocks

    random, vocabulary = np.random.default_rng(0), 512
    whole = random.normal(size=(2, vocabulary)).astype(np.float32)
    ids = np.argsort(-whole)[:, :HEAD]
    logits = np.take_along_axis(whole, ids, -1)
    behind = np.where(whole > logits[:, -1:], 0, np.exp(whole - logits[:, :1]))
    masses = behind.reshape(2, *mass_blocks(vocabulary)).sum(-1)
    ones = np.ones(2, np.float32)
    assert carried._check_head(TopLogits(logits, ids, masses, vocabulary), whole, ones) < 1e-5
    if wrong == "head":
        ids[1, 3], ids[1, 4] = ids[1, 4], ids[1, 3]
    else:
        masses[1, 0] += 0.01 * masses[1].max()
    with pytest.raises(VerificationError, match=wrong):
        carried._check_head(TopLogits(logits, ids, masses, vocabulary), whole, ones)


def test_checks_of_a_pack_come_in_the_order_of_what_they_settle():
    from benchmarks.verify_gpu import carried
    from benchmarks.verify_gpu.scale import CARRIED

    steps = carried.plan(CARRIED)
    names = [step.name for step in steps]
    kinds = list(dict.fromkeys(name.partition(":")[0] for name in names))
    assert kinds == ["environment", "provider", "parity", "capture", "heads", "build", "speed", "contexts", "profile"]
    assert {"parity:fp16:llama", "parity:fp16-without-cudnn:llama", "parity:bf16:llama", "parity:int4:llama"} <= set(
        names
    )
    assert {"speed:1:8b:llmforge-bf16", "speed:1:8b:llmforge-int4", "contexts:8b:int4"} <= set(names)
    opens = {step.name for step in steps if "provider" in step.after}
    assert {name for name in names[2:] if not name.startswith(("speed", "contexts", "profile"))} == opens
    assert CARRIED.batches == (1, 64, 256)


class Place:
    """A borrowed machine, and the program on it."""

    def __init__(self, machine: BorrowedMachine, work: Path) -> None:
        self.machine, self.work = machine, work

    def call(self, *arguments: str, **options: Any) -> tuple[int, str]:
        return self.machine.run("-m", PROGRAM, *arguments, "--work", str(self.work), **options)

    def end_within(self, seconds: float) -> None:
        """Return when none of its processes is left."""
        until = time.monotonic() + seconds
        while left := self.machine.processes():
            assert time.monotonic() < until, f"processes {left} are left"
            time.sleep(0.1)

    def begun(self, step: str) -> None:
        """Return when a step was begun."""
        until = time.monotonic() + 120
        while not (self.work / "steps" / f"{step.replace(':', '.')}.began").exists():
            assert time.monotonic() < until, (self.work / "run.log").read_text()
            time.sleep(0.02)


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_rehearsal_goes_well_within_its_limits(tmp_path: Path):
    if subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network can be taken from a process here (unshare -rn)")
    from benchmarks.verify_gpu import packing

    limit = packing.tree_bytes() + packing.SLACK_BYTES + BEYOND_TREE_BYTES
    command = [sys.executable, "-m", "benchmarks.verify_gpu.packing", str(tmp_path / "pack"), "--dry-run"]
    command += ["--no-runtime", "--upload-mib", str(limit / 2**20)]
    packed = subprocess.run(command, cwd=TREE, check=True, capture_output=True, text=True)
    uploads = [Path(line) for line in packed.stdout.split()]
    assert len(uploads) > 1
    machine = BorrowedMachine(tmp_path / "machine", limit, command_s=120, total_s=600)
    place = Place(machine, tmp_path / "machine" / "work")
    with pytest.raises(Refused, match="a call takes"):
        place.call("poll", carry=tmp_path / "pack")  # all at once
    for upload in uploads[1:]:
        assert place.call("receive", upload.name, carry=upload)[1].startswith("waiting for part-1")
    assert place.call("start") == (1, f"error: there is no pack in {place.work}\nhint: receive every upload first\n")
    assert place.call("receive", uploads[0].name, carry=uploads[0]) == (0, "the pack is whole\n")

    assert place.call("start", "--minutes", "9")[0] == 0
    code, said = place.call("start")
    assert (code, said.splitlines()[0]) == (1, "error: the checks are running")
    place.begun("provider")
    assert place.call("poll", "--seconds", "100", limit_s=1)[0] == -signal.SIGKILL  # at its limit; the checks go on
    assert machine.killed
    place.begun("capture")
    os.kill(int((place.work / "pid").read_text()), signal.SIGKILL)
    place.end_within(20)  # its step ends with it
    assert place.call("start", "--minutes", "9")[0] == 0
    code, said = place.call("poll", "--seconds", "100", "--copy", str(machine.out))
    assert code == 0, said
    told = json.loads((machine.out / "gpu-evidence.json").read_text())
    lacking = {name: step["reason"] for name, step in told["steps"].items() if step["status"] != "ok"}
    assert lacking == {"capture": "the whole run was ended while it ran"}, said
    assert set(told["steps"]) == {step.name for step in packing_steps()}
    packages = told["steps"]["environment"]["result"]["packages"]
    assert {name: packages[name] for name in ("torch", "transformers")} == {
        name: IMAGE[name] for name in ("torch", "transformers")
    }
    page = (machine.out / "gpu-evidence.md").read_text()
    assert "**DRY RUN**" in page
    assert "answers equal with guesses and without | 8 of 8" in page
    assert "| tiny:int4 | 96 |" in page
    place.call("start")  # once more: all was done
    assert place.call("poll", "--seconds", "60")[0] == 0
    lines = (machine.out.parent / "work" / "run.log").read_text().splitlines()
    begun = Counter(line.split()[1] for line in lines if line.endswith("…"))
    assert set(begun.values()) == {1}, begun
    place.end_within(5)
    assert machine.home() == []
    assert not list(place.work.glob("content/engines/tiny-*/engine/model.onnx.data"))


def packing_steps() -> list[Any]:
    from benchmarks.verify_gpu import carried
    from benchmarks.verify_gpu.scale import CARRIED_DRY

    return carried.plan(CARRIED_DRY)


def test_a_number_that_another_process_has_now_is_not_taken_for_the_checks(tmp_path: Path):
    from benchmarks.verify_gpu import borrowed

    (tmp_path / "pid").write_text(str(os.getpid()))
    assert borrowed.running(tmp_path) is None
    borrowed.stop(tmp_path)  # ends nothing
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])
    (tmp_path / "pid").write_text(str(process.pid))
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    assert borrowed.running(tmp_path) == process.pid
    process.kill()
    process.wait()
    assert borrowed.running(tmp_path) is None
