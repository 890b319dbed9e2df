"""Values in messages: those of strangers are quoted and shortened, and no message exceeds 1 kB."""

from __future__ import annotations

import json
import unicodedata

SHOWN = 60  # characters of a value
LONGEST_MESSAGE = 700  # bytes; with its hint a message stays below 1 kB
LONGEST_HINT = 280
LONGEST_LINE = 5000  # characters of a line of standard output: longer than any path
_LONGEST_WORD = 80  # characters of one word of a message that is too long
_MARK = "…"
_OBEYED = frozenset({"Cc", "Cs", "Zl", "Zp"})  # controls of C0 and C1, halves of pairs, separators of lines
_BIDIRECTIONAL = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def shown(value: object, length: int = SHOWN) -> str:
    """Quote a value as JSON writes it, shortened to `length` characters.

    What is much longer is not written out first: an integer of thousands of digits is told by its size.
    """
    if isinstance(value, int) and value.bit_length() > 4 * length:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        value = value[: length + 1]
    elif isinstance(value, list | tuple):
        value = list(value[: length + 1])
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # of digits too many, or of itself
        return f"{type(value).__name__} that cannot be shown"
    return cut(text, length)


def quoted(value: object, length: int = SHOWN) -> str:
    """Quote a value as Python writes it, shortened to `length` characters."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    return cut(repr(value[: length + 1]), length) if isinstance(value, str | bytes) else shown(value, length)


def cut(text: str, length: int = SHOWN) -> str:
    """Shorten a text, otherwise unchanged, to `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def plain(text: str, limit: int = LONGEST_LINE) -> str:
    """Write a text of a stranger's on one line: control characters, line ends too, written out, and shortened.

    A terminal obeys escape sequences, and shows what bidirectional controls say in place of what is there.
    """
    kept = text[: limit + 1]
    if not kept.isprintable():
        kept = "".join(c if c.isprintable() else _escaped(c) for c in kept)
    return cut(kept, limit)


def plain_json(written: str) -> str:
    """Escape in JSON, which may be indented, what a terminal would obey; it stays the same value."""
    if all(line.isprintable() for line in written.split("\n")):
        return written
    return "".join(c if c.isprintable() or c == "\n" else _json_escaped(c) for c in written)


def plain_text(text: str) -> str:
    """Write out what a terminal would obey in a text of several lines; the rest is unchanged."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _obeyed(c) else _escaped(c) for c in text)


def bounded(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Shorten a message to `limit` bytes, and write control characters out: a terminal would obey them.

    Lines that fit are kept whole. Of a longer message, long words are cut in their middle first, then it ends after
    as many lines as there is room for.
    """
    plain = "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text[: 64 * limit])
    if len(plain.encode()) <= limit and len(text) <= 64 * limit:
        return plain
    plain = "\n".join(" ".join(_short(word) for word in line.split(" ")) for line in plain.split("\n"))
    if len(plain.encode()) <= limit:
        return plain
    kept: list[str] = []
    lines = plain.split("\n")
    room = limit - len(f"\n{_MARK} and {len(lines)} more lines")
    for line in lines:
        room -= len(line.encode()) + 1
        if room < 0:
            break
        kept.append(line)
    if kept:
        return "\n".join([*kept, f"{_MARK} and {len(lines) - len(kept)} more lines"])
    data = lines[0].encode()
    head, tail = data[: limit * 2 // 3], data[-limit // 5 :]
    return f"{head.decode(errors='ignore')} {_MARK} {tail.decode(errors='ignore')}"


def _short(word: str) -> str:
    return word if len(word) <= _LONGEST_WORD else f"{word[: _LONGEST_WORD // 2]}{_MARK}{word[-_LONGEST_WORD // 4 :]}"


def _obeyed(character: str) -> bool:
    return unicodedata.category(character) in _OBEYED or unicodedata.bidirectional(character) in _BIDIRECTIONAL


def _json_escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) > 0x7F else f"\\u{ord(character):04x}"


def _escaped(character: str) -> str:
    return character if character == " " else character.encode("unicode_escape").decode("ascii")
