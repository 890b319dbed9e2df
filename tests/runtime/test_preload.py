"""Where ONNX Runtime is told to look for the libraries of CUDA that pip installs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmforge.backends.onnxruntime.cuda import session


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, object]]:
    """What `onnxruntime.preload_dlls` is called with, of a package in `tmp_path`/own; `nvidia` is found on the path."""
    made: list[dict[str, object]] = []

    def preload_dlls(**options: object) -> None:
        made.append(options)
        print("of the last call" if not options else "of an earlier call")

    fake = SimpleNamespace(__file__=str(tmp_path / "own" / "onnxruntime" / "__init__.py"), preload_dlls=preload_dlls)
    monkeypatch.setattr(session, "ort", fake)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "own"), str(tmp_path / "base")])
    return made


def test_libraries_of_another_folder_of_the_path_are_loaded_first(calls: list[dict[str, object]], tmp_path: Path):
    """An environment for a borrowed machine lies on top of the one that has CUDA."""
    nvidia = tmp_path / "base" / "nvidia"
    for name in ("cu13/lib", "cudnn/lib", "nccl/lib"):
        (nvidia / name).mkdir(parents=True)
    assert session._preload() == "of the last call"
    assert calls == [
        {"cudnn": False, "msvc": False, "directory": str(nvidia / "cu13" / "lib")},
        {"cuda": False, "msvc": False, "directory": str(nvidia / "cudnn" / "lib")},
        {},
    ]


def test_what_lies_beside_onnxruntime_it_finds_itself(calls: list[dict[str, object]], tmp_path: Path):
    (tmp_path / "own" / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    session._preload()
    assert calls == [{}]


def test_without_packages_of_nvidia_it_is_asked_once(calls: list[dict[str, object]]):
    session._preload()
    assert calls == [{}]
