"""Two artifacts of one recipe, file by file; where they differ, which stage did first, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.artifact import Artifact
from llmforge.base.errors import InputError
from llmforge.compile import lock
from llmforge.ir import onnx_file
from llmforge.metrics.record import ReportRecord

LISTED = 8  # files, and tensors, that the text names before it counts the rest


class TensorDifference(ReportRecord):
    """One initializer of an engine's graph in both."""

    file: str
    name: str
    elements: int  # codes of less than 8 bits count one by one
    differing: int
    largest: float | None  # absolute difference; None: other shapes or dtypes, or in one of them alone


class BuildComparison(ReportRecord):
    """How a second artifact differs from a first."""

    first: str  # content digests
    second: str
    files: tuple[str, ...]  # of the content, that differ or are in one of them alone
    recipe: bool  # whether the resolved recipes are equal
    stage: str | None  # the first whose digest differs; None: none does, or there is no lock to tell
    tensors: tuple[TensorDifference, ...]
    environment: tuple[str, ...]  # differences of code, packages and machine

    @property
    def equal(self) -> bool:
        """Whether the contents are."""
        return self.first == self.second

    def lines(self) -> list[str]:
        """Say it in words."""
        if self.equal:
            return [f"equal: content digest {self.first}"]
        found = [f"different: content digest {self.first} became {self.second}"]
        found += [f"first stage that differs: {self.stage or 'unknown, no digest of a stage differs'}"]
        found += [f"recipe: {'equal' if self.recipe else 'different'}"]
        found += _listed([f"file: {path}" for path in self.files], "files")
        found += _listed([_words(each) for each in self.tensors], "tensors")
        return found + [f"environment: {line}" for line in self.environment]


def files(first: Artifact, second: Artifact) -> tuple[str, ...]:
    """List the files of the content that are not the same in both."""
    one, other = ({path: each.sha256 for path, each in artifact.manifest.files.items()} for artifact in (first, second))
    return tuple(sorted(path for path in {*one, *other} if one.get(path) != other.get(path)))


def compare(first: Artifact, second: Artifact) -> BuildComparison:
    """Compare the contents of two artifacts, and what their locks say.

    Raises:
        InputError: an engine's graph cannot be read.
    """
    differing = files(first, second)
    graphs = sorted(
        {path.removesuffix(".data") for path in differing if path.removesuffix(".data").endswith(onnx_file.SUFFIX)}
    )
    both = [path for path in graphs if all(path in artifact.manifest.files for artifact in (first, second))]
    stage, environment = _locks(first, second)
    return BuildComparison(
        first=first.manifest.content_digest,
        second=second.manifest.content_digest,
        files=differing,
        recipe=first.manifest.recipe == second.manifest.recipe,
        stage=stage,
        tensors=tuple(each for path in both for each in _tensors(first, second, path)),
        environment=environment,
    )


def _locks(first: Artifact, second: Artifact) -> tuple[str | None, tuple[str, ...]]:
    try:
        one, other = lock.read(first), lock.read(second)
    except InputError:
        return None, ()
    after = {stage.name: stage.sha256 for stage in other.stages}
    stage = next((each.name for each in one.stages if after.get(each.name) != each.sha256), None)
    if one.checkpoint.digest != other.checkpoint.digest:
        stage = "checkpoint"
    pairs = {
        "code": (one.code.sha256, other.code.sha256),
        "native library": (one.code.native_sha256, other.code.native_sha256),
        "OpenBLAS kernels": (one.threads.blas_core, other.threads.blas_core),
        "threads of calibration": (one.threads.calibration, other.threads.calibration),
        "processor": (one.machine.cpu, other.machine.cpu),
        "instruction sets": (" ".join(one.machine.isa), " ".join(other.machine.isa)),
    }
    plugins = [{each.package: each.sha256 for each in held.plugins} for held in (one, other)]
    pairs |= {
        f"code of {name}": (plugins[0].get(name), plugins[1].get(name)) for name in sorted({*plugins[0], *plugins[1]})
    }
    names = sorted({*one.packages, *other.packages})
    pairs |= {name: (one.packages.get(name), other.packages.get(name)) for name in names}
    return stage, tuple(f"{what}: {was} became {now}" for what, (was, now) in pairs.items() if was != now)


@dataclass(frozen=True)
class _StoredTensor:
    """An initializer, and the bits of the codes that its bytes hold."""

    array: NDArray[np.generic]
    bits: int


def _tensors(first: Artifact, second: Artifact, path: str) -> list[TensorDifference]:
    one, other = (_initializers(artifact, path) for artifact in (first, second))
    found = []
    for name in sorted({*one, *other}):
        if name not in one or name not in other:
            found.append(TensorDifference(file=path, name=name, elements=0, differing=0, largest=None))
            continue
        a, b = _read(one[name]), _read(other[name])
        if a.array.shape != b.array.shape or a.array.dtype != b.array.dtype or a.bits != b.bits:
            found.append(TensorDifference(file=path, name=name, elements=a.array.size, differing=0, largest=None))
        elif a.array.tobytes() != b.array.tobytes():
            off = np.abs(_codes(a) - _codes(b))
            count = int(np.count_nonzero(off))
            found.append(
                TensorDifference(file=path, name=name, elements=off.size, differing=count, largest=float(off.max()))
            )
    return found


def _initializers(artifact: Artifact, path: str) -> dict[str, ir.Value]:
    return dict(onnx_file.load(artifact.path / path).graph.initializers)


def _read(value: ir.Value) -> _StoredTensor:
    assert value.const_value is not None
    array = value.const_value.numpy()
    bits = {use.node.attributes["bits"].as_int() for use in value.uses() if "bits" in use.node.attributes}
    packed = array.dtype == np.uint8 and len(bits) == 1
    return _StoredTensor(array, bits.pop() if packed else 8)


def _codes(held: _StoredTensor) -> NDArray[np.float64]:
    """Unpack codes of 2 or 4 bits, element 0 in the lowest bits of a byte; anything else keeps its values."""
    if held.array.dtype != np.uint8 or held.bits not in (2, 4):
        return held.array.astype(np.float64)
    shifts = np.arange(0, 8, held.bits, dtype=np.uint8)
    octets = held.array.view(np.uint8).reshape(-1, 1)
    return ((octets >> shifts) & np.uint8(2**held.bits - 1)).astype(np.float64)


def _words(each: TensorDifference) -> str:
    if each.largest is None:
        return f"{each.file}: {each.name}: in one of them alone, or of another shape or dtype"
    share = each.differing / each.elements
    return (
        f"{each.file}: {each.name}: {each.differing} of {each.elements} values differ ({share:.2%}), by at most "
        f"{each.largest:g}"
    )


def _listed(lines: list[str], what: str) -> list[str]:
    more = len(lines) - LISTED
    return lines if more <= 0 else [*lines[:LISTED], f"and {more} more {what}"]
