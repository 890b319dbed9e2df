"""How many tokens have another rank than with the checkpoint."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmforge.metrics import units
from llmforge.metrics.catalog import QualityMetric
from llmforge.metrics.quality import OfSums
from llmforge.metrics.tokens import TokenBlock, TokenValue


def moved(block: TokenBlock) -> NDArray[np.bool_]:
    """Say whether the true token has another rank than in the reference [R]."""
    ranks = [
        (logits > np.take_along_axis(logits, block.targets[:, None], -1)).sum(-1)
        for logits in (block.reference, block.logits)
    ]
    return ranks[0] != ranks[1]


RANK_MOVED = QualityMetric(
    name="rank_moved",
    title="Rank moved",
    meaning="tokens whose rank is not the baseline's",
    unit=units.SHARE,
    better="lower",
    form=OfSums((TokenValue("rank_moved", moved),), lambda tokens, moved: moved / tokens),
)
