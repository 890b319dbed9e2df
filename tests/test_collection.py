"""Every test file is collected, whatever its folder is called, and what is collected is no garbage to search."""

from __future__ import annotations

import gc
from fnmatch import fnmatch
from pathlib import Path

import pytest


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    root = Path(__file__).parent
    folders = {part for file in root.rglob("test_*.py") for part in file.relative_to(root).parts[:-1]}
    assert {"compile", "runtime"} <= folders
    ignored = [str(pattern) for pattern in pytestconfig.getini("norecursedirs")]
    assert not {folder for folder in folders if any(fnmatch(folder, pattern) for pattern in ignored)}


def test_what_was_collected_is_not_searched_for_garbage() -> None:
    assert gc.isenabled()
    assert gc.get_threshold()[0] > 1000  # and what tests make, seldom
    assert gc.get_freeze_count() > 10_000  # the modules of pytest alone have more


@pytest.fixture(scope="module")
def of_the_file() -> str:
    return Path(__file__).name


def test_one_worker_makes_what_lives_as_long_as_a_file(of_the_file: str, request: pytest.FixtureRequest) -> None:
    group = request.node.get_closest_marker("xdist_group")
    assert group is not None
    assert group.args == (f"tests/{of_the_file}",)


def test_others_go_to_any_worker(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("xdist_group") is None
