"""ONNX Runtime's CUDA provider, as far as recorded steps go, over a session of the CPU."""

from __future__ import annotations

from typing import Any


class Recorder:
    """A session of ONNX Runtime that does what the CUDA provider is documented to do with `gpu_graph_id`.

    The first run of an id is recorded; later ones run what was bound then, whatever is bound to them.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self.session: Any = None  # of llmforge, whose calls come here
        self.recorded: dict[int, Any] = {}
        self.replays: list[int] = []
        self.silent = False  # never record, and say nothing
        self.error: Exception | None = None

    def __getattr__(self, name):
        return getattr(self._session, name)

    def run_with_iobinding(self, binding, options) -> None:
        number = int(options.get_run_config_entry("gpu_graph_id"))
        if number != -1 and not self.silent:
            if self.error is not None:
                raise self.error
            if number in self.recorded:
                self.replays.append(number)
            binding = self.recorded.setdefault(number, binding)
        self._session.run_with_iobinding(binding)
