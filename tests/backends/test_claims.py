"""What README, docs and recipes say of servers of others: no more than the table has (`servers`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from llmforge.backends.compressed_tensors import servers
from llmforge.backends.compressed_tensors.servers import CACHES, EXPERTS, SERVERS, FormatName, Row, ServerName
from llmforge.planning import request
from llmforge.planning.render import Planned

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").glob("*.yaml"))]
NAMES: dict[str, ServerName] = {"vLLM": "vLLM on GPUs", "SGLang": "SGLang", "TensorRT-LLM": "TensorRT-LLM"}
FORMATS = {"int4": "int4", "int8": "int8", "fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8": "mxfp8"}
LOADS = re.compile(r"\b(loads?|reads?|serves?|takes?|quantize for)\b")
NOT = re.compile(r"\b(not|no|none|refused?|refuses|alone|only|fail|never|cannot|expected|ends?)\b", re.IGNORECASE)


def claims() -> list[tuple[str, str, ServerName, str]]:
    """Find sentences that say of a server that it loads a format: page, sentence, server and codes."""
    found = []
    for page in PAGES:
        text = re.sub(r"^#\s", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for sentence in re.split(r"(?<=[.;:])\s|\n\n|\n[-|]", text.replace("`", "")):
            if LOADS.search(sentence) and not NOT.search(sentence):
                codes = [each for each in FORMATS if re.search(rf"\b{each}\b", sentence, re.IGNORECASE)]
                for name in (each for each in NAMES if each in sentence):
                    found += [(page.name, sentence, NAMES[name], FORMATS[each]) for each in codes]
    return found


@pytest.mark.parametrize(("page", "sentence", "server", "codes"), claims())
def test_a_server_is_said_to_load_what_the_table_says(page: str, sentence: str, server: ServerName, codes: str) -> None:
    rows = {name: row for name, row in SERVERS.items() if name.partition("-")[0] == codes}
    assert any(row[server].known in {"run", "read"} for row in rows.values()), f"{page}: {sentence}"


def test_there_are_claims_to_hold() -> None:
    assert {server for *_, server, _ in claims()} == set(NAMES.values())


@pytest.mark.parametrize("row", [*SERVERS.values(), *EXPERTS.values(), *CACHES.values()])
def test_refusals_have_a_reason_and_no_server_was_run_but_on_cpus(row: Row) -> None:
    assert list(row) == list(servers.VERSIONS)
    for server, loads in row.items():
        assert (loads.known in {"refused", "not known"}) == bool(loads.why)
        assert loads.known != "run" or server == "vLLM on CPUs"
        assert server != "vLLM on CPUs" or loads.known in {"run", "refused"}


def test_experts_and_caches_are_of_formats_that_are_written() -> None:
    assert set(EXPERTS) <= set(SERVERS)
    refused = servers.described(frozenset({"int4"}), experts=frozenset({"int4"})).partition("refused by: ")[2]
    assert "vLLM on CPUs" in refused
    assert "vLLM on CPUs" in servers.described(frozenset({"int4"})).partition(";")[0]
    assert servers.TRUNCATES not in servers.described(frozenset({"fp8-per_token"}))
    assert servers.described(frozenset({"fp8-per_token"}), caches=True).endswith(f"; {servers.TRUNCATES}")


def test_a_plan_says_which_servers_load_the_file(tmp_path: Path) -> None:
    """Of all passes of a recipe together, by the method that it names, as `described` has it."""
    checkpoint = ROOT / "tests" / "data" / "docs-llama-7m"
    fp8, int4 = "channels: {dtype: fp8, activations: per_token, head: false", "weights: {bits: 4, embedding_bits: 16"
    for step, method, wanted in (
        (fp8, "compressed-tensors", "fp8-per_token"),
        (fp8, "modelopt", "fp8-per_token-modelopt"),
        (int4, "compressed-tensors", "int4"),
    ):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            f"schema: 1\nname: there\ncheckpoint: {checkpoint}\ntarget: h100-sxm\n"
            f"engine: {{backend: compressed-tensors, max_context: 64, quant_method: {method}}}\n"
            f"passes:\n  - quantize-{step}, budget: {{kld_mean: 1.0}}}}\n"
            f"calibration: {{data: {ROOT}/tests/data/calibration.jsonl, samples: 2, length: 64}}\n"
            f"validation: {{quality: {{data: {ROOT}/tests/data/evaluation.jsonl, context: 64}}}}\n"
        )
        [planned] = request.answer(recipe, request.PlanRequest())
        assert isinstance(planned, Planned)
        says = servers.described(frozenset({cast(FormatName, wanted)}))
        assert f"servers that load the file: {says}" in planned.plan.notes


@pytest.mark.parametrize(
    ("linears", "experts", "caches", "method", "says"),
    [
        ({"int4"}, {"int4"}, False, "compressed-tensors", "refused by: vLLM on CPUs 0.32.0, TensorRT-LLM of 2026-11"),
        (set(), {"int8-per_token"}, False, "compressed-tensors", "refused by: vLLM on CPUs 0.32.0, SGLang 0.5.23"),
        ({"nvfp4"}, set(), False, "compressed-tensors", "not known of: TensorRT-LLM of 2026-11"),
        ({"fp8-per_token"}, set(), True, "compressed-tensors", "not known of: TensorRT-LLM of 2026-11"),
        ({"int6"}, set(), False, "compressed-tensors", None),
        (set(), set(), True, "compressed-tensors", None),
    ],
)
def test_all_that_passes_write_counts(
    linears: set[str], experts: set[str], caches: bool, method: str, says: str | None
) -> None:
    found = servers.planned(frozenset(linears), frozenset(experts), caches=caches, quant_method=method)
    assert found is None if says is None else says in str(found)
