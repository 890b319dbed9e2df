import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_core import to_jsonable_python

from llmforge import passes, recipe
from llmforge.base.errors import DataError, RecipeError, UsageError
from llmforge.base.located_yaml import Source
from llmforge.compile.drafts import facts_of
from llmforge.gates import relaxed
from llmforge.recipe import GateSpec, Recipe
from llmforge.recipe.overrides import apply
from llmforge.recipe.serving import PrefixSpec, ServingSpec
from llmforge.recipes import OF_ENCODERS
from llmforge.rewrite.pass_base import Budget
from llmforge.runtime.config import MOST_DRAFT_TOKENS, SpeculationFacts

from ..samples.sample_passes import REGISTRY, Lay, Squeeze, Tidy

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))


VALID = """\
schema: 1
name: sample
checkpoint: ../model
target: cpu-avx2
engine: {backend: onnxruntime, max_context: 256, max_batch: 4}
calibration: {data: calibration.jsonl, samples: 8, length: 64, seed: 1}
passes:
  - tidy-up
  - lay-ground
  - squeeze-weights: {bits: 8, budget: {kld_mean: 0.01}}
validation:
  quality: {data: evaluation.jsonl, context: 128}
  latency: {prompt_tokens: [32, 128], output_tokens: 16}
gates:
  kld_mean: {max: 0.03}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str = VALID, *overrides: str) -> Recipe:
    loaded = Recipe.load(write(folder, text), overrides)
    loaded.instantiate(REGISTRY)
    return loaded


def replaced(old: str, new: str) -> str:
    assert VALID.count(old) == 1, f"{old!r} stands {VALID.count(old)} times in the sample"
    return VALID.replace(old, new)


def refused(folder: Path, text: str, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == 2
    return caught.value


def test_everything_that_stands_in_the_file_arrives(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.name == "sample"
    assert loaded.target == "cpu-avx2"
    assert loaded.engine.model_dump() == {
        "backend": "onnxruntime", "max_context": 256, "max_batch": 4, "threads": None, "decode_batches": (),
        "cuda_graphs": "require", "deferred": False, "tensor_parallel": 1, "tensorrt": False,
        "kv_cache": None, "quant_method": "compressed-tensors",
    }  # fmt: skip
    assert loaded.calibration is not None
    assert (loaded.calibration.samples, loaded.calibration.length, loaded.calibration.seed) == (8, 64, 1)
    assert [spec.name for spec in loaded.passes] == ["tidy-up", "lay-ground", "squeeze-weights"]
    assert loaded.passes[0].options == {}
    assert loaded.passes[2].options == {"bits": 8, "budget": {"kld_mean": 0.01}}
    assert loaded.passes[2].where == f"{tmp_path}/r.yaml:10:5"
    assert loaded.validation.latency is not None
    assert loaded.validation.latency.prompt_tokens == (32, 128)
    assert loaded.gates["kld_mean"].max == 0.03
    assert loaded.gates["kld_mean"].min is None
    assert loaded.path == tmp_path / "r.yaml"


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    write(folder, VALID)
    loaded = Recipe.load(Path("recipes/r.yaml"))
    assert loaded.checkpoint == tmp_path / "model"
    assert loaded.calibration is not None
    assert loaded.calibration.data == (folder / "calibration.jsonl",)
    absolute = load(folder, replaced("../model", "/models/m"))
    assert absolute.checkpoint == Path("/models/m")


def test_passes_are_made_with_their_options(tmp_path: Path) -> None:
    made = Recipe.load(write(tmp_path, replaced("bits: 8", "bits: 8, layers: [1, 2]"))).instantiate(REGISTRY)
    assert made == (Tidy(), Lay(), Squeeze(budget=Budget(kld_mean=0.01), bits=8, layers=(1, 2)))


# (what stands in the sample, what stands there instead, where, what the message says, the hint)
WRONG: list[tuple[str, str, str, str, str | None]] = [
    ("max_context: 256", "max_contxt: 256", "5:32", "engine.max_contxt: unknown key; allowed: backend, max_context, "
     "max_batch, threads", "did you mean 'max_context'?"),
    ("target: cpu-avx2\n", "target: cpu-avx2\ncolour: red\n", "5:1", "colour: unknown key; allowed: schema, name, "
     "checkpoint", None),
    ("target: cpu-avx2\n", "", "1:1", "target: required key is missing", None),
    ("{backend: onnxruntime, max_context: 256, max_batch: 4}", "{}", "5:1", "engine.max_context: required", None),
    ("engine: {backend: onnxruntime, max_context: 256, max_batch: 4}\n", "", "1:1", "engine: required key is missing; "
     "its keys: backend, max_context", None),
    ("max_batch: 4", "max_batch: four", "5:50", 'engine.max_batch: must be a valid integer, not "four"', None),
    ("max_batch: 4", "max_batch: '4'", "5:50", 'engine.max_batch: must be a valid integer, not "4"', None),
    ("max_batch: 4", "max_batch: true", "5:50", "engine.max_batch: must be a valid integer, not true", None),
    ("max_batch: 4", "max_batch: 4.5", "5:50", "engine.max_batch", None),
    ("max_batch: 4", "max_batch: 0", "5:50", "engine.max_batch: must be greater than or equal to 1, not 0", None),
    ("seed: 1}", "seed: -1}", "6:64", "calibration.seed: must be greater than or equal to 0, not -1", None),
    ("backend: onnxruntime", "backend: onnxrutime", "5:10", "engine.backend: must be 'onnxruntime', 'tensorrt', "
     "'tensorrt-rtx', 'compressed-tensors' or 'gguf', not \"onnxrutime\"", "did you mean 'onnxruntime'?"),
    (
        "schema: 1", "schema: 2", "1:1", "schema 2 is newer than this llmforge",
        "update llmforge, or write the recipe again with `llmforge init`",
    ),
    ("schema: 1", "schema: '1'", "1:1", 'schema: must be 1, not "1"', None),
    ("schema: 1\n", "", "1:1", "schema: required", None),
    ("name: sample", "name: ../../etc", "2:1", "name: ", None),
    ("name: sample", "name: 7", "2:1", "name: must be a valid string, not 7", None),
    ("target: cpu-avx2", "target: H100", "4:1", "target: 'h100' is ambiguous: h100-pcie, h100-sxm",
     "see `llmforge targets NAME`"),
    ("target: cpu-avx2", "target: cpu-avx", "4:1", "target: no target is named 'cpu-avx'; known: local, a10",
     "did you mean 'cpu-avx2'?"),
    ("kld_mean: {max: 0.03}", "kld_meen: {max: 0.03}", "15:3", "gates.kld_meen: must be 'perplexity_ratio', "
     "'kld_mean'", "did you mean 'kld_mean'?"),
    ("kld_mean: {max: 0.03}", "kld_mean: {}", "15:3",
     "gates.kld_mean: a gate needs `min`, `max`, `drop_max` or `rise_max`", None),
    ("kld_mean: {max: 0.03}", "kld_mean: {max: 0.03, mix: 1}", "15:25", "gates.kld_mean.mix: unknown key; allowed: "
     "min, max", "did you mean 'min'?"),
    ("kld_mean: {max: 0.03}", "kld_mean: {max: 0.03, min: 0.1}", "15:3", "min 0.1 is above max 0.03",
     None),
    ("kld_mean: {max: 0.03}", "kld_mean: 0.03", "15:3", "gates.kld_mean: ", None),
    ("kld_mean: {max: 0.03}", "kld_mean: {max: .inf}", "15:19", "'.inf' is not a finite number", None),
    ("quality: {data: evaluation.jsonl, context: 128}\n  ", "", "14:3", "gates.kld_mean: it would not be measured",
     "add `validation: {quality: …}`, or remove the gate"),
    ("kld_mean: {max: 0.03}", "kld_decode_added: {max: 0.01}", "15:3", "gates.kld_decode_added: it would not be "
     "measured", "set `validation.quality.decode_tokens`, or remove the gate"),
    ("kld_mean: {max: 0.03}", "greedy_same_32: {min: 0.5}", "15:3", "gates.greedy_same_32: it would not be measured",
     "set `validation.quality.samples`, or remove the gate"),
    ("context: 128", "context: 128, samples: 0", "12:51", "validation.quality.samples: must be greater than or equal "
     "to 1, not 0", None),
    ("context: 128", "context: 128, scored: half", "12:51", "validation.quality.scored: must be 'all' or "
     "'second-half', not \"half\"", "did you mean 'all'?"),
    ("kld_mean: {max: 0.03}", "top1_agrement: {min: 0.9}", "15:3", "gates.top1_agrement", "did you mean "
     "'top1_agreement'?"),
    ("prompt_tokens: [32, 128]", "prompt_tokens: [32, 250]", "13:13", "validation.latency.prompt_tokens: 250 "
     "prompt tokens and 16 output tokens exceed engine.max_context, 256", None),
    ("prompt_tokens: [32, 128]", "prompt_tokens: [32, 0]", "13:33", "validation.latency.prompt_tokens.1: must be "
     "greater than or equal to 1, not 0", None),
    ("prompt_tokens: [32, 128]", "prompt_tokens: []", "13:13", "validation.latency.prompt_tokens: must have at least 1 "
     "item, not 0", None),
    ("output_tokens: 16}", "output_tokens: 16, surface: {batches: [1, 9], prompt_tokens: [8], output_tokens: [4]}}",
     "13:68", "validation.latency.surface.batches: 9 sequences exceed engine.max_batch, 4", None),
    ("output_tokens: 16}", "output_tokens: 16, surface: {prompt_tokens: [8, 250], output_tokens: [4, 16]}}",
     "13:68", "validation.latency.surface.prompt_tokens: 250 prompt tokens and 16 output tokens exceed "
     "engine.max_context, 256", None),
    ("output_tokens: 16}", "output_tokens: 16, workloads: {sessions: {prompt_tokens: 70, output_tokens: 16}}}",
     "13:70", "validation.latency.workloads.sessions: its longest request has 258 tokens of prompt and answer, more "
     "than engine.max_context, 256", None),
    ("output_tokens: 16}", "output_tokens: 16, workloads: {shared_prefix: {prefix_tokens: 250, prompt_tokens: 8}}}",
     "13:70", "validation.latency.workloads.shared_prefix: its longest request has 322 tokens", None),
    ("prompt_tokens: [32, 128], output_tokens: 16", "prompt_tokens: [32]", "13:3", "validation.latency: latency needs "
     "`prompt_tokens` and `output_tokens`, or, of an embedder or a reranker, `lengths`", None),
    ("prompt_tokens: [32, 128], output_tokens: 16", "lengths: [16, 300]", "13:13", "validation.latency.lengths: texts "
     "of 300 tokens exceed engine.max_context, ", None),
    ("prompt_tokens: [32, 128], output_tokens: 16", "lengths: [16], output_tokens: 16", "13:3", "validation.latency: "
     "lengths are of texts to encode, and output_tokens is of prompts; expected one of both", None),
    ("output_tokens: 16}", "output_tokens: 16, batches: [2]}", "13:3", "validation.latency: batches are of `lengths`; "
     "of prompts write `surface: {batches: …}`", None),
    ("prompt_tokens: [32, 128], output_tokens: 16", "lengths: [16], slo: {ttft_ms: 5}", "13:3", "validation.latency: "
     "an embedder or a reranker gives no tokens: its slo has latency_ms alone", None),
    ("output_tokens: 16}", "output_tokens: 16, slo: {}}", "13:58", "validation.latency.slo: an SLO needs `ttft_ms`, "
     "`tpot_ms` or `latency_ms`", None),
    ("kld_mean: {max: 0.03}", "goodput_share: {min: 0.9}", "15:3", "gates.goodput_share: it would not be measured",
     "add `validation: {latency: {slo: …}}`, or remove the gate"),
    ("kld_mean: {max: 0.03}", "load_ms: {max: 900}", "15:3", "gates.load_ms: it would not be measured",
     "add `validation: {latency: {starts: …}}`, or remove the gate"),
    ("context: 128", "context: 512", "12:37", "validation.quality.context: 512 is above engine.max_context, 256", None),
    ("  - tidy-up", "  - tidy-ap", "8:5", "passes.tidy-ap: unknown pass; known: tidy-up, lay-ground, squeeze-weights",
     "did you mean 'tidy-up'?"),
    ("  - tidy-up", "  - tidy-up: {speed: 1}", "8:15", "passes.tidy-up.speed: unknown key; allowed: none", None),
    ("  - tidy-up", "  - [tidy-up]", "8:5", "a pass must be a name or a name with options", None),
    ("  - tidy-up", "  - {tidy-up: {}, lay-ground: {}}", "8:5", "a pass must be a name", None),
    ("  - tidy-up", "  - tidy-up: 5", "8:5", "a pass must be a name", None),
    ("bits: 8", "bitts: 8", "10:23", "passes.squeeze-weights.bitts: unknown key; allowed: budget, bits, block_size, "
     "damping, method, layers", "did you mean 'bits'?"),
    ("bits: 8", "bits: 5", "10:23", "passes.squeeze-weights.bits: must be 4 or 8, not 5", None),
    ("bits: 8", "block_size: 8", "10:23", "passes.squeeze-weights.block_size: must be greater than or equal to 16, "
     "not 8", None),
    ("bits: 8", "block_size: 32.0", "10:23", "passes.squeeze-weights.block_size: ", None),
    ("bits: 8", "damping: 0", "10:23", "passes.squeeze-weights.damping: must be greater than 0, not 0", None),
    ("bits: 8", "method: plane", "10:23", "must be 'plain' or 'calibrated', not \"plane\"", "did you mean 'plain'?"),
    ("bits: 8", "layers: [1, x]", "10:35", 'passes.squeeze-weights.layers.1: must be a valid integer, not "x"', None),
    (", budget: {kld_mean: 0.01}", "", "10:5", "passes.squeeze-weights.budget: required key is missing; its keys: "
     "kld_mean", None),
    ("budget: {kld_mean: 0.01}", "budget: {kld_man: 0.01}", "10:41", "passes.squeeze-weights.budget.kld_man: unknown "
     "key; allowed: kld_mean", "did you mean 'kld_mean'?"),
    ("budget: {kld_mean: 0.01}", "budget: {kld_mean: 0}", "10:41", "budget.kld_mean: must be greater than 0, not 0",
     None),
    ("budget: {kld_mean: 0.01}", "budget: 0.1", "10:32", "passes.squeeze-weights.budget: must be a mapping with the "
     "keys kld_mean, not 0.1", None),
    ("bits: 8", "layers: '*down*'", "10:23", 'passes.squeeze-weights.layers: must be a list, not "*down*"', None),
    ("kld_mean: {max: 0.03}", "kld_mean: 3", "15:3", "gates.kld_mean: must be a mapping with the keys min, max, "
     "drop_max, rise_max, not 3", None),
    ("prompt_tokens: [32, 128]", "prompt_tokens: [few]", "13:29", "validation.latency.prompt_tokens.0: must be a valid "
     'integer, not "few"', None),
    ("target: cpu-avx2\n", "target: cpu-avx2\nadapters: [{nme: x, path: y}]\n", "5:13", "adapters.0.nme: unknown key; "
     "allowed: name, path, mode, weight", "did you mean 'name'?"),
    ("  - lay-ground\n", "", "9:5", "passes.squeeze-weights: requires 'ground', which no earlier pass "
     "provides", "put lay-ground before it"),
]  # fmt: skip


def test_answers_need_room_in_the_context(tmp_path: Path) -> None:
    path = write(tmp_path, VALID.replace("context: 128", "context: 128, samples: 5"))
    assert Recipe.load(path).validation.quality.samples == 5  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match=r"samples: 32 tokens of each document and 128 after them exceed .* 159"):
        Recipe.load(path, ["engine.max_context=159", "validation.latency.prompt_tokens=[32]"])


@pytest.mark.parametrize(("old", "new", "place", "says", "hint"), WRONG, ids=[new for _, new, *_ in WRONG])
def test_a_slip_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, place: str, says: str, hint: str | None
) -> None:
    error = refused(tmp_path, replaced(old, new))
    assert error.message.startswith(f"{tmp_path}/r.yaml:{place}: ")
    assert says in error.message
    assert error.hint == hint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "r.yaml: is empty"),
        ("# nothing\n", "r.yaml: is empty"),
        ("- a\n", "r.yaml:1:1: expected a mapping with"),
        ("schema: [1\nname: x\n", "r.yaml:2:5: not valid YAML: "),
        ("a: 1\n\tb: 2\n", "r.yaml:2:1: not valid YAML: "),
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3:1: a: duplicate key; first set at"),
        ("e:\n  a: 1\n  a: 1\n", "r.yaml:3:3: e.a: duplicate key"),
        ("a: 1\n---\na: 2\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "r.yaml:1:4: tag 'tag:yaml.org,2002:python/object"),
        ("a: !custom 1\n", "r.yaml:1:4: tag '!custom' is not allowed"),
        ("a: 2026-01-02\n", "r.yaml:1:4: '2026-01-02' is read as date; put it in quotes"),
        ("1: a\n", "r.yaml:1:1: keys must be plain names"),
        ("? [a]\n: 1\n", "keys must be plain names"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "r.yaml:2:5: merge keys"),
        ("a: &x [*x]\n", "too large"),
        ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{c}: &{c} [{','.join(['*' + p] * 10)}]\n" for p, c in zip("abcdef", "bcdefg", strict=True)
         ), "too large"),
        ("[" * 1500, "too large: more than 4000 values or 32 levels"),
        ("a: \x00\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_what_is_no_plain_yaml_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text).message


def test_tabs_and_names_are_explained(tmp_path: Path) -> None:
    assert refused(tmp_path, "a: 1\n\tb: 2\n").hint == "indent with spaces"
    message = refused(tmp_path, replaced("name: sample", "name: Tiny Model")).message
    assert '"Tiny Model"; allowed are at most 64 of a-z' in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gone\.yaml: cannot be read: No such file"):
        Recipe.load(tmp_path / "gone.yaml")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory") as caught:
        Recipe.load(tmp_path)
    assert "`llmforge init CHECKPOINT` writes one" in str(caught.value.hint)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(RecipeError, match="byte 9 is not UTF-8"):
        Recipe.load(tmp_path / "latin.yaml")


def test_all_slips_are_told_at_once(tmp_path: Path) -> None:
    error = refused(tmp_path, VALID.replace("max_batch: 4", "max_batch: 0").replace("samples: 8", "sample: 8"))
    first, *lines = error.message.splitlines()
    assert first == "2 problems:"
    assert len(lines) == 2
    assert "engine.max_batch" in lines[0]
    assert "calibration.sample: unknown key" in lines[1]
    assert "(did you mean 'samples'?)" in lines[1]
    text = VALID.replace("tidy-up", "tidy").replace("bits: 8", "bits: 7")
    assert refused(tmp_path, text).message.startswith("2 problems:")


def test_facts_count_in_order(tmp_path: Path) -> None:
    text = VALID.replace("  - lay-ground\n", "").replace("validation:", "  - lay-ground\nvalidation:")
    assert "requires 'ground'" in refused(tmp_path, text).message


def test_a_pass_with_demands_needs_calibration(tmp_path: Path) -> None:
    without = re.sub("calibration: .*\n", "", VALID)
    load(tmp_path, without)
    error = refused(tmp_path, without.replace("bits: 8", "method: calibrated"))
    assert error.message.startswith(f"{tmp_path}/r.yaml:9:5: passes.squeeze-weights: ")
    assert "these options need calibration" in error.message
    assert "calibration: {data:" in (error.hint or "")
    load(tmp_path, VALID.replace("bits: 8", "method: calibrated"))


def test_a_budget_needs_text_to_be_measured_on(tmp_path: Path) -> None:
    text = re.sub("(calibration|  quality): .*\n", "", VALID).replace("gates:\n  kld_mean: {max: 0.03}\n", "")
    assert "no text to measure it on" in refused(tmp_path, text).message


def test_overrides_win(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        VALID,
        "engine.max_context=512",
        "passes.squeeze-weights.block_size=128",
        "passes.squeeze-weights.budget.kld_mean=0.5",
        "passes.squeeze-weights.layers=[3]",
        "gates.kld_mean.max=0.05",
        "gates.top1_agreement={min: 0.9}",
        "gates.size_bytes.max=4000000",
        "validation.latency=",
        "name=other",
        "engine.threads=2",
        "engine.threads=3",
    )
    assert loaded.engine.max_context == 512
    assert loaded.engine.threads == 3
    assert loaded.passes[2].options == {
        "bits": 8, "block_size": 128, "budget": {"kld_mean": 0.5}, "layers": [3],
    }  # fmt: skip
    assert {metric: (gate.min, gate.max) for metric, gate in loaded.gates.items()} == {
        "kld_mean": (None, 0.05),
        "top1_agreement": (0.9, None),
        "size_bytes": (None, 4e6),
    }
    assert loaded.validation.latency is None
    assert loaded.name == "other"


@pytest.mark.parametrize(
    "metric",
    ["retrieval.ndcg_10", "behaviour.loops", "task.arc_easy.acc", "runtime.optimum.agreement", "adapter.sql.kld_mean"],
)
def test_an_override_takes_the_limits_that_hints_print(tmp_path: Path, metric: str) -> None:
    before, limits = {metric: GateSpec(min=0.1)}, {metric: GateSpec(min=0.2, max=0.3)}
    printed = relaxed.settings(before, limits)
    assert printed == (f"gates.{metric}.min=0.2", f"gates.{metric}.max=0.3")
    for overrides in (printed, (f"gates.{metric}={{min: 0.2, max: 0.3}}",)):
        source = Source(Path("r.yaml"), {"gates": {metric: {"min": 0.1}}})
        apply(overrides, source, Recipe.model_json_schema())
        assert source.mapping == {"gates": {metric: {"min": 0.2, "max": 0.3}}}
    assert source.where(("gates", metric, "min")) == f"--set {overrides[0]}"
    apply([f"gates.{metric}.max="], source, Recipe.model_json_schema())
    assert source.mapping == {"gates": {metric: {"min": 0.2, "max": None}}}


def test_an_override_limits_a_slice() -> None:
    source = Source(Path("r.yaml"), {})
    apply(["gates.behaviour.loops.english.max=0.3"], source, Recipe.model_json_schema())
    assert source.mapping == {"gates": {"behaviour.loops.english": {"max": 0.3}}}
    with pytest.raises(UsageError, match="no key 'gates'"):
        apply(["gates.behaviour.loops.english.max=0.3"], Source(Path("serving"), {}), ServingSpec.model_json_schema())


def test_an_override_names_a_prefix(tmp_path: Path) -> None:
    overrides = ["serving.prefixes.terse=Be terse.", "serving.prefixes.code.prompt=def"]
    prefixes = load(tmp_path, VALID, *overrides).serving.prefixes
    assert prefixes == {"terse": "Be terse.", "code": PrefixSpec(prompt="def")}
    assert '"A"; allowed are at most 64 of a-z' in refused(tmp_path, VALID, "serving.prefixes.A=x").message


def test_an_override_gives_options_to_a_bare_name(tmp_path: Path) -> None:
    error = refused(tmp_path, VALID, "passes.tidy-up.speed=1")
    assert error.message == "--set passes.tidy-up.speed=1: passes.tidy-up.speed: unknown key; allowed: none"


def test_a_wrong_value_of_an_override_is_placed_at_the_override(tmp_path: Path) -> None:
    assert refused(tmp_path, VALID, "engine.max_batch=0").message == (
        "--set engine.max_batch=0: engine.max_batch: must be greater than or equal to 1, not 0"
    )
    error = refused(tmp_path, VALID, "passes.squeeze-weights.budget={kld_mean: -1}")
    assert error.message.startswith("--set passes.squeeze-weights.budget={kld_mean: -1}: ")


@pytest.mark.parametrize(
    ("override", "says", "hint"),
    [
        ("engine.max_contxt=5", "no key 'engine.max_contxt'; known: backend", "did you mean 'max_context'?"),
        ("engin.max_context=5", "no key 'engin'; known: schema", "did you mean 'engine'?"),
        ("gates.kldmean.max=1", "no key 'gates.kldmean'; known: perplexity_ratio", "did you mean 'kld_mean'?"),
        ("gates.kld_mean.mx=1", "no key 'gates.kld_mean.mx'; known: min, max", "did you mean 'max'?"),
        ("gates.retrieval.ndcg_10.mn=1", "no key 'gates.retrieval.ndcg_10.mn'; known: min", "did you mean 'min'?"),
        ("gates.task.arc_easy.acc.mn=1", "no key 'gates.task.arc_easy.acc.mn'; known: min", "did you mean 'min'?"),
        ("gates.behaviour.loops.mx=1", "no key 'gates.behaviour.loops.mx'; known: min", "did you mean 'max'?"),
        ("gates.retrieval.ndcg10.min=1", "no key 'gates.retrieval.ndcg10'", "did you mean 'retrieval.ndcg_10'?"),
        ("gates.a.b.c.d.e.f.g.h.i.max=1", "no key 'gates.a.b.c.d.e.f.g.h.i'; known: perplexity_ratio", None),
        ("gates..max=1", "expected KEY.KEY=VALUE", "--set engine.max_context=512"),
        ("serving.prefixes.a.promt=x", "no key 'serving.prefixes.a.promt'; known: prompt", "did you mean 'prompt'?"),
        ("validation.quality.contxt=1", "no key 'validation.quality.contxt'", "did you mean 'context'?"),
        ("name.first=x", "'name' has no keys", None),
        ("passes.squeeze.bits=4", "no pass 'squeeze'; its passes: tidy-up", "did you mean 'squeeze-weights'?"),
        ("passes.tidy-up=4", "gives no option", "--set passes.tidy-up.OPTION=VALUE"),
        ("engine.max_context", "expected KEY.KEY=VALUE", "--set engine.max_context=512"),
        ("engine..x=1", "expected KEY.KEY=VALUE", "--set engine.max_context=512"),
        ("=1", "expected KEY.KEY=VALUE", "--set engine.max_context=512"),
        ("engine.max_context=[1", "not valid YAML", None),
    ],
)
def test_an_override_of_nothing_is_refused(tmp_path: Path, override: str, says: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        Recipe.load(write(tmp_path, VALID), [override])
    assert caught.value.message.startswith(f"--set {override}: ")
    assert says in caught.value.message
    assert caught.value.hint == hint


def test_an_override_of_a_pass_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, replaced("  - tidy-up\n", "  - tidy-up\n  - tidy-up\n"))
    Recipe.load(path)
    with pytest.raises(UsageError, match="2 times"):
        Recipe.load(path, ["passes.tidy-up.x=1"])


def data_files(folder: Path) -> None:
    (folder / "calibration.jsonl").write_text('{"id": "a", "text": "x"}\n')
    (folder / "evaluation.jsonl").write_text('{"id": "b", "text": "y"}\n')


def test_the_resolved_recipe_is_the_same_everywhere(tmp_path: Path) -> None:
    folders = [tmp_path / "here", tmp_path / "there" / "deep"]
    written = []
    for folder in folders:
        folder.mkdir(parents=True)
        data_files(folder)
        loaded = load(folder)
        written.append(json.dumps(loaded.resolved(loaded.instantiate(REGISTRY))))
    assert written[0] == written[1]
    assert str(tmp_path) not in written[0]
    resolved = json.loads(written[0])
    assert resolved["schema"] == 1
    assert resolved["checkpoint"] == "model"
    assert resolved["validation"]["latency"]["repetitions"] >= 1
    assert re.fullmatch("[0-9a-f]{64}", resolved["calibration"]["data"]["sha256"])
    assert resolved["passes"][0] == {"tidy-up": {}}
    assert resolved["passes"][2] == {
        "squeeze-weights": {
            "budget": {"kld_mean": 0.01}, "bits": 8, "block_size": 32, "damping": 0.01, "method": "plain", "layers": [],
        }
    }  # fmt: skip
    assert load(folders[0]).resolved()["passes"][2] == {"squeeze-weights": {"bits": 8, "budget": {"kld_mean": 0.01}}}


def test_the_resolved_recipe_follows_the_content_of_data(tmp_path: Path) -> None:
    data_files(tmp_path)
    before = load(tmp_path).resolved()
    (tmp_path / "evaluation.jsonl").write_text('{"id": "b", "text": "z"}\n')
    after = load(tmp_path).resolved()
    assert before["calibration"] == after["calibration"]
    assert before["validation"]["quality"]["data"]["sha256"] != after["validation"]["quality"]["data"]["sha256"]
    (tmp_path / "evaluation.jsonl").unlink()
    with pytest.raises(DataError, match=r"evaluation\.jsonl"):
        load(tmp_path).resolved()


def test_a_text_may_lie_in_several_files(tmp_path: Path) -> None:
    data_files(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Who?"}]}\n')
    one = load(tmp_path, replaced("data: calibration.jsonl", "data: [calibration.jsonl]"))
    assert one.resolved() == load(tmp_path).resolved()
    loaded = load(tmp_path, replaced("data: calibration.jsonl", "data: [chats.jsonl, calibration.jsonl]"))
    assert loaded.calibration is not None
    assert loaded.calibration.data == (tmp_path / "chats.jsonl", tmp_path / "calibration.jsonl")
    written = loaded.resolved()["calibration"]["data"]
    assert [file["name"] for file in written] == ["chats.jsonl", "calibration.jsonl"]
    assert written[1] == load(tmp_path).resolved()["calibration"]["data"]
    with pytest.raises(RecipeError, match=r"calibration\.data"):
        load(tmp_path, replaced("data: calibration.jsonl", "data: []"))
    path = write(tmp_path, VALID)
    several = Recipe.load(path, ("calibration.data=[chats.jsonl, calibration.jsonl]",))
    assert several.calibration == loaded.calibration


def test_the_schema_holds_every_key_and_every_option() -> None:
    whole = recipe.json_schema(REGISTRY)
    assert set(whole["properties"]) == {
        "schema", "name", "checkpoint", "target", "engine", "calibration", "passes", "validation", "gates",
        "serving", "requantize", "adapters", "revision", "chat_template", "tool_prompt", "reranker",
    }  # fmt: skip
    assert whole["additionalProperties"] is False
    assert "PassSpec" not in whole["$defs"]
    squeeze = whole["$defs"]["squeeze-weights"]
    assert squeeze["properties"]["block_size"] == {
        "default": 32, "description": "neighbours that share a scale", "maximum": 256, "minimum": 16,
        "title": "Block Size", "type": "integer",
    }  # fmt: skip
    assert squeeze["required"] == ["budget"]
    assert squeeze["additionalProperties"] is False
    assert squeeze["description"] == "Squeeze weights.\n\nAll of them."
    entries = whole["properties"]["passes"]["items"]["anyOf"]
    assert [entry["const"] for entry in entries if "const" in entry] == ["tidy-up", "lay-ground"]
    assert [next(iter(entry["properties"])) for entry in entries if "properties" in entry] == [
        "tidy-up", "lay-ground", "squeeze-weights",
    ]  # fmt: skip
    references = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(whole)))
    assert references <= set(whole["$defs"])


def described(node: Any) -> list[str]:
    """Find the properties of a JSON Schema that say nothing about themselves."""
    if isinstance(node, list):
        return [name for item in node for name in described(item)]
    if not isinstance(node, dict):
        return []
    silent = [
        name
        for name, value in node.get("properties", {}).items()
        if isinstance(value, dict) and "description" not in value and "$ref" not in value and "anyOf" not in value
    ]
    return silent + [name for value in node.values() for name in described(value)]


def test_the_schema_of_the_shipped_passes_describes_itself() -> None:
    whole = recipe.json_schema(passes.ALL)
    assert to_jsonable_python(whole) == whole
    assert described(whole) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_validates(path: Path) -> None:
    loaded = Recipe.load(path)
    made = loaded.instantiate(passes.ALL)
    assert [instance.name for instance in made] == [spec.name for spec in loaded.passes]
    assert loaded.checkpoint.is_dir()
    assert loaded.gates
    own = f"docs-{path.stem}-1m" if path.stem in OF_ENCODERS else "docs-llama-7m"
    assert loaded.resolved(made)["checkpoint"] == own
    assert path.read_text(encoding="utf-8").startswith("# "), "a recipe says what it is for"


def test_the_recipes_that_were_promised_are_there() -> None:
    assert {path.stem for path in SHIPPED} >= {"quickstart", "fp32", "int8", "int4-rtn"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_builds(path: Path, tmp_path: Path) -> None:
    from llmforge import targets
    from llmforge.base.progress import Silent
    from llmforge.compile import pipeline
    from llmforge.gates.decision import Verdict

    recipe = Recipe.load(path)
    result = pipeline.build(recipe, tmp_path, Silent())
    assert (result.path / "manifest.json").is_file()
    measured = targets.find(recipe.target).kind == "cpu"  # what no device here runs stays undecided
    assert result.report.verdict is (Verdict.PASS if measured else Verdict.INCONCLUSIVE)


def test_a_gate_on_drafts_needs_drafts(tmp_path: Path) -> None:
    recipe = yaml.safe_load(VALID)
    recipe |= {"gates": {"behaviour.accepted_length": {"drop_max": 0.1}}}
    recipe["validation"] = {**recipe.get("validation", {}), "behaviour": {}}
    error = refused(tmp_path, yaml.safe_dump(recipe))
    assert "behaviour.accepted_length: is not measured: the recipe has no drafts" in error.message
    recipe["serving"] = {"speculation": "prompt-lookup"}
    assert load(tmp_path, yaml.safe_dump(recipe)).gates["behaviour.accepted_length"].drop_max == 0.1


def test_speculation_is_a_method_or_a_mapping(tmp_path: Path) -> None:
    def drafting(text: str) -> Recipe:
        return load(tmp_path, VALID + f"serving: {{speculation: {text}}}\n")

    assert facts_of(load(tmp_path).serving) is None
    assert facts_of(drafting("off").serving) is None
    for text in ("prompt-lookup", "{method: prompt-lookup}"):
        assert facts_of(drafting(text).serving) == SpeculationFacts("prompt-lookup", MOST_DRAFT_TOKENS)
    draft = drafting("{method: draft, max_tokens: 3, checkpoint: ../smaller}")
    assert facts_of(draft.serving) == SpeculationFacts("draft", 3)
    assert draft.serving.draft is not None
    assert draft.serving.draft.checkpoint == (tmp_path.parent / "smaller")
    assert draft.slots_reason == "serving.speculation is draft, and no device has verified drafts over blocks"
    for text, message in (
        ("{method: draft}", "method is draft; expected `checkpoint` or `recipe`"),
        ("{method: prompt-lookup, checkpoint: ../smaller}", "expected none of `checkpoint` and `recipe`"),
        ("{method: prompt-lookup, max_tokens: 8}", "max_tokens"),
        ("{method: heads}", "'prompt-lookup', 'draft' or 'eagle3'"),
        ("{method: tree}", "'prompt-lookup', 'draft' or 'eagle3'"),
    ):
        error = refused(tmp_path, VALID + f"serving: {{speculation: {text}}}\n")
        assert message in error.message, error.message


@pytest.mark.parametrize(
    ("serving", "says", "hint"),
    [
        ("speculation: promt-lookup", "speculation: must be 'off' or 'prompt-lookup', not \"promt-lookup\"",
         "did you mean 'prompt-lookup'?"),
        ("speculation: 3", "speculation: must be 'off' or 'prompt-lookup', not 3", None),
        ("speculation: {}", "speculation.method: required key is missing", None),
        ("speculation: {methd: draft}", "speculation.methd: unknown key; allowed: method, max_tokens, checkpoint, "
         "recipe", "did you mean 'method'?"),
        ("speculation: {method: prompt-lookup, max_token: 3}", "speculation.max_token: unknown key; allowed: method, "
         "max_tokens, checkpoint, recipe", "did you mean 'max_tokens'?"),
        ("prefixes: {a: {promt: x}}", "prefixes.a.promt: unknown key; allowed: prompt, messages, tools",
         "did you mean 'prompt'?"),
        ("prefixes: {a: {messages: [3]}}", "prefixes.a.messages.0: must be a mapping, not 3", None),
        ("prefixes: {a: 3}", "prefixes.a: must be a valid string, not 3", None),
        ("prefixes: {a: ''}", "prefixes.a: String must have at least 1 character, not \"\"", None),
        ("prefixes: {}", "prefixes: must have at least 1 item, not 0", None),
    ],
)  # fmt: skip
def test_of_what_has_two_forms_the_one_that_was_meant_is_told(
    tmp_path: Path, serving: str, says: str, hint: str | None
) -> None:
    error = refused(tmp_path, VALID + f"serving: {{{serving}}}\n")
    assert re.sub(r"^\S+:16:\d+: ", "", error.message) == f"serving.{says}"
    assert error.hint == hint
