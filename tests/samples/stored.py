"""Artifacts of a few bytes, for tests of what keeps, moves and removes artifacts.

Their reports are made up, but their figures follow from their raw values, as `llmforge verify` demands.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llmforge import artifact
from llmforge.artifact import Artifact, sealed
from llmforge.base import hashed_files
from llmforge.gates import records, verdict
from llmforge.gates.decision import overall
from llmforge.gates.records import EngineFile, EngineRecord, Report
from llmforge.metrics import catalog
from llmforge.metrics.latency import Latency, TimedSide
from llmforge.metrics.quality import GreedyAnswer, Quality, summarize
from llmforge.metrics.quality_metrics import QualityMetric
from llmforge.metrics.token_records import WindowScores
from llmforge.recipe import GateSpec

from . import reports

FILES = {
    "engine/model.onnx": b"graph",
    "engine/model.onnx.data": bytes(range(256)) * 5,
    "tokenizer/tokenizer.json": b"{}",
}
EVIDENCE = {"report/report.html": b"<p>report</p>", "provenance/lock.json": b'{"lock": 1}', "README.md": b"# card\n"}
PASSES = {"kld_mean": {"max": 0.03}, "tpot_p50_ms": {"max": 5}}  # gates and what the figures below make of them
FAILS = {"kld_mean": {"max": 0.001}}
UNDECIDED = {"kld_mean": {"max": 0.021}}
CHECKPOINT = "c" * 64


@cache
def quality(kld: float = 0.021) -> Quality:
    """Make up the quality of 40 documents of 50 tokens, with a mean KLD of about `kld`."""
    rng = np.random.default_rng(0)
    forms = {metric.name: metric.form for metric in catalog.of_kind(QualityMetric)}
    scores = {}
    for i, factor in enumerate(rng.normal(1, 0.1, 40)):
        uniform = rng.uniform(0.95, 1.05, 50)
        made = {
            "baseline_nll": np.full(50, 3.8),
            "nll": np.full(50, 3.8 + 0.01 * factor),
            "kld": kld * factor * uniform / uniform.mean(),
            "same_top": uniform > 0.955,
            "shared_top": np.full(50, 0.9),
            "delta_p": 0.01 * (uniform - 1),
            "delta_p_squared": 1e-4 * (uniform - 1) ** 2,
            "end_shift_elsewhere": uniform - 1,
        }
        scores[f"guide-{i}"] = [WindowScores(1, made)]
    decoded = {
        name: [WindowScores(1, {"kld": 1.1 * window.values["kld"], "prefill_kld": window.values["kld"]})]
        for name, (window,) in list(scores.items())[:10]
    }
    answers = [
        GreedyAnswer(document=f"guide-{i}", prompt_tokens=32, tokens=128, first_difference=None if i % 3 else 10 * i)
        for i in range(12)
    ]
    return summarize(forms, scores, context=51, decoded=decoded, answers=answers)


@cache
def latency(tpot_ms: float = 0.5) -> Latency:
    """Make up the latency of 20 repetitions of 4 tokens, beside a baseline of a tenth of the speed."""
    jitter = np.random.default_rng(1).normal(1, 0.02, (20, 4))
    ours = list(np.round(np.array([2.0, tpot_ms, tpot_ms, tpot_ms]) * jitter, 5))
    fixed = reports.LATENCY
    point = catalog.point(32, TimedSide(ours), TimedSide([10 * each for each in ours]), fixed)
    return fixed.model_copy(update={"points": (point,), "output_tokens": 4})


def report(manifest: artifact.Manifest, **changes: Any) -> Report:
    """Make up the report of a build of `manifest`; `quality` and `latency` may be others."""
    specs = {metric: GateSpec.model_validate(limits) for metric, limits in manifest.recipe.get("gates", {}).items()}
    engine = EngineRecord(
        backend="onnxruntime",
        files=tuple(
            EngineFile(name=path.removeprefix("engine/"), size_bytes=file.size_bytes)
            for path, file in manifest.files.items()
            if path.startswith("engine/")
        ),
        session={},
    )
    checkpoint = reports.CHECKPOINT.model_copy(update={"digest": manifest.checkpoint})
    facts: dict[str, Any] = {
        "quality": quality(), "latency": latency(), "engine": engine, "checkpoint": checkpoint, **changes,
    }  # fmt: skip
    measured = records.measured(*(facts[name] for name in ("quality", "latency", "engine", "checkpoint")))
    gates = verdict.judge(specs, measured, facts["engine"].unmeasured)
    return reports.make(
        **{
            "content": manifest.content_digest,
            "name": manifest.name,
            "recipe": manifest.recipe,
            "gates": gates,
            "verdict": overall(gates),
            **facts,
        }
    )


def publish(
    folder: Path,
    *,
    recipe: dict[str, Any],
    checkpoint: str = CHECKPOINT,
    target: str = "cpu-avx2",
    requires: dict[str, str] | None = None,
    made: Report | None = None,
    **changes: Any,
) -> Artifact:
    """Publish the folder that `staging` made, with a report that is made up; what is given of `made` stays."""
    manifest = artifact.seal(folder, recipe=recipe, checkpoint=checkpoint, target=target, requires=requires or {})
    kept = {} if made is None else {name: getattr(made, name) for name in ("latency", "quality")}
    record = json.loads(report(manifest, **kept, **changes).to_json())
    return artifact.publish(folder, manifest, record)


def put(
    out: Path,
    content: str = "graph",
    *,
    name: str = "tiny",
    gates: dict[str, Any] | None = None,
    files: dict[str, bytes] | None = None,
    days: int = 0,
    **changes: Any,
) -> Artifact:
    """Publish one, built so many `days` later; its verdict is what its figures give, unless another is claimed."""
    recipe = {"schema": 1, "name": name, "gates": PASSES if gates is None else gates}
    everything = {**FILES, **EVIDENCE, "engine/model.onnx": content.encode(), **(files or {})}
    with artifact.staging(out, name) as folder:
        for path, data in everything.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        created = (datetime(2026, 11, 21, 10, 42, tzinfo=UTC) + timedelta(days=days)).isoformat()
        return publish(folder, recipe=recipe, **{"created": created, **changes})


def several(out: Path, count: int, **facts: Any) -> list[str]:
    """Publish versions that differ in content, a day after each other; return their names, the oldest first."""
    return [put(out, f"graph {number}", days=number, **facts).path.name for number in range(1, count + 1)]


def forged(manifest: bytes, record: bytes, **changes: Any) -> tuple[bytes, bytes]:
    """Edit a manifest, and the record with it, as whoever knows the format would: in form, and bound to each other."""
    raw = (json.dumps({**json.loads(manifest), **changes}, indent=1, sort_keys=True) + "\n").encode()
    bound = {**json.loads(record), "content": hashlib.sha256(raw).hexdigest()}
    return raw, (json.dumps(bound, indent=1) + "\n").encode()


def reseal(folder: Path) -> None:
    """Make manifest and record agree with files that were edited; the folder must not be called by a version."""
    (old,) = (folder / "evidence").glob("*.json")
    files = {
        path: {"sha256": hashed_files.sha256(folder / path), "size_bytes": (folder / path).stat().st_size}
        for path in sealed.walk(folder)
        if sealed.is_content(path)
    }
    told = json.loads(old.read_bytes())
    told["engine"]["files"] = [
        {"name": path.removeprefix("engine/"), "size_bytes": file["size_bytes"]}
        for path, file in files.items()
        if path.startswith("engine/")
    ]
    raw, record = forged((folder / "manifest.json").read_bytes(), json.dumps(told).encode(), files=files)
    old.unlink()
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_bytes(raw)
    (folder / "evidence" / f"{hashlib.sha256(record).hexdigest()}.json").write_bytes(record)
