"""Quality with everything that can be asked for, of a whole build, against what its engine and its checkpoint say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from llmforge.artifact import Artifact
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.compile.answered import answering
from llmforge.compile.texts import BuildTexts
from llmforge.gates import records
from llmforge.measure import quality
from llmforge.measure.baseline import Baseline
from llmforge.measure.quality import QualityRun
from llmforge.metrics.quality import Quality
from llmforge.recipe import Recipe
from llmforge.runtime.interface import StepInputs
from llmforge.serving import Runner, Sampling, load

from ..models.checkpoints import write_checkpoint

pytestmark = pytest.mark.thorough

WORDS = ("graph", "engine", "pass", "weight", "scale", "token", "cache", "layer", "head", "probe", "gate", "report")
ASKED = {"data": "evaluation.jsonl", "context": 64, "samples": 10, "decode_tokens": 600}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("deep"), random.Random(0)
    write_checkpoint(folder / "tiny-llama", max_position_embeddings=192)
    lines = [{"id": f"page-{i}", "text": f"page {i} " + " ".join(rng.choices(WORDS, k=40))} for i in range(12)]
    (folder / "evaluation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def recipe(folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    weights = {"method": "rtn", "block_size": 32, "budget": {"kld_mean": 5.0}}
    facts = {
        "schema": 1,
        "name": "tiny",
        "checkpoint": "tiny-llama",
        "target": "local",
        "engine": {"max_context": 192, "max_batch": 1, "threads": 1},
        "passes": ["flash-attention", {"quantize-weights": weights}],
        "validation": {"quality": ASKED},
        "gates": {"kld_decode_added": {"max": 0.01}, "greedy_same_32": {"min": 0.0}, "kld_p99": {"max": 5.0}},
    }
    path.write_text(json.dumps({**facts, **changes}))  # JSON is YAML
    return path


@pytest.fixture(scope="module")
def built(folder: Path) -> Path:
    done = CliRunner().invoke(cli, ["build", str(recipe(folder)), "--out", str(folder / "out"), "--quiet"])
    assert done.exit_code in (0, 4), done.output  # that few tokens leave the upper bound of a quantile open
    (path,) = (folder / "out" / "tiny").glob("[0-9a-f]*")
    return path


@pytest.fixture(scope="module")
def measured(built: Path) -> Quality:
    found = records.read(Artifact.open(built)).quality
    assert found is not None
    return found


def windows(folder: Path) -> list[Any]:
    checkpoint = Checkpoint.open(folder / "tiny-llama")
    return BuildTexts(Recipe.load(recipe(folder)), checkpoint, (), answering(), Silent()).evaluation


def kld(p: NDArray[np.float32], q: NDArray[np.float32]) -> NDArray[np.float64]:
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), -1, keepdims=True) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1)


def test_verify_makes_every_figure_again(built: Path, measured: Quality) -> None:
    done = CliRunner().invoke(cli, ["verify", str(built)])
    assert done.exit_code == 0, done.output
    assert {"kld_p999", "top5_agreement", "kld_by_position", "kld_decode_added", "greedy_same_128"} <= set(
        measured.figures
    )


def test_figures_equal_logits_of_both_sides(folder: Path, built: Path, measured: Quality) -> None:
    runner, baseline = load(built, threads=1), Baseline(Checkpoint.open(folder / "tiny-llama"), threads=1)
    cut = windows(folder)
    ours = [runner.logits(window.ids.tolist()) for window in cut]
    theirs = [baseline.logits(window.ids) for window in cut]
    of_all = np.concatenate([kld(p[:-1], q[:-1]) for p, q in zip(theirs, ours, strict=True)])
    figure = measured.figures
    assert figure["kld_mean"].value == pytest.approx(of_all.mean(), abs=1e-6)
    for name, share in (("kld_p90", 0.9), ("kld_p99", 0.99), ("kld_p999", 0.999)):
        assert figure[name].value == pytest.approx(np.quantile(of_all, share), abs=1e-6)
    stepped = []
    decoded = {each.document for each in measured.per_document_decoded}
    assert 8 <= len(decoded) <= 12
    for i, window in enumerate(cut):
        if window.document in decoded and not any(w.document == window.document for w in cut[:i]):
            rows = [runner.logits(window.ids[:end].tolist(), step_tokens=1)[-1] for end in (1, len(window.ids) - 1)]
            whole = runner.logits(window.ids.tolist(), step_tokens=1)
            np.testing.assert_allclose(whole[[0, -2]], rows, atol=1e-5)
            stepped.append(kld(theirs[i][:-1], whole[:-1]))
    assert figure["kld_decode"].value == pytest.approx(np.concatenate(stepped).mean(), abs=1e-6)
    assert abs(figure["kld_decode_added"].value) < 1e-4  # its cache is fp32


def test_answers_equal_two_generations(folder: Path, built: Path, measured: Quality) -> None:
    runner, baseline = load(built, threads=1), Baseline(Checkpoint.open(folder / "tiny-llama"), threads=1)
    prompts = {window.document: window.ids[:32] for window in reversed(windows(folder))}
    assert len(measured.answers) == 10
    differed = 0
    for answer in measured.answers:
        prompt = prompts[answer.document]
        chunks = runner.generate(prompt.tolist(), Sampling(max_tokens=answer.tokens, ignore_eos=True))
        ours = [chunk.token_id for chunk in chunks if chunk.token_id is not None]
        theirs = [step[0] for step in baseline.generate(prompt[None], answer.tokens)]
        differs = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        assert answer.first_difference == (differs[0] if differs else None)
        differed += bool(differs)
    assert differed
    assert len(measured.samples) == 5


class DeadChannel:
    """A session whose cache forgets one channel of every key, behind the step that wrote it."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def step(self, inputs: StepInputs, cache: Any, out: Any = None) -> Any:
        logits = self._session.step(inputs, cache, out)
        ids, past = inputs.ids, inputs.past_lengths
        for name, buffer in cache.buffers.items():
            if name.endswith(".key"):
                buffer[:, :, past[0] : past[0] + ids.shape[1], 3] = 0
        return logits


def test_decode_steps_show_a_planted_error_of_the_cache_that_prefill_does_not(folder: Path, built: Path) -> None:
    sound = load(built, threads=1)
    broken = Runner(DeadChannel(sound.session), sound.config, sound.tokenizer, None)  # type: ignore[arg-type]

    def compare(runner: Runner) -> dict[str, Any]:
        return quality.compare(
            windows(folder),
            lambda ids: sound.logits(ids.tolist()),
            lambda ids: runner.logits(ids.tolist()),
            QualityRun(decode=lambda ids: runner.logits(ids.tolist(), step_tokens=1), decode_tokens=10_000),
        ).figures

    good, bad = compare(sound), compare(broken)
    assert bad["kld_mean"].value == pytest.approx(good["kld_mean"].value, abs=1e-9)
    assert bad["kld_decode_prefill"].value == pytest.approx(good["kld_decode_prefill"].value, abs=1e-9)
    assert good["kld_decode_added"].high < 1e-4  # rounding; this model has random weights and loses little
    assert bad["kld_decode_added"].low > 10 * good["kld_decode_added"].high
