"""Kernels of processors that are not here, in an emulator: against plain C to the bit, and plain arithmetic."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models import kernel_cases as cases_of
from tests.models.kernel_cases import Case

Array = NDArray[Any]
HERE, SOURCES = Path(__file__).parent, Path(__file__).parents[2] / "llmforge" / "native"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ARM = "aarch64-linux-gnu-gcc"
CANNOT_RUN = 3  # kernels_driver.c


def compiler(name: str) -> str:
    """Find a compiler for the tests, or skip them."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no compiler {name} here")
    return found


def emulator(machine: str) -> str:
    """Find an emulator, or skip the tests."""
    found = shutil.which(f"qemu-{machine}") or shutil.which(f"qemu-{machine}-static")
    if found is None:
        pytest.skip(f"there is no emulator qemu-{machine} here (Debian's package qemu-user)")
    return found


def build(folder: Path, name: str, *flags: str) -> Path:
    """Compile the driver with all kernels, file by file, as many at once as there are processors."""
    found, objects, left = compiler(name), [], [*sorted(SOURCES.glob("kernels_*.c")), HERE / "kernels_driver.c"]
    running: list[subprocess.Popen[str]] = []
    while left or running:
        while left and len(running) < (os.cpu_count() or 1):
            source = left.pop()
            objects.append(str(folder / f"{source.stem}.o"))
            command = [found, *FLAGS, *flags, "-c", str(source), "-o", objects[-1]]
            running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        process = running.pop(0)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    driver = folder / "driver"
    subprocess.run([found, *flags, *objects, "-o", str(driver), "-lm"], check=True)
    return driver


def run(command: Sequence[str], kernels: str, cases: Sequence[Case], folder: Path) -> list[list[Array]]:
    """Run all cases with the kernels of one instruction set; skip the test where the processor lacks it."""
    asked, given = folder / "cases", folder / "results"
    cases_of.write(cases, asked)
    ended = subprocess.run([*command, kernels, str(asked), str(given)], capture_output=True, text=True, check=False)
    if ended.returncode == CANNOT_RUN:
        pytest.skip(f"this processor cannot run the kernels {kernels}")
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stderr[-4000:]}"
    return list(cases_of.read(cases, given))


def check(found: list[list[Array]], cases: Sequence[Case], plain: list[list[Array]], kernels: str) -> None:
    """Compare with plain arithmetic, and to the bit with plain C where every instruction set computes the same."""
    for case, results, of_plain in zip(cases, found, plain, strict=True):
        for result, other, wanted in zip(results, of_plain, case.wanted, strict=True):
            if case.exact:  # NaN is NaN, whatever its bits
                np.testing.assert_array_equal(result, other, err_msg=f"{kernels}: {case.name}")
            if case.tolerance == 0:
                np.testing.assert_array_equal(result, wanted, err_msg=f"{kernels}: {case.name}")
                continue
            if result.dtype == np.int8:  # of a cache: on the border between two integers either will do
                assert np.abs(result.astype(int) - wanted).max() <= 1, f"{kernels}: {case.name}"
                continue
            # bf16 rounds queries and weights of the softmax to 8 bits of mantissa; it multiplies int8 caches alone, and
            # more than 8 queries.
            of_int8 = case.kind == cases_of.ATTENTION and results[1].dtype == np.int8 and case.numbers[1] > 8
            rounded = kernels == "avx512bf16" and (of_int8 or case.kind == cases_of.SLOTS)
            bound = (5e-2 if rounded else case.tolerance) * np.nanstd(wanted)
            np.testing.assert_allclose(result, wanted, 1e-6, bound, err_msg=f"{kernels}: {case.name}")


FEW_ROWS = (1, 2, 5, 6, 7, 13)
ALL_ROWS = range(1, 41)


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver for ARM, linked statically: an emulator needs nothing else."""
    return build(tmp_path_factory.mktemp("arm"), ARM, "-static")


@pytest.mark.thorough
@pytest.mark.xdist_group("arm")
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_kernels_for_arm_give_the_bits_of_plain_c(every: int, arm: Path, tmp_path: Path) -> None:
    command, cases = [emulator("aarch64"), "-cpu", "max", str(arm)], cases_of.every((1, 8))
    cases += [cases_of.linear(grid, 20, 256, m) for grid in cases_of.FORMATS[::5] for m in range(2, 8)]
    cases = cases[::every]
    plain = run(command, "generic", cases, tmp_path)
    check(plain, cases, plain, "generic")
    check(run(command, "neon", cases, tmp_path), cases, plain, "neon")


@pytest.mark.thorough
@pytest.mark.xdist_group("arm")
@pytest.mark.parametrize(("cpu", "ends"), [("neoverse-n1", 0), ("cortex-a53", CANNOT_RUN), ("a64fx", CANNOT_RUN)])
def test_kernels_for_arm_are_chosen_where_there_are_dot_products(
    arm: Path, tmp_path: Path, cpu: str, ends: int
) -> None:
    nothing, command = tmp_path / "nothing", [emulator("aarch64"), "-cpu", cpu, str(arm)]
    nothing.touch()
    assert subprocess.run([*command, "neon", str(nothing), str(tmp_path / "out")], check=False).returncode == ends
    assert subprocess.run([*command, "generic", str(nothing), str(tmp_path / "out")], check=False).returncode == 0


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver for the this machine."""
    return build(tmp_path_factory.mktemp("host"), "cc")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Every case, with every number of rows that tiles may leave over."""
    return cases_of.every(ALL_ROWS)


@pytest.fixture(scope="module")
def plain(host: Path, cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> list[list[Array]]:
    """What plain C gives on the this machine."""
    return run([str(host)], "generic", cases, tmp_path_factory.mktemp("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["generic", "avx2", "avx512vnni", "avx512bf16", "neon"])
def test_kernels_of_this_processor(
    kernels: str, host: Path, cases: list[Case], plain: list[list[Array]], tmp_path: Path
) -> None:
    check(run([str(host)], kernels, cases, tmp_path), cases, plain, kernels)


@pytest.mark.slow
def test_a_processor_with_avx2_alone(host: Path, cases: list[Case], plain: list[list[Array]], tmp_path: Path) -> None:
    command = [emulator("x86_64"), "-cpu", "Haswell", str(host)]
    (tmp_path / "nothing").touch()
    more = [*command, "avx512vnni", str(tmp_path / "nothing"), str(tmp_path / "out")]
    assert subprocess.run(more, check=False).returncode == CANNOT_RUN
    check(run(command, "avx2", cases, tmp_path), cases, plain, "avx2")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["generic", "neon"])
def test_arm_gives_the_bits_of_another_processor(
    kernels: str, arm: Path, cases: list[Case], plain: list[list[Array]], tmp_path: Path
) -> None:
    command = [emulator("aarch64"), "-cpu", "max", str(arm)]
    check(run(command, kernels, cases, tmp_path), cases, plain, kernels)


@pytest.mark.slow
def test_clang_compiles_the_same_kernels_without_a_warning(
    cases: list[Case], plain: list[list[Array]], tmp_path: Path
) -> None:
    driver = build(tmp_path, "clang")
    for kernels in ("generic", "avx2", "avx512vnni", "avx512bf16"):
        check(run([str(driver)], kernels, cases, tmp_path), cases, plain, kernels)


@pytest.mark.slow
def test_nothing_is_read_or_written_outside_of_its_memory(tmp_path: Path) -> None:
    """By the sanitizers of GCC; the driver itself fences every array off, in every test here."""
    driver, few = build(tmp_path, "cc", *SANITIZERS), cases_of.every(FEW_ROWS)
    plain = run([str(driver)], "generic", few, tmp_path)
    for kernels in ("avx2", "avx512vnni", "avx512bf16"):
        check(run([str(driver)], kernels, few, tmp_path), few, plain, kernels)


@pytest.mark.slow
def test_nothing_is_read_or_written_outside_of_its_memory_on_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")  # in an emulator, where they are searched for by tracing
    driver, few = build(tmp_path, ARM, *SANITIZERS), cases_of.every(FEW_ROWS)
    root = Path("/usr/aarch64-linux-gnu")  # where Debian's cross compiler has the libraries that the driver loads
    command = [emulator("aarch64"), "-L", str(root), str(driver)]
    plain = run(command, "generic", few, tmp_path)
    check(run(command, "neon", few, tmp_path), few, plain, "neon")
