"""Calibration of what goes: chosen once, found again, and all that is measured behind it is of what is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmforge.base.errors import UnsupportedError
from llmforge.cache import Cache
from llmforge.calibration import Store, calibrate, plan
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.grid import Grid
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import KvRangeDemand, PruningDemand, WeightDemand
from llmforge.quantization.structure import MlpChannels, PrunableHeads, PrunableLayer, Structure

LAYER = "model.layers.{}."
WEIGHTS = WeightDemand(Gptq(), Grid(4, 32, False))


def demand(checkpoint: Checkpoint, fraction: float) -> PruningDemand:
    """What passes would say of a plain Llama."""
    config = checkpoint.config
    hidden, inner = config.hidden_size, config.intermediate_size
    count, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    blocks = []
    for index in range(config.num_hidden_layers):
        prefix = LAYER.format(index)
        query, key, value, output = (f"{prefix}self_attn.{part}_proj.weight" for part in "qkvo")
        unit = 2 * hidden * dim * (count // kv + 1)
        heads = PrunableHeads(query, key, value, output, count, kv, dim, dim, unit)
        mlp = tuple(f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up"))
        channels = MlpChannels(mlp, f"{prefix}mlp.down_proj.weight", inner, 3 * hidden)
        blocks.append(PrunableLayer(index, prefix, kv * unit + inner * 3 * hidden, heads, channels))
    return PruningDemand(("heads", "channels"), fraction, None, 16, 0.01, Structure(tuple(blocks), ""), 1)


@pytest.fixture
def windows() -> list[TokenWindow]:
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i}", random.integers(3, 259, 40)) for i in range(5)]


def test_what_is_measured_behind_is_of_what_is_left(
    tiny_checkpoint: Path, windows: list[TokenWindow], tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    demands = [demand(checkpoint, 0.4), WEIGHTS, KvRangeDemand()]
    first, again = (calibrate(checkpoint, windows, demands, store=Store(Cache(tmp_path / "kept"))) for _ in range(2))
    kept = first.kept
    assert kept is not None
    assert kept == again.kept
    assert first.notes == again.notes
    assert "held-out tokens" in first.notes[0]
    assert kept.heads
    assert kept.channels
    config = checkpoint.config
    for layer in range(config.num_hidden_layers):
        heads = kept.of_heads(layer) or range(config.num_key_value_heads)
        channels = kept.of_channels(layer) or range(config.intermediate_size)
        assert len(channels) % 16 == config.intermediate_size % 16
        prefix, hidden = LAYER.format(layer), config.hidden_size
        queries = len(heads) * config.num_attention_heads // config.num_key_value_heads * config.head_dim
        assert first.linears[f"{prefix}self_attn.q_proj.weight"].shape == (queries, hidden)
        assert first.linears[f"{prefix}self_attn.k_proj.weight"].shape == (len(heads) * config.head_dim, hidden)
        assert first.linears[f"{prefix}self_attn.o_proj.weight"].shape == (hidden, queries)
        assert first.linears[f"{prefix}mlp.up_proj.weight"].shape == (len(channels), hidden)
        assert first.linears[f"{prefix}mlp.down_proj.weight"].shape == (hidden, len(channels))
        assert first.kv[layer].key.shape == (len(heads), config.head_dim)
    assert set(first.pruned) == set(again.pruned)
    for name, made in first.pruned.items():
        assert made.shape == first.linears[name].shape
        np.testing.assert_array_equal(made, again.pruned[name])
        np.testing.assert_array_equal(first.linears[name].codes, again.linears[name].codes)


def test_what_cannot_be_chosen_is_refused(tiny_checkpoint: Path, windows: list[TokenWindow]) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    with pytest.raises(UnsupportedError, match=r"prune-structure: \d+% of the parameters of layers can go, not more"):
        calibrate(checkpoint, windows, [demand(checkpoint, 0.99)])
    with pytest.raises(UnsupportedError, match="method: auto measures those of the whole model"):
        plan(checkpoint, [demand(checkpoint, 0.3), WeightDemand(Gptq(), Grid(4, 32, False), weight_bits=5.0)], {})
    fixed = Structure(
        tuple(PrunableLayer(i, LAYER.format(i), 1, None, None, ("heads: why",)) for i in range(2)), "no sums"
    )
    with pytest.raises(UnsupportedError, match="nothing can be taken out: heads: why; no sums"):
        plan(checkpoint, [PruningDemand(("heads", "layers"), 0.3, None, 16, 0.01, fixed, 1)], {})
    few = Structure(fixed.blocks[:1], "")
    with pytest.raises(UnsupportedError, match="1 of 2 layers have no attention over keys and values"):
        plan(checkpoint, [PruningDemand(("layers",), 0.3, None, 16, 0.01, few, 1)], {})
