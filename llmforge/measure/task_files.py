"""The files of tasks of lm-evaluation-harness, read without it: before a build, and where tasks are run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmforge.base import folders, located_yaml
from llmforge.base.errors import DataError
from llmforge.base.wording import shown

_BUILDERS = ("json", "csv", "parquet", "text")  # of data sets that are files
_OTHER_FILES = ("include", "class", "group", "custom_dataset")  # keys that would run or read something else


def read(path: Path) -> dict[str, Any]:
    """Read the file of a task; its data files are relative to it, and absolute in what is returned.

    Raises:
        RecipeError: it cannot be read, or is no YAML.
        DataError: it is no task, would run code of its own, or a data file is missing.
    """
    source = located_yaml.read(path)
    config: dict[str, Any] = dict(source.mapping)
    for key in _OTHER_FILES:
        if key in config:
            raise DataError(f"{source.where((key,))}: {key}: not supported in a task file", hint="write out one task")
    if not isinstance(config.get("task"), str):
        raise DataError(f"{path}: `task`, the name of the task, is missing")
    if config.get("dataset_path") not in _BUILDERS:
        raise DataError(
            f"{path}: dataset_path is {config.get('dataset_path')!r}; a task file has its data in files: "
            f"{', '.join(_BUILDERS)}",
            hint="dataset_path: json, dataset_kwargs: {data_files: {test: FILE.jsonl}}",
        )
    given = config.get("dataset_kwargs") or {}
    if not isinstance(given, Mapping):
        raise DataError(f"{source.where(('dataset_kwargs',))}: dataset_kwargs: must be a mapping, not {shown(given)}")
    options = dict(given)
    files = options.get("data_files")
    if isinstance(files, Mapping):
        options["data_files"] = {split: _anchored(path.parent, each) for split, each in files.items()}
    elif files is not None:
        options["data_files"] = _anchored(path.parent, files)
    return {**config, "dataset_kwargs": options}


def data_files(path: Path) -> list[Path]:
    """List the data files of the file of a task.

    Raises:
        DataError, RecipeError: as `read`.
    """
    files = read(path)["dataset_kwargs"].get("data_files") or []
    return [Path(each) for each in _flat([*files.values()] if isinstance(files, Mapping) else files)]


def _flat(files: Any) -> list[str]:
    return [file for each in files for file in _flat(each)] if isinstance(files, list) else [files]


def _anchored(folder: Path, files: Any) -> Any:
    if isinstance(files, list):
        return [_anchored(folder, each) for each in files]
    file = folders.followed(folder) / str(files)
    if not file.is_file():
        raise DataError(f"{file}: there is no such file")
    return str(file)
