"""While a layer runs, causal attention is the compiled loops'; all other attention is torch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from llmforge.calibration.attention import compiled_attention
from llmforge.calibration.layer import DecoderLayer
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint
from llmforge.quantization.rounding import attention

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


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_a_layer_makes_what_it_makes_with_torch(kind: str, tmp_path: Path) -> None:
    zoo.write(kind, tmp_path / kind)
    skeleton = Skeleton.build(Checkpoint.open(tmp_path / kind))
    with torch.no_grad():
        calls, (state,) = skeleton.enter([np.arange(3, 103)])
    layer = skeleton.load(0, calls[0])
    expected, none = ran(replace(layer, as_transformers=True), state)
    found, both = ran(layer, state)
    assert (none, both) == (0, 2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "attn_mask": None, "dropout_p": 0.5}, {"attn_mask": torch.ones(6, 6, dtype=torch.bool)}],
)
def test_other_attention_is_left_to_torch(options: dict[str, Any]) -> None:
    q = torch.randn(1, 2, 6, 8)
    with mock.patch.object(attention, "_run") as loops, compiled_attention():
        made = scaled_dot_product_attention(q, q, q, **options)
        scaled_dot_product_attention(*[q.expand(2, -1, -1, -1)] * 3, is_causal=True)
        scaled_dot_product_attention(*[q.double()] * 3, is_causal=True)
        scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4], is_causal=True)
    assert not loops.called
    assert made.shape == q.shape
