"""YAML as plain data that remembers where each key and value stands, so that errors can name file, line and column."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from llmforge.base import small_file
from llmforge.base.errors import RecipeError
from llmforge.base.wording import quoted

Location = tuple[str | int, ...]
Plain = None | bool | int | float | str | list[Any] | dict[str, Any]

# A recipe is written by hand. These also stop anchors that refer to themselves or multiply.
MOST_BYTES = 64 << 10
_DEEPEST = 32
_MOST_NODES = 4_000
_LONGEST_WORD = 100  # characters that are compared with what is known
_TAG = "tag:yaml.org,2002:"
_COLLECTIONS = (f"{_TAG}map", f"{_TAG}seq")
_SCALARS = tuple(f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str"))
_PYTHON = {"timestamp": "date"}  # in common words
_INTEGERS = range(-(2**63), 2**63)


@dataclass
class Source:
    """The plain content of a YAML file and the place of each part."""

    path: Path
    data: Plain = None
    places: dict[Location, str] = field(default_factory=dict)  # "FILE:LINE:COLUMN", or the override that set it

    @property
    def mapping(self) -> dict[str, Plain]:
        """The content of a document that is a mapping.

        Raises:
            RecipeError: it is none.
        """
        if not isinstance(self.data, dict):
            raise RecipeError(f"{self.where(())}: must be a mapping")
        return self.data

    def where(self, location: Location) -> str:
        """Tell the place of `location`, or of the nearest part around it."""
        while location and location not in self.places:
            location = location[:-1]
        return self.places.get(location, str(self.path))


def read(path: Path, *, hint: str = "expected the path of a readable YAML file") -> Source:
    """Read one YAML 1.2 document of plain mappings, lists and scalars; `hint` goes with a file that cannot be read.

    Raises:
        RecipeError: the file cannot be read, is no YAML, is empty, repeats a key, or holds more than plain data.
    """
    data = small_file.read(
        path,
        MOST_BYTES,
        error=RecipeError,
        hint=hint,
        smaller="check the path: recipes and targets have some kilobytes",
    )
    return parse(small_file.decode(data, path, error=RecipeError, hint="expected YAML in UTF-8"), path)


def parse(text: str, path: Path) -> Source:
    """Read YAML `text` that came from `path`.

    Raises:
        RecipeError: as `read`.
    """
    if len(text) > MOST_BYTES:
        raise RecipeError(f"{path}: {len(text)} characters; at most {MOST_BYTES} are allowed")
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _BoundedComposer
    try:
        node = yaml.compose(text)
        if node is None:
            raise RecipeError(f"{path}: is empty", hint="expected a YAML file; a recipe begins with `schema: 1`")
        reader = _LocatedReader(yaml, Source(path))
        reader.source.data = reader.plain(node, ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        what = error.problem or error.context
        hint = "indent with spaces" if what and "'\\t'" in what else None
        raise RecipeError(f"{place}: not valid YAML: {what}", hint=hint) from error
    except YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    return reader.source


def dotted(location: Location) -> str:
    """Write a location as people do: `engine.max_context`, `passes.4`."""
    return ".".join(str(part) for part in location)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Find the known name that `word` was probably meant to be."""
    close = difflib.get_close_matches(word[:_LONGEST_WORD], list(known), n=1, cutoff=0.5)
    return close[0] if close else None


class _BoundedComposer(Composer):
    """Refuses a document as soon as it has too many values or levels, before the rest of it is looked at."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        self._nodes = self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one value with all that is in it."""
        self._nodes += 1
        self._depth += 1
        if (
            self._nodes > 2 * _MOST_NODES or self._depth > 2 * _DEEPEST
        ):  # keys count here, and `_LocatedReader` names places
            mark = self.parser.peek_event().start_mark
            raise MarkedYAMLError(problem=_TOO_LARGE, problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_TOO_LARGE = f"too large: more than {_MOST_NODES} values or {_DEEPEST} levels"


@dataclass
class _LocatedReader:
    yaml: YAML
    source: Source
    nodes: int = 0

    def plain(self, node: Node, location: Location) -> Plain:
        """Turn `node` into plain data and record the places of its parts."""
        place = f"{self.source.path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        self.source.places.setdefault(location, place)
        self.nodes += 1
        if self.nodes > _MOST_NODES or len(location) > _DEEPEST:
            hint = "check for anchors that refer to themselves or multiply"
            raise RecipeError(f"{place}: {_TOO_LARGE}", hint=hint)
        if not isinstance(node, ScalarNode) and node.tag not in _COLLECTIONS:
            raise RecipeError(f"{place}: tag {quoted(node.tag)} is not allowed: use plain mappings, lists and scalars")
        if isinstance(node, MappingNode):
            return self._mapping(node, location)
        if isinstance(node, SequenceNode):
            return [self.plain(child, (*location, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self._scalar(node, place)

    def _mapping(self, node: MappingNode, location: Location) -> dict[str, Plain]:
        content: dict[str, Plain] = {}
        for key_node, value_node in node.value:
            place = f"{self.source.path}:{key_node.start_mark.line + 1}:{key_node.start_mark.column + 1}"
            if key_node.tag.endswith(":merge"):
                raise RecipeError(f"{place}: merge keys (`<<`) are not supported; repeat the keys")
            key = self._scalar(key_node, place) if isinstance(key_node, ScalarNode) else None
            if not isinstance(key, str):
                raise RecipeError(f"{place}: keys must be plain names")
            if key in content:
                first = self.source.places[(*location, key)]
                raise RecipeError(f"{place}: {dotted((*location, key))}: duplicate key; first set at {first}")
            self.source.places[(*location, key)] = place
            content[key] = self.plain(value_node, (*location, key))
        return content

    def _scalar(self, node: ScalarNode, place: str) -> Plain:
        kind, written = str(node.tag).removeprefix(_TAG), quoted(node.value)
        if node.tag not in _SCALARS and not str(node.tag).startswith(_TAG):
            raise RecipeError(f"{place}: tag {quoted(node.tag)} is not allowed: use plain mappings, lists and scalars")
        if node.tag not in _SCALARS:
            raise RecipeError(f"{place}: {written} is read as {_PYTHON.get(kind, kind)}; put it in quotes")
        try:
            value = self.yaml.constructor.construct_object(node, deep=True)
        except (ArithmeticError, LookupError, ValueError):  # what a tag says that the value is not: `!!int x`
            raise RecipeError(f"{place}: {written} is no {kind}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise RecipeError(f"{place}: {written} is not a finite number")
        if isinstance(value, int) and value not in _INTEGERS:
            raise RecipeError(f"{place}: {written} is not an integer of 64 bits")
        return cast(Plain, value)
