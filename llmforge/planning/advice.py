"""Which passes pay on a target: what each would change, predicted, and the reason where it would not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from llmforge.base.backends import BACKENDS, Dtype
from llmforge.base.errors import UnsupportedError
from llmforge.planning.deployment import Plan, degree
from llmforge.planning.roofline import Placement, StepCost
from llmforge.planning.scheme import BITS, Scheme, Wanted, choose

WORTH = 0.05  # of TPOT, TTFT or tokens a second, for what costs quality; less is within what a plan can tell
FREE_WORTH = 0.01  # for passes that cost none
# What a kernel costs besides its bytes: NVIDIA AIConfigurator's mem_empirical_constant_latency; on a CPU 0.5 ms for the
# hand-over of 112 operators (docs/performance.md).
KERNEL_S = {"gpu": 3e-6, "cpu": 4.5e-6}
SCORE_PASSES = 4  # over scores that are not kept on chip: written, read, normalized and written, read again

# What a pass makes of weights and of products (None: in the dtype of activations), and the weights that share a scale
# (0: an output feature's); by what shares a scale where a backend multiplies weights in 8 bits as they are.
_QUANTIZATIONS: Mapping[str, tuple[tuple[str, Dtype, Dtype | None, int | None], ...]] = {
    "blocks": (
        ("quantize-weights, bits: 8", "int8", None, None),
        ("quantize-weights, bits: 4", "int4", None, None),
    ),
    "channels": (
        ("quantize-channels, dtype: int8", "int8", None, 0),
        ("quantize-channels, dtype: int8, activations: static", "int8", "int8", 0),
        ("quantize-channels, dtype: fp8", "fp8", None, 0),
        ("quantize-channels, dtype: fp8, activations: static", "fp8", "fp8", 0),
        ("quantize-weights, bits: 4", "int4", None, None),
        ("fp4, activations too (no pass yet)", "fp4", "fp4", None),
    ),
}

Verdict = Literal["pays", "does not pay", "refused", "done"]


@dataclass(frozen=True)
class Advice:
    """What one pass would change; ratios are new over old, below 1 is faster."""

    change: str
    verdict: Verdict
    reason: str
    tpot: float = 1.0
    ttft: float = 1.0
    tokens_per_second: float = 1.0


def advise(plan: Plan) -> tuple[Advice, ...]:
    """Judge each pass on this plan: shape, target, engine and workload."""
    return (*_quantizations(plan), *_structures(plan))


def _quantizations(plan: Plan) -> Iterator[Advice]:
    for name, weights, product, block in _QUANTIZATIONS[BACKENDS[plan.backend].scales]:
        now, then = (plan.scheme.weights, weights) if product is None else (plan.scheme.product, product)
        if BITS[now] <= BITS[then]:
            what = "weights are" if product is None else "products are in"
            yield Advice(name, "done", f"{what} {now} already")
        else:
            yield _tried(plan, name, Wanted(weights=weights, product=product, block=block))
    if BITS[plan.scheme.kv] <= 8:
        yield Advice("quantize-kv-cache, bits: 8", "done", f"the cache is {plan.scheme.kv} already")
    else:
        yield _tried(plan, "quantize-kv-cache, bits: 8", Wanted(kv="int8"))


def _tried(plan: Plan, name: str, wanted: Wanted) -> Advice:
    """Plan once more with other dtypes."""
    old = plan.scheme
    try:
        kept = Wanted(compute=old.compute, weights=old.weights, kv=old.kv)
        changed = choose(plan.target, plan.backend, old.compute, wanted.or_else(kept))
    except UnsupportedError as error:
        return Advice(name, "refused", error.message.partition(": ")[2] or error.message)
    return _compared(plan, name, changed if wanted.kv is None else replace(old, kv=wanted.kv))


def _compared(plan: Plan, name: str, scheme: Scheme) -> Advice:
    """Hold the plan with `scheme` against the plan."""
    new, old = degree(Placement(plan.shape, plan.target, scheme, plan.asked.ranks), plan.workload), plan.asked
    tpot, ttft = new.decode.step.seconds / old.decode.step.seconds, new.prefill.seconds / old.prefill.seconds
    rate = new.decode.tokens_per_second / old.decode.tokens_per_second
    fits, fitted = new.memory.fits, old.memory.fits
    pays = min(tpot, ttft, 1 / rate) < 1 - WORTH or (fits and not fitted)
    reason = _why(old.decode.step, tpot, pays)
    if fits and not fitted:
        reason = "it makes the model fit"
    elif new.largest_batch > old.largest_batch * (1 + WORTH):
        reason += f"; room for {new.largest_batch:,} sequences instead of {old.largest_batch:,}"
    return Advice(name, "pays" if pays else "does not pay", reason, tpot, ttft, rate)


def _why(was: StepCost, tpot: float, pays: bool) -> str:
    if pays:
        return f"decoding is bound by {was.bound}" if tpot < 1 - WORTH else "prompts are read faster"
    if was.bound == "memory":
        return "other bytes of a step outweigh these"
    return f"decoding is bound by {was.bound}, not by bytes"


def _structures(plan: Plan) -> Iterator[Advice]:
    """Judge passes that change no dtype: kernels that they save, and bytes of attention's scores."""
    kernel, layers = KERNEL_S[plan.target.kind], plan.shape.depth
    for name, kernels, what in (
        ("fuse-norms", 2, "an addition and a norm become one kernel, twice a layer"),
        ("pack-qkv", 2, "one product instead of three"),
        ("pack-gate-up", 1, "one product instead of two"),
    ):
        yield _saving(plan, name, decode_s=kernels * layers * kernel, prefill_s=kernels * layers * kernel, what=what)
    if plan.target.kind == "cpu":
        yield _own_kernels(plan)
    scores = sum(
        count * attention.heads * plan.workload.prompt * attention.seen(plan.workload.prompt)
        for count, attention in plan.shape.attentions()
    )
    moved = SCORE_PASSES * scores * BITS[plan.scheme.compute] / 8 / plan.asked.ranks
    reached = plan.ceilings.bandwidth * plan.ceilings.bandwidth_share
    yield _saving(
        plan,
        "flash-attention",
        decode_s=3 * layers * kernel,
        prefill_s=moved / reached,
        what=f"scores of a prompt, {moved / 1e9:.2g} GB, are never written",
    )


def _own_kernels(plan: Plan) -> Advice:
    """Judge `cpu-kernels` by what was measured: 18.9 and 2600 ms became 13.2 and 850 (docs/performance.md)."""
    if plan.scheme.weights not in ("int8", "int4"):
        return Advice(
            "cpu-kernels", "does not pay", f"it computes quantized layers, and weights are {plan.scheme.weights}"
        )
    reason = "measured with the shape of Qwen3-0.6B, in place of ONNX Runtime's kernels (docs/performance.md)"
    return Advice("cpu-kernels", "pays", reason, 13.2 / 18.9, 850 / 2600, 18.9 / 13.2)


def _saving(plan: Plan, name: str, *, decode_s: float, prefill_s: float, what: str) -> Advice:
    """Judge a pass by the time that it saves of a step without it."""
    step_s, prompt_s = plan.asked.decode.step.seconds, plan.asked.prefill.seconds
    tpot, ttft = step_s / (step_s + decode_s), prompt_s / (prompt_s + prefill_s)
    pays = min(tpot, ttft) < 1 - FREE_WORTH
    reason = what if pays else f"{what}: next to nothing of a step"
    return Advice(name, "pays" if pays else "does not pay", reason, tpot, ttft, 1 / tpot)
