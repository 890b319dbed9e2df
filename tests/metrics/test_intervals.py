from __future__ import annotations

import numpy as np
import pytest

from llmforge.metrics import intervals


def test_quantile_interval_is_the_tabulated_one() -> None:
    """Ranks of the tables of distribution-free intervals: 6 and 15 of 20; none below 6 samples."""
    assert intervals.quantile_interval(np.arange(1.0, 21.0)[::-1], 0.5) == (6.0, 15.0)
    assert intervals.quantile_interval(np.arange(5.0), 0.5) is None
    assert intervals.quantile_interval(np.arange(6.0), 0.5) == (0.0, 5.0)
    assert intervals.quantile_interval(np.arange(71.0), 0.95) is None
    assert intervals.quantile_interval(np.arange(72.0), 0.95) is not None


@pytest.mark.parametrize(("quantile", "samples"), [(0.5, 6), (0.9, 36), (0.95, 72), (0.99, 368), (0.05, 72)])
def test_the_fewest_samples_that_have_an_interval(quantile: float, samples: int) -> None:
    assert intervals.fewest(quantile) == samples
    values = np.arange(samples, dtype=np.float64)
    assert intervals.quantile_interval(values, quantile) is not None
    assert intervals.quantile_interval(values[1:], quantile) is None
