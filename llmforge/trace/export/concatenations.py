"""Tensors that a model allocates and fills piece by piece, written as what they are: concatenations.

`x = new_empty(…); x[..., :n].copy_(a); x[..., n:].copy_(b)` saves a copy in eager mode. torch.export records the writes
one by one, and ONNX would get a scatter with computed indices for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.new_empty.default)


@dataclass(frozen=True)
class _Piece:
    """`source`, written to [start, stop) of dimension `dim`."""

    dim: int
    start: int
    stop: int
    source: fx.Node
    write: fx.Node


def concatenate(program: torch.export.ExportedProgram) -> None:
    """Replace every empty tensor of `program` that is then filled completely, along one dimension, by a `cat`.

    Fires where the empty tensor is sliced along one dimension only, each slice is written once and as a whole, the
    slices cover it without gap or overlap, and everything else reads it after the last write. Others stay.
    """
    graph = program.graph_module.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _EMPTY:
            continue
        slices = [user for user in node.users if user.target is _aten.slice.Tensor]
        readers = [user for user in node.users if user not in slices]
        pieces = sorted(filter(None, map(_piece, slices)), key=lambda piece: piece.start)
        if len(pieces) != len(slices) or not _cover(node, pieces):
            continue
        last = max((piece.write for piece in pieces), key=order.__getitem__)
        if any(order[reader] < order[last] for reader in readers):
            continue
        with graph.inserting_after(last):
            whole = graph.call_function(_aten.cat.default, ([piece.source for piece in pieces], pieces[0].dim))
        whole.meta = {**last.meta, "val": node.meta["val"]}
        for reader in readers:
            reader.replace_input_with(node, whole)
        for unused in (*(piece.write for piece in pieces), *slices, node):
            graph.erase_node(unused)
        changed = True
    if changed:
        program.graph_module.recompile()


def _piece(view: fx.Node) -> _Piece | None:
    """Read a slice that one `copy_` fills with a tensor of its own shape; None for anything else."""
    (write,) = view.users if len(view.users) == 1 else (None,)
    if write is None or write.target is not _aten.copy_.default or write.users or write.args[0] is not view:
        return None
    source = write.args[1]
    whole = view.args[0]
    if not isinstance(source, fx.Node) or not isinstance(whole, fx.Node):
        return None
    target: Any = view.meta["val"]
    given: Any = source.meta["val"]
    if given.shape != target.shape or given.dtype != target.dtype:
        return None
    given_or_default: list[Any] = [*view.args, *(whole, 0, None, None, 1)[len(view.args) :]]
    dim, start, stop, step = given_or_default[1:]
    size = whole.meta["val"].shape[dim] if isinstance(dim, int) else None
    if not (isinstance(dim, int) and isinstance(size, int) and isinstance(start, int | None) and step == 1):
        return None
    start = start or 0
    end = size if stop is None or not isinstance(stop, int) or stop > size else stop
    return _Piece(
        dim % target.dim(), start % size if start < 0 else start, end % size if end < 0 else end, source, write
    )


def _cover(node: fx.Node, pieces: list[_Piece]) -> bool:
    """Say whether `pieces`, in order, cover `node` along one dimension."""
    if not pieces or len({piece.dim for piece in pieces}) != 1:
        return False
    borders = [0, *(piece.stop for piece in pieces)]
    size = node.meta["val"].shape[pieces[0].dim]
    return [piece.start for piece in pieces] == borders[:-1] and borders[-1] == size
