"""Run the graphs of all ranks on the CPU: each up to where they meet, and the meeting by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import interface
from llmforge.ir.operators import is_a
from llmforge.ir.operators.canonical import AllGather, AllReduce
from llmforge.ir.subgraph import Index, behind, extract
from llmforge.parallel.split import RankGraphs
from llmforge.verification import probe
from llmforge.verification.subgraph_session import Arrays, SubgraphSession


class Ranks:
    """The graphs of a split, cut into segments that end where ranks meet."""

    def __init__(self, made: RankGraphs) -> None:
        self.meetings = [node for node in made.ranks[0].graph if is_a(node, AllReduce, AllGather)]
        names = [str(node.outputs[0].name) for node in self.meetings]
        self.segments = list(zip(*(_segments(model, names) for model in made.ranks), strict=True))

    def allocate(self, batch: int, capacity: int) -> list[list[Arrays]]:
        return [[part.allocate(batch, capacity) for part in parts] for parts in self.segments]

    def step(self, step: probe.ProbeCall, caches: list[list[Arrays]]) -> list[NDArray[Any]]:
        """Run one step on all ranks and return the logits of each."""
        live: list[Arrays] = [{} for _ in self.segments[0]]
        for number, parts in enumerate(self.segments):
            for rank, part in enumerate(parts):
                live[rank] |= part.run(step, live[rank], caches[number][rank])
            if number < len(self.meetings):
                node = self.meetings[number]
                read, made = _read(node), str(node.outputs[0].name)
                held = [values[read] for values in live]
                if AllReduce.matches(node):
                    total = np.sum(held, axis=0, dtype=held[0].dtype)
                else:
                    total = np.concatenate(held, axis=node.attributes.get_int("axis"))
                for values in live:
                    values[made] = total
        return [values[interface.LOGITS] for values in live]


def _segments(model: ir.Model, meetings: list[str]) -> list[SubgraphSession]:
    """Cut the graph of one rank in front of each of `meetings` and behind the last; caches go with their attention."""
    index, weights = Index.of(model), probe.InitializerArrays()
    makers = {str(value.name): value for node in model.graph for value in node.outputs}
    left = [str(value.name) for value in model.graph.outputs if value.name not in meetings]
    parts = []
    for number, meeting in enumerate(meetings):
        maker, stops = makers[meeting].producer(), set(meetings[:number])
        assert maker is not None
        read = [value for value in maker.inputs if value is not None]
        nodes, _ = behind(read, lambda value: value.name in stops)  # noqa: B023
        here = [name for name in left if makers[name].producer() in nodes]
        left = [name for name in left if name not in here]
        parts.append(SubgraphSession(extract(index, [_read(maker), *here], stops), weights, 1))
    if left:
        parts.append(SubgraphSession(extract(index, left, set(meetings)), weights, 1))
    return parts


def _read(node: ir.Node) -> str:
    assert node.inputs[0] is not None
    return str(node.inputs[0].name)


def logits(made: RankGraphs, runs: tuple[probe.Run, ...]) -> list[list[NDArray[Any]]]:
    """Drive all ranks through `runs`: by step, the logits of real tokens of each rank."""
    ranks = Ranks(made)
    outcomes = []
    for run in runs:
        caches = ranks.allocate(run.batch, run.capacity)
        outcomes += [[found[step.valid] for found in ranks.step(step, caches)] for step in run.steps]
    return outcomes


def whole(model: ir.Model, runs: tuple[probe.Run, ...]) -> list[NDArray[Any]]:
    """Drive the graph that was split: by step, the logits of real tokens."""
    session = probe.open_session(model, probe.InitializerArrays(), 1)
    return [outcome.logits for run in runs for outcome in probe.drive(session, run, caches=False)]
