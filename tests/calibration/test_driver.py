"""Calibration: layer by layer it sees what the whole model would, and goes on where it was killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from llmforge.base.errors import CheckpointError, DataError, UnsupportedError
from llmforge.base.progress import Silent
from llmforge.cache import Cache
from llmforge.calibration import Store, calibrate, key
from llmforge.calibration import windows as carried
from llmforge.calibration.layer import DecoderLayer, LayerCall
from llmforge.calibration.skeleton import Skeleton
from llmforge.checkpoint import Checkpoint, text
from llmforge.checkpoint.documents import read_documents
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import texts
from llmforge.quantization import sparsity
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, dequantize, round_to_nearest
from llmforge.quantization.methods import gptq
from llmforge.quantization.methods.base import InputStatistic
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import (
    ChannelDemand,
    Demand,
    InputRangeDemand,
    KvRangeDemand,
    Smoothing,
    SparsityDemand,
    Statistics,
    WeightDemand,
)
from llmforge.trace import trace
from llmforge.trace.export import pattern

from ..models import edited_llama, zoo
from ..models.checkpoints import write_checkpoint

GRID = Grid(4, 32, False)
DEMANDS = (WeightDemand(Gptq(), GRID), KvRangeDemand())
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def windows() -> list[TokenWindow]:
    """Four windows of three lengths."""
    random = np.random.default_rng(0)
    return [TokenWindow(f"d{i}", random.integers(3, 259, length)) for i, length in enumerate((48, 33, 48, 2))]


@pytest.fixture
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint)


def model(path: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return loaded.eval()


def test_inputs_range_as_in_the_model(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all windows, by the model's own forward, in fp32; again from the folder of a calibration that is done."""
    monkeypatch.setattr("llmforge.calibration.quantize.COARSE", 0)
    whole, peaks = model(checkpoint.path), dict[str, Float32]()

    def note(name: str) -> Callable[..., None]:
        def before(_: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
            own = given[0].abs().amax((0, 1)).numpy()
            peaks[name] = np.maximum(peaks.get(name, own), own)

        return before

    for name, part in whole.model.layers.named_modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_pre_hook(note(f"model.layers.{name}.weight"))
    with torch.inference_mode():
        for window in windows:
            whole(torch.from_numpy(window.ids)[None])
    demand = InputRangeDemand(Smoothing("int8", per_token=False, alpha=0.5))
    for _ in range(2):
        found = calibrate(checkpoint, windows, [demand, *DEMANDS], store=Store(Cache(tmp_path / "kept"))).inputs
        assert {name: each.peaks for name, each in found.items()} == {
            name: pytest.approx(peak, rel=1e-5) for name, peak in peaks.items()
        }
    assert len(found) == len(LINEARS) * whole.config.num_hidden_layers
    query, key, down = (
        found[f"model.layers.0.{name}.weight"] for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    )
    assert query.smoothed is not None
    assert key.smoothed is not None
    assert down.smoothed is not None
    np.testing.assert_array_equal(query.smoothed.exponents, key.smoothed.exponents)
    assert query.smoothed.alpha == 0.5
    assert query.smoothed.exponents.any()
    assert query.smoothed.loss == key.smoothed.loss > 0
    assert len(down.smoothed.exponents) == whole.config.intermediate_size


def test_sums_by_channel_are_those_of_the_model(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path
) -> None:
    """Of linears and of the head, by the model's own forward; again from what an earlier calibration kept."""
    whole, read = model(checkpoint.path), dict[str, list[torch.Tensor]]()
    parts = {f"{name}.weight": part for name, part in whole.named_modules() if isinstance(part, torch.nn.Linear)}
    head = parts.pop("lm_head.weight")
    parts["model.embed_tokens.weight" if whole.config.tie_word_embeddings else "lm_head.weight"] = head
    for name, part in parts.items():
        part.register_forward_pre_hook(lambda _, given, name=name: read.setdefault(name, []).append(given[0][0]))
    with torch.inference_mode():
        for window in windows:
            whole(torch.from_numpy(window.ids)[None])
    for _ in range(2):
        found = calibrate(checkpoint, windows, [ChannelDemand()], store=Store(Cache(tmp_path / "kept"))).inputs
        assert found.keys() == read.keys()
        for name, each in read.items():
            x, own = torch.cat(each), found[name].seen()
            assert own.tokens == len(x)
            for statistic, total in ((InputStatistic.SUMS, x.sum(0)), (InputStatistic.SQUARES, x.square().sum(0))):
                np.testing.assert_allclose(own.sums[statistic], total, rtol=1e-3, atol=1e-3)


def test_two_ways_of_rounding_inputs_are_refused(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    with pytest.raises(UnsupportedError, match="2 passes round what linear layers read in different ways"):
        calibrate(checkpoint, windows, [InputRangeDemand(), InputRangeDemand(Smoothing("fp8", per_token=True))])


def equal(one: Statistics, other: Statistics) -> bool:
    return (
        list(one.linears) == list(other.linears)
        and all(np.array_equal(one.linears[n].codes, other.linears[n].codes) for n in one.linears)
        and all(np.array_equal(one.linears[n].scales, other.linears[n].scales) for n in one.linears)
        and all(np.array_equal(one.kv[i].key, other.kv[i].key) for i in one.kv)
        and all(np.array_equal(one.kv[i].value, other.kv[i].value) for i in one.kv)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "num_key_value_heads": 4},
    ],
    ids=["llama", "mistral with a window", "scaled rotary, no groups"],
)
def test_layers_one_by_one_are_the_model(
    changes: dict[str, object], tmp_path: Path, windows: list[TokenWindow]
) -> None:
    write_checkpoint(tmp_path, **changes)
    skeleton = Skeleton.build(Checkpoint.open(tmp_path))
    with torch.inference_mode():
        calls, states = skeleton.enter([window.ids for window in windows])
        expected = [
            model(tmp_path)(torch.from_numpy(w.ids)[None], output_hidden_states=True).hidden_states for w in windows
        ]
        for index in range(len(skeleton.layers)):
            for got, want in zip(states, expected, strict=True):
                torch.testing.assert_close(got, want[index], atol=1e-5, rtol=1e-5)
            layer = skeleton.load(index, calls[index])
            states = [layer.run(i, state) for i, state in enumerate(states)]


LIST = "nn.ModuleList([nn.Identity() for _ in range(config.num_hidden_layers)])"


def with_list_in(part: str) -> Callable[[str], str]:
    """Give Llama a second list of as many modules as it has layers, in front of the first: in the model, or a layer."""
    before = {"model": "        self.layers = nn.ModuleList(", "layer": "        self.mlp = DroverMLP(config)"}[part]
    return lambda source: source.replace(before, f"        self.others = {LIST}\n{before}")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", ["model", "layer"])
def test_calibration_sees_the_layers_that_the_trace_sees(part: str, tmp_path: Path) -> None:
    with edited_llama.registered(tmp_path, with_list_in(part)) as modeling:
        zoo.save(modeling.DroverConfig(**{**zoo.BASE, "num_hidden_layers": 4}), tmp_path / "checkpoint")
        opened = Checkpoint.open(tmp_path / "checkpoint")
        graph = trace(opened)
        if part == "layer":  # within the layers: no doubt which list they are
            found = pattern.recorded(graph)
            assert found is not None
            assert Skeleton.build(opened).prefixes == [f"{found.stack}.{index}" for index in range(4)]
            return
        reason = "2 lists of 4 modules could be the layers"
        assert graph.metadata_props[pattern.LAYERS] == json.dumps({"irregular": reason})
        with pytest.raises(UnsupportedError, match=f"cannot be calibrated: {reason}"):
            Skeleton.build(opened)


def test_ranges_are_those_of_a_cache(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    statistics = calibrate(checkpoint, windows, [KvRangeDemand()])
    loaded = model(checkpoint.path)
    keys, values = [], []
    with torch.inference_mode():
        for window in windows:
            cache = DynamicCache(config=loaded.config)
            loaded(torch.from_numpy(window.ids)[None], past_key_values=cache)
            keys.append([layer.keys.abs().amax((0, 2)).numpy() for layer in cache.layers])
            values.append([layer.values.abs().amax((0, 2)).numpy() for layer in cache.layers])
    assert not statistics.linears
    assert list(statistics.kv) == [0, 1]
    for index, ranges in statistics.kv.items():
        assert ranges.key.shape == (2, 16)
        np.testing.assert_allclose(ranges.key, np.max([key[index] for key in keys], 0), rtol=1e-5)
        np.testing.assert_allclose(ranges.value, np.max([value[index] for value in values], 0), rtol=1e-5)
    assert (statistics.samples, statistics.tokens) == (4, 131)


def test_every_linear_is_quantized_and_near(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    statistics = calibrate(checkpoint, windows, DEMANDS)
    parameters = load_file(checkpoint.path / "model.safetensors")
    assert sorted(statistics.linears) == sorted(n for n in parameters if n.split(".")[-2] in LINEARS)
    for name, matrix in statistics.linears.items():
        assert matrix.grid == GRID
        assert matrix.shape == parameters[name].shape
        assert 0.3 > np.abs(dequantize(matrix) - parameters[name]).std() / parameters[name].std() > 0.01


def test_linears_that_read_one_tensor_are_found(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    skeleton = Skeleton.build(checkpoint)
    with torch.inference_mode():
        calls, states = skeleton.enter([window.ids for window in windows])
        groups = skeleton.load(1, calls[1]).groups(states[0])
    names = [[name.removeprefix("model.layers.1.").split(".")[1] for name in group] for group in groups]
    assert names == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_later_layers_see_what_quantized_ones_make(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    fp32 = calibrate(checkpoint, windows, [KvRangeDemand()])
    quantized = calibrate(checkpoint, windows, DEMANDS)
    assert not np.array_equal(fp32.kv[0].key, quantized.kv[0].key)
    loaded = model(checkpoint.path)
    with torch.inference_mode():
        for name, parameter in loaded.named_parameters():
            if name in quantized.linears:
                parameter.copy_(torch.from_numpy(dequantize(quantized.linears[name])))
        cache = DynamicCache(config=loaded.config)
        loaded(torch.from_numpy(windows[0].ids)[None], past_key_values=cache)
    seen = cache.layers[1].keys.abs().amax((0, 2)).numpy()
    assert (seen <= quantized.kv[1].key * 1.01).all()  # 4 bits: layers run in bf16
    assert np.isclose(seen, quantized.kv[1].key, rtol=0.01).any()


def test_two_runs_are_identical_and_folders_do_not_matter(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path
) -> None:
    memory = calibrate(checkpoint, windows, DEMANDS)
    assert equal(memory, calibrate(checkpoint, windows, DEMANDS))
    stored = calibrate(checkpoint, windows, DEMANDS, store=Store(Cache(tmp_path / "layers")))
    assert equal(memory, stored)
    assert len(list((tmp_path / "layers" / "entries").iterdir())) == 2


class KilledError(Exception):
    pass


class KilledAt(Silent):
    """Stops a calibration when it reaches a layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def advance(self, done: int, total: int) -> None:
        if done == self.layer:
            raise KilledError


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the matrices that GPTQ is run on."""
    calls: list[int] = []

    def counted(*args: object, **options: object) -> object:
        calls.append(1)
        return original(*args, **options)  # type: ignore[arg-type]

    original = gptq.gptq
    monkeypatch.setattr(gptq, "gptq", counted)
    return iter([calls])


def test_a_killed_calibration_goes_on(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path, solved: Iterator[list[int]]
) -> None:
    [calls] = solved
    whole = calibrate(checkpoint, windows, DEMANDS)
    assert len(calls) == 8  # four groups of linears in each of two layers
    with pytest.raises(KilledError):
        calibrate(checkpoint, windows, DEMANDS, store=Store(Cache(tmp_path / "layers")), progress=KilledAt(1))
    calls.clear()
    store = Store(Cache(tmp_path / "layers"))
    resumed = calibrate(checkpoint, windows, DEMANDS, store=store)
    assert len(calls) == 4
    assert store.reused == [0]
    assert equal(whole, resumed)
    calls.clear()
    calibrate(checkpoint, windows[:3], DEMANDS, store=Store(Cache(tmp_path / "layers")))  # other text: nothing is found
    assert len(calls) == 8


def run_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the layers that are loaded, by their numbers."""
    loaded: list[int] = []
    own = Skeleton.load

    def counted(self: Skeleton, index: int, calls: Sequence[LayerCall]) -> DecoderLayer:
        loaded.append(index)
        return own(self, index, calls)

    monkeypatch.setattr(Skeleton, "load", counted)
    return loaded


def states_in(folder: Path) -> list[str]:
    return [entry.parts["layer"] for entry in Cache(folder).entries() if entry.kind == "calibration-states"]


@pytest.mark.parametrize("demands", [DEMANDS, DEMANDS[1:]], ids=["weights", "ranges"])
@pytest.mark.parametrize("at", [1, pytest.param(2, marks=pytest.mark.thorough), 4])
def test_a_killed_calibration_begins_at_the_first_layer_that_is_lacking(
    at: int, demands: Sequence[Demand], windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "deep", num_hidden_layers=5)
    deep = Checkpoint.open(tmp_path / "deep")
    whole = calibrate(deep, windows, demands)
    with pytest.raises(KilledError), Cache(tmp_path / "cache", 10**9) as cache:
        calibrate(deep, windows, demands, store=Store(cache), progress=KilledAt(at))
    assert states_in(tmp_path / "cache") == [str(at)]
    loaded = run_layers(monkeypatch)
    with Cache(tmp_path / "cache", 10**9) as cache:
        assert equal(whole, calibrate(deep, windows, demands, store=Store(cache)))
    assert loaded == list(range(at, 5))
    assert states_in(tmp_path / "cache") == []
    assert cache.notes == []


def test_a_calibration_killed_before_it_kept_its_states_begins_one_layer_earlier(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "deep", num_hidden_layers=4)
    deep = Checkpoint.open(tmp_path / "deep")
    whole, keep = calibrate(deep, windows, DEMANDS), Store.keep_states

    def killed(self: Store, key: str, index: int, states: Iterable[Float32]) -> None:
        if index == 3:
            raise KilledError
        keep(self, key, index, states)

    monkeypatch.setattr(Store, "keep_states", killed)
    with pytest.raises(KilledError), Cache(tmp_path / "cache", 10**9) as cache:
        calibrate(deep, windows, DEMANDS, store=Store(cache))
    monkeypatch.setattr(Store, "keep_states", keep)
    loaded = run_layers(monkeypatch)
    with Cache(tmp_path / "cache", 10**9) as cache:
        assert equal(whole, calibrate(deep, windows, DEMANDS, store=Store(cache)))
    assert loaded == [2, 3]


def test_states_that_are_too_large_are_not_kept_and_damaged_ones_not_used(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, loaded = calibrate(checkpoint, windows, DEMANDS), run_layers(monkeypatch)
    with pytest.raises(KilledError), Cache(tmp_path / "small", 100_000) as cache:  # 131 tokens of 64 features, twice
        calibrate(checkpoint, windows, DEMANDS, store=Store(cache), progress=KilledAt(1))
    assert "are more than 1/8 of the cache" in cache.notes[0]
    assert states_in(tmp_path / "small") == []
    with pytest.raises(KilledError), Cache(tmp_path / "large", 10**9) as cache:
        calibrate(checkpoint, windows, DEMANDS, store=Store(cache), progress=KilledAt(1))
    file = next((tmp_path / "large").glob("entries/*/states"))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    loaded.clear()
    with Cache(tmp_path / "large", 10**9) as cache:
        assert equal(whole, calibrate(checkpoint, windows, DEMANDS, store=Store(cache)))
    assert loaded == [0, 1]
    assert "was damaged" in cache.notes[0]


def test_where_all_layers_are_found_nothing_is_run(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = calibrate(checkpoint, windows, DEMANDS, store=Store(Cache(tmp_path)))
    monkeypatch.setattr(Skeleton, "build", None)
    recorded = Recorded()
    assert equal(whole, calibrate(checkpoint, windows, DEMANDS, store=Store(Cache(tmp_path)), progress=recorded))
    assert recorded.titles == ["Calibrate: all layers reused"]


class Recorded(Silent):
    """Keeps the titles of stages."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def stage(self, title: str) -> None:
        self.titles.append(title)


def test_other_threads_or_packages_are_another_calibration(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    before = key(checkpoint, windows, DEMANDS, None, 1, "packages")
    assert key(checkpoint, windows, DEMANDS, None, 1, "packages") == before
    assert key(checkpoint, windows, DEMANDS, None, 64, "packages") != before
    assert key(checkpoint, windows, DEMANDS, None, 1, "other packages") != before


@pytest.mark.parametrize("damage", ["cut", "flipped", pytest.param("emptied", marks=pytest.mark.thorough)])
def test_a_damaged_layer_is_done_again(
    damage: str, checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path
) -> None:
    whole = calibrate(checkpoint, windows, DEMANDS)
    with Cache(tmp_path) as cache:
        calibrate(checkpoint, windows, DEMANDS, store=Store(cache))
    file = min(tmp_path.glob("entries/*/layer.npz"))
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    file.write_bytes(b"" if damage == "emptied" else content if damage == "flipped" else content[:-100])
    cache = Cache(tmp_path)
    assert equal(whole, calibrate(checkpoint, windows, DEMANDS, store=Store(cache)))
    assert "was damaged" in cache.notes[0]


def test_layers_of_six_bits_and_less_multiply_in_bf16(
    checkpoint: Checkpoint, windows: list[TokenWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One linear of more bits keeps its layer in fp32."""
    coarse: list[int] = []

    def fast(linears: Iterable[torch.nn.Linear]) -> AbstractContextManager[None]:
        coarse.append(len(list(linears)))
        return nullcontext()

    monkeypatch.setattr(carried, "fast", fast)
    layers, name = checkpoint.geometry.layers, "model.layers.1.mlp.down_proj.weight"
    for bits, others, expected in ((6, (), layers), (8, (), 0), (4, ((name, 8),), layers - 1)):
        coarse.clear()
        demand = WeightDemand(Gptq(), Grid(bits, 32, True, "fp16"), layer_bits=others)
        calibrate(checkpoint, windows, [demand])
        assert coarse == [len(LINEARS)] * expected


def test_excluded_linears_stay(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    exclude = ("*.down_proj.weight", "model.layers.0.self_attn.q*")
    statistics = calibrate(checkpoint, windows, [WeightDemand(Gptq(), GRID, exclude)])
    assert len(statistics.linears) == 14 - 3
    assert "model.layers.0.self_attn.q_proj.weight" not in statistics.linears
    assert "model.layers.0.self_attn.k_proj.weight" in statistics.linears
    assert not statistics.kv


def rewrite(path: Path, name: str, rows: slice, value: float) -> Checkpoint:
    parameters = load_file(path / "model.safetensors")
    parameters[name][rows] = value
    save_file(parameters, path / "model.safetensors")
    return Checkpoint.open(path)


def test_a_silent_channel_has_no_range(tiny_checkpoint: Path, windows: list[TokenWindow]) -> None:
    silent = rewrite(tiny_checkpoint, "model.layers.1.self_attn.v_proj.weight", slice(21, 22), 0.0)
    with pytest.raises(DataError, match=r"model\.layers\.1: the value channel 5 of KV head 1 ranges to 0 on"):
        calibrate(silent, windows, [KvRangeDemand()])


def test_states_that_overflow_are_refused(tiny_checkpoint: Path, windows: list[TokenWindow]) -> None:
    wild = rewrite(tiny_checkpoint, "model.layers.0.mlp.down_proj.weight", slice(None), 3e38)
    with pytest.raises(DataError, match=r"model\.layers\.0.*(NaN|infin)"):
        calibrate(wild, windows, [KvRangeDemand()])


def test_contradictions_and_no_text_are_refused(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    two = [WeightDemand(Gptq(), GRID), WeightDemand(Gptq(damping=0.02), GRID)]
    with pytest.raises(UnsupportedError, match="2 passes quantize the same linear layers"):
        calibrate(checkpoint, windows, two)
    with pytest.raises(DataError, match="no text"):
        calibrate(checkpoint, [], DEMANDS)


def test_missing_weights_are_refused(tiny_checkpoint: Path, windows: list[TokenWindow]) -> None:
    parameters = load_file(tiny_checkpoint / "model.safetensors")
    renamed = {name.replace("model.layers.1", "model.blocks.1"): array for name, array in parameters.items()}
    save_file(renamed, tiny_checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 'model\.layers\.1\..*'"):
        calibrate(Checkpoint.open(tiny_checkpoint), windows, DEMANDS)


def test_bf16_weights_are_read(tmp_path: Path, windows: list[TokenWindow]) -> None:
    parameters = write_checkpoint(tmp_path, dtype="bfloat16")
    assert parameters["model.norm.weight"].dtype == ml_dtypes.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2
    assert len(calibrate(Checkpoint.open(tmp_path), windows, DEMANDS).linears) == 14


def mean_kld(logits: torch.Tensor, reference: torch.Tensor) -> float:
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.slow
@torch.no_grad()
def test_gptq_halves_what_rounding_to_nearest_costs(sample_checkpoint: Path, data: Path) -> None:
    checkpoint = Checkpoint.open(sample_checkpoint)
    seen, unseen = (
        texts.windows_of(checkpoint, read_documents(data / f"{name}.jsonl"), 256)
        for name in ("calibration", "evaluation")
    )
    statistics = calibrate(checkpoint, text.sample(seen, 32, 0), [WeightDemand(Gptq(), GRID)])
    original, parameters = model(sample_checkpoint), {}
    for name, parameter in original.named_parameters():
        parameters[name] = parameter.detach().clone()
    evaluated = [torch.from_numpy(window.ids)[None] for window in text.sample(unseen, 12, 0)]
    reference = [original(ids).logits for ids in evaluated]
    costs = {}
    for method in ("rtn", "gptq"):
        for name, parameter in original.named_parameters():
            if name in statistics.linears:
                rounded = (
                    statistics.linears[name] if method == "gptq" else round_to_nearest(parameters[name].numpy(), GRID)
                )
                parameter.copy_(torch.from_numpy(dequantize(rounded)))
        costs[method] = np.mean(
            [mean_kld(original(ids).logits, want) for ids, want in zip(evaluated, reference, strict=True)]
        )
    assert 0.002 < costs["gptq"] < 0.45 * costs["rtn"]


def test_layers_are_pruned_one_behind_the_other(
    checkpoint: Checkpoint, windows: list[TokenWindow], tmp_path: Path
) -> None:
    """By the moments of what each linear reads where those before it are pruned; found again in the cache."""
    demand = SparsityDemand(0.01, exclude=("*.o_proj.*",))
    made = calibrate(checkpoint, windows, [demand], store=Store(Cache(tmp_path / "kept")))
    layers = int(checkpoint.geometry.layers)
    assert len(made.sparse) == (len(LINEARS) - 1) * layers
    assert all(sparsity.is_sparse(matrix.dense().T) for matrix in made.sparse.values())
    assert not made.notes
    again = calibrate(checkpoint, windows, [demand], store=Store(Cache(tmp_path / "kept")))
    assert list(again.sparse) == list(made.sparse)
    for name, matrix in made.sparse.items():
        np.testing.assert_array_equal(matrix.dense(), again.sparse[name].dense())
        assert matrix.lost == again.sparse[name].lost

    whole, read = model(checkpoint.path), list[Float32]()
    down = "model.layers.1.mlp.down_proj"
    for name, matrix in made.sparse.items():
        if name != f"{down}.weight":
            whole.get_submodule(name.removesuffix(".weight")).weight.data = torch.from_numpy(matrix.dense())
    whole.get_submodule(down).register_forward_pre_hook(lambda _, given: read.append(given[0][0].numpy()))
    with torch.inference_mode():
        for window in windows:
            whole(torch.from_numpy(window.ids)[None])
    x = np.concatenate(read)
    weight = whole.get_submodule(down).weight.detach().numpy()
    expected, _ = sparsity.sparsegpt(weight, x.T @ x, 0.01)
    same = (expected.places == made.sparse[f"{down}.weight"].places).mean()
    assert same > 0.99
    own = made.sparse[f"{down}.weight"].lost
    assert own == pytest.approx(sparsity.output_error(weight, expected.dense(), x.T @ x), rel=0.02)


def test_pruned_and_quantized_weights_contradict_each_other(checkpoint: Checkpoint, windows: list[TokenWindow]) -> None:
    with pytest.raises(UnsupportedError, match="two passes choose the weights"):
        calibrate(checkpoint, windows, [SparsityDemand(0.01), WeightDemand(Gptq(), GRID)])
