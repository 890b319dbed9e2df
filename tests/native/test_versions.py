"""Compiled kernels of other sources than the package's are refused, not run."""

import ctypes

import onnxruntime as ort
import pytest

from llmforge import native
from llmforge.base.errors import EnvironmentLacks
from llmforge.quantization import rounding


def test_the_library_says_the_version_of_the_package() -> None:
    assert ctypes.CDLL(str(native.require())).llmforge_version() == native.VERSION


def test_an_older_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    another = str(rounding._library()._name)  # a library, but not of kernels
    monkeypatch.setattr(native, "library", lambda: native.Path(another))
    for use in (native.require, lambda: native.register(ort.SessionOptions())):
        with pytest.raises(EnvironmentLacks, match="it has an older version of the CPU kernels") as caught:
            use()
        assert caught.value.hint == "install llmforge again"
