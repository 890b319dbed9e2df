"""Another version of a package whose internals are used is refused in plain words, and not tried."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks, VersionMismatch
from llmforge.checkpoint import Checkpoint, versions
from llmforge.cli import cli

ASKED = metadata.version
ROOT = Path(__file__).parents[2]


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
    pins = dict(versions.pins())
    assert pins.pop("transformers") == "5.21.1, 5.22.2 or 5.23.0"
    assert pins == {package: ASKED(package).partition("+")[0] for package in versions.PINNED if package in pins}


def test_the_range_of_the_package_is_what_was_proven() -> None:
    """pip takes the newest release of it, which is the one of constraints.txt."""
    [line] = [each.text for each in extras.requirements() if each.distribution == "transformers" and each.extra]
    assert line == f"transformers>={versions.PROVEN[0]},<={versions.PROVEN[-1]}"
    assert f"transformers=={versions.PROVEN[-1]}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("release", versions.PROVEN)
def test_every_proven_release_passes(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"transformers": release})
    versions.check()
    pretend(monkeypatch, {"transformers": f"{release}.post1"})
    with pytest.raises(VersionMismatch, match=re.escape(f"transformers {release}.post1 is installed")):
        versions.check()


def test_a_release_that_was_proven_here_passes_until_something_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pretend(monkeypatch, {"transformers": "5.24.0"})
    record = versions.record_of("5.24.0")
    record.parent.mkdir(parents=True)
    good = {"proof": dict(versions.proof_of("5.24.0"))}
    for content, passes in (
        (json.dumps(good), True),
        (json.dumps({"proof": {**good["proof"], "code": "0" * 64}}), False),  # llmforge changed
        (json.dumps({"proof": {**good["proof"], "torch": "2.12.0"}}), False),
        (json.dumps(good)[:-9], False),
        ("[]", False),
    ):
        record.write_text(content)
        if passes:
            versions.check()
            continue
        with pytest.raises(VersionMismatch, match=r"transformers 5\.24\.0 is installed") as caught:
            versions.check()
        assert "llmforge doctor --prove-transformers" in (caught.value.hint or "")
    pretend(monkeypatch, {"transformers": "5.24.1"})
    record.write_text(json.dumps(good))
    with pytest.raises(VersionMismatch, match=r"5\.24\.1"):
        versions.check()


def test_a_release_on_trial_passes_as_long_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"transformers": "5.24.0"})
    with versions.on_trial("5.24.0"):
        versions.check()
    with pytest.raises(VersionMismatch):
        versions.check()


@pytest.mark.parametrize(
    ("package", "other"), [("transformers", "5.24.0"), ("torch", "2.12.1+cpu"), ("onnx-ir", "1.0")]
)
def test_another_version_is_named_beside_the_right_one(
    package: str, other: str, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    pinned = versions.PROVEN[-1] if package == "transformers" else versions.pins()[package]
    pretend(monkeypatch, {package: other})
    with pytest.raises(VersionMismatch) as caught:
        Checkpoint.open(tiny_checkpoint)
    assert caught.value.message.startswith(f"{package} {other} is installed; this llmforge requires {package} ")
    assert caught.value.hint is not None
    assert f"pip install '{package}=={pinned}'" in caught.value.hint


def test_a_build_tag_is_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"torch": f"{versions.pins()['torch']}+cu130"})
    versions.check()
    pretend(monkeypatch, {"torch": f"{versions.pins()['torch']}.1+cu130"})
    with pytest.raises(VersionMismatch, match=r"\.1\+cu130 is installed"):
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
