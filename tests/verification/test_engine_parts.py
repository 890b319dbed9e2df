"""An engine that is too large to be loaded whole runs part by part, from its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.engines import BuildRequest, BuiltEngine
from llmforge.backends.onnxruntime import builder as engine
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.passes.cpu_kernels import CpuKernels
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.runtime.config import RuntimeConfig
from llmforge.runtime.interface import StepInputs
from llmforge.trace import trace
from llmforge.verification import streamed_execution
from llmforge.verification.subgraph_session import SubgraphSession

from ..models import zoo
from ..models.decoder_graph import decoder

SPEC = EngineSpec(max_context=32, max_batch=1, threads=1)
INT4 = QuantizeWeights(method="rtn", block_size=32, embedding_bits=4, budget=Budget(kld_mean=10.0))


def lowered(folder: Path, *steps: Pass) -> ir.Model:
    zoo.write("llama", folder)
    model, target = trace(Checkpoint.open(folder)), targets.local()
    for step in steps:
        assert step.run(model, Context(target))
    return engine.lower(model, target)[0]


def build(model: ir.Model, folder: Path, spec: EngineSpec = SPEC) -> BuiltEngine:
    return engine.build(
        BuildRequest(model, folder, spec, targets.local(), (3,), 0, run_in_parts=streamed_execution.run_engine)
    )


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> list[SubgraphSession]:
    """Let every engine count as a large one, in blocks of about one matrix; the blocks that ran."""
    monkeypatch.setattr(engine, "WHOLE_BYTES", 0)
    monkeypatch.setattr(streamed_execution, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(streamed_execution.drive, "__kwdefaults__", {
        **streamed_execution.drive.__kwdefaults__, "block_bytes": 1 << 12,
    })  # fmt: skip
    opened: list[SubgraphSession] = []
    own = SubgraphSession.__init__

    def noted(self: SubgraphSession, *args, **kwargs) -> None:
        assert kwargs["optimize"]
        own(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(SubgraphSession, "__init__", noted)
    return opened


@pytest.mark.parametrize(
    "steps",
    [(), (FuseNorms(), FlashAttention(), INT4), (FlashAttention(), INT4, CpuKernels(budget=Budget(kld_mean=10.0)))],
)
def test_an_engine_that_ran_in_parts_has_the_bytes_of_one_that_was_loaded(
    steps: tuple[Pass, ...], tmp_path: Path, in_parts: list[SubgraphSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lowered(tmp_path / "checkpoint", *steps)
    built = build(model, tmp_path / "parts")
    assert any("part by part" in note for note in built.notes)
    assert len(in_parts) > 4
    ran = len(in_parts)
    monkeypatch.setattr(engine, "WHOLE_BYTES", 1 << 30)
    whole = build(model, tmp_path / "whole")
    assert not whole.notes
    assert len(in_parts) == ran
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "parts" / file.name).read_bytes()


def test_parts_make_the_logits_of_the_engine(
    tmp_path: Path, in_parts: list[SubgraphSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    monkeypatch.setattr(streamed_execution, "require_finite", lambda side, logits, where: seen.append(logits[None]))
    build(lowered(tmp_path / "checkpoint", FlashAttention(), INT4), tmp_path / "engine")
    config = RuntimeConfig.read(tmp_path / "engine" / "runtime.json")
    session = Session(tmp_path / "engine" / "model.onnx", config.session.resolve())
    cache = session.allocate(1, 8)
    for past, (ids, logits) in enumerate(zip(([[0, 0]], [[0]]), seen, strict=True)):
        rows = np.arange(len(ids[0]))
        expected = session.step(StepInputs(np.array(ids), np.array([2 * past], np.int32), rows), cache)
        np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_a_context_of_one_token_has_room_for_the_prompt_alone(tmp_path: Path, in_parts: list[SubgraphSession]) -> None:
    build(decoder(), tmp_path, EngineSpec(max_context=2, max_batch=1, threads=1))
    assert in_parts


def test_logits_that_are_not_finite_fail_the_build(tmp_path: Path, in_parts: list[SubgraphSession]) -> None:
    model = decoder()
    head = model.graph.initializers["head"].const_value.numpy().copy()
    head[3, 4] = np.nan
    model.graph.initializers["head"].const_value = ir.tensor(head, name="head")
    with pytest.raises(VerificationError, match="engine logits"):
        build(model, tmp_path)


def test_pages_that_were_read_are_given_back(tmp_path: Path) -> None:
    tensor = ir.ExternalTensor(
        "data", 8, 16, ir.DataType.FLOAT, shape=ir.Shape([4]), name="w", base_dir=tmp_path
    )  # fmt: skip
    np.arange(6, dtype=np.float32).tofile(tmp_path / "data")
    again = streamed_execution._unmapped(tensor)
    np.testing.assert_array_equal(again.numpy(), [2, 3, 4, 5])
    assert not np.shares_memory(again.numpy(), again.numpy())  # each reader maps the file for itself
