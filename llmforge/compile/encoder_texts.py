"""The texts of a build of an encoder, as tokens: what calibration reads, and what budgets are measured on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding as Tokens

from llmforge.base.errors import DataError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.documents import Document
from llmforge.metrics.retrieval import corpus
from llmforge.metrics.retrieval.corpus import RetrievalCorpus, spread
from llmforge.recipe import RetrievalSpec
from llmforge.verification.encoder_passes import EncoderTexts

QUERIES, PASSAGES = 32, 96  # that budgets are measured on
NONE = EncoderTexts((), ())


def of_budget(checkpoint: Checkpoint, spec: RetrievalSpec | None, max_context: int) -> EncoderTexts:
    """Choose queries and passages, of a reranker pairs, of what retrieval is measured on, else of what ships."""
    found = corpus.shipped() if spec is None else spec.corpus()
    encoding, limit = checkpoint.encoding, _longest(checkpoint, max_context)
    assert encoding is not None
    if encoding.kind == "reranker":
        pairs = _pairs(found)
        if (template := encoding.template) is not None:
            written = [template.pair(query, text) for query, text in pairs]
            return _cut(checkpoint.tokenizer.encode_batch(written, add_special_tokens=False), limit)
        return _cut(checkpoint.tokenizer.encode_batch(pairs), limit)
    prompt = encoding.prompts.get(encoding.default_prompt or "", "")
    queries = [found.queries[at] for at in spread(len(found.queries), QUERIES)]
    passages = [found.passages[at] for at in spread(len(found.passages), PASSAGES)]
    prompts = [encoding.prompts.get("query", prompt), encoding.prompts.get("document", prompt)]
    texts = [*(prompts[0] + text for text in queries), *(prompts[1] + text for text in passages)]
    return _cut(checkpoint.tokenizer.encode_batch(texts), limit)


def of_calibration(checkpoint: Checkpoint, read: Sequence[Document], samples: int, length: int) -> EncoderTexts:
    """Choose passages of documents, whole ones, spread over all, as many as give `samples` sequences of `length`.

    A document is cut where a sequence ends; each sequence has the special tokens of a text.

    Raises:
        DataError: there are fewer.
    """
    tokenizer = checkpoint.tokenizer
    made: list[Tokens] = []
    for document in read:
        whole = tokenizer.encode(document.text, add_special_tokens=False)
        room = length - tokenizer.num_special_tokens_to_add(False)
        whole.truncate(room, stride=0)
        made += [tokenizer.post_process(part, None, True) for part in (whole, *whole.overflowing) if part.ids]
    if len(made) < samples:
        raise DataError(
            f"calibration: {len(made)} sequences of {length} tokens; {samples} are asked for",
            hint="add data, or set fewer samples or a smaller length",
        )
    return _cut([made[at] for at in spread(len(made), samples)], length)


def _pairs(found: RetrievalCorpus) -> list[tuple[str, str]]:
    """Pair queries with a passage that answers them, and with two others."""
    pairs = []
    for at in spread(len(found.queries), QUERIES):
        others = [min(found.relevant[at], default=0), *(7 * at + 1, 13 * at + 5)]
        pairs += [(found.queries[at], found.passages[number % len(found.passages)]) for number in others]
    return pairs


def _cut(found: Sequence[Tokens], length: int) -> EncoderTexts:
    ids = [np.array(each.ids[:length], np.int64) for each in found]
    return EncoderTexts(ids, [np.array(each.type_ids[:length], np.int64) for each in found])


def _longest(checkpoint: Checkpoint, max_context: int) -> int:
    encoding = checkpoint.encoding
    assert encoding is not None
    return min(max_context, encoding.max_tokens or max_context)
