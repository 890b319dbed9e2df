"""Train the scales of quantized linears until the model's logits come near the checkpoint's; codes stay.

The loss is the KLD to the checkpoint's logits over windows of the calibration text, end to end. A step runs some
windows through all layers, keeps the hidden states in front of each, and runs each layer once more on the way back
(activation checkpointing), so that one layer's weights are in memory at a time. What is trained is the factor of each
scale, by Adam (arXiv 1412.6980). Weights are those of scales as they are stored; gradients pass through that rounding
as if it were not there (arXiv 1308.3432). EfficientQAT trains scales alone end to end, too (arXiv 2407.11062, 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge.base.errors import DataError
from llmforge.base.progress import Progress
from llmforge.calibration.gradients import logits_at_a_time
from llmforge.calibration.layer import DecoderLayer, fast
from llmforge.calibration.quantize import corrected
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.store import LayerResult, Store, StoredMatrices
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow, held_out
from llmforge.quantization.grids import Float32, QuantizedMatrix, dequantize, stored
from llmforge.quantization.statistics import RecoveryDemand, Statistics, exclusion

BATCH_TOKENS = 2048  # of a step
# Of Adam, of factors, at its highest. KLD of SmolLM2-135M at 3 bits, 28,000 tokens: .248 to .225 on other documents.
RATE = 1.5e-3
WARMUP = 0.05  # share of the steps in which it rises; then it falls to 0 as a cosine does
FIRST_DECAY, SECOND_DECAY = np.float32(0.9), np.float32(0.99)  # of Adam's moments
SMALLEST = np.float32(1e-12)  # that a gradient is divided by, nats a token
CHECKS = 8  # of the KLD on text held out, in a whole training
HELD_OUT = 8  # of so many documents, one is held out
PATIENCE = 2  # checks without a smaller one end it
SEED = 0  # of the order of windows

Ids = NDArray[np.int64]


def batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Choose windows of these lengths for steps of a training over about so many tokens, each as often as others."""
    random, total = np.random.default_rng(SEED), sum(lengths)
    order = [window for _ in range(-(-tokens // total)) for window in random.permutation(len(lengths)).tolist()]
    made: list[list[int]] = []
    read = filled = 0
    for window in order:
        if not made or filled >= BATCH_TOKENS:
            if read >= tokens:
                break
            made.append([])
            filled = 0
        made[-1].append(window)
        filled += lengths[window]
        read += lengths[window]
    return made


def rate_of(step: int, steps: int) -> float:
    """Return the rate of a step, from 1 on, of so many."""
    return RATE * min(1.0, step / (WARMUP * steps + 1)) * (1 + math.cos(math.pi * (step - 1) / steps)) / 2


@dataclass(eq=False)
class ScaleFactors:
    """What scales of one matrix are multiplied by, less 1, fp32 [N, blocks], and Adam's moments of its gradients.

    `best` are those of the smallest KLD so far.
    """

    shift: Float32
    first: Float32
    second: Float32
    best: Float32

    @classmethod
    def start(cls, scales: Float32) -> ScaleFactors:
        """Begin with factors of 1."""
        return cls(*(np.zeros_like(scales) for _ in range(4)))

    def step(self, gradient: Float32, rate: float, number: int) -> None:
        """Take step `number`, from 1 on, against a gradient."""
        self.first += (1 - FIRST_DECAY) * (gradient - self.first)
        self.second += (1 - SECOND_DECAY) * (gradient * gradient - self.second)
        deviation = np.sqrt(self.second / (1 - SECOND_DECAY**number)) + SMALLEST
        self.shift -= np.float32(rate) / (1 - FIRST_DECAY**number) * self.first / deviation


def multiplied(matrix: QuantizedMatrix, shift: Float32) -> QuantizedMatrix:
    """Multiply the scales of `matrix` by 1 + `shift` [N, blocks]; they are rounded as its grid stores them."""
    return replace(matrix, scales=stored(np.ascontiguousarray(matrix.scales * (1 + shift)), matrix.grid))


def of_factors(matrix: QuantizedMatrix, gradient: Float32) -> Float32:
    """Return the gradient of the factors of a matrix [N, blocks], by that of the weights that they make, [N, K]."""
    n, k = matrix.shape
    products = gradient * dequantize(matrix)
    if missing := -k % matrix.grid.block_size:
        products = np.pad(products, ((0, 0), (0, missing)))
    summed: Float32 = products.reshape(n, -1, matrix.grid.block_size).sum(-1)
    return summed


@dataclass(eq=False)
class _Student:
    """A quantized model whose scales are trained, over windows `ids`.

    `entered` are its hidden states in front of the layers, `expected` those that the checkpoint makes behind them, both
    [1, tokens, H] of each window. `factors` are those of the linears that are trained, by parameter.
    """

    skeleton: Skeleton
    statistics: Statistics
    ids: Sequence[Ids]
    demand: RecoveryDemand
    factors: dict[str, ScaleFactors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        skeleton, ids = self.skeleton, self.ids
        embedding, head = skeleton.tables()
        tables = self.statistics.linears
        self.calls, states = skeleton.enter(ids)
        self.entered = skeleton.enter(ids, dequantize(tables[embedding]))[1] if embedding in tables else list(states)
        for index in range(len(skeleton.layers)):
            layer = skeleton.load(index, self.calls[index])
            states = [layer.run(window, state) for window, state in enumerate(states)]
        self.expected = states
        self.heads: list[torch.nn.Linear] = []
        self.leave_checkpoint = skeleton.leaving(ids, heads=self.heads)
        weight = dequantize(tables[head]) if head in tables else None
        self.leave = skeleton.leaving(ids, weight, heads=self.heads)
        linears = {name for index in range(len(skeleton.layers)) for name in self.names(index)}
        for name in sorted(linears):
            if not exclusion([name], self.demand.exclude):
                self.factors[name] = ScaleFactors.start(self.statistics.linears[name].scales)

    def names(self, index: int) -> list[str]:
        """Name the quantized linears of a layer."""
        layer = DecoderLayer(self.skeleton.layers[index], self.skeleton.prefixes[index], ())
        return [name for name in layer.linears() if name in self.statistics.linears]

    def load(self, index: int) -> tuple[DecoderLayer, dict[str, QuantizedMatrix]]:
        """Read a layer, with weights of codes and of scales as they are now, and those of its matrices that move."""
        layer = self.skeleton.load(index, self.calls[index])
        moving: dict[str, QuantizedMatrix] = {}
        prefix = f"{self.skeleton.prefixes[index]}."
        for name in [name for name in self.statistics.linears if name.startswith(prefix)]:
            matrix = self.statistics.linears[name]
            now = matrix
            if name in self.factors:
                moving[name] = matrix
                now = multiplied(matrix, self.factors[name].shift)
            layer.set_weight(name, corrected(now, self.statistics.low_rank.get(name)))
        return layer, moving

    def kld(self, windows: Sequence[int]) -> float:
        """Return the KLD from the checkpoint over `windows`, nats a token."""
        states = [self.entered[window] for window in windows]
        for index in range(len(self.skeleton.layers)):
            layer, _ = self.load(index)
            states = [layer.run(window, state) for window, state in zip(windows, states, strict=True)]
        lost = sum(self._lost(window, state)[0] for window, state in zip(windows, states, strict=True))
        return lost / sum(len(self.ids[window]) for window in windows)

    def step(self, windows: Sequence[int], rate: float, number: int) -> None:
        """Take step `number` of the training, on `windows`."""
        tokens = sum(len(self.ids[window]) for window in windows)
        before = [[self.entered[window] for window in windows]]
        for index in range(len(self.skeleton.layers)):
            layer, _ = self.load(index)
            with fast(layer.linears().values()):
                before.append([layer.run(*given) for given in zip(windows, before[-1], strict=True)])
        with fast(self.heads):
            lost = [self._lost(*given, gradient=True)[1] for given in zip(windows, before.pop(), strict=True)]
        flowing = [each / tokens for each in lost]
        for index in reversed(range(len(self.skeleton.layers))):
            layer, moving = self.load(index)
            gradients = _backwards(layer, [*moving], windows, before.pop(), flowing)
            for name, gradient in gradients.items():
                self.factors[name].step(of_factors(moving[name], gradient), rate, number)
            if not flowing:  # this layer lets no gradient through
                break

    def _lost(self, window: int, state: torch.Tensor, *, gradient: bool = False) -> tuple[float, torch.Tensor]:
        """Return the KLD of the hidden `state` behind the layers, summed over tokens, and its gradient in that state.

        Some tokens have their logits in memory at a time.
        """
        rows = logits_at_a_time(self.skeleton)
        total, flowing = 0.0, []
        for part, wanted in zip(torch.split(state, rows, 1), torch.split(self.expected[window], rows, 1), strict=True):
            p = self.leave_checkpoint(window, wanted)[0][0].float().log_softmax(-1)
            given = part.detach().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                logits, _ = self.leave(window, given)
            q = logits.detach()[0].float().log_softmax(-1)
            total += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
            if gradient:
                logits.backward((q.exp() - p.exp())[None].to(logits.dtype))  # type: ignore[no-untyped-call]
                assert given.grad is not None
                flowing.append(given.grad)
        return total, torch.cat(flowing, 1) if flowing else state.new_empty(0)


def _backwards(
    layer: DecoderLayer,
    names: Sequence[str],
    windows: Sequence[int],
    states: Sequence[torch.Tensor],
    flowing: list[torch.Tensor],
) -> dict[str, Float32]:
    """Carry gradients `flowing` in what `layer` makes of `states` to those in `states`; return those of its weights."""
    linears = layer.linears()
    for name in names:
        linears[name].weight.requires_grad_()
    with torch.enable_grad(), fast(linears.values()):
        for number, (window, given) in enumerate(zip(windows, states, strict=True)):
            state = given.detach().requires_grad_()
            layer.run(window, state).backward(flowing[number])  # type: ignore[no-untyped-call]
            if state.grad is None:
                flowing.clear()
                break
            flowing[number] = state.grad
    found = {name: linears[name].weight.grad for name in names}
    return {name: gradient.numpy() for name, gradient in found.items() if gradient is not None}


@dataclass(frozen=True, eq=False)
class Recovery:
    """What a training is about: a quantized checkpoint, windows of text, and where results are kept."""

    checkpoint: Checkpoint
    windows: Sequence[TokenWindow]
    statistics: Statistics
    demand: RecoveryDemand
    store: Store
    own: str  # the key of the results

    def run(self, progress: Progress) -> Statistics:
        """Train, and return the statistics with what came of it: `recovered`, and a note.

        Text is held out (`held_out`). The training ends early where the KLD there falls no more, and its best state is
        taken; where that is not smaller by the share that the demand asks for, nothing is recovered. The training is
        kept after every check, so that one that was killed goes on there.

        Memory: the fp32 weights of one layer with their gradients; four numbers a scale; hidden states of all windows
        twice, and of one step's windows for each layer; the head twice.

        Raises:
            DataError: there is one window.
        """
        found = [self.store.load(self.own, index) for index in range(self.checkpoint.geometry.layers)]
        done = [each for each in found if each is not None]
        if len(done) < len(found):
            progress.stage("Recover")
            done = self._train(progress)
        recovered = StoredMatrices(dict(item for result in done for item in result.linears.items()))
        notes = (note for result in done for note in result.notes)
        return replace(self.statistics, recovered=recovered, notes=(*self.statistics.notes, *notes))

    def _train(self, progress: Progress) -> list[LayerResult]:
        ids = [window.ids for window in self.windows]
        held = held_out([window.document for window in self.windows], HELD_OUT)
        seen = [window for window in range(len(ids)) if window not in held]
        if not seen:
            raise DataError("the calibration text has one window; recovery holds one out", hint="use more `samples`")
        student = _Student(Skeleton.build(self.checkpoint), self.statistics, ids, self.demand)
        chosen = batches([len(ids[window]) for window in seen], self.demand.tokens)
        steps = [[seen[each] for each in batch] for batch in chosen]
        record = self._steps(student, steps, held, progress)
        start, best, at = record[:3].tolist()
        read = sum(len(ids[window]) for batch in steps[: int(at)] for window in batch)
        told = f"on {sum(len(ids[window]) for window in held):,} tokens held out"
        pays = best < start and best <= (1 - self.demand.least) * start
        if pays:
            note = f"scales trained on {read:,} tokens: KLD {told} {start:.4f} before, {best:.4f} after"
        else:
            note = (
                f"scales stay as they are: training takes the KLD {told} from {start:.4f} to {best:.4f}, less than "
                f"{self.demand.least:.0%}"
            )
        results = []
        for index in range(len(student.skeleton.layers)):
            linears = self.statistics.linears
            made = {
                name: multiplied(linears[name], student.factors[name].best)
                for name in student.names(index)
                if pays and name in student.factors
            }
            notes = (f"recover-scales: {note}",) if index == 0 else ()
            results.append(self.store.save(self.own, index, LayerResult(made, None, notes=notes)))
        return results

    def _steps(
        self, student: _Student, steps: Sequence[Sequence[int]], held: Sequence[int], progress: Progress
    ) -> Float32:
        """Take the `steps`, windows each; return the KLD on those `held` before, the smallest, and after which step."""
        record = np.zeros(4, np.float32)  # and how many checks there were since
        state = [record, *(array for each in student.factors.values() for array in vars(each).values())]
        every = -(-len(steps) // CHECKS)
        check, kept = self.store.states(self.own, CHECKS, [array.shape for array in state]) or (0, None)
        if kept is None:
            record[:2] = student.kld(held)
        else:
            for array, values in zip(state, kept, strict=True):
                array[...] = values
        keeps = self.store.keeps_states(sum(array.nbytes for array in state))
        while check * every < len(steps) and record[3] < PATIENCE:
            last = min((check + 1) * every, len(steps))
            for number in range(check * every + 1, last + 1):
                progress.advance(number - 1, len(steps))
                student.step(steps[number - 1], rate_of(number, len(steps)), number)
            check += 1
            record[3] += 1
            if (now := np.float32(student.kld(held))) < record[1]:
                record[1:] = now, last, 0
                for each in student.factors.values():
                    each.best[...] = each.shift
            if keeps:
                self.store.keep_states(self.own, check, state)
        self.store.drop_states(self.own, check)
        progress.advance(len(steps), len(steps))
        return record
