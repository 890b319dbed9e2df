"""What is written otherwise than it was proven is refused: on the sample, a mixture of experts and a chat model."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import pytest

from llmforge import native, targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder
from llmforge.base.errors import InputError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.compile import written_files
from llmforge.passes import (
    CpuKernels,
    FlashAttention,
    FuseNorms,
    PackGateUp,
    PackQkv,
    QuantizeChannels,
    QuantizeKvCache,
    QuantizeWeights,
)
from llmforge.recipe import EngineSpec, ServingSpec
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.runtime.config import RuntimeConfig
from llmforge.trace import trace
from llmforge.triton import repository
from llmforge.verification.written_engine import require_same

from .test_passes import SAMPLE
from .written import FILES, GRAPHS, Spoil, Tamper, biased

pytestmark = [
    pytest.mark.xdist_group("written"),
    pytest.mark.skipif(native.library() is None, reason="needs the kernels"),
]
LOOSE = Budget(kld_mean=5.0)
PASSES = (
    FuseNorms(),
    PackQkv(),
    PackGateUp(),
    FlashAttention(),
    QuantizeWeights(bits=4, block_size=32, method="rtn", embedding_bits=8, budget=LOOSE),
    QuantizeKvCache(budget=LOOSE, granularity="per_token"),
    CpuKernels(LOOSE),
)
SPEC = EngineSpec(max_context=1024, max_batch=8, threads=1)
# Lies that are told by default; the others, like those about files, for which nothing runs, by the thorough tests.
QUICK = {"the end is 15 nats less likely", "every 20th id", "single tokens see no more than 300"}
SEEDS = tuple(f"{seed:016x}" for seed in (1, 2))
# Other checkpoints that the lies are told about, as slow tests; LLMFORGE_LIES names folders.
OTHERS = [Path(each) for each in filter(None, os.environ.get("LLMFORGE_LIES", "").split(os.pathsep))]


@dataclass(frozen=True, eq=False)
class Proven:
    """The last graph of a checkpoint, for llmforge's kernels; nobody may change it."""

    checkpoint: Checkpoint
    model: ir.Model

    def write(self, folder: Path, spoil: Spoil = lambda model: None) -> tuple[repository.TritonModel, RuntimeConfig]:
        """Write the engine, of whose lowered graph something is spoiled, and all beside it."""
        target = targets.local()
        lowered, _ = builder.lower(self.model, target)
        spoil(lowered)
        ends = self.checkpoint.eos_token_ids, self.checkpoint.bos_token_id
        engine = builder.build(BuildRequest(lowered, folder / "engine", SPEC, target, *ends))
        builder.write_tokenizer(self.checkpoint, folder / "tokenizer")
        served = repository.TritonModel("lied", target.kind, ServingSpec(), engine.config, {"checkpoint": "it"})
        repository.write(served, folder / repository.FOLDER / "lied")
        return served, engine.config


@pytest.fixture(
    scope="module",
    params=[SAMPLE, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)],
    ids=lambda path: path.name,
)
def proven(request: pytest.FixtureRequest) -> Proven:
    checkpoint = Checkpoint.open(request.param)
    model = trace(checkpoint)
    for step in PASSES:
        step.run(model, Context(targets.local()))
    return Proven(checkpoint, model)


@pytest.fixture(scope="module")
def written(proven: Proven, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, repository.TritonModel]:
    folder = tmp_path_factory.mktemp("written")
    return folder, proven.write(folder)[0]


def require(proven: Proven, folder: Path, served: repository.TritonModel, seed: str = SEEDS[0]) -> None:
    """Do what a build does with what it wrote."""
    expected = written_files.Expected.of_checkpoint(proven.checkpoint, SPEC)
    written_files.require_right(folder, expected, served.runtime, served)
    require_same(proven.model, folder / "engine", seed, [], threads=1)


def test_what_is_right_passes(proven: Proven, written: tuple[Path, repository.TritonModel]) -> None:
    for seed in SEEDS:
        require(proven, *written, seed)


@pytest.mark.parametrize("seed", [7, 9])
def test_weights_that_the_runtime_multiplies_by_rounded_inputs_pass(seed: int, tmp_path: Path) -> None:
    model, target = trace(Checkpoint.open(SAMPLE)), targets.local()
    for step in (*PASSES[:4], QuantizeChannels(dtype="int8", budget=LOOSE)):
        step.run(model, Context(target))
    builder.build(BuildRequest(builder.lower(model, target)[0], tmp_path, SPEC, target, (0,), 0))
    require_same(model, tmp_path, f"{seed:016x}", [], threads=1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough]) for name in GRAPHS]
)
def test_an_engine_of_another_graph_is_refused(name: str, proven: Proven, tmp_path: Path) -> None:
    spoil = GRAPHS[name]
    if name.startswith("the end"):
        spoil = biased(proven.checkpoint.eos_token_ids[0], -15.0 if "less" in name else 3.0)
    served, _ = proven.write(tmp_path, spoil)
    for seed in SEEDS if proven.checkpoint.path == SAMPLE else SEEDS[:1]:
        with pytest.raises(VerificationError, match="does not compute what was proven"):
            require(proven, tmp_path, served, seed)
    shutil.rmtree(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_other_files_are_refused(
    name: str, proven: Proven, written: tuple[Path, repository.TritonModel], tmp_path: Path
) -> None:
    tamper: Tamper = FILES[name]
    folder = Path(shutil.copytree(written[0], tmp_path / "it"))
    tamper(folder)
    with pytest.raises((VerificationError, InputError)):
        require(proven, folder, written[1])
    shutil.rmtree(folder)
