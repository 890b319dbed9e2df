"""Which ranges are tried."""

import numpy as np
from numpy.typing import NDArray

STEPS = 5


def shares(narrowest: float) -> NDArray[np.float32]:
    """List shares of the whole range, from 1 down to `narrowest`."""
    return np.linspace(1, narrowest, STEPS, dtype=np.float32)
