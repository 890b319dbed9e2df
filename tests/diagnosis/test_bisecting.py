"""Planted regressions are found by name; where nothing is planted, bisecting says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge import native, passes, targets
from llmforge.checkpoint import Checkpoint, documents
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import texts
from llmforge.compile.attribution import choose_texts
from llmforge.compile.lossy_parts import CacheLoss, Leaf, LossyPart, LossyStep, PartLoss, WeightLoss, of_pass
from llmforge.diagnosis import bisecting, mixed_precision_recipe
from llmforge.diagnosis.bisecting import Findings, PartSearch
from llmforge.ir import graph
from llmforge.quantization.statistics import KvRange, Statistics
from llmforge.recipe import Recipe
from llmforge.rewrite.pass_base import Context, Pass
from llmforge.trace import trace
from llmforge.verification.divergence import Divergence

from ..models import zoo

FUSED = ("fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention")
LOOSE = {"kld_mean": 10.0}
O_PROJ = "model.layers.3.self_attn.o_proj.weight"
DOCUMENTS, TOKENS = 24, 48
KNOWN = {cls.name: cls for cls in passes.ALL}


@pytest.fixture(scope="module")
def windows(data: Path, sample_checkpoint: Path) -> list[TokenWindow]:
    checkpoint = Checkpoint.open(sample_checkpoint)
    read = documents.read_documents(data / "evaluation.jsonl")
    cut = texts.windows_of(checkpoint, read, 64)
    return list({window.document: window for window in reversed(cut)}.values())


@pytest.fixture(scope="module")
def fused(sample_graph: ir.Model) -> ir.Model:
    model = sample_graph.clone()
    for name in FUSED:
        KNOWN[name]().run(model, Context(targets.local()))
    return model


def quantized(before: ir.Model, step: Pass, statistics: Statistics | None = None) -> LossyStep:
    context = Context(targets.local(), statistics)
    after = before.clone()
    step.run(after, context)
    return LossyStep(0, step, before, after, context)


def weights(before: ir.Model) -> LossyStep:
    return quantized(before, KNOWN["quantize-weights"](budget=LOOSE, method="rtn"))  # type: ignore[call-arg]


def replace(model: ir.Model, name: str, array: NDArray[Any]) -> None:
    model.graph.initializers[name].const_value = ir.Tensor(array, name=name)


def in_two_bits(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Move codes of 4 bits to the nearest of 0, 5, 10 and 15."""
    low, high = (np.rint(half / 5).astype(np.uint8) * 5 for half in (codes & 15, codes >> 4))
    return low | high << 4


def recipe(folder: Path, step: Pass, **options: Any) -> Recipe:
    written = {
        "schema": 1, "name": "planted", "checkpoint": "checkpoint", "target": "local", "engine": {"max_context": 64},
        "passes": [{step.name: {"budget": LOOSE, **options}}],
        "validation": {"quality": {"data": "text.jsonl", "context": 64}},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(written))
    return Recipe.load(path)


def search(lossy: LossyStep, windows: Sequence[TokenWindow], made_by: Recipe, documents: int = DOCUMENTS) -> Findings:
    return bisecting.bisect(
        [lossy], windows, made_by, progress(), threads=2, vocabulary=64, documents=documents, tokens=TOKENS
    )


def progress() -> Any:
    from llmforge.base.progress import Silent

    return Silent()


@pytest.mark.thorough
def test_one_matrix_in_two_bits_is_found(fused: ir.Model, windows: list[TokenWindow], tmp_path: Path) -> None:
    lossy = weights(fused)
    name = next(n for n, v in fused.graph.initializers.items() if graph.sources(v) == [O_PROJ])
    codes = lossy.after.graph.initializers[f"{name}.codes"]
    replace(lossy.after, f"{name}.codes", in_two_bits(graph.tensor(codes).numpy()))
    written = recipe(tmp_path, lossy.step, method="rtn")
    [found] = search(lossy, windows, written).passes
    [part] = found.stands_out
    assert part.name == O_PROJ
    assert part.lost.low is not None
    assert part.lost.low > 3 * part.expected
    assert found.layers[0].name in ("layer 0", "layer 3")  # the first is where the sample loses most anyway
    assert found.kept is not None
    assert found.kept.names == (O_PROJ,)
    assert found.kept.how == "in 8 bits"
    assert found.kept.gain.value == pytest.approx(part.lost.value, rel=0.2)
    # the recipe that keeps it loads, and has the passes that the gain was measured with
    mixed_precision_recipe.write(written, {0: found.kept.entries}, tmp_path / "better.yaml")
    better = Recipe.load(tmp_path / "better.yaml")
    assert [spec.options.get("bits", 4) for spec in better.passes] == [4, 8]
    assert better.passes[0].options["exclude"] == [O_PROJ]
    assert better.checkpoint == written.checkpoint
    better.instantiate(passes.ALL)


@pytest.mark.thorough
def test_where_nothing_is_planted_it_says_so(fused: ir.Model, windows: list[TokenWindow], tmp_path: Path) -> None:
    lossy = weights(fused)
    found = search(lossy, windows, recipe(tmp_path, lossy.step, method="rtn"))
    assert not found.stands_out
    [only] = found.passes
    assert only.groups == 7  # the embedding and 6 layers
    assert only.layers[0].name == "layer 0"
    assert 1 <= len(only.explains) <= 12
    assert only.kept is not None
    assert only.kept.gain.value > 0.4 * only.kld_mean.value


@pytest.mark.thorough
def test_one_expert_is_found(tmp_path: Path) -> None:
    zoo.write("mixtral", tmp_path / "checkpoint")
    before = trace(Checkpoint.open(tmp_path / "checkpoint"))
    for name in FUSED:
        KNOWN[name]().run(before, Context(targets.local()))
    step = KNOWN["quantize-weights"](budget=LOOSE, method="rtn", block_size=32)  # type: ignore[call-arg]
    lossy = quantized(before, step)
    name = next(n for n in lossy.after.graph.initializers if "down" in n and n.endswith(".codes"))
    codes = graph.tensor(lossy.after.graph.initializers[name]).numpy().copy()
    codes[2] = codes[2] & 0x88  # one bit
    replace(lossy.after, name, codes)
    rng = np.random.default_rng(0)
    windows = [TokenWindow(f"{i}", tuple(rng.integers(0, 64, TOKENS).tolist())) for i in range(DOCUMENTS)]
    [found] = search(lossy, windows, recipe(tmp_path, step, method="rtn")).passes
    [part] = found.stands_out
    assert part.name.endswith("expert 2")
    assert "layers.0" in part.name


@pytest.fixture(scope="module")
def cached(fused: ir.Model, windows: list[TokenWindow], tmp_path_factory: pytest.TempPathFactory) -> LossyStep:
    """The sample with an int8 cache; its ranges are those of every second document."""
    caches = [str(v.name) for v in fused.graph.inputs if str(v.name).startswith("past_key_values")]
    texts = [np.array(window.ids[:TOKENS]) for window in windows[::2]]
    ones = {name: np.ones((4, 32), np.float32) for name in caches}
    kv = {layer: KvRange(*(ones[f"past_key_values.{layer}.{p}"] for p in ("key", "value"))) for layer in range(6)}
    step = KNOWN["quantize-kv-cache"](budget=LOOSE)  # type: ignore[call-arg]
    proxy = quantized(fused, step, Statistics(0, 0, {}, kv))
    loss = CacheLoss(proxy, Divergence(texts, tmp_path_factory.mktemp("peaks"), 2))
    loss.divergence.hold_against(fused, loss.watch)
    peaks = loss._peaks
    kv = {layer: KvRange(*(peaks[f"past_key_values.{layer}.{p}"] for p in ("key", "value"))) for layer in range(6)}
    return quantized(fused, step, Statistics(0, 0, {}, kv))


def plant_channel(cached: LossyStep) -> tuple[LossyStep, str]:
    """Make the scale of the largest key channel of layer 2 a hundred times too wide; name the channel."""
    after = cached.after.clone()
    name = "past_key_values.2.key.scale"
    scales = graph.tensor(after.graph.initializers[name]).numpy().copy()
    _, head, _, channel = np.unravel_index(scales.argmax(), scales.shape)
    scales[0, head, 0, channel] *= 100
    replace(after, name, scales)
    planted = LossyStep(0, cached.step, cached.before, after, cached.context)
    return planted, f"layer 2, key cache, head {head}, channel {channel}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_channel_of_the_cache_is_found(cached: LossyStep, windows: list[TokenWindow], tmp_path: Path) -> None:
    planted, channel = plant_channel(cached)
    [found] = search(planted, windows, recipe(tmp_path, cached.step), documents=56).passes
    assert [part.name for part in found.stands_out] == [channel]
    assert found.layers[0].name == "layer 2, cache"
    assert found.kept is not None
    assert found.kept.entries[0][1]["exclude_layers"] == [2]
    assert found.kept.kv_bytes_per_token > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_stands_out_in_a_healthy_cache(cached: LossyStep, windows: list[TokenWindow], tmp_path: Path) -> None:
    assert not search(cached, windows, recipe(tmp_path, cached.step)).stands_out


@dataclass(eq=False)
class Drawn(PartLoss):
    """A loss on documents that are drawn, with replacement, from those that it was measured on."""

    measured: PartLoss
    known: dict[Any, NDArray[np.float64] | None]
    picked: NDArray[np.int64]

    @property
    def parts(self) -> tuple[LossyPart, ...]:
        return self.measured.parts

    def of(self, kept: frozenset[Leaf] = frozenset(), *, inside: LossyPart | None = None) -> NDArray[np.float64]:
        at = ("of", kept, None if inside is None else inside.name)
        if at not in self.known:
            self.known[at] = self.measured.of(kept, inside=inside)
        found = self.known[at]
        assert found is not None
        return found[self.picked]

    def requantized(self, leaves: frozenset[Leaf], *, inside: LossyPart | None = None) -> NDArray[np.float64] | None:
        at = ("requantized", leaves, None if inside is None else inside.name)
        if at not in self.known:
            self.known[at] = self.measured.requantized(leaves, inside=inside)
        found = self.known[at]
        return None if found is None else found[self.picked]


def found_in_draws(lossy: LossyStep, windows: Sequence[TokenWindow], folder: Path, runs: int = 200) -> list[list[str]]:
    """Search again and again, on other documents each time: names of what stands out in each run."""
    texts = choose_texts(windows, 0, 64, 56, TOKENS, 1)
    loss = of_pass(lossy, Divergence(texts, folder, 2))
    assert loss is not None
    loss.divergence.hold_against(lossy.before, loss.watch)
    rng, known, found = np.random.default_rng(0), dict[Any, Any](), []
    for _ in range(runs):
        drawn = Drawn(lossy, loss.divergence, loss, known, rng.integers(0, len(texts), len(texts)))
        search = PartSearch(drawn, drawn.of(), loss.divergence.tokens[drawn.picked], progress())
        found.append([part.name for part, *_ in search.outliers()[0]])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_nothing_planted_5_of_100_runs_find_something_at_most(
    fused: ir.Model, windows: list[TokenWindow], tmp_path: Path
) -> None:
    found = found_in_draws(weights(fused), windows, tmp_path)
    assert sum(bool(names) for names in found) <= 0.05 * len(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_planted_is_found_in_most_runs(fused: ir.Model, windows: list[TokenWindow], tmp_path: Path) -> None:
    lossy = weights(fused)
    name = next(n for n, v in fused.graph.initializers.items() if graph.sources(v) == [O_PROJ])
    codes = lossy.after.graph.initializers[f"{name}.codes"]
    replace(lossy.after, f"{name}.codes", in_two_bits(graph.tensor(codes).numpy()))
    found = found_in_draws(lossy, windows, tmp_path)
    assert sum(names == [O_PROJ] for names in found) >= 0.95 * len(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_healthy_cache_has_5_finds_of_100_at_most(
    cached: LossyStep, windows: list[TokenWindow], tmp_path: Path
) -> None:
    found = found_in_draws(cached, windows, tmp_path)
    assert sum(bool(names) for names in found) <= 0.05 * len(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_planted_channel_of_the_cache_is_found_in_most_runs(
    cached: LossyStep, windows: list[TokenWindow], tmp_path: Path
) -> None:
    planted, channel = plant_channel(cached)
    head, _ = channel.rsplit(", ", 1)
    found = found_in_draws(planted, windows, tmp_path)
    assert sum(names == [channel] for names in found) >= 0.8 * len(found)
    # Of some draws the channels of the head cannot be told apart.
    assert sum(names in ([channel], [head]) for names in found) >= 0.95 * len(found)


@pytest.mark.thorough
def test_the_cache_of_a_model_that_is_streamed_is_measured_as_that_of_one_that_runs_whole(
    fused: ir.Model, windows: list[TokenWindow], tmp_path: Path
) -> None:
    texts = [np.array(window.ids[:24]) for window in windows[:3]]
    wide = np.full((4, 32), 6, np.float32)
    ranges = {layer: KvRange(wide, wide) for layer in range(6)}
    lossy = quantized(fused, KNOWN["quantize-kv-cache"](budget=LOOSE), Statistics(0, 0, {}, ranges))  # type: ignore[call-arg]
    sides = []
    for whole_bytes in (1 << 30, 0):
        (tmp_path / str(whole_bytes)).mkdir()
        divergence = Divergence(texts, tmp_path / str(whole_bytes), 1, whole_bytes)
        assert divergence.streams(fused) == (whole_bytes == 0)
        loss = of_pass(lossy, divergence)
        assert isinstance(loss, CacheLoss)
        divergence.hold_against(fused, loss.watch)
        sides.append((loss, loss.of(), loss.of(loss.parts[1].leaves), loss.requantized(loss.parts[1].leaves)))
    (whole, *expected), (streamed, *found) = sides
    assert whole._peaks.keys() == streamed._peaks.keys()
    assert len(whole._peaks) == 12
    for name, peak in whole._peaks.items():
        np.testing.assert_allclose(streamed._peaks[name], peak, rtol=1e-4)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-6)
    assert expected[0].sum() > 1.05 * expected[1].sum()  # a layer that is kept gains, and one whose ranges fit
    assert expected[0].sum() > 1.05 * expected[2].sum()


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not compiled here")
def test_a_cache_of_slots_loses_what_its_kernel_loses(
    fused: ir.Model, windows: list[TokenWindow], tmp_path: Path
) -> None:
    step = KNOWN["quantize-kv-cache"](budget=LOOSE, granularity="per_token", value_bits=4, rotation="hadamard")  # type: ignore[call-arg]
    lossy = quantized(fused, step, Statistics(0, 0, {}, {}))
    divergence = Divergence([np.array(window.ids[:48]) for window in windows[:4]], tmp_path, 1)
    loss = of_pass(lossy, divergence)
    assert isinstance(loss, CacheLoss)
    divergence.hold_against(fused, loss.watch)
    assert (
        sorted(form.name for form in loss.slots.values()) == ["int4-token-hadamard"] * 6 + ["int8-token-hadamard"] * 6
    )
    simulated, measured = loss.of().sum(), divergence.of(lossy.after).sum()
    assert 0.02 * measured < simulated < measured  # what a step itself writes is rounded behind it
    values = frozenset(leaf for part in loss.parts for leaf in part.leaves if ".value" in leaf[0])
    assert loss.of(values).sum() < 0.5 * simulated
    assert loss.requantized(values) is None  # scales of tokens are always new


def test_a_renewed_matrix_is_what_the_pass_writes(fused: ir.Model, tmp_path: Path) -> None:
    loss = WeightLoss(weights(fused), Divergence([], tmp_path, 1))
    for matrix in loss.matrices.values():
        for part, tensor in matrix.requantized().items():
            np.testing.assert_array_equal(tensor.numpy(), matrix.parts[part].numpy())
    leaves = frozenset(leaf for part in loss.parts for leaf in part.leaves)
    assert loss.requantized(leaves) is None
