"""Who drafts for an engine: what its options say, and else what its artifact says."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

from llmforge.base.errors import InputError, UnsupportedError, UsageError
from llmforge.ir import interface
from llmforge.runtime.config import MOST_DRAFT_TOKENS, RuntimeConfig
from llmforge.runtime.interface import Decoder
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK
from llmforge.serving.heads import DraftHead
from llmforge.serving.speculation import DraftModel, PromptLookup, Proposer, Speculation


class DraftedFor(Protocol):
    """A model that is loaded, and the smaller one of its artifact, if there is one: `llmforge.serving.Runner`."""

    @property
    def config(self) -> RuntimeConfig:
        """What a runtime must know of it."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ...

    @property
    def session(self) -> Decoder[Any]:
        """What runs it."""
        ...

    @property
    def draft(self) -> DraftedFor | None:
        """The smaller model that its artifact holds."""
        ...


def speculation_of(
    runner: DraftedFor,
    rows: int,
    method: Literal["off", "prompt-lookup", "draft", "eagle3"] | None = None,
    draft: DraftedFor | None = None,
) -> Speculation | None:
    """Make what drafts tokens for up to `rows` texts of `runner` at once; None: nothing does.

    `method` None is the artifact's own. `draft` stands in place of the model that drafts in the artifact.

    Raises:
        UsageError: there is no draft, or nothing that it is for.
        InputError: the draft has another vocabulary, or the head reads what the engine does not give.
        UnsupportedError: the draft cannot take tokens back.
    """
    facts = runner.config.speculation
    chosen = method or (facts.method if facts is not None else "off")
    if draft is not None and chosen != "draft":
        raise UsageError(
            f"speculation is {chosen!r} and there is a draft artifact", hint="use speculation 'draft', or no draft"
        )
    if chosen == "off":
        return None
    proposer: Proposer
    if chosen == "prompt-lookup":
        proposer = PromptLookup()
    elif chosen == "eagle3":
        proposer = _draft_head(runner, rows)
    else:
        draft = draft or (runner.draft if facts is not None and facts.method == "draft" else None)
        if draft is None:
            raise UsageError(
                "speculation is 'draft' and there is no draft artifact",
                hint="build with `serving: {speculation: {method: draft, checkpoint: …}}`",
            )
        proposer = _draft_model(runner, draft, rows)
    return Speculation(proposer, max_tokens=MOST_DRAFT_TOKENS if facts is None else facts.max_tokens)


def _draft_model(runner: DraftedFor, draft: DraftedFor, rows: int) -> Proposer:
    """Make the decoder of `draft` propose tokens for `runner`."""
    if draft.tokenizer.get_vocab() != runner.tokenizer.get_vocab():
        raise InputError("the draft artifact has a different vocabulary")
    if (reason := draft.session.signature.no_reuse_reason) is not None:
        raise UnsupportedError(f"the draft artifact cannot discard draft tokens: {reason}")
    if draft.session.signature.block_size is not None:
        raise UnsupportedError(
            "the draft artifact keeps its KV cache in blocks of one pool, and drafts need a slot for each sequence",
            hint="build it with `engine: {kv_cache: slots}`",
        )
    capacity = min(runner.config.max_context, draft.config.max_context)
    return DraftModel(draft.session, runner.config.vocabulary, rows, capacity, PREFILL_CHUNK)


def _draft_head(runner: DraftedFor, rows: int) -> Proposer:
    """Make the head of the artifact propose tokens for its engine."""
    facts, head = runner.config.speculation, runner.draft
    if head is None or facts is None or facts.method != "eagle3":
        raise UsageError(
            "speculation is 'eagle3' and the artifact has no head",
            hint="build with `serving: {speculation: {method: eagle3, checkpoint: …}}`",
        )
    if (reason := runner.session.signature.no_reuse_reason) is not None:
        raise UnsupportedError(f"drafts cannot be discarded: {reason}")
    given, taken = runner.session.signature.hidden_widths, head.session.signature.hidden_widths
    wanted = taken.get(interface.HIDDEN_STATES)
    if wanted is None or interface.DRAFT_STATES not in taken or head.session.signature.gives_hidden is None:
        raise InputError("the engine in `draft` is not that of an EAGLE-3 head")
    if given.get(interface.HIDDEN_STATES) != wanted or head.config.vocabulary != runner.config.vocabulary:
        raise InputError(
            f"the head reads {wanted} hidden states of a token and predicts {head.config.vocabulary} tokens; the "
            f"engine gives {given.get(interface.HIDDEN_STATES, 0)}, and has a vocabulary of {runner.config.vocabulary}"
        )
    capacity = min(runner.config.max_context, head.config.max_context)
    return DraftHead(head.session, rows, capacity, PREFILL_CHUNK)
