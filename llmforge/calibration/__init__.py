"""Run a checkpoint on calibration text, layer by layer, for what passes want to know about it.

One decoder layer is in memory at a time, and the hidden states of all windows between layers; results go to a cache
layer by layer, so that a calibration that was killed goes on where it was.
"""

from llmforge.calibration.driver import calibrate, key, plan
from llmforge.calibration.store import Store
from llmforge.calibration.threads import openblas

__all__ = ["Store", "calibrate", "key", "openblas", "plan"]
