"""Which of the proposed formats `init` writes, and the limits beside them: by what a probe measured, where one did."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmforge.planning import building, scheme
from llmforge.planning.render import Planned
from llmforge.quantization.costs import ModelFormats, ProbedCosts
from llmforge.rewrite import declared
from llmforge.rewrite.traits import Deployment, Goal, Proposal

# KLD that an artifact may be predicted to have, nats a token, on the text of the probe. Chats lose up to 1.3 times as
# much where weights are rounded to nearest (docs/quantization.md). SmolLM2-135M: 0.034, 0.044 on answers, with 5 bits
# (5.94 in all), which are predicted at 0.037; 0.012 and 0.015 with 6 (6.73).
ALLOWED: Mapping[Goal, float] = {"latency": 0.03, "throughput": 0.03, "size": 0.08, "quality": 0.01}
MARGIN = 2.0  # of limits over predictions: the probe reads few tokens, and other text than evaluation
CALIBRATION_TOKENS = 8192  # of the recipes that are written
# … where they are read once, forwards. SmolLM2-135M in 6 bits, weights alone, on documentation and answers: 256 tokens
# .0095 and .0126, 1,024 .0097 and .0135; to nearest .0237 and .0293.
OBSERVED_TOKENS = 1024
CALIBRATION_S = 105.0  # of CPU time at the reference rates, at most, but for the goal `size`: a minute on two cores
UNMEASURED_BITS = 6  # at least, where weights are rounded to nearest and nothing was measured
_LEAST, _LEAST_RATIO = 0.002, 0.01  # limits of the KLD, and of the perplexity ratio above 1
LENGTH_CHANGE = 1.0  # limit of how far answers of chats may be apart in length, as ln of their ratio: 2.7 times
ANSWER_ODDS = 0.5  # limit of the drop of mean ln p/(1-p) of the checkpoint's answers, nats; SmolLM2-135M in 6 bits: .05
END_SHIFT = 1.0  # limit of how far ln p(end) may move either way, nats; SmolLM2-135M in 6 bits: .32

Named = tuple[str, Proposal]  # a pass, and a way to use it


# Steps of one token that a step takes which verifies 7 drafted ones, on CPUs, SmolLM2-135M: 1.5 of CPU time (int4, one
# thread, 512 tokens before), 1.9 at most by how much faster whole answers are (6 bits, JSON; docs/runtime.md).
VERIFY_STEPS = 1.9
LEAST_GAIN = 1.1  # of tokens a second, for drafts to be proposed


@dataclass(frozen=True)
class ProbedDrafts:
    """What prompt lookup would draft of text, had a model said its later part: counts of tokens and steps."""

    tokens: int
    steps: int
    drafted: int  # steps that verify a draft

    @property
    def length(self) -> float:
        """Tokens of a step."""
        return self.tokens / self.steps

    @property
    def gain(self) -> float:
        """How many times as many tokens a second come on a CPU, where every draft is verified."""
        return self.tokens / (self.steps + self.drafted * (VERIFY_STEPS - 1))


@dataclass(frozen=True)
class Probed:
    """What a probe measured; None: nothing, and why."""

    costs: ProbedCosts | None = None
    why: str = ""
    runs_by_layer: bool = True  # as calibration, too, wants it
    drafts: ProbedDrafts | None = None


@dataclass(frozen=True)
class Tried:
    """What a recipe cannot do with a checkpoint, found on its traced graph."""

    idle: Mapping[str, str] = field(default_factory=dict)  # passes that have nothing to do there, and why
    uncalibrated: str = ""  # why the model cannot be calibrated; "": it can be

    def allows(self, name: str, each: Proposal) -> bool:
        """Say whether a use of the pass `name` can come to something."""
        return name not in self.idle and not ((each.calibrated or each.observes) and self.uncalibrated)

    def __or__(self, other: Tried) -> Tried:
        """Join what two trials found."""
        return Tried({**self.idle, **other.idle}, self.uncalibrated or other.uncalibrated)


UNTRIED = Tried()
Probe = Callable[[Sequence[ModelFormats]], Probed]


@dataclass(frozen=True)
class ProposedPasses:
    """What passes propose for a deployment, held against a plan of the checkpoint as it is."""

    planned: Planned
    there: Deployment
    proposed: tuple[Named, ...]

    @classmethod
    def of(cls, planned: Planned, there: Deployment) -> ProposedPasses:
        """Ask every pass; what a plan says does not pay, or takes long to calibrate, is left out."""
        proposed = [(step.name, each) for step in declared.DECLARED for each in step.proposes(there)]
        found = cls(planned, there, ())
        kept = [(name, each) for name, each in proposed if each.stores.weights is None or found._may_store(each)]
        return replace(found, proposed=tuple(kept))

    def without(self, tried: Tried) -> ProposedPasses:
        """Leave out what a trial found to come to nothing."""
        return replace(self, proposed=tuple((name, each) for name, each in self.proposed if tried.allows(name, each)))

    def formats(self) -> tuple[ModelFormats, ...]:
        """List the formats that a probe should measure."""
        found = [each.formats for _, each in self.proposed if each.formats is not None]
        return tuple(dict.fromkeys(found))

    def chosen(self, probed: Probed) -> list[Named]:
        """Choose one way to store weights, and of all other proposals each; with limits that were predicted."""
        costs = probed.costs
        weights = self._weights([each for _, each in self.proposed if each.stores.weights is not None], costs)
        kept = [(name, each) for name, each in self.proposed if each.stores.weights is None or each is weights]
        return [(name, limited(self._retreating(each, costs), costs)) for name, each in kept]

    def _retreating(self, each: Proposal, costs: ProbedCosts | None) -> Proposal:
        """Let layers retreat up to the size of the next format that all of them might have."""
        if not each.retreat or (costs is None and not self.there.on_cpu):  # a plan counts what stays in 16 bits there
            return each
        others = [self._bytes(other, costs) for _, other in self.proposed if other.bits in each.retreat]
        larger = [size for size in others if size > self._bytes(each, costs)]
        return replace(each, max_bytes=min(larger, default=None))

    def _bytes(self, each: Proposal, costs: ProbedCosts | None) -> int:
        """Give the size of all weights, as it was measured, or as a plan predicts it."""
        if costs is not None and each.formats is not None and costs.of(each.formats) is not None:
            return _size(each, costs)
        plan = self.planned.plan
        return scheme.choose(plan.target, plan.backend, plan.shape.dtype, each.stores).weight_bytes(plan.shape)

    def _may_store(self, each: Proposal) -> bool:
        """Say whether weights may be stored so: the target gains by it, as the goal wants it."""
        if self.there.is_quantized:
            return True
        said = next((advice for advice in self.planned.advice if advice.change == each.change), None)
        if said is None or said.verdict not in ("pays", "does not pay"):
            return False
        if self.there.goal == "quality":
            return each.near_lossless
        if self.there.goal == "size":
            return True
        if said.verdict == "does not pay" and not self.there.exported:  # what others load is asked for to have codes
            return False
        slow = building.calibration_s(self.planned.plan.shape, CALIBRATION_TOKENS) > CALIBRATION_S
        return not (slow and each.calibrated and self._is_native(each))

    def _weights(self, possible: Sequence[Proposal], costs: ProbedCosts | None) -> Proposal | None:
        """Choose how weights are stored: the smallest that keeps the quality, else what loses least."""
        if self.there.is_quantized:
            return next(iter(possible), None)
        measured = [each for each in possible if costs is not None and each.formats and costs.of(each.formats)]
        if costs is not None and measured:
            others = sum(each.adds(costs) for _, each in self.proposed if each.adds and each.stores.weights is None)
            allowed = ALLOWED[self.there.goal] - others
            kept = [each for each in measured if _added(each, costs) <= allowed]
            if not kept:
                return min(measured, key=lambda each: _added(each, costs))
            return min(kept, key=lambda each: _size(each, costs)) if self.there.on_cpu else self._fastest(kept)
        if self.there.goal == "size":
            return min(possible, key=lambda each: each.bits, default=None)
        if any(map(self._is_native, possible)):
            sure = [each for each in possible if each.calibrated or each.bits >= UNMEASURED_BITS]
            return min(sure, key=lambda each: each.bits)
        return self._fastest(possible)

    def _fastest(self, possible: Sequence[Proposal]) -> Proposal | None:
        """Choose what the goal gains most from."""
        advice = {each.change: each for each in self.planned.advice}

        def gained(each: Proposal) -> float:
            said = advice[each.change]
            rate = said.tokens_per_second or 1.0
            return -rate if self.there.goal == "throughput" else said.tpot or 1.0

        return min(possible, key=gained, default=None)

    @staticmethod
    def _is_native(each: Proposal) -> bool:
        """Say whether the CPU kernels alone read it."""
        return each.formats is not None and not each.formats.linears.portable


def _added(each: Proposal, costs: ProbedCosts) -> float:
    return math.inf if each.adds is None else each.adds(costs)


def _size(each: Proposal, costs: ProbedCosts) -> int:
    found = costs.of(each.formats) if each.formats is not None else None
    assert found is not None
    return found.size_bytes


def limited(each: Proposal, costs: ProbedCosts | None) -> Proposal:
    """Let the budget of a pass stand above what `costs` predict."""
    predicted = None if costs is None else each.against_before(costs)
    return each if predicted is None else replace(each, kld=limit(predicted))


def limit(predicted: float, least: float = _LEAST) -> float:
    """Return a limit above a prediction, with two digits."""
    wanted = max(MARGIN * predicted, least)
    digit = 10.0 ** (math.floor(math.log10(wanted)) - 1)
    return float(f"{math.ceil(wanted / digit - 1e-9) * digit:.2g}")


@dataclass(frozen=True)
class Gates:
    """Limits of the whole artifact."""

    kld_mean: float
    perplexity_ratio: float

    @classmethod
    def of(cls, chosen: Sequence[Proposal], costs: ProbedCosts | None, *, computes_coarsely: bool) -> Gates:
        """Add up what passes are predicted to lose, else their budgets; `computes_coarsely`: the engine in 16 bits."""
        if costs is not None and not any(each.stores.weights is not None and each.adds is None for each in chosen):
            total = sum(each.adds(costs) for each in chosen if each.adds is not None)
            more = 0.01 * computes_coarsely
            return cls(limit(total + more), 1 + limit(total + more, _LEAST_RATIO))
        of_weights = [each.kld for each in chosen if each.stores.weights is not None]
        coarse = computes_coarsely or any(each.stores.kv is not None for each in chosen)
        kld = sum(of_weights or [0.001]) + (0.01 if computes_coarsely or not coarse else 0.02) * coarse
        return cls(kld, 1 + max(kld, 0.01))
