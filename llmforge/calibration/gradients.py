"""Moments of the gradients of linear layers' outputs: Σ g gᵀ of its gradients, from one run backwards over the layers.

The loss is that of labels which the model draws itself, so that Σ g gᵀ is Fisher's information, the Hessian of the KLD
(YAQA, arXiv 2505.22988, section 4). One layer is in memory at a time: the hidden states in front of each are kept in a
file on the way forward, and it runs once more on the way back.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge.calibration.layer import DecoderLayer, LayerCall, fast, linears_of
from llmforge.calibration.pricing import LinearMoments
from llmforge.calibration.residency import LOGITS, MOST_TOKENS, TOGETHER
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.sums import add_moments, mirror
from llmforge.calibration.threads import IN_ORDER, WindowMap
from llmforge.quantization.grids import Float32

# Gradients are taken of that many tokens, and of more where linears have many outputs, of whose pairs few tokens say
# little: KLD of the sample, 768 outputs at most, on text held out, with 8192 tokens 6.72, with 4096 6.68, 1024 7.36.
TOKENS, PER_OUTPUT = 4096, 3
# Of so many windows, one prices formats with errors that are fitted to the others. Fitted to the same tokens, errors
# were priced too low: SmolLM2-135M's mixed formats of 5.77 bits at 0.0104, measured 0.0156 on other documentation.
PRICING = 4
SEED = 0  # of the labels
_DESCRIBED = "gradients.json"
# Told a layer, the first hidden states that it is called with, and moments of its linears by parameter.
Price = Callable[[DecoderLayer, torch.Tensor, Mapping[str, LinearMoments]], None]


@dataclass(frozen=True, eq=False)
class Gradients:
    """Mean g gᵀ of outputs [N, N] by the parameter of their linear, in a file of `folder` each: `places`.

    `embedding` is that of the first layer's hidden states, [H, H], None where no gradient came so far.  `head` is the
    mean of s·h hᵀ of what the head reads, s = Σ p(1 - p) over its probabilities, None where it is no linear.  `tokens`
    is how many were taken.
    """

    folder: Path
    places: Mapping[str, str]
    embedding: Float32 | None
    head: Float32 | None
    tokens: int

    @classmethod
    def read(cls, folder: Path) -> Gradients:
        """Read what `take` wrote into `folder`, but the outputs."""
        described = json.loads((folder / _DESCRIBED).read_text())
        embedding, head = (_load(folder / f"{name}.npz") if described[name] else None for name in ("embedding", "head"))
        return cls(folder, described["places"], embedding, head, described["tokens"])

    def outputs(self, names: Sequence[str]) -> tuple[Float32, ...]:
        """Return those of linears `names`; none where one of them has none."""
        if not all(name in self.places for name in names):
            return ()
        return tuple(_load(self.folder / self.places[name]) for name in names)


def take(
    skeleton: Skeleton,
    windows: Sequence[NDArray[np.int64]],
    calls: Sequence[Sequence[LayerCall]],
    states: Sequence[torch.Tensor],
    folder: Path,
    price: Price | None = None,
    each: WindowMap = IN_ORDER,
) -> None:
    """Take the gradients of `windows`, ids [tokens], with the hidden `states` in front of the first layer.

    They are written to `folder`. `calls` [layer][window] say how layers are called. Windows are taken evenly. A layer
    through which no gradient flows, and those before it, have none. `price` is called with each layer that has some.
    `each` runs what is done for each window; every thread of it holds the gradients of one.
    """
    chosen = _evenly([len(ids) for ids in windows], _enough(skeleton))
    tokens = sum(len(windows[window]) for window in chosen)
    bounds = np.cumsum([len(windows[window]) for window in chosen])[:-1]
    device = skeleton.device
    current = [device.put(states[window]) for window in chosen]
    with TemporaryDirectory(dir=folder) as passed:
        for layer in skeleton.stream(range(len(skeleton.layers)), calls):
            index, layer = skeleton.prefixes.index(layer.name), replace(layer, each=each)
            np.save(Path(passed) / f"{index}.npy", torch.cat(current, 1).cpu().numpy(), allow_pickle=False)
            with fast(layer.linears().values()):
                current = list(layer.each(layer.run, chosen, current))
            del layer
        flowing, reads = of_loss(skeleton, [windows[window] for window in chosen], current)
        del current
        places: dict[str, str] = {}
        for layer in skeleton.stream(range(len(skeleton.layers))[::-1], calls):
            index, layer = skeleton.prefixes.index(layer.name), replace(layer, each=each)
            kept = np.load(Path(passed) / f"{index}.npy", allow_pickle=False)
            before = [device.put(torch.from_numpy(state.copy())) for state in np.split(kept, bounds, axis=1)]
            sums = _backwards(layer, chosen, before, flowing, reads=price is not None)
            if not flowing:
                break
            places |= {name: f"{number}.npz" for number, name in enumerate(sums.outputs, len(places))}
            files = [folder / places[name] for name in sums.outputs]
            list(layer.each(partial(_save_mean, tokens=tokens), files, sums.outputs.values()))
            if price is not None:
                price(layer, before[0], sums.moments(tokens))
            del layer, sums, before
    if flowing:
        rows = torch.cat([each[0] for each in flowing])
        _save(folder / "embedding.npz", rows.T @ rows / tokens)
    if reads:
        _save(folder / "head.npz", reads[0] / tokens)
    described = {"places": places, "embedding": bool(flowing), "head": bool(reads), "tokens": tokens}
    (folder / _DESCRIBED).write_text(json.dumps(described))


@dataclass(frozen=True, eq=False)
class _Seen:
    """Gradients [tokens, N] of what a linear made of a window, and, where wanted, what it read, [tokens, K].

    `first`: no linear before it has read the same.
    """

    gradient: torch.Tensor
    read: torch.Tensor | None
    first: bool


@dataclass(eq=False)
class _Sums:
    """Sums over tokens, by linear: g gᵀ, and, where what linears read is summed, too, x xᵀ, |g|² x xᵀ and |g|².

    Of a window that fits, x xᵀ is counted, and of one that prices, what is weighted.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # that are in `inputs`
    weighted: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seen: _Seen, *, fits: bool, prices: bool) -> None:
        """Count what was seen of a window. Different linears may be counted at the same time."""
        g, x = seen.gradient, seen.read
        _add(self.outputs, name, g)
        if x is not None and fits and seen.first:
            _add(self.inputs, name, x)
            self.tokens[name] = self.tokens.get(name, 0) + len(x)
        if x is not None and prices:
            squares = g.square().sum(1, keepdim=True)
            _add(self.weighted, name, x * squares.sqrt())
            self.weights[name] = self.weights.get(name, 0.0) + float(squares.sum())

    def moments(self, tokens: int) -> dict[str, LinearMoments]:
        """Hand over the means; `outputs`, of so many `tokens`, are mirrored already."""
        found = {}
        for name, weighted in self.weighted.items():
            mirror(weighted)
            inputs = self.inputs.get(name)
            if inputs is not None:
                mirror(inputs)
                inputs = inputs / self.tokens[name]
            weighted = weighted / max(self.weights[name], torch.finfo(torch.float32).tiny)
            outputs = self.outputs[name] / tokens
            read = None if inputs is None else inputs.cpu().numpy()
            found[name] = LinearMoments(read, weighted.cpu().numpy(), outputs.cpu().numpy())
        return found


def _add(sums: dict[str, torch.Tensor], name: str, rows: torch.Tensor) -> None:
    if name not in sums:
        sums[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
    add_moments(sums[name], rows)


def _backwards(
    layer: DecoderLayer,
    chosen: Sequence[int],
    states: Sequence[torch.Tensor],
    flowing: list[torch.Tensor],
    *,
    reads: bool = False,
) -> _Sums:
    """Carry gradients `flowing` in what `layer` makes of `states` to those in `states`, and sum those of its linears.

    Nothing flows any more where the layer lets no gradient through. `reads`: what linears read is summed, too.
    """
    own, sums, gradients = _OfThread(), _Sums(), list[torch.Tensor | None]()
    apart = len(chosen) >= PRICING

    def run(number: int) -> tuple[dict[str, list[_Seen]], torch.Tensor | None]:
        own.seen, own.read = {}, []
        state = states[number].detach().requires_grad_()
        with torch.enable_grad():
            out = layer.run(chosen[number], state)
            if out.requires_grad:
                out.backward(flowing[number])  # type: ignore[no-untyped-call]
        return own.seen, state.grad

    def count(ran: Sequence[tuple[int, Mapping[str, Sequence[_Seen]]]], name: str) -> None:
        for number, seen in ran:
            last = number % PRICING == PRICING - 1
            for each in seen.get(name, ()):
                sums.add(name, each, fits=not (apart and last), prices=last or not apart)

    linears = layer.linears()
    largest_first = sorted(linears, key=lambda name: -linears[name].out_features)
    with fast(linears.values()), _seen(linears, own, reads=reads):
        for begin in range(0, len(chosen), TOGETHER):
            together = range(begin, min(begin + TOGETHER, len(chosen)))
            seen, made = zip(*layer.each(run, together), strict=True)
            list(layer.each(partial(count, [*zip(together, seen, strict=True)]), largest_first))
            gradients += made
    flowing[:] = [gradient for gradient in gradients if gradient is not None]
    if len(flowing) < len(chosen):
        flowing.clear()
    return sums


def _save_mean(place: Path, total: torch.Tensor, *, tokens: int) -> None:
    """Write the mean over so many tokens of a sum of which one triangle was computed, and mirror it."""
    mirror(total)
    _save(place, total / tokens)


def _save(place: Path, matrix: torch.Tensor) -> None:
    """Write a matrix of moments in fp16, with its largest number apart."""
    largest = max(float(matrix.abs().max()), 2.0**-126)
    np.savez(place, allow_pickle=False, share=(matrix / largest).cpu().half().numpy(), largest=largest)


def _load(place: Path) -> Float32:
    with np.load(place, allow_pickle=False) as arrays:
        share = torch.from_numpy(arrays["share"]).float()  # which takes numpy longer
        matrix: Float32 = share.mul_(float(arrays["largest"])).numpy()
    return matrix


def _enough(skeleton: Skeleton) -> int:
    """Return how many tokens say enough of the outputs of all linears."""
    layers = zip(skeleton.layers, skeleton.prefixes, strict=True)
    outputs = [linear.out_features for layer, prefix in layers for linear in linears_of(layer, prefix).values()]
    return min(max(TOKENS, PER_OUTPUT * max(outputs, default=0)), MOST_TOKENS)


def _evenly(lengths: Sequence[int], tokens: int) -> list[int]:
    """Choose windows of these lengths, every so many, that have about so many `tokens` together, or all."""
    every = max(1, round(sum(lengths) / tokens))
    return list(range(0, len(lengths), every))


def logits_at_a_time(skeleton: Skeleton) -> int:
    """Return how many tokens have their logits in memory."""
    vocabulary: int = skeleton.model.config.get_text_config().vocab_size
    return max(1, LOGITS // vocabulary)


def of_loss(
    skeleton: Skeleton, windows: Sequence[NDArray[np.int64]], states: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return gradients of the loss in the hidden states `states` of `windows` after the layers, and Σ s·h hᵀ, if any.

    See `_of_window`. The head is let go with the return.
    """
    heads: list[torch.nn.Linear] = []
    leave = skeleton.leaving(windows, heads=heads)
    random, reads = torch.Generator().manual_seed(SEED), list[torch.Tensor]()
    rows = logits_at_a_time(skeleton)
    with fast(heads):
        return [_of_window(leave, number, state, rows, random, reads) for number, state in enumerate(states)], reads


def _of_window(
    leave: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]],
    number: int,
    state: torch.Tensor,
    rows: int,
    random: torch.Generator,
    reads: list[torch.Tensor],
) -> torch.Tensor:
    """Return the gradient of the loss of labels, drawn from the model's own, in the hidden states after the layers.

    Σ s·h hᵀ of what the head read is added to the matrix in `reads`, which is put there first. `rows` tokens have their
    logits in memory at a time.
    """
    flowing = []
    for part in torch.split(state.detach(), rows, dim=1):
        given = part.requires_grad_()
        with torch.enable_grad():
            logits, read = leave(number, given)
        change = logits.detach()[0].float().softmax(-1)
        if read is not None:
            h = read.detach().reshape(-1, read.shape[-1])
            if not reads:
                reads.append(h.new_zeros(h.shape[1], h.shape[1]))
            reads[0].addmm_((h * (1 - torch.linalg.vector_norm(change, dim=-1, keepdim=True).square())).T, h)
        labels = draw(change, random)
        change.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=change.dtype))
        logits.backward(change[None].to(logits.dtype))  # type: ignore[no-untyped-call]
        assert given.grad is not None
        flowing.append(given.grad)
    return torch.cat(flowing, 1)


def draw(shares: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Draw one of each row of `shares` [rows, V], which sum to about 1: [rows, 1].

    `torch.multinomial` draws a number for each share, which takes longer than the head's products.
    """
    reached = shares.cumsum(-1)
    wanted = torch.rand(len(shares), 1, generator=random).to(shares.device) * reached[:, -1:]
    return torch.searchsorted(reached, wanted, right=True).clamp_(max=shares.shape[1] - 1)


class _OfThread(threading.local):
    """What a thread sees of a window, and what its linears have read, held so that no address comes twice."""

    seen: dict[str, list[_Seen]]
    read: list[torch.Tensor]


@contextmanager
def _seen(linears: Mapping[str, torch.nn.Linear], own: _OfThread, *, reads: bool) -> Iterator[None]:
    """Keep the gradients of each of `linears` that runs backwards, and, if `reads`, what it read, by its name."""

    def watch(name: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: Any, y: Any) -> None:
            if not isinstance(y, torch.Tensor) or not y.requires_grad:
                return
            kept, x, first = own.seen, None, False  # gradients come on another thread, where a device has its own
            if reads:
                x = _rows(args[0].detach())
                first = all(x.data_ptr() != other.data_ptr() or x.shape != other.shape for other in own.read)
                own.read.append(x)
            y.register_hook(  # type: ignore[no-untyped-call]
                lambda g: kept.setdefault(name, []).append(_Seen(_rows(g), x, first))
            )

        return after

    with ExitStack() as hooks:
        for name, linear in linears.items():
            hooks.enter_context(linear.register_forward_hook(watch(name)))
        yield


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
