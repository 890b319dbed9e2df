"""Build one checkpoint with llmforge, onnxruntime-genai and llama.cpp, turn by turn, and compare.

    python benchmarks/build_peers.py --shape qwen3-0.6b --work DIR --genai PYTHON \
        [--llama-source DIR --llama-quantize PROGRAM] [--again KEY=VALUE] [-o report.json]

PYTHON is the interpreter of an environment of its own (docs/performance.md says what is in it), the llama.cpp source is
the folder with convert_hf_to_gguf.py; a peer that is not given is left out. Every round builds with each in a fresh
process, into an empty folder, and llmforge without anything that an earlier build left in a cache: int4 weights rounded
to nearest in blocks of 128 (llama.cpp: Q4_0, of 32), head and embedding too. No side validates; llmforge proves the
trace and every pass. With `--full`, llmforge also stores the KV cache in int8, whose ranges it calibrates, and packs
the weights for its own kernels, which no peer does. With `--again`, each round also builds a second time with llmforge,
with that value of the recipe changed and what the first one left.

Wall time; CPU time of the process and its children; the largest resident set of one process (ru_maxrss, which is where
VmHWM ends); the size of what was built. Prints medians over rounds and our ratio to the faster peer.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ("wall_s", "cpu_s", "peak_mb", "size_mb")
# llama.cpp's converter knows pre-tokenizers by a hash of what they make; that of the sample is none of them.
CONVERT = """
import runpy, sys
source, *rest = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def name(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "qwen2"
TextModel.get_vocab_base_pre = name
sys.argv = ["convert_hf_to_gguf.py", *rest]
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Builder:
    """The commands that build, one after the other, and what they leave behind in their folder."""

    commands: Sequence[Sequence[str]]
    made: Path  # a file, or a folder
    keeps: bool = False  # what the builder before it left in the folder


def run(builder: Builder, folder: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Build in `folder`, empty unless the builder keeps what is there, and measure it."""
    if not builder.keeps:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    log = folder / "log"
    wall = cpu = peak = 0.0
    for command in builder.commands:
        with log.open("ab") as output:
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
            _, status, usage = os.wait4(process.pid, 0)
            wall += time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(command)}\nended with exit code {process.returncode}:\n{log.read_text()[-4000:]}")
        cpu += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss * 1024)  # in KiB there
    files = [builder.made] if builder.made.is_file() else [path for path in builder.made.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return {"wall_s": wall, "cpu_s": cpu, "peak_mb": peak / 1e6, "size_mb": size / 1e6}


def builders(args: argparse.Namespace, checkpoint: Path, recipe: Path) -> dict[str, tuple[Path, Builder]]:
    """Folder and commands by name, in the order of a round."""
    ours = args.work / "built" / "llmforge"
    build = [sys.executable, "-c", "from llmforge.cli import main; main()", "build", str(recipe), "--quiet"]
    build += ["--out", str(ours / "artifacts")]
    found = {"llmforge": (ours, Builder([build], ours / "artifacts"))}
    if args.again:
        found["llmforge again"] = (ours, Builder([[*build, "--set", args.again]], ours / "artifacts", keeps=True))
    if args.genai:
        folder = args.work / "built" / "onnxruntime-genai"
        command = [args.genai, "-m", "onnxruntime_genai.models.builder", "-m", "qwen", "-i", str(checkpoint)]
        command += ["-o", str(folder / "model"), "-p", "int4", "-e", "cpu", "-c", str(folder / "cache")]
        command += ["--extra_options", "hf_token=false", "accuracy_level=4", "block_size=128", "prune_lm_head=true"]
        found["onnxruntime-genai"] = (folder, Builder([command], folder / "model"))
    if args.llama_source:
        folder = args.work / "built" / "llama.cpp"
        whole, small = folder / "model.bf16.gguf", folder / "model.gguf"
        convert = [args.genai or sys.executable, "-c", CONVERT, str(args.llama_source), str(checkpoint)]
        convert += ["--outfile", str(whole), "--outtype", "bf16"]
        quantize = [str(args.llama_quantize), str(whole), str(small), "Q4_0", str(args.threads)]
        found["llama.cpp"] = (folder, Builder([convert, quantize], small))
    return found


def report(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians by builder, and the wall time of llmforge as a ratio to that of the faster peer."""
    medians = {
        name: {figure: statistics.median(sample[figure] for sample in runs) for figure in FIGURES}
        for name, runs in samples.items()
    }
    peers = {name: figures["wall_s"] for name, figures in medians.items() if not name.startswith("llmforge")}
    ratios = {}
    if peers:
        best = min(peers, key=lambda name: peers[name])
        ratios = {name: medians[name]["wall_s"] / peers[best] for name in medians if name not in peers}
    rounds = min(map(len, samples.values()))
    return {"medians": medians, "ratio_to_the_faster_peer": ratios, "rounds": rounds, "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="random weights in this shape (benchmarks/build.py)")
    parser.add_argument("--checkpoint", type=Path, help="of one's own, instead of --shape")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint and what is built")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout of llmforge to build with")
    parser.add_argument("--genai", metavar="PYTHON", help="interpreter with onnxruntime-genai")
    parser.add_argument("--llama-source", type=Path, metavar="DIR", help="llama.cpp, with convert_hf_to_gguf.py")
    parser.add_argument("--llama-quantize", type=Path, metavar="PROGRAM", help="llama-quantize, compiled")
    parser.add_argument("--full", action="store_true", help="llmforge with int8 KV cache and its own kernels")
    parser.add_argument("--again", metavar="KEY=VALUE", help="build a second time with this value of the recipe")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    if (args.llama_source is None) != (args.llama_quantize is None):
        parser.error("--llama-source and --llama-quantize are given together")
    sys.path.insert(0, str(Path(__file__).parent))
    import build as building

    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint = args.checkpoint or building.make_checkpoint(args.shape, args.work)
    options = argparse.Namespace(
        context=4096, threads=args.threads, block_size=128, method="rtn", symmetric=True, scales="fp32",
        embedding_bits=4, kv8=args.full, kernels=args.full,
    )  # fmt: skip
    recipe = args.work / "recipe.yaml"
    building.write_recipe(recipe, checkpoint, options)
    chosen = builders(args, checkpoint, recipe)
    for file in checkpoint.glob("*.safetensors"):  # so that no side reads it from disk
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass
    for package in ("llmforge", "passes", "recipes", "targets"):  # as pip leaves them, and as the peers are installed
        compileall.compile_dir(args.root / package, quiet=1)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for turn in range(args.rounds):
        for name, (folder, builder) in chosen.items():
            threads = str(args.threads)
            environment = {"OMP_NUM_THREADS": threads}
            if name.startswith("llmforge"):
                environment |= {"PYTHONPATH": str(args.root.resolve()), "LLMFORGE_CACHE": str(folder / "cache")}
            samples[name].append(run(builder, folder, environment))
            print(turn, name, json.dumps(samples[name][-1]), file=sys.stderr, flush=True)
    result = report(samples)
    print("| | " + " | ".join(FIGURES) + " | wall, ratio to the faster peer |")
    print("|---|" + "--:|" * (len(FIGURES) + 1))
    for name, figures in result["medians"].items():
        ratio = result["ratio_to_the_faster_peer"].get(name)
        shown = " | ".join(f"{figures[figure]:.4g}" for figure in FIGURES)
        print(f"| {name} | {shown} | {'' if ratio is None else f'{ratio:.2f}'} |")
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
