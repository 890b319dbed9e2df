"""Lies that come after the last proof: the lowering says something else, bytes change on the disk, files beside it lie.

`GRAPHS` change the lowered graph before it is written; `FILES` what lies there afterwards. All must be refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, interface
from llmforge.runtime.config import FILE

from .places import Condition, Conditions, wrong
from .table import put_in_place

Spoil = Callable[[ir.Model], None]
Tamper = Callable[[Path], object]
LOGITS = interface.LOGITS
EMBEDDING = "model.embed_tokens/Gather"


def _past(at: Conditions) -> ir.Value:
    """Give the tokens behind the step, [B, 1, 1]; the lowered graph knows where it ends."""
    wide = at.op("Cast", at.input(interface.SEQLENS_K), to=int(ir.DataType.INT64))
    return at.op("Unsqueeze", at.op("Sub", at.op("Add", wide, [1]), at.tokens), [1, 2])


def _position(at: Conditions) -> ir.Value:
    """Give positions, [B, S, 1]."""
    return at.op("Add", _past(at), at.in_step)


def _values(model: ir.Model) -> list[ir.Value]:
    """List what is read by later nodes and has the shape of hidden states, in fp32."""
    [first] = [node.outputs[0] for node in model.graph if node.name == EMBEDDING]
    return [
        value
        for node in model.graph
        for value in node.outputs[:1]
        if value.dtype == ir.DataType.FLOAT and value.shape == first.shape and any(value.uses())
    ]


def residuals(where: Condition) -> Spoil:
    """Let hidden states of the middle of the model be wrong `where` a condition on places holds."""

    def find(model: ir.Model) -> list[ir.Node]:
        found = _values(model)
        producer = found[len(found) // 2].producer()
        assert producer is not None
        return [producer]

    return wrong(where, find)


def embeddings(where: Condition) -> Spoil:
    """Let embeddings be wrong `where` a condition holds."""
    return wrong(where, lambda model: [node for node in model.graph if node.name == EMBEDDING])


def clipped(most: int) -> Spoil:
    """Let no single token see more than `most` others before it."""

    def spoil(model: ir.Model) -> None:
        ends = graph.input_named(model, interface.SEQLENS_K)
        readers = list(ends.uses())
        at = Conditions(model, ends)
        fewer = at.op("Min", ends, at.constant(np.array(most, np.int32)))
        made = at.op("Where", at.within(at.tokens, 1, 1), fewer, ends)
        made.type, made.shape = ends.type, ends.shape
        for reader, index in readers:
            reader.replace_input_with(index, made)
        model.graph.insert_before(model.graph[0], at.nodes)

    return spoil


def biased(token: int, nats: float) -> Spoil:
    """Add to the logit of a token."""

    def spoil(model: ir.Model) -> None:
        [logits] = [value for value in model.graph.outputs if value.name == LOGITS]
        bias = np.zeros((graph.dims(logits) or ())[-1], np.float32)  # type: ignore[arg-type]
        bias[token] = nats
        made = ir.node("Add", [logits, graph.initializer(model, "bias", bias)], name="biased")
        made.outputs[0].type, made.outputs[0].shape = logits.type, logits.shape
        put_in_place(logits, [made])

    return spoil


def numbers(ending: str, change: Callable[[NDArray[Any]], object], which: int = -1) -> Spoil:
    """Change the numbers of one of the initializers whose names end so."""

    def spoil(model: ir.Model) -> None:
        names = [name for name in model.graph.initializers if name.endswith(ending)]
        value = model.graph.initializers[names[which]]
        array = np.array(graph.tensor(value).numpy())
        change(array)
        value.const_value = ir.Tensor(array, dtype=value.dtype, name=value.name)

    return spoil


def multiply(part: Callable[[NDArray[Any]], NDArray[Any]], factor: float) -> Callable[[NDArray[Any]], object]:
    """Multiply a view of some numbers."""

    def change(array: NDArray[Any]) -> None:
        view = part(array)
        view *= np.asarray(factor, view.dtype)

    return change


def exchanged(ending: str) -> Spoil:
    """Exchange the tensors of the first and the last layer."""

    def spoil(model: ir.Model) -> None:
        first, *_, last = [v for name, v in model.graph.initializers.items() if name.endswith(ending)]
        assert first.shape == last.shape
        first.const_value, last.const_value = last.const_value, first.const_value

    return spoil


def reversed_rows(first: int, last: int) -> Callable[[NDArray[Any]], object]:
    """Write rows in the opposite order."""

    def change(array: NDArray[Any]) -> None:
        array[first : last + 1] = array[first : last + 1][::-1].copy()

    return change


def inverted(array: NDArray[Any]) -> None:
    """Invert the bits of every 20th row of codes."""
    array[::20] ^= np.asarray(0xFF, array.dtype)


CODES, NORMS = ".weight.groups", "input_layernorm.weight"
GRAPHS: dict[str, Spoil] = {
    "single tokens see no more than 300": clipped(300),
    "single tokens see no more than 40": clipped(40),
    "positions 300 to 351": residuals(lambda c: c.within(_position(c), 300, 351)),
    "every 20th position": residuals(lambda c: c.rest(_position(c), 20, 19)),
    "single tokens": residuals(lambda c: c.within(c.tokens, 1, 1)),
    "steps behind a past, of several tokens": residuals(
        lambda c: c.both(c.within(c.tokens, 2, 9999), c.within(_past(c), 1, 9999))
    ),
    "prompts": residuals(lambda c: c.both(c.within(c.tokens, 2, 9999), c.within(_past(c), 0, 0))),
    "the second row": residuals(lambda c: c.within(c.row, 1, 1)),
    "the last row of three": residuals(lambda c: c.within(c.row, 2, 2)),
    "batches": residuals(lambda c: c.within(c.rows, 2, 99)),
    "ids 3000 to 3500": embeddings(lambda c: c.within(c.ids, 3000, 3500)),
    "every 20th id": embeddings(lambda c: c.rest(c.ids, 20, 7)),
    "the end is 15 nats less likely": biased(0, -15.0),
    "the end is 3 nats more likely": biased(0, 3.0),
    "another token is 15 nats less likely": biased(1234, -15.0),
    "rotary angles of positions 300 to 351": numbers("rotary.sin", reversed_rows(300, 351)),
    "a norm of the last layer": numbers(NORMS, multiply(lambda x: x, 1.2)),
    "a channel of a norm": numbers(NORMS, multiply(lambda x: x[5:6], 3.0)),
    "norms of two layers": exchanged(NORMS),
    "codes of two layers": exchanged(f"o_proj{CODES}"),
    "codes of a layer": numbers(f"o_proj{CODES}", inverted),
}


def runtime(**facts: object) -> Tamper:
    """Write other facts into `runtime.json`."""

    def tamper(folder: Path) -> None:
        file = folder / "engine" / FILE
        found = json.loads(file.read_text())
        assert facts.keys() <= found.keys()
        file.write_text(json.dumps({**found, **facts}, indent=1, sort_keys=True) + "\n")

    return tamper


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Tamper:
    """Change what `tokenizer.json` says."""

    def tamper(folder: Path) -> None:
        file = folder / "tokenizer" / "tokenizer.json"
        found = json.loads(file.read_text())
        change(found)
        file.write_text(json.dumps(found))

    return tamper


def _swap_merges(found: dict[str, Any]) -> None:
    merges = found["model"]["merges"]
    merges[10], merges[200] = merges[200], merges[10]


def _permute(found: dict[str, Any]) -> None:
    words = found["model"]["vocab"]
    a, b = list(words)[300], list(words)[301]
    words[a], words[b] = words[b], words[a]


def text(pattern: str, before: str, after: str) -> Tamper:
    """Write `after` in place of `before` into the file that a pattern names."""

    def tamper(folder: Path) -> None:
        [file] = folder.glob(pattern)
        content = file.read_text()
        assert before in content, f"{pattern} has no {before!r}"
        file.write_text(content.replace(before, after))

    return tamper


def zeros(share: float) -> Tamper:
    """Write zeros over a share of the weights, in their middle."""

    def tamper(folder: Path) -> None:
        file = folder / "engine" / "model.onnx.data"
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.seek(size // 2)
            stream.write(bytes(int(size * share)))

    return tamper


FILES: dict[str, Tamper] = {
    "a fifth of the weights": zeros(0.2),
    "a hundredth of the weights": zeros(0.01),
    "another end": runtime(eos_token_ids=[1]),
    "no end": runtime(eos_token_ids=[]),
    "another beginning": runtime(bos_token_id=5),
    "a longer context": runtime(max_context=4096),
    "a shorter context": runtime(max_context=512),
    "more rows": runtime(max_batch=64),
    "a smaller vocabulary": runtime(vocabulary=1000),
    "merges swapped": tokenizer(_swap_merges),
    "words swapped": tokenizer(_permute),
    "no special tokens": tokenizer(lambda found: found.update(added_tokens=[])),
    "no normalization": tokenizer(lambda found: found.update(pre_tokenizer=None)),
    "roles of the template": text("tokenizer/chat_template.jinja", "assistant", "user"),
    "the template's beginning": text("tokenizer/chat_template.jinja", "{", " {"),
    "instances of Triton": text("triton/*/config.pbtxt", "count: 1", "count: 2"),
    "what Triton loads": text("triton/*/1/model.py", "TritonPythonModel", "TritonPythonModels"),
    "how Triton decodes": text("triton/*/1/llmforge/serving/scheduler/slots.py", " < ", " <= "),
    "versions for Triton": text("triton/*/1/requirements.txt", "==", ">="),
}
