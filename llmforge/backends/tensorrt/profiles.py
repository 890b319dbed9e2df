"""The optimization profiles of an engine: shapes of its inputs in prefills of one prompt or several, and in decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface
from llmforge.recipe import EngineSpec
from llmforge.runtime.config import ProfileFacts
from llmforge.runtime.interface import LOGITS_CHUNK
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK, together

# Of the rows of a decode step. A matrix product of one row alone, fixed, made TensorRT-RTX 1.7 dequantize int8 and fp8
# weights into memory in every step (their size in 16 bits as activation memory); from 1 to 2 rows it does not.
SMALLEST_LARGEST = 2

Range = tuple[int, int, int]  # smallest, the one to tune for, largest
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """Shapes that every input takes in one kind of step: smallest, tuned for, largest."""

    facts: ProfileFacts  # what a runtime must know of it
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]


def of(model: ir.Model, spec: EngineSpec) -> tuple[Profile, ...]:
    """Derive them from the inputs of a lowered `model`.

    Prefill: one row of up to `PREFILL_CHUNK` tokens, of which up to `LOGITS_CHUNK` get logits. Decode: up to
    `spec.max_batch` rows of one token. Prompts, where rows and context have room for any: the steps of several prompts
    (`prefill_shapes.together`), whose rows get logits of one token each. All are tuned for their largest step, but for
    the rows of logits.

    Raises:
        UnsupportedError: an input has a dimension that is neither fixed nor one of batch, sequence and rows.
    """
    chunk = min(PREFILL_CHUNK, spec.max_context)
    rows = min(LOGITS_CHUNK, chunk)
    batch = max(SMALLEST_LARGEST, spec.max_batch)
    profiles = (
        _profile(model, "prefill", batch=(1, 1, 1), sequence=(1, chunk, chunk), rows=(1, 1, rows)),
        _profile(model, "decode", batch=(1, batch, batch), sequence=(1, 1, 1), rows=(1, 1, 1)),
    )
    shapes = [(b, s) for b, s in together() if b <= spec.max_batch and s <= spec.max_context]
    if not shapes:
        return profiles
    rows_of, tokens_of = zip(*shapes, strict=True)
    batches, sequences = ((min(each), max(each), max(each)) for each in (rows_of, tokens_of))
    return (*profiles, _profile(model, "prompts", batch=batches, sequence=sequences, rows=(1, 1, 1)))


def _profile(
    model: ir.Model, name: Literal["prefill", "decode", "prompts"], *, batch: Range, sequence: Range, rows: Range
) -> Profile:
    known = dict(zip(_symbols(model), (batch, sequence, rows), strict=True))
    shapes: dict[str, tuple[Shape, Shape, Shape]] = {}
    for value in model.graph.inputs:
        ranges = [_range(str(value.name), size, known) for size in graph.dims(value) or ()]
        low, best, high = (tuple(each[i] for each in ranges) for i in range(3))
        shapes[str(value.name)] = (low, best, high)
    return Profile(ProfileFacts(name, max_batch=batch[2], max_sequence=sequence[2]), shapes)


def _symbols(model: ir.Model) -> tuple[object, object, object]:
    """Read the names of batch, sequence and rows off the inputs that have these dimensions by definition."""
    inputs = {str(value.name): graph.dims(value) for value in model.graph.inputs}
    ids = inputs.get(interface.INPUT_IDS)
    if ids is None or len(ids) != 2:
        raise UnsupportedError(f"the graph has no input {interface.INPUT_IDS} [batch, sequence]: shapes are {ids}")
    rows = inputs.get(interface.LOGITS_ROWS)
    return ids[0], ids[1], rows[-1] if rows else None


def _range(name: str, size: int | str | None, known: Mapping[object, Range]) -> Range:
    if isinstance(size, int):
        return size, size, size
    if size is None or size not in known:
        raise UnsupportedError(
            f"input {name} has the dimension {size!r}, without a known range; TensorRT supports "
            f"{', '.join(repr(symbol) for symbol in known if isinstance(symbol, str))}"
        )
    return known[size]
