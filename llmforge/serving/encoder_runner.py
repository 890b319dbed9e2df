"""Runs embedders and rerankers: texts in, embeddings or scores out. The same runner serves validation and users."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from llmforge.backends.loading import open_encoder
from llmforge.base.errors import UsageError
from llmforge.base.pair_template import PairTemplate
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.runtime.encoder import EncoderConfig, EncoderSession
from llmforge.serving.prompts import LEAST_PROMPT_BYTES, check_unicode, read_tokenizer

BATCH_TOKENS = 4096  # that one run of a graph reads, padding included


@dataclass(frozen=True)
class EncoderInput:
    """One sequence of an encoder: a text, or a query with a text behind it."""

    ids: NDArray[np.int64]
    token_types: NDArray[np.int64]  # 1 where a token is of the second text
    truncated: bool = False  # its text was longer than the model reads

    def __len__(self) -> int:
        return len(self.ids)


class EncoderRunner:
    """A session with its tokenizer; threads may share it.

    Texts that the model cannot read whole are refused, or, where the caller says so, cut at their end. Texts of bytes
    that no `max_tokens` tokens could be are cut there first.
    """

    def __init__(self, session: EncoderSession, tokenizer: Tokenizer) -> None:
        self.session = session
        self.tokenizer = tokenizer
        self.vocabulary: int = tokenizer.get_vocab_size(with_added_tokens=True)
        longest = max((len(token.encode("utf-8", "surrogatepass")) for token in tokenizer.get_vocab()), default=1)
        self._most_characters = max(LEAST_PROMPT_BYTES, self.config.max_tokens * longest)
        self._lock = threading.Lock()

    @property
    def config(self) -> EncoderConfig:
        """What the engine is."""
        return self.session.config

    def embed(
        self,
        texts: Sequence[str],
        prompt_name: str | None = None,
        dimensions: int | None = None,
        *,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """Embed texts, fp32 [texts, dimensions].

        `prompt_name` chooses what texts begin with; None: the model's default. With fewer `dimensions` than the model's
        the first of them are given, at length 1 where the model's have that (Matryoshka, arXiv:2205.13147).

        Raises:
            UsageError: the model scores pairs, has no such prompt or dimensions, or a text is too long.
        """
        most = self.check_dimensions(dimensions)
        return self.shorten(self.run(self.texts(texts, prompt_name, truncate=truncate)), most)

    def score(self, query: str, texts: Sequence[str], *, truncate: bool = False) -> NDArray[np.float64]:
        """Score how relevant each text is for a query: `relevance` of its logit, [texts].

        Raises:
            UsageError: the model embeds, or a pair is too long.
        """
        return relevance(self.run(self.pairs([(query, text) for text in texts], truncate=truncate))[:, 0])

    def texts(
        self, texts: Sequence[str], prompt_name: str | None = None, *, truncate: bool = False
    ) -> list[EncoderInput]:
        """Tokenize texts to embed.

        Raises:
            UsageError: as `embed`.
        """
        self._require("embedder")
        prompt = self._prompt(prompt_name)
        inputs = [prompt + self._cut(text, f"text {index}", truncate) for index, text in enumerate(texts)]
        found: list[Encoding] = self.tokenizer.encode_batch(inputs)
        most = self.config.max_tokens
        made = []
        for index, encoding in enumerate(found):
            cut = len(encoding.ids) > most
            if cut:
                self._check_length(len(encoding.ids), f"text {index}", truncate)
                encoding = self._shortened(inputs[index], None, most)
            made.append(
                self._input(
                    encoding, f"text {index}", truncated=cut or len(inputs[index]) < len(prompt) + len(texts[index])
                )
            )
        return made

    def pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncate: bool = False, most_text_tokens: int | None = None
    ) -> list[EncoderInput]:
        """Tokenize pairs of a query and a text to score; of what is too long the text is cut, never the query.

        `most_text_tokens` cuts the texts besides, where they have more tokens.

        Raises:
            UsageError: the model embeds, or a pair is too long; with `truncate`: its query alone is.
        """
        self._require("reranker")
        if self.config.labels != 1:
            raise UsageError(f"the model gives {self.config.labels} logits for a pair; scores need one")
        whole = [(query, self._cut(text, f"text {at}", truncate)) for at, (query, text) in enumerate(pairs)]
        for at, (query, _) in enumerate(whole):
            self._cut(query, f"query {at}", truncate=False)
        if self.config.template is not None:
            return self._written(self.config.template, whole, pairs, truncate, most_text_tokens)
        found: list[Encoding] = self.tokenizer.encode_batch(whole)
        made = []
        for at, encoding in enumerate(found):
            of_text = sum(number == 1 for number in encoding.sequence_ids) if most_text_tokens is not None else 0
            over = max(len(encoding.ids) - self.config.max_tokens, of_text - (most_text_tokens or of_text))
            if len(encoding.ids) > self.config.max_tokens:
                self._check_length(len(encoding.ids), f"text {at} with its query", truncate)
            if over > 0:
                encoding = self._shortened(*whole[at], len(encoding.ids) - over)
            made.append(
                self._input(encoding, f"text {at}", truncated=over > 0 or len(whole[at][1]) < len(pairs[at][1]))
            )
        return made

    def _written(
        self,
        template: PairTemplate,
        pairs: Sequence[tuple[str, str]],
        given: Sequence[tuple[str, str]],
        truncate: bool,
        most_text_tokens: int | None,
    ) -> list[EncoderInput]:
        """Tokenize pairs as `template` writes them; what is too long of a text is cut in front of what is behind it.

        `pairs` are those `given`, whose texts may have been cut before.
        """
        most = self.config.max_tokens
        written = [template.pair(query, text) for query, text in pairs]
        found: list[Encoding] = self.tokenizer.encode_batch(written, add_special_tokens=False)
        behind: Encoding = self.tokenizer.encode(template.behind, add_special_tokens=False)
        made = []
        for at, (encoding, (query, text)) in enumerate(zip(found, pairs, strict=True)):
            ids, cut = encoding.ids, len(text) < len(given[at][1])
            if len(ids) > most:
                self._check_length(len(ids), f"text {at} with its query", truncate)
            if len(ids) > most or most_text_tokens is not None:
                head: Encoding = self.tokenizer.encode(template.head(query), add_special_tokens=False)
                if most - len(behind.ids) - len(head.ids) < 1:
                    raise UsageError(
                        f"the query has, with the prompt of the model, {len(head.ids) + len(behind.ids):,} tokens, and "
                        f"leaves none of {most:,} for texts",
                        hint="shorten the query",
                    )
                # A space at the end of the head may become a part of the text's first word: lengths differ by one then.
                body: Encoding = self.tokenizer.encode(template.head(query) + text, add_special_tokens=False)
                room = most - len(behind.ids)
                if most_text_tokens is not None:
                    room = min(room, len(head.ids) + most_text_tokens)
                if len(body.ids) > room:
                    ids, cut = [*body.ids[:room], *behind.ids], True
            made.append(EncoderInput(np.array(ids, np.int64), np.zeros(len(ids), np.int64), truncated=cut))
        return made

    def tokens(self, ids: Sequence[int], what: str) -> EncoderInput:
        """Take token ids as they are, special tokens included.

        Raises:
            UsageError: there are none, or too many, or they are none of the vocabulary's.
        """
        self._require("embedder")
        if not ids or not all(0 <= token < self.vocabulary for token in ids):
            raise UsageError(f"{what}: expected token ids below {self.vocabulary:,}")
        self._check_length(len(ids), what, truncate=False)
        return EncoderInput(np.array(ids, np.int64), np.zeros(len(ids), np.int64))

    def token_ids(self, text: str) -> list[int]:
        """Tokenize a text as it is embedded without a prompt, whole.

        Raises:
            UsageError: it has more characters than the model could read.
        """
        (found,) = self.tokenizer.encode_batch([self._cut(text, "the prompt", truncate=False)])
        return list(found.ids)

    def run(self, inputs: Sequence[EncoderInput], batch_tokens: int = BATCH_TOKENS) -> NDArray[np.float32]:
        """Run sequences in batches of similar lengths, fp32 [inputs, dimensions or labels], in the order given."""
        width = self.config.dimensions if self.config.kind == "embedder" else self.config.labels
        out = np.empty((len(inputs), width), np.float32)
        for batch in batches([len(each) for each in inputs], batch_tokens):
            out[batch] = self.run_together([inputs[index] for index in batch])
        return out

    def run_together(self, inputs: Sequence[EncoderInput]) -> NDArray[np.float32]:
        """Run sequences as one batch."""
        types = [each.token_types for each in inputs] if self.config.token_types else None
        with self._lock:
            return self.session.encode([each.ids for each in inputs], types)

    def check_dimensions(self, dimensions: int | None) -> int:
        """Return how many dimensions embeddings get.

        Raises:
            UsageError: the model has fewer.
        """
        if dimensions is not None and not 1 <= dimensions <= self.config.dimensions:
            raise UsageError(f"dimensions {dimensions}: expected 1 to {self.config.dimensions}")
        return dimensions or self.config.dimensions

    def shorten(self, embeddings: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
        """Take the first `dimensions` of embeddings [texts, D]; normalized ones are normalized again."""
        if dimensions == embeddings.shape[1]:
            return embeddings
        kept = embeddings[:, :dimensions]
        if not self.config.normalize:
            return kept
        # The epsilon of torch.nn.functional.normalize, which sentence-transformers calls.
        length = np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), 1e-12)
        made: NDArray[np.float32] = (kept / length).astype(np.float32)
        return made

    def _require(self, kind: str) -> None:
        if self.config.kind != kind:
            can = {"embedder": "embeds texts, and scores no pairs", "reranker": "scores pairs, and embeds no texts"}
            raise UsageError(f"the model {can[self.config.kind]}")

    def _prompt(self, name: str | None) -> str:
        chosen = self.config.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.config.prompts:
            known = ", ".join(self.config.prompts) or "none"
            raise UsageError(f"prompt_name {chosen!r}: the model has no such prompt; it has {known}")
        return self.config.prompts[chosen]

    def _cut(self, text: str, what: str, truncate: bool) -> str:
        """Bound what the tokenizer is given."""
        check_unicode(text, what)
        if len(text) <= self._most_characters:
            return text
        if not truncate:
            raise UsageError(
                f"{what} has {len(text):,} characters; the model reads {self.config.max_tokens:,} tokens, which have "
                f"at most {self._most_characters:,}",
                hint="split the text, or cut it: truncate",
            )
        return text[: self._most_characters]

    def _check_length(self, tokens: int, what: str, truncate: bool) -> None:
        if tokens > self.config.max_tokens and not truncate:
            raise UsageError(
                f"{what} has {tokens:,} tokens; the model reads at most {self.config.max_tokens:,}",
                hint="split the text, or cut it: truncate",
            )

    def _shortened(self, first: str, second: str | None, tokens: int) -> Encoding:
        """Tokenize one text, or two, and cut the last one so that all are `tokens`, special ones included."""
        special = self.tokenizer.num_special_tokens_to_add(second is not None)
        one: Encoding = self.tokenizer.encode(first, add_special_tokens=False)
        if second is None:
            one.truncate(max(0, tokens - special))
            return self.tokenizer.post_process(one, None, True)
        room = tokens - special - len(one.ids)
        if room < 1:
            raise UsageError(
                f"the query has {len(one.ids):,} tokens, and leaves none of {self.config.max_tokens:,} for texts",
                hint="shorten the query",
            )
        # A tokenizer may put before the second text what it puts before none alone (a space): lengths can differ by it.
        other: Encoding = self.tokenizer.encode(second, add_special_tokens=False)
        other.truncate(room)
        return self.tokenizer.post_process(one, other, True)

    @staticmethod
    def _input(encoding: Encoding, what: str, *, truncated: bool) -> EncoderInput:
        if not encoding.ids:
            raise UsageError(f"{what} is empty")
        return EncoderInput(np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64), truncated)


def load_encoder(artifact: Path, threads: int | None = None) -> EncoderRunner:
    """Load an embedder or a reranker; `threads` overrides its own number of threads.

    Raises:
        InputError: the folder is not an artifact, or its files do not belong together.
        VersionMismatch: the artifact was built for another version of what runs it.
        UsageError: it is a language model.
    """
    config = RuntimeConfig.read(artifact / "engine" / FILE)
    tokenizer = read_tokenizer(artifact / "tokenizer" / "tokenizer.json")
    return EncoderRunner(open_encoder(artifact / "engine", config, threads), tokenizer)


def encodes(artifact: Path) -> bool:
    """Say whether an artifact is an embedder or a reranker.

    Raises:
        InputError, EnvironmentLacks: as `RuntimeConfig.read`.
    """
    return RuntimeConfig.read(artifact / "engine" / FILE).encoder is not None


def batches(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Split sequences into batches of similar lengths: numbers of sequences, the longest first.

    A batch has at most `most_tokens`, each sequence padded to its longest, and at least one sequence.
    """
    made: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if made and lengths[made[-1][0]] * (len(made[-1]) + 1) <= most_tokens:
            made[-1].append(index)
        else:
            made.append([index])
    return made


def relevance(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Map logits of a reranker to 0 … 1 by the logistic function, in fp64: large ones keep their order longer."""
    return 1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -500, 500)))
