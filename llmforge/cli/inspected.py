"""What `llmforge inspect` writes of a checkpoint, a GGUF file or an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from llmforge.base.errors import InputError
from llmforge.base.wording import cut
from llmforge.checkpoint.inspection import AS_IT_IS, DEQUANTIZED, EXACT, GgufPart, Inspection, StoredParameters

_LONGEST = 200  # characters of a fact
_OUTCOMES = {
    AS_IT_IS: "not quantized; taken as they are",
    EXACT: "codes can be kept exactly as they are",
    DEQUANTIZED: "dequantized",
}


def data(found: Inspection) -> dict[str, Any]:
    """Return what `--json` writes."""
    facts = {name: value for name, value in asdict(found).items() if name != "chat_template"}
    return {**facts, "parts": [asdict(part) for part in _parts(found)], "parameters": found.parameters}


def lines(found: Inspection) -> list[str]:
    """Write it in lines."""
    return [found.path, *(f"  {title:<13}{text}" for title, text in _rows(found))]


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "what", found.kind
    for title, value in found.facts.items():
        if value is not None:
            yield title, cut(f"{value:,}" if type(value) is int else str(value), _LONGEST)
    if found.kind != "adapter (peft)":
        yield "quantized", found.layout or "no"
    for index, each in enumerate(found.stored):
        yield "parameters" if index == 0 else "", _stored(each)
    for note in found.notes:
        yield "note", note
    for part in _parts(found):
        yield part.name.split()[0], _part(part)
    yield from _build(found)


def _stored(each: StoredParameters) -> str:
    unit, name = (1e9, "GB") if each.size_bytes >= 1e9 else (1e6, "MB")
    size = f"{each.parameters:>15,}  {each.format}, {each.size_bytes / unit:,.1f} {name}"
    reason = f": {each.reason}" if each.reason else ""
    return f"{size}: {_OUTCOMES[each.outcome]}{reason}"


def _parts(found: Inspection) -> Iterator[GgufPart]:
    """Give the parts of a GGUF file; whether its chat template is taken, what renders chats says."""
    from llmforge.serving.chat import ChatTemplate

    for part in found.parts:
        if part.name != "chat template" or found.chat_template is None:
            yield part
            continue
        try:
            ChatTemplate(found.chat_template, {}, part.name)
        except InputError as error:
            yield replace(part, supported=False, reason=error.message)
        else:
            yield replace(part, supported=True)


def _part(part: GgufPart) -> str:
    if part.supported is None:
        return cut(part.what, _LONGEST)
    state = "supported" if part.supported else f"not supported: {part.reason}"
    return f"{cut(part.what, _LONGEST)}: {state}"


def _build(found: Inspection) -> Iterator[tuple[str, str]]:
    """Say what a build would do."""
    if found.refusal is not None:
        parts = " and ".join(part.name for part in found.parts if part.supported is False)  # which say why
        yield "build", f"refused: {f'{parts} not supported' if parts else found.refusal.message}"
        if found.refusal.hint is not None:
            yield "", f"hint: {found.refusal.hint}"
        return
    if found.kind == "adapter (peft)":
        yield "build", "name its folder under `adapters:` in a recipe of its base model"
        return
    if found.compiles is None:
        yield "build", "its architecture is in no table; `llmforge trace` says whether it compiles"
    elif found.compiles:
        yield "build", "its architecture compiles (docs/architectures.md)"
    else:
        yield "build", f"refused: {found.reason}"
