"""Another version of a package whose internals are used is refused in plain words, and not tried."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmforge.base import versions
from llmforge.base.errors import EnvironmentLacks, VersionMismatch
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli

ASKED = metadata.version


def pretend(monkeypatch: pytest.MonkeyPatch, installed: Mapping[str, str | None]) -> None:
    """Let packages have other versions than they have, or none."""

    def version(package: str) -> str:
        found = installed[package] if package in installed else ASKED(package)
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(metadata, "version", version)


def test_what_is_installed_is_what_is_pinned() -> None:
    versions.check()
    assert versions.pins() == {package: ASKED(package).partition("+")[0] for package in versions.PINNED}


@pytest.mark.parametrize(
    ("package", "other"), [("transformers", "5.24.0"), ("torch", "2.12.1+cpu"), ("onnx-ir", "1.0")]
)
def test_another_version_is_named_beside_the_right_one(
    package: str, other: str, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    pinned = versions.pins()[package]
    pretend(monkeypatch, {package: other})
    with pytest.raises(VersionMismatch) as caught:
        Checkpoint.open(tiny_checkpoint)
    assert caught.value.message.startswith(f"{package} {other} is installed; this llmforge requires {package} ")
    assert caught.value.hint is not None
    assert f"pip install '{package}=={pinned}'" in caught.value.hint


def test_a_build_tag_is_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"torch": f"{versions.pins()['torch']}+cu130"})
    versions.check()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"onnxscript": None})
    with pytest.raises(EnvironmentLacks, match=r"onnxscript \d\S+ is not installed"):
        versions.check()


def test_the_command_line_ends_with_the_exit_code_of_a_lacking_environment(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    pretend(monkeypatch, {"transformers": "4.57.6"})
    result = CliRunner().invoke(cli, ["trace", str(tiny_checkpoint)])
    assert result.exit_code == VersionMismatch.exit_code == 8
    assert "transformers 4.57.6 is installed" in result.output
