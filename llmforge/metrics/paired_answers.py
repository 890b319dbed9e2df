"""What differs between two servers' answers to one request: one number of each figure, within known bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from llmforge.metrics.behaviour import outcomes
from llmforge.metrics.behaviour.answer import BehaviourAnswer
from llmforge.metrics.behaviour.document import MOST_TOKENS, BehaviourDocument
from llmforge.metrics.units import SHARE

BEHAVIOUR = "behaviour."
DIGITS = 6  # of a value, so that a record says exactly what was decided on


@dataclass(frozen=True)
class PairedFigure:
    """The mean over requests of what B does less what A does, or of how far both agree."""

    title: str
    low: float
    high: float
    meaning: str


FIGURES: Mapping[str, PairedFigure] = {
    "error_rise": PairedFigure("Rise of errors", -1, 1, "share of requests that B fails less that of A"),
    "agreement": PairedFigure(
        "Agreement", 0, 1, "of greedy answers: what they begin with in common, as a share of the longer one"
    ),
    "length_change": PairedFigure(
        "Change of length", -1, 1, "tokens of B's answer less those of A's, as a share of the longer one"
    ),
    "latency_change": PairedFigure(
        "Change of latency", -1, 1, "(B − A) / (B + A): .05 is a tenth slower, .33 twice as slow"
    ),
    "ttft_change": PairedFigure("Change of TTFT", -1, 1, "the same of the time to the first bytes of a stream"),
    **{
        BEHAVIOUR + each.name: PairedFigure(f"{each.title}, B − A", -1, 1, each.meaning)
        for each in outcomes.OUTCOMES
        if each.unit is SHARE
    },
}


@dataclass(frozen=True)
class ServedReply:
    """What a server answered; times in ms from when it was asked. `error`: why there is no answer."""

    answer: BehaviourAnswer
    latency_ms: float
    ttft_ms: float | None = None  # of a stream
    error: str | None = None


def figures(body: Mapping[str, Any], a: ServedReply, b: ServedReply) -> dict[str, float]:
    """Compare the answers to the JSON `body` of a call of /v1/chat/completions or /v1/completions."""
    found = {"error_rise": float(b.error is not None) - float(a.error is not None)}
    if a.error is not None or b.error is not None:
        return found
    if is_greedy(body):
        found["agreement"] = _agreement(a.answer, b.answer)
    found["length_change"] = _change(a.answer.tokens, b.answer.tokens, of=max(a.answer.tokens, b.answer.tokens))
    found["latency_change"] = _change(a.latency_ms, b.latency_ms, of=a.latency_ms + b.latency_ms)
    if a.ttft_ms is not None and b.ttft_ms is not None:
        found["ttft_change"] = _change(a.ttft_ms, b.ttft_ms, of=a.ttft_ms + b.ttft_ms)
    if (document := _document(body)) is not None:
        for name, (ours, theirs) in outcomes.values(document, b.answer, a.answer).items():
            if BEHAVIOUR + name in FIGURES and theirs is not None:
                found[BEHAVIOUR + name] = ours - theirs
    return {name: round(value, DIGITS) for name, value in found.items()}


def is_greedy(body: Mapping[str, Any]) -> bool:
    """Say whether equal models give equal answers: OpenAI's default of `temperature` is 1."""
    return body.get("temperature") in (0, 0.0) or body.get("top_k") == 1


def _agreement(a: BehaviourAnswer, b: BehaviourAnswer) -> float:
    one, two = _written(a), _written(b)
    same = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
    return same / max(len(one), len(two), 1) if one != two else 1.0


def _written(answer: BehaviourAnswer) -> str:
    calls = "".join(f"\n{call.name} {call.arguments}" for call in answer.calls)
    return f"{answer.reasoning}\n{answer.text}{calls}" if answer.reasoning or calls else answer.text


def _change(a: float, b: float, *, of: float) -> float:
    return (b - a) / of if of else 0.0


def _document(body: Mapping[str, Any]) -> BehaviourDocument | None:
    """Say what is asked, as behaviour is measured; None: it is beyond that, as schemas with references are."""
    messages = body.get("messages") or [{"role": "user", "content": str(body.get("prompt"))}]
    form = body.get("response_format")
    schema = form.get("json_schema", {}).get("schema") if isinstance(form, dict) else None
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    fields: dict[str, Any] = {"id": "request", "messages": messages, "tools": body.get("tools") or ()}
    if isinstance(form, dict) and form.get("type") == "json_object":
        schema = {"type": "object"}
    if schema is not None:
        fields["schema"] = schema
    if isinstance(limit, int):
        fields["max_tokens"] = min(max(limit, 1), MOST_TOKENS)
    try:
        return BehaviourDocument.model_validate(fields)
    except ValidationError:
        return None
