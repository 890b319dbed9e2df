"""The architecture sweep: its tiny checkpoints are valid, and its driver tells outcomes apart."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.trace import trace

from ..sweep import compare, encoders, render, run, shapes, shrink

ROOT = Path(__file__).parents[2]

RIGHT = ("decoder", "")
# Every mechanism that a model can bring, once: type → kind, and why it is refused ("": it is right).
TWENTY = {
    "llama": RIGHT,
    "qwen2": RIGHT,  # biases, windows from some layer on
    "qwen3": RIGHT,  # norms of queries and keys
    "mistral": RIGHT,  # window
    "gemma3_text": RIGHT,  # alternating windows, two rotary tables
    "gpt2": RIGHT,  # learned positions, [K, N] weights
    "gpt_neox": RIGHT,
    "bloom": RIGHT,  # ALiBi
    "falcon": RIGHT,
    "phi3": RIGHT,  # packed projections
    "gpt_oss": RIGHT,  # experts, sinks, YaRN
    "mixtral": RIGHT,
    "qwen3_moe": RIGHT,
    "deepseek_v3": RIGHT,  # latent attention, groups of experts
    "qwen3_next": RIGHT,  # linear attention
    "codegen": RIGHT,  # its own attention
    "mamba": RIGHT,  # no attention at all
    "openai-gpt": ("decoder", "no layer caches keys and values or a state"),
    "llama4_text": RIGHT,  # chunks, layers without positions, experts whose input is scaled
    "dbrx": RIGHT,  # experts that loop
    "longcat_flash": RIGHT,  # experts that hand on their tokens
    "minimax": RIGHT,  # lightning attention
    "deepseek_v32": RIGHT,  # an indexer that chooses every token
    "bert": ("encoder-only", "it is an encoder, not a decoder"),
    "bart": ("encoder-decoder", "it is an encoder-decoder"),
}
# What other tests trace models like, or is like others of the twenty.
SLOW = {
    "llama",
    "qwen2",
    "falcon",
    "phi3",
    "deepseek_v3",
    "qwen3_moe",
    "mixtral",
    "qwen3_next",
    "codegen",
    "mistral",
    "gpt_neox",
    "dbrx",
    "longcat_flash",
    "deepseek_v32",
}
# transformers cannot even make their default configuration
IMPOSSIBLE = {"gemma4_assistant"}
TABLE = ROOT / "docs/architectures.md"


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=pytest.mark.slow if each in SLOW else () if each == "qwen3" else pytest.mark.thorough)
        for each in TWENTY
    ],
)
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its models
def test_a_type_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    shrink.write(model_type, tmp_path)
    kind, reason = TWENTY[model_type]

    outcome = compare.compare(model_type, tmp_path)

    assert outcome.kind == kind
    assert outcome.outcome == ("refused" if reason else "right"), outcome.reason
    assert reason in outcome.reason
    assert outcome.spread == pytest.approx(shrink.SPREAD, rel=0.35)
    assert sum(entry.size_bytes for entry in Checkpoint.open(tmp_path).tensors.values()) < 4_000_000


def _outcomes() -> dict[str, str]:
    """Read the table: what became of each type."""
    table = TABLE.read_text(encoding="utf-8").partition(f"\n{render.ENCODERS}\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1] for row in rows if row[0] in shrink.types()}


def _outcomes_of_encoders() -> dict[str, str]:
    """Read the table of encoders: what became of each type in each role."""
    table = render.encoders_of(TABLE.read_text(encoding="utf-8"))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    rows = [row for row in rows if len(row) >= 6 and row[0] != "type"]
    return {f"{row[0]}@{role}": row[at] for row in rows for role, at in (("embedder", 1), ("reranker", 3)) if row[at]}


def test_the_table_of_encoders_names_every_type_and_no_bug() -> None:
    found = _outcomes_of_encoders()
    assert found.keys() == {*encoders.roles()}
    assert set(found.values()) <= {"right", "refused", "transformers-fails"}
    assert sum(outcome == "right" for outcome in found.values()) >= 80


def test_the_table_of_architectures_names_every_type_and_no_bug() -> None:
    outcomes = _outcomes()

    assert sorted(outcomes) == sorted(shrink.types())
    assert set(outcomes.values()) <= {"right", "refused", "transformers-fails"}
    assert sum(outcome == "right" for outcome in outcomes.values()) >= 135
    larger = [row.split(" | ")[3:5] for row in TABLE.read_text(encoding="utf-8").splitlines() if " | right | " in row]
    assert not {cell for cells in larger for cell in cells} & set(render.BUGS)


@pytest.mark.filterwarnings("ignore")
def test_every_type_has_a_tiny_configuration() -> None:
    failed = set()
    for model_type in shrink.types():
        try:
            text = shrink.config(model_type).get_text_config(decoder=True)
        except Exception:  # noqa: BLE001  # what its class raises
            failed.add(model_type)
            continue
        assert text.vocab_size <= shrink.VOCABULARY, model_type
    assert failed == IMPOSSIBLE


@pytest.mark.parametrize(
    "model_type", ["gemma3_text", "qwen3_next", "deepseek_v32", "llama4_text", "gpt_oss", "smollm3"]
)
def test_every_kind_of_layer_survives(model_type: str) -> None:
    tiny, whole = shrink.config(model_type), CONFIG_MAPPING[model_type]()

    compared = [name for name, value in vars(whole).items() if _is_per_layer(value, whole.num_hidden_layers)]
    assert compared
    for name in compared:
        assert len(getattr(tiny, name)) == tiny.num_hidden_layers >= shrink.LAYERS
        assert set(map(str, getattr(tiny, name))) == set(map(str, getattr(whole, name)))


def _is_per_layer(value: object, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers and len(set(map(str, value))) < layers


def test_windows_and_groups_are_small_and_uneven() -> None:
    config = shrink.config("gemma3_text")

    assert config.sliding_window == shrink.WINDOW < min(max(prompts) for prompts in compare.SCHEDULES.values())
    assert config.num_attention_heads > config.num_key_value_heads > 1


def test_original_context_of_rope_scaling_is_within_the_long_prompt() -> None:
    parameters = shrink.config("gpt_oss").rope_parameters

    assert parameters["rope_type"] == "yarn"
    assert parameters["original_max_position_embeddings"] < max(compare.SCHEDULES["long"])


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        shrink.write("llama", tmp_path / folder)

    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    shrink.write("llama", folder)
    return folder


def test_right_graph_is_right(llama: Path) -> None:
    outcome = compare.compare("llama", llama)

    assert outcome.outcome == "right"
    assert outcome.kind == "decoder"
    assert outcome.difference is not None
    assert 0 < outcome.difference <= compare.TOLERANCE
    assert set(outcome.differences) == set(compare.SCHEDULES)
    assert outcome.nodes
    assert outcome.operators["llmforge::Attention"] == shrink.LAYERS


def test_wrong_graph_is_wrong(llama: Path) -> None:
    def slightly_wrong(checkpoint: Checkpoint) -> ir.Model:
        graph = trace(checkpoint)
        attention = next(node for node in graph.graph if node.op_type == "Attention")
        attention.attributes["window"] = ir.AttrInt64("window", 30)  # only the prompt beyond it can tell
        return graph

    outcome = compare.compare("llama", llama, slightly_wrong)

    assert outcome.outcome == "wrong"
    assert "long" in outcome.reason
    assert outcome.differences["one"] <= compare.TOLERANCE < outcome.differences["long"]


def test_refusal_keeps_its_reason(llama: Path) -> None:
    def refuse(checkpoint: Checkpoint) -> ir.Model:
        raise UnsupportedError("architecture 'X' cannot be compiled: its attention is unheard of")

    outcome = compare.compare("llama", llama, refuse)

    assert (outcome.outcome, outcome.difference) == ("refused", None)
    assert "unheard of" in outcome.reason


def _traceback(model_type: str) -> dict[str, Any]:
    raise KeyError(f"/tmp/sweep-{model_type}-a1b2c3d4/config.json")


def _crash(model_type: str) -> dict[str, Any]:
    os._exit(13)


def _hang(model_type: str) -> dict[str, Any]:
    time.sleep(600)
    return {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("work", "outcome", "reason"),
    [
        (_traceback, "traceback", "KeyError: 'config.json'"),
        (_crash, "crash", "code 13"),
        (_hang, "timeout", "no result after 1 s"),
    ],
)
def test_one_bad_type_is_an_outcome(work: run.Job, outcome: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))  # where the process that runs `work` finds this module
    record = run.run_one("llama", work, limit_s=1.0 if outcome == "timeout" else 60.0)

    assert record["model_type"] == "llama"
    assert record["outcome"] == outcome
    assert reason in record["reason"]
    if outcome == "traceback":
        assert "test_sweep.py" in record["where"]


def test_results_are_kept_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def one(model_type: str, work: run.Job) -> run.Record:
        assert work is run.job
        ran.append(model_type)
        return {"model_type": model_type, "outcome": "right", "reason": "", "difference": 2e-6, "nodes": 50}

    monkeypatch.setattr(run, "run_one", one)
    monkeypatch.setattr(shrink, "types", lambda: ["bloom", "llama", "mpt"])
    out = tmp_path / "sweep.json"
    out.write_text(json.dumps({"llama": {"model_type": "llama", "outcome": "refused", "reason": "old"}}))

    assert run.main(["--out", str(out), "--table", str(tmp_path / "architectures.md")]) == 0

    assert sorted(ran) == ["bloom", "mpt"]
    assert set(json.loads(out.read_text())) == {"bloom", "llama", "mpt"}
    assert json.loads(capsys.readouterr().out) == {"refused": 1, "right": 2}
    assert "| llama | refused |  |  |  |  | old |" in (tmp_path / "architectures.md").read_text()
    run.main(["--out", str(out), "--only", "llama"])
    assert ran[-1] == "llama"


def test_table_escapes_reasons() -> None:
    text = render.table({"x": {"outcome": "refused", "reason": "a|b\nc", "difference": None, "nodes": None}})

    assert "| x | refused |  |  |  |  | a\\|b c |" in text
    assert "| refused | 1 |" in text


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_an_encoder_with_attention_of_its_own_is_right_or_refused() -> None:
    record = encoders.job("mpnet@reranker")
    assert record["outcome"] == "right", record["reason"]
    assert record["difference"] < compare.TOLERANCE


def test_the_table_of_encoders_stands_behind_that_of_decoders() -> None:
    records = {
        "x@embedder": {"model_type": "x@embedder", "outcome": "right", "difference": 1e-6},
        "x@reranker": {"model_type": "x@reranker", "outcome": "refused", "reason": "a|b"},
    }
    document = render.with_encoders("# Architectures\n\nfirst\n", records)
    assert document.startswith("# Architectures\n\nfirst\n\n## Encoders\n")
    assert "| x | right | 1.0e-06 | refused |  | a\\|b |" in document
    assert render.with_encoders(document, records) == document
    assert render.packaged(document) == {}
    assert document.endswith(render.encoders_of(document))


def test_types_refused_as_causal_models_that_are_right_as_encoders_are_counted() -> None:
    causal = {"x": {"outcome": "right"}, "y": {"outcome": "refused", "reason": "r"}, "z": {"outcome": "refused"}}
    records = {
        f"{name}@embedder": {"model_type": f"{name}@embedder", "outcome": outcome}
        for name, outcome in (("x", "right"), ("y", "right"), ("z", "refused"))
    }
    document = render.with_encoders(render.table(causal), records)
    assert "1 are right here, most of them encoders (y): 2 of the 3 types are compiled" in document
    assert render.with_encoders(document, records) == document


def test_every_page_counts_what_the_sweeps_found() -> None:
    outcomes = list(_outcomes().values())
    right, fail = outcomes.count("right"), outcomes.count("transformers-fails")
    found = re.search(
        r"causal language models, (\d+) are right here.*?: (\d+) of the 189 types", TABLE.read_text("utf-8")
    )
    assert found is not None
    as_encoders, compiled = map(int, found.groups())
    assert compiled == right + as_encoders >= 155
    refused = len(outcomes) - compiled - fail
    for page in ("README.md", "docs/comparison.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"{right} compile" in text, page
        assert f"{as_encoders} more" in text, page
        assert f"{refused} are refused" in text, page


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_whole_sweep_of_encoders(tmp_path: Path) -> None:
    out = tmp_path / "encoders.json"
    encoders.main(["--out", str(out), "--jobs", "2"])
    records: dict[str, run.Record] = json.loads(out.read_text())
    assert {name for name, record in records.items() if record["outcome"] in render.BUGS} == set()
    assert {name: record["outcome"] for name, record in records.items()} == _outcomes_of_encoders()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_whole_sweep(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    run.main(["--out", str(out), "--jobs", "2"])
    records: dict[str, run.Record] = json.loads(out.read_text())

    bad = {name: record for name, record in records.items() if record["outcome"] in render.BUGS}
    assert not bad
    assert {name: record["outcome"] for name, record in records.items()} == _outcomes()
    for name, record in records.items():
        if record["kind"] in ("encoder-only", "encoder-decoder"):
            assert record["outcome"] == "refused", name


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3_moe", "deepseek_v3", "mamba2", "gpt_neo", "gemma3n_text", "dots3_note"]
)
def test_larger_shapes_are_made_by_rule(model_type: str) -> None:
    tiny, wide, deep = (shrink.config(model_type, shapes.Shape(name)).get_text_config() for name in shapes.SHAPES)

    assert (wide.hidden_size, deep.hidden_size) == (2 * tiny.hidden_size, 3 * tiny.hidden_size)
    assert (wide.num_hidden_layers, deep.num_hidden_layers) == (tiny.num_hidden_layers, 2 * tiny.num_hidden_layers)
    for name, factor in (("num_attention_heads", 3), ("num_experts", 3), ("n_routed_experts", 3), ("head_dim", 1)):
        if type(count := getattr(tiny, name, None)) is int and count > 0:
            assert getattr(deep, name) == factor * count, name
    for made in (wide, deep):
        assert made.vocab_size == tiny.vocab_size
        if isinstance(kinds := getattr(made, "layer_types", None), list):
            assert len(kinds) == made.num_hidden_layers


def test_a_type_in_a_larger_shape_is_a_row_of_its_own_in_the_records_and_none_in_the_table() -> None:
    right = {"model_type": "llama", "outcome": "right", "difference": 1e-6, "nodes": 50}
    records = {
        "llama": right,
        "llama@wide": {**right, "model_type": "llama@wide", "difference": 2e-6},
        "llama@deep": {**right, "model_type": "llama@deep", "outcome": "wrong", "difference": 3.0},
    }
    table = render.table(records)
    assert "| right | 1 |" in table
    assert "| llama | right | 1.0e-06 | 2.0e-06 | wrong | 50 |  |" in table
    assert "1 are right with heads twice as wide" in table
    assert "0 with twice the layers" in table
    assert render.packaged(table) == {"llama": ""}


def test_every_refusal_of_the_table_says_what_is_needed() -> None:
    rows = render.packaged(TABLE.read_text())
    refused = {name: reason for name, reason in rows.items() if "cannot be compiled" in reason or "gives no" in reason}
    assert refused
    assert [name for name, reason in refused.items() if "needed: " not in reason] == []
