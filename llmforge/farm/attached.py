"""`python -m llmforge.farm.attached PID …`: the command line, in a process that dies with process PID, its parent."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv.pop(1)):  # it died before that
        sys.exit(128 + signal.SIGKILL)
    runpy.run_module("llmforge", run_name="__main__", alter_sys=True)
