"""The answer of llmforge's own runtime to an artifact that servers of others load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmforge.backends import of_provider
from llmforge.base.errors import UnsupportedError

if TYPE_CHECKING:
    from llmforge.runtime.config import RuntimeConfig


def open_engine(file: Path, config: RuntimeConfig, threads: int | None, gpu: Any) -> NoReturn:
    """Refuse (llmforge.backends, Provider.session).

    Raises:
        UnsupportedError: always; names who loads it.
    """
    backend = of_provider(config.provider)
    assert backend.export_format is not None
    raise UnsupportedError(
        f"{file.parent}: a {backend.title} is loaded by {backend.export_format.servers}, not by llmforge",
        hint=f"run `{backend.export_format.serve.format(engine=file.parent)}`",
    )
