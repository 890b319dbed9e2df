"""Run a checkpoint on calibration text, layer by layer, for what passes want to know about it.

One decoder layer is in memory at a time, and the hidden states of all windows between layers; results go to a cache
layer by layer, so that a calibration that was killed goes on where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmforge.calibration.store import Store
from llmforge.calibration.threads import openblas

if TYPE_CHECKING:
    from llmforge.calibration.driver import calibrate, key, plan

__all__ = ["Store", "calibrate", "key", "openblas", "plan"]


def __getattr__(name: str) -> Any:
    """Import the driver when it is first wanted, and torch with it: most builds calibrate nothing."""
    if name not in ("calibrate", "key", "plan"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llmforge.calibration import driver

    return getattr(driver, name)
