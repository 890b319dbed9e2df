"""Times of prompts and decode steps, ours and others': of sessions alone, and through the scheduler."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.verify_gpu.scale import Scale
from llmforge.base.errors import EnvironmentLacks, ForgeError
from llmforge.runtime.interface import StepInputs
from llmforge.serving import Chunk, Engine, EngineOptions, Request, Runner, Sampling

PIECE = 256  # tokens of a context that are read at once
REPEATS = 3  # prompts whose median TTFT is given, after one that is not timed
SAMPLED = Sampling(temperature=1.0, ignore_eos=True)
GREEDY = Sampling(ignore_eos=True)


def decode(session: Any, cache: Any, batch: int, context: int, tokens: int) -> float:
    """Give the median time of a decode step of the first `batch` rows of `cache` behind `context` tokens, in seconds.

    The cache is that of the engine's largest step, over which steps are recorded.
    """
    random = np.random.default_rng(0)
    piece = min(PIECE, session.longest_step or PIECE)
    for row in range(batch):
        ids = random.integers(0, session.vocabulary, (1, context))
        for at in range(0, context, piece):
            session.step(StepInputs(ids[:, at : at + piece], np.array([at], np.int32)), cache.rows(row, row + 1))
    size = min((size for size in session.buckets if size >= batch), default=batch)
    ids, past = np.zeros((size, 1), np.int64), np.zeros(size, np.int32)
    past[:batch] = context
    out, view, times = session.logits_array((size, 1, session.vocabulary)), cache.rows(0, size), []
    for _ in range(tokens):
        start = time.perf_counter()
        session.step(StepInputs(ids, past), view, out=out)
        ids[:, 0] = out[:, 0].argmax(-1)
        times.append(time.perf_counter() - start)
        past[:batch] += 1
    return statistics.median(times)


def served(runner: Runner, scale: Scale) -> dict[str, Any]:
    """Time requests through the scheduler: TTFT by length of the prompt, TPOT by rows, greedy and sampled; seconds."""
    random = np.random.default_rng(1)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(random.integers(3, runner.config.vocabulary, length).tolist())

    options = EngineOptions(max_queue=max(scale.batches), prefix_cache_bytes=0)
    with Engine(runner, options) as engine:
        ttft = {}
        for length in scale.prompts:
            firsts = [together(engine, [prompt(length)], GREEDY, 1)[0][0] for _ in range(1 + REPEATS)]
            ttft[str(length)] = statistics.median(firsts[1:])
        tpot: dict[str, dict[str, float]] = {}
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            tpot[name] = {}
            for rows in scale.batches:
                prompts = [prompt(scale.context) for _ in range(rows)]
                tpot[name][str(rows)] = gap(together(engine, prompts, sampling, scale.tokens))
    return {"ttft_s": ttft, "tpot_s": tpot}


def together(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, tokens: int) -> list[list[float]]:
    """Run requests at once; give for each the times of its tokens, in seconds after all were sent."""
    times: list[list[float]] = [[] for _ in prompts]
    wanted = dataclasses.replace(sampling, max_tokens=tokens)
    start = time.perf_counter()
    collect(
        engine,
        [Request(tuple(prompt), wanted) for prompt in prompts],
        lambda own, _: times[own].append(time.perf_counter() - start),
    )
    return times


def collect(engine: Engine, requests: Sequence[Request], receive: Callable[[int, int], None]) -> None:
    """Run requests at once, and give every token with the number of its request to `receive`."""
    left, done, failed = [len(requests)], threading.Event(), []

    def receiver(own: int) -> Callable[[Chunk | ForgeError], None]:
        def take(item: Chunk | ForgeError) -> None:
            if isinstance(item, ForgeError):
                failed.append(item)
            elif item.token_id is not None:
                receive(own, item.token_id)
            if isinstance(item, ForgeError) or item.finish_reason is not None:
                left[0] -= 1
                if not left[0]:
                    done.set()

        return take

    for own, request in enumerate(requests):
        engine.submit(request, receiver(own))
    done.wait()
    if failed:
        raise failed[0]


def gap(times: Sequence[Sequence[float]]) -> float:
    """Give the median time between two tokens of a request, of those between the last first and the first last."""
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    gaps = [b - a for own in times for a, b in itertools.pairwise(own) if a >= begin and b <= end]
    if not gaps:  # so many rows that none decodes before the last prompt is read
        gaps = [b - a for own in times for a, b in itertools.pairwise(own)]
    return statistics.median(gaps)


def torch_steps(checkpoint: Path, scale: Scale, *, compiled: bool) -> dict[str, Any]:
    """Time transformers' own model in bf16 with a static cache: as it is, or compiled with CUDA graphs.

    Each batch is compiled anew: what an earlier one left, torch would generalize.
    """
    import torch
    import transformers

    where = "cpu" if scale.dry else "cuda"
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(where).eval()
    loaded = time.perf_counter() - start
    found = {}
    for batch in scale.batches:
        step = model.forward
        if compiled:
            torch.compiler.reset()
            backend = {"backend": "eager"} if scale.dry else {"mode": "reduce-overhead"}
            step = torch.compile(model.forward, **backend)
        cache = transformers.StaticCache(config=model.config, max_cache_len=scale.max_context)
        ids = torch.randint(0, model.config.vocab_size, (batch, scale.context), device=where)
        times = []
        with torch.inference_mode():
            chosen = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            for at in range(2 * scale.tokens):  # the first half compiles, and records
                place = torch.tensor([[scale.context + at]], device=where)
                _wait(torch, where)
                start = time.perf_counter()
                logits = step(chosen.clone(), past_key_values=cache, position_ids=place.expand(batch, 1)).logits
                chosen = logits[:, -1].argmax(-1, keepdim=True)
                _wait(torch, where)
                times.append(time.perf_counter() - start)
        found[str(batch)] = statistics.median(times[scale.tokens :])
    return {"load_s": loaded, "step_s": found, "torch": torch.__version__}


def vllm(checkpoint: Path, scale: Scale) -> dict[str, Any]:
    """Time vLLM on the checkpoint in bf16, through its own scheduler; as it is installed.

    Raises:
        EnvironmentLacks: it is not.
    """
    if importlib.util.find_spec("vllm") is None or scale.dry:
        raise EnvironmentLacks("vLLM is not installed here", hint="an environment with vllm, and --only 'speed:*:vllm'")
    import vllm

    start = time.perf_counter()
    engine = vllm.LLM(
        model=str(checkpoint), dtype="bfloat16", max_model_len=scale.max_context, max_num_seqs=max(scale.batches),
        enable_prefix_caching=False,
    )  # fmt: skip
    loaded = time.perf_counter() - start
    random = np.random.default_rng(1)

    def seconds(rows: int, length: int, tokens: int, temperature: float) -> float:
        prompts = [{"prompt_token_ids": random.integers(3, 100_000, length).tolist()} for _ in range(rows)]
        sampling = vllm.SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        begun = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun

    ttft = {
        str(length): statistics.median([seconds(1, length, 1, 0.0) for _ in range(1 + REPEATS)][1:])
        for length in scale.prompts
    }
    tpot = {
        name: {
            str(rows): (
                seconds(rows, scale.context, scale.tokens + 1, temperature)
                - seconds(rows, scale.context, 1, temperature)
            )
            / scale.tokens
            for rows in scale.batches
        }
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }
    return {"load_s": loaded, "ttft_s": ttft, "tpot_s": tpot, "vllm": vllm.__version__}


def _wait(torch: Any, where: str) -> None:
    if where == "cuda":
        torch.cuda.synchronize()
