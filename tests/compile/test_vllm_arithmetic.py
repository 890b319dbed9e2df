"""Where vLLM's build for CPUs computes otherwise than the emulation of an artifact, and how much that is."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge.backends.compressed_tensors.servers import CACHES, CacheName
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint, documents
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import export_proxy, texts
from llmforge.ir import graph
from llmforge.ir.operators.standard import QuantizeLinear, RMSNormalization
from llmforge.measure import runtimes
from llmforge.metrics.agreement import ComparedPrompt
from llmforge.metrics.quality import PROMPT_TOKENS
from llmforge.recipe import EngineSpec
from llmforge.serving import Runner, Sampling, load

from ..models.runtimes import environment
from .test_vllm import build, method_of, passes

SHORT = 32  # tokens of an answer
MOVED = 4  # emulations whose norms are moved by one unit in the last place
PARTS = 4  # of the 56 documents: a record has 32 prompts at most
# Puts fp32 numbers [64, 4, 32] into a cache of one block, and writes its codes [64, 4, 32].
CACHED = """\
import sys
import numpy, torch, vllm.platforms
import vllm._custom_ops as ops
given = torch.from_numpy(numpy.load(sys.argv[1]))
keys, values = torch.zeros(2, 1, 4, 64, 32, dtype=torch.uint8)
scales = dict(k_scale=float(sys.argv[2]), v_scale=float(sys.argv[2]), kv_cache_dtype="fp8")
ops.cpu_attn_reshape_and_cache(given, given, keys, values, torch.arange(64), "vec", **scales)
numpy.save(sys.argv[3], values[0].transpose(0, 1).contiguous().view(torch.float8_e4m3fn).float().numpy())
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Emulated(NamedTuple):
    """The graph that quality is measured on where no server is there, and what its engine is built with."""

    model: ir.Model
    spec: EngineSpec
    checkpoint: Checkpoint

    def run(self, model: ir.Model, folder: Path) -> Runner:
        """Load the emulation of `model`, which was made of the graph."""
        export_proxy.build(model, self.spec, self.checkpoint, folder, Silent())
        return load(folder)

    def windows(self, data: Path) -> list[TokenWindow]:
        """Cut all documents of the evaluation text."""
        return texts.windows_of(self.checkpoint, documents.read_documents(data / "evaluation.jsonl"), 128)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Emulated]]:
    """Keep what builds emulate."""
    kept: list[Emulated] = []
    make = export_proxy.build

    def keep(model: ir.Model, spec: EngineSpec, checkpoint: Checkpoint, folder: Path, progress: Any) -> None:
        kept.append(Emulated(model.clone(), spec, checkpoint))
        make(model, spec, checkpoint, folder, progress)

    with monkeypatch.context() as patch:
        patch.setattr(export_proxy, "build", keep)
        yield kept


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment("vllm", tmp_path_factory.mktemp("environments"))


def moved_norms(model: ir.Model, seed: int) -> ir.Model:
    """Move each weight of each norm by one unit in the last place of fp32, up or down."""
    copy, drawn = model.clone(), np.random.default_rng(seed)
    for norm in RMSNormalization.all(copy):
        weights = graph.tensor(norm.scale).numpy()
        towards = np.where(drawn.random(weights.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
        norm.scale.const_value = ir.tensor(np.nextafter(weights, towards), name=norm.scale.name)
    return copy


def greedy(runner: Runner, prompt: list[int], tokens: int) -> list[int]:
    made = (chunk.token_id for chunk in runner.generate(prompt, Sampling(max_tokens=tokens, ignore_eos=True)))
    return [token for token in made if token is not None]


def gap(runner: Runner, text: list[int], pair: tuple[int, int]) -> float:
    """By how much the logit of one token is above that of the other behind a text that is read as an answer is."""
    logits = runner.logits(text, 1, first_step=PROMPT_TOKENS)[-1].astype(np.float64)
    return float(logits[pair[0]] - logits[pair[1]])


def is_near_tie(each: ComparedPrompt, prompt: list[int], runner: Runner, moved: list[Runner]) -> bool:
    """Say if an emulation whose norms are moved moves both tokens of the first difference apart as far as they are."""
    at = each.first_difference
    assert at is not None
    text, pair = [*prompt, *each.ours[:at]], (each.ours[at], each.theirs[at])
    ours = gap(runner, text, pair)
    by = [gap(other, text, pair) - ours for other in moved]
    print(f"{each.document}: at {at} a margin of {ours:.3g}; norms move it by", *(f"{one:.2g}" for one in by))
    return ours <= max(map(abs, by))


def test_in_fp32_int8_answers_as_the_emulation(
    emulated: list[Emulated], vllm: Path, data: Path, tmp_path: Path
) -> None:
    """The same scales, codes and products: sums of another order tell only where a number lies between two codes.

    They tell no more than a unit in the last place of the norms' weights does to the emulation itself.
    """
    checkpoint = shutil.copytree(data / "docs-llama-7m", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text()) | {"dtype": "float32"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    built = build(tmp_path, checkpoint, data, vllm, passes("int8-per_token"))
    [ours] = emulated
    runner = ours.run(ours.model, tmp_path / "ours")
    moved = [ours.run(moved_norms(ours.model, seed), tmp_path / f"moved{seed}") for seed in range(MOVED)]
    windows = {window.document: window for window in reversed(ours.windows(data))}
    first = list(windows.values())[::-1]
    [found] = runtimes.find(["vllm"], {"vllm": vllm})
    prompts: list[ComparedPrompt] = []
    with runtimes.opened(built.path, runner.config.vocabulary, found) as server:
        for part in np.array_split(np.arange(len(first)), PARTS):
            some = [first[place] for place in part]
            [run] = runtimes.run(built.path, runner, some, [found], open_=server)
            assert run.failure is None
            prompts += run.prompts
    read = {document: window.ids[:PROMPT_TOKENS].tolist() for document, window in windows.items()}
    assert [each.document for each in prompts] == [window.document for window in first]
    differing = [each for each in prompts if each.first_difference is not None]
    equal, kld = len(prompts) - len(differing), np.concatenate([each.kld for each in prompts]).mean()
    ties = sum(is_near_tie(each, read[each.document], runner, moved) for each in differing)
    of_moved = [
        sum(greedy(other, read[each.document], len(each.ours)) == list(each.ours) for each in prompts)
        for other in moved
    ]
    agreeing = sum(each.agreeing for each in prompts) / sum(len(each.ours) for each in prompts)
    short = sum(each.first_difference is None or each.first_difference >= SHORT for each in prompts)
    print(f"{short} of {len(prompts)} answers are equal for {SHORT} tokens")
    print(f"{equal} of {len(prompts)} answers are equal, {ties} of the others leave at near ties;")
    print(f"{agreeing:.4f} agree, KLD {kld:.2g}; with its norms moved the emulation gives {of_moved} of its answers")
    assert kld < 3e-4
    assert agreeing > 0.99
    assert short >= 0.9 * len(prompts)
    assert equal >= mean(of_moved)
    assert equal + ties >= 0.9 * len(prompts)


def truncated(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Drop what fp8 (e4m3) has no bits for."""
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(numbers), 2.0**-6))) - 3)
    return np.asarray(np.trunc(numbers / step) * step, np.float32)


def test_it_truncates_what_it_caches_in_fp8(vllm: Path, tmp_path: Path) -> None:
    numbers, scale = np.random.default_rng(0).normal(size=(64, 4, 32)).astype(np.float32), 0.013
    np.save(tmp_path / "numbers.npy", numbers)
    command: list[str | Path] = [vllm, "-c", CACHED, tmp_path / "numbers.npy", str(scale), tmp_path / "codes.npy"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    codes = np.load(tmp_path / "codes.npy")
    np.testing.assert_array_equal(codes, truncated(numbers * np.float32(1 / np.float32(scale))))


def truncate_caches(model: ir.Model) -> ir.Model:
    """Let keys and values lose what fp8 has no bits for in front of where they are rounded to it (`truncated`)."""
    copy = model.clone()
    caches = [each for each in QuantizeLinear.all(copy) if each.name.startswith("kv_fp8.")]
    assert caches
    numbers = {"least": 2.0**-6, "by_log": 1 / math.log(2), "bits": 3.0, "two": 2.0}
    constants = {name: graph.initializer(copy, f"cut.{name}", np.float32(each)) for name, each in numbers.items()}
    for each in caches:
        values = {**constants, "x": each.x, "scale": each.scale}
        for name, operator, *read in (
            ("steps", "Div", "x", "scale"),
            ("size", "Abs", "steps"),
            ("normal", "Max", "size", "least"),
            ("log", "Log", "normal"),
            ("log2", "Mul", "log", "by_log"),
            ("exponent", "Floor", "log2"),
            ("of_bits", "Sub", "exponent", "bits"),
            ("step", "Pow", "two", "of_bits"),
            ("quotient", "Div", "size", "step"),
            ("whole", "Floor", "quotient"),
            ("cut", "Mul", "whole", "step"),
            ("sign", "Sign", "x"),
            ("signed", "Mul", "cut", "sign"),
            ("made", "Mul", "signed", "scale"),
        ):
            inputs = [values[one] for one in read]
            [values[name]] = graph.insert(each.node, operator, inputs, name=f"{each.name}.cut.{name}")
            values[name].type, values[name].shape = each.x.type, each.x.shape
        each.x = values["made"]
    return copy


@pytest.mark.parametrize("name", [name for name, servers in CACHES.items() if servers["vLLM on CPUs"].known == "run"])
def test_its_caches_in_fp8_are_those_of_an_emulation_that_truncates(
    name: CacheName, emulated: list[Emulated], vllm: Path, data: Path, tmp_path: Path
) -> None:
    """GPUs round to nearest, as the emulation does: what it is held to here is what is left beside that."""
    steps = [{"quantize-kv-fp8": {"budget": {"kld_mean": 1.0}}}, *passes("fp8-per_token")]
    built = build(tmp_path, data / "docs-llama-7m", data, vllm, steps, method_of(name))
    assert "keys and values cached in fp8" in built.report.engine.facts["format"]
    [rounded], [ours] = built.report.runtimes, emulated
    runner = ours.run(truncate_caches(ours.model), tmp_path / "truncated")
    [found] = runtimes.find(["vllm"], {"vllm": vllm})
    [cut] = runtimes.run(built.path, runner, ours.windows(data), [found])
    assert rounded.figures is not None
    assert cut.figures is not None
    for title, figures in (("rounded", rounded.figures), ("truncated", cut.figures)):
        print(f"{title}: agreement {figures.agreement.value:.3f}, KLD {figures.kld_mean.value:.2g}")
    assert cut.figures.agreement.high is not None
    assert cut.figures.agreement.high > 0.95  # vLLM computes in 16 bits, as in test_vllm.require_ran
    assert cut.figures.kld_mean.value < 0.01
    assert cut.figures.kld_mean.value < 0.75 * rounded.figures.kld_mean.value
