"""Texts of different lengths that a model of transformers reads and goes on from together."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class PaddedBatch:
    """Texts [B] in one cache: what all begin with is read once, the others are filled up on the left, and masked."""

    model: Any
    kept: dict[str, Any]  # the cache, by the name of the argument that takes it
    mask: Any  # [B, S], 0: filled up

    @classmethod
    def read(cls, model: Any, texts: Sequence[Sequence[int]], *, keep: int, shares: bool) -> tuple[PaddedBatch, Any]:
        """Read `texts`, ids [S], none empty; also give the logits [B, keep, V] of their last tokens.

        `shares`: what they begin with may stand before the filling, where no window counts the places between.
        """
        import torch
        from transformers import DynamicCache

        from llmforge.trace.hooks import internals

        begin = _shared(texts, keep) if shares and len(texts) > 1 else 0
        cache = DynamicCache(config=model.config)
        batch = cls(model, {internals.cache_argument(model): cache}, torch.ones((1, 0), dtype=torch.long))
        if begin:
            batch.step(torch.tensor([[*texts[0][:begin]]]))
            batch.cache.batch_repeat_interleave(len(texts))
        rest = [[*text[begin:]] for text in texts]
        widest = max(map(len, rest))
        filling = [[0] * (widest - len(each)) + [1] * len(each) for each in rest]
        batch.mask = batch.mask.expand(1, begin).repeat(len(texts), 1)
        step = torch.tensor([each[:1] * (widest - len(each)) + each for each in rest])
        return batch, batch.step(step, torch.tensor(filling), keep=keep)

    @property
    def cache(self) -> Any:
        """Keys and values of what was read."""
        (found,) = self.kept.values()
        return found

    def step(self, ids: Any, filling: Any = None, *, keep: int = 1) -> Any:
        """Read further tokens [B, T]; give the logits [B, keep, V] of the last ones."""
        import torch

        new = torch.ones_like(ids) if filling is None else filling
        self.mask = torch.cat([self.mask.to(new.dtype), new], 1)
        places = {}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            places["position_ids"] = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(
            input_ids=ids, attention_mask=self.mask, use_cache=True, logits_to_keep=keep, **places, **self.kept
        ).logits

    def select(self, rows: list[int]) -> None:
        """Keep some of the texts."""
        import torch

        self.cache.batch_select_indices(torch.tensor(rows))
        self.mask = self.mask[rows]


def _shared(texts: Sequence[Sequence[int]], keep: int) -> int:
    """Count the tokens that all texts begin with, and that are none of the last `keep` of any."""
    first, last = [*min(texts, key=list)], [*max(texts, key=list)]
    found = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return max(0, min(found, min(map(len, texts)) - keep))
