"""While a layer runs, causal attention is the compiled loops'; all other attention is torch's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from llmforge.calibration.attention import compiled_attention
from llmforge.calibration.layer import DecoderLayer, narrowed
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.quantization.rounding import attention, products

from ..models import zoo

pytestmark = pytest.mark.skipif(not attention.is_compiled(), reason="needs AVX-512")


def ran(layer: DecoderLayer, state: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Run window 0 forwards and backwards: what comes out, and calls of the loops."""
    given = state.clone().requires_grad_()
    with mock.patch.object(attention, "_run", wraps=attention._run) as loops:
        out = layer.run(0, given)
        out.square().sum().backward()
    assert given.grad is not None
    return [out.detach(), given.grad], loops.call_count


def loaded(folder: Path, kind: str, windows: Sequence[int] = (100,)) -> tuple[DecoderLayer, list[torch.Tensor]]:
    """Return the first layer of a model, and what it is given for windows of so many tokens."""
    zoo.write(kind, folder / kind)
    skeleton = Skeleton.build(Checkpoint.open(folder / kind))
    with torch.no_grad():
        calls, states = skeleton.enter([np.arange(3, 3 + tokens) for tokens in windows])
    return skeleton.load(0, calls[0]), states


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_a_layer_makes_what_it_makes_with_torch(kind: str, tmp_path: Path) -> None:
    layer, (state,) = loaded(tmp_path, kind)
    expected, none = ran(replace(layer, as_transformers=True), state)
    found, both = ran(layer, state)
    assert (none, both) == (0, 2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def modes(layer: DecoderLayer, state: torch.Tensor) -> list[bool]:
    """Say of the forward and the backward run of the loops whether they multiply in bf16."""
    given = state.clone().requires_grad_()
    with mock.patch.object(attention, "_run", wraps=attention._run) as loops:
        layer.run(0, given).sum().backward()
    return [call.kwargs["bf16"] for call in loops.call_args_list]


@pytest.mark.skipif(not products.has_bf16(), reason="needs AVX512-BF16")
def test_attention_multiplies_in_bf16_where_linears_of_its_layer_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, (state,) = loaded(tmp_path, "llama")
    other, _ = loaded(tmp_path, "llama")
    assert modes(layer, state) == [False, False]
    with narrowed(layer.linears().values()):
        assert modes(layer, state) == modes(layer.recording(), state) == [True, True]
        assert modes(other, state) == [False, False]
        given = state.clone().requires_grad_()
        out = layer.run(0, given)
        monkeypatch.setattr(products, "has_bf16", lambda: False)
        assert modes(layer, state) == [False, False]
    with mock.patch.object(attention, "_run", wraps=attention._run) as loops:
        out.sum().backward()  # as it ran forwards
    assert loops.call_args.kwargs["bf16"]
    assert modes(layer, state) == [False, False]


def test_runs_of_a_coarse_layer_do_not_depend_on_other_threads(tmp_path: Path) -> None:
    layer, states = loaded(tmp_path, "llama", (70, 1, 129, 64))
    with torch.no_grad(), narrowed(layer.linears().values()), ThreadPoolExecutor(2) as threads:
        expected = [layer.run(window, state) for window, state in enumerate(states)]
        for one, other in zip(threads.map(layer.run, [*range(4)] * 3, states * 3), expected * 3, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "attn_mask": None, "dropout_p": 0.5}, {"attn_mask": torch.ones(6, 6, dtype=torch.bool)}],
)
def test_other_attention_is_left_to_torch(options: dict[str, Any]) -> None:
    q = torch.randn(1, 2, 6, 8)
    with mock.patch.object(attention, "_run") as loops, compiled_attention(True):
        made = scaled_dot_product_attention(q, q, q, **options)
        scaled_dot_product_attention(*[q.expand(2, -1, -1, -1)] * 3, is_causal=True)
        scaled_dot_product_attention(*[q.double()] * 3, is_causal=True)
        scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4], is_causal=True)
    assert not loops.called
    assert made.shape == q.shape
