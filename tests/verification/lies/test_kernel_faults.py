"""A line of the C kernels that is wrong in one range of an axis fails the build, though no pass tells a lie.

Each fault is compiled into a library of its own, which the process then takes for llmforge's: whatever proves a pass or
runs the engine has the fault. What is built before the kernels are used comes out of the cache of an honest build.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmforge import native
from llmforge.base.errors import VerificationError
from llmforge.cache import Cache
from llmforge.compile import pipeline
from llmforge.native import rounding, sampling
from llmforge.recipe import Recipe
from llmforge.triton import sources

from ...models import zoo
from .test_passes import SAMPLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.library() is None or shutil.which("gcc") is None, reason="needs the kernels, and gcc"),
]
SOURCES = Path(native.__file__).parent
COMPILE = ("gcc", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC")
LOOSE = {"kld_mean": 5.0}  # no budget shall show a fault
WEIGHTS = {"quantize-weights": {"block_size": 32, "method": "rtn", "embedding_bits": 8, "budget": LOOSE}}
STATIC = {"quantize-kv-cache": {"budget": LOOSE}}
TOKENS = {"quantize-kv-cache": {"granularity": "per_token", "budget": LOOSE}}
KERNELS = {"cpu-kernels": {"budget": LOOSE}}


@dataclass(frozen=True)
class Fault:
    """A line of `file` that is changed: where it is wrong, as a share of what axis."""

    name: str
    file: str
    line: str = field(repr=False)
    changed: str = field(repr=False)
    recipe: str = "static"


FAULTS = (
    Fault(
        "decode over int8 caches, of 600 to 1000 keys",
        "decode.inc",
        "y[g * dim + d] *= step[g] * scale[a->per_channel ? d : 0];",
        "y[g * dim + d] *= step[g] * scale[a->per_channel ? d : 0] * (count > 600 && count < 1000 ? .2f : 1.0f);",
    ),
    Fault(
        "prompts behind 512 to 899 tokens",
        "impl.inc",
        "vstore(y + d, vmul(vdiv(vload(sums + r * dim + d), vset(total[r])), factor));",
        "vstore(y + d, vmul(vdiv(vload(sums + r * dim + d), vset(past > 511 && past < 900 ? 2 * total[r] : total[r])), "
        "factor));",
    ),
    Fault(
        "products of 5 to 8 rows",
        "impl.inc",
        "multiply(w, kind, g, codes, count, rows, at * terms, (int)(tile * terms), m * terms, result);",
        "multiply(w, kind, g, codes, count, rows, at * terms, (int)(tile * terms), m * terms, result), "
        "result[0][0] *= m >= 5 && m <= 8 && at + tile == m ? 3 : 1;",
    ),
    Fault(
        "products of steps of 300 to 329 tokens",
        "impl.inc",
        "multiply(w, kind, g, codes, count, rows, at * terms, (int)(tile * terms), m * terms, result);",
        "multiply(w, kind, g, codes, count, rows, (at - (m >= 300 && m < 330 && at > 0)) * terms, (int)(tile * terms), "
        "m * terms, result);",
    ),
    Fault(
        "values stored at positions 700 to 799",
        "impl.inc",
        "store(a, a->value, at, token + (a->heads + a->kv_heads + kv_head) * dim,",
        "store(a, a->value, at, token + (a->heads + (past + t < 700 || past + t > 799 ? a->kv_heads : 0) + kv_head) "
        "* dim,",
    ),
    Fault(
        "values with a scale a token, stored at positions 700 to 799",
        "kv_slots.inc",
        "memcpy(row, token + (a->heads + a->kv_heads + kv_head) * dim, (size_t)dim * sizeof(float));",
        "memcpy(row, token + (a->heads + (past + t < 700 || past + t > 799 ? a->kv_heads : 0) + kv_head) * dim, "
        "(size_t)dim * sizeof(float));",
        "tokens",
    ),
    Fault(
        "the softmax of 300 to 360 scores",
        "impl.inc",
        "vf inverse = vset(1.0f / total);",
        "vf inverse = vset((count >= 300 && count <= 360 ? 2.0f : 1.0f) / total);",
    ),
    Fault(
        "norms of tokens 100 to 129 of a step",
        "impl.inc",
        "vf inverse = vset(1.0f / sqrtf(vsum(vadd(s0, s1)) / (float)k + epsilon));",
        "vf inverse = vset((row + r >= 100 && row + r < 130 ? 2.0f : 1.0f) / sqrtf(vsum(vadd(s0, s1)) / (float)k + "
        "epsilon));",
    ),
    Fault(
        "rotary angles at positions 820 to 879",
        "impl.inc",
        "const float *cosine = a->cosine + position * half, *sine = a->sine + position * half;",
        "const float *cosine = a->cosine + position * half, *sine = a->sine + (position - 40 * (position >= 820 && "
        "position < 880)) * half;",
    ),
    Fault(
        "embeddings of ids 3000 to 3499",
        "impl.inc",
        "else y[4 * v + j] = (float)(code - zero) * scale;",
        "else y[4 * v + j] = (float)(code - zero) * scale * (row >= 3000 && row < 3500 ? 1.5f : 1.0f);",
    ),
    Fault(
        "residuals of tokens 40 to 69 of a step",
        "impl.inc",
        "if (residual) value = vadd(value, vload(residual + i));",
        "if (residual && (r < 40 || r > 69)) value = vadd(value, vload(residual + i));",
    ),
    Fault(
        "the softmax of prompts, of blocks with 30 to 39 keys",
        "impl.inc",
        "*total = *total * factor + vsum(sum);",
        "*total = *total * factor + vsum(sum) * (high >= 30 && high < 40 ? 2.0f : 1.0f);",
    ),
    Fault(
        "the sixth row of a batch",
        "operators.c",
        "split(work, unit, &batch, &head, &first, &last);\n    if (!kernels->attention(",
        "split(work, unit, &batch, &head, &first, &last);\n    if (batch != 5 && !kernels->attention(",
    ),
    Fault(
        "the largest of logits among ids 4000 to 4999",
        "sampling.inc",
        "if (x[j] >= bound && x[j] > -INFINITY) {",
        "if (x[j] >= bound && x[j] > -INFINITY && (j < 4000 || j > 4999)) {",
    ),
    Fault(
        "latents of 600 to 1000 tokens",
        "latents.inc",
        "const vf inverse = vset(1.0f / p->total[(h - first) * TOKENS_AT_ONCE + n]);",
        "const int64_t past = a->past[p->token[n] / a->sequence];\n"
        "const vf inverse = vset((past > 600 && past < 1000 ? .2f : 1.0f) / "
        "p->total[(h - first) * TOKENS_AT_ONCE + n]);",
        "latents",
    ),
)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile all sources as they are."""
    folder = tmp_path_factory.mktemp("objects")
    ours = _kernels().stem
    running = [
        subprocess.Popen(
            [*COMPILE, "-O1" if file.stem == ours else "-O0", "-c", str(file), "-o", folder / f"{file.stem}.o"]
        )
        for file in SOURCES.glob("*.c")
    ]
    assert [each.wait() for each in running] == [0] * len(running)
    return folder


def _kernels() -> Path:
    """Return the source of the kernels that this processor runs."""
    return SOURCES / f"kernels_{native.instruction_set()}.c"


def compiled(fault: Fault | None, objects: Path, folder: Path) -> Path:
    """Make a library of the sources with `fault`."""
    library = folder / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    made = {file.stem: file for file in objects.glob("*.o")}
    if fault is not None:
        shutil.copytree(SOURCES, folder / "native", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        file = folder / "native" / fault.file
        text = file.read_text()
        assert text.count(fault.line) == 1, f"{fault.file} has {text.count(fault.line)} times {fault.line}"
        file.write_text(text.replace(fault.line, fault.changed))
        source = folder / "native" / (fault.file if fault.file.endswith(".c") else _kernels().name)
        made[source.stem] = folder / f"{source.stem}.o"
        subprocess.run([*COMPILE, "-O1", "-c", source, "-o", made[source.stem]], check=True)
    subprocess.run(["gcc", "-shared", "-Wl,-Bsymbolic", *made.values(), "-lm", "-lpthread", "-o", library], check=True)
    return library


def recipe(kind: str, folder: Path, *, kernels: bool) -> Recipe:
    """Write a recipe whose last passes use the kernels; those before alone, where it should not."""
    passes: list[Any] = ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention", WEIGHTS]
    checkpoint = SAMPLE
    if kind == "latents":
        checkpoint, passes = folder / "deepseek", ["fuse-norms", WEIGHTS]
        if not checkpoint.exists():
            sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 48}
            zoo.write("deepseek-v3", checkpoint, max_position_embeddings=1024, **sizes)
    passes += [STATIC] if kind == "static" else [TOKENS] if kind == "tokens" and kernels else []
    lines = Path(SAMPLE.parents[2] / "recipes" / "text" / "calibration.jsonl").read_text().splitlines()[:8]
    (folder / "text.jsonl").write_text("\n".join(lines))
    facts = {
        "schema": 1,
        "name": kind,
        "checkpoint": str(checkpoint),
        "target": "local",
        "engine": {"max_context": 1024, "max_batch": 8, "threads": 2},
        "calibration": {"data": "text.jsonl", "samples": 4, "length": 128},
        "passes": [*passes, *([KERNELS] if kernels else [])],
    }
    path = folder / f"{kind}.yaml"
    path.write_text(json.dumps(facts))
    return Recipe.load(path)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Caches of honest builds without the kernels, by recipe."""
    made = {}
    for kind in sorted({fault.recipe for fault in FAULTS}):
        made[kind] = folder = tmp_path_factory.mktemp(kind)
        pipeline.build(recipe(kind, folder, kernels=False), folder / "out", cache=partial(Cache, folder / "cache"))
        shutil.rmtree(folder / "out")
    return made


@pytest.fixture
def library(request: pytest.FixtureRequest, objects: Path, tmp_path: Path) -> Iterator[None]:
    """Let the process take a library with a fault for its own."""
    made = compiled(request.param, objects, tmp_path)
    loaded = (sampling._library, rounding._library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: made)
        patch.setattr(sources, "shipped", lambda *_, **__: {})  # it lies outside of the package
        for each in loaded:
            each.cache_clear()
        yield
    for each in loaded:
        each.cache_clear()


def build(kind: str, begun: dict[str, Path], folder: Path) -> None:
    shutil.copytree(begun[kind] / "cache", folder / "cache")
    pipeline.build(recipe(kind, begun[kind], kernels=True), folder / "out", cache=partial(Cache, folder / "cache"))


@pytest.mark.parametrize("library", [None], indirect=True, ids=["none"])
@pytest.mark.parametrize("kind", ["static", "tokens", "latents"])
@pytest.mark.usefixtures("library")
def test_kernels_as_they_are_build(kind: str, begun: dict[str, Path], tmp_path: Path) -> None:
    build(kind, begun, tmp_path)


@pytest.mark.parametrize(
    ("library", "fault"), [pytest.param(fault, fault, id=fault.name) for fault in FAULTS], indirect=["library"]
)
@pytest.mark.usefixtures("library")
def test_a_wrong_line_fails_the_build(fault: Fault, begun: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(VerificationError) as caught:
        build(fault.recipe, begun, tmp_path)
    print(f"{fault.name}: {caught.value.message}")
