"""Which passes pay on a target: what each would change, predicted, and the reason where it would not.

A prediction comes from the bytes and operations of the model and the figures of the target; each says on which it
rests. Where a figure is missing the pass is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from llmforge.backends import BACKENDS
from llmforge.base.errors import UnsupportedError
from llmforge.planning.deployment import DeploymentPlan, degree
from llmforge.planning.roofline import Placement, StepCost
from llmforge.planning.scheme import BITS, INTEGERS, DtypeScheme, choose
from llmforge.rewrite import declared
from llmforge.rewrite.traits import Deployment, FewerKernels, OwnKernels, Prediction, Storage
from llmforge.targets import WORTH, BlockDtype, QuantizedLayers
from llmforge.targets.achieved import Assumption

FREE_WORTH = 0.01  # for passes that cost none
# What a kernel costs besides its bytes, in seconds.
KERNEL_S = {
    "gpu": Assumption(3e-6, "NVIDIA AIConfigurator, mem_empirical_constant_latency of its system files"),
    "cpu": Assumption(4.5e-6, "0.5 ms for the hand-over of 112 operators (docs/performance.md, two Zen 4 cores)"),
}
SCORE_PASSES = 4  # over scores that are not kept on chip: written, read, normalized and written, read again

Verdict = Literal["pays", "does not pay", "refused", "done", "not known"]


@dataclass(frozen=True)
class Advice:
    """What one pass would change; ratios are new over old, below 1 is faster, None: not predicted."""

    change: str
    verdict: Verdict
    reason: str
    tpot: float | None = None
    ttft: float | None = None
    tokens_per_second: float | None = None
    basis: str = ""  # what the ratios rest on


def advise(plan: DeploymentPlan) -> tuple[Advice, ...]:
    """Judge each pass on this plan: shape, target, engine and workload; of dtypes the larger ones first."""
    there = Deployment(plan.target, BACKENDS[plan.backend], plan.scheme.compute)
    found = [each for step in declared.DECLARED for each in step.predicts(there)]
    dtypes = [each for each in found if isinstance(each.effect, Storage)]
    dtypes.sort(key=_bits, reverse=True)
    return tuple(_judge(plan, each) for each in (*dtypes, *(each for each in found if each not in dtypes)))


def _bits(prediction: Prediction) -> int:
    """Return the bits of weights; caches come after them."""
    assert isinstance(prediction.effect, Storage)
    return 0 if prediction.effect.weights is None else BITS[prediction.effect.weights]


def _judge(plan: DeploymentPlan, prediction: Prediction) -> Advice:
    name, effect = prediction.change, prediction.effect
    if isinstance(effect, FewerKernels):
        return _fewer_kernels(plan, name, effect)
    if isinstance(effect, OwnKernels):
        return _own_kernels(plan, name, effect)
    now = plan.scheme
    for asked, has, what in (
        (effect.product, now.product, f"matmul is already {now.product}"),
        (None if effect.product else effect.weights, now.weights, f"weights are already {now.weights}"),
        (effect.kv, now.kv, f"the cache is already {now.cached}"),
    ):
        if asked is not None and BITS[has] <= BITS[asked]:
            return Advice(name, "done", what)
    return _tried(plan, name, effect, beside=None if effect.product is None else replace(effect, product=None))


def _tried(plan: DeploymentPlan, name: str, wanted: Storage, beside: Storage | None = None) -> Advice:
    """Plan once more with other dtypes; it pays where it does more than `beside`, which costs less quality."""
    old = plan.scheme
    try:
        kept = Storage(compute=old.compute, weights=old.weights, kv=old.kv, cache=old.cache)
        changed = choose(plan.target, plan.backend, old.compute, wanted.or_else(kept))
    except UnsupportedError as error:
        return Advice(name, "refused", error.message.partition(": ")[2] or error.message)
    found = _compared(plan, name, changed if wanted.kv is None else replace(old, kv=wanted.kv))
    if beside is None or found.verdict != "pays":
        return found
    less = _tried(plan, name, beside)
    if less.verdict == "refused" or _gains(found, less):
        return found
    reason = f"weights alone give TPOT × {less.tpot:.2f}, TTFT × {less.ttft:.2f}: less than {WORTH:.0%} apart"
    return replace(found, verdict="does not pay", reason=reason)


def _gains(one: Advice, other: Advice) -> bool:
    """Say whether `one` is better than `other` in any ratio by what is worth some quality."""
    pairs = ((one.tpot, other.tpot), (one.ttft, other.ttft), (other.tokens_per_second, one.tokens_per_second))
    return any(a is not None and b is not None and a < b * (1 - WORTH) for a, b in pairs)


def _compared(plan: DeploymentPlan, name: str, scheme: DtypeScheme) -> Advice:
    """Hold the plan with `scheme` against the plan."""
    new, old = degree(Placement(plan.shape, plan.target, scheme, plan.asked.ranks), plan.workload), plan.asked
    tpot, ttft = new.decode.step.seconds / old.decode.step.seconds, new.prefill.seconds / old.prefill.seconds
    rate = new.decode.tokens_per_second / old.decode.tokens_per_second
    fits, fitted = new.memory.fits, old.memory.fits
    pays = min(tpot, ttft, 1 / rate) < 1 - WORTH or (fits and not fitted)
    reason = _why(old.decode.step, tpot, pays)
    if fits and not fitted:
        reason = "makes the model fit"
    elif new.largest_batch > old.largest_batch * (1 + WORTH):
        reason += f"; room for {new.largest_batch:,} sequences instead of {old.largest_batch:,}"
    return Advice(name, "pays" if pays else "does not pay", reason, tpot, ttft, rate, _ceilings(plan, scheme))


def _ceilings(plan: DeploymentPlan, scheme: DtypeScheme) -> str:
    """Say where the roofline's times of the plan, and of it with `scheme`, come from."""
    dtypes = sorted({plan.scheme.compute, plan.scheme.product, scheme.product})
    figures = {"bandwidth": plan.target.bandwidth_gbs}
    figures |= {f"{dtype} matmul": plan.target.rates[dtype] for dtype in dtypes}
    known = "; ".join(f"{name}: {figure.source}" for name, figure in figures.items() if figure is not None)
    return f"roofline of the model's bytes and operations ({known}), scaled by the assumed shares"


def _why(was: StepCost, tpot: float, pays: bool) -> str:
    if pays:
        return f"decoding is bound by {was.bound}" if tpot < 1 - WORTH else "prefill is faster"
    if was.bound == "memory":
        return "small compared with the other bytes of a step"
    return f"decoding is bound by {was.bound}, not by bytes"


def _fewer_kernels(plan: DeploymentPlan, name: str, effect: FewerKernels) -> Advice:
    """Judge a pass by kernels that it saves, and bytes of attention's scores."""
    cost = KERNEL_S[plan.target.kind]
    saved_s = effect.kernels * plan.shape.depth * cost.value
    basis = f"{cost.value * 1e6:g} µs for each kernel: {cost.source}"
    if not effect.scores:
        return _saving(plan, name, decode_s=saved_s, prefill_s=saved_s, what=effect.what, basis=basis)
    prompt = plan.workload.prompt
    scores = sum(
        count * attention.heads * prompt * attention.seen(prompt) for count, attention in plan.shape.attentions()
    )
    moved = SCORE_PASSES * scores * BITS[plan.scheme.compute] / 8 / plan.asked.ranks
    reached = plan.ceilings.bandwidth * plan.ceilings.bandwidth_share
    what, basis = (
        effect.what.format(scores_gb=moved / 1e9),
        f"bytes of scores over the bandwidth and its share; {basis}",
    )
    return _saving(plan, name, decode_s=saved_s, prefill_s=moved / reached, what=what, basis=basis)


def _own_kernels(plan: DeploymentPlan, name: str, effect: OwnKernels) -> Advice:
    """Judge a pass by what both libraries' quantized layers reach on this machine."""
    weights = plan.scheme.weights
    if weights not in INTEGERS:
        return Advice(name, "refused", f"needs quantized layers; weights are {weights}")
    reached = plan.target.kernels
    timed: BlockDtype = "int4" if BITS[weights] <= 4 else "int8"  # what ONNX Runtime has, too
    theirs, own = (reached.get(library, {}).get(timed) for library in ("onnxruntime", "llmforge"))
    if theirs is None or own is None:
        return Advice(
            name,
            "not known",
            f"what layers in {weights} reach on {plan.target.name} was not measured with both libraries' kernels: "
            "`llmforge doctor --measure --write FILE.yaml` does, where llmforge's are compiled",
        )
    placed = Placement(plan.shape, plan.target, plan.scheme, plan.asked.ranks)
    decode_s, prefill_s = (
        _products_s(placed, theirs, rows, heads) - _products_s(placed, own, rows, heads)
        for rows, heads in ((plan.workload.batch, plan.workload.batch), (plan.workload.prompt, 1))
    )
    basis = (
        f"bytes and operations of the model's matrices over what layers in {weights} reach "
        f"({own.rate.source}); attention is not compared"
    )
    return _saving(plan, name, decode_s=decode_s, prefill_s=prefill_s, what=effect.what, basis=basis)


def _products_s(placed: Placement, reached: QuantizedLayers, rows: int, heads: int) -> float:
    """Time the products of weights of a step over `rows` tokens, `heads` of which get logits."""
    read_s = placed.weights_read(rows) / (reached.read_gbs.value * 1e9)
    return max(read_s, placed.product_operations(rows, heads) / placed.ranks / (reached.rate.value * 1e12))


def _saving(plan: DeploymentPlan, name: str, *, decode_s: float, prefill_s: float, what: str, basis: str) -> Advice:
    """Judge a pass by the time that it saves of a step; the plan's times are those of the better way."""
    tpot = _ratio(plan.asked.decode.step.seconds, decode_s)
    ttft = _ratio(plan.asked.prefill.seconds, prefill_s)
    pays = min(tpot, ttft) < 1 - FREE_WORTH and max(tpot, ttft) < 1 + FREE_WORTH
    slower = max(tpot, ttft) >= 1 + FREE_WORTH
    reason = what if pays else f"{what}: slower here" if slower else f"{what}: negligible share of a step"
    return Advice(name, "pays" if pays else "does not pay", reason, tpot, ttft, 1 / tpot, basis)


def _ratio(seconds: float, saved_s: float) -> float:
    """Return the time with a pass over that without, where the shorter one is `seconds`."""
    return seconds / (seconds + saved_s) if saved_s >= 0 else (seconds - saved_s) / seconds
