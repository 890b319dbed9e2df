"""How likely decisive tokens are along the checkpoint's answers: ends, calls, ends of thoughts, brackets.

What a model does greedily changes where two tokens change places. How sure it was shows before that, and at every
place: a token whose logit moves by b moves ln p/(1-p) by b, however likely it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import InputError
from llmforge.measure.scoring import NOT_FINITE, Pair, ReadingSide
from llmforge.metrics.behaviour import answer
from llmforge.metrics.behaviour.answer import TokenOdds
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol.reasoning import Reasoning

FARTHEST = 80.0  # nats: of odds beyond, fp32 has no exponent left
_BRACKETS = frozenset("{}[]")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DecisiveTokens:
    """Ids of tokens that decide what an answer is, by kind; kinds that a checkpoint does not have are left out."""

    ids: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, encoder: PromptEncoder) -> DecisiveTokens:
        """Find those of a checkpoint; a bracket may stand beside other characters of its token.

        Raises:
            EnvironmentLacks: no process can be started to render the template.
        """
        tokenizer, vocabulary = encoder.tokenizer, encoder.config.vocabulary
        known = tokenizer.get_vocab(with_added_tokens=False)
        found = {
            answer.ENDS: {*encoder.config.eos_token_ids},
            answer.BRACKETS: {id_ for text, id_ in known.items() if _BRACKETS & {*text} and id_ < vocabulary},
        }
        if (tags := Reasoning.find(encoder)) is not None:
            found[answer.THOUGHTS] = {tags.tokens[1]}
        if encoder.tool_format is not None:
            found[answer.CALLS] = {
                *tokenizer.encode(encoder.tool_format.begin.lstrip(), add_special_tokens=False).ids[:1]
            }
        return cls({kind: tuple(sorted(ids)) for kind, ids in found.items() if ids})

    def odds(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> Floats:
        """Give the odds of `tokens` [S] and of each kind under their rows of `logits` [S, V]: [S, 1 + kinds]."""
        return log_odds([*self.ids.values()], logits, tokens)


def along(pair: Pair, tokens: DecisiveTokens, odds: Floats, *, ended: bool, tools: bool) -> dict[str, TokenOdds]:
    """Take the means of `odds` [S, 1 + kinds] over the places of an answer where a kind is due, and over the others.

    The first column is of the answer's own tokens, without the one that ends it. Calls are looked at where there are
    `tools`, thoughts up to their end, brackets where the answer has any.
    """
    said = np.asarray(pair[1])
    inside = len(said) - ended
    found = {answer.OWN: TokenOdds(float(odds[:inside, 0].mean()), None)} if inside else {}
    for column, (kind, ids) in enumerate(tokens.ids.items(), start=1):
        due, places = np.isin(said, ids), len(said)
        if kind == answer.THOUGHTS and due.any():
            places = int(due.argmax()) + 1
        if (kind in (answer.THOUGHTS, answer.BRACKETS) and not due.any()) or (kind == answer.CALLS and not tools):
            continue
        parts = (odds[:places, column][chosen[:places]] for chosen in (due, ~due))
        found[kind] = TokenOdds(*(float(part.mean()) if len(part) else None for part in parts))
    return found


def log_odds(groups: Sequence[Sequence[int]], logits: NDArray[np.float32], tokens: Sequence[int]) -> Floats:
    """Give ln p/(1-p) of each of `tokens` [S], and of each group of ids, under its row of `logits` [S, V].

    [S, 1 + groups], within `FARTHEST`.

    Raises:
        InputError: a logit is NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise InputError(NOT_FINITE)
    shifted = logits - logits.max(1, keepdims=True)
    weights = np.exp(shifted)
    total: Floats = weights.sum(1, dtype=np.float64)
    rows = np.arange(len(tokens))
    columns = [[np.asarray(tokens)[:, None]], *([np.asarray(ids)[None, :]] for ids in groups)]
    found = np.empty((len(tokens), len(columns)))
    for column, (ids,) in enumerate(columns):
        inside = shifted[rows[:, None], ids].astype(np.float64)  # [S, ids]
        largest = inside.max(1)
        own = largest + np.log(np.exp(inside - largest[:, None]).sum(1))
        rest = total - np.exp(own)
        for row in np.flatnonzero(rest < total / 2):  # a difference of about equal numbers says nothing
            others = weights[row].copy()
            others[ids[row if len(ids) > 1 else 0]] = 0
            rest[row] = others.sum(dtype=np.float64)
        with np.errstate(divide="ignore"):
            found[:, column] = own - np.log(rest)
    return found.clip(-FARTHEST, FARTHEST)


def answer_of(
    said: Sequence[int], rows: Sequence[Floats], tokens: DecisiveTokens, count: int, *, tools: bool
) -> dict[str, TokenOdds]:
    """Take the means over an answer of at most `count` tokens of the odds [1 + kinds] that each was chosen by.

    One that ends before has a row more than it has tokens.
    """
    ended = len(said) < count
    text = [*said, *(tokens.ids.get(answer.ENDS, ())[:1] if ended else ())]
    return along(([], text), tokens, np.asarray(rows), ended=ended, tools=tools)


def measure(
    side: ReadingSide,
    pairs: Sequence[Pair],
    tokens: DecisiveTokens,
    ended: Sequence[bool],
    tools: Sequence[bool],
) -> list[dict[str, TokenOdds]]:
    """Let a side read answers, each behind its prompt, and say how likely decisive tokens were.

    `ended`: whether the last token of an answer ends it; `tools`: whether it could call some.
    """
    rows = side.read(pairs, tokens.odds)
    return [
        along(pair, tokens, odds, ended=end, tools=use)
        for pair, odds, end, use in zip(pairs, rows, ended, tools, strict=True)
    ]
