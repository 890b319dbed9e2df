"""Count the nodes of decoder graphs beside two peers: python benchmarks/nodes.py --peers PYTHON [--out FILE.md].

For tiny random checkpoints of several architectures: llmforge's graph after its exact and rounding passes, ready for
ONNX Runtime on a CPU, beside those of onnxruntime-genai's model builder and of mobius; and whether each computes what
transformers does, over a prompt longer than every window and five decode steps. PYTHON is the interpreter of an
environment with benchmarks/peers/nodes.txt. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
import transformers
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmforge import passes, targets  # noqa: E402
from llmforge.backends.onnxruntime import builder as engines  # noqa: E402
from llmforge.base.errors import ForgeError  # noqa: E402
from llmforge.checkpoint import Checkpoint  # noqa: E402
from llmforge.ir import dialect, graph  # noqa: E402
from llmforge.rewrite.pass_base import Budget, Context, Pass  # noqa: E402
from llmforge.trace import trace  # noqa: E402
from tests.models import zoo  # noqa: E402

TOLERANCE = 1e-4  # of logits with a standard deviation of about 0.6: a wrong graph is off by far more
SIZES: Mapping[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4}  # heads of 64
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
# name → configuration class of transformers, and what differs from tests.models.zoo.BASE and SIZES
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": zoo.LLAMA3}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "mistral": ("MistralConfig", {"sliding_window": 7, "head_dim": 64}),
    "gemma2": zoo.ZOO["gemma2"],
    "gemma3": (
        "Gemma3TextConfig",
        {**zoo.ZOO["gemma3"][1], "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.75, "sliding_window": None}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.25}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "num_experts": 4, "head_dim": 64, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt_oss": ("GptOssConfig", {**zoo.ZOO["gpt-oss"][1], "layer_types": ["sliding_attention", "full_attention"] * 2}),
}
PROMPT, STEPS = 20, 5
BUILDERS = ("genai", "genai-int4", "mobius-cpu", "mobius-default")
COLUMNS = ("llmforge", "llmforge-genai", "llmforge-int4", *BUILDERS)


PAGE = """# Nodes beside two peers

Written by `python benchmarks/nodes.py --peers PYTHON --out docs/peers-nodes.md`: four-layer checkpoints of random
weights, fp32 for the CPU. `llmforge` is the graph after `fuse-norms`, `pack-qkv`, `pack-gate-up` and `flash-attention`,
ready for ONNX Runtime, subgraphs of experts included; `llmforge-genai` has `genai-interface` (`logits: all`) besides,
some twenty nodes for the whole graph that let a batch be padded on either side; `llmforge-int4` quantizes instead.
`genai` is onnxruntime-genai's model builder, `mobius` runs with the execution providers cpu and default, each with its
defaults.

A number that is struck through belongs to a graph whose logits differ from transformers' (largest |Δ| in brackets, of
logits with a standard deviation of about 0.6), over a prompt of 20 tokens, longer than every window, and five decode
steps of one sequence. int4 graphs, graphs with an interface, and those of `genai` whose windows its own runtime keeps
are counted and not compared. Tiny sizes may be harsher to a builder than real ones.
"""


@dataclass
class Built:
    """One graph of one checkpoint: what it is made of, and how far its logits are off; or why there is none."""

    nodes: int = 0
    operators: Counter[str] = field(default_factory=Counter)
    difference: float | None = None  # None: not compared
    error: str | None = None

    @property
    def right(self) -> bool:
        return self.error is None and self.difference is not None and self.difference <= TOLERANCE

    def __str__(self) -> str:
        if self.error is not None:
            return "–"
        if self.difference is None:
            return str(self.nodes)
        return str(self.nodes) if self.difference <= TOLERANCE else f"~~{self.nodes}~~ (Δ {self.difference:.1g})"


def write_checkpoint(name: str, folder: Path) -> None:
    kind, own = CASES[name]
    zoo.save(getattr(transformers, kind)(**{**zoo.BASE, **SIZES, **own}), folder)


def ours(checkpoint: Path, names: Sequence[str], *, compare: bool) -> Built:
    """Trace and lower with the passes `names`, in the order of `passes.ALL`."""
    try:
        model = trace(Checkpoint.open(checkpoint))
        for step in _steps(names):
            step.run(model, Context(target=targets.load("cpu-avx512-vnni")))
        lowered, _ = engines.lower(model, targets.load("cpu-avx512-vnni"))
    except ForgeError as error:
        return Built(error=error.message)
    built = Built(graph.nodes(lowered), Counter(node.op_type for node in lowered.graph.all_nodes()))
    if compare:
        schedule = zoo.Schedule((PROMPT,), (1,) * STEPS)
        built.difference = zoo.largest_difference(dialect.expand(lowered), zoo.reference(checkpoint), schedule)
    return built


def _steps(names: Sequence[str]) -> Iterator[Pass]:
    for kind in passes.ALL:
        if kind.name in names:
            quantizes = kind.name == "quantize-weights"
            options = (
                {"bits": 4, "block_size": 32, "method": "rtn", "budget": Budget(kld_mean=9.0)} if quantizes else {}
            )
            yield kind(**options)


def theirs(folder: Path, expected: NDArray[np.float32], ids: NDArray[np.int64], *, compare: bool) -> Built:
    """Read the graph in `folder` and, where asked for, run it as a runtime with caches that grow does."""
    (file,) = folder.rglob("*.onnx")
    model = onnx.load(file, load_external_data=False)
    operators = Counter(node.op_type for node in ir.from_proto(model).graph.all_nodes())
    built = Built(sum(operators.values()), operators)
    if not compare or _windows_outside(file.parent):
        return built
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(file, options, ["CPUExecutionProvider"])
        config = transformers.AutoConfig.from_pretrained(folder.parent / "checkpoint")
        built.difference = _drive(session, config, expected, ids)
    except Exception as error:  # noqa: BLE001  # whatever ONNX Runtime says of a peer's graph is a result
        built.error = f"ONNX Runtime: {str(error).splitlines()[0][-200:]}"
    return built


def _windows_outside(folder: Path) -> bool:
    """Say whether onnxruntime-genai keeps attention's window itself, by what it feeds: the graph alone does not."""
    config = folder / "genai_config.json"
    return config.exists() and "sliding_window" in json.loads(config.read_text())["model"]["decoder"]


def _drive(session: ort.InferenceSession, config: Any, expected: NDArray[np.float32], ids: NDArray[np.int64]) -> float:
    """Return the largest |Δlogit| over a prompt (its last row) and decode steps, one sequence, no padding."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    cache = {
        value.name: np.zeros((1, kv_heads, 0, head_dim), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    names = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    done, worst = 0, 0.0
    for count in (PROMPT, *(1,) * STEPS):
        feeds = {
            "input_ids": ids[None, done : done + count],
            "attention_mask": np.ones((1, done + count), np.int64),
            "position_ids": np.arange(done, done + count)[None],
        }
        made = dict(
            zip(outputs, session.run(None, {**{k: v for k, v in feeds.items() if k in names}, **cache}), strict=True)
        )
        cache = {name: made[name.replace("past_key_values", "present")] for name in cache}
        done += count
        worst = max(worst, float(np.abs(made["logits"][0, -1] - expected[done - 1]).max()))
    return worst


def measure(work: Path, names: Sequence[str], peers: Path) -> dict[str, dict[str, Built]]:
    """Build every graph of every checkpoint."""
    for name in names:
        write_checkpoint(name, work / name / "checkpoint")
    command = [peers, ROOT / "benchmarks" / "peers" / "build_graphs.py", work, *names]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, stderr=subprocess.DEVNULL)
    outcomes = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"name"')]
    table: dict[str, dict[str, Built]] = {}
    fused = ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention"]
    ids = np.random.default_rng(0).integers(3, zoo.VOCABULARY, PROMPT + STEPS)
    for name in names:
        checkpoint = work / name / "checkpoint"
        with torch.no_grad():
            expected = zoo.reference(checkpoint)(torch.from_numpy(ids[None])).logits[0].numpy()
        row = table[name] = {
            "llmforge": ours(checkpoint, fused, compare=True),
            "llmforge-genai": ours(checkpoint, [*fused, "genai-interface"], compare=False),
            "llmforge-int4": ours(checkpoint, [*fused, "quantize-weights"], compare=False),
        }
        for outcome in outcomes:
            if outcome["name"] == name:
                builder = outcome["builder"]
                failed = Built(error=outcome["error"])
                compared = builder != "genai-int4"
                row[builder] = (
                    failed if failed.error else theirs(work / name / builder, expected, ids, compare=compared)
                )
    return table


def best_of_peers(row: Mapping[str, Built]) -> int | None:
    """Return the fewest nodes of the graphs of peers that are right; None where none is."""
    return min((row[builder].nodes for builder in BUILDERS if row[builder].right), default=None)


def render(table: Mapping[str, Mapping[str, Built]], peers: Path, work: Path) -> str:
    """Write the page: what is compared, the table, and why a graph is missing."""
    listed = subprocess.run([peers, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    versions = {entry["name"].lower(): entry["version"] for entry in json.loads(listed.stdout)}
    peer = ", ".join(f"{name} {versions[name]}" for name in ("onnxruntime-genai", "mobius-onnx", "transformers"))
    own = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("llmforge", "onnxruntime", "transformers")
    )
    lines = ["| architecture | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [
        "| " + " | ".join([name, *(str(row[column]) for column in COLUMNS)]) + " |" for name, row in table.items()
    ]
    compared = [column for column in COLUMNS if column not in ("llmforge-genai", "llmforge-int4", "genai-int4")]
    right = ", ".join(f"{column} {sum(row[column].right for row in table.values())}" for column in compared)
    notes = [
        f"- {name}, {column}: {str(row[column].error).replace(f'{work}/', '')}"
        for name, row in table.items()
        for column in COLUMNS
        if row[column].error
    ]
    return "\n".join(
        [
            *(PAGE, f"Versions: {own}; peers: {peer}.", "", *lines, ""),
            *(f"Compared and right, of {len(table)}: {right}.", "", "## Why there is none", *notes, ""),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="Python of the environment with the peers")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--work", type=Path, help="an empty folder to keep checkpoints and graphs in; else a temporary one"
    )
    parser.add_argument("--out", type=Path, help="also write the table here")
    parser.add_argument(
        "--operators", action="store_true", help="list the operators where a right peer has fewer nodes"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        table = measure(work, args.only, args.peers)
    text = render(table, args.peers, work)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    for name, row in table.items():
        best = best_of_peers(row)
        if args.operators and best is not None and not 0 < row["llmforge"].nodes <= best:
            print(f"{name}: llmforge {dict(row['llmforge'].operators)}")
            for builder in BUILDERS:
                print(f"{name}: {builder} {dict(row[builder].operators)}")


if __name__ == "__main__":
    main()
