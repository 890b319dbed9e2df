"""Times of decode steps, ours and torch's: every row has a context, and gets its most probable token in each step."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.verify_gpu.scale import Scale

PIECE = 256  # tokens of a context that are read at once


def decode(session: Any, cache: Any, batch: int, context: int, tokens: int) -> float:
    """Give the median time of a decode step of the first `batch` rows of `cache` behind `context` tokens, in seconds.

    The cache is that of the engine's largest step, over which steps are recorded.
    """
    random = np.random.default_rng(0)
    piece = min(PIECE, session.longest_step or PIECE)
    for row in range(batch):
        ids = random.integers(0, session.vocabulary, (1, context))
        for at in range(0, context, piece):
            session.step(ids[:, at : at + piece], np.array([at], np.int32), cache.rows(row, row + 1))
    size = min((size for size in session.buckets if size >= batch), default=batch)
    ids, past = np.zeros((size, 1), np.int64), np.zeros(size, np.int32)
    past[:batch] = context
    out, view, times = session.logits_array((size, 1, session.vocabulary)), cache.rows(0, size), []
    for _ in range(tokens):
        start = time.perf_counter()
        session.step(ids, past, view, out=out)
        ids[:, 0] = out[:, 0].argmax(-1)
        times.append(time.perf_counter() - start)
        past[:batch] += 1
    return statistics.median(times)


def torch_steps(checkpoint: Path, scale: Scale, *, compiled: bool) -> dict[str, Any]:
    """Time transformers' own model in bf16 with a static cache: as it is, or compiled with CUDA graphs."""
    import torch
    import transformers

    where = "cpu" if scale.dry else "cuda"
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(where).eval()
    step = model.forward
    if compiled:
        backend = {"backend": "eager"} if scale.dry else {"mode": "reduce-overhead"}
        step = torch.compile(model.forward, **backend)
    loaded = time.perf_counter() - start
    found = {}
    for batch in scale.batches:
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


def _wait(torch: Any, where: str) -> None:
    if where == "cuda":
        torch.cuda.synchronize()
