"""Measure what formats cost a checkpoint, layer by layer, on a few windows: what `init` chooses by.

Each change runs beside the checkpoint itself: weights rounded to nearest in each of the formats, keys and values in
int8, rotated, with a scale a token, and what linear layers read in int8. One layer is in memory at a time. Threads take
windows, so that products, and figures, are the same whatever their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge.base.progress import Progress, Silent
from llmforge.cache import Code
from llmforge.calibration import experts
from llmforge.calibration.layer import DecoderLayer
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.store import Store
from llmforge.calibration.threads import fixed
from llmforge.checkpoint import Checkpoint
from llmforge.quantization import allocation, kv_cache
from llmforge.quantization.costs import FormatCost, ModelFormats, ProbedCosts
from llmforge.quantization.formats import ROTATED8_KV
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, dequantize, round_to_nearest
from llmforge.quantization.methods import PLAIN
from llmforge.quantization.statistics import WeightDemand, exclusion

BLOCK = 32  # of activations that share a scale, as those of the CPU kernels have in blocks of 32 weights
_SLOTS = ROTATED8_KV.keys
Ids = NDArray[np.int64]
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@dataclass(eq=False)
class _Rounded:
    """The checkpoint with weights in the formats of `demand`: hidden states [1, tokens, hidden] of each window.

    `head` is what the head has in place of its weight [V, H]; None: its own.
    """

    demand: WeightDemand
    states: list[torch.Tensor]
    head: Float32 | None = field(default=None, repr=False)
    size_bytes: int = 0
    parameters: int = 0  # of which these are the bytes

    def takes(self, matrix: NDArray[Any], grid: Grid) -> None:
        """Count a matrix [N, K] on a grid."""
        n, k = matrix.shape
        self.size_bytes += allocation.size_bytes(n, k, grid)
        self.parameters += n * k


def measure(
    checkpoint: Checkpoint,
    windows: Sequence[Ids],
    formats: Sequence[ModelFormats],
    *,
    threads: int,
    store: Store | None = None,
    progress: Progress | None = None,
) -> ProbedCosts:
    """Measure `formats`, the cache and activations on `windows` of token ids, [tokens] each.

    The same checkpoint, windows and formats have the same figures, which `store` keeps.

    Raises:
        UnsupportedError: the architecture cannot be run layer by layer.
    """
    store, progress = store or Store(), progress or Silent()

    def compute() -> dict[str, Any]:
        with torch.no_grad(), fixed(1), ThreadPoolExecutor(threads) as pool:
            return _measure(checkpoint, windows, formats, pool.map, progress).to_json()

    own = _key(checkpoint, windows, formats, store.tools)
    return ProbedCosts.read(store.figures("probed-formats", own, compute))


def _key(checkpoint: Checkpoint, windows: Sequence[Ids], formats: Sequence[ModelFormats], tools: str) -> str:
    """Hash all that figures depend on, but what decides their last bits alone: threads and processor."""
    digest = hashlib.sha256(checkpoint.digest.encode())
    for ids in windows:
        digest.update(np.int64(len(ids)).tobytes() + ids.tobytes())
    digest.update(repr((list(map(repr, formats)), tools, Code().digest(__name__))).encode())
    return digest.hexdigest()


def _measure(
    checkpoint: Checkpoint, windows: Sequence[Ids], formats: Sequence[ModelFormats], each: Map, progress: Progress
) -> ProbedCosts:
    skeleton = Skeleton.build(checkpoint)
    calls, original = skeleton.enter(windows)
    demands = [WeightDemand(PLAIN(), chosen.linears, tables=chosen.tables) for chosen in formats]
    rounded = [_entered(skeleton, windows, demand, original) for demand in demands]
    cached, coarse = list(original), list(original)
    for index in range(len(skeleton.layers)):
        progress.advance(index, len(skeleton.layers))
        layer = skeleton.load(index, calls[index])
        state, original = original[0], _run(layer, original, each)
        cached = _run_cached(layer, cached, each)
        with _int8_inputs(layer):
            coarse = _run(layer, coarse, each)
        _run_rounded(layer, rounded, state, each)
    progress.advance(len(skeleton.layers), len(skeleton.layers))
    sides = [(made.states, made.head) for made in rounded]
    *of_weights, of_cache, of_inputs = _divergences(
        skeleton, windows, original, [*sides, (cached, None), (coarse, None)]
    )
    total = checkpoint.parameters
    found = [
        FormatCost(chosen, kld, made.size_bytes + 4 * (total - made.parameters))
        for chosen, made, kld in zip(formats, rounded, of_weights, strict=True)
    ]
    return ProbedCosts(sum(map(len, windows)), total, tuple(found), of_cache, of_inputs)


def divergences(
    skeleton: Skeleton, windows: Sequence[Ids], demands: Sequence[WeightDemand], threads: int
) -> list[float]:
    """Return the mean KLD, nats a token, of weights rounded to nearest in the formats of each of `demands`."""
    with torch.no_grad(), fixed(1), ThreadPoolExecutor(threads) as pool:
        calls, original = skeleton.enter(windows)
        rounded = [_entered(skeleton, windows, demand, original) for demand in demands]
        for index in range(len(skeleton.layers)):
            layer = skeleton.load(index, calls[index])
            state, original = original[0], _run(layer, original, pool.map)
            _run_rounded(layer, rounded, state, pool.map)
        return _divergences(skeleton, windows, original, [(made.states, made.head) for made in rounded])


def _entered(
    skeleton: Skeleton, windows: Sequence[Ids], demand: WeightDemand, states: Sequence[torch.Tensor]
) -> _Rounded:
    """Round embedding and head, which may be one, and enter with them."""
    made = _Rounded(demand, list(states))
    embedding, head = skeleton.tables()
    tables: dict[str, Float32] = {}
    for name in filter(None, dict.fromkeys((embedding, head))):
        table = skeleton.table(name)
        grid = None if exclusion([name], demand.exclude) else demand.table_grid(name, table.shape[1])
        if grid is not None and allocation.fits([len(table)], table.shape[1], grid):
            tables[name] = dequantize(round_to_nearest(table, grid))
            made.takes(table, grid)
    if embedding in tables:
        made.states = skeleton.enter(windows, tables[embedding])[1]
    made.head = tables.get(head)
    return made


def _run(layer: DecoderLayer, states: Sequence[torch.Tensor], each: Map) -> list[torch.Tensor]:
    return list(each(lambda it: layer.run(*it), enumerate(states)))


def _run_cached(layer: DecoderLayer, states: Sequence[torch.Tensor], each: Map) -> list[torch.Tensor]:
    """Run a layer over an int8 cache; one that caches something else than keys and values as it is."""
    try:
        return _run(layer.with_cache(_RoundingCache), states, each)
    except (AttributeError, TypeError):  # of what the layer wants of a cache besides
        return _run(layer, states, each)


class _RoundingCache:
    """Stands where the cache does: rounds what a layer caches, and hands it back."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Round `key` and `value`, [1, kv_heads, tokens, channels]."""
        return self._held(key), self._held(value)

    @staticmethod
    def _held(x: torch.Tensor) -> torch.Tensor:
        rows = x.numpy()
        return torch.from_numpy(kv_cache.read(kv_cache.write(rows, _SLOTS), _SLOTS, rows.shape[-1]))


@contextmanager
def _int8_inputs(layer: DecoderLayer) -> Iterator[None]:
    """Round what the linears of `layer` read to int8."""

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_int8(args[0]), *args[1:])

    with ExitStack() as hooks:
        for linear in layer.linears().values():
            hooks.enter_context(linear.register_forward_pre_hook(before))
        yield


def _int8(x: torch.Tensor) -> torch.Tensor:
    """Round x [..., K] in blocks of K that share a scale; as it is where blocks do not divide K."""
    if x.shape[-1] % BLOCK:
        return x
    blocks = x.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    codes = torch.round(blocks / torch.where(scales == 0, 1.0, scales))
    return (codes * scales).reshape(x.shape)


def _run_rounded(layer: DecoderLayer, rounded: Sequence[_Rounded], state: torch.Tensor, each: Map) -> None:
    """Run a layer with its weights in each of the formats; `state` is one that it is called with. It is changed."""
    matrices = _matrices(layer, state)
    for made in rounded:
        grids = {name: _grid(made.demand, name, *given) for name, given in matrices.items()}
        held = [(name, matrices[name][0], grid) for name, grid in grids.items() if grid is not None]
        again = each(lambda it: dequantize(round_to_nearest(it[1], it[2])), held)
        for (name, weight, grid), values in zip(held, again, strict=True):
            layer.set_weight(name, values)
            made.takes(weight, grid)
        made.states = _run(layer, made.states, each)


def _matrices(layer: DecoderLayer, state: torch.Tensor) -> dict[str, tuple[Float32, tuple[int, ...]]]:
    """Return weights [N, K] by name, routers apart, and for experts [E·N, K] both their widths."""
    of_experts = layer.experts()
    routers = layer.routers(layer.groups(state), state) if of_experts else set()
    found: dict[str, tuple[Float32, tuple[int, ...]]] = {
        name: (layer.weight(name), ()) for name in layer.linears() if name not in routers
    }
    for owner, module in of_experts.items():
        for name, rows in zip(experts.matrices(module), experts.rows(module), strict=True):
            found[f"{owner}.{name}"] = (rows, experts.widths(module))
    return found


def _grid(demand: WeightDemand, name: str, weight: Float32, widths: Sequence[int]) -> Grid | None:
    """Return the grid that a pass would store a weight on; None: it stays."""
    if exclusion([name], demand.exclude):
        return None
    wanted = demand.grid_of([name])
    if widths:
        return wanted.fitting(*widths)
    k = weight.shape[1]
    return wanted.of_rows(k) if allocation.fits([len(weight)], k, wanted.of_rows(k)) else None


def _divergences(
    skeleton: Skeleton,
    windows: Sequence[Ids],
    original: Sequence[torch.Tensor],
    changed: Sequence[tuple[Sequence[torch.Tensor], Float32 | None]],
) -> list[float]:
    """Return the mean KLD of each side, hidden states behind the layers and a weight for the head, from `original`."""
    own = skeleton.leaving(windows)
    expected = [own(window, state)[0][0].float().log_softmax(-1) for window, state in enumerate(original)]
    found = []
    for states, weight in changed:
        leave = own if weight is None else skeleton.leaving(windows, weight)
        total = 0.0
        for window, (state, p) in enumerate(zip(states, expected, strict=True)):
            q = leave(window, state)[0][0].float().log_softmax(-1)
            total += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
        found.append(total / sum(map(len, windows)))
    return found
