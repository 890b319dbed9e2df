"""Cuts documents into passages: whole sentences, in the order of the text, none twice."""

from __future__ import annotations

import re
from collections.abc import Iterator

LEAST, MOST = 90, 240  # characters of a passage; a sentence that is longer is cut between words
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z0-9\"'(`])")
_WORD = re.compile(r"[A-Za-z]{2,}")
FEWEST_WORDS = 12  # what has fewer is a heading, a table or code


def passages(text: str) -> Iterator[str]:
    """Yield the passages of a document, each of `LEAST` to about `MOST` characters, white space made single."""
    held: list[str] = []
    for paragraph in _PARAGRAPH.split(text):
        for sentence in _sentences(" ".join(paragraph.split())):
            if held and sum(map(len, held)) + len(sentence) > MOST:
                yield from _whole(held)
                held = []
            held.append(sentence)
        if sum(map(len, held)) >= LEAST:
            yield from _whole(held)
            held = []
    yield from _whole(held)


def _sentences(paragraph: str) -> Iterator[str]:
    for sentence in _SENTENCE.split(paragraph):
        while len(sentence) > MOST:
            at = sentence.rfind(" ", 0, MOST)
            at = at if at > 0 else MOST
            yield sentence[:at]
            sentence = sentence[at:].strip()
        if sentence:
            yield sentence


def _whole(sentences: list[str]) -> Iterator[str]:
    text = " ".join(sentences)
    if len(_WORD.findall(text)) >= FEWEST_WORDS:
        yield text
