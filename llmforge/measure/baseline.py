"""The original checkpoint as transformers runs it: what an artifact's quality and speed are held against."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base import resources
from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.progress import Progress
from llmforge.checkpoint import Checkpoint
from llmforge.measure.padded_batch import PaddedBatch
from llmforge.measure.streamed_baseline import StreamedBaseline
from llmforge.metrics import units
from llmforge.trace.export.limits import WHOLE_BYTES

if TYPE_CHECKING:
    from llmforge.measure.quality import Logits

Seen = Callable[[Sequence[int], NDArray[np.float32], Sequence[int]], None]  # places, logits [B, V], tokens [B]

_FP32_BYTES = 4
_RESCALED = {"dynamic", "longrope"}  # rotary embeddings, by transformers' names, that change with the length of a text


def open_baseline(
    checkpoint: Checkpoint, *, threads: int, whole_bytes: int = WHOLE_BYTES
) -> Baseline | StreamedBaseline:
    """Load the baseline; one of more than `whole_bytes` of fp32 weights is run layer by layer, if its layers can be.

    Its description says which. The model alone decides, not the memory of this machine.

    Raises:
        CheckpointError: transformers cannot load the checkpoint or misses weights.
    """
    if _FP32_BYTES * checkpoint.parameters <= whole_bytes:
        return Baseline(checkpoint, threads=threads)
    try:
        return StreamedBaseline(checkpoint, threads=threads)
    except UnsupportedError as error:
        whole = Baseline(checkpoint, threads=threads)
        whole.description += f"; loaded whole: {error.message}"
        return whole


def why_not_whole(checkpoint: Checkpoint) -> str | None:
    """Say why the baseline does not fit into memory as a whole, as generating takes; None: it does."""
    needed, free = _FP32_BYTES * checkpoint.parameters, resources.free_memory_bytes()
    if needed <= free:
        return None
    return f"its weights in fp32 take {units.size(needed)}, and {units.size(free)} of memory are free"


def baseline_on(
    texts: Sequence[NDArray[np.int64]], baseline: Baseline | StreamedBaseline, progress: Progress
) -> Logits:
    """Return what gives the logits [S, V] of each of `texts`; a baseline that is streamed runs here."""
    if isinstance(baseline, Baseline):
        return baseline.logits
    progress.stage("Run baseline")
    return baseline.logits_of(baseline.walk(texts, progress.advance))


class Baseline:
    """A checkpoint in transformers, in fp32 arithmetic on its stored weights.

    fp32 holds bf16 and fp16 weights exactly, so that only the reference's own rounding (about 1e-6) is left. Attention
    is PyTorch's scaled dot product, generation one DynamicCache, both transformers' defaults. Local files only, no
    remote code, no pickle.
    """

    def __init__(self, checkpoint: Checkpoint, *, threads: int) -> None:
        """Load the weights; every later call computes on `threads` threads.

        Raises:
            CheckpointError: transformers cannot load the checkpoint or misses weights.
        """
        import torch
        import transformers

        from llmforge.trace.export import skeleton
        from llmforge.trace.hooks import internals

        self._threads, self.vocabulary = threads, checkpoint.geometry.vocabulary
        began = time.perf_counter()
        with internals.torch_threads(threads):
            try:
                self._model: Any = skeleton.load(checkpoint)
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(f"{checkpoint.path}: transformers cannot load it: {error}") from error
        self.load_seconds = time.perf_counter() - began
        self.description = (
            f"transformers {transformers.__version__}, torch {torch.__version__}, fp32 arithmetic on the stored "
            f"weights, attention {self._model.config._attn_implementation}, threads: {threads}"
        )

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute the logits [S, V] of one sequence `ids` [S], with no cache."""
        import torch

        from llmforge.trace.hooks import internals

        with torch.inference_mode(), internals.torch_threads(self._threads):
            output = self._model(input_ids=torch.from_numpy(np.array(ids, np.int64))[None], use_cache=False)
        logits: NDArray[np.float32] = output.logits[0].numpy()
        return logits

    def following(self, context: tuple[int, ...], texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Compute the logits [S, V] that each token of `texts`, ids [S], is judged by after the same `context`.

        The context is read once for all of them, and they are read together, filled up on the right, where keys and
        values are all that the model keeps of what it read, and these do not depend on the length of the text. Other
        states, as of linear attention, cannot be gone on from by several tokens: there each is read with its context.
        """
        import torch
        from transformers import DynamicCache

        from llmforge.trace.hooks import internals

        cache = DynamicCache(config=self._model.config)
        if len(texts) == 1 or not self._takes_padding():
            return [self._last_logits([*context, *text[:-1]], max(1, len(text)))[: len(text)] for text in texts]
        longest = max(1, *map(len, texts)) - 1
        with torch.inference_mode(), internals.torch_threads(self._threads):
            read = torch.tensor([list(context)])
            first = self._model(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            rows = first.expand(len(texts), 1, -1)
            if longest:
                cache.batch_repeat_interleave(len(texts))
                filled = torch.tensor([[*text[:longest], *context[-1:] * (longest - len(text))] for text in texts])
                later = self._model(input_ids=filled, past_key_values=cache, use_cache=True).logits
                rows = torch.cat([rows, later], 1)
        return [each[: len(text)].numpy() for each, text in zip(rows, texts, strict=True)]

    def _last_logits(self, ids: list[int], rows: int) -> NDArray[np.float32]:
        """Compute the logits [rows, V] after the last tokens of a text."""
        import torch

        from llmforge.trace.hooks import internals

        with torch.inference_mode(), internals.torch_threads(self._threads):
            output = self._model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=rows)
        logits: NDArray[np.float32] = output.logits[0].numpy()
        return logits

    def of(
        self, texts: Sequence[NDArray[np.int64]], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Logits:
        """Return what gives the logits [S, V] of each of `texts`; nothing is computed before it is asked for."""
        return self.logits

    def greedy(self, texts: Sequence[NDArray[np.int64]], counts: Sequence[int]) -> list[list[int]]:
        """Continue each of `texts`, ids [S], by as many greedy tokens as `counts` says; EOS does not end it."""
        return [[step[0] for step in self.generate(ids[None], count)] for ids, count in zip(texts, counts, strict=True)]

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        ends: Collection[int],
        seen: Seen = lambda places, logits, tokens: None,
    ) -> list[list[int]]:
        """Answer prompts, ids [S], together: at most so many greedy tokens each, the one that ends it included.

        They are filled up on the left, and masked there; models whose state is no cache of keys and values, or whose
        rotary embedding depends on the length, read each prompt alone. `seen` is told each step: the places of prompts
        that are still answered, their logits [B, V], and the tokens [B] that were chosen.
        """
        if len(prompts) > 1 and not self._takes_padding():
            asked = enumerate(zip(prompts, counts, strict=True))
            return [self.answers([each], [count], ends, _at(place, seen))[0] for place, (each, count) in asked]
        import torch

        from llmforge.trace.hooks import internals

        going, said = list(range(len(prompts))), [list[int]() for _ in prompts]
        with torch.inference_mode(), internals.torch_threads(self._threads):
            batch, logits = PaddedBatch.read(self._model, prompts, keep=1, shares=self._shares())
            while True:
                chosen = logits[:, -1].argmax(-1)
                tokens = chosen.tolist()
                seen(going, logits[:, -1].numpy(), tokens)
                for place, token in zip(going, tokens, strict=True):
                    said[place].append(token)
                left = [
                    row
                    for row, place in enumerate(going)
                    if said[place][-1] not in ends and len(said[place]) < counts[place]
                ]
                if not left:
                    return said
                if len(left) < len(going):  # who has ended makes room
                    batch.select(left)
                    going, chosen = [going[row] for row in left], chosen[left]
                logits = batch.step(chosen[:, None])

    def last_logits(self, texts: Sequence[Sequence[int]], rows: int) -> list[NDArray[np.float32]]:
        """Compute the logits [rows, V] of the last tokens of each of `texts`, ids [S], which are read together."""
        import torch

        from llmforge.trace.hooks import internals

        if len(texts) == 1 or not self._takes_padding():
            return [self._last_logits([*text], rows) for text in texts]
        with torch.inference_mode(), internals.torch_threads(self._threads):
            _, logits = PaddedBatch.read(self._model, texts, keep=rows, shares=self._shares())
        return [each.numpy() for each in logits]

    def _shares(self) -> bool:
        """Say if what texts begin with may stand before their filling: a window would count the places between."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        return {type(layer) for layer in DynamicCache(config=self._model.config).layers} == {DynamicLayer}

    def _takes_padding(self) -> bool:
        """Say if keys and values are all that the model keeps, and do not depend on the length of a text."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        config = self._model.config
        layers = {type(layer) for layer in DynamicCache(config=config).layers}
        return not layers - {DynamicLayer, DynamicSlidingWindowLayer} and not _RESCALED & set(
            _strings(config.to_dict())
        )

    def generate(self, ids: NDArray[np.int64], tokens: int) -> Iterator[list[int]]:
        """Yield the next greedy token after each of the prompts `ids` [B, S], `tokens` times; EOS does not end it."""
        import torch
        from transformers import DynamicCache

        from llmforge.trace.hooks import internals

        kept = {internals.cache_argument(self._model): DynamicCache(config=self._model.config)}
        step = torch.from_numpy(np.array(ids, np.int64))
        for _ in range(tokens):
            with torch.inference_mode(), internals.torch_threads(self._threads):
                output = self._model(input_ids=step, use_cache=True, logits_to_keep=1, **kept)
                step = output.logits[:, -1].argmax(-1, keepdim=True)
            yield step[:, 0].tolist()


def _at(place: int, seen: Seen) -> Seen:
    """Tell `seen` the steps of a prompt that is alone as those of its place."""
    return lambda _, logits, tokens: seen([place], logits, tokens)


def _strings(value: object) -> Iterator[str]:
    """Give every text in a configuration."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_strings, value.values()))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_strings, value))
