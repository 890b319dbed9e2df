"""`llmforge.load`: an artifact that answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from llmforge.artifact import Artifact, admission
from llmforge.artifact.references import resolve
from llmforge.base import folders
from llmforge.base.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from llmforge.serving import Chunk, Runner, TokenLogprob, Usage
    from llmforge.serving.encoder_runner import EncoderRunner

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, token ids, or messages of a chat


@dataclass(frozen=True)
class Answer:
    """A generated text. `finish_reason` is "stop" or "length"; `logprobs` are of each token, where asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()

    def __str__(self) -> str:
        return self.text


class Model:
    """An artifact's engine in this process, with its tokenizer; threads may share it.

    A language model answers, an embedder embeds, a reranker scores; each refuses what the others do.
    """

    def __init__(self, artifact: Artifact, loaded: Runner | EncoderRunner) -> None:
        self.artifact = artifact
        self._loaded = loaded

    def __repr__(self) -> str:
        manifest = self.artifact.manifest
        tokens = self.encoder.config.max_tokens if self._encodes else self.runner.config.max_context
        return f"<llmforge.Model {manifest.name}/{manifest.version}: {tokens} tokens>"

    @property
    def _encodes(self) -> bool:
        from llmforge.serving.encoder_runner import EncoderRunner

        return isinstance(self._loaded, EncoderRunner)

    @property
    def runner(self) -> Runner:
        """What runs a language model.

        Raises:
            UsageError: the artifact is none.
        """
        if self._encodes:
            raise UsageError("the artifact is an embedder or a reranker", hint="use `embed` or `score`")
        return cast("Runner", self._loaded)

    @property
    def encoder(self) -> EncoderRunner:
        """What runs an embedder or a reranker.

        Raises:
            UsageError: the artifact is neither.
        """
        if not self._encodes:
            raise UsageError("the artifact is a language model", hint="use `generate`")
        return cast("EncoderRunner", self._loaded)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""
        return self._loaded.tokenizer

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """Embed texts, fp32 [texts, dimensions], or one text, [dimensions], as `EncoderRunner.embed` does.

        Raises:
            UsageError: the artifact is no embedder, has no such prompt or dimensions, or a text is too long.
        """
        given = [texts] if isinstance(texts, str) else texts
        made = self.encoder.embed(given, prompt_name, dimensions, truncate=truncate)
        return made[0] if isinstance(texts, str) else made

    def score(self, query: str, texts: Sequence[str], *, truncate: bool = False) -> NDArray[np.float64]:
        """Score how relevant each text is for a query, 0 to 1, [texts].

        Raises:
            UsageError: the artifact is no reranker, or a text with its query is too long.
        """
        return self.encoder.score(query, texts, truncate=truncate)

    def generate(self, prompt: Prompt, *, adapter: str = "", **sampling: Any) -> Answer:
        """Answer a prompt: a text, token ids, or messages, to which the chat template is applied.

        `adapter` names one that the artifact keeps apart; "": none.

        `sampling` are fields of `llmforge.serving.Sampling`: max_tokens, temperature, top_p, seed, stop, …; by default
        greedy, until the model ends or the context is full.

        Raises:
            UsageError: the prompt is empty or too long, an option is not what it may be, or there is no such adapter.
        """
        chunks = list(self._chunks(prompt, sampling, adapter))
        last = chunks[-1]
        assert last.finish_reason is not None
        assert last.usage is not None
        return Answer(
            "".join(chunk.text for chunk in chunks),
            tuple(chunk.token_id for chunk in chunks if chunk.token_id is not None),
            last.finish_reason,
            last.usage,
            tuple(chunk.logprob for chunk in chunks if chunk.logprob is not None),
        )

    def stream(self, prompt: Prompt, *, adapter: str = "", **sampling: Any) -> Iterator[str]:
        """Answer as `generate` does, piece by piece as the text becomes certain; pieces are not empty."""
        return (chunk.text for chunk in self._chunks(prompt, sampling, adapter) if chunk.text)

    def logits(self, prompt: str | Sequence[int], *, adapter: str = "") -> NDArray[np.float32]:
        """Return the logits after each token of a text, or of token ids: fp32 [tokens, vocabulary].

        Raises:
            UsageError: there are no tokens, or too many.
        """
        return self.runner.logits(self.runner.encode(prompt) if isinstance(prompt, str) else prompt, adapter=adapter)

    def _chunks(self, prompt: Prompt, sampling: Mapping[str, Any], adapter: str) -> Iterator[Chunk]:
        from llmforge.serving import Sampling

        unknown = set(sampling) - set(Sampling.__dataclass_fields__)
        if unknown:
            known = ", ".join(Sampling.__dataclass_fields__)
            raise UsageError(f"unknown option of sampling: {', '.join(sorted(unknown))}; known: {known}")
        ids: str | Sequence[int]
        if isinstance(prompt, str):
            ids = prompt
        elif all(isinstance(part, Mapping) for part in prompt) and len(prompt):
            ids = self.runner.encode_chat([dict(part) for part in prompt])  # type: ignore[arg-type]
        else:
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in sampling.items()
        }
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        return self.runner.generate(ids, Sampling(**given), adapter)


def load(
    artifact: str | Path,
    *,
    out: str | Path | None = None,
    threads: int | None = None,
    device: int = 0,
    allow: Literal["fail", "inconclusive"] | None = None,
) -> Model:
    """Load an artifact: a path, or under `out` NAME/VERSION, NAME:TAG or the beginning of a version.

    Its files are hashed first. `threads` defaults to all physical cores. `allow`: load it although its gates ended so.

    Raises:
        llmforge.base.errors.ForgeError: it is damaged, its verdict is forged, its gates failed, or this machine does
            not run its engine.
    """
    from llmforge import serving
    from llmforge.gates import confirmed

    opened = confirmed.open_artifact(resolve(str(artifact), folders.artifacts(out)))
    admission.admit(opened.path, allow=allow, how_to_allow='allow="fail"')
    return Model(opened, serving.load(opened.path, threads, device))
