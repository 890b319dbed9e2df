"""Results of calibrated layers: in memory, or an entry of a cache each, which is read when a result is asked for.

While a calibration runs, the hidden states in front of its next layer are kept, too, so that one that was killed goes
on there; the text is not run again through the layers that are done.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmforge.cache import Cache, Key
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, Packed, QuantizedMatrix, pack, unpack
from llmforge.quantization.low_rank import LowRankCorrection
from llmforge.quantization.sparsity import SparseMatrix
from llmforge.quantization.statistics import InputRange, KvRange, Smoothed

_FILE = "layer.npz"
_STATES = "states"
_FIGURES = "figures.json"
T = TypeVar("T")
STATES_SHARE = 1 / 8  # of the cache that hidden states may take: 2.5 GB of 20, or 75,000 tokens of 8,192 features


class _Stored(Mapping[str, T]):
    """Results by parameter name, each in memory or in the file of its layer, from which each access reads it."""

    def __init__(self, places: Mapping[str, T | Path]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> T:
        place = self._places[name]
        if not isinstance(place, Path):
            return place
        with np.load(place, allow_pickle=False) as arrays:
            return self._read(name, arrays)

    def _read(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> T:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class StoredMatrices(_Stored[QuantizedMatrix]):
    """Quantized linears and tables."""

    def _read(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> QuantizedMatrix:
        described = _json(arrays, "grids")[name]
        k = described.pop("k")
        points, minima = arrays.get(f"{name}/zero_points"), arrays.get(f"{name}/minimums")
        packed = Packed(arrays[f"{name}/codes"], arrays[f"{name}/scales"], points, minima)
        return unpack(packed, Grid(**described), k)

    def grids(self) -> dict[str, Grid]:
        """Return the grid of each, and read no matrix."""
        grids: dict[str, Grid] = {}
        described: dict[Path, dict[str, Any]] = {}
        for name, place in self._places.items():
            if isinstance(place, QuantizedMatrix):
                grids[name] = place.grid
                continue
            if place not in described:
                with np.load(place, allow_pickle=False) as arrays:
                    described[place] = _json(arrays, "grids")
            grids[name] = Grid(**{part: value for part, value in described[place][name].items() if part != "k"})
        return grids


class StoredSparse(_Stored[SparseMatrix]):
    """Linears pruned to 2:4."""

    def _read(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> SparseMatrix:
        return SparseMatrix(arrays[f"{name}/kept"], arrays[f"{name}/places"], _json(arrays, "sparse")[name])


class StoredLowRank(_Stored[LowRankCorrection]):
    """Corrections of quantized linears."""

    def _read(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> LowRankCorrection:
        group, *figures = _json(arrays, "low_rank")[name]
        return LowRankCorrection(arrays[f"{group}/a"], arrays[f"{name}/b"], group, *figures)


class StoredArrays(_Stored[Float32]):
    """Matrices that make up for what was pruned of their inputs."""

    def _read(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> Float32:
        return arrays[f"{name}/pruned"]


@dataclass(frozen=True)
class LayerResult:
    """What one layer yielded: its linears by parameter name, the ranges of its keys and values, and of inputs.

    A linear is here, or in a file: see `StoredMatrices`.
    """

    linears: Mapping[str, QuantizedMatrix | Path]
    kv: KvRange | None
    inputs: Mapping[str, InputRange] = field(default_factory=dict)  # by parameter name
    notes: tuple[str, ...] = ()  # for the report
    sparse: Mapping[str, SparseMatrix | Path] = field(default_factory=dict)  # see `StoredSparse`
    low_rank: Mapping[str, LowRankCorrection | Path] = field(default_factory=dict)  # see `StoredLowRank`
    pruned: Mapping[str, Float32 | Path] = field(default_factory=dict)  # see `StoredArrays`


@dataclass(frozen=True)
class Store:
    """Keeps the layers of calibrations in `cache`; None: they stay in memory. `reused` are those that were found.

    `tools` is a digest of the packages that compute them.
    """

    cache: Cache | None = None
    reused: list[int] = field(default_factory=list)
    tools: str = ""

    def load(self, key: str, index: int) -> LayerResult | None:
        """Return the result of layer `index` of an earlier calibration, which depended on `key`; None if there is none.

        It stays where it is until the cache is closed.
        """
        entry = None if self.cache is None else self.cache.find(_key(key, index))
        if entry is None:
            return None
        self.reused.append(index)
        with np.load(entry.path / _FILE, allow_pickle=False) as arrays:
            kv = KvRange(arrays["kv/key"], arrays["kv/value"]) if "kv/key" in arrays else None
            names, notes, inputs = (_json(arrays, part) for part in ("grids", "notes", "inputs"))
            ranges = {name: _read_range(arrays, name, described) for name, described in inputs.items()}
            sparse, corrected = (_json(arrays, part) for part in ("sparse", "low_rank"))
            pruned = [name.removesuffix("/pruned") for name in arrays if name.endswith("/pruned")]
        file = entry.path / _FILE
        return LayerResult(
            dict.fromkeys(names, file),
            kv,
            ranges,
            tuple(notes),
            dict.fromkeys(sparse, file),
            dict.fromkeys(corrected, file),
            dict.fromkeys(pruned, file),
        )

    def save(self, key: str, index: int, result: LayerResult) -> LayerResult:
        """Keep the result of layer `index`, and return one that reads from there."""
        arrays: dict[str, NDArray[Any]] = {}
        grids = {}
        for name, matrix in StoredMatrices(result.linears).items():
            parts = vars(pack(matrix))
            arrays |= {f"{name}/{part}": array for part, array in parts.items() if array is not None}
            grids[name] = {**asdict(matrix.grid), "k": matrix.shape[1]}
        if result.kv is not None:
            arrays["kv/key"], arrays["kv/value"] = result.kv.key, result.kv.value
        inputs = {name: _write_range(arrays, name, of) for name, of in result.inputs.items()}
        for name, pruned in StoredSparse(result.sparse).items():
            arrays[f"{name}/kept"], arrays[f"{name}/places"] = pruned.values, pruned.places
        costs = {name: pruned.lost for name, pruned in StoredSparse(result.sparse).items()}
        arrays |= {f"{name}/pruned": matrix for name, matrix in StoredArrays(result.pruned).items()}
        figures = {}
        for name, each in StoredLowRank(result.low_rank).items():
            arrays[f"{each.group}/a"], arrays[f"{name}/b"] = each.a, each.b
            figures[name] = [each.group, each.before, each.after, each.codes]
        described = {"inputs": inputs, "sparse": costs, "low_rank": figures, "notes": result.notes, "grids": grids}
        arrays |= {part: np.frombuffer(json.dumps(each).encode(), np.uint8) for part, each in described.items()}

        def write(folder: Path) -> None:
            np.savez(folder / _FILE, allow_pickle=False, **arrays)

        entry = None if self.cache is None else self.cache.put(_key(key, index), write)
        if entry is None:
            return result
        file = entry.path / _FILE
        return replace(
            result,
            linears=dict.fromkeys(result.linears, file),
            sparse=dict.fromkeys(result.sparse, file),
            low_rank=dict.fromkeys(result.low_rank, file),
            pruned=dict.fromkeys(result.pruned, file),
        )

    def gradients(self, key: str, write: Callable[[Path], None], stack: ExitStack) -> Path:
        """Return the folder of gradients that `write` has filled, in an earlier calibration or now.

        Without a cache it lasts as long as `stack`.
        """
        own = Key("calibration-gradients", {"calibration": key})
        if self.cache is not None:
            entry = self.cache.find(own) or self.cache.put(own, write)
            if entry is not None:
                return entry.path
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="llmforge-gradients-")))
        write(folder)
        return folder

    def figures(self, kind: str, key: str, compute: Callable[[], Any]) -> Any:
        """Return what `compute` makes, as JSON has it, in an earlier calibration or now."""
        own = Key(f"calibration-{kind}", {"calibration": key})
        if self.cache is not None and (entry := self.cache.find(own)) is not None:
            return entry.json(_FIGURES)
        made = compute()
        if self.cache is not None:

            def write(folder: Path) -> None:
                (folder / _FIGURES).write_text(json.dumps(made))

            self.cache.put(own, write)
        return made

    def drop_gradients(self, key: str) -> None:
        """Take away the gradients, which no calibration needs any more."""
        if self.cache is not None:
            self.cache.discard(Key("calibration-gradients", {"calibration": key}))

    def keeps_states(self, size_bytes: int) -> bool:
        """Say if hidden states of that size are kept, with a note where they are too large.

        Nothing is kept where the cache is this build's alone.
        """
        if self.cache is None or self.cache.limit_bytes is None:
            return False
        if size_bytes <= self.cache.limit_bytes * STATES_SHARE:
            return True
        self.cache.notes.append(
            f"cache: hidden states of the calibration text ({size_bytes / 1e9:.1f} GB) are more than "
            f"1/{1 / STATES_SHARE:g} of the cache and are not kept: a calibration that is killed runs the text again "
            "through the layers that were done"
        )
        return False

    def keep_states(self, key: str, index: int, states: Iterable[Float32]) -> None:
        """Keep the hidden `states` in front of layer `index`; those of the layer before go."""
        assert self.cache is not None

        def write(folder: Path) -> None:
            with (folder / _STATES).open("wb") as stream:
                for state in states:
                    stream.write(np.ascontiguousarray(state).data)

        self.cache.put(_states_key(key, index), write)
        self.drop_states(key, index - 1)

    def states(self, key: str, lacking: int, shapes: Sequence[tuple[int, ...]]) -> tuple[int, Iterator[Float32]] | None:
        """Find the hidden states in front of layer `lacking`, or of one before it: which layer, and one by one."""
        if self.cache is None:
            return None
        for index in range(lacking, 0, -1):
            if (entry := self.cache.find(_states_key(key, index))) is not None:
                return index, _read_states(entry.path / _STATES, shapes)
        return None

    def drop_states(self, key: str, index: int) -> None:
        """Take away the hidden states in front of layer `index`, which no calibration needs any more."""
        if self.cache is not None:
            self.cache.discard(_states_key(key, index))


def _json(arrays: Mapping[str, NDArray[Any]], part: str) -> Any:
    """Read what of a layer is no array."""
    return json.loads(arrays[part].tobytes())


def _read_states(file: Path, shapes: Sequence[tuple[int, ...]]) -> Iterator[Float32]:
    """Read hidden states one after the other."""
    with file.open("rb") as stream:
        for shape in shapes:
            yield np.fromfile(stream, np.float32, math.prod(shape)).reshape(shape)


def _write_range(arrays: dict[str, NDArray[Any]], name: str, of: InputRange) -> list[float | None]:
    """Put the range of a linear's inputs to `arrays`; return what of it is no array."""
    parts = {"peaks": of.peaks, "sums": of.sums, "squares": of.squares}
    arrays |= {f"{name}/{part}": array for part, array in parts.items() if array is not None}
    if of.smoothed is None:
        return [of.tokens]
    arrays[f"{name}/exponents"] = of.smoothed.exponents
    return [of.tokens, of.smoothed.alpha, of.smoothed.loss_before, of.smoothed.loss]


def _read_range(arrays: Mapping[str, NDArray[Any]], name: str, described: Sequence[Any]) -> InputRange:
    tokens, *figures = described
    smoothed = Smoothed(arrays[f"{name}/exponents"], *figures) if figures else None
    peaks, sums, squares = (arrays.get(f"{name}/{part}") for part in ("peaks", "sums", "squares"))
    assert peaks is not None
    return InputRange(peaks, smoothed, sums, squares, tokens)


def _states_key(key: str, index: int) -> Key:
    return Key("calibration-states", {"calibration": key, "layer": str(index)})


def _key(key: str, index: int) -> Key:
    return Key("calibrated-layer", {"calibration": key, "layer": str(index)})
