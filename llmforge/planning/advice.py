"""Which passes pay on a target: what each would change, predicted, and the reason where it would not.

A prediction comes from the bytes and operations of the model and the figures of the target; each says on which it
rests. Where a figure is missing the pass is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from llmforge.backends import BACKENDS
from llmforge.backends.record import Dtype
from llmforge.base.errors import UnsupportedError
from llmforge.planning.deployment import DeploymentPlan, degree
from llmforge.planning.roofline import Placement, StepCost
from llmforge.planning.scheme import BITS, DtypeScheme, Wanted, choose
from llmforge.targets import WORTH, QuantizedLayers
from llmforge.targets.achieved import Assumption

FREE_WORTH = 0.01  # for passes that cost none
# What a kernel costs besides its bytes, in seconds.
KERNEL_S = {
    "gpu": Assumption(3e-6, "NVIDIA AIConfigurator, mem_empirical_constant_latency of its system files"),
    "cpu": Assumption(4.5e-6, "0.5 ms for the hand-over of 112 operators (docs/performance.md, two Zen 4 cores)"),
}
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
        ("quantize-fp4", "fp4", "fp4", None),
    ),
}

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
    """Judge each pass on this plan: shape, target, engine and workload."""
    return (*_quantizations(plan), *_structures(plan))


def _quantizations(plan: DeploymentPlan) -> Iterator[Advice]:
    for name, weights, product, block in _QUANTIZATIONS[BACKENDS[plan.backend].scales]:
        now, then = (plan.scheme.weights, weights) if product is None else (plan.scheme.product, product)
        if BITS[now] <= BITS[then]:
            what = "weights are" if product is None else "matmul is"
            yield Advice(name, "done", f"{what} already {now}")
        else:
            wanted = Wanted(weights=weights, product=product, block=block)
            yield _tried(plan, name, wanted, beside=None if product is None else replace(wanted, product=None))
    if BITS[plan.scheme.kv] <= 8:
        yield Advice("quantize-kv-cache, bits: 8", "done", f"the cache is already {plan.scheme.cached}")
    else:
        yield _tried(plan, "quantize-kv-cache, bits: 8", Wanted(kv="int8"))


def _tried(plan: DeploymentPlan, name: str, wanted: Wanted, beside: Wanted | None = None) -> Advice:
    """Plan once more with other dtypes; it pays where it does more than `beside`, which costs less quality."""
    old = plan.scheme
    try:
        kept = Wanted(compute=old.compute, weights=old.weights, kv=old.kv, cache=old.cache)
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


def _structures(plan: DeploymentPlan) -> Iterator[Advice]:
    """Judge passes that change no dtype: kernels that they save, and bytes of attention's scores."""
    cost, layers = KERNEL_S[plan.target.kind], plan.shape.depth
    kernel, basis = cost.value, f"{cost.value * 1e6:g} µs for each kernel: {cost.source}"
    for name, kernels, what in (
        ("fuse-norms", 2, "one kernel for an Add and a norm, twice per layer"),
        ("pack-qkv", 2, "one matmul instead of three"),
        ("pack-gate-up", 1, "one matmul instead of two"),
    ):
        saved = kernels * layers * kernel
        yield _saving(plan, name, decode_s=saved, prefill_s=saved, what=what, basis=basis)
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
        what=f"avoids writing {moved / 1e9:.2g} GB of prompt scores",
        basis=f"bytes of scores over the bandwidth and its share; {basis}",
    )


def _own_kernels(plan: DeploymentPlan) -> Advice:
    """Judge `cpu-kernels` by what both libraries' quantized layers reach on this machine."""
    name, weights = "cpu-kernels", plan.scheme.weights
    if weights != "int8" and weights != "int4":
        return Advice(name, "refused", f"needs quantized layers; weights are {weights}")
    reached = plan.target.kernels
    theirs, own = (reached.get(library, {}).get(weights) for library in ("onnxruntime", "llmforge"))
    if theirs is None or own is None:
        return Advice(
            name,
            "not known",
            f"what layers in {weights} reach on {plan.target.name} was not measured with both libraries' kernels: "
            "`llmforge doctor --measure --write FILE.yaml` does, where llmforge's are compiled",
        )
    placed = Placement(plan.shape, plan.target, plan.scheme, plan.asked.ranks)

    def saved_s(rows: int, heads: int) -> float:
        return _products_s(placed, theirs, rows, heads) - _products_s(placed, own, rows, heads)

    batch = plan.workload.batch
    return _saving(
        plan,
        name,
        decode_s=saved_s(batch, batch),
        prefill_s=saved_s(plan.workload.prompt, 1),
        what="faster kernels for quantized layers than ONNX Runtime's",
        basis=(
            f"bytes and operations of the model's matrices over what layers in {weights} reach "
            f"({own.rate.source}); attention is not compared"
        ),
    )


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
