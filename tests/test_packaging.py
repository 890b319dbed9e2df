"""What a user installs: a wheel that holds llmforge/ and its metadata, nothing else and nothing twice."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from .wheels import MAPPED, build, copy_source

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
        for pattern in ("*.py", "*.jinja", "*.json", "py.typed")
        for path in (ROOT / "llmforge").rglob(pattern)
        if not any(parent.is_symlink() for parent in path.parents)
    }
    for folder, pattern in MAPPED.items():
        files |= {f"llmforge/{folder}/{path.name}": path for path in (ROOT / folder).glob(pattern) if path.is_file()}
    files |= {f"llmforge/recipes/text/{path.name}": path for path in (ROOT / "recipes" / "text").iterdir()}
    return files


LIBRARY = "llmforge/native/_kernels.abi3.so"
LOOPS = "llmforge/quantization/rounding/_rounding.abi3.so"


def test_the_symlinks_lead_where_the_mapping_does() -> None:
    for folder in MAPPED:
        link = ROOT / "llmforge" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
        assert (link / "__init__.py").is_file()


def test_the_wheel_holds_every_file_once_and_nothing_else(wheel: Path) -> None:
    expected = shipped()
    assert {"llmforge/passes/fuse_norms.py", "llmforge/targets/l4.yaml", "llmforge/recipes/quickstart.yaml"} <= set(
        expected
    )
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names))
        content = {name for name in names if ".dist-info/" not in name}
        assert content == {*expected, LIBRARY, LOOPS}
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
    assert tops == {"llmforge", "llmforge.egg-info", *MAPPED, "pyproject.toml", "README.md", "PKG-INFO", "setup.cfg"}


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
    assert Path(library) == installed / LIBRARY
    from llmforge import passes

    assert facts == f"{len(passes.ALL)} l4 cpu"


@pytest.mark.parametrize("name", MAPPED)
def test_the_folders_are_no_packages_of_their_own(installed: Path, tmp_path: Path, name: str) -> None:
    done = run(installed, f"import {name}", tmp_path)
    assert done.returncode == 1
    assert f"ModuleNotFoundError: No module named '{name}'" in done.stderr
