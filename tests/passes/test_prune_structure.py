"""prune-structure: the graph without heads, channels and layers is the model with those features at zero."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmforge.calibration import calibrate, plan
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import Window
from llmforge.ir import dialect, graph
from llmforge.lowering import pruning
from llmforge.lowering.pass_base import Budget, Context
from llmforge.passes import PruneStructure
from llmforge.quantization import structure
from llmforge.quantization.statistics import PruningDemand, Statistics
from llmforge.trace import trace

from .. import graphs, zoo

LOOSE = Budget(kld_mean=20.0)
FORM = graphs.Llama(layers=3, hidden=64, heads=6, kv_heads=3, mlp=96)


def windows(count: int = 6) -> list[Window]:
    random = np.random.default_rng(0)
    return [Window(f"d{i}", random.integers(3, 259, 40)) for i in range(count)]


def masked(folder: Path, found: Statistics, shape: structure.Structure) -> Any:
    """Load the checkpoint with transformers, and put the matrices that make up in, with zeros where features are gone."""
    model = zoo.reference(folder)
    parameters = dict(model.named_parameters())
    assert found.kept is not None
    for block in shape.blocks:
        if block.index in found.kept.dropped:
            model.model.layers[block.index].forward = lambda hidden_states, *args, **kwargs: hidden_states
            continue
        places: list[tuple[str, Sequence[int] | None, int]] = []
        if block.heads is not None:
            width = block.heads.shared * block.heads.value_dim
            places.append((block.heads.output, found.kept.of_heads(block.index), width))
        if block.channels is not None:
            places.append((block.channels.output, found.kept.of_channels(block.index), 1))
        for name, units, width in places:
            if units is None:
                continue
            own = parameters[name]
            with torch.no_grad():
                own.zero_()
                for number, unit in enumerate(units):
                    of_unit = torch.from_numpy(found.pruned[name][:, number * width : (number + 1) * width].copy())
                    own[:, unit * width : (unit + 1) * width] = of_unit
    return model


@pytest.mark.parametrize(
    ("name", "changes", "kinds", "fraction"),
    [
        ("llama", {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}, "all", 0.45),
        pytest.param("qwen3", {"num_key_value_heads": 2, "attention_bias": True}, "units", 0.3, marks=pytest.mark.slow),
        pytest.param("gemma2", {}, "units", 0.3, marks=pytest.mark.slow),
        pytest.param("llama-mha-biases", {}, "units", 0.3, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", {"num_key_value_heads": 4}, "units", 0.05, marks=pytest.mark.slow),
    ],
)
def test_the_pruned_graph_is_the_model_with_zeros(
    name: str, changes: dict[str, Any], kinds: str, fraction: float, tmp_path: Path
) -> None:
    zoo.write(name, tmp_path, **changes)
    checkpoint = Checkpoint.open(tmp_path)
    model = trace(checkpoint)
    units = ("heads", "channels", "layers") if kinds == "all" else ("heads", "channels")
    step = PruneStructure(budget=LOOSE, fraction=fraction, units=units)
    demands = [pruning.bound(demand, model) for demand in step.demands()]
    plan(checkpoint, demands, dialect.caches(model))
    found = calibrate(checkpoint, windows(), demands, caches=dialect.caches(model))
    assert found.kept is not None
    assert found.kept.heads or found.kept.channels
    [demand] = demands
    assert isinstance(demand, PruningDemand)
    assert demand.structure is not None
    expected = masked(tmp_path, found, demand.structure)
    before = sum(np.prod(graph.static(value)) for value in model.graph.initializers.values() if graph.sources(value))
    changes_made = step.run(model, Context(graphs.TARGET, found))
    assert changes_made
    dialect.check(model)
    after = sum(np.prod(graph.static(value)) for value in model.graph.initializers.values() if graph.sources(value))
    assert before - after >= 0.95 * demand.target
    assert zoo.largest_difference(dialect.expand(model), expected, zoo.Schedule((9, 14))) < 1e-5
    plain = zoo.reference(tmp_path)
    assert zoo.largest_difference(dialect.expand(model), plain, zoo.Schedule((9, 14))) > 1e-2
