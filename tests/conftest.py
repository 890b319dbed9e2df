"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Before any test imports numpy or torch: on busy cores their spinning threads make tests many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "8")

from . import stall
from .models.checkpoints import write_checkpoint

if TYPE_CHECKING:
    import onnx_ir as ir

    from llmforge.checkpoint import Checkpoint


def pytest_configure(config: pytest.Config) -> None:
    cache = tempfile.TemporaryDirectory(prefix="llmforge-cache-")  # of what is built in fixtures that outlive a test
    config.add_cleanup(cache.cleanup)
    os.environ["LLMFORGE_CACHE"] = cache.name
    # What tests download is kept from run to run, in the user's cache.
    os.environ.setdefault("LLMFORGE_TESTS_CACHE", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
    home = tempfile.TemporaryDirectory(prefix="llmforge-home-")  # where hashes of files are remembered
    config.add_cleanup(home.cleanup)
    os.environ["XDG_CACHE_HOME"] = home.name
    if hasattr(config, "workerinput"):
        stall.listen()
    elif getattr(config.option, "dist", "no") != "no":
        config.pluginmanager.register(stall.Watch(stall.LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without searching for garbage, never search what they are made of, and search seldom later.

    The search is half of the time that collecting takes (CPU: 33 s with it, 18 s without), and all that it finds alive
    (modules, trees, cases) lives to the end. Of tests of graphs it takes 8 % as Python sets it, and 4 % as is set here.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give the tests of a file whose fixtures live as long as the file to one worker: else each worker makes them."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("xdist_group"):
        return
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    if any(definitions[-1].scope == "module" for definitions in fixtures):
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a pytest with which pytest-xdist ignores groups and does not say so."""
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} has a group, which this pytest-xdist ignores with this pytest")


@pytest.fixture(autouse=True)
def _own_build_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test a build cache of its own, which is made when something is built."""
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"))


@pytest.fixture(scope="module")
def _build_cache_of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shared_build_cache(_build_cache_of_the_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests of a file that build nearly the same find what the others have traced, calibrated and proven."""
    monkeypatch.setenv("LLMFORGE_CACHE", str(_build_cache_of_the_file))


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory; it is empty again after the test."""
    system = pytest.importorskip("fsspec", reason="the extra `remote` is not installed").filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with the sample checkpoint and the texts."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def sample_checkpoint(data: Path) -> Path:
    """The trained checkpoint of 6.8 M parameters (tests/data/README.md)."""
    return data / "docs-llama-7m"


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Path:
    """A random Llama of 2 layers and hidden size 64 in a folder of its own, fp32, tied."""
    folder = tmp_path / "tiny-llama"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def bf16_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ir.Model]:
    """A random Llama of 2 layers stored in bf16, tied, and its canonical graph, which tests clone."""
    import torch

    from llmforge.checkpoint import Checkpoint
    from llmforge.trace import trace

    from .models import zoo

    folder = tmp_path_factory.mktemp("bf16-llama")
    zoo.write("llama-tied", folder, torch.bfloat16)
    checkpoint = Checkpoint.open(folder)
    return checkpoint, trace(checkpoint)


@pytest.fixture(scope="session")
def sample_graph(sample_checkpoint: Path) -> ir.Model:
    """The canonical graph of the sample checkpoint, which tests clone."""
    from llmforge.checkpoint import Checkpoint
    from llmforge.trace import trace

    return trace(Checkpoint.open(sample_checkpoint))


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a machine without a GPU, wherever the test runs."""
    from llmforge.backends import engines
    from llmforge.base.errors import EnvironmentLacks

    def no_cuda() -> object:
        raise EnvironmentLacks("no CUDA device here", hint="…")

    monkeypatch.setattr(engines, "CudaDevice", no_cuda)
