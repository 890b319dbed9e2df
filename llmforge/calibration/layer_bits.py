"""Bits by linear layer at the size of one format: what `init` writes as `layer_bits`.

A price is ½ Σ F·e² of the errors e of a weight, rounded with its inputs weighed as `methods.importance` has it, and the
diagonal F of Fisher's information: the mean of g²x² over tokens whose labels the model draws (`calibration.gradients`
has the source). One run forwards and one backwards price 4, 5, 6 and 8 bits of every weight, a knapsack takes those
that lose least, and the choice is run once, rounded to nearest.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from llmforge.base.progress import Progress, Silent
from llmforge.calibration import probe
from llmforge.calibration.gradients import fast, of_loss
from llmforge.calibration.layer import DecoderLayer, Map
from llmforge.calibration.pricing import TABLE_ROWS
from llmforge.calibration.probe import Ids
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.store import Store
from llmforge.calibration.threads import fixed
from llmforge.checkpoint import Checkpoint
from llmforge.quantization import allocation
from llmforge.quantization.allocation import FormatOption
from llmforge.quantization.costs import MixedBits, ModelFormats
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, dequantize
from llmforge.quantization.methods import PLAIN
from llmforge.quantization.methods.base import InputStatistic, LayerInputs
from llmforge.quantization.methods.importance import Importance
from llmforge.quantization.statistics import LayerBits, WeightDemand

Names = tuple[str, ...]  # of weights that must share a format
Options = dict[Names, dict[int, FormatOption]]  # by bits


def choose(
    checkpoint: Checkpoint,
    windows: Sequence[Ids],
    chats: Sequence[Ids],
    formats: ModelFormats,
    bits: Sequence[int],
    *,
    threads: int,
    store: Store | None = None,
    progress: Progress | None = None,
) -> MixedBits | None:
    """Choose among `bits` for each linear layer and table, in as many bytes as `formats` take in all of them.

    They are priced on `windows` and `chats` of token ids, [tokens] each, and measured on `windows`. None: one
    format is best, or the model has experts, which have 4 or 8 bits. `store` keeps what was found.

    Raises:
        UnsupportedError: the architecture cannot be run layer by layer.
    """
    store, progress = store or Store(), progress or Silent()

    def compute() -> dict[str, Any] | None:
        with torch.no_grad(), fixed(1), ThreadPoolExecutor(threads) as pool:
            skeleton = Skeleton.build(checkpoint)
            layer_bits = _Prices(skeleton, [*windows, *chats], formats, bits, pool.map, progress).best()
        if not layer_bits:
            return None
        demand = WeightDemand(PLAIN(), formats.linears, tables=formats.tables, layer_bits=layer_bits)
        kld = probe.divergences(skeleton, windows, [demand], threads)[0]
        return MixedBits(layer_bits, sum(map(len, [*windows, *chats])), kld).to_json()

    own = probe.key_of(checkpoint, [*windows, *chats], (len(windows), formats, tuple(bits)), store.tools, __name__)
    made = store.figures("layer-bits", own, compute)
    return None if made is None else MixedBits.read(made)


def globs(chosen: Mapping[Names, int], usual: Mapping[Names, int]) -> LayerBits:
    """Write the bits of weights that have others than is `usual` as globs of their parameters, as few as say it."""
    bits = {name: own for names, own in chosen.items() for name in names}
    found: dict[str, int] = {}
    done: set[str] = set()
    for names, own in chosen.items():
        if own == usual[names] or names[0] in done:
            continue
        parts = names[0].split(".")
        for owner in (".".join(parts[:end]) + "." for end in range(1, len(parts))):
            beneath = [name for name in bits if name.startswith(owner)]
            if {*names} < {*beneath} and all(bits[name] == own for name in beneath):
                found[f"{glob.escape(owner)}*"] = own
                done.update(beneath)
                break
        else:
            found |= dict.fromkeys(_matching(names, bits), own)
    return tuple(found.items())


def _shared(texts: Sequence[str]) -> str:
    """Return what all of `texts` begin with."""
    alike = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in alike)


def _matching(names: Names, others: Iterable[str]) -> list[str]:
    """Write a glob that matches `names` and no others, as "self_attn.[kqv]_proj.weight"; else one for each."""
    prefix = _shared(names)
    ends = [name[len(prefix) :] for name in names]
    suffix = _shared([end[::-1] for end in ends])[::-1]
    differing = [end.removesuffix(suffix) for end in ends]
    if len(names) > 1 and all(each[:1].isalnum() for each in differing):
        any_length = "*" if max(map(len, differing)) > 1 else ""
        first = "".join(sorted({each[0] for each in differing}))
        found = f"{glob.escape(prefix)}[{first}]{any_length}{glob.escape(suffix)}"
        if fnmatch.filter(others, found) == [name for name in others if name in names]:
            return [found]
    return [glob.escape(name) for name in names]


@dataclass(frozen=True, eq=False)
class _Prices:
    """What each of `bits` is to cost each weight of a model, on `windows`."""

    skeleton: Skeleton
    windows: Sequence[Ids]
    formats: ModelFormats
    bits: Sequence[int]
    each: Map
    progress: Progress

    def best(self) -> LayerBits:
        """Choose what loses least in as many bytes; (): one format."""
        linears, tables = self._of_linears_and_tables()
        usual = dict.fromkeys(linears, self.formats.linears.bits)
        if self.formats.tables is not None:
            usual |= dict.fromkeys(tables, self.formats.tables.bits)
        options = linears | tables
        if not options:
            return ()
        most = sum(options[names][own].size_bytes for names, own in usual.items())
        places = allocation.allocate({names[0]: list(of.values()) for names, of in options.items()}, most)
        return globs({names: list(of)[places[names[0]]] for names, of in options.items()}, usual)

    def _of_linears_and_tables(self) -> tuple[Options, Options]:
        """Run forwards and backwards; none where a layer has experts, or lets no gradient through."""
        skeleton, windows = self.skeleton, self.windows
        calls, current = skeleton.enter(windows)
        depth, passed = len(skeleton.layers), list[list[torch.Tensor]]()
        for index in range(depth):
            self.progress.advance(index, 2 * depth)
            layer = skeleton.load(index, calls[index])
            if layer.experts():
                return {}, {}
            passed.append(current)
            with fast(layer.linears().values()):
                current = list(self.each(layer.run, range(len(windows)), current))
        flowing, reads = of_loss(skeleton, windows, current)
        found: Options = {}
        for index in reversed(range(depth)):
            self.progress.advance(2 * depth - index, 2 * depth)
            layer, before = skeleton.load(index, calls[index]), passed.pop()
            fisher = self._fisher(layer, before, flowing)
            if not flowing:
                return {}, {}
            found = self._of_layer(layer, layer.groups(before[0]), fisher) | found
        return found, self._of_tables(flowing, reads)

    @property
    def _tokens(self) -> int:
        return sum(map(len, self.windows))

    def _fisher(
        self, layer: DecoderLayer, before: Sequence[torch.Tensor], flowing: list[torch.Tensor]
    ) -> dict[str, _Fisher]:
        """Carry gradients to in front of `layer`; what they say of each weight. None flow where it has none."""
        own = _SeenOfThread()

        def run(window: int) -> tuple[torch.Tensor | None, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
            seen = own.seen = {}
            state = before[window].detach().requires_grad_()
            with torch.enable_grad():
                out = layer.run(window, state)
                if out.requires_grad:
                    out.backward(flowing[window])  # type: ignore[no-untyped-call]
            return state.grad, seen

        linears = layer.linears()
        with fast(linears.values()), _watched(linears, own):
            made = list(self.each(run, range(len(before))))
        flowing[:] = [gradient for gradient, _ in made if gradient is not None]
        if len(flowing) < len(before):
            flowing.clear()
        names = [name for name in linears if all(name in seen for _, seen in made)]

        def joined(name: str) -> _Fisher:
            g, x = (torch.cat([seen[name][side] for _, seen in made]) for side in (0, 1))
            squares = x.square()
            return _Fisher(g.T @ squares / self._tokens, _inputs(x.sum(0), squares.sum(0), self._tokens))

        return dict(zip(names, self.each(joined, names), strict=True))

    def _of_layer(self, layer: DecoderLayer, groups: Sequence[Sequence[str]], fisher: Mapping[str, _Fisher]) -> Options:
        """Price linears of a layer, those that read the same together."""
        found: Options = {}
        for names in groups:
            if not all(name in fisher for name in names):
                continue
            weights = [layer.weight(name) for name in names]
            grids = [self.formats.linears.of_bits(bits) for bits in self.bits]
            grids = [grid for grid in grids if all(allocation.fits([len(w)], w.shape[1], grid) for w in weights)]
            if self.formats.linears not in grids:
                continue
            pairs = [(weight, fisher[name]) for name, weight in zip(names, weights, strict=True)]
            lost = list(self.each(lambda it: _lost(*it), [(*pair, grid) for grid in grids for pair in pairs]))
            found[tuple(names)] = {
                grid.bits: FormatOption(
                    sum(allocation.size_bytes(len(weight), weight.shape[1], grid) for weight in weights),
                    sum(lost[at * len(pairs) : (at + 1) * len(pairs)]),
                )
                for at, grid in enumerate(grids)
            }
        return found

    def _of_tables(self, flowing: Sequence[torch.Tensor], reads: Sequence[torch.Tensor]) -> Options:
        """Price embedding and head, which may be one, on some of their rows; each has the same share of gradients."""
        embedding, head = self.skeleton.tables()
        found: Options = {}
        if self.formats.tables is None or not reads:
            return found
        diagonals = dict.fromkeys(filter(None, (embedding, head)), torch.zeros(()))
        for name, squares in (
            (embedding, torch.cat([each[0] for each in flowing]).square().sum(0)),
            (head, reads[0].diagonal()),
        ):
            if name:
                diagonals[name] = diagonals[name] + squares / self._tokens
        for name, diagonal in diagonals.items():
            table = self.skeleton.table(name)
            v, k = table.shape
            grid = self.formats.tables.dividing(k)
            if grid is None or not allocation.fits([v], k, grid):
                continue
            rows = np.unique(np.linspace(0, v - 1, TABLE_ROWS).round().astype(np.intp))
            some = table[rows].astype(np.float32)
            given = {bits: grid.of_bits(bits) for bits in self.bits}
            read = reads[0].diagonal() if name == head else torch.zeros(k)  # s·h², whose mean h is not known here
            known = _Fisher(diagonal, _inputs(torch.zeros(k), read, self._tokens))
            found[name,] = {
                bits: FormatOption(allocation.size_bytes(v, k, own), _lost(some, known, own) / len(rows))
                for bits, own in given.items()
            }
        return found


class _Fisher(NamedTuple):
    """The diagonal of a weight, [N, K], or [K] where rows are alike, and what it reads."""

    diagonal: torch.Tensor
    inputs: LayerInputs


def _inputs(sums: torch.Tensor, squares: torch.Tensor, tokens: int) -> LayerInputs:
    """Describe inputs by their sums and squares, [K]."""
    return LayerInputs(
        tokens, False, {InputStatistic.SUMS: sums.numpy(), InputStatistic.SQUARES: squares.contiguous().numpy()}
    )


def _lost(weight: Float32, fisher: _Fisher, grid: Grid) -> float:
    """Return ½ Σ F·e² of what rounding leaves of a weight [N, K]."""
    error = torch.from_numpy(weight - dequantize(Importance().quantize(weight, grid, fisher.inputs)))
    return 0.5 * float((error.square_() * fisher.diagonal).sum())


class _SeenOfThread(threading.local):
    """g² and x of each linear, [tokens, N] and [tokens, K], of the window that a thread runs."""

    seen: dict[str, tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def _watched(linears: Mapping[str, torch.nn.Linear], own: _SeenOfThread) -> Iterator[None]:
    """Note what each of `linears` reads, and the squares of its gradients as it runs backwards."""

    def watch(name: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: Any, y: Any) -> None:
            if not isinstance(y, torch.Tensor) or not y.requires_grad:
                return
            seen, x = own.seen, args[0].detach()

            def backward(g: torch.Tensor) -> None:
                seen[name] = g.reshape(-1, g.shape[-1]).square(), x.reshape(-1, x.shape[-1])

            y.register_hook(backward)  # type: ignore[no-untyped-call]

        return after

    with ExitStack() as hooks:
        for name, linear in linears.items():
            hooks.enter_context(linear.register_forward_hook(watch(name)))
        yield
