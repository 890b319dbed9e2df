"""Run the graphs of all ranks on the CPU: each up to where they meet, and the meeting by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import interface, probe
from llmforge.parts import Arrays, Index, Part, cut_out
from llmforge.tensor_parallel import ALL_GATHER, ALL_REDUCE, Split


class Ranks:
    """The graphs of a split, cut into segments that end where ranks meet."""

    def __init__(self, made: Split) -> None:
        indices = [Index.of(model) for model in made.ranks]
        self.meetings = [node for node in made.ranks[0].graph if node.op_type in (ALL_REDUCE, ALL_GATHER)]
        names = [str(node.outputs[0].name) for node in self.meetings]
        weights = [probe.Weights() for _ in indices]
        self.segments: list[list[Part]] = []
        done: set[ir.Node] = set()
        for number in range(len(names) + 1):
            last = number == len(names)
            ends = [] if last else [str(self.meetings[number].inputs[0].name)]  # type: ignore[union-attr]
            stops = set(names[:number])
            parts = []
            members: set[str] = set()
            for rank, index in enumerate(indices):
                gives = [*ends]
                outputs = [str(value.name) for value in index.model.graph.outputs]
                if last:
                    gives += [name for name in outputs if name not in done and name not in names]
                else:
                    from llmforge.parts import behind

                    nodes, _ = behind([index.values[ends[0]]], stops)
                    made_here = {str(value.name) for node in nodes for value in node.outputs}
                    gives += [name for name in outputs if name in made_here and name not in done]
                members |= set(gives)
                parts.append(Part(cut_out(index, gives, stops), weights[rank], 1) if gives else None)
            done |= members  # type: ignore[arg-type]
            self.segments.append(parts)  # type: ignore[arg-type]

    def allocate(self, batch: int, capacity: int) -> list[list[Arrays]]:
        return [[part.allocate(batch, capacity) if part else {} for part in parts] for parts in self.segments]

    def step(self, step: probe.Step, caches: list[list[Arrays]]) -> list[NDArray[Any]]:
        """Run one step on all ranks and return the logits of each."""
        live: list[Arrays] = [{} for _ in self.segments[0]]
        for number, parts in enumerate(self.segments):
            for rank, part in enumerate(parts):
                if part is not None:
                    live[rank] |= part.run(step, live[rank], caches[number][rank])
            if number < len(self.meetings):
                node = self.meetings[number]
                read, made = str(node.inputs[0].name), str(node.outputs[0].name)  # type: ignore[union-attr]
                held = [values[read] for values in live]
                if node.op_type == ALL_REDUCE:
                    total = np.sum(held, axis=0, dtype=held[0].dtype)
                else:
                    total = np.concatenate(held, axis=node.attributes.get_int("axis"))
                for values in live:
                    values[made] = total
        return [values[interface.LOGITS] for values in live]


def logits(made: Split, runs: tuple[probe.Run, ...]) -> list[list[NDArray[Any]]]:
    """Drive all ranks through `runs`: by step, the logits of real tokens of each rank."""
    ranks = Ranks(made)
    outcomes = []
    for run in runs:
        caches = ranks.allocate(run.batch, run.capacity)
        outcomes += [[found[step.valid] for found in ranks.step(step, caches)] for step in run.steps]
    return outcomes


def whole(model: ir.Model, runs: tuple[probe.Run, ...]) -> list[NDArray[Any]]:
    """Drive the graph that was split: by step, the logits of real tokens."""
    session = probe.open_session(model, probe.Weights(), 1)
    return [outcome.logits for run in runs for outcome in probe.drive(session, run, caches=False)]
