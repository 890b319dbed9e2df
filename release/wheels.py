"""Build what is published, into dist/: the sdist, and from it a wheel for each processor (`make wheels`).

A wheel is tagged manylinux_2_34: Ubuntu 22.04, Debian 12, RHEL 9 and newer. The tag is checked against what the
compiled libraries ask of glibc. The wheel for aarch64 comes from a cross compiler (Debian: gcc-aarch64-linux-gnu).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a build reads. Folders that are in the package by a symbolic link (docs/adr/0001-package-mapping.md), and files.
MAPPED = ("passes", "targets", "recipes", "docs")
FILES = ("pyproject.toml", "README.md", "constraints.txt")
GLIBC = (2, 34)  # since which pthread_create is in libc; see `newest_glibc`
LIBRARIES = ("llmforge/native/_kernels.abi3.so", "llmforge/quantization/rounding/_rounding.abi3.so")
# Compiler, and how readelf calls the processor.
PROCESSORS = {
    "x86_64": ("cc", "Advanced Micro Devices X86-64"),
    "aarch64": ("aarch64-linux-gnu-gcc", "AArch64"),
}
SYSTEM = re.compile(r"lib(c|m|pthread)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")  # libraries that every manylinux has


class WrongWheel(Exception):
    """A wheel that must not be published."""


def copy_source(folder: Path) -> Path:
    """Copy what a build reads into `folder`, without what earlier builds left behind; return it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("llmforge", *MAPPED):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def build(source: Path, out: Path, *arguments: str, compiler: str | None = None) -> None:
    """Run `python -m build` without isolation: the environment has what pyproject.toml asks for.

    Raises:
        WrongWheel: it failed.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *arguments, str(source)]
    environ = os.environ if compiler is None else {**os.environ, "CC": compiler}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environ)
    if done.returncode != 0:
        raise WrongWheel(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def build_wheel(sdist: Path, out: Path, processor: str, compiler: str | None = None) -> Path:
    """Build the wheel for a processor from the sdist, and check it; return it.

    Raises:
        WrongWheel: it cannot be built, or is not what its name says.
    """
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{processor}"
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        [source] = Path(folder).iterdir()
        option = f"--config-setting=--build-option=--plat-name={tag}"
        build(source, out, "--wheel", option, compiler=compiler or PROCESSORS[processor][0])
    [wheel] = out.glob(f"*-{tag}.whl")
    check(wheel, processor)
    return wheel


def check(wheel: Path, processor: str) -> None:
    """Return if the libraries in a wheel are for `processor`, and run wherever its tag says.

    Raises:
        WrongWheel: one is missing, or is for other machines.
    """
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in LIBRARIES:
            if name not in archive.namelist():
                raise WrongWheel(f"{wheel.name} has no {name}: was it compiled?")
            file = Path(archive.extract(name, folder))
            facts = _read_elf(file)
            if f"Machine: {PROCESSORS[processor][1]}" not in re.sub(" +", " ", facts):
                raise WrongWheel(f"{wheel.name}: {name} is not for {processor}")
            if (newest := newest_glibc(facts)) > GLIBC:
                raise WrongWheel(f"{wheel.name}: {name} requires glibc {'.'.join(map(str, newest))}")
            needed = re.findall(r"\(NEEDED\).*\[(.+)\]", facts)
            if others := [each for each in needed if SYSTEM.fullmatch(each) is None]:
                raise WrongWheel(f"{wheel.name}: {name} requires {', '.join(others)}")


def newest_glibc(facts: str) -> tuple[int, int]:
    """Find the newest version of glibc's symbols that `facts`, as readelf prints them, name."""
    found = re.findall(r"GLIBC_(\d+)\.(\d+)", facts)
    return max((int(major), int(minor)) for major, minor in found)


def _read_elf(file: Path) -> str:
    command = ["readelf", "--wide", "--file-header", "--dynamic", "--version-info", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout


def main() -> int:
    """Build and name what was built, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processor", action="append", choices=PROCESSORS, help="Default: all.")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "dist", metavar="DIR", help="Default: dist/.")
    given = parser.parse_args()
    chosen = given.processor or list(PROCESSORS)
    for processor in chosen:
        if shutil.which(PROCESSORS[processor][0]) is None:
            print(f"error: no {PROCESSORS[processor][0]} here, which compiles for {processor}", file=sys.stderr)
            return 8
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made"
            build(copy_source(Path(folder) / "source"), made, "--sdist")
            [sdist] = made.glob("*.tar.gz")
            wheels = [build_wheel(sdist, made, processor) for processor in chosen]
            for file in (sdist, *wheels):
                print(shutil.move(file, given.out / file.name))
    except WrongWheel as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
