"""What the command line says of a matrix before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmforge.base import extras
from llmforge.cli import cli

from .test_matrix import MATRIX, written


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["recipe.yaml", "--matrix", "release.yaml"], "RECIPE cannot be used with --matrix"),
        (["--matrix", "release.yaml", "--defer"], "--defer cannot be used with --matrix"),
        (["--matrix", "release.yaml", "--trace", "t.json"], "--trace cannot be used with --matrix"),
        (["recipe.yaml", "--jobs", "2"], "--jobs requires --matrix"),
        (["recipe.yaml", "--address", "auto"], "--address requires --matrix or --calibration-workers"),
        (
            ["--matrix", "release.yaml", "--calibration-workers", "2"],
            "--calibration-workers cannot be used with --matrix",
        ),
        (["recipe.yaml", "--device", "cuda:0", "--calibration-workers", "2"], "cannot be used with --device"),
        (["recipe.yaml", "--device", "gpu"], "--device gpu: nothing is called so"),
        (["--matrix", "release.yaml", "--device", "cpu"], "--device cannot be used with --matrix"),
        (["recipe.yaml", "--store", "file:///srv"], "--store requires --matrix"),
        (
            ["--matrix", "release.yaml", "--no-cache", "--cache-size", "1"],
            "--cache-size cannot be used with --no-cache",
        ),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], says: str) -> None:
    result = invoke("build", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.skipif(extras.trouble("ray") is not None, reason="ray is not installed (extra `farm`)")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("name: release", "title: release"), "release.yaml"),
        (("engine.max_batch: 8", "engine.max_batch: 0"), "engine.max_batch"),
    ],
)
def test_a_matrix_that_is_wrong_ends_before_ray_starts(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    result = invoke("build", "--matrix", written(tmp_path, MATRIX.replace(*change)))
    assert result.exit_code == 2
    assert says in result.stderr
    assert "starting Ray" not in result.stderr


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"ray", "optuna"}
    real = extras._origin
    monkeypatch.setattr(extras, "_origin", lambda module: None if module in absent else real(module))
    for words in (["build", "--matrix", written(tmp_path)], ["tune", tmp_path / "recipe.yaml", "--objective", "size"]):
        result = invoke(*words)
        assert result.exit_code == 8
        assert result.stderr.splitlines() == [
            "error: optuna, ray are not installed", "hint: pip install 'llmforge[farm]'",
        ]  # fmt: skip
