"""Take heads, channels and layers out of a decoder by what that costs on calibration text.

Heads and channels go by their cost in the second order (`quantization.structure`), whole layers by their influence,
1 - E cos(h, layer(h)), the least first (ShortGPT, arXiv 2403.03853). How many layers go, and so how much is left for
heads and channels to give, is tried: none, one, two, … as long as the KLD on calibration text that is held out falls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from llmforge.base.errors import DataError, UnsupportedError
from llmforge.calibration import mixed
from llmforge.calibration.gradients import Gradients, take
from llmforge.calibration.layer import DecoderLayer, LayerCall, Selected
from llmforge.calibration.resuming import Runs
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.sums import MORE_DAMPING, InputSums, refusals
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization import structure
from llmforge.quantization.methods.base import InputStatistic
from llmforge.quantization.statistics import PruningDemand
from llmforge.quantization.structure import Float32, PrunableLayer, PrunedStructure, PruningStep

HEADS, CHANNELS, LAYERS = "heads", "channels", "layers"
_Curve = tuple[int, str]  # layer, and what of it


@dataclass(frozen=True, eq=False)
class _Measured:
    """What calibration found: steps of each curve, and the influence of each layer."""

    curves: Mapping[_Curve, Sequence[PruningStep]]
    influence: Mapping[int, float]


def choose(
    checkpoint: Checkpoint, windows: Sequence[TokenWindow], demand: PruningDemand
) -> tuple[PrunedStructure, str]:
    """Choose what is left, and say in a note what was compared.

    Raises:
        DataError: the text cannot be divided, or has no gradients.
        UnsupportedError: the model has not so much to take out.
    """
    assert demand.structure is not None
    fitted, held = mixed.divide(windows)
    skeleton = Skeleton.build(checkpoint)
    calls, states = skeleton.enter([window.ids for window in (*fitted, *held)])
    measured = _measure(skeleton, fitted, calls, states[: len(fitted)], demand)
    tried: list[tuple[float, PrunedStructure, str]] = []
    why = ""
    for count in range(len(demand.structure.blocks) if LAYERS in demand.units and not demand.structure.fixed else 1):
        made = _candidate(demand, measured, count)
        if isinstance(made, str):
            why = why or made
            if tried:
                break
            continue
        kept, predicted, gone = made
        divergence = _divergence(skeleton, calls, states, len(fitted), [w.ids for w in (*fitted, *held)], demand, kept)
        said = f"{divergence:.4f} with {count} layers dropped"
        if predicted:
            said += f" ({predicted:.4f} predicted of heads and channels)"
        tried.append((divergence, kept, f"{said}, {gone / demand.structure.parameters:.1%} of the parameters"))
        if len(tried) > 1 and tried[-1][0] >= tried[-2][0]:
            break
        if not predicted and gone >= demand.target:
            break  # layers alone reach it: more would go further
    if not tried:
        raise UnsupportedError(f"prune-structure: {why}", hint="ask for less, or allow other `units`")
    best = min(tried, key=lambda each: each[0])
    tokens = sum(len(window.ids) for window in held)
    compared = "; ".join(said for _, _, said in tried)
    return best[1], f"prune-structure: KLD on {tokens} held-out tokens of the calibration text: {compared}"


def require(demand: PruningDemand, layers: int) -> None:
    """Return if a model of so many layers has something that `demand` may take out.

    Raises:
        UnsupportedError: it has not, or has layers that are not told apart; says why.
    """
    assert demand.structure is not None
    blocks = demand.structure.blocks
    if [block.index for block in blocks] != [*range(layers)]:
        raise UnsupportedError(
            f"prune-structure: {layers - len(blocks)} of {layers} layers have no attention over keys and values",
            hint="leave prune-structure out of the recipe",
        )
    if not any(_outputs(block, demand) for block in blocks) and (LAYERS not in demand.units or demand.structure.fixed):
        reasons = dict.fromkeys(reason for block in blocks for reason in block.reasons)
        raise UnsupportedError(
            f"prune-structure: nothing can be taken out: {'; '.join([*reasons, demand.structure.fixed])}",
            hint="leave prune-structure out of the recipe, or put it in front of all other passes",
        )


def _measure(
    skeleton: Skeleton,
    windows: Sequence[TokenWindow],
    calls: Sequence[Sequence[LayerCall]],
    states: Sequence[torch.Tensor],
    demand: PruningDemand,
) -> _Measured:
    """Run the text through the checkpoint's own layers, and find what its units cost."""
    assert demand.structure is not None
    curves: dict[_Curve, Sequence[PruningStep]] = {}
    influence: dict[int, float] = {}
    with TemporaryDirectory(prefix="llmforge-gradients-") as folder:
        take(skeleton, [window.ids for window in windows], calls, states, Path(folder))
        gradients = Gradients.read(Path(folder))
        current = list(states)
        for block in demand.structure.blocks:
            layer = skeleton.load(block.index, calls[block.index])
            names = _outputs(block, demand)
            sums = {
                name: InputSums.start({InputStatistic.MOMENTS}, layer.weight(name).shape[1]) for name in names.values()
            }
            alike = []
            with layer.observed(list(names.values())) as observe:
                for window, state in enumerate(current):
                    seen = observe(window, state)
                    current[window] = seen.after
                    for name, x in seen.inputs.items():
                        sums[name].add(x, x)
                    alike.append(torch.nn.functional.cosine_similarity(state[0], current[window][0], dim=-1))
            influence[block.index] = 1 - float(torch.cat(alike).mean())
            for kind, name in names.items():
                found = gradients.outputs([name])
                if not found:
                    raise DataError(
                        f"{name}: no gradient reaches it, so that nothing is known of what its units cost",
                        hint=f"leave {kind} out of `units`",
                    )
                moments = sums[name].seen(routed=False)
                hessian = _damped(name, moments.sums[InputStatistic.MOMENTS] / moments.tokens, demand)
                curves[block.index, kind] = structure.eliminate(
                    layer.weight(name), hessian, found[0], least=1, **_stride(block, kind, demand)
                )
    return _Measured(curves, influence)


def _outputs(block: PrunableLayer, demand: PruningDemand) -> dict[str, str]:
    """Name, by the kind of units, the matrices of a layer that read them."""
    made = {}
    if HEADS in demand.units and block.heads is not None:
        made[HEADS] = block.heads.output
    if CHANNELS in demand.units and block.channels is not None and block.channels.count > demand.together:
        made[CHANNELS] = block.channels.output
    return made


def _stride(block: PrunableLayer, kind: str, demand: PruningDemand) -> dict[str, int]:
    if kind == HEADS:
        assert block.heads is not None
        return {"width": block.heads.shared * block.heads.value_dim, "together": 1}
    assert block.channels is not None
    # what is left is a multiple, also where the first count is none
    return {"width": 1, "together": demand.together}


def _damped(name: str, moments: Float32 | structure.Float64, demand: PruningDemand) -> structure.Float64:
    with refusals(name, "pruning", MORE_DAMPING):
        return structure.damped(moments, demand.damping)


def _candidate(demand: PruningDemand, measured: _Measured, count: int) -> tuple[PrunedStructure, float, int] | str:
    """Drop `count` layers, and take the rest from heads and channels: what is left, the loss predicted, what is gone.

    Returns why that cannot be.
    """
    assert demand.structure is not None
    blocks = {block.index: block for block in demand.structure.blocks}
    dropped = sorted(blocks, key=lambda index: measured.influence[index])[:count]
    gone = sum(blocks[index].parameters for index in dropped)
    target = demand.target - gone
    largest = max(block.parameters for block in blocks.values())
    if count and gone - demand.target > largest // 2:
        return f"{count} layers are {gone / demand.structure.parameters:.0%} of the parameters"
    curves = {which: steps for which, steps in measured.curves.items() if which[0] not in dropped}
    sizes = {which: _size(blocks[which[0]], which[1]) for which in curves}
    taken, loss, more = structure.allocate(curves, sizes, target)
    if more < target and more + gone < demand.target * 0.98:
        share = (gone + more) / demand.structure.parameters
        reasons = sorted({reason for block in blocks.values() for reason in block.reasons})
        return f"{share:.0%} of the parameters of layers can go, not more; {'; '.join(reasons) or 'all are units'}"
    kept: dict[str, list[tuple[int, tuple[int, ...]]]] = {HEADS: [], CHANNELS: []}
    for (index, kind), steps in sorted(taken.items()):
        if not steps:
            continue
        block = blocks[index]
        heads = block.heads.kv_count if block.heads is not None else 0
        total = heads if kind == HEADS else block.channels.count if block.channels is not None else 0
        out = {unit for step in curves[index, kind][:steps] for unit in step.units}
        kept[kind].append((index, tuple(unit for unit in range(total) if unit not in out)))
    return PrunedStructure(tuple(sorted(dropped)), tuple(kept[HEADS]), tuple(kept[CHANNELS])), loss, gone + more


def _size(block: PrunableLayer, kind: str) -> int:
    own = block.heads if kind == HEADS else block.channels
    assert own is not None
    return own.unit_parameters


def _divergence(
    skeleton: Skeleton,
    calls: Sequence[Sequence[LayerCall]],
    states: Sequence[torch.Tensor],
    fitted: int,
    ids: Sequence[NDArray[np.int64]],
    demand: PruningDemand,
    kept: PrunedStructure,
) -> float:
    """Return the mean KLD, nats a token, on the windows behind the first `fitted`, by which the others make up."""
    assert demand.structure is not None
    before, after = list(states), list(states)
    for block in demand.structure.blocks:
        layer = skeleton.load(block.index, calls[block.index])
        for window in range(fitted, len(states)):
            before[window] = layer.run(window, before[window])
        if block.index in kept.dropped:
            continue
        seen = after[:fitted]
        layer, _ = prune_layer(layer, block.index, seen, replace(demand, kept=kept))
        after = [layer.run(window, state) for window, state in enumerate(after)]
    leave, total = skeleton.leaving(ids), 0.0
    for window in range(fitted, len(states)):
        p, q = (leave(window, state)[0][0].float().log_softmax(-1) for state in (before[window], after[window]))
        total += float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True))
    return total / sum(len(each) for each in ids[fitted:])


def prune_layer(
    layer: DecoderLayer,
    index: int,
    states: Sequence[torch.Tensor],
    demand: PruningDemand,
    found: Mapping[str, Float32] | None = None,
) -> tuple[DecoderLayer, dict[str, Float32]]:
    """Take out of `layer` what `demand` does not keep, and let the rest make up for it, by what `states` read there.

    The states stay in front of the layer. Returns the layer without what is gone, and the matrices [N, kept] that make
    up for it, which were `found` where an earlier calibration has made them.
    """
    assert demand.kept is not None
    assert demand.structure is not None
    block = demand.structure.blocks[index]
    heads, channels = demand.kept.of_heads(block.index), demand.kept.of_channels(block.index)
    selected: dict[str, Selected] = {}
    own: list[tuple[str, NDArray[np.intp]]] = []
    if heads is not None:
        assert block.heads is not None
        queries = structure.columns(heads, block.heads.shared).tolist()
        selected[block.heads.query] = Selected(rows=structure.columns(queries, block.heads.dim))
        selected[block.heads.key] = Selected(rows=structure.columns(heads, block.heads.dim))
        selected[block.heads.value] = Selected(rows=structure.columns(heads, block.heads.value_dim))
        own.append((block.heads.output, structure.columns(queries, block.heads.value_dim)))
    if channels is not None:
        assert block.channels is not None
        which = np.asarray(channels, np.intp)
        selected |= {name: Selected(rows=which) for name in block.channels.inner}
        own.append((block.channels.output, which))
    if not own:
        return layer, {}
    selected |= {name: Selected(columns=which) for name, which in own}
    pruned = replace(layer, selected=selected, kv_heads=heads)
    made: dict[str, Float32] = {}
    with Runs.of(layer, list(states)) as runs:
        for name, which in own:
            if found is not None:
                made[name] = found[name]
            else:
                seen = runs.seen(name, layer.weight(name).shape[1])
                hessian = _damped(name, seen.sums[InputStatistic.MOMENTS] / seen.tokens, demand)
                made[name] = structure.compensate(layer.weight(name), hessian, which)
            pruned.set_weight(name, made[name])
    return pruned, made
