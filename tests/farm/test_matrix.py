"""Matrices: what they expand to, and what is wrong with them; and what a build asks of a cluster."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from llmforge import targets
from llmforge.base.errors import EnvironmentLacks, ForgeError, RecipeError, UsageError
from llmforge.farm import placing
from llmforge.farm.matrix import Build, Matrix, expand
from llmforge.recipe import Recipe
from llmforge.targets import Isa

RECIPE = """\
schema: 1
name: base
checkpoint: first
target: local
engine: {max_context: 64, max_batch: 2}
passes: [pack-qkv]
"""
MATRIX = """\
schema: 1
name: release
recipe: recipe.yaml
models:
  first: {checkpoint: first}
  second: {checkpoint: second, engine.max_context: 32}
targets:
  local:
  l4: {target: l4, engine.max_batch: 8}
variants:
  plain:
  wide: {engine.max_batch: 16, passes: [pack-qkv, pack-gate-up]}
"""


def written(folder: Path, text: str = MATRIX) -> Path:
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "release.yaml").write_text(text, encoding="utf-8")
    return folder / "release.yaml"


def builds(path: Path, *overrides: str) -> list[Build]:
    return expand(Matrix.load(path), path, overrides)


def test_every_combination_is_a_recipe(tmp_path: Path) -> None:
    found = {build.title: build.load() for build in builds(written(tmp_path))}
    assert len(found) == 8
    assert {recipe.name for recipe in found.values()} == {title.replace("/", "-") for title in found}
    plain, wide = found["second/l4/plain"], found["second/l4/wide"]
    assert (plain.target, plain.engine.max_batch, plain.engine.max_context) == ("l4", 8, 32)
    assert plain.checkpoint == tmp_path / "second"
    assert (wide.engine.max_batch, [each.name for each in wide.passes]) == (16, ["pack-qkv", "pack-gate-up"])
    assert found["first/local/plain"].target == "local"


def test_neighbours_are_of_different_models(tmp_path: Path) -> None:
    models = [build.model for build in builds(written(tmp_path))]
    assert all(a != b for a, b in pairwise(models))


def test_the_command_line_wins_and_exclusions_leave_out(tmp_path: Path) -> None:
    path = written(tmp_path, MATRIX + "exclude: [{target: l4, variant: wide}, {model: first, target: l4}]\n")
    found = builds(path, "engine.max_batch=3")
    assert [build.title for build in found] == [
        "first/local/plain", "second/local/plain", "second/l4/plain", "first/local/wide", "second/local/wide",
    ]  # fmt: skip
    assert {build.load().engine.max_batch for build in found} == {3}


def test_an_entry_has_a_recipe_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, MATRIX.replace("first: {checkpoint: first}", "first: {recipe: other.yaml, name: mine}"))
    (tmp_path / "other.yaml").write_text(RECIPE.replace("max_context: 64", "max_context: 48"), encoding="utf-8")
    [one, *_] = builds(path)
    assert (one.load().name, one.load().engine.max_context) == ("mine", 48)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (("models:", "modells:"), RecipeError, r"release\.yaml:\d+:1: modells: .*"),
        (("name: release", "name: Re lease"), RecipeError, r"release\.yaml:2:1: name: "),
        (("recipe: recipe.yaml\n", ""), UsageError, r"first/local/plain: no recipe"),
        (("plain:", f"{'p' * 60}:"), UsageError, r"too long for a name"),
        (("schema: 1", "schema: 2"), RecipeError, r"schema"),
        (("variants:", "exclude: [{model: third}]\nvariants:"), UsageError, r"exclude: .*third.*no such build"),
        (("variants:", "exclude: [{}]\nvariants:"), UsageError, r"leaves no build"),
        (("max_batch: 16", "max_batsh: 16"), UsageError, r"no key 'engine.max_batsh'"),
        (("[pack-qkv, pack-gate-up]", "[no-such-pass]"), RecipeError, r"no-such-pass: unknown pass"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, change: tuple[str, str], error: type[ForgeError], says: str) -> None:
    path = written(tmp_path, MATRIX.replace(*change))
    with pytest.raises(error) as raised:
        [build.load() for build in builds(path)]
    assert re.search(says, raised.value.message)


NODE = {"CPU": 16.0, "memory": 64e9}
L4 = {**NODE, "CPU": 8.0, "GPU": 1.0, "accelerator_type:L4": 1.0}


def recipe(folder: Path, *overrides: str) -> Recipe:
    return Recipe.load(written(folder).with_name("recipe.yaml"), overrides)


def test_a_build_for_a_cpu_goes_anywhere(tmp_path: Path) -> None:
    made = placing.place(recipe(tmp_path), targets.load("cpu-avx2"), [NODE, L4])
    assert (made.marks, made.gpus, made.cpus, made.memory_bytes) == ({}, 0, 2, placing.UNKNOWN_BYTES)


def test_a_build_goes_to_the_node_that_has_its_device(tmp_path: Path) -> None:
    made = placing.place(recipe(tmp_path), targets.load("l4"), [NODE, L4], memory_bytes=10**12)
    assert (made.marks, made.gpus) == ({"accelerator_type:L4": 0.001}, 1)
    assert made.memory_bytes == 64e9  # no more than it has
    assert made.suits(L4)
    assert not made.suits(NODE)
    with pytest.raises(EnvironmentLacks) as raised:
        placing.place(recipe(tmp_path), targets.load("t4"), [NODE, L4])
    assert '{"llmforge:t4": 1}' in str(raised.value)


def test_marks_of_our_own_come_first(tmp_path: Path) -> None:
    marked = {**NODE, "llmforge:a100-40": 1.0}
    assert placing.mark(targets.load("a100-40"), [marked, {**NODE, "accelerator_type:A100": 1.0}]) == {
        "llmforge:a100-40": 0.001
    }
    made = placing.place(recipe(tmp_path), targets.load("a100-40"), [marked])
    assert made.gpus == 0  # its node hides them from Ray


def test_machines_say_which_cpu_targets_they_run() -> None:
    nodes = [{**NODE, **placing.here(Isa.AVX512, ["l4"])}]
    assert placing.mark(targets.load("cpu-avx2"), nodes) == {"llmforge:cpu-avx2": 0.001}
    assert placing.mark(targets.load("l4"), nodes) == {"llmforge:l4": 0.001}
    assert placing.mark(targets.load("cpu-amx"), nodes) is None


def test_what_measures_latency_has_a_node_to_itself(tmp_path: Path) -> None:
    measured = recipe(tmp_path, "validation.latency={prompt_tokens: [8], output_tokens: 4}")
    local = targets.load("cpu-avx2")
    assert placing.place(measured, local, [NODE, L4]).cpus == 16
    assert placing.place(measured, local, [NODE, L4], jobs=4).cpus == 4
    assert placing.place(recipe(tmp_path), local, [NODE], jobs=5).cpus == 3


def test_memory_grows_up_to_the_largest_node() -> None:
    place = placing.NodePlacement(1, 40 * 10**9)
    more = place.grown([NODE])
    assert more is not None
    assert more.memory_bytes == 64e9
    assert more.grown([NODE]) is None


def test_accelerators_are_called_as_ray_calls_them() -> None:
    ray = pytest.importorskip("ray._private.accelerators.nvidia_gpu")
    name_of = ray.NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type
    known = {
        "a100-40": "NVIDIA A100-SXM4-40GB", "a100-80": "NVIDIA A100 80GB PCIe", "a10g": "NVIDIA A10G",
        "b200": "NVIDIA B200", "gb200": "NVIDIA GB200", "h100-pcie": "NVIDIA H100 PCIe",
        "h100-sxm": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200", "l4": "NVIDIA L4", "l40s": "NVIDIA L40S",
        "rtx-4090": "NVIDIA GeForce RTX 4090", "rtx-5090": "NVIDIA GeForce RTX 5090", "t4": "Tesla T4",
        "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    }  # fmt: skip
    gpus = [name for name in targets.names() if targets.load(name).kind == "gpu"]
    assert {name: targets.load(name).accelerator for name in gpus} == {name: name_of(known[name]) for name in gpus}
