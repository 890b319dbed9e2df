"""What ends a build from outside: signals, a full disk, no memory. One message each, and nothing visible."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmforge.artifact import Artifact
from llmforge.base import resources
from llmforge.base.errors import EnvironmentLacks, RunFailed
from llmforge.compile import preflight
from llmforge.recipe import Recipe

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "fp32.yaml"
LOAD = "Load llmforge"  # the first stage
FAST = ("--set", "validation.quality=null", "--set", "validation.latency=null", "--set", "gates={}")


def command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "llmforge", "build", str(RECIPE), "--out", str(out), *FAST, *more]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "LLMFORGE_CACHE": str(cache)}


def run(
    out: Path, cache: Path, *more: str, limits: tuple[tuple[int, int], ...] = ()
) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the error is wanted, as Python has it
        for limit, value in limits:
            resource.setrlimit(limit, (value, value))

    return subprocess.run(
        command(out, *more), capture_output=True, text=True, env=environment(cache), cwd=ROOT, timeout=250,
        preexec_fn=limited, check=False,
    )  # fmt: skip


def nothing_visible(out: Path) -> None:
    left = [path.name for path in out.glob("*/*") if path.name not in (".lock", ".failed")]
    assert left == []


def one_message(stderr: str, says: str) -> None:
    """The last lines are one error and its hint; there is no traceback."""
    assert "Traceback" not in stderr, stderr
    assert stderr.count("error: ") == 1, stderr
    assert says in stderr.replace("\n", " "), stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def digest(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the build gives that nothing interrupts; it fills the cache, so that the others are fast."""
    done = run(tmp_path_factory.mktemp("whole"), cache)
    assert done.returncode == 0, done.stderr
    return Artifact.open(Path(done.stdout.splitlines()[-1])).manifest.content_digest


@pytest.mark.parametrize(
    ("number", "code", "stage"),
    [
        (signal.SIGINT, 130, LOAD),
        (signal.SIGHUP, 129, "Build engine"),
        pytest.param(signal.SIGTERM, 143, LOAD, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "Build engine", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "Build engine", marks=pytest.mark.slow),
    ],
)
def test_signals(number: signal.Signals, code: int, stage: str, cache: Path, digest: str, tmp_path: Path) -> None:
    building = subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(cache), cwd=ROOT,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # the tests themselves may run under nohup
    )  # fmt: skip
    assert building.stderr is not None
    told = ""
    while stage not in told:
        line = building.stderr.readline()
        assert line, told
        told += line
    building.send_signal(number)
    out, rest = building.communicate(timeout=120)
    assert building.returncode == code, told + rest
    assert out == ""
    assert rest.splitlines()[-1] == (
        f"interrupted by {number.name}: nothing was published; run the same command to go on from what the cache kept"
    )
    assert "Traceback" not in rest
    nothing_visible(tmp_path)
    if stage == LOAD:
        return
    again = run(tmp_path, cache)
    assert again.returncode == 0, again.stderr
    assert Artifact.open(Path(again.stdout.splitlines()[-1])).manifest.content_digest == digest


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of the size that `mount` gives it; skips where none may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    yield folder
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def mount(folder: Path, options: str) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")


@pytest.mark.parametrize(
    "size", ["64k", pytest.param("1m", marks=pytest.mark.slow), pytest.param("26760k", marks=pytest.mark.slow)]
)
def test_a_full_disk(size: str, cache: Path, digest: str, tmpfs: Path, tmp_path: Path) -> None:
    """The first two are known to be too small, the last one turns out to be so half way."""
    mount(tmpfs, f"size={size}")
    done = run(tmpfs, cache)
    assert done.returncode == 8, done.stderr
    one_message(done.stderr, "the disk is full")
    nothing_visible(tmpfs)
    if "predicted" in done.stderr:
        assert size in ("64k", "1m")
        return
    assert size == "26760k"
    subprocess.run(["mount", "-o", "remount,size=200m", str(tmpfs)], check=True)
    again = run(tmpfs, cache)
    assert again.returncode == 0, again.stderr
    assert Artifact.open(Path(again.stdout.splitlines()[-1])).manifest.content_digest == digest


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(cache: Path, digest: str, tmp_path: Path) -> None:
    done = run(tmp_path, cache, limits=((resource.RLIMIT_FSIZE, 1 << 20),))
    assert done.returncode == 8, done.stderr
    one_message(done.stderr, "the disk is full")
    nothing_visible(tmp_path)


def test_a_store_that_is_read_only(cache: Path, digest: str, tmpfs: Path) -> None:
    mount(tmpfs, "size=200m,ro")
    done = run(tmpfs, cache)
    assert done.returncode == 8, done.stderr
    one_message(done.stderr, "cannot be written: Read-only file system")


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(digest: str, tmpfs: Path, tmp_path: Path) -> None:
    mount(tmpfs, "size=1m,ro")
    done = run(tmp_path / "out", tmpfs / "cache")
    assert done.returncode == 8, done.stderr
    one_message(done.stderr, "the build cache")
    nothing_visible(tmp_path / "out")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError('std::bad_alloc')",
        pytest.param("MemoryError()", marks=pytest.mark.slow),
        pytest.param("OSError(12, 'no memory')", marks=pytest.mark.slow),
    ],
)
def test_memory_that_runs_out(error: str, cache: Path, digest: str, tmp_path: Path) -> None:
    """An allocation fails while the engine is written."""
    script = (
        "import llmforge.backends.onnx_file as target\n"
        f"def write(*_, **__): raise {error}\n"
        "target.write = write\n"
        "from llmforge.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command(tmp_path)[3:]], capture_output=True, text=True,
        env=environment(cache), cwd=ROOT, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 8, done.stderr
    one_message(done.stderr, "out of memory")
    nothing_visible(tmp_path)


@pytest.mark.slow
def test_a_full_standard_output_does_not_hide_the_artifact(cache: Path, digest: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(tmp_path), stdout=full, stderr=subprocess.PIPE, text=True, env=environment(cache), cwd=ROOT,
            timeout=250, check=False,
        )  # fmt: skip
    assert done.returncode == 8, done.stderr
    one_message(done.stderr, "standard output cannot be written: No space left on device")
    (made,) = tmp_path.glob("*/[!.]*")
    assert f"the artifact was published: {made}" in done.stderr
    assert Artifact.open(made).manifest.content_digest == digest


def test_memory_and_disk_are_predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = Recipe.load(RECIPE)
    assert preflight.check_room(recipe, tmp_path / "not" / "there") == []
    free = psutil.virtual_memory()._replace(available=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    (tight,) = preflight.check_room(recipe, tmp_path)
    assert tight.startswith("memory is tight: the build is predicted to need ")
    monkeypatch.setattr(resources, "usable_memory_bytes", lambda: 10_000_000)
    with pytest.raises(EnvironmentLacks, match=r"out of memory: .* and there are 10\.0 MB"):
        preflight.check_room(recipe, tmp_path)
    monkeypatch.undo()
    little = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: little)
    with pytest.raises(EnvironmentLacks, match="the disk is full: the artifact is predicted to take"):
        preflight.check_room(recipe, tmp_path)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "/x"), "/x: the disk is full"),
        (OSError(122, "Disk quota exceeded"), "the disk is full"),
        (OSError("262144 requested and 0 written"), "the disk is full"),
        (OSError(30, "Read-only file system", "/x"), "/x: Read-only file system"),
        (MemoryError(), "out of memory"),
        (OSError(12, "Cannot allocate memory"), "out of memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
            "out of memory",
        ),
        (RuntimeError("std::bad_alloc"), "out of memory"),
        (OSError(2, "No such file or directory", "/x"), None),
        (RuntimeError("something else"), None),
    ],
)
def test_what_a_machine_lacks_is_known_by_many_names(error: Exception, says: str | None) -> None:
    found = resources.explain(error)
    assert (None if found is None else found.message) == says


def test_what_caused_an_error_is_looked_at() -> None:
    failed = RunFailed("ONNX Runtime failed")
    failed.__cause__ = MemoryError()
    assert resources.out_of_memory(failed)
    assert not resources.out_of_memory(RunFailed("ONNX Runtime failed"))


@pytest.mark.slow
def test_the_clock_goes_back(cache: Path, digest: str, tmp_path: Path) -> None:
    """A build whose clock runs backwards gives the same, and no stage took less than no time."""
    script = (
        "import time, itertools; now, back = time.time(), itertools.count();"
        "time.time = lambda: now - 1000 * next(back);"
        "from llmforge.cli import main; main()"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, *command(tmp_path)[3:]], capture_output=True, text=True,
        env=environment(cache), cwd=ROOT, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Artifact.open(Path(done.stdout.splitlines()[-1])).manifest.content_digest == digest
    assert time.monotonic() - began < 250
