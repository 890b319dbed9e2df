"""W8A8 on a CPU: ONNX Runtime multiplies int8 by int8, and outliers of activations do not matter once smoothed."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from llmforge import targets
from llmforge.backends import onnx_file
from llmforge.backends.onnxruntime import builder as engine
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.progress import Silent
from llmforge.calibration import calibrate
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.documents import read_documents
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import texts
from llmforge.passes import QuantizeChannels
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.trace import trace
from llmforge.verification import probe
from llmforge.verification.text_loss import TextLoss

from ...models.outliers import write_outliers

DATA = Path(__file__).parents[2] / "data"
SAMPLE = DATA / "docs-llama-7m"
CPU = targets.load("cpu-avx2")
LOOSE = Budget(kld_mean=5.0)


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ir.Model]:
    folder = tmp_path_factory.mktemp("outliers") / "checkpoint"
    write_outliers(SAMPLE, folder)
    checkpoint = Checkpoint.open(folder)
    return checkpoint, trace(checkpoint)


def text(name: str, count: int) -> list[TokenWindow]:
    cut = texts.windows_of(Checkpoint.open(SAMPLE), read_documents(DATA / f"{name}.jsonl"), 256)
    return cut[:: len(cut) // count][:count]


def loaded(model: ir.Model, folder: Path) -> tuple[Session, set[str]]:
    """Load what the engine would write, with ONNX Runtime's own fusions; say which operators it then has."""
    lowered, _ = engine.lower(model, CPU)
    folder.mkdir()
    onnx_file.write(lowered, folder, Silent())
    config = engine.session_options(1).resolve()
    own = onnxruntime.SessionOptions()
    own.optimized_model_filepath, own.log_severity_level = str(folder / "optimized.onnx"), 3
    onnxruntime.InferenceSession(folder / "model.onnx", own, providers=["CPUExecutionProvider"])
    fused = onnx.load(folder / "optimized.onnx", load_external_data=False)
    return Session(folder / "model.onnx", config), {node.op_type for node in fused.graph.node}


@pytest.mark.thorough
@pytest.mark.parametrize(("activations", "collapsed", "smoothed"), [("static", 0.5, 0.01), ("per_token", 0.05, 0.015)])
def test_plain_w8a8_collapses_and_smoothed_does_not(
    activations: str, collapsed: float, smoothed: float, outliers: tuple[Checkpoint, ir.Model], tmp_path: Path
) -> None:
    checkpoint, model = outliers
    whole = [window.ids for window in text("evaluation", 4)]
    runs = [probe.schedule("text", whole, [[len(ids) for ids in whole]])]
    plain, klds = probe.open_session(model, probe.InitializerArrays(), 1), {}
    for smooth in (False, True):
        step = QuantizeChannels(budget=LOOSE, dtype="int8", activations=activations, smooth=smooth)  # type: ignore[arg-type]
        demands = step.demands()
        statistics = calibrate(checkpoint, text("calibration", 16), demands) if demands else None
        rounded = model.clone()
        step.run(rounded, Context(CPU, statistics))
        session, operators = loaded(rounded, tmp_path / str(smooth))
        assert "MatMulIntegerToFloat" in operators
        assert "MatMul" not in operators
        klds[smooth] = TextLoss(runs).measure(lambda: plain, session, 1e-9).kld_mean
    print(f"{activations}: KLD {klds[False]:.4f} plain, {klds[True]:.4f} smoothed")
    assert klds[False] > collapsed
    assert klds[True] < smoothed


def test_products_do_not_saturate_on_processors_without_vnni() -> None:
    assert "session.x64quantprecision" not in engine.session_options(1).entries
    assert engine.session_options(1, exact_int8=True).entries["session.x64quantprecision"] == "1"
