"""A recipe to start with for an embedder or a reranker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmforge import native
from llmforge.backends import BACKENDS
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint.encoding import Encoding
from llmforge.planning import pass_lines
from llmforge.rewrite import declared
from llmforge.rewrite.traits import Deployment, Goal
from llmforge.targets import Target

CONTEXT = 2048  # tokens of a text, at most: longer ones are rare, and the proof reads one whole
_TABLE = 16  # tables of positions have more rows than texts may have tokens: 514 of RoBERTa are for 512
_LENGTHS, _BATCHES, _REPETITIONS = (16, 128), (1, 8), 6  # of texts that are timed: a query, a passage
_QUERIES, _PASSAGES = 60, 300  # a model of 110 million parameters reads them in about a minute, on two cores


def write(
    encoding: Encoding,
    settings: Mapping[str, Any],
    target: Target,
    given: Mapping[str, str],
    goal: Goal = "latency",
) -> str:
    """Write a recipe for a checkpoint of these `settings` that embeds or scores.

    `given` has its `name`, `checkpoint` and `target`. For the goal `quality` it stays fp32.

    Raises:
        UnsupportedError: no engine of the target runs it.
    """
    if target.kind != "cpu":
        raise UnsupportedError(
            f"{given['name']} is {encoding.title}, and none runs on {target.name}",
            hint="embedders and rerankers are compiled for CPUs: --target local",
        )
    there = Deployment(target, BACKENDS["onnxruntime"], "fp32", goal, own_kernels=native.library() is not None)
    return "\n".join(_lines(encoding, settings, there, given)) + "\n"


def _lines(
    encoding: Encoding, settings: Mapping[str, Any], there: Deployment, given: Mapping[str, str]
) -> Iterator[str]:
    target = there.target
    yield f"# {given['name']}, {encoding.title}, on {target.title}."
    yield "# Written by `llmforge init`; change what you like. docs/retrieval.md describes it."
    yield "schema: 1"
    yield f"name: {given['name']}"
    yield f"checkpoint: {given['checkpoint']}"
    yield f"target: {given['target']}  # see `llmforge targets`"
    yield f"engine: {{backend: onnxruntime, max_context: {_context(encoding, settings)}, max_batch: 8}}"
    if encoding.kind == "reranker" and _labels(encoding, settings) != 1:  # a classifier: it puts nothing in order
        yield "passes: []  # fp32: nothing measures what int8 would cost a classifier"
        return
    yield from _passes(there)
    yield "validation:"
    yield "  # Of the queries and passages that ship with llmforge; {}: all."
    yield f"  retrieval: {{queries: {_QUERIES}, passages: {_PASSAGES}}}"
    lengths = [min(each, _context(encoding, settings)) for each in _LENGTHS]
    timed = f"lengths: {sorted({*lengths})}, batches: {[*_BATCHES]}, repetitions: {_REPETITIONS}"
    yield f"  latency: {{{timed}}}  # tokens of a text, texts at once"
    yield "gates:"
    if encoding.kind == "embedder":
        yield "  retrieval.cosine_mean: {min: 0.995}"
    else:
        yield "  retrieval.spearman: {min: 0.99}"
    yield "  retrieval.ndcg_10: {drop_max: 0.005}"


def _passes(there: Deployment) -> Iterator[str]:
    """Write what passes propose; where none of them stores weights in fewer bits, say why."""
    proposed = [(step.name, each) for step in declared.DECLARED for each in step.proposes_to_encode(there)]
    stored = [name for name, each in proposed if each.stores.weights is not None]
    if not stored:
        yield f"# fp32: {_why_not(there)}."
    yield "passes:" if proposed else "passes: []"
    if stored:
        yield "  # Where the gates below fail: `llmforge init --goal quality --force` writes a recipe in fp32."
    for name, each in proposed:
        yield from pass_lines.of_pass(each.line(name), each.reason)


def _why_not(there: Deployment) -> str:
    """Say why weights stay as they are."""
    if not there.own_kernels:
        return "the CPU kernels are not compiled"
    return "the goal is quality" if there.goal == "quality" else f"int8 does not pay: {there.target.speedup('int8')}"


def _context(encoding: Encoding, settings: Mapping[str, Any]) -> int:
    """Give the longest text: as the checkpoint says, but not beyond `CONTEXT`."""
    rows = settings.get("max_position_embeddings")
    made_for = rows // _TABLE * _TABLE if type(rows) is int and rows >= _TABLE else CONTEXT
    return min(encoding.max_tokens or CONTEXT, made_for, CONTEXT)


def _labels(encoding: Encoding, settings: Mapping[str, Any]) -> int:
    """Count what a classifier tells apart; transformers' default are two."""
    if encoding.answers is not None:
        return 1
    names = settings.get("id2label")
    return len(names) if isinstance(names, dict) else int(settings.get("num_labels", 2))
