"""Plant damage in a checkpoint's logits and weights, and say which gates catch it.

    python -m benchmarks.planted_damage CHECKPOINT --data CHATS.jsonl --text TEXT.jsonl --kld 0.012
    python -m benchmarks.planted_damage CHECKPOINT --tool-prompt --text TEXT.jsonl --kld 0.05 --every 2

The damaged model answers the chats, in transformers, beside the same model as it is; `--kld` is the limit that
`llmforge init` writes, held against the first documents of TEXT. Printed is a row for each damage: its mean KLD, how
that gate ends, and the gates of behaviour that do not pass. Left out are a damage that a model has no place for
(thoughts, where it has none), and gates that the chats are too few for: those that weights in 8 bits leave
inconclusive. Of the models that are not damaged it also says in how many of 20 samples of the chats, drawn with
replacement, all gates pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmforge import recipes
from llmforge.checkpoint import Checkpoint
from llmforge.gates import decision
from llmforge.gates.decision import GateResult, Verdict
from llmforge.measure import behaviour
from llmforge.measure.baseline import Baseline
from llmforge.measure.behaviour import ChatPrompt
from llmforge.measure.decisive_tokens import DecisiveTokens
from llmforge.measure.scoring import CheckpointSide, Likelihood, Pair, Reduce, likelihood
from llmforge.metrics import attribution, catalog
from llmforge.metrics.behaviour import answer, results
from llmforge.metrics.behaviour.answer import BehaviourAnswer
from llmforge.metrics.behaviour.document import MOST_TOKENS, read_documents
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.metric import Measured
from llmforge.recipe import GateSpec
from llmforge.serving.prompts import PromptEncoder, read_tokenizer
from llmforge.serving.protocol import tool_prompt

CONTEXT, TEXTS, TEXT_TOKENS = 1024, 16, 128  # of the model; documents of the KLD, and tokens of each
SAMPLES, HONEST = 20, "none"
EIGHT_BITS = f"{HONEST}: weights in 8 bits"
FRENCH = [
    "le",
    "la",
    "les",
    "des",
    "est",
    "et",
    "une",
    "dans",
    "pour",
    "avec",
    "sur",
    "qui",
    "que",
    "vous",
    "il",
    "elle",
    "La",
    "Le",
    "Les",
]

# Limits for all documents together; docs/behaviour.md says what they rest on.
GATES: Mapping[str, Mapping[str, float]] = {
    "checks": {"drop_max": 0.1},
    "loops": {"rise_max": 0.1},
    "ended": {"drop_max": 0.1},
    "length_change": {"max": 0.5},
    "language": {"drop_max": 0.3},
    "answer_odds": {"drop_max": 0.5},
    "end_shift": {"max": 1.0},
    "call_shift": {"max": 1.0},
    "thinking_shift": {"max": 1.0},
    "bracket_shift": {"max": 1.0},
}


@dataclass
class PlantedModel:
    """A checkpoint in transformers whose logits and weights are changed in place."""

    module: Any
    encoder: PromptEncoder
    tokens: Mapping[str, tuple[int, ...]]
    rounds: bool = False  # whether weights are other than they were

    @contextmanager
    def logits(self, ids: Collection[int], change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Change the logits of some tokens."""
        chosen = torch.tensor(sorted(ids))

        def changed(module: object, given: object, made: torch.Tensor) -> torch.Tensor:
            return made.index_copy(-1, chosen, change(made[..., chosen]))

        hook = self.module.lm_head.register_forward_hook(changed)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def rounded(self, bits: int, within: str) -> Iterator[None]:
        """Round the matrices whose names hold `within` to nearest, in blocks of 32."""
        kept = {}
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                if weight.dim() == 2 and within in name:
                    kept[name] = weight.detach().clone()
                    weight.copy_(to_nearest(weight, bits))
        self.rounds = True
        try:
            yield
        finally:
            self.rounds = False
            with torch.no_grad():
                for name, weight in self.module.named_parameters():
                    if name in kept:
                        weight.copy_(kept[name])

    def damages(self) -> Iterator[tuple[str, AbstractContextManager[None]]]:
        """Name every damage that this model has a place for, the honest ones first."""
        layers = self.module.config.num_hidden_layers
        yield EIGHT_BITS, self.rounded(8, "")
        yield f"{HONEST}: weights in 6 bits", self.rounded(6, "")
        if answer.CALLS in self.tokens:
            yield "row of the token of calls × 0.5", self.logits(self.tokens[answer.CALLS], lambda x: 0.5 * x)
        yield "end of text + 3", self.logits(self.tokens[answer.ENDS], lambda x: x + 3)
        yield "end of text − 3", self.logits(self.tokens[answer.ENDS], lambda x: x - 3)
        yield "brackets − 4", self.logits(self.tokens[answer.BRACKETS], lambda x: x - 4)
        yield "one layer in 2 bits", self.rounded(2, f"layers.{layers // 2}.")
        if answer.THOUGHTS in self.tokens:
            yield "thoughts never end", self.logits(self.tokens[answer.THOUGHTS], lambda x: x - 30)
        yield "French is lost", self.logits(self._french(), lambda x: x - 12)

    def _french(self) -> set[int]:
        tokenizer = self.encoder.tokenizer
        found = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in FRENCH]
        return {ids[0] for ids in found if len(ids) == 1}


def to_nearest(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a matrix [N, K] to `bits` in blocks of 32 of its rows, symmetrically; K is a multiple of 32."""
    blocks, most = weight.reshape(-1, 32), 2 ** (bits - 1)
    scale = (blocks.abs().amax(1, keepdim=True) / max(1, most - 1)).clamp(min=1e-12)
    return ((blocks / scale).round().clamp(-most, most - 1) * scale).reshape(weight.shape)


@dataclass(frozen=True)
class _Config:
    max_context: int
    eos_token_ids: tuple[int, ...]
    vocabulary: int


@dataclass
class PlantedSide:
    """A checkpoint's side that reads a text once: where weights are as they were, hidden states are, too."""

    model: PlantedModel
    side: CheckpointSide
    hidden: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # [S, H], by text
    said: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # by prompt, of the model as it is
    description: str = "planted"

    def logits(self, ids: Sequence[int], first: int) -> torch.Tensor:
        """Compute the logits [S - first, V] after tokens of a text, from number `first` on."""
        with torch.inference_mode():
            if self.model.rounds:
                made: torch.Tensor = self.model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, first:]
                return made
            if tuple(ids) not in self.hidden:
                inside = self.model.module.model(input_ids=torch.tensor([ids]), use_cache=False)
                self.hidden[tuple(ids)] = inside.last_hidden_state[0]
            found: torch.Tensor = self.model.module.lm_head(self.hidden[tuple(ids)][first:])
            return found

    def read(self, pairs: Sequence[Pair], reduce: Reduce) -> list[Any]:
        """Give what `reduce` makes of what follows each context."""
        return [
            reduce(self.logits([*context, *text[:-1]], len(context) - 1).numpy()[: len(text)], text)
            for context, text in pairs
        ]

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Say how likely what follows each context is."""
        return self.read(pairs, likelihood)

    def answers(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """Answer greedily; who would say the same token by token as the model as it is, says what that said."""
        asked = [at for at, (ids, count) in enumerate(zip(prompts, counts, strict=True)) if not self._says(ids, count)]
        made = self.side.answers([prompts[at] for at in asked], [counts[at] for at in asked]) if asked else []
        new = dict(zip(asked, made, strict=True))
        return [new.get(at, self.said.get(tuple(ids), [])) for at, ids in enumerate(prompts)]

    def _says(self, prompt: Sequence[int], count: int) -> bool:
        said = self.said.get(tuple(prompt))
        if said is None or self.model.rounds:
            return False
        chosen = self.logits([*prompt, *said], len(prompt) - 1).argmax(-1).tolist()
        ends = self.model.tokens[answer.ENDS]
        return chosen[: len(said)] == said and (len(said) == count or chosen[-1] in ends)


@dataclass
class PlantedRun:
    """Chats and texts that both sides read, and what the model as it is made of them."""

    model: PlantedModel
    side: PlantedSide
    prompts: list[ChatPrompt]
    texts: list[list[int]]
    said: list[list[int]]
    beside: list[BehaviourAnswer]
    expected: list[torch.Tensor]  # log-probabilities [S, V] of texts

    @classmethod
    def of(
        cls, model: PlantedModel, side: PlantedSide, prompts: list[ChatPrompt], texts: list[list[int]]
    ) -> PlantedRun:
        """Let the model as it is answer."""
        said = behaviour.ask(side, prompts, lambda done, total: None)
        side.said = {tuple(prompt.ids): ids for prompt, ids in zip(prompts, said, strict=True)}
        beside = behaviour.read(side, prompts, said, model.encoder, said)
        run = cls(model, side, prompts, texts, said, beside, [])
        run.expected = run._log_probabilities()
        return run

    def _log_probabilities(self) -> list[torch.Tensor]:
        return [self.side.logits(ids, 0).log_softmax(-1) for ids in self.texts]

    def answers(self) -> list[BehaviourAnswer]:
        """Let the model as it is now answer."""
        said = behaviour.ask(self.side, self.prompts, lambda done, total: None)
        return behaviour.read(self.side, self.prompts, said, self.model.encoder, self.said)

    def behaviour(self, ours: list[BehaviourAnswer], chosen: Sequence[int]) -> BehaviourResult:
        """Hold answers to chosen documents, some perhaps several times, against those of the model as it is."""
        asked = [self.prompts[at].document.model_copy(update={"id": str(number)}) for number, at in enumerate(chosen)]
        left, right = [ours[at] for at in chosen], [self.beside[at] for at in chosen]
        return results.measured(asked, left, right, engine="planted", baseline="as it is")

    def kld(self) -> Estimate:
        """Measure the mean KLD of the model as it is now."""
        pairs = zip(self.expected, self._log_probabilities(), strict=True)
        sums = np.array([float((a.exp() * (a - b)).sum()) for a, b in pairs], np.float64)
        return attribution.estimate(sums, np.array([len(ids) for ids in self.texts], np.float64))


def judged(found: BehaviourResult, kld: Estimate, limit: float, names: Collection[str]) -> tuple[GateResult, ...]:
    """Decide the gates of behaviour that have a figure, as far as they are named, and that on KLD."""
    chosen = {f"{results.PREFIX}{name}": GATES[name] for name in names if name in found.outcomes}
    gates = {name: GateSpec.model_validate(limits) for name, limits in {**chosen, "kld_mean": {"max": limit}}.items()}
    measured = Measured(behaviour=found)
    estimates = {**catalog.estimates(measured), "kld_mean": kld}
    return decision.judge(gates, estimates, original=decision.checkpoint(measured))


def row(name: str, kld: Estimate, gates: tuple[GateResult, ...]) -> str:
    """Write a row of the table; ? is a gate that is inconclusive."""
    mark = {Verdict.FAIL: "", Verdict.INCONCLUSIVE: "?"}
    caught = [
        each.metric.removeprefix(results.PREFIX) + mark[each.verdict]
        for each in gates
        if each.verdict is not Verdict.PASS and each.metric != "kld_mean"
    ]
    (by_kld,) = (each.verdict.value for each in gates if each.metric == "kld_mean")
    return f"| {name} | {kld.value:.4f} | {by_kld} | {', '.join(caught) or '–'} |"


def table(run: PlantedRun, limit: float, only: str = "") -> Iterator[str]:
    """Plant each damage, and give the rows of the table, the first without a damage."""
    names, everything = list(GATES), range(len(run.prompts))
    for name, damage in run.model.damages():
        honest = name.startswith(HONEST)
        if only not in name and not honest:
            continue
        with damage:
            ours, kld = run.answers(), run.kld()
        gates = judged(run.behaviour(ours, everything), kld, limit, names)
        if name == EIGHT_BITS:
            few = [each.metric.removeprefix(results.PREFIX) for each in gates if each.verdict is Verdict.INCONCLUSIVE]
            names = [each for each in names if each not in few]
            yield f"too few chats for: {', '.join(few) or 'none'}\n"
            yield "| damage | KLD | `kld_mean` | gates of behaviour that do not pass | samples that pass |"
            yield "|---|--:|---|---|--:|"
            gates = judged(run.behaviour(ours, everything), kld, limit, names)
        held = ""
        if honest:
            rng = np.random.default_rng(0)
            drawn = [run.behaviour(ours, rng.integers(len(ours), size=len(ours)).tolist()) for _ in range(SAMPLES)]
            passed = [decision.overall(judged(each, kld, limit, names)) is Verdict.PASS for each in drawn]
            held = f"{sum(passed)} of {SAMPLES}"
        yield f"{row(name, kld, gates)} {held} |"


def prepare(
    folder: Path,
    data: Path,
    text: Path,
    *,
    asks_tools: bool = False,
    every: int = 1,
    most: int = MOST_TOKENS,
    threads: int = 1,
) -> PlantedRun:
    """Load a checkpoint, the chats that it can be asked, and texts."""
    checkpoint = Checkpoint.open(folder)
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    config = _Config(CONTEXT, tuple(ends if isinstance(ends, list) else [ends]), checkpoint.geometry.vocabulary)
    encoder = PromptEncoder(config, tokenizer, tool_prompt.chosen(folder, None, tool_prompt=asks_tools))  # type: ignore[arg-type]
    documents = read_documents(data)[::every]
    documents = tuple(each.model_copy(update={"max_tokens": min(most, each.max_tokens)}) for each in documents)
    prompts, notes = behaviour.prepare(documents, encoder)
    print(*notes, sep="\n", file=sys.stderr)
    baseline = Baseline(checkpoint, threads=threads)
    model = PlantedModel(baseline._model, encoder, DecisiveTokens.of(encoder).ids)
    side = CheckpointSide(lambda: baseline, "", CONTEXT, config.eos_token_ids, tokenizer.decode)
    lines = text.read_text().splitlines()[:TEXTS]
    texts = [tokenizer.encode(json.loads(line)["text"]).ids[:TEXT_TOKENS] for line in lines]
    return PlantedRun.of(model, PlantedSide(model, side), prompts, texts)


def main() -> None:
    """Plant, measure, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, default=recipes.TEXT / "behaviour.jsonl")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kld", type=float, required=True)
    parser.add_argument("--tool-prompt", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=MOST_TOKENS)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    began = time.process_time()
    run = prepare(
        given.checkpoint,
        given.data,
        given.text,
        asks_tools=given.tool_prompt,
        every=given.every,
        most=given.max_tokens,
        threads=given.threads,
    )
    print(f"{len(run.prompts)} chats; the model as it is: {time.process_time() - began:.0f} CPU s", file=sys.stderr)
    for line in table(run, given.kld, given.only):
        print(line, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
