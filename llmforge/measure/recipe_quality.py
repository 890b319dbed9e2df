"""Quality as a recipe asks for it: on its text, in prefill and through decode steps, in answers, and with adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmforge.base.progress import Progress
from llmforge.checkpoint import text
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure import answers, quality
from llmforge.measure.answers import Generate
from llmforge.measure.baseline import Baseline, baseline_on
from llmforge.measure.quality import Logits, QualityRun
from llmforge.measure.streamed_baseline import StreamedBaseline
from llmforge.metrics import catalog
from llmforge.metrics.adapters import AdapterQuality
from llmforge.metrics.quality import GreedyAnswer, Quality, Sample
from llmforge.recipe import QualitySpec
from llmforge.serving import Runner, Sampling

ComparedAnswers = tuple[tuple[GreedyAnswer, ...], tuple[Sample, ...]]


@dataclass(frozen=True)
class RecipeQuality:
    """Measures what `spec` asks for of the engine that `runner` has loaded, on `windows` of its text."""

    spec: QualitySpec
    runner: Runner
    windows: Sequence[TokenWindow]
    progress: Progress

    @property
    def half_of(self) -> int | None:
        """Length of the windows whose second half alone is scored; None: all is."""
        return self.spec.context if self.spec.scored == "second-half" else None

    def answers(self, baseline: Baseline | StreamedBaseline, greedy: Generate | None = None) -> ComparedAnswers:
        """Compare greedy answers, where the recipe asks for them; `greedy` gives those of another runtime."""
        if self.spec.samples is None:
            return (), ()
        self.progress.stage("Compare answers")
        tokenizer = self.runner.tokenizer
        return answers.compare(
            self.windows,
            self.spec.samples,
            artifact=greedy or self._greedy,
            baseline=lambda texts: baseline.of(texts, self.progress.advance),
            continued=baseline.greedy,
            ends=self.runner.config.eos_token_ids,
            decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
            progress=self.progress.advance,
        )

    def compare(
        self, logits: Callable[..., NDArray[np.float32]], expected: Logits, compared: ComparedAnswers
    ) -> Quality:
        """Compare `logits` with those `expected` on the text and, where that is asked for, through decode steps."""
        self.progress.stage("Measure quality")
        run = QualityRun(
            half_of=self.half_of,
            decode=lambda ids: logits(ids.tolist(), step_tokens=1),
            decode_tokens=self.spec.decode_tokens or 0,
            answers=compared[0],
            samples=compared[1],
            metrics=self.spec.metrics,
            ends=self.runner.config.eos_token_ids,
        )
        return quality.compare(self.windows, expected, lambda ids: logits(ids.tolist()), run, self.progress.advance)

    def of_adapter(self, name: str, baseline: Baseline | StreamedBaseline) -> AdapterQuality:
        """Compare the artifact with an adapter chosen with the checkpoint that has it merged, on some of the text."""
        half = self.half_of
        pool = [each for each in self.windows if len(each.ids) > 1 and (half is None or len(each.ids) == half)]
        some = text.spread(pool, self.spec.adapter_tokens)
        expected = baseline_on([window.ids for window in some], baseline, self.progress)
        moved = quality.compare(
            some,
            expected,
            lambda ids: self.runner.logits(ids.tolist(), adapter=name),
            QualityRun(half_of=half, only=list(catalog.OF_ADAPTERS.values()), ends=self.runner.config.eos_token_ids),
            self.progress.advance,
        )
        return AdapterQuality(adapter=name, quality=moved)

    def _greedy(self, ids: NDArray[np.int64], tokens: int) -> Iterator[int]:
        for chunk in self.runner.generate(ids.tolist(), Sampling(max_tokens=tokens, ignore_eos=True)):
            if chunk.token_id is not None:
                yield chunk.token_id
