"""Measure what formats cost a checkpoint before there is a recipe: as many tokens as take half a minute at most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from llmforge.base import extras
from llmforge.base.errors import CheckpointError, DataError, UnsupportedError
from llmforge.base.progress import Progress
from llmforge.cache import Cache, installed
from llmforge.checkpoint import Checkpoint, documents, text
from llmforge.planning.choice import Probed, ProbedDrafts
from llmforge.quantization.costs import ModelFormats

LENGTH = 256  # tokens of a window
# Tokens by parameters. 1,024 tokens of 135 million parameters in three formats take 25 s of CPU time on Zen 5; rounding
# grows with parameters alone, so that the last of these takes about as long with few tokens.
TOKENS = ((200_000_000, 1024), (400_000_000, 512), (700_000_000, 256))
DRAFTED, DRAFTED_DOCUMENTS = 8192, 32  # tokens and documents that drafts are tried on
CHARACTERS = 8  # of a token, at most on average
LOGITS = 1 << 26  # that are held at a time, of the checkpoint


def probe(
    checkpoint: Path, text_file: Path, formats: Sequence[ModelFormats], *, cache: Cache, progress: Progress
) -> Probed:
    """Measure `formats` of the checkpoint in a folder, or GGUF file, on text; or say why that is not done."""
    if extras.missing("build"):
        return Probed(why=f"what builds is not installed ({extras.hint('build')})")
    from llmforge.calibration import Store
    from llmforge.calibration import probe as measuring

    progress.stage("Measure what formats cost this model")
    try:
        opened = Checkpoint.open(checkpoint)
        if not _tokens(opened):
            return Probed(why=f"{opened.parameters / 1e9:.2g} billion parameters take too long")
        store = Store(cache, tools=installed.digest())
        found = measuring.measure(
            opened, _windows(opened, text_file), formats, threads=_threads(), store=store, progress=progress
        )
    except (CheckpointError, DataError, UnsupportedError) as error:
        return Probed(why=error.message.splitlines()[0], runs_by_layer=not isinstance(error, UnsupportedError))
    return Probed(found)


def drafts(checkpoint: Path, text_file: Path) -> ProbedDrafts | None:
    """Say what prompt lookup would draft of text: of chats what the assistant said last, else the second half.

    Some `DRAFTED` tokens are read, which takes a second or two. None: nothing of it repeats, or can be read.
    """
    if extras.missing("build"):
        return None
    from llmforge.measure.accepted_length import Drafting
    from llmforge.runtime.config import MOST_DRAFT_TOKENS
    from llmforge.serving.speculation import PromptLookup

    try:
        tokenizer = Checkpoint.open(checkpoint).tokenizer
        read = documents.read_documents(text_file)
    except (CheckpointError, DataError, UnsupportedError):
        return None  # which what measures formats has said
    drafting = Drafting(PromptLookup(), MOST_DRAFT_TOKENS, "prompt-lookup")
    taken, most = list[tuple[int, bool]](), DRAFTED // max(1, min(len(read), DRAFTED_DOCUMENTS))
    for document in read[:: max(1, len(read) // DRAFTED_DOCUMENTS)][:DRAFTED_DOCUMENTS]:
        texts = [document.text] if not document.is_chat else [str(m.get("content") or "") for m in document.messages]
        if document.is_unanswered:
            continue
        texts = [each[: CHARACTERS * most] for each in texts]
        *before, last = (each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False))
        prompt = [token for ids in before for token in ids]
        ids = [*prompt, *last][-most:] if before else list(last)[:most]
        start = max(len(ids) - len(last), 0) if before else len(ids) // 2
        taken += drafting.steps(ids[:start], ids[start:])
    if not taken:
        return None
    return ProbedDrafts(sum(tokens for tokens, _ in taken), len(taken), sum(drafted for _, drafted in taken))


def _threads() -> int:
    return psutil.cpu_count(logical=False) or 1


def _tokens(opened: Checkpoint) -> int:
    """Say how many tokens are read; 0: it takes too long."""
    tokens = next((count for most, count in TOKENS if opened.parameters <= most), 0)
    return tokens and max(LENGTH, min(tokens, LOGITS // opened.geometry.vocabulary))


def _length(opened: Checkpoint) -> int:
    """Say how long a window is, in tokens."""
    return min(LENGTH, opened.geometry.context or LENGTH)


def _windows(opened: Checkpoint, text_file: Path) -> list[NDArray[np.int64]]:
    from llmforge.compile import texts

    cut = texts.windows_of(opened, documents.read_documents(text_file), _length(opened))
    return [window.ids for window in text.spread(cut, _tokens(opened))]
