"""JSON of clients, read within limits that are looked at before any work: the interpreter's lock is held meanwhile."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from llmforge.base.errors import UsageError
from llmforge.serving.prompts import PromptEncoder

LEAST_BYTES, MOST_BYTES = 1 << 20, 16 << 20  # between which the limit of a text lies, by the context
ESCAPED = 3  # bytes of JSON for one of UTF-8, in texts whose every character is escaped
LEAST_VALUES = 10_000  # of a text: members and elements, whatever the context is

# A string, or what begins like one and has no end. No byte is looked at twice: the quantifiers give nothing back.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape of half a character, which a pair may complete


class TooLarge(UsageError):
    """A text of JSON is larger than what is read here."""


@dataclass(frozen=True)
class JsonLimits:
    """What a text of JSON may have: a context's worth of text, and of token ids."""

    bytes: int
    values: int

    @classmethod
    def of(cls, encoder: PromptEncoder) -> JsonLimits:
        """Take them from the context of a model and its longest token."""
        text = LEAST_BYTES // 2 + ESCAPED * encoder.most_bytes
        return cls(min(max(text, LEAST_BYTES), MOST_BYTES), LEAST_VALUES + 4 * encoder.config.max_context)


def parse(data: bytes, limits: JsonLimits, what: str) -> Any:
    """Read JSON of a bounded size and number of values; `what` names it in errors.

    Raises:
        TooLarge: it has more bytes or values than `limits`.
        UsageError: it is no JSON, or holds halves of characters.
    """
    if len(data) > limits.bytes:
        raise TooLarge(f"{what} is larger than {limits.bytes:,} bytes")
    # Where there are many commas, those in texts are no values.
    if _separators(data) > limits.values and (values := _separators(_STRING.sub(b"", data))) > limits.values:
        raise TooLarge(f"{what} has {values:,} values; at most {limits.values:,} are allowed")
    try:
        value = json.loads(data)
        if _HALF.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} holds an unpaired surrogate", hint="use valid UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is not JSON: {error}") from error
    return value


def _separators(data: bytes) -> int:
    """Count what begins or separates values, of which there are no more than one besides."""
    return sum(map(data.count, (b",", b"[", b"{")))
