"""What is in every key because it decides numbers: variables by which libraries compute otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llmforge
from llmforge.cache import Cache, settings
from llmforge.calibration import driver
from llmforge.checkpoint import Checkpoint
from llmforge.compile.reuse import Reuse

PACKAGE = Path(llmforge.__file__).parent
# Variables of llmforge's own: where something lies, how much it may take, who may use it, and how long one waits.
OWN = {
    "LLMFORGE_API_KEYS", "LLMFORGE_ARTIFACTS", "LLMFORGE_CACHE", "LLMFORGE_CACHE_BYTES", "LLMFORGE_CACHE_KEY",
    "LLMFORGE_LOG_FORMAT", "LLMFORGE_RANK_TIMEOUT_S", "LLMFORGE_RAY_ADDRESS", "LLMFORGE_REFERENCE_KEY",
    "LLMFORGE_REMOTE_CACHE",
    "LLMFORGE_REMOTE_CACHE_WRITE", "LLMFORGE_RUNTIMES", "LLMFORGE_SHADOW_KEY",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS", "MKL_CBWR", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS",
        "ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "NPY_DISABLE_CPU_FEATURES",
        "GLIBC_TUNABLES", "LD_PRELOAD", "ORT_DISABLE_TRT_FLASH_ATTENTION", "NVIDIA_TF32_OVERRIDE",
    ],
)  # fmt: skip
def test_a_setting_of_a_library_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    found = {settings()}
    for value in ("1", "2"):
        monkeypatch.setenv(name, value)
        found.add(settings())
    assert len(found) == 3


def test_settings_are_in_all_keys(tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)

    def keys() -> set[str]:
        with Cache(tmp_path / "cache") as cache:
            key = Reuse(cache, installed=str).key("proof", ["llmforge.base.wording"])
        return {key.digest, driver.key(checkpoint, [], [], None, 1, "")}

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = keys()
    assert keys() == before
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not keys() & before


@pytest.mark.parametrize("name", ["HOME", "OMP_WAIT_POLICY", "OPENBLAS_THREAD_TIMEOUT", *sorted(OWN)])
def test_what_changes_no_number_leaves_keys_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    monkeypatch.setenv(name, "other")
    assert settings() == before


def test_llmforge_has_no_other_variables_of_its_own() -> None:
    """A new one that changes results belongs into keys."""
    texts = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    assert {name for text in texts for name in re.findall(r"\bLLMFORGE_[A-Z_]*[A-Z]\b", text)} == OWN


def test_compiled_kernels_read_no_variables() -> None:
    sources = [file for suffix in ("c", "h", "inc") for file in PACKAGE.rglob(f"*.{suffix}")]
    assert len(sources) > 10
    assert not [file.name for file in sources if "getenv" in file.read_text(encoding="utf-8")]


def test_blas_has_the_same_kernels_wherever_a_build_runs() -> None:
    """`base.process.prepare` chooses them, before numpy is imported, and keys name them."""
    code = (
        "from llmforge.base import process; process.prepare()\n"
        "import json, os; from llmforge.cache import settings\n"
        "print(json.loads(settings()).get('OPENBLAS_CORETYPE') == os.environ.get('OPENBLAS_CORETYPE'))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert told.stdout == "True\n"
