"""Lies about attention over latents: of the frontend, refused by the proof of the trace, and of the pass behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import BudgetExceeded, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import derived, graph, operators
from llmforge.ir.operators import canonical, cpu
from llmforge.passes import CpuKernels
from llmforge.rewrite.pass_base import Budget
from llmforge.trace import trace
from llmforge.verification.promises import Promises
from llmforge.verification.trace_verifier import verify_trace
from llmforge.verification.verifier import Verifier

from ...models import graphs, zoo
from . import table

# The trace takes seconds: it is made once.
pytestmark = [pytest.mark.xdist_group("lies about latents"), pytest.mark.thorough]

HEADS, PLAIN, ROTARY, RANK, VALUES = 4, 32, 16, 32, 48
MSCALE = 1 + 0.1 * 0.7 * np.log(4.0)  # YaRN's, of a factor of 4: DeepSeek multiplies scores by its square
BUDGET = Budget(kld_mean=3e-5)  # of weights in int8: attention of random weights, which is nearly even, moves little
Latent = canonical.LatentAttention | cpu.CpuLatentAttention
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    sizes = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROTARY, "qk_nope_head_dim": PLAIN, "v_head_dim": VALUES}
    zoo.write("deepseek-v3", folder, **sizes)
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def traced(checkpoint: Checkpoint) -> ir.Model:
    return trace(checkpoint)


def attentions(model: ir.Model) -> list[Latent]:
    kinds = (canonical.LatentAttention, cpu.CpuLatentAttention, cpu.LatentAttentionInt8)
    return [view for node in model.graph if isinstance(view := operators.view(node), kinds)]


def rewritten(edit: Callable[[NDArray[np.generic]], NDArray[np.generic]]) -> table.Act:
    """Change the rows [H, N+Dv, …] of what makes keys and values of latents, in the last layer."""

    def act(model: ir.Model) -> list[str]:
        layer = attentions(model)[-1]
        for value in filter(None, (layer.up, getattr(layer, "up_scale", None))):
            before = np.array(graph.tensor(value).numpy())
            after = edit(before.reshape(HEADS, PLAIN + VALUES, -1).copy()).reshape(before.shape)
            assert not np.array_equal(before, after)
            value.const_value = ir.tensor(after, name=value.name)
        return [layer.name]

    return act


def swap_keys(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    rows[[0, 1], :PLAIN] = rows[[1, 0], :PLAIN]
    return rows


def swap_values(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    rows[[2, 3], PLAIN:] = rows[[3, 2], PLAIN:]
    return rows


def values_first(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.roll(rows, VALUES, axis=1)


def number(name: str, factor: float) -> table.Act:
    def act(model: ir.Model) -> list[str]:
        layer = attentions(model)[-1]
        layer.node.attributes[name] = ir.AttrFloat32(name, layer.node.attributes[name].as_float() * factor)
        return [layer.name]

    return act


def windowed(model: ir.Model) -> list[str]:
    layer = attentions(model)[-1]
    layer.node.attributes["window"] = ir.AttrInt64("window", 20)
    return [layer.name]


def rolled(field: str, heads: int, by: int) -> table.Act:
    """Let the last layer read `field` with the channels of each head moved around: rotary ones where others were."""

    def act(model: ir.Model) -> list[str]:
        layer = attentions(model)[-1]
        place = next(each for each in layer.inputs if each.name == field)
        value = layer.required(place)
        width = graph.width(value) // heads
        order = np.concatenate([head * width + np.roll(np.arange(width), by) for head in range(heads)])
        places = graph.initializer(model, f"order_{field}", order)
        [made] = graph.insert(layer.node, "Gather", [value, places], {"axis": 2}, name=f"{layer.name}/{field}")
        made.name, made.type, made.shape = f"{layer.name}.{field}", value.type, value.shape
        layer.node.replace_input_with(place.index, made)
        return [layer.name]

    return act


LIES = {
    "what makes keys, of two heads swapped": rewritten(swap_keys),
    "what makes values, of two heads swapped": rewritten(swap_values),
    "values first": rewritten(values_first),
    "mscale lost": number("scale", float(MSCALE**-2)),
    "mscale once": number("scale", float(MSCALE**-1)),
    "a window": windowed,
    "rotary channels of the queries in front": rolled("q", HEADS, ROTARY),
    "rotary channels of the keys in front": rolled("latent", 1, ROTARY),
}


def test_a_right_graph_is_proven(checkpoint: Checkpoint, traced: ir.Model) -> None:
    assert verify_trace(checkpoint, traced).max_abs_difference < 1e-5
    [scale] = {layer.scale for layer in attentions(traced)}
    assert scale == pytest.approx((PLAIN + ROTARY) ** -0.5 * MSCALE**2)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_of_the_frontend_is_refused(lie: str, checkpoint: Checkpoint, traced: ir.Model) -> None:
    wrong = traced.clone()
    LIES[lie](wrong)
    with pytest.raises(VerificationError) as caught:
        verify_trace(checkpoint, wrong)
    assert caught.value.exit_code == 7
    assert "layers.1" in caught.value.message


def test_an_expansion_that_takes_heads_in_another_order_is_refused(
    checkpoint: Checkpoint, traced: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmforge.ir import builder

    right = derived.key_projection
    monkeypatch.setattr(builder, "key_projection", lambda arrays: right(arrays)[[1, 0, 2, 3]])
    with pytest.raises(VerificationError, match=r"layers\.0"):
        verify_trace(checkpoint, traced)


@pytest.mark.parametrize("lie", ["mscale once", "a window", "rotary channels of the keys in front"])
def test_no_budget_pays_for_a_lie_about_a_kernel_that_rounds_nothing(
    lie: str, checkpoint: Checkpoint, traced: ir.Model, tmp_path: Path
) -> None:
    promises, told = Promises.of(checkpoint, 128, 4), table.Lie(lie, LIES[lie], table.LOSSY)
    texts = [np.random.default_rng(7).integers(0, zoo.VOCABULARY, length) for length in (60, 48)]
    inner = CpuKernels(BUDGET, latents="fp32")
    message = table.caught(told, traced, promises, tmp_path, graphs.CPU, inner=inner, texts=texts)  # 100 nats
    assert message is not None
    assert message.startswith("pass lying-pass ")


@pytest.mark.parametrize("latents", ["fp32", "int8"])
@pytest.mark.parametrize("lie", [None, *LIES])
def test_a_lie_of_the_pass_is_refused(
    lie: str | None, latents: str, checkpoint: Checkpoint, traced: ir.Model, tmp_path: Path
) -> None:
    promises = Promises.of(checkpoint, 128, 4)
    texts = [np.random.default_rng(7).integers(0, zoo.VOCABULARY, length) for length in (60, 48)]
    numerics = table.ROUNDING if latents == "fp32" else table.LOSSY
    inner = CpuKernels(BUDGET, latents=latents)  # type: ignore[arg-type]
    told = table.Lie(lie or "none", LIES[lie] if lie else lambda model: [], numerics)
    step, trial = table.Lying(told, inner, numerics, BUDGET), traced.clone()
    verifier = Verifier(trial, promises=promises, folder=tmp_path, texts=texts)
    if lie is None:
        _judge(verifier, step, trial)
        return
    with pytest.raises(VerificationError, match="pass lying-pass") as caught:
        _judge(verifier, step, trial)
    assert caught.value.exit_code == 7


def _judge(verifier: Verifier, step: table.Lying, trial: ir.Model) -> None:
    """Prove a pass, and hold it to its budget, as a build does when all proofs have ended."""
    proof = verifier.check(step, trial, step.run(trial, graphs.CPU))
    if proof.budget is not None and proof.kld_mean is not None and proof.kld_mean > proof.budget:
        raise BudgetExceeded([f"pass {step.name} exceeds its budget"], settings=(), hint="")
