"""Queries, the passages that answer them, and all passages that they are looked for in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge import recipes
from llmforge.base import small_file
from llmforge.base.errors import DataError
from llmforge.base.wording import quoted
from llmforge.metrics.retrieval.passages import passages

SHIPPED = "retrieval.jsonl"  # in llmforge.recipes.TEXT: 300 queries
SOURCES = ("evaluation.jsonl", "calibration.jsonl")  # of its 2,996 passages
MOST_QUERIES, MOST_PASSAGES = 10_000, 300_000  # whose values a record of evidence holds
_FILE_BYTES = 2 << 30
CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels/test.tsv"  # of BEIR (arXiv:2104.08663)


@dataclass(frozen=True)
class RetrievalCorpus:
    """What is asked, and in what it is looked for; `relevant` are numbers of passages, for each query."""

    queries: tuple[str, ...]
    passages: tuple[str, ...]
    relevant: tuple[frozenset[int], ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        whole = [self.queries, self.passages, [sorted(each) for each in self.relevant]]
        return hashlib.sha256(json.dumps(whole, ensure_ascii=False).encode()).hexdigest()

    def limited(self, queries: int | None, passages: int | None) -> RetrievalCorpus:
        """Keep `queries` spread over all, and about `passages`: those that answer them, and others spread over all."""
        chosen = spread(len(self.queries), queries)
        needed = sorted({number for at in chosen for number in self.relevant[at]})
        rest = sorted({*range(len(self.passages))} - {*needed})
        more = None if passages is None else max(0, passages - len(needed))
        kept = sorted([*needed, *(rest[at] for at in spread(len(rest), more))])
        place = {number: at for at, number in enumerate(kept)}
        return RetrievalCorpus(
            tuple(self.queries[at] for at in chosen),
            tuple(self.passages[number] for number in kept),
            tuple(frozenset(place[number] for number in self.relevant[at]) for at in chosen),
        )


def spread(count: int, most: int | None) -> list[int]:
    """Choose at most `most` of the numbers below `count`, at even distances."""
    if most is None or most >= count:
        return list(range(count))
    return [at * count // most for at in range(most)]


def shipped() -> RetrievalCorpus:
    """Give the corpus that ships: 300 queries over passages of the documentation that calibration and evaluation read.

    Passages are cut from the files, which do not change; queries were written for it, one a passage.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    for name in SOURCES:
        for line in (recipes.TEXT / name).read_text(encoding="utf-8").splitlines():
            document = json.loads(line)
            for number, passage in enumerate(passages(document["text"])):
                if passage not in seen:  # excerpts overlap here and there
                    seen.add(passage)
                    found[f"{document['id']}#{number}"] = passage
    lines = (recipes.TEXT / SHIPPED).read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines]
    return _corpus({str(at): each["query"] for at, each in enumerate(asked)}, found,
                   {str(at): {each["passage"]} for at, each in enumerate(asked)}, recipes.TEXT / SHIPPED)  # fmt: skip


def read_folder(folder: Path) -> RetrievalCorpus:
    """Read a folder of BEIR's form: corpus.jsonl, queries.jsonl, qrels/test.tsv; of queries, those with an answer.

    Raises:
        DataError: a file is missing or has another form, or a judgement names what is not there.
    """
    texts = {}
    for where, line in _lines(folder / CORPUS):
        title, text = line.get("title") or "", _text(line, "text", where)
        texts[_text(line, "_id", where)] = f"{title} {text}".strip()
    queries = {_text(line, "_id", where): _text(line, "text", where) for where, line in _lines(folder / QUERIES)}
    relevant: dict[str, set[str]] = {}
    judged = small_file.decode(small_file.read(folder / QRELS, _FILE_BYTES, error=DataError), folder / QRELS)
    for number, row in enumerate(judged.splitlines()[1:], 2):
        cells = row.split("\t")
        if len(cells) != 3 or not cells[2].strip().isdigit():
            raise DataError(f"{folder / QRELS}, line {number}: expected query-id, corpus-id, score, by tabs")
        if int(cells[2]) > 0:
            relevant.setdefault(cells[0], set()).add(cells[1])
    return _corpus({each: text for each, text in queries.items() if each in relevant}, texts, relevant, folder)


def _corpus(
    queries: Mapping[str, str], texts: Mapping[str, str], relevant: Mapping[str, set[str]], where: Path
) -> RetrievalCorpus:
    place = {each: at for at, each in enumerate(texts)}
    missing = sorted({each for query in queries for each in relevant[query]} - place.keys())
    if missing:
        raise DataError(f"{where}: no passage {quoted(missing[0])}, which answers a query")
    if not queries or not place:
        raise DataError(f"{where}: no queries with passages that answer them")
    if len(queries) > MOST_QUERIES or len(place) > MOST_PASSAGES:
        raise DataError(
            f"{where}: {len(queries):,} queries, {len(place):,} passages; expected at most {MOST_QUERIES:,} and "
            f"{MOST_PASSAGES:,}"
        )
    return RetrievalCorpus(
        tuple(queries.values()),
        tuple(texts.values()),
        tuple(frozenset(place[each] for each in relevant[query]) for query in queries),
    )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON Lines, each with what names it in errors."""
    text = small_file.decode(small_file.read(path, _FILE_BYTES, error=DataError), path)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: not JSON: {error}") from error
            if not isinstance(value, dict):
                raise DataError(f"{where}: expected an object")
            yield where, value


def _text(line: Mapping[str, Any], name: str, where: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name}: expected a string")
    return value
