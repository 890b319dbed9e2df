"""What of two answers differs, word by word, for pages that show them side by side."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

Pieces = list[tuple[str, bool]]  # text, and whether the other answer lacks it

_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_ALIKE = (
    4  # words, signs and spaces in a row that both have: fewer agree by chance, and are marked with their neighbours
)


def pieces(left: str, right: str) -> tuple[Pieces, Pieces]:
    """Split both answers into what both have and what differs."""
    sides: tuple[Pieces, Pieces] = ([], [])
    words, at = (_WORDS.findall(left), _WORDS.findall(right)), (0, 0)
    for a, b, size in SequenceMatcher(None, *words, autojunk=False).get_matching_blocks():
        begins, ends = a == b == 0, (a + size, b + size) == (len(words[0]), len(words[1]))
        if size < _ALIKE and not (begins or ends):
            continue
        for side, each, old, new in zip(sides, words, at, (a, b), strict=True):
            side += [("".join(each[old:new]), True), ("".join(each[new : new + size]), False)]
        at = a + size, b + size
    theirs, ours = ([piece for piece in side if piece[0]] for side in sides)
    return theirs, ours
