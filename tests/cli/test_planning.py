"""`llmforge plan` through its runner: tables, JSON, plots, and the message and exit code of each mistake."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import llmforge
from llmforge import targets
from llmforge.base.errors import RecipeError
from llmforge.cli import cli
from llmforge.doctor import kept
from llmforge.measure import ceilings, rates
from llmforge.measure import machine as machines
from llmforge.measure.ceilings import CpuCeilings
from llmforge.measure.rates import MachineRates
from llmforge.metrics.units import times
from llmforge.planning import building, plot, render, request
from llmforge.planning.fleet import sizing
from llmforge.runtime.config import FORMAT, RuntimeConfig, SessionOptions
from llmforge.runtime.signature import CacheInput

from ..models.shapes import PUBLIC
from ..samples import stored

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
MACHINE = """\
title: a machine
like: cpu-avx2
kind: cpu
isa: avx2
cores: 4
memory_gb: {value: 16, source: measured, verified: true}
bandwidth_gbs: {value: 40, source: measured, verified: true}
rates:
  fp32: {value: 0.4, source: measured, verified: true}
  int8: {value: 0.8, source: measured, verified: true}
engines: [onnxruntime]
"""


def invoke(*args: str | Path) -> Result:
    result = CliRunner().invoke(cli, ["plan", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLIC["llama-3.1-8b"]))
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "here.yaml"
    path.write_text(MACHINE)
    return path


def facts(*args: str | Path) -> Any:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_one_target_shows_everything(llama: Path) -> None:
    result = invoke(llama, "--target", "H200", "--batch", "4")
    assert result.exit_code == 0
    for expected in (
        "llama-3.1-8b on NVIDIA H200 SXM, tensorrt",
        "8.03 B parameters, 32 layers, context of 131,072 tokens",
        "Memory per device", "16.1 GB", "131 kB",
        "Largest batch by context",
        "batch 4", "prefill", "memory", "compute",
        "Tensor parallelism",
        "Effect of passes", "quantize-weights, bits: 4", "no fp4 arithmetic",
        "the device does 206 operations per byte",
        "per million input tokens", "at $4.00 per hour",
        "of CPU time",
        "assumed: bandwidth 0.85: fitted to",
        "basis of fuse-norms; pack-qkv; pack-gate-up: 3 µs for each kernel",
        "basis of quantize-channels, dtype: int8; quantize-channels, dtype: fp8; quantize-weights, bits: 4: ",
        "NVIDIA AIConfigurator, systems/h200_sxm.yaml",
    ):  # fmt: skip
        assert expected in result.stdout
    assert result.stderr == ""


def test_several_targets_are_set_side_by_side(llama: Path) -> None:
    result = invoke(llama, "--target", "h200", "--target", "rtx-4090", "--target", "gb200", "--batch", "8")
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == 2 * ["h200", "rtx-4090", "gb200"]  # speed, then size and cost
    assert "–" in rows[5]  # no price is known
    assert "8 concurrent sequences, 1,024 prompt tokens, 256 output tokens" in result.stdout


def test_a_refused_target_is_a_row_beside_others(llama: Path) -> None:
    asked = ("--target", "t4", "--target", "b200", "--engine", "onnxruntime")
    result = invoke(llama, *asked)
    assert result.exit_code == 0
    rows = [line.split("│")[1:3] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows if "b200" in row[0]] == 2 * [["b200", "refused"]]
    assert "b200: target b200 (NVIDIA B200 (HGX, 1000 W)) cannot load engines of onnxruntime" in result.stdout
    planned, refused = facts(llama, *asked)
    assert (planned["target"], refused["target"]) == ("t4", "b200")
    assert "SM 10.0" in refused["refused"]
    alone = invoke(llama, "--target", "b200", "--target", "gb200", "--engine", "onnxruntime")
    assert (alone.exit_code, alone.stdout) == (6, "")


@pytest.mark.parametrize("targets_", [["h200"], ["h200", "t4", "b200", "rtx-4090"]])
def test_80_columns_cut_nothing_off(llama: Path, targets_: list[str]) -> None:
    planned = request.answer(llama, request.PlanRequest(targets=tuple(targets_), backend=None, batch=16))
    first = planned[0]
    assert isinstance(first, render.Planned)
    shown = render.details(first) if len(planned) == 1 else render.comparison(planned)
    console = Console(width=80, file=StringIO())
    console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for name in ("TTFT", "TPOT", "tok/s", "MBU", "bound by", "fits"):
        assert name in text


def test_long_times_are_in_seconds_and_minutes(llama: Path) -> None:
    shown = invoke(llama, "--target", "t4", "--prompt", "120000").stdout
    assert re.search(r"prefill +│ +[\d.]+ (s|min \d\d s) │", shown) is not None
    assert re.search(r"\d,\d{3} ms", shown) is None


def test_ratios_of_passes_are_above_1_where_they_are_better(llama: Path) -> None:
    passes = {each["change"]: each for each in facts(llama, "--target", "h200")["passes"]}
    row = passes["quantize-weights, bits: 4"]
    shown = invoke(llama, "--target", "h200").stdout
    line = next(line for line in shown.splitlines() if "quantize-weights, bits: 4" in line and "pays" in line)
    decode, prefill, rate = (cell.strip() for cell in line.split("│")[3:6])
    assert decode == times(1 / row["tpot"])
    assert prefill == times(1 / row["ttft"])
    assert rate == times(row["tokens_per_second"])
    assert row["tpot"] < 1 < row["tokens_per_second"]


def test_json_holds_what_the_tables_show(llama: Path) -> None:
    plan = facts(llama, "--target", "h200", "--batch", "8", "--price", "3")
    assert plan["model"]["parameters"] == 8_030_261_248
    assert plan["memory"]["kv_per_token"] == 131072
    assert plan["memory"]["fits"] is True
    asked = next(each for each in plan["decode"] if each["batch"] == 8)
    assert asked["bound"] == "memory"
    assert 0.5 < asked["mbu"] < 0.7
    assert plan["cost"]["usd_per_hour"] == 3
    assert plan["cost"]["per_million_out"] == pytest.approx(asked["seconds"] / 8 * 1e6 * 3 / 3600)
    assert [each["ranks"] for each in plan["tensor_parallel"]] == [1, 2, 4, 8]
    assert plan["ops_per_byte"] == pytest.approx(989e12 / 4800e9)
    assert {each["change"] for each in plan["passes"]} >= {"flash-attention", "quantize-kv-cache, bits: 8"}
    assert plan["assumptions"]["bandwidth"]["source"]
    assert plan["build"]["cpu_s"] > 0
    assert [each["target"] for each in facts(llama, "--target", "l4", "--target", "t4")] == ["l4", "t4"]


def test_a_recipe_is_planned_at_its_ranks(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"schema: 1\nname: r\ncheckpoint: {llama}\ntarget: h100-sxm\n"
        "engine: {max_context: 4096, max_batch: 8, tensor_parallel: 4}\n"
        "passes: [lower-precision: {dtype: fp16, budget: {kld_mean: 1}}]\n"
        "calibration: {data: none.jsonl, samples: 1, length: 16}\n"
    )
    plan = facts(recipe)
    each = next(each for each in plan["tensor_parallel"] if each["ranks"] == plan["ranks"] == 4)
    assert plan["memory"]["weights"] == each["weights"]
    assert each["kv_cache"] == 8 * (1024 + 256) * 131072 // 4
    assert each["sent_bytes_per_token"] == 3 / 4 * 2 * (2 * 2 * 32 * 4096 + 128256)
    assert facts(recipe, "--tp", "2")["ranks"] == 2
    assert "sent a token" in invoke(recipe).stdout


@pytest.mark.parametrize(
    ("options", "workload"),
    [
        ((), (1024, 256)),
        (("--context", "4096"), (3840, 256)),
        (("--context", "512"), (384, 128)),
        (("--context", "4096", "--prompt", "4000"), (4000, 96)),
        (("--context", "4096", "--output", "1000"), (3096, 1000)),
        (("--prompt", "10"), (10, 256)),
        (("--prompt", "10", "--output", "20"), (10, 20)),
    ],
)
def test_prompt_and_answer(llama: Path, options: tuple[str, ...], workload: tuple[int, int]) -> None:
    asked = facts(llama, "--target", "h200", *options)["workload"]
    assert (asked["prompt"], asked["output"]) == workload


def test_dtypes_of_the_command_line(llama: Path) -> None:
    plan = facts(llama, "--target", "h200", "--engine", "onnxruntime", "--dtype", "fp16", "--weights", "int4",
                 "--kv", "int8", "--tp", "2")  # fmt: skip
    assert (plan["scheme"]["compute"], plan["scheme"]["weights"], plan["scheme"]["kv"]) == ("fp16", "int4", "int8")
    assert (plan["ranks"], plan["backend"]) == (2, "onnxruntime")


def test_a_recipe_says_what_to_plan(machine: Path) -> None:
    plan = facts(ROOT / "recipes" / "quickstart.yaml", "--target", machine)
    assert plan["scheme"] == {
        "compute": "fp32", "weights": "int4", "kv": "int8", "product": "int8", "embedding": "int6", "block": 32,
        "symmetric": False, "minimums": False, "head": None, "cache": None, "scale": "int8",
        "instructions": 1.0,
    }  # fmt: skip
    assert plan["workload"] == {"prompt": 768, "output": 256, "batch": 8}
    assert plan["target"] == "here"
    assert plan["model"]["context"] == 1024
    four = facts(ROOT / "recipes" / "quickstart.yaml", "--target", machine, "--kv", "int4")
    assert four["scheme"]["cache"]["values"] == {"dtype": "int4", "scale": "token", "hadamard": False}
    assert four["memory"]["kv_per_token"] == 6 * 4 * 2 * (16 + 4)
    kernels = next(each for each in plan["passes"] if each["change"] == "cpu-kernels")
    assert (kernels["verdict"], kernels["tpot"]) == ("not known", None)  # the file does not say what kernels reach
    rtn = facts(ROOT / "recipes" / "int4-rtn.yaml", "--target", machine)
    calibrates = [any(each["title"] == "Calibrate" for each in made["build"]["stages"]) for made in (plan, rtn)]
    assert calibrates == [True, False]
    fp32 = facts(ROOT / "recipes" / "fp32.yaml", "--target", machine)
    assert fp32["memory"]["weights"] > 4 * plan["memory"]["weights"]


def test_a_recipe_for_tensorrt_keeps_its_passes_in_mind() -> None:
    plan = facts(ROOT / "recipes" / "llama-rtx4090-tensorrt-fp8.yaml")
    assert (plan["target"], plan["backend"]) == ("rtx-4090", "tensorrt-rtx")
    dtypes = plan["scheme"]
    assert (dtypes["compute"], dtypes["weights"], dtypes["head"], dtypes["embedding"]) == ("fp16", "fp8", "fp8", "fp16")
    assert dtypes["product"] == "fp16"
    layers, table = 6_821_888 - 8192 * 256, 8192 * 256
    assert plan["memory"]["weights"] == pytest.approx(layers + table + 2 * table, rel=0.01)
    shown = invoke(ROOT / "recipes" / "llama-rtx4090-tensorrt-fp8.yaml").stdout
    assert "fp16 activations, weights fp8, embedding fp16, cache fp16, fp16 matmul" in shown


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Let measurements be made up, say how many there were, and how many cores others took meanwhile."""
    others: list[float] = []

    def measure(threads: int, told: Any) -> CpuCeilings:
        others.append(1.3 if not others else 0.1)
        rates, kernels = {"fp32": 2e11, "int8": 8e11}, {"fp32": "x", "int8": "y"}
        return CpuCeilings({threads: 40e9}, rates, kernels, {}, threads, others[-1])

    monkeypatch.setattr(ceilings, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return others


def test_this_machine_is_measured_once(measured: list[float]) -> None:
    recipe = ROOT / "recipes" / "fp32.yaml"
    busy = invoke(recipe)
    assert busy.exit_code == 0
    assert "measuring this machine, once" in busy.stderr
    assert "other processes used 1.3 cores meanwhile: an idle machine is faster; `llmforge doctor" in busy.stderr
    assert "unverified figures" in busy.stdout
    again = invoke(recipe)  # kept, and marked
    assert (again.stderr, again.stdout) == ("", busy.stdout)
    assert len(measured) == 1


def test_a_checkpoint_is_planned_for_this_machine(measured: list[float], llama: Path) -> None:
    here = invoke(llama)
    assert here.exit_code == 0, here.stderr
    assert invoke(llama, "--target", "local").stdout == here.stdout
    assert str(llmforge.plan(llama)) == str(llmforge.plan(llama, target="local"))  # of what was kept
    assert len(measured) == 1


def test_doctor_measures_again_and_keeps_what_was_in_nobodys_way(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = ROOT / "recipes" / "fp32.yaml"
    assert "unverified figures" in invoke(recipe).stdout
    doctor = CliRunner().invoke(cli, ["doctor", "--measure"])
    assert doctor.exit_code == 0, doctor.output
    quiet = invoke(recipe)
    assert "unverified" not in quiet.stdout
    assert len(measured) == 2
    measured.clear()  # busy again: replaces nothing better
    assert CliRunner().invoke(cli, ["doctor", "--measure"]).exit_code == 0
    assert measured == [1.3]
    assert invoke(recipe).stdout == quiet.stdout


def test_a_machine_is_known_by_its_processor_and_memory() -> None:
    here = machines.describe()
    other_python = {"python": "3.0", "os": "Linux 1.0", "memory_bytes": here.memory_bytes + 4096}
    assert kept.file(here.model_copy(update=other_python)) == kept.file(here)
    for changed in ({"cpu": "another"}, {"cores": 99}, {"isa": ()}, {"memory_bytes": 2 * here.memory_bytes}):
        assert kept.file(here.model_copy(update=changed)) != kept.file(here)


def test_a_damaged_file_of_this_machine_is_measured_again(measured: list[float], tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "fp32.yaml"
    invoke(recipe)
    [file] = (tmp_path / "home" / "llmforge" / "machines").iterdir()
    file.write_text(file.read_text()[:40])
    assert invoke(recipe).exit_code == 0
    assert len(measured) == 2
    assert invoke(recipe).stderr == ""


def test_what_cannot_be_kept_is_measured_each_time(measured: list[float], tmp_path: Path) -> None:
    (tmp_path / "home" / "llmforge").mkdir(parents=True)
    (tmp_path / "home" / "llmforge" / "machines").write_text("a file where the folder would be")
    for _ in range(2):
        assert invoke(ROOT / "recipes" / "fp32.yaml").exit_code == 0
    assert len(measured) == 2


def test_another_cpu_says_how_to_measure_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "detect", lambda: targets.Isa.AVX2)
    result = invoke(llama, "--target", "cpu-amx")
    assert result.exit_code == 2
    assert "has no memory bandwidth" in result.stderr
    assert "llmforge doctor --measure --write machine.yaml" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--target", "h100"), 2, "'h100' is ambiguous: h100-pcie, h100-sxm"),
        (("--target", "a100"), 2, "a100-40, a100-80"),
        (("--target", "h20"), 2, "did you mean"),
        (("--target", "absent.yaml"), 2, "absent.yaml: cannot be read"),
        (("--target", "h200", "--engine", "tensorrt-rtx"), 6, "TensorRT-RTX 1.7 has no target SM 9.0"),
        (("--target", "b200", "--engine", "onnxruntime"), 6, "holds neither code for SM 10.0 nor PTX"),
        (("--target", "a100-80", "--weights", "fp8"), 6, "no fp8 arithmetic"),
        (("--target", "h200", "--products", "fp4"), 6, "cannot multiply in fp4"),
        (("--target", "h200", "--tp", "3"), 6, "cannot be split over 3"),
        (("--target", "h200", "--prompt", "140000"), 2, "exceed the context of llama-3.1-8b, 131072"),
        (("--target", "h200", "--context", "9", "--prompt", "9"), 2, "leaves no tokens"),
        (("--target", "h200", "--context", "9", "--prompt", "3", "--output", "6"), 2, "give at most two of"),
        (("--target", "h200", "--plot", "roof.png"), 2, "the name must end in .svg or .html"),
        (("--target", "h200", "--weights", "int3"), 2, "Invalid value for '--weights'"),
        (("--target", "h200", "--batch", "0"), 2, "Invalid value for '--batch'"),
    ],
)
def test_each_mistake_has_one_message(llama: Path, options: tuple[str, ...], code: int, says: str) -> None:
    result = invoke(llama, *options)
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert result.stdout == ""


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    result = invoke(tmp_path, "--target", "h200")
    assert result.exit_code == 5
    assert "no config.json" in result.stderr


# the plot


def drawn(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text())


def test_the_roofline_is_drawn(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "roof.svg"
    result = invoke(llama, "--target", "h200", "--plot", path)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, str(path))
    tree = drawn(path)
    circles = [each for each in tree.iter(f"{SVG}circle") if each.find(f"{SVG}title") is not None]
    assert [each.get("class") for each in circles] == ["decode"] * 9 + ["prefill"]
    peak, reached = (
        [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
        for line in tree.iter(f"{SVG}polyline")
    )
    assert reached[1][1] > peak[1][1]  # downwards: lower
    assert peak[1][1] == peak[2][1]  # level beyond the ridge
    for circle in circles:  # no step is above what the device can do
        x, y = float(circle.get("cx") or 0), float(circle.get("cy") or 0)
        (x0, y0), (x1, y1) = peak[0], peak[1]
        roof = y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x < x1 else y1
        assert y >= roof - 0.2
        assert 80 <= x <= 790
        assert 62 <= y <= 368
    assert "llama-3.1-8b on NVIDIA H200 SXM" in "".join(tree.itertext())


def test_several_targets_share_a_page(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "roof.html"
    assert invoke(llama, "--target", "h200", "--target", "t4", "--plot", path).exit_code == 0
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert text.count("<polyline") == 4
    assert "NVIDIA T4" in text
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_names_are_escaped_in_a_plot(tmp_path: Path) -> None:
    folder = tmp_path / "<b>&"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLIC["llama-2-7b"]))
    path = tmp_path / "roof.svg"
    assert invoke(folder, "--target", "h200", "--plot", path).exit_code == 0
    assert "<b>& on NVIDIA H200 SXM" in "".join(drawn(path).itertext())


def test_a_plot_that_cannot_be_written(llama: Path, tmp_path: Path) -> None:
    result = invoke(llama, "--target", "h200", "--plot", tmp_path / "absent" / "roof.svg")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_every_target_with_figures_can_be_drawn(llama: Path, tmp_path: Path) -> None:
    names = [name for name in targets.names() if not name.startswith("cpu-")]
    path = tmp_path / "all.svg"
    assert invoke(llama, *(part for name in names for part in ("--target", name)), "--plot", path).exit_code == 0
    assert len(list(drawn(path).iter(f"{SVG}polyline"))) == 2 * len(names)
    assert plot.SUFFIXES == (".svg", ".html")


def test_known_families_cost_no_torch(llama: Path) -> None:
    code = (
        "import sys\nfrom llmforge.cli import cli\n"
        f"cli(['plan', {str(llama)!r}, '--target', 'h200'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# the documentation


def test_the_examples_of_the_documentation_run(llama: Path, machine: Path, tmp_path: Path, few: None) -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    commands = [
        line.removeprefix("$ llmforge plan ") for line in text.splitlines() if line.startswith("$ llmforge plan")
    ]
    assert len(commands) == 12
    trace = tmp_path / "arrivals.jsonl"
    trace.write_text("".join(f'{{"at_s": {at}, "prompt_tokens": 64, "output_tokens": 8}}\n' for at in range(4)))
    for command in commands:
        words = command.partition(" #")[0].split()
        named = {"CHECKPOINT": str(llama), "here.yaml": str(machine), "roofline.svg": str(tmp_path / "roofline.svg")}
        named |= {"arrivals.jsonl": str(trace), "artifacts/NAME/VERSION": str(artifact(tmp_path / "built"))}
        words = [named.get(word, str(ROOT / word) if word.startswith("recipes/") else word) for word in words]
        result = invoke(*words)
        assert result.exit_code == 0, f"{command}: {result.stderr}"


@pytest.mark.parametrize("asked", ["pipeline_parallel: 2", "kv_offload: true", "disaggregated_prefill: true"])
def test_a_recipe_that_asks_for_what_is_not_built_is_sent_to_the_plan(asked: str, llama: Path, tmp_path: Path) -> None:
    """By `plan`, by `build`, from Python, and as an override."""
    path, key = tmp_path / "recipe.yaml", asked.partition(":")[0]
    text = (
        "schema: 1\nname: asked\ncheckpoint: llama-3.1-8b\ntarget: h100-sxm\n"
        "engine: {max_context: 1024, max_batch: 16}\npasses: []\n"
    )
    path.write_text(text)
    plan = " ".join(invoke(path).stdout.split())
    assert plan.count("is not supported; ") == 3
    overridden = CliRunner().invoke(cli, ["build", str(path), "--set", f"engine.{asked.replace(': ', '=')}"])
    assert overridden.exit_code == 2
    path.write_text(text.replace("16}", f"16, {asked}}}"))
    for command in (["plan", str(path)], ["build", str(path), "--defer", "--out", str(tmp_path / "out")]):
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 2, result.output
        said = " ".join(result.stderr.split())
        assert f"{path}:5:44: engine.{key}: unknown key; allowed: backend, max_context, " in said
        for each in (said, " ".join(overridden.stderr.split())):
            assert "hint: it is not supported; the notes of `llmforge plan` say what it would bring on a GPU" in each
    assert not (tmp_path / "out").exists()
    for ask in (llmforge.plan, llmforge.build):
        with pytest.raises(RecipeError, match="unknown key"):
            ask(path)


def test_the_build_is_predicted_for_this_machine_whatever_the_target(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = building.REFERENCE

    def build(rate: float, *options: str) -> Any:
        monkeypatch.setattr(rates, "measure", lambda: MachineRates(rate * known.products, rate * known.python))
        return facts(llama, "--target", "h200", *options)["build"]

    here, slow = build(1.0), build(0.5)
    assert here["machine"] == slow["machine"] == "this machine"
    assert (here["speed"], slow["speed"]) == ({"products": 1.0, "python": 1.0}, {"products": 0.5, "python": 0.5})
    assert slow["seconds"] == pytest.approx(2 * here["seconds"])
    assert slow["rates"] == {"products": known.products / 2, "python": known.python / 2}
    shown = " ".join(invoke(llama, "--target", "h200").stdout.split())
    assert "this machine is now 0.50× as fast in matrix products and 0.50× in Python" in shown


@pytest.mark.thorough
def test_calibration_over_workers_is_predicted() -> None:
    recipe = ROOT / "recipes" / "quickstart.yaml"
    alone, four = (facts(recipe, *more)["build"] for more in ((), ("--calibration-workers", "4")))
    [stage] = [each for each in four["stages"] if each["title"] == "Calibrate"]
    assert stage["workers"] == 4
    assert 0 < stage["carried_s"] < stage["cpu_s"]
    assert four["seconds"] < alone["seconds"]
    shown = " ".join(invoke(recipe, "--calibration-workers", "4").stdout.split())
    assert "with 4 workers on other machines, each on a CPU as fast as here" in shown
    [stage] = [each for each in alone["stages"] if each["title"] == "Calibrate"]
    assert not stage.get("workers")


# fleets

SLO = ("--slo", "ttft=2s,tpot=60ms")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulations be short."""
    for name, value in (("REQUESTS", 40), ("TAIL", 2), ("TURNS", 0)):
        monkeypatch.setattr(sizing, name, value)


def test_a_rate_gives_devices_replicas_slots_cost_and_keda(llama: Path, few: None) -> None:
    asked = (llama, "--target", "h200", "--output", "8", "--rate", "60/s", *SLO)
    found = facts(*asked, "--price", "2.5")
    assert found["devices"] == found["replicas"] * found["ranks"]
    assert found["usd_per_hour"] == pytest.approx(2.5 * found["devices"])
    assert found["objective"] == {"ttft_ms": 2000, "tpot_ms": 60}
    assert found["predicted"]["p95"]["ttft_ms"] <= 2000
    assert found["predicted"]["p95"]["tpot_ms"] <= 60
    assert found["alone"]["ttft_ms"] <= found["predicted"]["p95"]["ttft_ms"]
    assert found["keda"]["spec"]["maxReplicaCount"] == found["replicas"]
    assert found["keda"]["spec"]["triggers"][1]["metadata"]["threshold"] == f"{found['keda']['running']:g}"
    assert "unverified" in " ".join(found["notes"])
    shown = invoke(*asked, "--price", "2.5")
    for expected in ("60.0 requests/s", "p95 of TTFT ≤ 2,000 ms", "maxReplicaCount", "log-normal", "TTFT alone"):
        assert expected in " ".join(shown.stdout.split()), shown.stdout


def test_two_devices_of_a_replica_count_twice(llama: Path, few: None) -> None:
    found = facts(llama, "--target", "h200", "--tp", "2", "--output", "4", "--rate", "30/min", "--batch", "8", *SLO)
    assert (found["devices"], found["ranks"], found["replicas"], found["slots"]) == (2, 2, 1, 8)
    assert found["usd_per_hour"] == pytest.approx(8)  # twice the target's price


def test_a_recipe_says_slots_and_context(machine: Path, few: None) -> None:
    recipe = ROOT / "recipes" / "quickstart.yaml"
    found = facts(recipe, "--target", machine, "--rate", "2/s", *SLO, "--prompt", "64", "--output", "8")
    assert (found["slots"], found["max_context"], found["blocks"]) == (8, 1024, None)
    assert found["usd_per_hour"] is None
    assert "measured figures" in found["steps"]


def test_engines_over_blocks_share_what_memory_is_left(llama: Path, few: None) -> None:
    asked = (llama, "--target", "h200", "--output", "4", "--rate", "1/s", *SLO)
    over_blocks, over_slots = facts(*asked, "--engine", "onnxruntime"), facts(*asked)
    assert over_slots["blocks"] is None
    tokens = 141e9 / 131_072  # of the KV cache that the whole device would hold, 128 KiB each
    assert 0.7 * tokens < over_blocks["block_tokens"] * over_blocks["blocks"] < tokens


def test_several_targets_are_sized_side_by_side(llama: Path, few: None) -> None:
    found = facts(llama, "--target", "h200", "--target", "t4", "--output", "4", "--rate", "1/s", *SLO)
    assert found[0]["devices"] == 1
    assert "does not fit" in found[1]["refused"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", "50"), "--rate and --trace require --slo"),
        (("--rate", "50", *SLO), "rate '50': expected requests above 0 per s, min or h"),
        (("--rate", "50/s", "--slo", "ttft=5"), "objective 'ttft=5'"),
        (("--rate", "50/s", "--slo", "ttft=1ms"), "one request alone is too slow: p95 of TTFT is"),
        (("--rate", "1/s", *SLO, "--plot", "a.svg"), "--plot cannot be used with --rate and --trace"),
        (("--rate", "1/s", *SLO, "--calibration-workers", "2"), "--calibration-workers cannot be used with --rate"),
        (("--rate", "1/s", *SLO, "--batch", "100000"), "does not fit h200 with 100,000 slots"),
        (("--rate", "1/s", *SLO, "--weights", "bf16", "--context", "999999"), "exceed the context"),
        (SLO, "--slo requires --rate or --trace"),
        (("--percentile", "99"), "--percentile requires --rate or --trace"),
        (("--trace", "no.jsonl", *SLO), "no.jsonl"),
        (("--trace", "no.jsonl", *SLO, "--length-cv", "1"), "--length-cv cannot be used with --trace"),
    ],
)
def test_what_is_wrong_with_a_fleet_is_said(llama: Path, options: tuple[str, ...], message: str) -> None:
    result = invoke(llama, "--target", "h200", *options)
    assert result.exit_code != 0
    assert message in " ".join(result.stderr.split()), result.stderr


RUNTIME = RuntimeConfig(
    format=FORMAT,
    onnxruntime="1.31.0",
    kernels=None,
    max_context=256,
    max_batch=4,
    vocabulary=8192,
    eos_token_ids=(5,),
    bos_token_id=None,
    caches=(CacheInput("past_key_values.0.key", "float32", 4, 32),),
    session=SessionOptions(threads=None, optimize=True, entries={}),
)


def artifact(out: Path, config: RuntimeConfig = RUNTIME, **changes: Any) -> Path:
    return stored.put(out, files={"engine/runtime.json": config.to_json().encode()}, **changes).path


def test_a_fleet_of_an_artifact_rests_on_its_report(tmp_path: Path, few: None) -> None:
    asked = (artifact(tmp_path), "--rate", "100/s", "--slo", "ttft=60ms,tpot=9ms", "--output", "8", "--price", "1")
    found = facts(*asked)
    assert (found["model"].split()[0], found["slots"], found["max_context"]) == ("tiny", 4, 256)
    assert "as timed in tiny" in found["steps"]
    assert found["alone"]["tpot_ms"] == pytest.approx(0.5, rel=0.1)  # of the report
    assert found["usd_per_hour"] == found["replicas"] == found["devices"]
    assert facts(*asked, "--batch", "1")["slots"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "h200"), "--target cannot be used with an artifact"),
        (("--batch", "5"), "runs 4 requests at once, not 5"),
        (("--prompt", "250", "--output", "20"), "250 prompt tokens and 20 output tokens exceed the context"),
    ],
)
def test_what_an_artifact_has_is_not_asked_for(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = invoke(artifact(tmp_path), "--rate", "1/s", *SLO, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_an_artifact_is_planned_for_a_rate_alone(tmp_path: Path) -> None:
    result = invoke(artifact(tmp_path))
    assert result.exit_code == 2
    assert "is an artifact" in result.stderr
    assert "--rate" in result.stderr


def test_an_artifact_without_latency_is_refused(tmp_path: Path) -> None:
    result = invoke(artifact(tmp_path, gates={}, latency=None), "--rate", "1/s", *SLO)
    assert result.exit_code == 2
    assert "its report has no latency" in " ".join(result.stderr.split())
