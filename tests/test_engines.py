"""The builder of an engine is chosen by backend and target, and a choice that nobody builds is refused."""

from __future__ import annotations

import pytest

from llmforge import engines, targets
from llmforge.engines import onnxruntime
from llmforge.errors import UnsupportedError


def test_onnxruntime_on_a_cpu_has_its_builder() -> None:
    assert engines.for_target("onnxruntime", targets.load("cpu-avx2")) is onnxruntime


def test_a_device_that_cannot_load_an_engine_gets_none() -> None:
    with pytest.raises(UnsupportedError, match="cannot load a tensorrt engine") as caught:
        engines.for_target("tensorrt", targets.load("cpu-avx2"))
    assert "backend: onnxruntime" in (caught.value.hint or "")


def test_what_nobody_builds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(engines._BUILDERS, ("onnxruntime", "gpu"))
    with pytest.raises(UnsupportedError, match="builds no onnxruntime engine for target l4") as caught:
        engines.for_target("onnxruntime", targets.load("l4"))
    assert caught.value.exit_code == 6
    assert caught.value.hint
