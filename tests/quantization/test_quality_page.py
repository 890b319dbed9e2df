"""benchmarks/quality.py: rows that can be built, sizes off a report, table and plot of docs/quantization-results.md."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import benchmarks.quality as page
from llmforge.passes.quantize_kv_cache import QuantizeKvCache
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.recipe import Recipe
from llmforge.rewrite import options

PEERS = {
    "small": {"linear_bits": 4.5, "all_bits": 5.0, "kld": 0.03, "kld_ci95": [0.02, 0.04]},
    "small, weights only": {"linear_bits": 4.5, "all_bits": 5.0, "kld": 0.02, "kld_ci95": [0.02, 0.02]},
    "embedding as it was": {"linear_bits": 4.5, "all_bits": 12.0, "kld": 0.01, "kld_ci95": [0.01, 0.01]},
    "a cache": {"linear_bits": 16.0, "kld": 0.001, "kld_ci95": [0.001, 0.001]},
}
MEASURED = {"linear_bits": 4.2, "bits": 4.69, "kld": 0.005, "low": 0.004, "high": 0.006}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page, and peers; what is measured goes beside them."""
    (tmp_path / "page.md").write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    (tmp_path / "peers.json").write_text(json.dumps(PEERS))
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "PLOT", tmp_path / "plot.svg")
    return tmp_path


def run(files: Path, monkeypatch: pytest.MonkeyPatch, *given: str) -> list[str]:
    """Run the script with builds that are only named."""
    built: list[str] = []

    def build(name: str, row: page.Recipe, work: Path) -> dict[str, float]:
        built.append(name)
        return MEASURED

    monkeypatch.setattr(page, "build", build)
    monkeypatch.setattr("sys.argv", ["quality", str(files / "peers.json"), "--work", str(files / "work"), *given])
    page.main()
    return built


@pytest.mark.parametrize("name", page.OURS)
def test_every_row_has_options_that_passes_take(name: str) -> None:
    row = page.OURS[name]
    step = options.make(QuantizeWeights, {**row.weights, "budget": {"kld_mean": 0.1}})
    assert isinstance(step, QuantizeWeights)
    assert not row.portable or step.scales == "fp16"
    if row.kv is not None:
        assert options.make(QuantizeKvCache, {**row.kv, "budget": {"kld_mean": 0.1}})


def test_bits_are_those_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(name: str, size_bytes: int, dtype: str = "uint8") -> dict[str, Any]:
        return {"name": name, "dtype": dtype, "tensors": 1, "size_bytes": size_bytes}

    linears, others = page.LINEAR_PARAMETERS, 10**6
    report = {
        "quality": {"kld_mean": {"value": 0.01, "low": 0.009, "high": 0.011}, "tokens": 7},
        "checkpoint": {"parameters": linears + others},
        "engine": {
            "weights": [
                stored("model.layers.*.mlp.down_proj.weight.codes", linears // 2),
                stored("model.layers.*.mlp.down_proj.weight.scales", linears // 16, "float16"),
                stored("model.embed_tokens.weight.groups", others),
                stored("model.embed_tokens.weight.codes.row_shape", 24, "int64"),
                stored("rotary.cos", 10**6, "float"),
                stored("past_key_values.*.key.scale", 10**6, "float"),
            ],
            "files": [{"name": "model.onnx", "size_bytes": 5}, {"name": "model.onnx.data", "size_bytes": 7}],
        },
        "build": {"seconds": 2.0, "cpu_seconds": 3.0},
    }
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, json.dumps({"artifact": "there", "report": report}))

    monkeypatch.setattr(subprocess, "run", run)
    found = page.build("auto 4.7", page.OURS["auto 4.7"], tmp_path)
    recipe = Recipe.load(Path(commands[0][4]))
    assert [step.name for step in recipe.passes][-3:] == ["quantize-weights", "quantize-kv-cache", "cpu-kernels"]
    assert found["linear_bits"] == 4.5
    assert found["bits"] == pytest.approx((4.5 * linears + 8 * others) / (linears + others))
    assert (found["kld"], found["low"], found["high"]) == (0.01, 0.009, 0.011)
    assert found["files_bytes"] == 12


def test_rows_are_built_once_and_stand_by_size_beside_peers(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(files, monkeypatch) == list(page.OURS)
    assert run(files, monkeypatch) == []
    assert run(files, monkeypatch, "auto 4.7") == ["auto 4.7"]
    before, table, after = page.PAGE.read_text().partition("|format|")[0], page.PAGE.read_text(), "\nafter\n"
    assert before.startswith("before\n")
    assert table.endswith(after)
    assert "old" not in table
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert [row for row in rows if "small" in row] == ["|small|4.50|5.00|30.00 ± 10.00|"] == rows[-1:]
    assert "|**auto 4.7**|4.20|4.69|5.00 ± 1.00|" in rows
    assert len(rows) == 1 + len(page.OURS)


def test_nothing_is_built_to_write(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(files, monkeypatch, "auto 5.2") == ["auto 5.2"]
    assert run(files, monkeypatch, "--write") == []
    assert page.PAGE.read_text().count("**") == 2


def test_the_plot_has_every_row_in_its_place() -> None:
    rows = [
        page.Row("small & coarse", 4.5, 5.0, 0.03, 0.02, 0.04),
        page.Row("large", 8.0, 8.0, 0.001, 0.0009, 0.0011, ours=True),
        page.Row("beyond", 8.0, 11.0, 0.001, 0.0009, 0.0011),
    ]
    drawn = ElementTree.fromstring(page.plot(rows))
    svg = "{http://www.w3.org/2000/svg}"
    small, large = ([float(dot.get(at, "")) for at in ("cx", "cy")] for dot in drawn.iter(f"{svg}circle"))
    assert small[0] < large[0]  # fewer bits stand left, a larger KLD above
    assert small[1] < large[1]
    titles = [str(title.text) for title in drawn.iter(f"{svg}title")]
    assert [title.partition(":")[0] for title in titles] == ["small & coarse", "large"]


def test_the_best_of_the_others_has_less_kld_the_more_bits_it_takes() -> None:
    rows = [page.Row(name, 4.0, bits, kld, kld, kld) for name, bits, kld in FRONT]
    assert [row.name for row in page.least(rows)] == ["a", "c", "e"]


FRONT = [("d", 6.0, 0.02), ("c", 5.0, 0.01), ("a", 4.0, 0.03), ("b", 4.5, 0.04), ("e", 8.0, 0.001)]
