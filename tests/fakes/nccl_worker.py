"""The process of a rank whose GPU is the memory of the host: `ranks.session` starts it in place of its own worker."""

from __future__ import annotations

from pathlib import Path

from llmforge.backends import loading
from llmforge.backends.ranks import worker
from llmforge.runtime.config import RuntimeConfig

from .host_device import HostDevice


def reach(config: RuntimeConfig, index: int, file: Path) -> HostDevice:
    assert file.name.startswith(f"model.rank{index}.")
    return HostDevice()


if __name__ == "__main__":
    loading.reach = reach
    worker.main()
