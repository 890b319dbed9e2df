"""A recipe to start with for an embedder or a reranker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmforge import native
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint.encoding import Encoding
from llmforge.targets import WORTH, Target

CONTEXT = 2048  # tokens of a text, at most: longer ones are rare, and the proof reads one whole
_TABLE = 16  # tables of positions have more rows than texts may have tokens: 514 of RoBERTa are for 512
_BUDGET = 0.02  # nats a text, of each pass; gates decide what texts are found
_QUERIES, _PASSAGES = 60, 300  # a model of 110 million parameters reads them in about a minute, on two cores


def write(encoding: Encoding, settings: Mapping[str, Any], target: Target, given: Mapping[str, str]) -> str:
    """Write a recipe for a checkpoint of these `settings` that embeds or scores.

    `given` has its `name`, `checkpoint` and `target`.

    Raises:
        UnsupportedError: no engine of the target runs it.
    """
    if target.kind != "cpu":
        raise UnsupportedError(
            f"{given['name']} is {encoding.title}, and none runs on {target.name}",
            hint="embedders and rerankers are compiled for CPUs: --target local",
        )
    return "\n".join(_lines(encoding, settings, target, given)) + "\n"


def _lines(encoding: Encoding, settings: Mapping[str, Any], target: Target, given: Mapping[str, str]) -> Iterator[str]:
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
    yield from _passes(target)
    yield "validation:"
    yield "  # Of the queries and passages that ship with llmforge; {}: all."
    yield f"  retrieval: {{queries: {_QUERIES}, passages: {_PASSAGES}}}"
    yield "gates:"
    if encoding.kind == "embedder":
        yield "  retrieval.cosine_mean: {min: 0.995}"
    else:
        yield "  retrieval.spearman: {min: 0.99}"
    yield "  retrieval.ndcg_10: {drop_max: 0.005}"


def _passes(target: Target) -> Iterator[str]:
    """Choose int8 where llmforge's kernels multiply in it; else what is computed stays fp32."""
    faster = target.speedup("int8")
    if native.library() is None or (faster is not None and faster.times <= 1 + WORTH):
        why = "the CPU kernels are not compiled" if native.library() is None else f"int8 does not pay: {faster}"
        yield f"passes: []  # fp32: {why}"
        return
    yield "passes:"
    yield "  - pack-qkv"
    yield "  - pack-gate-up"
    budget = f"budget: {{kld_mean: {_BUDGET:g}}}"
    yield "  # Weights and activations in int8. Where the gates below fail, put fuse-norms in place of these two: fp32."
    yield f"  - quantize-channels: {{dtype: int8, activations: per_token, smooth: false, {budget}}}"
    yield f"  - cpu-kernels: {{{budget}}}"


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
