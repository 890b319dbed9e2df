"""What a user installs: a wheel that holds llmforge/ and its metadata, nothing else and nothing twice."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from release import wheels
from release.wheels import LIBRARIES, MAPPED, copy_source

from .samples.wheels import build, hasty_compiler

pytestmark = pytest.mark.xdist_group("packaging")  # its fixtures take seconds: they are made once

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist, as a package index serves them."""
    out = tmp_path_factory.mktemp("dist")
    path = build(source, out)
    assert len(list(out.glob("*.tar.gz"))) == 1
    return path


def shipped() -> dict[str, Path]:
    """Every file that must be in the wheel: its name there, and where it comes from."""
    files = {
        f"llmforge/{path.relative_to(ROOT / 'llmforge').as_posix()}": path
        for pattern in ("*.py", "*.jinja", "*.json", "trace/hooks/*.yaml", "py.typed", "constraints.txt")
        for path in (ROOT / "llmforge").rglob(pattern)
        if not any(parent.is_symlink() for parent in path.parents)
    }
    for pattern in PATTERNS:
        files |= {f"llmforge/{path.relative_to(ROOT).as_posix()}": path for path in ROOT.glob(pattern)}
    return files


PATTERNS = ("passes/*.py", "targets/*.py", "targets/*.yaml", "recipes/*.py", "recipes/*.yaml", "recipes/text/*",
            "docs/**/*.md", "docs/tasks/*")  # fmt: skip


def test_the_symlinks_lead_where_the_mapping_does() -> None:
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    assert {name: f"llmforge.{name}" for name in MAPPED} == {
        folder: package for package, folder in mapping.items() if package != "llmforge"
    }
    for folder in (*MAPPED, "constraints.txt"):
        link = ROOT / "llmforge" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_the_wheel_holds_every_file_once_and_nothing_else(wheel: Path) -> None:
    expected = shipped()
    assert {"llmforge/passes/fuse_norms.py", "llmforge/targets/l4.yaml", "llmforge/recipes/quickstart.yaml"} <= set(
        expected
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names))
        content = {name for name in names if ".dist-info/" not in name}
        assert content == {*expected, *LIBRARIES}
        for name, path in expected.items():
            assert archive.read(name) == path.read_bytes(), name
    metadata = [name for name in names if name not in content]
    assert all(name.startswith("llmforge-") for name in metadata)
    assert "-cp311-abi3-" in wheel.name  # the library uses nothing of Python


@pytest.mark.slow
def test_the_wheel_from_the_checkout_is_that_from_the_sdist(source: Path, wheel: Path, tmp_path: Path) -> None:
    direct = build(source, tmp_path, "--wheel")
    with zipfile.ZipFile(direct) as one, zipfile.ZipFile(wheel) as other:
        digests = [{info.filename: info.CRC for info in archive.infolist()} for archive in (one, other)]
    records = [{name: crc for name, crc in each.items() if not name.endswith("/RECORD")} for each in digests]
    assert records[0] == records[1]


def test_the_sdist_has_no_tests_and_no_links(wheel: Path) -> None:
    (path,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert not any(member.issym() or member.islnk() for member in members)
    tops = {Path(member.name).parts[1] for member in members if len(Path(member.name).parts) > 1}
    metadata = {"llmforge.egg-info", "pyproject.toml", "README.md", "PKG-INFO", "setup.cfg"}
    assert tops == {"llmforge", *MAPPED, *metadata}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True, capture_output=True, timeout=120)
    return folder


def run(installed: Path, code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run code that sees the installed wheel first, and not the checkout."""
    prelude = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    return subprocess.run(
        [sys.executable, "-I", "-c", prelude + code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )


def test_the_installed_package_finds_its_passes_targets_and_recipes(installed: Path, tmp_path: Path) -> None:
    code = (
        "import llmforge, llmforge.passes, llmforge.recipes, llmforge.targets\n"
        "print(llmforge.__file__)\n"
        "print(len(llmforge.passes.ALL), llmforge.targets.load('l4').name, llmforge.targets.local().kind)\n"
        "from llmforge import native; print(native.require())"
    )
    done = run(installed, code, tmp_path)
    assert done.returncode == 0, done.stderr
    file, facts, library = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed)
    assert Path(library) == installed / LIBRARIES[0]
    from llmforge import passes

    assert facts == f"{len(passes.ALL)} l4 cpu"


@pytest.mark.parametrize("name", ["passes", "recipes", "targets"])
def test_the_folders_are_no_packages_of_their_own(installed: Path, tmp_path: Path, name: str) -> None:
    done = run(installed, f"import {name}", tmp_path)
    assert done.returncode == 1
    assert f"ModuleNotFoundError: No module named '{name}'" in done.stderr


def test_what_the_package_tells_is_in_the_wheel(installed: Path, tmp_path: Path, sample_checkpoint: Path) -> None:
    """Documentation, tested versions and recipes are there without a clone."""

    def llmforge(*words: str) -> str:
        done = run(installed, f"sys.argv[1:] = {list(words)!r}\nfrom llmforge.cli import main; main()", tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert llmforge("docs", "docs/quality.md") == (ROOT / "docs/quality.md").read_text(encoding="utf-8")
    assert llmforge("doctor", "--constraints") == (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert llmforge("init", str(sample_checkpoint), "--like", "evidence") == "docs-llama-7m.yaml\n"
    assert f"tasks: [{installed}/llmforge/docs/tasks/" in (tmp_path / "docs-llama-7m.yaml").read_text()


# what is published


def test_a_wheel_is_for_its_processor_and_runs_on_its_glibc(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.check(wheel, "x86_64")
    with pytest.raises(wheels.WrongWheel, match="is not for aarch64"):
        wheels.check(wheel, "aarch64")
    monkeypatch.setattr(wheels, "GLIBC", (2, 5))
    with pytest.raises(wheels.WrongWheel, match=r"requires glibc 2\.\d\d"):
        wheels.check(wheel, "x86_64")
    assert wheels.newest_glibc("GLIBC_2.9 GLIBC_2.17 GLIBC_2.2.5") == (2, 17)


def test_a_wheel_without_kernels_is_not_published(wheel: Path, tmp_path: Path) -> None:
    bare = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(bare, "w") as copy:
        for name in archive.namelist():
            if name != LIBRARIES[1]:
                copy.writestr(name, archive.read(name))
    with pytest.raises(wheels.WrongWheel, match=f"has no {LIBRARIES[1]}"):
        wheels.check(bare, "x86_64")


# Loads both libraries, and prints which kernels they choose there.
PROBE = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **names) {
    for (int i = 1; i < count; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) return puts(dlerror()), 1;
        const char *(*choose)(const char *) = dlsym(library, "llmforge_kernels");
        puts(choose != NULL ? choose(NULL) : dlsym(library, "llmforge_round") != NULL ? "rounds" : "nothing");
    }
    return 0;
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs gcc-aarch64-linux-gnu")
def test_the_wheel_for_aarch64_has_libraries_that_load_there(wheel: Path, tmp_path: Path) -> None:
    if (emulator := shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")) is None:
        pytest.skip("needs qemu-user")
    [sdist] = wheel.parent.glob("*.tar.gz")
    compiler = str(hasty_compiler(tmp_path, "aarch64-linux-gnu-gcc"))
    made = wheels.build_wheel(sdist, tmp_path, "aarch64", compiler)
    assert made.name.endswith("-cp311-abi3-manylinux_2_34_aarch64.whl")
    with zipfile.ZipFile(made) as archive:
        files = [archive.extract(name, tmp_path) for name in LIBRARIES]
    (tmp_path / "probe.c").write_text(PROBE)
    probe = str(tmp_path / "probe")
    subprocess.run(["aarch64-linux-gnu-gcc", str(tmp_path / "probe.c"), "-o", probe, "-ldl"], check=True)
    command = [emulator, "-L", "/usr/aarch64-linux-gnu", probe, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "neon\nrounds\n"), done.stderr
