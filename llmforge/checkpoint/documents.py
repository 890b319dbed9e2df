"""Calibration and evaluation text: JSON Lines of documents, `{"id": …, "text": …}`, and chats, `{"messages": […]}`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge.base import small_file
from llmforge.base.errors import DataError
from llmforge.base.wording import cut, quoted

MOST_BYTES = 256 << 20  # of a file of text: fifty million tokens
_WANTED = 'expected a readable JSON Lines file of {"text": …} or {"messages": […]}'
_FORMS = 'write `{"text": …}`, or `{"messages": [{"role": "user", "content": …}, …]}`'
_BOM = "\ufeff"  # U+FEFF, which some editors write first; JSON has none (RFC 8259, section 8.1)
_ANSWERS = "assistant"  # the role of what the model says
ROLES = ("system", "developer", "user", _ANSWERS, "tool")


@dataclass(frozen=True)
class Document:
    """One piece of text, or a chat; `where` is the file:line that it was read from.

    A chat has `messages`, and `text` is what they say, without how a template writes it. `tools` are functions that
    the model may call, in OpenAI's shape.
    """

    id: str
    text: str
    where: str
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat."""
        return bool(self.messages)

    @property
    def is_unanswered(self) -> bool:
        """Whether it is a chat that ends before the assistant speaks: the checkpoint itself is to answer it."""
        return self.is_chat and self.messages[-1]["role"] != _ANSWERS

    @property
    def answers(self) -> tuple[int, ...]:
        """The messages of a chat that the assistant said, by number."""
        return tuple(number for number, message in enumerate(self.messages) if message["role"] == _ANSWERS)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the text without regard to white space; of a chat up to its last answer: two ask the same."""
        asked = self.messages if self.is_unanswered else self.messages[:-1]
        text = json.dumps([*asked, *self.tools], sort_keys=True) if self.is_chat else self.text
        return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()


def read_documents(path: Path) -> list[Document]:
    """Read every document of a JSON Lines file, in order; blank lines are skipped, other keys are ignored.

    A line without `id` is named after its place, `FILE:LINE`.

    Raises:
        DataError: the file is missing, is not UTF-8 or holds no document; a line is not JSON, has no text, or repeats
            the id of an earlier one.
    """
    seen: dict[str, Document] = {}
    for number, line in enumerate(read_lines(path, "data paths are relative to the recipe"), start=1):
        if not line.strip():
            continue
        document = _parse(line, f"{path}:{number}", default_id=f"{path.name}:{number}")
        if document.id in seen:
            raise DataError(
                f"{document.where}: id {quoted(document.id)} was already used at {seen[document.id].where}",
                hint="make each id unique",
            )
        seen[document.id] = document
    if not seen:
        raise DataError(f"{path}: contains no documents", hint=f"{_FORMS}, one per line")
    return list(seen.values())


def read_all(paths: Sequence[Path]) -> list[list[Document]]:
    """Read the documents of several files, a list each.

    Raises:
        DataError: as `read_documents`; an id is in two of the files, or a file is named twice.
    """
    found: list[list[Document]] = []
    seen: dict[str, Document] = {}
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise DataError(f"{path}: is named twice", hint="name each file once")
        read = read_documents(path)
        for document in read:
            if (twin := seen.get(document.id)) is not None:
                raise DataError(
                    f"{document.where}: id {quoted(document.id)} was already used at {twin.where}",
                    hint="make each id unique over all files of a recipe's `data`",
                )
        seen |= {document.id: document for document in read}
        found.append(read)
    return found


def refuse_overlap(calibration: Sequence[Document], evaluation: Sequence[Document]) -> None:
    """Refuse evaluation text that calibration has seen: the same file and line, the same id, or the same text.

    Texts are compared without regard to white space, chats by what comes before their last answer.

    Raises:
        DataError: a document stands in both.
    """
    ids = {document.id: document for document in calibration}
    texts = {document.fingerprint: document for document in calibration}
    hits = [
        (twin, document, what)
        for document in evaluation
        for twin, what in ((texts.get(document.fingerprint), "text"), (ids.get(document.id), "id"))
        if twin is not None
    ]
    if not hits:
        return
    twin, document, what = hits[0]
    shared = len({document.where for _, document, _ in hits})
    raise DataError(
        f"{document.where}: evaluation document {quoted(document.id)} has the {what} of calibration document "
        f"{quoted(twin.id)} ({twin.where}); {shared} of {len(evaluation)} evaluation documents are also in the "
        "calibration data",
        hint="use different text for evaluation and calibration",
    )


def digest(path: Path) -> str:
    """Hash the bytes of a data file: SHA-256, hex.

    Raises:
        DataError: the file cannot be read.
    """
    return hashlib.sha256(small_file.read(path, MOST_BYTES, error=DataError, hint=_WANTED)).hexdigest()


def digest_all(paths: Sequence[Path]) -> str:
    """Hash the bytes of data files: of one as `digest` does, of several the lines of their digests.

    Raises:
        DataError: as `digest`.
    """
    found = [digest(path) for path in paths]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(f"{each}\n" for each in found).encode()).hexdigest()


def read_lines(path: Path, hint: str | None = None) -> Iterator[str]:
    """Yield the lines of a text; `hint` is for a file that cannot be read.

    Raises:
        DataError: the file cannot be read, is too large, or is not UTF-8.
    """
    data = small_file.read(path, MOST_BYTES, error=DataError, hint=hint or _WANTED)
    start = 0
    for line in data.split(b"\n"):  # not splitlines: a JSON string may hold U+2028 unescaped
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: byte {start + error.start} is not UTF-8", hint=_WANTED) from error
        start += len(line) + 1


def _parse(line: str, where: str, default_id: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        if line.startswith(_BOM):
            raise DataError(f"{where}: begins with a byte order mark", hint="save it as UTF-8 without a BOM") from error
        raise DataError(f"{where}:{error.colno}: not JSON: {error.msg}", hint=_FORMS) from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; a line of thousands of brackets
        raise DataError(f"{where}: not usable JSON: {error}", hint=_FORMS) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: not an object", hint=_FORMS)
    identity = record.get("id", default_id)
    if not isinstance(identity, str) or not identity:
        raise DataError(f"{where}: `id` is not a string: {quoted(identity)}")
    if "messages" in record:
        return _chat(record, where, identity)
    text = record.get("text")
    if not isinstance(text, str) or not text.strip():
        problem = "neither `text` nor `messages`" if "text" not in record else "`text` is empty or not a string"
        raise DataError(f"{where}: {problem}; its keys: {', '.join(map(cut, record)) or 'none'}", hint=_FORMS)
    return Document(identity, text, where)


def _chat(record: Mapping[str, Any], where: str, identity: str) -> Document:
    """Read a chat; an assistant's message that only calls tools says nothing, and parts of text are one text."""
    given, tools = record["messages"], record.get("tools") or []
    if record.get("text") is not None:
        raise DataError(f"{where}: both `text` and `messages`", hint="keep one of them")
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: `messages` is not a list of messages, or is empty", hint=_FORMS)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{where}: `tools` is not a list of functions", hint='write [{"type": "function", "function": …}]'
        )
    messages = tuple(_message(each, f"{where}: messages[{number}]") for number, each in enumerate(given))
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise DataError(f"{where}: no message is of the user", hint=_FORMS)
    text = "\n".join(message["content"] for message in messages if message["content"])
    if not text.strip():
        raise DataError(f"{where}: no message says anything", hint=_FORMS)
    return Document(identity, text, where, messages, tuple(tools))


def _message(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where}: not an object; expected {{"role": …, "content": …}}')
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise DataError(f"{where}: role is {quoted(role)}; allowed: {', '.join(ROLES)}")
    calls = value.get("tool_calls")
    if calls is not None and not (role == _ANSWERS and isinstance(calls, list) and all(map(_is_call, calls))):
        raise DataError(
            f"{where}: `tool_calls` must be calls of an assistant",
            hint='write [{"type": "function", "function": {"name": …, "arguments": …}}]',
        )
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "\n".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else content
    if not isinstance(content, str):
        kind = "missing" if "content" not in value else f"{type(content).__name__}, and no text"
        raise DataError(f"{where}: content is {kind}", hint='write {"role": …, "content": "text"}')
    return {**value, "content": content}


def _is_call(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
