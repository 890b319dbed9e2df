"""`python -m llmforge.farm.attached PID …`: the command line, in a process that dies with process PID, its parent."""

from __future__ import annotations

import os
import runpy
import signal
import sys

from llmforge.base import process

if __name__ == "__main__":
    process.end_with_parent()
    if os.getppid() != int(sys.argv.pop(1)):  # it died before that
        sys.exit(128 + signal.SIGKILL)
    runpy.run_module("llmforge", run_name="__main__", alter_sys=True)
