"""Digests of installed packages: of the code that a build may run of them, which no version tells.

Any module of a package may run: transformers and torch import by names that they make at run time. So all modules and
compiled libraries count, but for tests. Bytecode does not: Python makes it of the sources, and again when these change.

What was read before is not read again while the path, size, modification and change time of every file are the same:
the digest is remembered for the machine, in the user's cache folder, and is of the contents alone, so that machines
with the same packages have the same digest. A file that nobody touched since its package was installed has the digest
that the installer checked and wrote into the package's RECORD (PyPA specifications, *Recording installed projects*).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from llmforge.base.hashed_files import sha256
from llmforge.base.remembered import RememberedTexts

FILE = "installed-code.json"
# What traces, proves, calibrates and runs the baseline: sympy decides shapes, safetensors reads weights.
PACKAGES = (
    "ml_dtypes", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "safetensors", "sympy", "tokenizers", "torch",
    "transformers",
)  # fmt: skip
_MOST = 64  # packages that are remembered, the last ones: those of several environments
_NOT_RUN = frozenset({"__pycache__", "tests", "test"})  # folders
_THREADS = 2  # `stat` leaves the interpreter to others

_File = tuple[str, str]  # its path; its path in the package, size and times


def digest(packages: Sequence[str] = PACKAGES) -> str:
    """Hash the code of `packages`, top-level names of modules; one that is not installed counts as such."""
    with ThreadPoolExecutor(_THREADS) as pool:
        listed = list(pool.map(_files, packages))
        identities = list(map(_identity, listed))
        memory = RememberedTexts(FILE, _MOST)
        known = memory.read()
        new = {
            identity: _contents(files, _recorded(package), pool)
            for package, identity, files in zip(packages, identities, listed, strict=True)
            if identity not in known
        }
    if new:  # where it cannot be written, it is read again the next time
        memory.add(new)
    lines = [f"{name} {(known | new)[each]}\n" for name, each in zip(packages, identities, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def identity(package: str) -> str:
    """Name the state of a package's files on this machine: by their paths, sizes and times, and no content."""
    return _identity(_files(package))


def _identity(files: Sequence[_File]) -> str:
    return hashlib.sha256("\n".join(own for _, own in files).encode()).hexdigest()


def _recorded(package: str) -> tuple[dict[str, str], int]:
    """Read the SHA-256 of files of a package, by their paths in it, and when these were recorded, in ns."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return {}, 0
    found, since = {}, 0
    for path, digest, *_ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        kind, _, value = digest.partition("=")
        if kind == "sha256":
            found[path] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
        elif path.endswith(".dist-info/RECORD"):  # which has no digest of itself
            since = Path(str(distribution.locate_file(path))).stat().st_ctime_ns
    return found, since


def _contents(files: Sequence[_File], recorded: tuple[dict[str, str], int], pool: ThreadPoolExecutor) -> str:
    """Hash what the files of a package hold, by their paths in it."""
    known, since = recorded

    def content(file: _File) -> str:
        path, _, _, *times = file[1].split("\0")
        if path in known and max(map(int, times)) <= since:
            return known[path]
        return sha256(Path(os.path.realpath(file[0])))

    digests = pool.map(content, files)
    lines = [f"{own.split(chr(0))[0]} {held}\n" for (_, own), held in zip(files, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _files(package: str) -> list[_File]:
    """List the modules and compiled libraries of a package, sorted; none: it is not installed."""
    spec = find_spec(package)
    homes = [] if spec is None else list(spec.submodule_search_locations or ())
    found: list[_File] = []
    for home in homes:
        found += _walk(home, package)
        if Path(beside := f"{home}.libs").is_dir():  # what wheels of numpy, and others, bring for theirs
            found += _walk(beside, f"{package}.libs")
    return sorted(found)


def _walk(folder: str, named: str) -> Iterator[_File]:
    """List the files that can run below a folder, which is called `named` in the package."""
    with os.scandir(folder) as entries:
        for entry in entries:
            own = f"{named}/{entry.name}"
            if (entry.name.endswith(".py") or ".so" in entry.name) and entry.is_file():
                status = entry.stat()
                times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
                yield entry.path, f"{own}\0{entry.path}\0{status.st_size}\0{times}"
            elif entry.name not in _NOT_RUN and entry.is_dir():
                yield from _walk(entry.path, own)
