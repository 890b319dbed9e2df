"""`llmforge init` and `llmforge up`: what they write, refuse and run."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer

from llmforge import recipes, targets
from llmforge.base import extras
from llmforge.base.errors import (
    BudgetExceeded,
    CheckpointError,
    ForgeError,
    GateFailed,
    GateInconclusive,
    UnsupportedError,
)
from llmforge.calibration import probe
from llmforge.checkpoint import documents
from llmforge.cli import cli, parameters, planning, starting
from llmforge.compile import probing, trial
from llmforge.doctor import kept
from llmforge.measure import ceilings, machine
from llmforge.metrics import units
from llmforge.planning import request
from llmforge.planning.choice import UNTRIED, Probed, ProbedDrafts
from llmforge.recipe import Recipe

from ..models import zoo_classic
from ..planning.test_starting import measured

PROBE, TRIAL = probing.probe, trial.run  # which the fixture puts away
SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "measured_here", measured)
    monkeypatch.setattr(probing, "probe", lambda *_, **__: Probed(why="this is a test"))
    monkeypatch.setattr(trial, "run", lambda *_, **__: UNTRIED)
    return tmp_path


def invoke(*args: str | Path) -> Result:
    result = CliRunner().invoke(cli, [*map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_embedders_and_rerankers_get_recipes_of_their_own(home: Path) -> None:
    result = invoke("init", SAMPLE.parent / "docs-embedder-1m")
    assert (result.exit_code, result.stdout) == (0, "docs-embedder-1m.yaml\n")
    assert result.stderr.endswith(
        "next: llmforge plan docs-embedder-1m.yaml\n      llmforge build docs-embedder-1m.yaml\n"
    )
    assert not (home / "text").exists(), "nothing is calibrated"
    embedder = Recipe.load(home / "docs-embedder-1m.yaml")
    int8 = ["pack-qkv", "pack-gate-up", "quantize-channels", "cpu-kernels"]
    assert (embedder.engine.max_context, [each.name for each in embedder.passes]) == (256, int8)
    assert set(embedder.gates) == {"retrieval.cosine_mean", "retrieval.ndcg_10"}
    assert invoke("init", SAMPLE.parent / "docs-reranker-1m", "--name", "second").exit_code == 0
    assert set(Recipe.load(home / "second.yaml").gates) == {"retrieval.spearman", "retrieval.ndcg_10"}
    refused = invoke("init", SAMPLE.parent / "docs-embedder-1m", "--target", "l4", "-o", "l4.yaml")
    assert refused.exit_code == UnsupportedError.exit_code
    assert "compiled for CPUs" in refused.stderr
    assert invoke("init", SAMPLE.parent / "docs-embedder-1m", "--engine", "gguf", "-o", "g.yaml").exit_code == 2
    assert not list(home.glob("[lg]*.yaml"))


def test_a_causal_model_becomes_a_reranker_where_that_is_asked_for(home: Path) -> None:
    folder = shutil.copytree(SAMPLE, home / "answers")
    refused = invoke("init", folder, "--reranker", "qwen3")
    assert refused.exit_code == CheckpointError.exit_code
    assert "its tokenizer has no tokens 'yes' and 'no'" in refused.stderr
    assert not list(home.glob("*.yaml"))
    added = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added.add_tokens(["yes", "no"])
    added.save(str(folder / "tokenizer.json"))
    assert invoke("init", folder, "--reranker", "qwen3").exit_code == 0
    found = Recipe.load(home / "answers.yaml")
    assert found.reranker == "qwen3"
    assert set(found.gates) == {"retrieval.spearman", "retrieval.ndcg_10"}
    embedder = invoke("init", SAMPLE.parent / "docs-embedder-1m", "--reranker", "qwen3")
    assert embedder.exit_code == UnsupportedError.exit_code
    assert "only a causal language model" in embedder.stderr


def test_a_classifier_is_not_held_to_an_order(home: Path) -> None:
    folder = shutil.copytree(SAMPLE.parent / "docs-reranker-1m", home / "classifier")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "id2label": {"0": "bad", "1": "fair", "2": "good"}}))
    assert invoke("init", folder).exit_code == 0
    found = Recipe.load(home / "classifier.yaml")
    assert (dict(found.gates), found.validation.retrieval) == ({}, None)


def test_a_recipe_and_its_text(home: Path) -> None:
    result = invoke("init", SAMPLE)
    assert (result.exit_code, result.stdout) == (0, "docs-llama-7m.yaml\n")
    assert "llmforge build docs-llama-7m.yaml" in result.stderr
    recipe = Recipe.load(home / "docs-llama-7m.yaml")
    assert recipe.checkpoint.resolve() == SAMPLE
    names = [f"{kind}{role}.jsonl" for role in ("calibration", "evaluation") for kind in ("chat-", "")]
    for name in (*names, "NOTICE"):
        assert (home / "text" / name).read_bytes() == (recipes.TEXT / name).read_bytes()
    assert recipe.calibration is not None
    assert recipe.validation.quality is not None
    read = [path.name for path in (*recipe.calibration.data, *recipe.validation.quality.data)]
    assert read == names
    chats = {name: dict(gate.limits) for name, gate in recipe.gates.items() if name.startswith("behaviour.")}
    assert chats == {
        "behaviour.length_change": {"max": 1}, "behaviour.answer_odds": {"drop_max": 0.5},
        "behaviour.end_shift": {"max": 1},
    }  # fmt: skip
    assert recipe.validation.behaviour is not None
    planned = invoke("plan", "docs-llama-7m.yaml")
    assert planned.exit_code == 0
    assert "weights int4" in planned.stdout


def test_what_is_there_is_not_replaced(home: Path) -> None:
    assert invoke("init", SAMPLE).exit_code == 0
    (home / "docs-llama-7m.yaml").write_text("mine")
    again = invoke("init", SAMPLE)
    assert again.exit_code == 2
    assert "--force" in again.stderr
    assert (home / "docs-llama-7m.yaml").read_text() == "mine"
    assert invoke("init", SAMPLE, "--force").exit_code == 0
    (home / "text" / "evaluation.jsonl").write_text("{}")
    other = invoke("init", SAMPLE, "-o", "other.yaml")
    assert other.exit_code == 2
    assert "differs from the text that ships with llmforge" in other.stderr
    (home / "docs-llama-7m.yaml").unlink()
    up = invoke("up", SAMPLE)
    assert (up.exit_code, up.stdout) == (2, "")
    assert "hint: run the command in another folder, or give your own text to `llmforge init`" in up.stderr
    assert not (home / "other.yaml").exists()


def test_the_recipe_predicts_what_plan_does_but_for_times_of_this_machine(home: Path) -> None:
    assert invoke("init", SAMPLE).exit_code == 0
    (line,) = (each for each in (home / "docs-llama-7m.yaml").read_text().splitlines() if "# Predicted: " in each)
    cost = request.build_of(Recipe.load(home / "docs-llama-7m.yaml"))
    assert cost is not None
    assert f"# Predicted: {units.size(cost.memory_bytes)} of memory in a build" in line
    assert re.search(r"\d s\b|\bmin\b", line) is None


def test_text_of_ones_own(home: Path) -> None:
    for name in ("a b.jsonl", "c.jsonl"):
        (home / name).write_text(f'{{"id": "{name}", "text": "{name}"}}\n')
    assert invoke("init", SAMPLE, "--calibration", "a b.jsonl").exit_code == 2
    (home / "sub").mkdir()
    result = invoke("init", SAMPLE, "--calibration", "a b.jsonl", "--evaluation", "c.jsonl", "-o", "sub/r.yaml")
    assert result.exit_code == 0, result.stderr
    recipe = Recipe.load(home / "sub" / "r.yaml")
    assert recipe.calibration is not None
    assert [path.resolve() for path in recipe.calibration.data] == [home / "a b.jsonl"]
    assert not (home / "sub" / "text").exists()
    assert "ships with llmforge" not in (home / "sub" / "r.yaml").read_text()


def test_without_a_chat_template_there_are_no_chats(home: Path) -> None:
    shutil.copytree(SAMPLE, home / "mine", ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert invoke("init", "mine").exit_code == 0
    recipe = Recipe.load(home / "mine.yaml")
    assert recipe.calibration is not None
    assert [path.name for path in recipe.calibration.data] == ["calibration.jsonl"]
    assert not (home / "text" / "chat-calibration.jsonl").exists()
    assert recipe.validation.behaviour is None
    assert not [name for name in recipe.gates if name.startswith("behaviour.")]


CHAT = '{"messages": [{"role": "user", "content": "Who?"}]}'


@pytest.mark.parametrize(
    ("calibration", "template", "says"),
    [
        ('{"text": "a"}\n{"text": ', True, "mine.jsonl:2:10: not JSON"),
        ('{"text": "a"}\n{"prompt": "b"}', True, "mine.jsonl:2: neither `text` nor `messages`"),
        ('{"messages": [{"role": "bot", "content": "b"}]}', True, "mine.jsonl:1: messages[0]: role is 'bot'"),
        (CHAT, False, "mine.jsonl:1: a chat, and the checkpoint has no chat template"),
        ('{"text": " held out"}', True, "has the text of calibration document"),
    ],
)
def test_text_is_looked_at_before_anything_is_written(home: Path, calibration: str, template: bool, says: str) -> None:
    shutil.copytree(SAMPLE, home / "m", ignore=None if template else shutil.ignore_patterns("chat_template.jinja"))
    (home / "mine.jsonl").write_text(calibration)
    (home / "held.jsonl").write_text('{"id": "h", "text": "held out"}')
    result = invoke("init", "m", "--calibration", "mine.jsonl", "--evaluation", "held.jsonl")
    assert result.exit_code == 5
    assert says in result.stderr
    assert not (home / "m.yaml").exists()


def test_the_chats_that_ship_are_many_and_do_not_overlap() -> None:
    texts = [documents.read_documents(recipes.TEXT / f"chat-{role}.jsonl") for role in ("calibration", "evaluation")]
    documents.refuse_overlap(*texts)
    every = [chat for text in texts for chat in text]
    assert len(every) >= 60
    assert all(chat.is_unanswered for chat in every)
    # Templates that refuse others exist: the user and the assistant take turns.
    assert all(
        [message["role"] for message in chat.messages] == ["user", "assistant"] * (len(chat.messages) // 2) + ["user"]
        for chat in every
    )
    kinds = {chat.id.split("/")[2].rpartition("-")[0] for chat in every}
    assert kinds >= {"code", "json", "arithmetic", "refusal", "german", "chinese", "tools", "summary", "multi-turn"}
    assert all(chat.tools for chat in every if "/tools-" in chat.id)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("absent",), 5, "no such folder"),
        ((SAMPLE, "--target", "h20"), 2, "did you mean"),
        ((SAMPLE, "--goal", "fast"), 2, "--goal"),
        ((SAMPLE, "--name", "A B"), 2, "--name"),
        ((SAMPLE, "-o", "recipe.txt"), 2, "must end in .yaml"),
        ((SAMPLE, "--target", "h200", "--engine", "tensorrt-rtx"), 6, "SM 9.0"),
    ],
)
def test_each_mistake_writes_nothing(home: Path, args: tuple[Any, ...], code: int, says: str) -> None:
    result = invoke("init", *args)
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    assert says in result.stderr
    assert list(home.iterdir()) == []


@pytest.mark.thorough
def test_the_same_checkpoint_gives_the_same_recipe_and_nothing_is_measured(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a minute measured and kept for plans: also figures that differ by 40 %."""
    monkeypatch.undo()
    monkeypatch.chdir(home)
    monkeypatch.setattr(ceilings, "measure", lambda threads, told: pytest.fail("it measures"))
    written = set()
    for number, factor in enumerate((1.0, 0.6, 1.4)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / f"cache{number}"))
        kept.keep(measured(targets.local(), factor), machine.describe())
        assert kept.of_target(targets.local(), machine.describe()) is not None
        for goal in ("latency", "throughput", "size", "quality"):
            assert invoke("init", SAMPLE, "--goal", goal, "--force").exit_code == 0
            written.add((goal, (home / "docs-llama-7m.yaml").read_bytes()))
    assert len(written) == 4
    assert b"tokens/s" not in b"".join(recipe for _, recipe in written)


def test_formats_are_measured_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens of the calibration text; another init of the checkpoint finds the figures."""
    monkeypatch.setattr(probing, "probe", PROBE)
    monkeypatch.setattr(probing, "TOKENS", ((10**9, 64),))
    monkeypatch.setattr(probing, "LENGTH", 32)
    first = invoke("init", SAMPLE)
    assert first.exit_code == 0, first.stderr
    assert "Measure what formats cost this model" in first.stderr
    text = (home / "docs-llama-7m.yaml").read_text()
    assert "# Measured, KLD on 64 tokens of weights rounded to nearest: 4 bits 0.0" in text
    monkeypatch.setattr(probe, "_measure", lambda *given: pytest.fail("it measures again"))
    assert invoke("init", SAMPLE, "--force").exit_code == 0
    assert (home / "docs-llama-7m.yaml").read_text() == text
    assert invoke("init", SAMPLE, "--force", "--no-probe").exit_code == 0
    assert "easured" not in (home / "docs-llama-7m.yaml").read_text()


def test_what_is_not_measured_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "probe", PROBE)
    monkeypatch.setattr(probing, "TOKENS", ((10**6, 64),))
    result = invoke("init", SAMPLE)
    assert result.exit_code == 0
    assert "note: what formats cost this model was not measured: 0.0068 billion parameters" in result.stderr
    assert "was not measured: 0.0068 billion parameters take too long" in (home / "docs-llama-7m.yaml").read_text()
    monkeypatch.setattr(extras, "missing", lambda extra: ["torch"])
    assert "what builds is not installed" in invoke("init", SAMPLE, "--force").stderr


@pytest.mark.thorough
def test_passes_that_would_find_nothing_are_left_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with a position bias has no kernel: its cache stays; layers have one. The build takes the trace."""
    monkeypatch.setattr(trial, "run", TRIAL)
    zoo_classic.write("bloom", home / "bloom", n_layer=1)
    result = invoke("init", "bloom")
    assert result.exit_code == 0, result.stderr
    names = [step.name for step in Recipe.load(home / "bloom.yaml").passes]
    assert {"quantize-weights", "cpu-kernels"} <= set(names)
    assert "quantize-kv-cache" not in names
    text = (home / "bloom.yaml").read_text()
    assert (
        "  # left out: quantize-kv-cache has no effect here: flash-attention changed no node: transformer.h.0." in text
    )
    again = invoke("init", "bloom", "--force")
    assert "Trace: reused" in again.stderr
    assert (home / "bloom.yaml").read_text() == text


def test_windows_of_a_probe_fit_a_short_context(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "probe", PROBE)
    monkeypatch.setattr(probing, "TOKENS", ((10**9, 64),))
    zoo_classic.write("biogpt", home / "biogpt", num_hidden_layers=1)  # learned positions, 128 of them
    result = invoke("init", "biogpt")
    assert result.exit_code == 0, result.stderr
    assert "# Measured, KLD on " in (home / "biogpt.yaml").read_text()


def test_drafts_are_tried_on_answers_and_second_halves(tmp_path: Path) -> None:
    code = " ".join(f"def first{n}(self): return self.value{n}" for n in range(12))
    file = tmp_path / "text.jsonl"

    def tried(*lines: dict[str, Any]) -> ProbedDrafts | None:
        file.write_text("\n".join(map(json.dumps, lines)))
        return probing.drafts(SAMPLE, file)

    asked = {"role": "user", "content": code}
    copied = tried({"messages": [asked, {"role": "assistant", "content": code}]})
    assert copied is not None
    assert copied.length > 4  # 8 at most
    assert tried({"messages": [asked]}) is None  # nobody has answered
    prose = tried({"text": "Each of these words stands here once, so nothing that was said before comes again."})
    assert prose is not None
    assert (prose.length < 1.5, prose.steps > prose.drafted) == (True, True)
    assert probing.drafts(tmp_path, file) is None  # no checkpoint; what measures formats says so


@pytest.mark.parametrize("folder", ["Meta-Llama_3.1 (8B)", "模型", "x" * 300, "..."])
def test_names_of_folders_become_names(folder: str) -> None:
    from llmforge.artifact.sealed import is_name

    assert is_name(starting.name_of(Path("a") / folder))


@pytest.mark.thorough
def test_up_builds_and_serves(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server itself is another test's; here: that it gets the artifact of the recipe that was written."""
    served: list[dict[str, Any]] = []
    monkeypatch.setattr(starting.serving.serve, "callback", lambda **given: served.append(given))
    shutil.copytree(SAMPLE, home / "mine")
    assert invoke("init", "mine", "--goal", "quality").exit_code == 0
    text = (home / "mine.yaml").read_text()  # a user's own change: little is measured
    (home / "mine.yaml").write_text(text.split("  latency:")[0].replace("max_tokens: 30720", "max_tokens: 1024")
                                   .replace("name: mine", "name: renamed"))  # fmt: skip
    result = invoke("up", "mine", "--port", "0")
    assert result.exit_code == 0, result.stderr
    assert "using the existing recipe mine.yaml" in result.stderr
    [given] = served
    assert given["artifact"].parent == Path("artifacts/renamed")
    assert (given["artifact"] / "manifest.json").is_file()
    assert given["port"] == 0
    assert given["host"] == "127.0.0.1"


@pytest.mark.parametrize(
    "error",
    [
        GateFailed("a gate failed"),
        GateInconclusive("undecided"),
        BudgetExceeded(["a budget"], settings=(), hint="more"),
    ],
    ids=["failed", "inconclusive", "budget"],
)
def test_up_serves_an_embedder_in_fp32_where_int8_does_not_pass(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: ForgeError
) -> None:
    built: list[list[str]] = []
    served: list[dict[str, Any]] = []
    newest = SimpleNamespace(path=home / "artifacts" / "v")
    monkeypatch.setattr("llmforge.artifact.versions.listed", lambda out, name: [newest])
    monkeypatch.setattr(starting.serving.serve, "callback", lambda **given: served.append(given))

    def build(recipe: Path, **given: Any) -> None:
        assert parameters.goes_on(), "`up` itself does what is next"
        built.append([each.name for each in Recipe.load(recipe).passes])
        if "quantize-channels" in built[-1]:
            raise error

    monkeypatch.setattr(starting.building.build, "callback", build)
    (home / "artifacts" / "v").mkdir(parents=True)
    result = invoke("up", SAMPLE.parent / "docs-embedder-1m")
    assert result.exit_code == 0, result.stderr
    lossless = ["fuse-norms", "pack-qkv", "pack-gate-up"]
    assert built == [["pack-qkv", "pack-gate-up", "quantize-channels", "cpu-kernels"], lossless]
    assert "docs-embedder-1m, an embedder, on " in result.stdout
    assert "The least time of a batch" in result.stdout
    assert f"{error.message}\nnot served; wrote docs-embedder-1m.yaml again, in fp32" in result.stderr
    assert len(served) == 1
    assert [each.name for each in Recipe.load(home / "docs-embedder-1m.yaml").passes] == lossless
    # A recipe that was there is used as it is.
    assert invoke("init", SAMPLE.parent / "docs-embedder-1m", "--force").exit_code == 0
    again = invoke("up", SAMPLE.parent / "docs-embedder-1m")
    assert again.exit_code == type(error).exit_code
    assert error.message in again.stderr
    assert (len(built), len(served)) == (3, 1)


def test_a_recipe_that_ships_is_copied(home: Path) -> None:
    done = invoke("init", SAMPLE, "--like", "chat-h100-fp8.yaml", "--target", "h200", "--name", "chat")
    assert (done.exit_code, done.stdout) == (0, "chat.yaml\n")
    recipe = Recipe.load(home / "chat.yaml")
    assert (recipe.name, recipe.checkpoint, recipe.target) == ("chat", SAMPLE, "h200")
    assert recipe.calibration is not None
    assert recipe.calibration.data == (home / "text" / "calibration.jsonl",)
    text = (home / "chat.yaml").read_text()
    assert "fp8 weights and activations" in text
    assert "recipes/" not in text.partition("schema:")[0]


@pytest.mark.parametrize("name", sorted({path.stem for path in recipes.FOLDER.glob("*.yaml")} - {*recipes.OF_ENCODERS}))
def test_a_copy_of_each_recipe_loads(home: Path, name: str) -> None:
    assert invoke("init", SAMPLE, "--like", name).exit_code == 0
    recipe = Recipe.load(home / "docs-llama-7m.yaml")
    files = [recipe.checkpoint, *(Path(task) for task in recipe.validation.tasks or () if task.endswith(".yaml"))]
    sections = recipe.calibration, recipe.validation.quality
    files += [path for each in sections if each is not None for path in each.data]
    assert [file for file in files if not file.exists()] == []
    assert recipe.target == Recipe.load(recipes.FOLDER / f"{name}.yaml").target


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--like", "nothing"], "recipes that do: 70b-h200-int4, "),
        (["--like", "embedder"], "recipes that do: 70b-h200-int4, "),
        (["--like", "t4", "--goal", "size"], "--goal cannot be used"),
    ],
)
def test_a_copy_that_cannot_be_made(home: Path, words: list[str], told: str) -> None:
    done = invoke("init", SAMPLE, *words)
    assert done.exit_code == 2
    assert told in done.stderr
    assert list(home.iterdir()) == []
