"""Time a whole build of a checkpoint and then its artifact: python benchmarks/build.py CHECKPOINT [options].

Prints build wall and CPU time, the peak resident memory of the process tree, artifact size, load time and memory,
and TTFT and TPOT by prompt length. The artifact runs in a fresh process. With `--shape` a checkpoint of random weights
in a well-known shape is made first, and kept in the folder `--work`.

Figures of shared machines drift: run it several times, interleaved with what it is compared to, and quote medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from llmforge.quantization import methods

SAMPLE = Path(__file__).resolve().parents[1] / "tests" / "data"
SHAPES = {
    "qwen3-0.6b": {
        "class": "Qwen3Config",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "class": "LlamaConfig",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
POLL_S = 0.05


def make_checkpoint(shape: str, folder: Path) -> Path:
    """Write a bf16 checkpoint of random weights in `shape`, with the sample's tokenizer; keep one that is there."""
    path = folder / shape
    if (path / "model.safetensors").exists():
        return path
    import torch
    import transformers

    facts = dict(SHAPES[shape])
    config = getattr(transformers, facts.pop("class"))(**facts, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    partial = path.with_suffix(".partial")
    model.save_pretrained(partial, max_shard_size="100GB")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(SAMPLE / "docs-llama-7m" / name, partial / name)
    partial.rename(path)
    return path


def write_recipe(path: Path, checkpoint: Path, args: argparse.Namespace) -> None:
    """Write a recipe that quantizes to int4, with an int8 KV cache where asked for, and validates nothing."""
    recipe = {
        "schema": 1,
        "name": "benchmark",
        "checkpoint": str(checkpoint),
        "target": "local",
        "engine": {"max_context": args.context, "max_batch": 8, "threads": args.threads},
        "calibration": {"data": str(SAMPLE / "calibration.jsonl"), "samples": 8, "length": 256},
        "passes": [
            "fuse-norms",
            "pack-qkv",
            "pack-gate-up",
            "flash-attention",
            {
                "quantize-weights": {
                    "bits": 4,
                    "block_size": args.block_size,
                    "method": args.method,
                    "symmetric": args.symmetric,
                    "scales": args.scales,
                    "embedding_bits": args.embedding_bits,
                    "budget": {"kld_mean": 10.0},  # random weights have no quality to keep
                }
            },
            *([{"quantize-kv-cache": {"bits": 8, "budget": {"kld_mean": 10.0}}}] if args.kv8 else []),
            *([{"cpu-kernels": {"budget": {"kld_mean": 10.0}}}] if args.kernels else []),
        ],
    }
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML


def resident_bytes(process: psutil.Process) -> int:
    """Sum the resident memory of a process and its descendants."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def build(recipe: Path, out: Path) -> dict[str, float | str]:
    """Run the command line as a user does and watch its processes."""
    command = [str(Path(sys.executable).parent / "llmforge"), "build", str(recipe), "--out", str(out), "--quiet"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watched, peak, code = psutil.Process(process.pid), 0, 0
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        peak = max(peak, resident_bytes(watched))
        time.sleep(POLL_S)
    wall = time.perf_counter() - began
    assert process.stdout is not None
    output = process.stdout.read()
    if code != 0:
        sys.exit(f"the build ended with exit code {code}")
    artifact = Path(output.strip().splitlines()[-1])
    size = sum(file.stat().st_size for file in artifact.rglob("*") if file.is_file())
    return {
        "artifact": str(artifact),
        "build_wall_s": wall,
        "build_cpu_s": usage.ru_utime + usage.ru_stime,
        "build_peak_rss_mb": peak / 1e6,
        "artifact_mb": size / 1e6,
    }


def serve(artifact: Path, prompts: list[int], tokens: int, repetitions: int, threads: int) -> dict[str, float]:
    """Time the artifact in this process: medians over `repetitions` of new random prompts each."""
    import numpy as np

    from llmforge import serving

    began = time.perf_counter()
    runner = serving.load(artifact, threads=threads)
    figures: dict[str, float] = {"load_s": time.perf_counter() - began}
    rng = np.random.default_rng(0)
    for prompt in prompts:
        ttft, tpot = [], []
        for repetition in range(repetitions + 1):
            ids = rng.integers(0, runner.config.vocabulary, prompt).tolist()
            stamps = [time.perf_counter()]
            stamps += [
                time.perf_counter()
                for _ in runner.generate_batch([ids], [serving.Sampling(max_tokens=tokens, ignore_eos=True)])
            ]
            if repetition:  # the first one warms up
                ttft.append((stamps[1] - stamps[0]) * 1e3)
                tpot.append((stamps[-1] - stamps[1]) / (len(stamps) - 2) * 1e3)
        figures[f"ttft_ms@{prompt}"] = statistics.median(ttft)
        figures[f"tpot_ms@{prompt}"] = statistics.median(tpot)
    figures["peak_rss_mb"] = peak_resident_bytes() / 1e6
    return figures


def peak_resident_bytes() -> int:
    """Read VmHWM, the largest resident set of this process; in KiB there."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=SAMPLE / "docs-llama-7m")
    parser.add_argument("--shape", choices=SHAPES, help="random weights in this shape, instead of CHECKPOINT")
    parser.add_argument("--work", type=Path, help="folder to keep checkpoint and artifact in; else a temporary one")
    parser.add_argument("--artifact", type=Path, help="time this artifact only, build nothing")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--method", choices=[method.name for method in methods.METHODS], default=methods.PLAIN.name)
    parser.add_argument("--symmetric", action="store_true", help="weights without zero points")
    parser.add_argument("--scales", default="fp32", choices=("fp32", "fp16", "int8"), help="of the weights")
    parser.add_argument("--embedding-bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--kernels", action="store_true", help="with the CPU kernels of llmforge")
    parser.add_argument("--kv8", action="store_true", help="int8 KV cache")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--tokens", type=int, default=64, help="generated after each prompt")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.artifact:
        print(json.dumps(serve(args.artifact, args.prompts, args.tokens, args.repetitions, args.threads)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        checkpoint = make_checkpoint(args.shape, work) if args.shape else args.checkpoint.resolve()
        write_recipe(work / "recipe.yaml", checkpoint, args)
        figures = build(work / "recipe.yaml", work / "artifacts")
        again = [sys.executable, __file__, "--artifact", str(figures["artifact"])]
        again += ["--prompts", *map(str, args.prompts), "--tokens", str(args.tokens)]
        again += ["--repetitions", str(args.repetitions), "--threads", str(args.threads)]
        figures |= json.loads(subprocess.run(again, stdout=subprocess.PIPE, check=True, text=True).stdout)
    for name, figure in figures.items():
        print(f"{name:20} {figure if isinstance(figure, str) else f'{figure:.3f}'}")


if __name__ == "__main__":
    main()
