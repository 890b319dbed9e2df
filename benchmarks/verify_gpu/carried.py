"""The checks of a pack: engines are there, and are only run. Nothing here needs torch, a trace or a reader of recipes.

In their order, so that a lease that ends early has settled what comes first: the device and its copy bandwidth; whether
the provider opens an engine at all (else nothing else runs); logits beside those of the CPU, with and without cuDNN;
captures; heads, masses and guesses beside numpy's; then the speed of a large shape with drawn weights.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks.verify_gpu import checks, opening, speed
from benchmarks.verify_gpu.scale import Scale
from benchmarks.verify_gpu.steps import Result, Run, Step, named
from llmforge.base.errors import VerificationError
from llmforge.ir.interface import TopLogits, mass_blocks
from llmforge.runtime.config import DATA_FILE, FILE, RuntimeConfig
from llmforge.runtime.interface import StepInputs
from llmforge.runtime.sampling.sampler import TokenSampler, guesses, sample_top_logits
from llmforge.serving import Engine, EngineOptions, Request, Runner, Sampling

CONTENT, PACK, WEIGHTS, EXPECTED, FACTS = "content", "pack.json", "weights.json", "expected.npz", "facts.json"
SLOTS, NO_CUDNN = "slots", "without-cudnn"
SDPA_KERNEL, WITHOUT_CUDNN = "sdpa_kernel", "19"  # of the CUDA provider: flash, memory-efficient and unfused
PATTERN_BYTES = 1 << 24
SPREAD = 0.02  # standard deviation of drawn weights
RIGHT_GUESSES = 15 / 16  # below it a session waits for its tokens
SAME_TOKENS = 3 / 4  # of requests whose answers are equal with guesses and without: rows that meet are others each time
REQUESTS, ANSWER = 8, 12

_FLOATS = {"FLOAT16": np.float16, "FLOAT": np.float32}


def parity_cases(scale: Scale) -> Iterator[tuple[str, str, str | None]]:
    """List precision, model and `engine.kv_cache` of the engines whose logits are compared."""
    for precision, models in scale.parity.items():
        for model in models:
            yield precision, model, None
    yield scale.plain, "llama", SLOTS


def engine_name(precision: str, model: str, kv_cache: str | None) -> str:
    """Name the folder of such an engine."""
    return "-".join(filter(None, (precision, model, kv_cache)))


def plan(scale: Scale) -> list[Step]:
    """List the steps in their order."""
    first = engine_name(scale.plain, "llama", None)
    made = [
        Step("environment", 120, environment),
        Step("provider", 120, named(provider, first), ("environment",)),
    ]
    opens = ("provider",)
    for precision, model, kv_cache in parity_cases(scale):
        suffix = f"-{kv_cache}" if kv_cache else ""
        made.append(Step(f"parity:{precision}{suffix}:{model}", 120, named(parity, precision, model, kv_cache), opens))
    made.append(Step(f"parity:{scale.plain}-{NO_CUDNN}:llama", 120, named(without_cudnn, first), opens))
    for suffix, folder in (("", first), (f":{SLOTS}", engine_name(scale.plain, "llama", SLOTS))):
        made.append(Step(f"capture{suffix}", 180, named(capture, folder), opens))
    made.append(Step("heads", 180, heads, opens))
    for model, shape in scale.models.items():
        for precision in shape.precisions:
            name = f"{model}:{precision}"
            made.append(Step(f"build:{name}", 180, named(draw, model, precision), opens))
            done = (f"build:{name}",)
            of_it = named(checks.throughput, model, f"llmforge-{precision}")
            made.append(Step(f"speed:1:{model}:llmforge-{precision}", 400, of_it, done))
            made.append(Step(f"contexts:{name}", 300, named(contexts, model, precision), done))
        profiled = named(checks.profile, model, shape.precisions[0])
        made.append(Step("profile", 300, profiled, (f"build:{model}:{shape.precisions[0]}",)))
    return made


def environment(run: Run) -> Result:
    """Describe the device, and what stands on it."""
    told = json.loads((run.work / PACK).read_text(encoding="utf-8"))
    return checks.machine(run.scale, told["target"], told["data_sheet_gb_per_s"])


def provider(run: Run, name: str) -> Result:
    """Open an engine, and take one step."""
    session = opening.open_engine(_engine(run, name), run.scale)
    cache = session.allocate(1, 128)
    logits = session.step(StepInputs(np.array([[1]]), np.zeros(1, np.int32)), cache.rows(0, 1))
    if not np.isfinite(logits).all():
        raise VerificationError("the first step gives NaN or infinite logits")
    return {"notes": list(getattr(session, "notes", ()))}


def parity(run: Run, precision: str, model: str, kv_cache: str | None) -> Result:
    """Hold logits against those that the CPU of the machine that packed computed."""
    return _compared(run, _engine(run, engine_name(precision, model, kv_cache)), precision)


def without_cudnn(run: Run, name: str) -> Result:
    """Do the same with attention that is not cuDNN's, which from SM 90 on comes first."""
    config = RuntimeConfig.read(_engine(run, name) / "engine" / FILE)
    changed = dataclasses.replace(config, provider_options={**config.provider_options, SDPA_KERNEL: WITHOUT_CUDNN})
    with mock.patch.object(RuntimeConfig, "read", return_value=changed):
        return _compared(run, _engine(run, name), run.scale.plain)


def _compared(run: Run, folder: Path, precision: str) -> Result:
    session = opening.open_engine(folder, run.scale)
    with np.load(folder / EXPECTED) as wanted:
        got = opening.all_logits(session, wanted["ids"], 128)
        found = opening.compared(got, wanted["logits"], run.scale.tolerances[precision])
    return {**found, "notes": list(getattr(session, "notes", ()))}


def capture(run: Run, name: str) -> Result:
    """Record every planned decode step of a small engine."""
    return checks.captures(run.scale, _engine(run, name))


def heads(run: Run) -> Result:
    """Hold heads, masses and guesses of steps against numpy's, and answers with guesses against those without."""
    runner = opening.open_runner(_engine(run, "heads"), run.scale)
    session, random = runner.session, np.random.default_rng(0)
    rows = runner.config.max_batch
    cache, past, right, seen = session.allocate(rows, 64), np.zeros(rows, np.int32), 0, 0
    samplers = [TokenSampler(Sampling(temperature=row % 4 / 2, seed=row), (), ()) for row in range(rows)]
    temperatures = np.array([row % 4 / 2 or 1 for row in range(rows)], np.float32)
    worst = 0.0
    for _ in range(4):
        ids, drawn = random.integers(3, session.vocabulary, (rows, 1)), guesses(samplers, [0] * rows)
        step = session.begin_decode(StepInputs(ids, past, temperatures=temperatures, draws=drawn), cache.rows(0, rows))
        found = step.top_logits()
        whole = np.stack([step.logits(row).copy() for row in range(rows)])
        worst = max(worst, _check_head(found, whole, temperatures))
        guessed = step.next_ids().copy()
        tokens = [each and each.token for each in sample_top_logits(samplers, found, step.blocks)]
        right += sum(a == b for a, b in zip(tokens, guessed.tolist(), strict=True) if a is not None)
        seen += sum(token is not None for token in tokens)
        past += 1
    if right < RIGHT_GUESSES * seen:
        raise VerificationError(f"of {seen} tokens the device guessed {right}")
    del cache
    with_guesses = answers(runner)
    with mock.patch.object(type(session), "guesses_tokens", False):
        without = answers(runner)
    same = sum(a == b for a, b in zip(with_guesses, without, strict=True))
    if same < (REQUESTS if run.scale.dry else SAME_TOKENS * REQUESTS):
        raise VerificationError(f"with guesses {same} of {REQUESTS} answers are those without")
    return {"masses_error": worst, "guessed": right, "tokens": seen, "same_answers": same, "answers": REQUESTS}


def _check_head(found: TopLogits, whole: NDArray[np.float32], temperatures: NDArray[np.float32]) -> float:
    """Hold one step's heads against its whole rows; give the largest error of a mass, relative to the largest of it.

    Raises:
        VerificationError: a head is not the largest of its row, or a mass is off.
    """
    order = -np.sort(-whole, axis=-1)[:, : found.logits.shape[1]]
    if not (np.array_equal(found.logits, order) and np.array_equal(np.take_along_axis(whole, found.ids, -1), order)):
        raise VerificationError("a head is not the largest logits of its row")
    blocks, size = mass_blocks(whole.shape[1])
    weights = np.exp((whole.astype(np.float64) - order[:, :1]) / temperatures[:, None])
    weights[whole > order[:, -1:]] = 0
    padded = np.pad(weights, ((0, 0), (0, blocks * size - whole.shape[1])))
    wanted = padded.reshape(len(whole), blocks, size).sum(-1)
    worst = float((np.abs(found.masses - wanted) / wanted.max(-1, keepdims=True)).max())
    if not worst <= 1e-3:
        raise VerificationError(f"a mass of a step is off by {worst:.2g} of the largest")
    return worst


def answers(runner: Runner) -> list[list[int]]:
    """Serve requests at once, greedy and sampled, and give their tokens."""
    random, found = np.random.default_rng(2), [list[int]() for _ in range(REQUESTS)]
    requests = [
        Request(
            tuple(random.integers(3, runner.config.vocabulary, 9).tolist()),
            Sampling(temperature=number % 2, seed=number, max_tokens=ANSWER, ignore_eos=True),
        )
        for number in range(REQUESTS)
    ]
    with Engine(runner, EngineOptions(prefix_cache_bytes=0)) as engine:
        speed.collect(engine, requests, lambda own, token: found[own].append(token))
    return found


def draw(run: Run, model: str, precision: str) -> Result:
    """Draw the weights of a large shape: floats of a small spread, and any codes."""
    folder = _engine(run, f"{model}-{precision}")
    told = json.loads((folder / "engine" / WEIGHTS).read_text(encoding="utf-8"))
    patterns: dict[str, memoryview] = {}
    with (folder / "engine" / DATA_FILE).open("wb") as stream:
        for offset, size, dtype in told:
            pattern = patterns.setdefault(dtype, _pattern(dtype))
            stream.seek(offset)
            for at in range(0, size, PATTERN_BYTES):
                stream.write(pattern[: size - at])
        stream.truncate(max((offset + size for offset, size, _ in told), default=0))
    facts: Result = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return {**facts, "size_bytes": (folder / "engine" / DATA_FILE).stat().st_size}


def _pattern(dtype: str) -> memoryview:
    random = np.random.default_rng(0)
    if dtype in ("UINT8", "INT8"):
        return memoryview(random.integers(0, 256, PATTERN_BYTES, np.uint8))
    floats = (SPREAD * random.standard_normal(PATTERN_BYTES // 2)).astype(np.float32)
    if dtype == "BFLOAT16":  # the upper half of a float's bits
        return memoryview((floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return memoryview(
        floats[: PATTERN_BYTES // np.dtype(_FLOATS[dtype]).itemsize].astype(_FLOATS[dtype]).view(np.uint8)
    )


def contexts(run: Run, model: str, precision: str) -> Result:
    """Time decode steps of one row behind long contexts."""
    scale = run.scale
    session: Any = opening.open_engine(_engine(run, f"{model}-{precision}"), scale)
    cache = session.allocate(max(scale.batches), scale.max_context)
    found = {str(each): speed.decode(session, cache, 1, each, scale.tokens) for each in scale.contexts}
    return {"step_s": found, "notes": list(getattr(session, "notes", ()))}


def _engine(run: Run, name: str) -> Path:
    return run.work / "engines" / name
