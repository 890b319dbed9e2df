"""What the program that verifies a GPU does on one alone, over stand-ins: its clocks, its tables, its pack."""

from __future__ import annotations

import dataclasses
import json
import sys
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.base.errors import EnvironmentLacks, VerificationError
from llmforge.runtime.config import FILE, MODEL_FILE, RuntimeConfig

from ..fakes.host_device import HostDevice

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)


class Clock:
    """Stands for `time` in a module: `perf_counter` gives what `pass_by` added up to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_every_table_of_the_evidence_has_its_figures() -> None:
    from benchmarks.verify_gpu import evidence
    from benchmarks.verify_gpu.runner import Outcome
    from benchmarks.verify_gpu.scale import CARRIED

    logits = {"largest_difference": 0.0123, "kld_mean": 0.00345, "same_first_choice": 0.985}
    taken = {"capture": {"batch": 8, "length": 1024}, "reason": None, "eager_ms": 1.5, "replay_ms": 0.5}
    failed = {"capture": {"batch": 4, "length": 64}, "reason": "it fails", "eager_ms": 1.0, "replay_ms": None}
    kernels = {"prefill": ["CUDNN", "FLASH"], "decode": ["XQA"]}
    made = {
        "environment": {
            "device": "GPU", "sm": 90, "memory_bytes": 80_000_000_000, "copy_gb_per_s": 2500.4,
            "data_sheet_gb_per_s": None, "driver": "580, 700 W", "target": "h100-sxm", "python": "3.12.1",
            "packages": {"numpy": "2.3", "torch": "2.11"},
        },
        "attention:a": {"found": {"prefill": ["FLASH"], "decode": ["XQA"]}, "expected": kernels, "as_expected": True},
        "attention:b": {"found": {"prefill": [], "decode": ["FLASH"]}, "expected": kernels, "as_expected": False},
        "parity:fp16:llama": logits,
        "tensorrt": {**logits, "recordings": [{**taken, "memory_bytes": 2_000_000}]},
        "capture": {"planned": 1, "recordings": [{**taken, "memory_bytes": 3_000_000}]},
        "capture:slots": {"planned": 1, "recordings": [{**failed, "memory_bytes": 0}]},
        "heads": {"masses_error": 2.5e-5, "guessed": 31, "tokens": 32, "same_answers": 7, "answers": 8},
        "calibration": {
            "codes_equal": 0.9975, "kld_mean": {"cpu": 0.02, "device": 0.021}, "seconds": {"cpu": 12.0, "device": 1.25},
            "said_bytes": 96_000_000, "taken_bytes": 88_000_000,
        },
        "contexts:8b:int4": {"step_s": {"2048": 0.004, "8000": 0.0055}},
        "ranks": {
            **logits, "nccl": None, "decode_ms@8": 1.234, "killed": {"said": "rank 1 ended", "after_s": 0.26},
            "notes": [],
        },
        "profile": {
            "rows": 256, "whole_s": 2.0, "nvtx": False,
            "parts": {"step": {"calls": 9, "total_s": 1.5, "median_s": 0.0071}},
        },
    }  # fmt: skip
    outcomes = {name: Outcome("ok", 1.0, found) for name, found in made.items()}
    outcomes["provider"] = Outcome("not run", reason="environment did not go well")
    page = evidence.render(outcomes, CARRIED)
    for line in (
        "| device | GPU, compute capability 90 |",
        "| memory | 80.0 GB |",
        "| copy bandwidth, read and written | 2500 GB/s |",
        "| bandwidth of its data sheet | – |",
        "| driver, power limit | 580, 700 W |",
        "| torch | 2.11 |",
        "| a | FLASH (CUDNN or FLASH) | XQA (XQA) | yes |",
        "| b | nothing (CUDNN or FLASH) | FLASH (XQA) | **no** |",
        "| fp16:llama | 0.012 | 0.0034 | 98.5% |",
        "| tensorrt (sample checkpoint) | 0.012 | 0.0034 | 98.5% |",
        "| ranks (sample checkpoint) | 0.012 | 0.0034 | 98.5% |",
        "| capture | 8 | 1024 | captured | 1.50 | 0.50 | 3.0 |",
        "| capture:slots | 4 | 64 | it fails | 1.00 | – | 0.0 |",
        "| tensorrt | 8 | 1024 | captured | 1.50 | 0.50 | 2.0 |",
        "| largest error of a mass, of the largest of its row | 2.5e-05 |",
        "| tokens that the device guessed | 31 of 32 |",
        "| answers equal with guesses and without | 7 of 8 |",
        "## Calibration of the sample: 99.8% of the codes are equal, 96 MB are said",
        "| cpu | 0.0200 | 12.0 | – |",
        "| device | 0.0210 | 1.2 | 88 |",
        "| 8b:int4 | 2048 | 4.00 |",
        "| 8b:int4 | 8000 | 5.50 |",
        "| NCCL | – |",
        "| decode step of 8 rows, ms | 1.23 |",
        "| a rank that was killed | rank 1 ended; told after 0.3 s |",
        "## Where the host's time goes, 256 rows; NVTX ranges not marked: the package nvtx is not installed",
        "| step | 9 | 7.100 | 75% |",
        "| provider | not run | environment did not go well |",
    ):
        assert line in page.splitlines(), line
    assert "DRY RUN" not in page


def test_the_copy_bandwidth_is_what_was_read_and_written_in_the_median_copy_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.verify_gpu import checks
    from benchmarks.verify_gpu.scale import GPU

    seconds = iter([9.0, *[0.5] * 4, 0.001, *[0.25] * 5])
    clock = Clock(monkeypatch, checks)

    class Device(HostDevice):
        sm = 90

        def copy(self, copies: Any) -> None:
            super().copy(copies)
            clock.pass_by(next(seconds))

    monkeypatch.setattr(checks.place, "device", lambda scale: Device())
    monkeypatch.setattr(checks.shutil, "which", lambda name: f"/bin/{name}")
    asked: list[Any] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="580.1, 700.00 W\n")

    monkeypatch.setattr(checks.subprocess, "run", run)
    found = checks.machine(dataclasses.replace(GPU, copy_bytes=1 << 20), "h100-sxm", 3350.0)
    assert found["copy_gb_per_s"] == 2 * (1 << 20) / 0.25 / 1e9
    assert (found["sm"], found["target"], found["data_sheet_gb_per_s"]) == (90, "h100-sxm", 3350.0)
    assert found["driver"] == "580.1, 700.00 W"
    assert asked == [["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]]
    assert found["packages"]["numpy"] == np.__version__
    assert "tensorrt-llm" not in found["packages"]


class FakeVllm(ModuleType):
    """A module that takes 0.1 s a prompt and 0.01 s a token of each row, and twice as long where it samples."""

    __version__ = "1.2"

    def __init__(self, clock: Clock) -> None:
        super().__init__("vllm")
        self.__spec__ = ModuleSpec("vllm", None)
        self.made: dict[str, Any] = {}
        self.SamplingParams = SimpleNamespace

        def generate(prompts: list[Any], sampling: Any, use_tqdm: bool) -> None:
            assert sampling.ignore_eos
            clock.pass_by(0.1 + 0.01 * len(prompts) * sampling.max_tokens * (1 + (sampling.temperature == 1.0)))

        def llm(**options: Any) -> SimpleNamespace:
            self.made = options
            clock.pass_by(30)
            return SimpleNamespace(generate=generate)

        self.LLM = llm


def test_vllms_steps_are_told_from_its_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.verify_gpu import speed
    from benchmarks.verify_gpu.scale import DRY, GPU

    module = FakeVllm(Clock(monkeypatch, speed))
    monkeypatch.setitem(sys.modules, "vllm", module)
    found = speed.vllm(tmp_path, GPU)
    assert found["load_s"] == 30
    assert found["vllm"] == "1.2"
    assert list(found["ttft_s"]) == ["512", "2048"]
    assert all(each == pytest.approx(0.11) for each in found["ttft_s"].values())
    for kind, token_s in (("greedy", 0.01), ("sampled", 0.02)):
        assert {rows: each / token_s for rows, each in found["tpot_s"][kind].items()} == pytest.approx(
            {"1": 1, "8": 8, "64": 64}
        )
    assert module.made == {
        "model": str(tmp_path), "dtype": "bfloat16", "max_model_len": GPU.max_context, "max_num_seqs": 64,
        "enable_prefix_caching": False,
    }  # fmt: skip
    with pytest.raises(EnvironmentLacks, match="vLLM is not installed"):
        speed.vllm(tmp_path, DRY)


def run_of(monkeypatch: pytest.MonkeyPatch, work: Path) -> Any:
    """A run on a GPU, whose engines are built of nothing; gives what was asked of `subjects.build`, too."""
    from benchmarks.verify_gpu import checks, opening, place, speed, subjects
    from benchmarks.verify_gpu.scale import GPU
    from benchmarks.verify_gpu.steps import Run

    built: list[tuple[Any, ...]] = []

    def build(checkpoint: Path, folder: Path, precision: str, chosen: Any, **options: Any) -> dict[str, Any]:
        built.append((checkpoint, folder.name, precision, chosen.name, options))
        return {"size_bytes": 77}

    @dataclasses.dataclass
    class Recording:
        reason: str | None

    session = SimpleNamespace(allocate=lambda batch, capacity: (batch, capacity), capture_results=[Recording("none")])
    monkeypatch.setattr(subjects, "build", build)
    monkeypatch.setattr(subjects, "reference", lambda *_: SimpleNamespace(vocabulary=50, wanted=True))
    monkeypatch.setattr(opening, "open_engine", lambda *_: session)
    monkeypatch.setattr(speed, "decode", lambda own, cache, rows, context, tokens: 0.25 * (cache == (8, 128)))
    monkeypatch.setattr(place.devices, "CudaDevice", lambda: pytest.fail("the target was named"))
    return checks, opening, Run(GPU, work, "h100-sxm"), built


def test_a_plan_is_built_held_against_fp32_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.verify_gpu import subjects

    checks, opening, run, built = run_of(monkeypatch, tmp_path)
    off = [0.125]

    def logits(backend: Any, ids: Any, capacity: int) -> Any:
        assert (ids < 50).all()
        return np.eye(4, dtype=np.float32) + (0 if hasattr(backend, "wanted") else off[0])

    monkeypatch.setattr(opening, "all_logits", logits)
    found = checks.plans(run, "tensorrt-rtx")
    assert built == [
        (subjects.SAMPLE, "tensorrt-rtx", "fp16", "h100-sxm",
         {"max_batch": 8, "max_context": 128, "backend": "tensorrt-rtx"}),
    ]  # fmt: skip
    told = {name: found[name] for name in ("largest_difference", "size_bytes", "decode_ms@8", "recordings")}
    assert told == {
        "largest_difference": 0.125, "size_bytes": 77, "decode_ms@8": 250.0, "recordings": [{"reason": "none"}],
    }  # fmt: skip
    off[0] = 0.25  # more than 0.2
    with pytest.raises(VerificationError, match=r"differ by up to 0.25, and 0.2 is allowed"):
        checks.plans(run, "tensorrt-rtx")


def test_ranks_want_a_gpu_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks, _, run, built = run_of(monkeypatch, tmp_path)
    monkeypatch.setattr(checks.devices, "count", lambda: 1)
    with pytest.raises(EnvironmentLacks, match="2 ranks take one GPU each, and there is 1"):
        checks.ranks(run)
    assert not built


def test_a_wheel_is_asked_for_by_the_python_of_the_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.verify_gpu import slim

    asked: list[str] = []

    def run(command: list[str], check: bool) -> None:
        assert check
        asked.extend(command)
        for name in ("b.whl", "a.whl", "a.txt"):
            (tmp_path / "wheels" / name).touch()

    monkeypatch.setattr(slim.subprocess, "run", run)
    found = slim.download(["onnxruntime-gpu==1", "jinja2"], tmp_path / "wheels", "3.12")
    assert [each.name for each in found] == ["a.whl", "b.whl"]
    assert asked[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "manylinux_2_28_x86_64"} <= set(asked)
    assert asked[-6:] == ["--python-version", "3.12", "-d", str(tmp_path / "wheels"), "onnxruntime-gpu==1", "jinja2"]


def test_a_pack_has_the_runtime_for_its_target_and_each_upload_fits_beside_the_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.verify_gpu import packing, slim

    def pack(content: Path, scale: Any, chosen: Any) -> None:
        content.mkdir()
        (content / "noise").write_bytes(np.random.default_rng(0).bytes(2 << 20))
        (content / "pack.json").write_text(f"{scale.dry} {chosen.name}")

    wheel, unpacked = tmp_path / "a.whl", []
    monkeypatch.setattr(packing, "pack", pack)
    monkeypatch.setattr(slim, "download", lambda wanted, folder, python: [Path(f"{python} {' '.join(wanted)}"), wheel])
    monkeypatch.setattr(slim, "unpack", lambda each, site, sm: unpacked.append((str(each), site.name, sm)))
    tree = packing.tree_bytes()
    limit = (tree + packing.SLACK_BYTES) / 2**20 + 1
    options = ["packing", str(tmp_path / "pack"), "--target", "l4", "--wheel", "jinja2", "--upload-mib"]
    monkeypatch.setattr(sys, "argv", [*options, str(limit)])
    packing.main()
    wanted = f"3.12 onnxruntime-gpu=={packing.cuda.VERSION} jinja2"
    assert unpacked == [(wanted, "site", 89), (str(wheel), "site", 89)]
    uploads = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [each.name for each in uploads] == ["upload-1", "upload-2", "upload-3"]
    sizes = [sum(file.stat().st_size for file in each.iterdir()) for each in uploads]
    assert max(sizes) + tree < limit * 2**20
    monkeypatch.setattr(sys, "argv", [*options, str(tree / 2**20)])
    with pytest.raises(SystemExit, match="the tree alone takes"):
        packing.main()


@pytest.mark.thorough
def test_the_engines_of_a_pack_for_a_gpu_are_those_that_its_provider_takes(tmp_path: Path) -> None:
    """Small ones with weights and the CPU's logits, large ones as graphs that are filled there."""
    from benchmarks.verify_gpu import carried, packing
    from benchmarks.verify_gpu.scale import CARRIED, TINY, Model
    from benchmarks.verify_gpu.steps import Run

    shape = {**TINY, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
    scale = dataclasses.replace(CARRIED, models={"8b": Model(shape, ("int4",))}, parity={"int4": ("llama",)})
    content = tmp_path / "content"
    packing.pack(content, scale, targets.load("h100-sxm"))
    assert json.loads((content / carried.PACK).read_text())["data_sheet_gb_per_s"] == 3350
    names = {each.name for each in (content / "engines").iterdir()}
    assert names == {"int4-llama", "fp16-llama-slots", "heads", "8b-int4"}
    configs = {name: RuntimeConfig.read(content / "engines" / name / "engine" / FILE) for name in names}
    assert {config.provider for config in configs.values()} == {"cuda"}
    assert {name for name, config in configs.items() if config.kv_blocks is not None} == {"int4-llama", "8b-int4"}
    assert configs["8b-int4"].max_batch == 256
    assert all(config.graphs is not None and config.graphs.captures for config in configs.values())
    with np.load(content / "engines" / "int4-llama" / carried.EXPECTED) as wanted:
        assert np.isfinite(wanted["logits"]).all()
        assert wanted["logits"].shape[0] == wanted["ids"].shape[1]
    large = content / "engines" / "8b-int4" / "engine"
    assert not (large / "model.onnx.data").exists()
    facts = carried.draw(Run(scale, content, None), "8b", "int4")
    drawn = ir.load(large / MODEL_FILE)
    codes = [value for value in drawn.graph.initializers.values() if value.dtype == ir.DataType.UINT8]
    assert codes
    assert facts["size_bytes"] == (large / "model.onnx.data").stat().st_size
    assert {each.op_type for each in drawn.graph} >= {"PagedAttention", "MatMulNBits", "TopK"}


def test_a_wheel_for_no_device_keeps_all_its_code(tmp_path: Path) -> None:
    from benchmarks.verify_gpu import slim

    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("own/library.so", slim.MAGIC + bytes(64))
    slim.unpack(tmp_path / "a.whl", tmp_path / "site", None)
    assert (tmp_path / "site" / "own" / "library.so").read_bytes() == slim.MAGIC + bytes(64)
