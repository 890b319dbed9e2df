"""The process of a rank whose GPU is the memory of the host: `ranks.session` starts it in place of its own worker."""

from __future__ import annotations

from pathlib import Path

from llmforge.runtime.backends import loading
from llmforge.runtime.backends.config import RuntimeConfig
from llmforge.runtime.backends.device import HostDevice
from llmforge.runtime.backends.ranks import worker


def reach(config: RuntimeConfig, index: int, file: Path) -> HostDevice:
    assert file.name.startswith(f"model.rank{index}.")
    return HostDevice()


if __name__ == "__main__":
    loading.reach = reach
    worker.main()
