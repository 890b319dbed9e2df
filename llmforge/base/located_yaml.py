"""YAML as plain data that remembers where each key and value stands, so that errors can name file, line and column."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from llmforge.base.errors import RecipeError

Location = tuple[str | int, ...]
Plain = None | bool | int | float | str | list[Any] | dict[str, Any]

# A recipe is written by hand. These stop anchors that refer to themselves or multiply.
_DEEPEST = 32
_MOST_NODES = 10_000
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


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


def read(path: Path) -> Source:
    """Read one YAML 1.2 document of plain mappings, lists and scalars.

    Raises:
        RecipeError: the file cannot be read, is no YAML, is empty, repeats a key, or holds more than plain data.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"{path}: cannot be read: {error.strerror}", hint="expected the path of a readable YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8", hint="expected YAML in UTF-8") from error
    return parse(text, path)


def parse(text: str, path: Path) -> Source:
    """Read YAML `text` that came from `path`.

    Raises:
        RecipeError: as `read`.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(text)
        if node is None:
            raise RecipeError(f"{path}: is empty", hint="expected a YAML file; a recipe begins with `schema: 1`")
        reader = _Reader(yaml, Source(path))
        reader.source.data = reader.plain(node, ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise RecipeError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply") from None
    return reader.source


def dotted(location: Location) -> str:
    """Write a location as people do: `engine.max_context`, `passes.4`."""
    return ".".join(str(part) for part in location)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Find the known name that `word` was probably meant to be."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


@dataclass
class _Reader:
    yaml: YAML
    source: Source
    nodes: int = 0

    def plain(self, node: Node, location: Location) -> Plain:
        """Turn `node` into plain data and record the places of its parts."""
        place = f"{self.source.path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        self.source.places.setdefault(location, place)
        self.nodes += 1
        if self.nodes > _MOST_NODES or len(location) > _DEEPEST:
            raise RecipeError(
                f"{place}: too large: more than {_MOST_NODES} values or {_DEEPEST} levels",
                hint="check for anchors that refer to themselves or multiply",
            )
        if not isinstance(node, ScalarNode) and node.tag not in _COLLECTIONS:
            raise RecipeError(f"{place}: tag {node.tag!r} is not allowed: use plain mappings, lists and scalars")
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
        value = self.yaml.constructor.construct_object(node, deep=True)
        if value is not None and not isinstance(value, bool | int | float | str):
            raise RecipeError(f"{place}: {node.value!r} is read as {type(value).__name__}; put it in quotes")
        if isinstance(value, float) and not math.isfinite(value):
            raise RecipeError(f"{place}: {node.value!r} is not a finite number")
        return cast(Plain, value)
