"""Peak memory and time of a build by the size of the model: python -m benchmarks.model_size SHAPE... [options].

    python -m benchmarks.model_size llama-3-8b --sparse            # memory alone: shards without bytes on the disk
    python -m benchmarks.model_size qwen3-0.6b qwen3-1.7b qwen3-4b # time, and a line fitted through it by bytes
    python -m benchmarks.model_size llama-3-70b --sparse --trace   # CPU seconds and memory of the trace alone
    python -m benchmarks.model_size llama-3-8b --sparse --baseline # memory of the baseline's logits of two texts

Each build runs in a process of its own: int4 rounded to nearest, embedding and head too, every pass proven, validation
off, no cache. Memory is VmHWM, which counts the pages of mapped files that are resident, and the largest RssAnon seen,
which does not. Weights are random bf16 numbers, or zeros where the file is sparse.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "tests" / "data"
QWEN3 = {
    "class": "Qwen3Config", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {
    "class": "LlamaConfig", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "qwen3-1.7b": {
        **QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    "qwen3-30b-a3b": {
        **QWEN3, "class": "Qwen3MoeConfig", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "llama-3-8b": {
        **LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-3-70b": {
        **LLAMA3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
SHARD_BYTES = 5 * 10**9
CHUNK_BYTES = 1 << 24
BF16_ONE = 0x3F80
POLL_S = 0.1


def make_checkpoint(shape: str, folder: Path, *, sparse: bool, facts: Mapping[str, Any] | None = None) -> Path:
    """Write a bf16 checkpoint in `shape` with the sample's tokenizer, in shards; keep one that is there.

    `facts` of its configuration take the place of those of `SHAPES`.
    """
    import torch
    import transformers

    path = folder / f"{shape}{'-sparse' if sparse else ''}"
    if path.exists():
        return path
    facts = dict(facts or SHAPES[shape])
    config = getattr(transformers, facts.pop("class"))(**facts, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.dtype = "bfloat16"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}  # tied ones once
    partial = path.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config.save_pretrained(partial)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(SAMPLE / "docs-llama-7m" / name, partial / name)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, dims in shapes.items():
        if sum(2 * math.prod(each) for each in shards[-1].values()) + 2 * math.prod(dims) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = dims
    rng, weight_map = np.random.default_rng(0), {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(partial / file, tensors, None if sparse else rng)
        weight_map |= dict.fromkeys(tensors, file)
    (partial / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    partial.rename(path)
    return path


def _write_shard(file: Path, tensors: Mapping[str, Sequence[int]], rng: np.random.Generator | None) -> None:
    """Write a header, ones for norms, and numbers of 2**-7 to 2**-5 of either sign for the rest; no `rng`: holes."""
    header, at = {}, 0
    for name, dims in tensors.items():
        size = 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, at + size]}
        at += size
    plain = json.dumps(header).encode()
    plain += b" " * (-len(plain) % 8)
    with file.open("wb") as stream:
        stream.write(len(plain).to_bytes(8, "little") + plain)
        stream.truncate(8 + len(plain) + at)
        for dims in tensors.values():
            count = math.prod(dims)
            if len(dims) == 1:
                stream.write(np.full(count, BF16_ONE, np.uint16).tobytes())
                continue
            if rng is None:
                stream.seek(2 * count, os.SEEK_CUR)
                continue
            for begin in range(0, count, CHUNK_BYTES):
                words = np.frombuffer(rng.bytes(2 * min(CHUNK_BYTES, count - begin)), np.uint16)
                stream.write((words & 0x80FF | 0x3C00).tobytes())


def write_recipe(path: Path, checkpoint: Path) -> None:
    """Write a recipe that rounds to int4 and measures nothing."""
    budget = {"budget": {"kld_mean": 10.0}}  # random weights have no quality to keep
    weights = {"bits": 4, "block_size": 128, "method": "rtn", "symmetric": True, "embedding_bits": 4, **budget}
    recipe = {
        "schema": 1,
        "name": checkpoint.name,
        "checkpoint": str(checkpoint),
        "target": "local",
        "engine": {"max_context": 1024, "max_batch": 8, "threads": 2},
        "calibration": {"data": str(SAMPLE / "calibration.jsonl"), "samples": 8, "length": 256},
        "passes": ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention", {"quantize-weights": weights}],
    }
    path.write_text(yaml.safe_dump(recipe))


def build(recipe: Path, out: Path) -> dict[str, Any]:
    """Build, and watch the process."""
    command = [sys.executable, "-m", "llmforge", "build", str(recipe), "--out", str(out), "--no-cache", "--json"]
    began, anonymous, highest, told = time.perf_counter(), 0, 0, ""
    stages: dict[str, int] = {}
    with (out / "log").open("w+") as log, (out / "result").open("w+") as result:
        process = subprocess.Popen(command, stdout=result, stderr=log, cwd=ROOT)
        while True:
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            facts = _memory(process.pid)
            anonymous = max(anonymous, facts.get("RssAnon", 0))
            highest = max(highest, facts.get("VmHWM", 0))
            told = next((line for line in reversed((out / "log").read_text().splitlines()) if ": " not in line), told)
            stages[told] = max(stages.get(told, 0), facts.get("RssAnon", 0))
            time.sleep(POLL_S)
        if os.waitstatus_to_exitcode(status) != 0:
            sys.exit((out / "log").read_text())
        report = json.loads((out / "result").read_text())
    wall = time.perf_counter() - began
    times = {stage["title"]: round(stage["seconds"], 2) for stage in report["report"]["build"]["stages"]}
    peaks = {stage["title"]: stage["peak_rss_bytes"] or 0 for stage in report["report"]["build"]["stages"]}
    engine = sum(file.stat().st_size for file in Path(report["artifact"]).glob("engine/*"))
    return {
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mb": max(highest, usage.ru_maxrss * 1024) / 1e6,
        "peak_anonymous_mb": anonymous / 1e6,
        "engine_mb": engine / 1e6,
        "stages_s": {title: seconds for title, seconds in times.items() if seconds >= 0.5},
        "stages_peak_mb": {title: round(size / 1e6) for title, size in peaks.items()},
        "stages_anonymous_mb": {title: round(size / 1e6) for title, size in stages.items()},
    }


def _memory(pid: int) -> dict[str, int]:
    """Read VmHWM, VmRSS, RssAnon, … of a process, bytes; nothing of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in pairs}


def trace(checkpoint: Path) -> dict[str, float]:
    """Trace in this process; its imports are counted apart."""
    from llmforge.base import process

    process.prepare()
    from llmforge.checkpoint import Checkpoint
    from llmforge.trace import trace as traced

    opened = Checkpoint.open(checkpoint)
    imports, began = _cpu_seconds(), time.perf_counter()
    model = traced(opened)
    return {
        "imports_and_headers_cpu_s": imports,
        "trace_cpu_s": _cpu_seconds() - imports,
        "trace_wall_s": time.perf_counter() - began,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "nodes": len(list(model.graph)),
    }


def baseline(checkpoint: Path) -> dict[str, Any]:
    """Compute the baseline's logits of two texts of 128 tokens in this process."""
    from llmforge.base import process

    process.prepare()
    from llmforge.checkpoint import Checkpoint
    from llmforge.measure import machine
    from llmforge.measure.baseline import open_baseline

    opened = Checkpoint.open(checkpoint)
    opened_mb, began = machine.peak_resident_bytes() / 1e6, time.perf_counter()
    found = open_baseline(opened, threads=2)
    texts = [np.arange(at, at + 128) for at in (0, 128)]
    logits = found.of(texts)
    finite = all(bool(np.isfinite(logits(ids)).all()) for ids in texts)
    return {
        "baseline": found.description,
        "wall_s": time.perf_counter() - began,
        "peak_mb": machine.peak_resident_bytes() / 1e6,
        "peak_when_opened_mb": opened_mb,
        "finite": finite,
    }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--sparse", action="store_true", help="weights are holes in files: zeros, on no disk")
    parser.add_argument("--trace", action="store_true", help="only trace")
    parser.add_argument("--baseline", action="store_true", help="only run the baseline on two texts")
    parser.add_argument("--make", action="store_true", help="only write the checkpoints")
    parser.add_argument("--work", type=Path, help="folder to keep checkpoints in; else a temporary one")
    parser.add_argument("-o", "--output", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        for shape in args.shapes:
            checkpoint = make_checkpoint(shape, work, sparse=args.sparse)
            size_gb = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 1e9
            if args.make:
                continue
            if args.trace:
                found[shape] = trace(checkpoint)
            elif args.baseline:
                found[shape] = baseline(checkpoint)
            else:
                with tempfile.TemporaryDirectory(dir=work) as out:
                    write_recipe(Path(out) / "recipe.yaml", checkpoint)
                    found[shape] = build(Path(out) / "recipe.yaml", Path(out))
            found[shape] = {"checkpoint_gb": size_gb, **found[shape]}
            print(shape, json.dumps(found[shape]), flush=True)
    if len(found) > 2 and not args.trace and not args.baseline:
        found["fit"] = {name: _fitted(found, name) for name in ("wall_s", "cpu_s")}
        print("fit", json.dumps(found["fit"]))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1))


def _fitted(found: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, float]:
    """Fit a line through `name` by gigabytes of the checkpoint."""
    gigabytes = np.array([each["checkpoint_gb"] for each in found.values()])
    seconds = np.array([each[name] for each in found.values()])
    slope, fixed = np.polyfit(gigabytes, seconds, 1)
    off = np.abs(seconds - (slope * gigabytes + fixed)) / seconds
    return {"s_per_gb": float(slope), "fixed_s": float(fixed), "largest_residual": float(off.max())}


if __name__ == "__main__":
    main()
