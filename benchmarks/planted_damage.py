"""Plant damage in a checkpoint's logits and weights, and say which gates catch it.

    python -m benchmarks.planted_damage CHECKPOINT --data CHATS.jsonl --text TEXT.jsonl --kld 0.012
    python -m benchmarks.planted_damage CHECKPOINT --tool-prompt --kld 0.05 --every 2

The damaged model answers the chats, in transformers, beside the same model as it is; `--kld` is the limit that
`llmforge init` writes, held against the first documents of TEXT. Printed is a row for each damage: its mean KLD, how
that gate ends, and the gates of behaviour that do not pass. Left out are a damage that a model has no place for
(thoughts, where it has none), and gates that the chats are too few for: those that weights in 8 bits leave
inconclusive. Of the models that are not damaged it also says in how many of 20 samples of the chats all gates pass,
drawn with replacement, of each slice as many as it has.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge import recipes
from llmforge.checkpoint import Checkpoint
from llmforge.gates import decision
from llmforge.gates.decision import GateResult, Verdict
from llmforge.measure import behaviour, decisive_tokens
from llmforge.measure.baseline import Baseline
from llmforge.measure.behaviour import ChatPrompt
from llmforge.measure.decisive_tokens import DecisiveTokens
from llmforge.measure.scoring import CheckpointSide, ReduceRows, before_end
from llmforge.metrics import attribution, catalog
from llmforge.metrics.behaviour import answer, results
from llmforge.metrics.behaviour.answer import BehaviourAnswer, TokenOdds
from llmforge.metrics.behaviour.document import MOST_TOKENS, read_documents
from llmforge.metrics.behaviour.results import BehaviourResult
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.metric import Measured
from llmforge.recipe import GateSpec
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import tool_prompt
from llmforge.serving.protocol.answer import reasoning_of

CONTEXT, TEXTS, TEXT_TOKENS = 1024, 48, 128  # of the model; documents of the KLD, and tokens of each
SAMPLES, HONEST = 20, "none"
PARTS = 8  # of the chats, that several processes measure
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

# Limits for all documents together, or for a slice; docs/behaviour.md says what they rest on.
GATES: Mapping[str, Mapping[str, float]] = {
    "checks": {"drop_max": 0.1},
    "loops": {"rise_max": 0.1},
    "ended": {"drop_max": 0.1},
    "length_change": {"max": 0.5},
    "language": {"drop_max": 0.3},
    "answer_odds": {"drop_max": 0.5},
    "answer_odds.languages": {"drop_max": 0.2},
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

    def damages(self) -> Iterator[tuple[str, Callable[[], AbstractContextManager[None]]]]:
        """Name every damage that this model has a place for, the honest ones first."""
        layers = self.module.config.num_hidden_layers
        yield EIGHT_BITS, partial(self.rounded, 8, "")
        yield f"{HONEST}: weights in 6 bits", partial(self.rounded, 6, "")
        if answer.CALLS in self.tokens:
            yield "row of the token of calls × 0.5", partial(self.logits, self.tokens[answer.CALLS], lambda x: 0.5 * x)
        yield "end of text + 3", partial(self.logits, self.tokens[answer.ENDS], lambda x: x + 3)
        yield "end of text − 3", partial(self.logits, self.tokens[answer.ENDS], lambda x: x - 3)
        yield "brackets − 4", partial(self.logits, self.tokens[answer.BRACKETS], lambda x: x - 4)
        yield "one layer in 2 bits", partial(self.rounded, 2, f"layers.{layers // 2}.")
        if answer.THOUGHTS in self.tokens:
            yield "thoughts never end", partial(self.logits, self.tokens[answer.THOUGHTS], lambda x: x - 30)
        yield "French is lost", partial(self.logits, self._french(), lambda x: x - 12)

    def _french(self) -> set[int]:
        tokenizer = self.encoder.tokenizer
        found = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in FRENCH]
        return {ids[0] for ids in found if len(ids) == 1}


def to_nearest(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a matrix [N, K] to `bits` in blocks of 32 of its rows, symmetrically; K is a multiple of 32."""
    blocks, most = weight.reshape(-1, 32), 2 ** (bits - 1)
    scale = (blocks.abs().amax(1, keepdim=True) / max(1, most - 1)).clamp(min=1e-12)
    return ((blocks / scale).round().clamp(-most, most - 1) * scale).reshape(weight.shape)


@dataclass
class PlantedSide:
    """A checkpoint's side that keeps what the model as it is said, and the hidden states that it chose by."""

    model: PlantedModel
    side: CheckpointSide
    tokens: DecisiveTokens
    hidden: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # [S, H], by prompt or text
    said: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # by prompt

    def answers_read(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], reduce: ReduceRows | None
    ) -> list[tuple[list[int], list[Any]]]:
        """Answer as the model as it is does, and keep answers and hidden states."""
        assert reduce is not None
        states: list[torch.Tensor] = []  # [B, 1, H] of the latest step

        def kept(module: object, given: tuple[torch.Tensor]) -> None:
            states[:] = [given[0]]

        def both(logits: NDArray[np.float32], tokens: Sequence[int]) -> Iterator[tuple[Any, torch.Tensor]]:
            return zip(reduce(logits, tokens), states[0][:, -1].clone(), strict=True)

        hook = self.model.module.lm_head.register_forward_pre_hook(kept)
        try:
            made = self.side.answers_read(prompts, counts, both)
        finally:
            hook.remove()
        for ids, (said, rows) in zip(prompts, made, strict=True):
            self.said[tuple(ids)] = said
            self.hidden[tuple(ids)] = torch.stack([state for _, state in rows])
        return [(said, [row for row, _ in rows]) for said, rows in made]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute the logits [S, V] of a text."""
        with torch.inference_mode():
            if self.model.rounds:
                made: torch.Tensor = self.model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
                return made
            if tuple(ids) not in self.hidden:
                inside = self.model.module.model(input_ids=torch.tensor([ids]), use_cache=False)
                self.hidden[tuple(ids)] = inside.last_hidden_state[0]
            found: torch.Tensor = self.model.module.lm_head(self.hidden[tuple(ids)])
            return found

    def along(self, prompts: Sequence[ChatPrompt]) -> list[tuple[NDArray[np.float64], list[int]]]:
        """Read what the model as it is said to each prompt: odds [S, 1 + kinds], and the likeliest tokens [S].

        An answer that ended has its end, too.
        """
        texts = [self._whole(prompt) for prompt in prompts]

        def reduce(logits: NDArray[np.float32], text: Sequence[int]) -> tuple[NDArray[np.float64], list[int]]:
            return self.tokens.odds(logits, text), logits.argmax(-1).tolist()

        if self.model.rounds:
            return self.side.read([(prompt.ids, text) for prompt, text in zip(prompts, texts, strict=True)], reduce)
        with torch.inference_mode():
            made = (self.model.module.lm_head(self.hidden[tuple(prompt.ids)]).numpy() for prompt in prompts)
            return [reduce(logits, text) for logits, text in zip(made, texts, strict=True)]

    def answers(self, prompts: Sequence[ChatPrompt], likeliest: Sequence[list[int]]) -> list[list[int]]:
        """Answer greedily: where the likeliest tokens leave what the model as it is said, go on from there."""
        found, going = [], []
        for at, (prompt, best) in enumerate(zip(prompts, likeliest, strict=True)):
            whole, ends = self._whole(prompt), self.model.tokens[answer.ENDS]
            same = next((n for n, (a, b) in enumerate(zip(whole, best, strict=True)) if a != b), len(whole))
            found.append(before_end([*whole[:same], *best[same : same + 1]], ends))
            left = same < len(whole) and best[same] not in ends and whole[same] != best[same]
            if left and len(found[at]) < prompt.document.max_tokens:
                going.append(at)
        asked = [[*prompts[at].ids, *found[at]] for at in going]
        counts = [prompts[at].document.max_tokens - len(found[at]) for at in going]
        for at, said in zip(going, self.side.answers(asked, counts) if going else [], strict=True):
            found[at] += said
        return found

    def _whole(self, prompt: ChatPrompt) -> list[int]:
        said = self.said[tuple(prompt.ids)]
        return [*said, *(self.model.tokens[answer.ENDS][:1] if len(said) < prompt.document.max_tokens else ())]


@dataclass
class PlantedRun:
    """Chats and texts that both sides read, and what the model as it is made of them."""

    model: PlantedModel
    side: PlantedSide
    prompts: list[ChatPrompt]
    texts: list[list[int]]
    beside: list[BehaviourAnswer]
    work: Path | None = None  # where results are kept, to go on from
    expected: list[torch.Tensor] = field(default_factory=list)  # log-probabilities [S, V] of texts

    @classmethod
    def of(
        cls,
        model: PlantedModel,
        side: PlantedSide,
        prompts: list[ChatPrompt],
        texts: list[list[int]],
        work: Path | None = None,
    ) -> PlantedRun:
        """Let the model as it is answer."""
        run = cls(model, side, prompts, texts, [], work)

        def measure() -> Any:
            said, sure = behaviour.ask_reading(side, prompts, side.tokens, lambda done, total: None)
            expected = [side.logits(ids).log_softmax(-1) for ids in texts]
            return read_all(prompts, said, sure, model.encoder), side.hidden, side.said, expected

        run.beside, side.hidden, side.said, run.expected = run.kept("as it is", measure)
        return run

    def kept(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measure, or take what was measured before."""
        if self.work is None:
            return measure()
        file = self.work / f"{hashlib.sha256(name.encode()).hexdigest()[:12]}.pickle"
        if not file.exists():
            found = measure()
            self.work.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(found))
            part.rename(file)
        return pickle.loads(file.read_bytes())

    def damaged(
        self, name: str, damage: Callable[[], AbstractContextManager[None]], only: Collection[int] = ()
    ) -> tuple[list[BehaviourAnswer], Estimate] | None:
        """Let the model answer and read with a damage; `only` parts of the prompts, for what is kept."""
        order = sorted(range(len(self.prompts)), key=lambda at: len(self.prompts[at].ids))
        found: dict[int, BehaviourAnswer] = {}
        size = -(-len(order) // PARTS)
        for part in only or range(PARTS):
            chosen = order[part * size : (part + 1) * size]

            def measure(chosen: list[int] = chosen) -> list[BehaviourAnswer]:
                with damage():
                    return self._answers([self.prompts[at] for at in chosen])

            found |= zip(chosen, self.kept(f"{name}, part {part} of {PARTS}", measure), strict=True)
        if only and 0 not in only:
            return None

        def measure_kld() -> Estimate:
            with damage():
                return self.kld()

        kld: Estimate = self.kept(f"{name}, KLD", measure_kld)
        return None if only else ([found[at] for at in range(len(order))], kld)

    def _answers(self, prompts: Sequence[ChatPrompt]) -> list[BehaviourAnswer]:
        read = self.side.along(prompts)
        said = self.side.answers(prompts, [best for _, best in read])
        sure = [
            decisive_tokens.answer_of(
                self.side.said[tuple(prompt.ids)],
                [*odds],
                self.side.tokens,
                prompt.document.max_tokens,
                tools=prompt.use is not None,
            )
            for prompt, (odds, _) in zip(prompts, read, strict=True)
        ]
        return read_all(prompts, said, sure, self.model.encoder)

    def behaviour(self, ours: list[BehaviourAnswer], chosen: Sequence[int]) -> BehaviourResult:
        """Hold answers to chosen documents, some perhaps several times, against those of the model as it is."""
        asked = [self.prompts[at].document.model_copy(update={"id": str(number)}) for number, at in enumerate(chosen)]
        left, right = [ours[at] for at in chosen], [self.beside[at] for at in chosen]
        return results.measured(asked, left, right, engine="planted", baseline="as it is")

    def kld(self) -> Estimate:
        """Measure the mean KLD of the model as it is now."""
        made = (self.side.logits(ids).log_softmax(-1) for ids in self.texts)
        sums = np.array(
            [float((a.exp() * (a - b)).sum()) for a, b in zip(self.expected, made, strict=True)], np.float64
        )
        return attribution.estimate(sums, np.array([len(ids) for ids in self.texts], np.float64))


def read_all(
    prompts: Sequence[ChatPrompt],
    said: Sequence[Sequence[int]],
    sure: Sequence[Mapping[str, TokenOdds]],
    encoder: PromptEncoder,
) -> list[BehaviourAnswer]:
    """Take answers apart."""
    reasoning = reasoning_of(encoder)
    return [
        replace(behaviour.read_answer(prompt, ids, encoder, reasoning), odds=odds)
        for prompt, ids, odds in zip(prompts, said, sure, strict=True)
    ]


def judged(found: BehaviourResult, kld: Estimate, limit: float, names: Collection[str]) -> tuple[GateResult, ...]:
    """Decide the gates of behaviour that have a figure, as far as they are named, and that on KLD."""
    chosen = {f"{results.PREFIX}{name}": GATES[name] for name in names if f"{results.PREFIX}{name}" in found.metrics}
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


def within_slices(slices: Sequence[str], rng: np.random.Generator) -> list[int]:
    """Draw numbers of chats with replacement, of each slice as many as it has; `slices` names that of each chat."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(slices):
        places.setdefault(name, []).append(place)
    return [own[each] for own in places.values() for each in rng.integers(len(own), size=len(own))]


def table(run: PlantedRun, limit: float, names: Sequence[str] = tuple(GATES)) -> Iterator[str]:
    """Plant each damage, and give the rows of the table, the first without a damage."""
    everything = range(len(run.prompts))
    for name, damage in run.model.damages():
        honest = name.startswith(HONEST)
        measured = run.damaged(name, damage)
        assert measured is not None
        ours, kld = measured
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
            slices = [prompt.document.slice for prompt in run.prompts]
            drawn = [run.behaviour(ours, within_slices(slices, rng)) for _ in range(SAMPLES)]
            of_samples = [judged(each, kld, limit, names) for each in drawn]
            missed = Counter(each.metric for of in of_samples for each in of if each.verdict is not Verdict.PASS)
            print(name, *missed.items(), file=sys.stderr)
            held = f"{sum(decision.overall(of) is Verdict.PASS for of in of_samples)} of {SAMPLES}"
        yield f"{row(name, kld, gates)} {held} |"


def prepare(
    folder: Path,
    data: Path,
    text: Path,
    *,
    asks_tools: bool = False,
    every: int = 1,
    most: int = MOST_TOKENS,
    texts: int = TEXTS,
    threads: int = 1,
    work: Path | None = None,
) -> PlantedRun:
    """Load a checkpoint, the chats that it can be asked, and texts."""
    checkpoint = Checkpoint.open(folder)
    encoder = behaviour.encoder_of(checkpoint, CONTEXT)
    if asks_tools and encoder.template is not None:
        encoder.template = tool_prompt.added(encoder.template)
    documents = read_documents(data)[::every]
    documents = tuple(each.model_copy(update={"max_tokens": min(most, each.max_tokens)}) for each in documents)
    prompts, notes = behaviour.prepare(documents, encoder)
    print(*notes, sep="\n", file=sys.stderr)
    baseline = Baseline(checkpoint, threads=threads)
    tokens = DecisiveTokens.of(encoder)
    model = PlantedModel(baseline._model, encoder, tokens.ids)
    prompts = [replace(prompt, openings=()) for prompt in prompts]  # no gate here is on their margin
    side = CheckpointSide(lambda: baseline, "", CONTEXT, encoder.config.eos_token_ids, encoder.tokenizer.decode)
    lines = text.read_text().splitlines()[:texts]
    read = [encoder.tokenizer.encode(json.loads(line)["text"]).ids[:TEXT_TOKENS] for line in lines]
    return PlantedRun.of(model, PlantedSide(model, side, tokens), prompts, read, work)


def main() -> None:
    """Plant, measure, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, default=recipes.TEXT / "behaviour.jsonl")
    parser.add_argument("--text", type=Path, default=recipes.TEXT / "evaluation.jsonl")
    parser.add_argument("--kld", type=float, required=True)
    parser.add_argument("--tool-prompt", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=MOST_TOKENS)
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--work", type=Path, help="folder that keeps results, to go on from")
    parser.add_argument("--only", help="measure the damages whose names hold this, for --work, and print no table")
    parser.add_argument("--part", type=int, nargs="+", choices=range(PARTS), default=[], help="parts of the chats")
    given = parser.parse_args()
    began = time.process_time()
    run = prepare(
        given.checkpoint,
        given.data,
        given.text,
        asks_tools=given.tool_prompt,
        every=given.every,
        most=given.max_tokens,
        texts=given.texts,
        threads=given.threads,
        work=given.work,
    )
    print(f"{len(run.prompts)} chats; the model as it is: {time.process_time() - began:.0f} CPU s", file=sys.stderr)
    if given.only is not None:
        for name, damage in run.model.damages():
            if given.only in name:
                run.damaged(name, damage, given.part)
                print(f"{name}: {time.process_time() - began:.0f} CPU s", file=sys.stderr, flush=True)
        return
    for line in table(run, given.kld):
        print(line, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
