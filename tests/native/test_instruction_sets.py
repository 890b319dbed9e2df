"""Kernels that the processor at hand does not run, in an emulator: against plain C to the bit, against plain arithmetic."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.native import cases as cases_of
from tests.native.cases import Case

Array = NDArray[Any]
HERE, SOURCES = Path(__file__).parent, Path(__file__).parents[2] / "llmforge" / "native"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror")
