"""Documents as token ids, and windows cut of them: one way for calibration, verification, evaluation and tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from llmforge.base.errors import CheckpointError, DataError, InputError, UsageError
from llmforge.checkpoint import answer_spans
from llmforge.checkpoint.answer_spans import ChatRenderer
from llmforge.checkpoint.documents import Document

NO_TEMPLATE = (
    "write its documents as {text: …}, or give the template that the model was trained with: `chat_template: FILE` in "
    "the recipe"
)


class DocumentEncoder(ChatRenderer, Protocol):
    """What turns texts and conversations into tokens: that of serving, `llmforge.serving.prompts.TextEncoder`."""

    def tokenized(self, texts: Sequence[str], *, special: bool) -> list[Encoding]:
        """Tokenize texts; `special`: with what the tokenizer adds to a text, such as BOS."""


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A document as serving would read it: int64 [S]."""

    id: str
    ids: NDArray[np.int64]
    prefix: int = 0  # of them, at the start, that the tokenizer puts in front of every text
    answers: NDArray[np.bool_] | None = None  # [S], of a chat: which the model would have said


@dataclass(frozen=True, eq=False)
class TokenWindow:
    """A stretch of one document: int64 [at most length], the first of them BOS where the tokenizer adds one."""

    document: str  # id of the document
    ids: NDArray[np.int64]
    answers: NDArray[np.bool_] | None = None  # [at most length], of a chat: tokens that the model would have said
    is_end: bool = False  # whether a text, which is no chat, ends with it


def ids_of(
    documents: Sequence[Document],
    encoder: DocumentEncoder,
    ends: Collection[int] = (),
    said: Mapping[str, Sequence[int]] = {},
) -> list[TokenizedDocument]:
    """Tokenize documents: a text as a plain prompt, a chat as its template writes it.

    The tokenizer adds to a text what it adds (BOS or nothing), and nothing to a chat. `ends` are the tokens that end an
    answer. A chat that is unanswered ends where the assistant speaks, and goes on by the tokens that were `said` to it,
    by its id.

    Raises:
        DataError: there is no chat template, or it refuses the messages; the message names file and line.
    """
    plain = [document for document in documents if not document.is_chat]
    try:
        encodings = encoder.tokenized([document.text for document in plain], special=True)
    except UsageError as error:
        raise DataError(f"{plain[0].where.rpartition(':')[0]}: {error.message}", hint=error.hint) from error
    found = {
        document.id: TokenizedDocument(document.id, np.array(each.ids, np.int64), _prefix(each))
        for document, each in zip(plain, encodings, strict=True)
    }
    found |= {each.id: _chat(each, encoder, ends, said.get(each.id)) for each in documents if each.is_chat}
    return [found[document.id] for document in documents]


def _prefix(encoding: Encoding) -> int:
    """Count what the tokenizer put in front of a text."""
    added = encoding.special_tokens_mask
    return next((place for place, each in enumerate(added) if not each), 0)


def _chat(
    document: Document, encoder: DocumentEncoder, ends: Collection[int], said: Sequence[int] | None
) -> TokenizedDocument:
    """Tokenize a chat, and mark its answers."""
    if encoder.template is None:
        raise DataError(f"{document.where}: a chat, and the checkpoint has no chat template", hint=NO_TEMPLATE)
    try:
        if document.is_unanswered:
            (encoding,) = encoder.tokenized([encoder.render(document.messages, document.tools)], special=False)
            mask = [False] * len(encoding.ids) + [True] * len(said or ())
            ids = np.array([*encoding.ids, *(said or ())], np.int64)
            return TokenizedDocument(document.id, ids, answers=np.array(mask, bool))
        text, spans = answer_spans.find(document, encoder)
        (encoding,) = encoder.tokenized([text], special=False)
    except (InputError, UsageError) as error:
        raise DataError(f"{document.where}: {error.message}", hint=error.hint) from error
    if not spans:
        raise DataError(
            f"{document.where}: the answers are not found in what the chat template writes",
            hint="leave the last answer out: the checkpoint then answers itself",
        )
    marked = np.zeros(len(encoding.ids), bool)
    for span in spans:
        marked |= answer_spans.tokens_of(span, encoding, ends)
    return TokenizedDocument(document.id, np.array(encoding.ids, np.int64), answers=marked)


def windows(documents: Sequence[TokenizedDocument], length: int) -> list[TokenWindow]:
    """Cut every document into windows of at most `length` tokens, in order and without overlap.

    Every window begins with what the tokenizer puts in front of a text, so that every other token of a document stands
    in exactly one; the last window of a document is shorter. A chat that fits is one window. A document without tokens
    gives none.

    Raises:
        ValueError: `length` leaves no room for a token after BOS.
    """
    found: list[TokenWindow] = []
    for document in documents:
        head, body = document.ids[: document.prefix], document.ids[document.prefix :]
        if (step := length - len(head)) < 1:
            raise ValueError(f"windows of {length} tokens hold no text after BOS; at least 2 are needed")
        for at in range(0, len(body), step):
            answers = None if document.answers is None else document.answers[at : at + step]
            is_end = answers is None and at + step >= len(body)
            found.append(TokenWindow(document.id, np.concatenate([head, body[at : at + step]]), answers, is_end))
    return found


def check_vocabulary(found: Sequence[TokenWindow], vocabulary: int, where: str) -> None:
    """Return if the model has all tokens of the windows.

    Raises:
        CheckpointError: the tokenizer, of the checkpoint in `where`, gives others.
    """
    highest = max((int(each.ids.max()) for each in found), default=0)
    if highest >= vocabulary:
        raise CheckpointError(
            f"{where}: the tokenizer gives token {highest}, and vocab_size of the model is {vocabulary}",
            hint="use the tokenizer that the model was trained with, or resize the model's embedding",
        )


def sample(pool: Sequence[TokenWindow], count: int, seed: int) -> list[TokenWindow]:
    """Draw `count` of the longest windows, in an order that `seed` decides.

    Windows are shuffled, then sorted by length, longest first (a stable sort): short ends of documents come last, and
    which of the equally long ones are drawn is random.

    Raises:
        DataError: there are fewer windows.
    """
    if len(pool) < count:
        raise DataError(
            f"the calibration text holds {len(pool)} windows, the recipe asks for {count} samples",
            hint="add documents, ask for fewer `samples`, or a shorter `length`",
        )
    shuffled = [pool[i] for i in np.random.default_rng(seed).permutation(len(pool))]
    return sorted(shuffled, key=lambda window: -len(window.ids))[:count]


def sample_tokens(pool: Sequence[TokenWindow], tokens: int, seed: int) -> list[TokenWindow]:
    """Draw windows of about `tokens` tokens in all: as `sample` does, but chats, whatever their length, at random."""
    chosen: list[TokenWindow] = []
    shuffled = [pool[i] for i in np.random.default_rng(seed).permutation(len(pool))]
    longest = max((len(window.ids) for window in pool), default=0)
    for window in sorted(shuffled, key=lambda each: -(len(each.ids) if each.answers is None else longest)):
        # The last one is drawn where that is nearer to what is asked for than to stop.
        if tokens < len(window.ids) / 2:
            break
        tokens -= len(window.ids)
        chosen.append(window)
    return chosen


def shares(asked: int, there: Sequence[int]) -> list[int]:
    """Share `asked` tokens evenly by texts with so many; what one does not have, the others give."""
    found, left = [0] * len(there), asked
    for number, place in enumerate(sorted(range(len(there)), key=lambda place: there[place])):
        found[place] = min(there[place], left // (len(there) - number))
        left -= found[place]
    return found


def spread(pool: Sequence[TokenWindow], tokens: int) -> list[TokenWindow]:
    """Choose of `pool` the first window of every document, then the second and so on, up to `tokens` tokens in all.

    The first window is chosen whatever its length. Windows keep their order.
    """
    seen: dict[str, int] = {}
    turns = []
    for place, window in enumerate(pool):
        turns.append((seen.setdefault(window.document, 0), place))
        seen[window.document] += 1
    chosen: list[int] = []
    left = tokens
    for _, place in sorted(turns):
        left -= len(pool[place].ids)
        if left < 0 and chosen:
            break
        chosen.append(place)
    return [pool[place] for place in sorted(chosen)]


def held_out(documents: Sequence[str], every: int) -> list[int]:
    """Number the windows that are held out, by the document of each: those of one document in so many.

    Of fewer documents, the last one; of a single document, windows stand for documents.
    """
    units: Sequence[object] = documents if len(set(documents)) > 1 else range(len(documents))
    distinct = list(dict.fromkeys(units))
    apart = set(distinct[every - 1 :: every] or distinct[-1:])
    return [window for window, unit in enumerate(units) if unit in apart]
