"""Activations of a graph at chosen values while it reads a text, with their outliers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.ir import graph
from llmforge.ir.derived import Stored
from llmforge.ir.graph import is_constant
from llmforge.ir.interface import INPUT_IDS
from llmforge.ir.operators.standard import Gather
from llmforge.ir.subgraph import Index, extract
from llmforge.verification import probe
from llmforge.verification.probe import ProbeCall
from llmforge.verification.promises import SyntheticStep
from llmforge.verification.subgraph_session import SubgraphSession

TOKENS = 24  # of the text that is read
SHALLOW_BYTES = 1 << 28  # of weights that are read for it: of a large model, its first layers


@dataclass(frozen=True, eq=False)
class Recorded:
    """Values by name, as they were in a prefill: the step `place`."""

    place: SyntheticStep
    values: Mapping[str, NDArray[Any]] = field(repr=False)

    def covers(self, names: Collection[str]) -> bool:
        """Say whether each of `names` was recorded, and there are any."""
        return bool(names) and all(name in self.values for name in names)


def record(index: Index, names: Collection[str], text: NDArray[np.int64], threads: int) -> Recorded:
    """Run the graph on the first tokens of `text`, as far as its weights are few, and keep the values `names`.

    Raises:
        UnsupportedError: ONNX Runtime refuses the graph.
    """
    ids = text[None, :TOKENS]
    place = SyntheticStep("text", ProbeCall(ids, np.array([ids.shape[1]]), np.zeros(1, np.int32)))
    found = _looked_up(index, ids)
    values = {name: found[name] for name in names if name in found}
    wanted = sorted(set(names) - values.keys(), key=lambda name: index.position[graph.producer(index.values[name])])
    while wanted:
        model = extract(index, wanted, found.keys())
        if graph.weight_bytes(model) <= SHALLOW_BYTES:
            session = SubgraphSession(model, probe.InitializerArrays(), threads)
            made = session.run(place.step, found, session.allocate(1, place.capacity))
            values |= {name: made[name] for name in wanted}
            break
        wanted = wanted[: len(wanted) // 2]
    return Recorded(place, values)


def _looked_up(index: Index, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Look `ids` up in stored embeddings, of which the rest is not read."""
    found = {}
    for lookup in Gather.all(index.model):
        tensor = lookup.data.const_value
        if lookup.indices.name != INPUT_IDS or lookup.axis != 0 or not is_constant(lookup.data):
            continue
        if isinstance(tensor, Stored) and tensor.is_matrix and not tensor.transposed:
            found[str(lookup.output.name)] = tensor.stored()[ids].astype(np.float32)
    return found
