"""docs/limits.md names every limit that stands in the code, with the number that it has there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Where limits stand, by module: the constant, and how the docs write it.
LIMITS = {
    "llmforge.base.located_yaml": {"MOST_BYTES": "64 KiB", "_MOST_NODES": "4,000 values", "_DEEPEST": "32 levels"},
    "llmforge.base.small_file": {"SETTINGS_BYTES": "16 MiB", "DEEPEST": "100 levels"},
    "llmforge.base.wording": {"LONGEST_LINE": "5,000"},
    "llmforge.artifact.sealed": {
        "LARGEST_MANIFEST": "16 MiB", "LARGEST_SIGNATURE": "16 MiB", "LARGEST_RECORD": "16 MiB",
        "MOST_VALUES": "400,000 values",
    },
    "llmforge.recipe.passes": {"MOST_PASSES": "256 passes"},
    "llmforge.recipe.adapters": {"MOST_ADAPTERS": "1024 adapters"},
    "llmforge.recipe.quality": {"MOST_METRICS": "64 metrics"},
    "llmforge.recipe.serving": {"MOST_DRAFT_TOKENS": "7 tokens of a draft", "MOST_PREFIXES": "64 prefixes"},
    "llmforge.serving.saved_prefixes": {"MOST": "64 prefixes", "PREFIXES_BYTES": "16 MiB"},
    "llmforge.serving.response_cache": {"MOST_ANSWERS": "1,048,576 answers", "MOST_TOKENS": "1,048,576 tokens"},
    "llmforge.recipe.section": {"MOST_FILES": "64 files"},
    "llmforge.runtime.config": {"MOST_TOKENS": "2^24", "MOST_ROWS": "4096", "MOST_THREADS": "1024"},
    "llmforge.measure.load.workload": {"MOST_TOKENS": "2^24"},
    "llmforge.checkpoint.adapters.folder": {"LARGEST_ALPHA": "1,000,000"},
    "llmforge.checkpoint.gguf.header": {
        "MOST_KEYS": "16,384 keys", "MOST_TENSORS": "262,144 tensors", "MOST_STRINGS": "2,097,152 strings",
        "MOST_DIMENSIONS": "4 axes", "MOST_ALIGNMENT": "65,536 bytes",
    },
    "llmforge.checkpoint.folder": {"CONFIG_BYTES": "4 MiB", "MOST_LAYERS": "4096 layers"},
    "llmforge.checkpoint.safetensors_file": {"SMALL_BYTES": "64 MiB", "HEADER_LIMIT_BYTES": "32 MB"},
    "llmforge.checkpoint.documents": {"MOST_BYTES": "256 MiB"},
    "llmforge.serving.prompts": {"TOKENIZER_BYTES": "64 MiB"},
    "llmforge.serving.chat": {"MOST_BYTES": "256 KiB"},
    "llmforge.serving.template_worker": {"MEMORY_BYTES": "512 MiB", "MOST_CHARACTERS": "8 Mi characters"},
    "llmforge.cli.running": {"_SCHEMA_BYTES": "1 MiB"},
    "llmforge.cli.output": {"_LONGEST_CELL": "300"},
    "llmforge.report.view": {"LONGEST_TEXT": "1,000 characters"},
    "llmforge.report.render": {"_NOTES": "100 notes"},
    "llmforge.metrics.attribution": {"MOST_STEPS": "257 steps", "MOST_LAYERS": "65,536 parts"},
    "llmforge.metrics.adapters": {"MOST_ADAPTERS": "4096 adapters"},
    "llmforge.metrics.quality": {"MOST_DOCUMENTS": "10,000 documents"},
    "llmforge.metrics.behaviour.document": {
        "MOST_BYTES": "64 MiB", "MOST_CHATS": "2,000 chats", "MOST_TOKENS": "4096 tokens",
    },
    "llmforge.metrics.behaviour.instructions": {"MOST_PHRASES": "32 phrases"},
    "llmforge.metrics.behaviour.json_schema": {"MOST_DEPTH": "32 levels"},
    "llmforge.metrics.latency": {
        "MOST_LENGTHS": "64 prompt lengths", "MOST_OF_SURFACE": "16 values of each axis", "MOST_STARTS": "100 starts",
        "MOST_WORKLOADS": "16 workloads",
    },
    "llmforge.metrics.tasks": {"MOST_TASKS": "256 tasks", "MOST_ITEMS": "1,000,000 items"},
    "llmforge.metrics.workload": {"MOST_RUNS": "20 runs"},
    "llmforge.measure.latency": {"MOST_REPETITIONS": "1000 repetitions", "MOST_TIMES": "300,000 times"},
    "llmforge.artifact.signing": {"KEY_BYTES": "1 MiB"},
    "llmforge.artifact.oci": {"LARGEST_MANIFEST": "4 MiB", "_LARGEST_MESSAGE": "64 KiB"},
    "llmforge.artifact.transfer": {"LARGEST_EVIDENCE": "256 MiB", "MOST_FILES": "100,000 files"},
}  # fmt: skip
UNITS = {"KiB": 2**10, "MiB": 2**20, "MB": 10**6, "Mi": 2**20}
# Not limits of what comes in: sizes of work, of messages, of what is remembered or shown.
OTHERS = {"MOST_LOADS", "MOST_OF_A_SIZE", "MOST_IN_FLIGHT", "MOST", "LARGEST_BLOCK"}
ROOMS = ("base", "recipe", "checkpoint", "metrics", "artifact", "report", "bench")


def number(written: str) -> int:
    """Read what the docs write: `64 KiB`, `2^24`, `4,000 values`."""
    first, *rest = written.split()
    value = 2 ** int(first[2:]) if first.startswith("2^") else int(first.replace(",", ""))
    return value * UNITS.get(rest[0] if rest else "", 1)


@pytest.mark.parametrize(
    ("module", "name", "written"), [(m, n, w) for m, names in LIMITS.items() for n, w in names.items()]
)
def test_the_docs_have_the_number_of_the_code(module: str, name: str, written: str) -> None:
    assert number(written) == getattr(importlib.import_module(module), name)
    assert written in (ROOT / "docs/limits.md").read_text(encoding="utf-8")


def test_every_limit_of_what_comes_in_is_listed() -> None:
    """A new constant `MOST_…` or `LARGEST_…` stands in the table above, or is said to be no limit of an input."""
    for room in ROOMS:
        for file in sorted((ROOT / "llmforge" / room).rglob("*.py")):
            module = "llmforge." + ".".join(file.relative_to(ROOT / "llmforge").with_suffix("").parts)
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for target in targets:
                    name = getattr(target, "id", "")
                    if name.startswith(("MOST", "LARGEST")) and name not in OTHERS:
                        assert name in LIMITS.get(module, {}), f"{module}.{name}"
