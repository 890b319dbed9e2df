"""Codes of given numbers are the same on a processor without AVX-512, and so is their layout."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmforge.base import process
from llmforge.quantization import rounding
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods import gptq
from llmforge.quantization.rounding import products

ROOT = Path(__file__).parents[2]
X86_V4 = ("X86_V4", "AVX512")  # how numpy's groups of kernels with AVX-512 are called
LIBRARIES = "LLMFORGE_TEST_QEMU_LIBRARIES"  # where qemu's own libraries lie, if it was unpacked and not installed

# Weights of every stored dtype on every kind of grid: of all magnitudes, ties, both zeros, subnormal numbers, outliers,
# and a last block that is cut short; made by exact arithmetic, because numpy's powers and logarithms do differ.
_CODES = """
import hashlib, json
import ml_dtypes, numpy as np
from numpy._core import _multiarray_umath
from llmforge.ir import derived
from llmforge.quantization import cpu_layout as layout
from llmforge.quantization import grids
from llmforge.quantization.grid import Grid

rng = np.random.default_rng(0)
n, k = 96, 1088
weight = rng.random((n, k), np.float32) - np.float32(0.5)
weight[:16] = np.ldexp(weight[:16], rng.integers(-120, 100, (16, k)))
weight[16:32] = rng.integers(-15, 16, (16, k)).astype(np.float32) / 2
weight[32:40] = np.where(rng.random((8, k)) < 0.5, np.float32(-0.0), np.float32(0.0))
weight[40:48] = np.ldexp(weight[40:48], -140)
weight[48:56, ::97] *= 1000
digests = {}
for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
    with np.errstate(over="ignore", under="ignore"):
        stored = weight.astype(dtype)
    stored[~np.isfinite(stored)] = 0
    for bits in (4, 8):
        for block_size in (16, 32, 64, 128):
            for symmetric in (True, False):
                grid = Grid(bits, block_size, symmetric)
                digest = hashlib.sha256()
                for width in (k, k - 5):
                    packed = grids.pack(grids.round_to_nearest(stored[:, :width], grid))
                    for part in (packed.codes, packed.scales, packed.zero_points):
                        digest.update(b"-" if part is None else part.tobytes())
                if block_size >= layout.SMALLEST_BLOCK and k % block_size == 0:
                    made = grids.round_to_nearest(stored, grid)
                    digest.update(layout.arrange(made.codes, made.scales, made.zero_points, grid).tobytes())
                digests[f"{np.dtype(dtype).name} {grid}"] = digest.hexdigest()
halves = derived.to_bf16([weight]), derived.to_fp16([np.clip(weight, -6e4, 6e4)])
digests["halves"] = hashlib.sha256(b"".join(each.tobytes() for each in halves)).hexdigest()
features = [name for name in _multiarray_umath.__cpu_dispatch__ if _multiarray_umath.__cpu_features__[name]]
print(json.dumps({"digests": digests, "features": features}))
"""


def codes(*emulator: str, **settings: str) -> tuple[dict[str, str], set[str]]:
    """Round and arrange in a process of its own; return digests of all bytes, and the kernels that numpy ran."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
    command = [*emulator, sys.executable, "-c", _CODES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["digests"], set(found["features"])


def of_avx512(groups: set[str]) -> set[str]:
    return {name for name in groups if name.startswith(X86_V4)}


def test_codes_rounded_with_avx512_and_without_are_equal() -> None:
    here, groups = codes()
    if not of_avx512(groups):
        pytest.skip("this processor has no AVX-512 to switch off")
    other, left = codes(NPY_DISABLE_CPU_FEATURES=" ".join(of_avx512(groups)))
    assert not of_avx512(left)
    assert len(here) == 49
    assert other == here


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_codes_rounded_on_an_emulated_haswell_are_equal() -> None:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("no qemu-x86_64: apt-get install qemu-user")
    command = [emulator, "-cpu", "Haswell"]
    if (libraries := os.environ.get(LIBRARIES)) is not None:  # for the emulator, not for what it runs
        command = ["/usr/bin/env", f"LD_LIBRARY_PATH={libraries}", *command, "-U", "LD_LIBRARY_PATH"]
    emulated, groups = codes(*command)
    assert not of_avx512(groups)
    assert emulated == codes()[0]


# As in pyproject.toml, which compiles them for an installation.
ROUNDING_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC")
# What rounding.c and products.c take for the processor's features, by the kernels that they then choose.
FEATURES = {"avx512": "1", "avx2": '(strncmp(name, "avx512", 6) != 0)', "generic": "0"}


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """Compile the loops that choose codes, once for each instruction set that they are to believe in."""
    if platform.machine() != "x86_64" or not {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= process.cpu_flags():
        pytest.skip("this processor has no AVX-512")
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc here")
    folder, sources = tmp_path_factory.mktemp("loops"), Path(rounding.__file__).parent
    objects = [folder / f"{source.stem}.o" for source in sorted(sources.glob("*_*.c"))]
    for made in objects:
        source = sources / f"{made.stem}.c"
        subprocess.run([compiler, *ROUNDING_FLAGS, "-c", str(source), "-o", str(made)], check=True)
    found = {}
    for name, says in FEATURES.items():
        library = folder / f"{name}.so"
        believes = ["-include", "string.h", f"-D__builtin_cpu_supports(name)={says}"]
        chosen = [str(sources / f"{source}.c") for source in ("rounding", "products")]
        command = [compiler, *ROUNDING_FLAGS, *believes, *chosen, *map(str, objects)]
        subprocess.run([*command, "-shared", "-o", str(library), "-lm", "-lpthread"], check=True)
        found[name] = ctypes.CDLL(str(library))
    return found


@pytest.mark.parametrize(
    "grid",
    [
        Grid(4, 32, False), Grid(3, 32, False, "fp16"), Grid(8, 64, True, "fp16"), Grid(4, 32, True, "int8"),
        Grid(4, 32, True, "int8", trellis=True), Grid(5, 64, True, "int8", trellis=True),
    ],
    ids=str,
)  # fmt: skip
def test_codes_chosen_column_by_column_with_avx512_and_without_are_equal(
    grid: Grid, loops: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given one Hessian: what torch makes of it differs between processors (docs/provenance.md)."""
    rng = np.random.default_rng(0)
    n, k = 80, 256
    inputs = rng.standard_normal((1024, k)) * np.arange(1, k + 1) ** -0.3 @ rng.standard_normal((k, k))
    curvature = gptq.Curvature.of((inputs.T @ inputs).astype(np.float32), 0.01)
    wanted = rng.standard_normal((n, k)).astype(np.float32)
    columns = rounding.OrderedColumns(curvature.order.astype(np.int32), curvature.hessian, curvature.inverse.T)
    made = {}
    for name, library in loops.items():
        monkeypatch.setattr(rounding, "_library", lambda library=library: library)
        made[name] = rounding.choose(wanted, columns, grid, steps=20, sweeps=2, with_errors=True)
    for part in ("codes", "scales", "zero_points"):
        np.testing.assert_array_equal(getattr(made["avx2"][0], part), getattr(made["avx512"][0], part), err_msg=part)
    np.testing.assert_array_equal(made["avx2"][1], made["avx512"][1])
    ordered = {name: left[:, curvature.order] for name, (_, left) in made.items()}
    # Plain C multiplies and adds in two steps: other bits, and as good a rounding.
    loss = {name: float(((left @ curvature.hessian) * left).sum()) for name, left in ordered.items()}
    assert loss["generic"] == pytest.approx(loss["avx2"], rel=0.05)


def test_products_and_factors_with_avx512_and_without_are_equal(
    loops: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((70, 300), (300, 130)))
    moments = rng.standard_normal((400, 300))
    made = {}
    for name, library in loops.items():
        monkeypatch.setattr(rounding, "_library", lambda library=library: library)
        inverse = products.inverse_factor(moments.T @ moments, threads=2)
        assert inverse is not None
        made[name] = products.multiply(a, b, threads=2), inverse
    for one, other, plain in zip(made["avx2"], made["avx512"], made["generic"], strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(plain, one, atol=1e-4 * np.abs(one).max())
