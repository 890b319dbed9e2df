"""What transformers itself computes on a checkpoint: eager attention, fp32, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

Logits = NDArray[np.float32]  # [tokens, vocabulary]


class ReferenceFails(Exception):
    """transformers cannot load or run the checkpoint as a causal language model, or does so inconsistently."""


@dataclass(frozen=True)
class Reference:
    """A model of transformers."""

    model: Any

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Reference:
        """Load the checkpoint in `folder`, to compute in `dtype`.

        Raises:
            ReferenceFails: its tensors are not those of the model.
        """
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[what]:
                raise ReferenceFails(f"transformers does not load what it saved: {what} {sorted(info[what])[:3]}")
        if dtype == torch.float64:
            model.set_experts_implementation("eager")  # others multiply by kernels without fp64
        return cls(model.eval())

    @torch.no_grad()
    def whole(self, ids: Sequence[int]) -> Logits:
        """Run all tokens at once."""
        output = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        return output.logits[0].float().numpy()

    @torch.no_grad()
    def stepwise(self, ids: Sequence[int], steps: Sequence[int]) -> Logits | None:
        """Run the tokens in `steps` over transformers' own cache; None where it has none or cannot continue it."""
        cache, parts, start = None, [], 0
        for count in steps:
            given: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
            try:
                output = self.model(input_ids=torch.tensor([list(ids[start : start + count])]), use_cache=True, **given)
            except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                return None
            cache = getattr(output, "past_key_values", None)
            if cache is None:
                return None
            parts.append(output.logits[0].float().numpy())
            start += count
        return np.concatenate(parts)

    def look_ahead(self, ids: Sequence[int]) -> float:
        """Largest change of a token's logits when later tokens are left out: 0 but for rounding where it is causal."""
        short = len(ids) // 2
        return float(np.abs(self.whole(ids)[:short] - self.whole(ids[:short])).max())
