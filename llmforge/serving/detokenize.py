"""Text from a stream of tokens: never half a character, never text that a stop string will take back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows bytes that are not, or not yet, UTF-8


class Detokenizer:
    """Turns token ids into text, one at a time; what `push` and `flush` return adds up to the decoded whole.

    A token may hold a part of a character, and decoders treat the first token of a text in their own way (Metaspace
    drops its leading space). So a token is decoded after the tokens of the chunk before it, and only what is longer
    than that chunk's own text is new. Text that ends with U+FFFD is held back: the next byte may complete it.

    Bytes that never become UTF-8 appear as U+FFFD. With SentencePiece's byte fallback their number may differ from
    `Tokenizer.decode`, which looks at whole runs of byte tokens and can revoke characters that were shown long ago.

    Special tokens have no text, but for those that are `shown`.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shows = bool(shown)
        added = tokenizer.get_added_tokens_decoder() if shown else {}
        self._hidden = {token for token, each in added.items() if each.special}.difference(shown)
        self._window: list[int] = []  # the last chunk's tokens, then those whose text is pending
        self._emitted = ""  # text of the last chunk's tokens alone
        self._chunk = 0  # how many tokens of the window are the last chunk's

    def push(self, token: int) -> str:
        """Take one more token; return the text that is certain now, often all of it, sometimes none."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._emitted):
            return ""
        new = text[len(self._emitted) :]
        del self._window[: self._chunk]
        self._chunk = len(self._window)
        self._emitted = self._decode(self._window)
        return new

    def flush(self) -> str:
        """Return what was held back, after the last token."""
        new = self._decode(self._window)[len(self._emitted) :]
        self._window.clear()
        self._emitted, self._chunk = "", 0
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=not self._shows)


class StopStrings:
    """Finds the first of some strings in a text that arrives in pieces, and holds back what may begin one.

    The first is the one that is complete first, of several the longest: so it does not depend on how the text is cut
    into pieces. Time and memory of a piece grow with its own length and that of the strings, not with the text's.

    With `include`, the text ends after the string that was found, else before it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._pending = ""
        self.found = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take more text; return what is certain to stand before any stop string. After `found`, nothing follows.

        Without `may_stop` a string that this piece completes is text like any other; one that it begins is not.
        """
        if self.found:
            return ""
        self._pending += text
        if may_stop and (match := self._first_match()) is not None:
            self.found = True
            start, end = match
            self._pending = self._pending[: end if self._include else start]
            return self.flush()
        keep = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        certain = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(certain) :]
        return certain

    def flush(self) -> str:
        """Return what was held back, after the last piece of text."""
        pending, self._pending = self._pending, ""
        return pending

    def _first_match(self) -> tuple[int, int] | None:
        """Find where the stop string starts and ends that is complete first, the longest of several."""
        starts = ((self._pending.find(stop), len(stop)) for stop in self._stops)
        matches = [(start, start + length) for start, length in starts if start >= 0]
        return min(matches, key=lambda match: (match[1], match[0]), default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
