"""Instructions that a program can verify: the kinds of IFEval (Zhou et al., 2023), counts, forms and words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from llmforge.metrics.record import ReportRecord

MOST_PHRASES = 32


class Range(ReportRecord):
    """How many of something an answer may have."""

    min: int = Field(default=0, ge=0)
    max: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self

    def holds(self, number: int) -> bool:
        """Say whether so many are right."""
        return self.min <= number and (self.max is None or number <= self.max)


_COUNTS: Mapping[str, Callable[[str], int]] = {
    "words": lambda text: len(text.split()),
    "sentences": lambda text: len(re.findall(r"[^.!?。！？]*\w[^.!?。！？]*(?:[.!?。！？]+|$)", text)),
    "paragraphs": lambda text: len([each for each in re.split(r"\n\s*\n", text) if each.strip()]),
    "lines": lambda text: len([each for each in text.splitlines() if each.strip()]),
    "bullets": lambda text: len(re.findall(r"^\s*[-*•]\s+\S", text, re.MULTILINE)),
    "numbered": lambda text: len(re.findall(r"^\s*\d+[.)]\s+\S", text, re.MULTILINE)),
    "commas": lambda text: text.count(","),
    "numbers": lambda text: len(re.findall(r"\d+(?:[.,]\d+)*", text)),
    "placeholders": lambda text: len(re.findall(r"\[[^\[\]\n]+\]", text)),
    "highlights": lambda text: len(re.findall(r"\*[^*\n]+\*", text)),
    "capitals": lambda text: sum(each.isupper() for each in re.findall(r"[^\W\d_]{2,}", text)),
}


class Instructions(ReportRecord):
    """What an answer must be; words and phrases are looked for without regard to case."""

    words: Range | None = None
    sentences: Range | None = None
    paragraphs: Range | None = None
    lines: Range | None = None
    bullets: Range | None = None
    numbered: Range | None = None
    commas: Range | None = None
    numbers: Range | None = None
    placeholders: Range | None = None  # [like this]
    highlights: Range | None = None  # *like this*
    capitals: Range | None = None  # words of capitals
    contains: tuple[str, ...] = Field(default=(), max_length=MOST_PHRASES)
    excludes: tuple[str, ...] = Field(default=(), max_length=MOST_PHRASES)
    starts: str | None = None
    ends: str | None = None
    case: Literal["upper", "lower"] | None = None
    title: bool = False  # <<like this>>, somewhere
    quoted: bool = False  # the whole, in double quotes
    fenced: bool = False  # with a block of code

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self == Instructions.model_construct():
            raise ValueError("instructions that ask for nothing")
        return self

    def followed(self, text: str) -> bool:
        """Say whether an answer follows all of them; an empty one follows none."""
        return bool(text.strip()) and all(self._each(text.strip()))

    def _each(self, text: str) -> Iterator[bool]:
        for name, count in _COUNTS.items():
            wanted = getattr(self, name)
            if wanted is not None:
                yield bool(wanted.holds(count(text)))
        folded = text.casefold()
        yield all(_has(phrase, folded) for phrase in self.contains)
        yield not any(_has(phrase, folded) for phrase in self.excludes)
        yield self.starts is None or folded.startswith(self.starts.casefold())
        yield self.ends is None or folded.endswith(self.ends.casefold())
        yield self.case is None or text == getattr(text, self.case)()
        yield not self.title or re.search(r"<<[^\n]+>>", text) is not None
        yield not self.quoted or (len(text) > 1 and text[0] == text[-1] == '"')
        yield not self.fenced or re.search(r"```.*?```", text, re.DOTALL) is not None


def _has(phrase: str, folded: str) -> bool:
    """Look for a phrase, whose ends are no middle of a word."""
    return re.search(rf"(?<!\w){re.escape(phrase.casefold())}(?!\w)", folded) is not None
