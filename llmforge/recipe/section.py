"""The base of all sections of a recipe: how they validate, how they are written, and their kinds of paths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
)

from llmforge import targets
from llmforge.base import folders, small_file
from llmforge.base.located_yaml import Location
from llmforge.checkpoint import documents

TASK_FILES = (".yaml", ".yml")


def anchor(path: Path, info: ValidationInfo) -> Path:
    """Make a path of the recipe absolute; the validation context is the folder of the recipe's file."""
    if (why := small_file.why_no_path(path)) is not None:
        raise ValueError(why)
    return folders.followed(info.context / path) if isinstance(info.context, Path) else path


def _anchor_target(target: str, info: ValidationInfo) -> str:
    """Make the path of a target's file absolute; a name is known in lower case."""
    return str(anchor(Path(target), info)) if targets.is_file(target) else target.lower()


def _anchor_task(task: str, info: ValidationInfo) -> str:
    """Make the path of a task's file absolute; other tasks have names."""
    if task.endswith(TASK_FILES):
        return str(anchor(Path(task), info))
    if re.fullmatch(r"[\w-]{1,128}", task) is None:
        raise ValueError("must be the name of a task, or a YAML file")
    return task


def _several(given: Any) -> Any:
    """Take one path as several."""
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _plain(paths: tuple[Path, ...]) -> Any:
    """Write one path as it is given, without a list."""
    texts = [str(path) for path in paths]
    return texts if len(texts) > 1 else texts[0]


MOST_FILES = 64  # of one text
RecipePath = Annotated[Path, AfterValidator(anchor)]
RecipePaths = Annotated[
    tuple[RecipePath, ...],
    Field(min_length=1, max_length=MOST_FILES),
    BeforeValidator(_several, json_schema_input_type=str | list[str]),
    PlainSerializer(_plain),
]
TargetName = Annotated[str, AfterValidator(_anchor_target)]
TaskName = Annotated[str, AfterValidator(_anchor_task)]


class Section(BaseModel):
    """A mapping of a recipe, with the keys that it may have."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)
    # Keys that are newer than their section: written only where they are set, so that versions of older recipes stay.
    newer: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        defaults = {name: field.default for name, field in type(self).model_fields.items() if name in self.newer}
        unset = {name for name, default in defaults.items() if getattr(self, name) == default}
        return {name: value for name, value in fields.items() if name not in unset}


class Contradiction(NamedTuple):
    """What a section says that another one, or itself, does not allow."""

    location: Location  # in its section
    what: str
    hint: str | None = None

    def inside(self, *outer: str | int) -> Contradiction:
        """Give it with its place in the section that has its section at `outer`."""
        return self._replace(location=(*outer, *self.location))


def contents(paths: Sequence[Path]) -> Any:
    """Name the files of a text: one as `content` does, several as a list."""
    found = [content(path) for path in paths]
    return found if len(found) > 1 else found[0]


def content(path: Path) -> dict[str, str]:
    """Name a file of data, and its SHA-256, for a recipe that is the same on every machine."""
    return {"name": path.name, "sha256": documents.digest(path)}
