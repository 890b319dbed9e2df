"""One cache for builds that differ in one thing: each is what it is without the builds before it.

What decides a result and is in no key would give a build the result of another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmforge.artifact import Artifact
from llmforge.cache import Cache
from llmforge.compile import pipeline
from llmforge.gates import records
from llmforge.recipe import Recipe

from ..models.adapters import write_adapter
from ..models.checkpoints import write_checkpoint
from .test_reuse import LOOSE, NAMES, WORDS

CHECKPOINT = "tiny-llama"
Change = Callable[[Path, dict[str, Any]], object]  # of a folder with all that a recipe names, and of the recipe
# What of a report is told of the build, and not of what it made; `files` has hashes of files with times in them.
OF_THE_BUILD = frozenset({"seconds", "reused", "created", "build", "previous", "machine", "files"})


def texts(name: str) -> str:
    lines = [{"id": f"{name}{i}", "text": f"{name} {i} " + " ".join((*WORDS[i:], *WORDS[:i]) * 3)} for i in range(8)]
    return "\n".join(map(json.dumps, lines))


def write(folder: Path) -> dict[str, Any]:
    """Write a checkpoint, texts and adapters; return a recipe of them."""
    write_checkpoint(folder / CHECKPOINT)
    (folder / CHECKPOINT / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name in ("calibration", "evaluation"):
        (folder / f"{name}.jsonl").write_text(texts(name))
    return {
        "schema": 1,
        "name": "tiny",
        "checkpoint": CHECKPOINT,
        "target": "local",
        "engine": {"max_context": 96, "max_batch": 2, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 8, "length": 64},
        "passes": [
            *NAMES[:3],
            {"quantize-weights": {"bits": 4, "block_size": 32, "budget": LOOSE}},
            {"quantize-kv-cache": {"budget": LOOSE}},
        ],
        "validation": {"quality": {"data": "evaluation.jsonl", "context": 64}},
    }


def recipe(*path: str | int, value: object) -> Change:
    """Change an entry of the recipe."""

    def change(folder: Path, facts: dict[str, Any]) -> None:
        at: Any = facts
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


def option(number: int, **options: object) -> Change:
    """Change options of a pass."""

    def change(folder: Path, facts: dict[str, Any]) -> None:
        [given] = facts["passes"][number].values()
        given |= options

    return change


def checkpoint(**changes: object) -> Change:
    """Write another checkpoint: entries of its configuration, or the seed of its weights."""
    return lambda folder, facts: write_checkpoint(folder / CHECKPOINT, **changes)  # type: ignore[arg-type]


def file(path: str, change: Callable[[str], str]) -> Change:
    """Change a file."""

    def act(folder: Path, facts: dict[str, Any]) -> None:
        before = (folder / path).read_text()
        assert change(before) != before
        (folder / path).write_text(change(before))

    return act


def adapter(seed: int, weight: float = 1.0) -> Change:
    """Merge an adapter."""

    def change(folder: Path, facts: dict[str, Any]) -> None:
        write_adapter(folder / "adapter", folder / CHECKPOINT, seed=seed, size=0.1)
        facts["adapters"] = [{"name": "one", "path": "adapter", "weight": weight}]

    return change


def apart(seed: int) -> Change:
    """Keep an adapter apart, for requests to choose."""

    def change(folder: Path, facts: dict[str, Any]) -> None:
        write_adapter(folder / "adapter", folder / CHECKPOINT, seed=seed, size=0.1)
        facts["adapters"] = [{"name": "one", "path": "adapter", "mode": "apart"}]
        facts["passes"] = ["fuse-norms", "add-adapters"]

    return change


QUICK: Mapping[str, Change] = {
    "weights of the same shapes": checkpoint(seed=1),
    "base of the rotary angles": checkpoint(rope_theta=20000.0),
    "threads of the engine": recipe("engine", "threads", value=2),
    "bits": option(3, bits=8),
}
SWEEP: Mapping[str, Change] = {
    "epsilon of norms": checkpoint(rms_norm_eps=1e-5),
    "context of the checkpoint": checkpoint(max_position_embeddings=192),
    "ends of a text": checkpoint(eos_token_id=[0, 1]),
    "beginning of a text": checkpoint(bos_token_id=1),
    "activation": checkpoint(hidden_act="gelu"),
    "dtype of weights": checkpoint(dtype="bfloat16"),
    "shards": checkpoint(shards=2),
    "tokenizer": file(
        f"{CHECKPOINT}/tokenizer.json",
        lambda text: text.replace('"!": 3', '"!": 5').replace('"#": 5', '"#": 3'),
    ),
    "chat template": file(f"{CHECKPOINT}/chat_template.jinja", lambda text: f"<|im_start|>{text}"),
    "context": recipe("engine", "max_context", value=64),
    "batch": recipe("engine", "max_batch", value=3),
    "calibration text": file("calibration.jsonl", lambda text: text.replace("graph", "engine")),
    "evaluation text": file("evaluation.jsonl", lambda text: text.replace("graph", "engine")),
    "samples": recipe("calibration", "samples", value=4),
    "length of samples": recipe("calibration", "length", value=32),
    "threads of calibration": recipe("calibration", "threads", value=1),
    "length of windows": recipe("validation", "quality", "context", value=32),
    "second halves": recipe("validation", "quality", "scored", value="second-half"),
    "block size": option(3, block_size=64),
    "method": option(3, method="rtn"),
    "symmetric": option(3, symmetric=True),
    "embedding": option(3, embedding_bits=4),
    "left out": option(3, exclude=["model.layers.0.*"]),
    "bits of a layer": option(3, layer_bits={"model.layers.1.*": 8}),
    "scales a token": option(4, granularity="per_token"),
    "budget": option(4, budget={"kld_mean": 4.0}),
    "a pass less": lambda folder, facts: facts["passes"].remove("pack-qkv"),
    "order": lambda folder, facts: facts["passes"].insert(0, facts["passes"].pop(1)),
    "kernels": lambda folder, facts: facts["passes"].append({"cpu-kernels": {"budget": LOOSE}}),
    "one adapter": adapter(0),
    "another adapter": adapter(1),
    "weight of the adapter": adapter(0, 0.5),
    "adapter apart": apart(0),
    "another adapter apart": apart(1),
    "instances in Triton": recipe("serving", value={"triton": {"instances": 2}}),
    "queue": recipe("serving", value={"max_queue": 3}),
}


def build(folder: Path, facts: Mapping[str, Any], cache: Path) -> tuple[str, Any]:
    """Build with the cache; return the digest of the content, and what the report says of it."""
    (folder / "recipe.yaml").write_text(json.dumps(facts))
    out = folder / "out"
    made = pipeline.build(Recipe.load(folder / "recipe.yaml"), out, cache=partial(Cache, cache, 10**9))
    opened = Artifact.open(made.path)
    report = json.loads(records.read(opened).to_json())
    digest = opened.manifest.content_digest
    shutil.rmtree(out)
    return digest, plain(report)


def plain(facts: Any) -> Any:
    """Leave out what is told of the build."""
    if isinstance(facts, dict):
        return {key: plain(value) for key, value in facts.items() if key not in OF_THE_BUILD}
    return [plain(each) for each in facts] if isinstance(facts, list) else facts


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a build of the recipe as it is has filled."""
    folder = tmp_path_factory.mktemp("begun")
    build(folder, write(folder), folder / "cache")
    return folder / "cache"


def check(change: Change, begun: Path, folder: Path) -> None:
    facts = write(folder)
    change(folder, facts)
    shutil.copytree(begun, folder / "shared")
    alone = build(folder, facts, folder / "alone")
    shutil.rmtree(folder / "alone")
    after = build(folder, facts, folder / "shared")
    assert after[0] == alone[0]
    assert after[1] == alone[1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", QUICK)
def test_a_build_is_its_own_in_the_cache_of_another(name: str, begun: Path, tmp_path: Path) -> None:
    check(QUICK[name], begun, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_whatever_differs_a_build_is_its_own(name: str, begun: Path, tmp_path: Path) -> None:
    check(SWEEP[name], begun, tmp_path)


@pytest.mark.slow
def test_builds_that_share_one_cache_for_long_stay_what_they_are(tmp_path: Path) -> None:
    """Adapters one after the other, and their weights, in one cache: each as alone."""
    for name in ("one adapter", "another adapter", "weight of the adapter", "adapter apart", "another adapter apart"):
        folder = tmp_path / "it"
        facts = write(folder)
        SWEEP[name](folder, facts)
        alone = build(folder, facts, folder / "alone")
        assert build(folder, facts, tmp_path / "shared") == alone
        shutil.rmtree(folder)
