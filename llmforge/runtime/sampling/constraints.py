"""Constrained decoding: a JSON schema, a regular expression or a grammar. llguidance says which tokens are allowed.

llguidance is an extra of its own (`pip install 'llmforge[constraints]'`), imported when the first constraint comes.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmforge.base.errors import EnvironmentLacks, UnsupportedError, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions


# Keywords whose value is a schema, a list of them, or an object of them (JSON Schema, draft 4 to 2020-12).
_SCHEMA = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})

# RFC 3339 as every reader takes it: years from 1 on, 29 February in leap years, no leap seconds, upper-case T and Z.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def exact(schema: Any, what: str) -> Any:
    """Write a schema so that what llguidance lets through is valid under it; `what` names it in errors.

    Raises:
        UsageError: that cannot be done.
        RecursionError: it is nested too deeply.
    """
    if not isinstance(schema, Mapping):
        return schema
    if "x-guidance" in schema:  # llguidance's own keyword, which can switch checks off
        raise UsageError(f"{what}: x-guidance is not supported")
    made = {name: _inner(name, value, what) for name, value in schema.items()}
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    fewest, required = made.get("minProperties"), made.get("required", ())
    if isinstance(fewest, int) and isinstance(required, list | tuple) and fewest > len(set(map(str, required))) + 1:
        raise UsageError(
            f"{what}: minProperties {fewest} is not supported: names that come twice would be counted twice",
            hint="require the properties by name",
        )
    form = made.get("format")
    if isinstance(form, str) and form in _FORMATS:
        del made["format"]
        others = made.get("allOf", [])
        made["allOf"] = [*others, {"pattern": _FORMATS[form]}] if isinstance(others, list) else others
    return made


def _inner(name: str, value: Any, what: str) -> Any:
    if name in _NAMED and isinstance(value, Mapping):
        return {key: exact(each, what) for key, each in value.items()}
    if name in _SCHEMAS and isinstance(value, list):
        return [exact(each, what) for each in value]
    return exact(value, what) if name in _SCHEMA else value


# Between the tokens of JSON: a space, or a new line and its indentation. llguidance's own pattern has no bound: a model
# that likes white space would never end.
WHITE_SPACE = r"(\x20|\x0A[\x20\x09]{0,32})"
_MOST_COMPILED, _MOST_COMPILED_CHARACTERS = 64, 256 << 10  # of constraints that are kept; compiled they are larger
MOST_BYTES = 64 << 10  # of a constraint: the worst that were found compile in half a second
_LONGEST_TRIGGER = 512  # characters that `Constraint.trigger` may match
_SHOWN = 300  # characters of the library's messages

Kind = Literal["json_schema", "regex", "grammar", "tools"]


@dataclass(frozen=True)
class Constraint:
    r"""What text must match: `text` is a JSON Schema, a regular expression for the whole, or a grammar (Lark).

    "tools" is a grammar, too: that of calls, as errors about it say. With `trigger`, a regular expression of Python's
    for at most 512 characters, text is free until a match of it, and what follows matches `text`; after that it is
    free again, up to the next match. `\A` in it is the beginning of the answer.

    What each may hold is llguidance's: see its documents on JSON Schema and on syntax. Regular expressions are those of
    Rust's regex crate (no look-around, no back-references), and `\d` is 0 to 9.
    """

    kind: Kind
    text: str
    trigger: str | None = None

    def __post_init__(self) -> None:
        if (size := len(self.text.encode("utf-8", "surrogatepass"))) > MOST_BYTES:
            raise UsageError(
                f"{self.kind}: {size:,} bytes; at most {MOST_BYTES:,} are allowed", hint="simplify the constraint"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Constraint:
        """Want JSON that is valid under `schema`, with properties in the schema's order.

        Raises:
            UsageError: the schema is nested too deeply, or holds what cannot be held to.
        """
        try:
            return cls("json_schema", json.dumps(exact(schema, "json_schema"), ensure_ascii=False))
        except RecursionError as error:
            raise UsageError("json_schema: nested too deeply") from error

    @classmethod
    def json_object(cls) -> Constraint:
        """Want any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Want one of some texts."""
        if not texts or not all(texts):
            raise UsageError("a choice needs at least one string, none of them empty")
        return cls("grammar", "start: " + " | ".join(json.dumps(text) for text in texts))


class ConstraintState:
    """Where one sequence stands in its constraint. It advances by the sequence's tokens, and never goes back."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def mask(self) -> NDArray[np.float32] | None:
        """Give what to add to the logits: fp32 [V], 0 for each token that may come next, -inf for the others.

        None: every token may.

        Raises:
            UnsupportedError: the constraint became too large at this token.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return _byte_masks().take(bits, axis=0).reshape(-1)[: self._vocabulary]

    def advance(self, token: int) -> None:
        """Advance by one token, which must be allowed.

        Raises:
            UnsupportedError: the constraint became too large.
        """
        self._matcher.consume_token(token)
        self._check()

    def follows(self, tokens: Sequence[int]) -> bool:
        """Advance by tokens that have been sampled, if they are allowed; say whether they were."""
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    @property
    def complete(self) -> bool:
        """Whether what stands there matches."""
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UnsupportedError(
                f"the constraint cannot be applied further: {_short(self._matcher.get_error())}",
                hint="simplify the constraint",
            )


class TriggeredState:
    """Where one sequence stands in a constraint that begins after a `trigger`; see `Constraint`."""

    def __init__(self, trigger: str, start: Callable[[], ConstraintState], tokens: LLTokenizer) -> None:
        self._trigger = re.compile(trigger)
        self._start = start
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # the last of it since the constraint held
        self._cut = False  # what stands there is not all of the answer
        self._held: ConstraintState | None = None

    def mask(self) -> NDArray[np.float32] | None:
        """Give what to add to the logits, as `ConstraintState` does."""
        return None if self._held is None else self._held.mask()

    def advance(self, token: int) -> None:
        """Advance by one token, as `ConstraintState` does."""
        if self._held is not None:
            self._held.advance(token)
            if self._held.complete:
                self._held = None
            return
        self._text += self._decoder.decode(self._tokens.decode_bytes([token]))
        found = self._trigger.search(self._text)
        if found is not None and not (self._cut and self._trigger.pattern.startswith(r"\A")):
            # The token that completed the match may go on after it.
            self._text, self._cut = self._text[found.end() :], True
            held = self._start()
            if held.follows(self._tokens.tokenize_bytes(self._text.encode() + self._decoder.getstate()[0])):
                self._held, self._text = held, ""
                self._decoder.reset()
        elif len(self._text) > _LONGEST_TRIGGER:
            self._text, self._cut = self._text[-_LONGEST_TRIGGER:], True


class ConstraintCompiler:
    """Compiles constraints for one tokenizer, keeping the latest ones. Any thread may call it.

    The first constraint takes a second for a vocabulary of 150,000: its tokens are put into a trie.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()  # of `_compiled`
        self._trie_lock = threading.Lock()
        self._token_trie: LLTokenizer | None = None
        self._compiled: dict[Constraint, Future[LLMatcher]] = {}  # the latest used stand last

    def start(self, constraint: Constraint) -> ConstraintState | TriggeredState:
        """Give the state at the beginning of a sequence.

        Raises:
            UsageError: the constraint does not compile.
            UnsupportedError: the tokenizer is of a kind that cannot be constrained, or there is no end of sequence.
            EnvironmentLacks: llguidance is not installed.
        """
        _require_library()
        with self._lock:
            compiled = self._compiled.pop(constraint, None)
            if is_first := compiled is None:
                compiled = Future()
            self._compiled[constraint] = compiled
            while (
                len(self._compiled) > _MOST_COMPILED
                or sum(len(kept.text) for kept in self._compiled) > _MOST_COMPILED_CHARACTERS
            ):
                del self._compiled[next(iter(self._compiled))]
        if is_first:  # whoever wants the same meanwhile waits for this; others do not
            try:
                compiled.set_result(self._compile(constraint))
            except BaseException as error:
                with self._lock:
                    if self._compiled.get(constraint) is compiled:
                        del self._compiled[constraint]
                compiled.set_exception(error)
                raise
        matcher = compiled.result()

        def state() -> ConstraintState:
            return ConstraintState(matcher.deep_copy(), self._vocabulary)

        if constraint.trigger is None:
            return state()
        assert self._token_trie is not None
        return TriggeredState(constraint.trigger, state, self._token_trie)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits, regex_to_lark

        with self._trie_lock:
            if self._token_trie is None:
                self._token_trie = self._read_tokens()
        try:
            match constraint.kind:
                case "json_schema":
                    spaces: JsonCompileOptions = {"whitespace_pattern": WHITE_SPACE}
                    grammar = LLMatcher.grammar_from_json_schema(constraint.text, defaults=spaces)
                case "regex":
                    grammar = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.text, 'd')}/")
                case "grammar" | "tools":
                    grammar = LLMatcher.grammar_from_lark(constraint.text)
        except ValueError as error:
            raise UsageError(f"{constraint.kind}: {_short(str(error))}") from error
        limits = LLParserLimits(verbose_errors=False)  # the others bound the work of a compilation and of a step
        invalid, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._token_trie, limits=limits)
        if invalid:
            raise UsageError(f"{constraint.kind}: {_short(messages[0])}")
        matcher = LLMatcher(self._token_trie, grammar, log_level=0, limits=limits)
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # nothing can be said first
            raise UsageError(f"{constraint.kind}: no answer can match it: {_short(first.get_error())}")
        return matcher

    def _read_tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise UnsupportedError("the model has no end-of-sequence token: a constrained answer could not end")
        try:
            return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocabulary, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise UnsupportedError(f"this tokenizer does not support constrained answers: {error}") from error


def _short(message: str) -> str:
    """Cut a message of the library, which quotes what it was given."""
    return message if len(message) <= _SHOWN else message[:_SHOWN] + "…"


def _require_library() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise EnvironmentLacks(
            "constrained answers (JSON schema, regex, grammar) need llguidance, which is not installed",
            hint="pip install 'llguidance>=1.9', or 'llmforge[constraints]'",
        ) from error


@functools.cache
def _byte_masks() -> NDArray[np.float32]:
    """Give the mask of 8 tokens for each byte of a bit mask, lowest bit first: [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(-np.inf))
