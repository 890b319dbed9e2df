"""Hold a lossy pass to what its budget cannot show: that its loss is the same at every place.

A budget is measured on text of some hundred tokens. So the subgraphs that the pass changed also run at the places that
a build promises, and what it costs there may not be much more than at the near ones. A subgraph that computes in fp32
throughout, with caches in fp32 and the weights that the graph before has, has no reason for any loss: it is held like a
rounding pass.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import operators
from llmforge.ir.subgraph import Index
from llmforge.rewrite import pruning
from llmforge.verification import changed_subgraphs, drawn_places, promises, subgraph_proof
from llmforge.verification.changed_subgraphs import ChangedSubgraph
from llmforge.verification.drawn_places import Drawn, Share
from llmforge.verification.promises import Promises, SyntheticStep
from llmforge.verification.subgraph_proof import Difference, Pair

LARGEST_BYTES = 1 << 28  # of the weights of both sides of a subgraph: a head or an embedding may be larger
TIMES = 4.0  # what a far place may cost beside a near one
APART, TOKEN_APART = 0.05, 0.4  # and by how much more, of a token's size: all tokens on average, and any of them
_TOKENS = 64  # of the longest step
_NEAR = 2  # steps that show what is usual
_AGAIN = 8  # times that a place is run on other numbers before it is refused: its fault stays, luck does not
_CODES = frozenset({ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4})


def hold(
    before: ir.Model,
    after: ir.Model,
    promised: Promises,
    *,
    tolerance: float,
    threads: int,
    seed: int,
) -> Difference | Drawn:
    """Return where `after` is much further from `before` than at near places; else what was run at drawn places.

    `seed` draws them.

    Raises:
        UnsupportedError: ONNX Runtime refuses a subgraph, or fails to run it.
    """
    index = Index.of(before)
    found = changed_subgraphs.differences(index, Index.of(after), precision=False)
    small = [changed for changed in found if changed.size_bytes <= LARGEST_BYTES]
    rounding = [changed for changed in small if _is_plain(changed)]
    outcome = subgraph_proof.prove_all(rounding, index, promised, tolerance=tolerance, threads=threads, seed=seed)
    if isinstance(outcome, Difference):
        return outcome
    drawn = outcome.drawn
    kinds = subgraph_proof.by_kind([changed for changed in small if changed not in rounding])
    for alike, share in subgraph_proof.shares(kinds, seed):
        found_there = _uneven(alike[0], promised, threads, share)
        if isinstance(found_there, Difference):
            return found_there
        drawn += found_there
    return drawn


def _is_plain(changed: ChangedSubgraph) -> bool:
    """Say whether the graph after computes in fp32 here, reads no codes, and no weights that the graph before lacks.

    Where it lacks a layer, it is not plain.
    """
    if changed.reads & pruning.dropped_caches(changed.after.model):
        return False
    if any(operators.view(node).rounds for node in changed.after_nodes):
        return False
    values = (value for node in changed.after_nodes for value in (*node.inputs, *node.outputs) if value is not None)
    dtypes = {value.dtype for value in values} | {tensor.dtype for tensor in changed.after_tensors}
    return not changed.has_new_weights and not any(dtype in _CODES or _is_narrow(dtype) for dtype in dtypes)


def _is_narrow(dtype: ir.DataType | None) -> bool:
    return dtype is not None and dtype.is_floating_point() and dtype.bitwidth < 32


def _uneven(changed: ChangedSubgraph, promised: Promises, threads: int, share: Share) -> Difference | Drawn:
    """Return where a subgraph loses much more than in its first steps; else what was run at drawn places."""
    pair = Pair(changed, threads)
    reach = subgraph_proof.reach_of(pair, promised) if pair.has_places else None
    usual: dict[str, NDArray[np.float64]] = {}
    fixed = (place for place in subgraph_proof.places(pair, promised, reach, tokens=_TOKENS) if not place.scaled)
    extent = subgraph_proof.extent_of(pair, promised, reach)
    drawn = [] if extent is None else [*drawn_places.draw(promised, extent, share)]
    for number, place in enumerate(chain([promises.first(promised)], fixed, drawn)):
        for name, loss in _losses(pair, place).items():
            if number < _NEAR:
                usual[name] = np.maximum(usual.get(name, 0.0), loss)
                continue
            known = usual.setdefault(name, np.zeros(2))
            allowed = np.maximum(TIMES * known, known + np.array([APART, TOKEN_APART]))
            if not (loss > allowed).any():
                continue
            for which in np.flatnonzero(_least(pair, place, name, loss, allowed) > allowed):
                what = f"{name} differ by {loss[which]:.3g} of a token's size, allowed is {allowed[which]:.3g}"
                return Difference(f"{what} ({known[which]:.3g} in the first steps),", place.where)
    return Drawn() if extent is None else Drawn.of(promised, extent, len(drawn))


def _least(
    pair: Pair, place: SyntheticStep, name: str, loss: NDArray[np.float64], allowed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the least losses of the output `name` at a place over runs on other numbers, until none is too large."""
    for again in range(1, _AGAIN + 1):
        loss = np.minimum(loss, _losses(pair, replace(place, seed=place.seed + again)).get(name, loss))
        if not (loss > allowed).any():
            break
    return loss


def _losses(pair: Pair, place: SyntheticStep) -> dict[str, NDArray[np.float64]]:
    """Return what tokens cost on average, and at most, by output: √mean(difference²) / √mean(before²) of each."""
    edges = subgraph_proof.made_up(pair, place, {}, coarse=True)
    found: dict[str, list[NDArray[np.float64]]] = {}
    for made in pair.run(place, edges):
        if made.before.dtype != made.after.dtype:  # codes of a cache: what reads them shows it
            continue
        b, a = (array.astype(np.float64).reshape(-1, array.shape[-1]) for array in (made.before, made.after))
        size = np.sqrt(np.square(b).mean(axis=1))
        with np.errstate(invalid="ignore", over="ignore"):
            moved = np.sqrt(np.square(a - b).mean(axis=1))
        usable = np.isfinite(size) & (size > 0)
        loss = np.nan_to_num(moved[usable] / size[usable], nan=np.inf, posinf=np.inf)
        found.setdefault(made.name, []).append(loss)
    joined = {name: np.concatenate(losses) for name, losses in found.items()}
    return {name: np.array([loss.mean(), loss.max()]) for name, loss in joined.items() if loss.size}
