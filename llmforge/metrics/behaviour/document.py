"""Documents that behaviour is measured on: chats, and what is expected of their answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from llmforge.base import small_file
from llmforge.base.errors import DataError
from llmforge.metrics.behaviour import json_schema
from llmforge.metrics.behaviour.instructions import Instructions
from llmforge.metrics.behaviour.languages import LANGUAGES
from llmforge.metrics.record import ReportRecord

MOST_BYTES = 64 << 20  # of a file
MOST_CHATS = 2_000  # a record of evidence holds 400,000 values
MOST_TOKENS = 4096  # of an answer
TOKENS = 64  # of an answer, where a document does not say
FEWEST_OF_A_SLICE = 100  # documents of a slice that gates decide on


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    if (why := json_schema.unknown(value)) is not None:
        raise ValueError(f"a schema with {why}, which is not understood")
    return value


def _patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    for each in value:
        try:
            re.compile(each)
        except re.error as error:
            raise ValueError(f"{each!r} is no regular expression: {error}") from error
    return value


def _language(value: str) -> str:
    if value not in LANGUAGES:
        raise ValueError(f"expected one of {', '.join(LANGUAGES)}")
    return value


class ExpectedCall(ReportRecord):
    """A call that an answer should make; arguments None: whatever the baseline gives."""

    name: str
    arguments: dict[str, Any] | None = None


class ExpectedRefusal(ReportRecord):
    """Whether an answer should refuse, and how that is told.

    Args:
        expected: None: what the baseline does.
        patterns: regular expressions; a text in which one is found refuses.
        openings: how a refusal and how an answer begins: their likelihoods are compared.
    """

    expected: bool | None = None
    patterns: Annotated[tuple[str, ...], AfterValidator(_patterns)] = Field(default=(), max_length=64)
    openings: tuple[str, str] | None = None

    def refuses(self, text: str) -> bool:
        """Say whether a text refuses."""
        said = text.replace("’", "'")
        return any(re.search(pattern, said, re.IGNORECASE) for pattern in self.patterns)


class BehaviourDocument(ReportRecord):
    """A chat up to where the assistant speaks, and what of its answer is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    id: str = Field(min_length=1, max_length=200)
    slice: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "other"
    messages: tuple[dict[str, Any], ...] = Field(min_length=1)
    tools: tuple[dict[str, Any], ...] = Field(default=(), max_length=128)
    expected: tuple[ExpectedCall, ...] | None = None  # calls; (): none; None: those of the baseline
    json_schema: Annotated[dict[str, Any], AfterValidator(_schema)] | None = Field(default=None, alias="schema")
    refusal: ExpectedRefusal | None = None
    language: Annotated[str, AfterValidator(_language)] | None = None
    thinking: int | None = Field(default=None, ge=1)  # tokens within which thoughts should end
    instructions: Instructions | None = None
    max_tokens: int = Field(default=TOKENS, ge=1, le=MOST_TOKENS)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of the arguments of each tool, by its name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


def read_documents(path: Path) -> tuple[BehaviourDocument, ...]:
    """Read a JSON Lines file of documents; one without `id` is named after its line.

    Raises:
        DataError: a line is no document, an id stands there twice, or there is none.
    """
    found: dict[str, BehaviourDocument] = {}
    text = small_file.read(path, MOST_BYTES, hint="data paths are relative to the recipe").decode("utf-8", "replace")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        document = _document(line, f"{path.name}:{number}", where)
        if document.id in found:
            raise DataError(f"{where}: the id {document.id!r} is already used", hint="make each id unique")
        found[document.id] = document
    if not 0 < len(found) <= MOST_CHATS:
        raise DataError(f"{path}: {len(found):,} documents; expected 1 to {MOST_CHATS:,}")
    return tuple(found.values())


def _document(line: str, default_id: str, where: str) -> BehaviourDocument:
    hint = 'write `{"messages": [{"role": "user", "content": …}, …], …}` (docs/behaviour.md)'
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no JSON: {error}", hint=hint) from error
    try:
        document = BehaviourDocument.model_validate({"id": default_id, **given} if isinstance(given, dict) else given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{where}: {place}: {first['msg']}"[:500], hint=hint) from error
    for tool in document.tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: tools: expected functions in OpenAI's shape", hint=hint)
        if (why := json_schema.unknown(function.get("parameters") or {})) is not None:
            raise DataError(f"{where}: tools: {function['name'][:64]}: a schema with {why}, which is not understood")
    names = document.parameters
    if wrong := [call.name for call in document.expected or () if call.name not in names]:
        raise DataError(f"{where}: expected: {wrong[0][:64]!r} is none of its tools")
    return document


def digest(documents: Sequence[BehaviourDocument]) -> str:
    """Give the SHA-256 of all that is asked and expected."""
    plain = [document.model_dump(mode="json", by_alias=True) for document in documents]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def quick(documents: Sequence[BehaviourDocument], of_each_slice: int) -> tuple[BehaviourDocument, ...]:
    """Take the first documents of each slice."""
    taken: dict[str, list[BehaviourDocument]] = {}
    for document in documents:
        taken.setdefault(document.slice, []).append(document)
    kept = {each.id for group in taken.values() for each in group[:of_each_slice]}
    return tuple(document for document in documents if document.id in kept)
