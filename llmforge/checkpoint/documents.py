"""Calibration and evaluation text: JSON Lines of `{"id": …, "text": …}`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmforge.base import small_file
from llmforge.base.errors import DataError
from llmforge.base.wording import cut, quoted

MOST_BYTES = 256 << 20  # of a file of text: fifty million tokens
_WANTED = 'expected a readable JSON Lines file of {"id": …, "text": …}'


@dataclass(frozen=True)
class Document:
    """One piece of text; `where` is the file:line that it was read from."""

    id: str
    text: str
    where: str


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
        raise DataError(f"{path}: contains no documents", hint='write one `{"id": …, "text": …}` per line')
    return list(seen.values())


def refuse_overlap(calibration: Sequence[Document], evaluation: Sequence[Document]) -> None:
    """Refuse evaluation text that calibration has seen: the same file and line, the same id, or the same text.

    Texts are compared without regard to white space.

    Raises:
        DataError: a document stands in both.
    """
    ids = {document.id: document for document in calibration}
    texts = {_fingerprint(document.text): document for document in calibration}
    hits = [
        (twin, document, what)
        for document in evaluation
        for twin, what in ((texts.get(_fingerprint(document.text)), "text"), (ids.get(document.id), "id"))
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
        raise DataError(f"{where}:{error.colno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; a line of thousands of brackets
        raise DataError(f"{where}: not usable JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f'{where}: not an object; expected {{"id": …, "text": …}}')
    text = record.get("text")
    if not isinstance(text, str) or not text.strip():
        problem = "no `text`" if "text" not in record else "`text` is empty or not a string"
        raise DataError(f"{where}: {problem}; its keys: {', '.join(map(cut, record)) or 'none'}")
    identity = record.get("id", default_id)
    if not isinstance(identity, str) or not identity:
        raise DataError(f"{where}: `id` is not a string: {quoted(identity)}")
    return Document(identity, text, where)


def _fingerprint(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
