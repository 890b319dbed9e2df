"""KLD against size, ours beside peers: python -m benchmarks.quality PEERS.json [ROW...] [--work FOLDER] [options].

    python -m benchmarks.quality peers.json                    # build rows that are lacking, and write the page
    python -m benchmarks.quality peers.json 'auto 4.7'         # build that row again; others as they were measured
    python -m benchmarks.quality peers.json --write            # build nothing

Each of our rows is an artifact of the sample checkpoint, built by `llmforge build` and measured by it on all of
tests/data/evaluation.jsonl as it is deployed: int8 activations and an int8 KV cache where the row does not say
otherwise, on this CPU. Formats and codes are chosen on tests/data/calibration.jsonl alone. What was measured is kept in
FOLDER/results.json. PEERS.json has the rows of others, on the same text: by name `kld`, `kld_ci95`, `all_bits`,
`linear_bits` and `kv`. The table of docs/quantization-results.md and docs/images/quality.svg are written.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
PAGE, PLOT = ROOT / "docs" / "quantization-results.md", ROOT / "docs" / "images" / "quality.svg"
BEGIN, END = "<!-- benchmarks.quality -->", "<!-- end -->"
LINEAR_PARAMETERS = 4_718_592  # of the sample checkpoint's decoder layers


@dataclass(frozen=True)
class Recipe:
    """What a row of ours is built with: options of quantize-weights and of the KV cache, activations, whose kernels."""

    weights: Mapping[str, Any]
    kv: Mapping[str, Any] | None = field(default_factory=lambda: {"bits": 8})  # of the cache; None: fp32
    activations: str = "int8"
    portable: bool = False  # operators of ONNX Runtime alone, inputs and outputs of onnxruntime-genai
    samples: int = 16  # windows of 512 tokens to calibrate on


AUTO: Mapping[str, Any] = {"method": "auto", "scales": "int8"}
PER_TOKEN: Mapping[str, Any] = {"bits": 8, "granularity": "per_token"}
INT8: Mapping[str, Any] = {"method": "gptq", "bits": 8, "symmetric": True, "scales": "fp16", "embedding_bits": 8}
TRELLIS: Mapping[str, Any] = {"codes": "trellis", "symmetric": True, "scales": "int8", "embedding_block_size": 32}
OURS: Mapping[str, Recipe] = {
    "auto 4.3": Recipe({**AUTO, "weight_bits": 4.3}),
    "auto 4.5": Recipe({**AUTO, "weight_bits": 4.5}),
    "auto 4.7": Recipe({**AUTO, "weight_bits": 4.7}),
    "auto 5.2": Recipe({**AUTO, "weight_bits": 5.2}),
    "auto 6": Recipe({**AUTO, "weight_bits": 6.0}),
    "auto 7, two terms": Recipe({**AUTO, "weight_bits": 7.0}, PER_TOKEN, "int8x2"),
    "auto 8, two terms": Recipe({**AUTO, "weight_bits": 8.0}, PER_TOKEN, "int8x2"),
    "trellis": Recipe({**TRELLIS, "embedding_bits": 6}),
    "int4 RTN": Recipe({"method": "rtn", "scales": "fp16"}),
    "int8": Recipe(INT8),
    "int8, two terms": Recipe(INT8, PER_TOKEN, "int8x2"),
    "int8, two terms, fp32 KV cache": Recipe(INT8, None, "int8x2"),
    "MatMulNBits, auto 5.6": Recipe(
        {"method": "auto", "scales": "fp16", "weight_bits": 5.6}, portable=True, samples=96
    ),
}
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 420, 60, 50
BITS, KLD = (4.0, 10.0), (5e-5, 0.2)  # of the plot


@dataclass(frozen=True)
class Row:
    """One format: bits a weight of linears and of all weights, KLD in nats a token with its 95 % interval."""

    name: str
    linear_bits: float
    bits: float
    kld: float
    low: float
    high: float
    ours: bool = False


def main() -> None:
    """Build the rows that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--work", type=Path, default=ROOT / ".quality")
    parser.add_argument("--write", action="store_true", help="build nothing")
    given = parser.parse_intermixed_args()
    given.work.mkdir(parents=True, exist_ok=True)
    kept = given.work / "results.json"
    measured: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in [] if given.write else given.rows or [name for name in OURS if name not in measured]:
        measured[name] = build(name, OURS[name], given.work)
        kept.write_text(json.dumps(measured, indent=1))
    rows = [
        Row(name, own["linear_bits"], own["bits"], own["kld"], own["low"], own["high"], ours=True)
        for name, own in ((name, measured[name]) for name in OURS if name in measured)
    ]
    rows += peers(json.loads(given.peers.read_text()))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    PLOT.write_text(plot(rows))


def build(name: str, row: Recipe, work: Path) -> dict[str, float]:
    """Build and measure one of our rows."""
    passes: list[Any] = ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention"]
    passes.append({"quantize-weights": {**row.weights, "budget": {"kld_mean": 0.1}}})
    if row.kv is not None:
        passes.append({"quantize-kv-cache": {**row.kv, "budget": {"kld_mean": 0.002}}})
    if row.portable:
        passes.append({"genai-interface": {"logits": "last"}})
    else:
        kernels = {"activations": row.activations, "budget": {"kld_mean": 0.002}, "fallback": "onnxruntime"}
        passes.append({"cpu-kernels": kernels})
    recipe = {
        "schema": 1,
        "name": "-".join(re.findall(r"[a-z0-9]+", name.lower())),
        "checkpoint": str(DATA / "docs-llama-7m"),
        "target": "local",
        "engine": {"backend": "onnxruntime", "max_context": 1024, "max_batch": 8},
        "calibration": {"data": str(DATA / "calibration.jsonl"), "samples": row.samples, "length": 512, "seed": 0},
        "passes": passes,
        "validation": {"quality": {"data": str(DATA / "evaluation.jsonl"), "context": 512}},
    }
    file = work / f"{recipe['name']}.yaml"
    YAML(typ="safe").dump(recipe, file)
    command = [sys.executable, "-m", "llmforge", "build", str(file), "--out", str(work / "out"), "--quiet", "--json"]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return read(json.loads(done.stdout)["report"])


def read(report: Mapping[str, Any]) -> dict[str, float]:
    """Read KLD and size off a report; bits are those of stored weights: no vocabulary, graph or rotary tables."""
    kld, parameters = report["quality"]["kld_mean"], report["checkpoint"]["parameters"]
    stored = [each for each in report["engine"]["weights"] if ".weight" in each["name"] and each["dtype"] != "int64"]
    linears = sum(each["size_bytes"] for each in stored if "_proj." in each["name"])
    return {
        "linear_bits": 8 * linears / LINEAR_PARAMETERS,
        "bits": 8 * sum(each["size_bytes"] for each in stored) / parameters,
        "files_bytes": sum(file["size_bytes"] for file in report["engine"]["files"]),
        "kld": kld["value"],
        "low": kld["low"],
        "high": kld["high"],
        "tokens": report["quality"]["tokens"],
        "seconds": report["build"]["seconds"],
        "cpu_seconds": report["build"]["cpu_seconds"],
    }


def peers(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Take those rows of others that ship all weights in less than 10 bits, as they are deployed."""
    return [
        Row(name, row["linear_bits"], row["all_bits"], row["kld"], *row["kld_ci95"])
        for name, row in found.items()
        if row.get("all_bits") and row["all_bits"] < BITS[1] and "weights only" not in name
    ]


def table(rows: Sequence[Row]) -> str:
    """Write a table, by size."""
    lines = ["|format|bits, linears|bits, all|KLD × 1000|", "|---|--:|--:|--:|"]
    for row in sorted(rows, key=lambda row: row.bits):
        name = f"**{row.name}**" if row.ours else row.name
        lines.append(
            f"|{name}|{row.linear_bits:.2f}|{row.bits:.2f}|{1e3 * row.kld:.2f} ± {5e2 * (row.high - row.low):.2f}|"
        )
    return "\n".join(lines)


def least(rows: Sequence[Row]) -> list[Row]:
    """Return the rows than which no other has less KLD in as few bits, by size."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.bits, row.kld)):
        if not front or row.kld < front[-1].kld:
            front.append(row)
    return front


def plot(rows: Sequence[Row]) -> str:
    """Draw KLD, on a logarithmic scale, against bits; rows outside of the picture are in the table alone."""

    def x(bits: float) -> float:
        return LEFT + (bits - BITS[0]) / (BITS[1] - BITS[0]) * (WIDTH - LEFT - 20)

    def y(kld: float) -> float:
        share = math.log(kld / KLD[0]) / math.log(KLD[1] / KLD[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for bits in range(int(BITS[0]), int(BITS[1]) + 1):
        parts.append(f'<path d="M{x(bits):.1f} 20V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(bits):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{bits}</text>')
    for kld in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
        parts.append(f'<path d="M{LEFT} {y(kld):.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(kld) + 4:.1f}" text-anchor="end">{kld:g}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">bits a weight, all that is stored</text>'
    )
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">KLD, nats a token</text>'
    )
    drawn = [row for row in rows if BITS[0] <= row.bits <= BITS[1] and KLD[0] <= row.kld <= KLD[1]]
    if front := least([row for row in drawn if not row.ours]):
        way = "L".join(f"{x(row.bits):.1f} {y(row.kld):.1f}" for row in front)
        parts.append(f'<path d="M{way}" fill="none" stroke="#5d6d7e" stroke-dasharray="3 3"/>')
        end = front[0]
        parts.append(
            f'<text x="{x(end.bits) + 7:.1f}" y="{y(end.kld) - 6:.1f}" fill="#5d6d7e">best of the others</text>'
        )
    for row in sorted(drawn, key=lambda row: row.ours):
        color = "#c0392b" if row.ours else "#5d6d7e"
        at, top, bottom = x(row.bits), y(min(row.high, KLD[1])), y(max(row.low, KLD[0]))
        said = escape(f"{row.name}: {row.bits:.2f} bits, {row.kld:.5f}")
        parts.append(f'<g fill="{color}"><title>{said}</title>')
        parts.append(f'<path d="M{at:.1f} {top:.1f}V{bottom:.1f}" stroke="{color}"/>')
        parts.append(f'<circle cx="{at:.1f}" cy="{y(row.kld):.1f}" r="{4 if row.ours else 3}"/>')
        if row.ours:
            crowded = any(0 < x(o.bits) - at < 60 and abs(y(o.kld) - y(row.kld)) < 12 for o in drawn if o.ours)
            side = f'x="{at - 7:.1f}" text-anchor="end"' if crowded else f'x="{at + 7:.1f}"'
            parts.append(f'<text {side} y="{y(row.kld) + 4:.1f}">{escape(row.name)}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
