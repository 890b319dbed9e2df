"""KLD against size, ours beside peers: python -m benchmarks.quality PEERS.json [ROW...] [--work FOLDER] [options].

    python -m benchmarks.quality peers.json                    # build every row, and write docs/quantization.md
    python -m benchmarks.quality peers.json 'auto 4.7'         # build that row again; others as they were measured
    python -m benchmarks.quality peers.json --write            # build nothing

Each of our rows is an artifact of the sample checkpoint, built by `llmforge build` and measured by it on all of
tests/data/evaluation.jsonl as it is deployed: int8 activations and an int8 KV cache, on this CPU. What was measured is
kept in FOLDER/results.json. PEERS.json has the rows of others, on the same text: by name `kld`, `kld_ci95`, `all_bits`,
`linear_bits` and `kv`. A table and docs/images/quality.svg are written.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
PAGE, PLOT = ROOT / "docs" / "quantization.md", ROOT / "docs" / "images" / "quality.svg"
BEGIN, END = "<!-- benchmarks.quality -->", "<!-- end -->"
SAMPLES = 96  # windows of 512 tokens to calibrate on
OURS: Mapping[str, Mapping[str, Any]] = {
    "int4 RTN": {"method": "rtn"},
    "int4 gptq, fp16 scales (interoperable)": {"scales": "fp16", "embedding_bits": 8},
    "auto 4.7": {"method": "auto", "scales": "int8", "weight_bits": 4.7},
    "auto 5.2": {"method": "auto", "scales": "int8", "weight_bits": 5.2},
    "trellis RTN": {"method": "rtn", "codes": "trellis", "symmetric": True, "scales": "int8", "embedding_bits": 6},
    "int8": {"method": "rtn", "bits": 8, "symmetric": True, "scales": "fp16"},
}
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 420, 60, 50
BITS, KLD = (4.0, 10.0), (2e-4, 0.2)  # of the plot


@dataclass(frozen=True)
class Row:
    """One format: bits a weight over all weights, KLD in nats a token with its 95 % interval."""

    name: str
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
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    kept = given.work / "results.json"
    measured: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in [] if given.write else given.rows or OURS:
        measured[name] = build(name, OURS[name], given.work)
        kept.write_text(json.dumps(measured, indent=1))
    rows = [
        Row(name, own["bits"], own["kld"], own["low"], own["high"], ours=True)
        for name, own in ((name, measured[name]) for name in OURS if name in measured)
    ]
    rows += peers(json.loads(given.peers.read_text()))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
    PLOT.write_text(plot(rows))


def build(name: str, options: Mapping[str, Any], work: Path) -> dict[str, float]:
    """Build and measure one of our rows."""
    quality = {"data": str(DATA / "evaluation.jsonl"), "context": 512}
    recipe = {
        "schema": 1,
        "name": "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-"),
        "checkpoint": str(DATA / "docs-llama-7m"),
        "target": "local",
        "engine": {"backend": "onnxruntime", "max_context": 1024, "max_batch": 8},
        "calibration": {"data": str(DATA / "calibration.jsonl"), "samples": SAMPLES, "length": 512, "seed": 0},
        "passes": [
            *("fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention"),
            {"quantize-weights": {**options, "budget": {"kld_mean": 0.1}}},
            {"quantize-kv-cache": {"bits": 8, "budget": {"kld_mean": 0.002}}},
            {"cpu-kernels": {"budget": {"kld_mean": 0.002}, "fallback": "onnxruntime"}},
        ],
        "validation": {"quality": quality},
    }
    file = work / f"{recipe['name']}.yaml"
    YAML(typ="safe").dump(recipe, file)
    command = [sys.executable, "-m", "llmforge", "build", str(file), "--out", str(work / "out"), "--quiet"]
    subprocess.run(command, check=True, cwd=ROOT)
    return read(newest(work / "out" / str(recipe["name"])))


def newest(folder: Path) -> Path:
    """Find the report that was written last."""
    return max(folder.rglob("report.json"), key=lambda file: file.stat().st_mtime)


def read(report: Path) -> dict[str, float]:
    """Read KLD and size off a report: bits count all files of the engine."""
    found = json.loads(report.read_text())
    kld = found["quality"]["kld_mean"]
    size = sum(file["size_bytes"] for file in found["engine"]["files"])
    bits = 8 * size / found["checkpoint"]["parameters"]
    return {
        "bits": bits,
        "kld": kld["value"],
        "low": kld["low"],
        "high": kld["high"],
        "tokens": found["quality"]["tokens"],
    }


def peers(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Take those rows of others that ship all weights in a known size, with weights quantized."""
    return [
        Row(name, row["all_bits"], row["kld"], row["kld_ci95"][0], row["kld_ci95"][1])
        for name, row in found.items()
        if row.get("all_bits") and row["all_bits"] < 16 and row["kld"] > 0
    ]


def table(rows: Sequence[Row]) -> str:
    """Write a table, by size."""
    lines = ["|format|bits, all|KLD × 1000|", "|---|--:|--:|"]
    for row in sorted(rows, key=lambda row: row.bits):
        name = f"**{row.name}**" if row.ours else row.name
        lines.append(f"|{name}|{row.bits:.2f}|{1e3 * row.kld:.2f} ± {5e2 * (row.high - row.low):.2f}|")
    return "\n".join(lines)


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
    for kld in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
        parts.append(f'<path d="M{LEFT} {y(kld):.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(kld) + 4:.1f}" text-anchor="end">{kld:g}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">bits a weight, all that is stored</text>'
    )
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">KLD, nats a token</text>'
    )
    for row in sorted(rows, key=lambda row: row.ours):
        if not (BITS[0] <= row.bits <= BITS[1] and KLD[0] <= row.kld <= KLD[1]):
            continue
        color = "#c0392b" if row.ours else "#5d6d7e"
        at, top, bottom = x(row.bits), y(min(row.high, KLD[1])), y(max(row.low, KLD[0]))
        said = escape(f"{row.name}: {row.bits:.2f} bits, {row.kld:.5f}")
        parts.append(f'<g fill="{color}"><title>{said}</title>')
        parts.append(f'<path d="M{at:.1f} {top:.1f}V{bottom:.1f}" stroke="{color}"/>')
        parts.append(f'<circle cx="{at:.1f}" cy="{y(row.kld):.1f}" r="{4 if row.ours else 3}"/>')
        if row.ours:
            parts.append(f'<text x="{at + 7:.1f}" y="{y(row.kld) + 4:.1f}">{escape(row.name)}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
