"""One `llmforge bench`: from what was asked for to a report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from llmforge import __version__
from llmforge.base.errors import UsageError
from llmforge.base.http_server import HttpServer
from llmforge.checkpoint.documents import read_documents
from llmforge.measure import machine
from llmforge.measure.load.drive import MOST_IN_FLIGHT, InProcess, Responder
from llmforge.measure.load.encoders import EncoderEndpoint, EncodesInProcess
from llmforge.measure.load.endpoint import Endpoint
from llmforge.measure.load.report import BenchEngine, BenchReport, LoadPoint
from llmforge.measure.load.speculation import speedup
from llmforge.measure.load.sweep import Progress, Setting, SweepPlan, loads, measure, replay, utilization
from llmforge.measure.load.workload import Encode, LoadRequest, Prompts, RandomPrompts, TextPrompts, longest, read_trace
from llmforge.metrics.intervals import Estimate
from llmforge.metrics.latency import Footprint
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.serving.encoder_engine import EncoderEngine, EncoderOptions
from llmforge.serving.encoder_runner import EncoderRunner, load_encoder
from llmforge.serving.engine import Engine
from llmforge.serving.interface import EngineOptions, EngineStats
from llmforge.serving.prompts import read_tokenizer

NO_FOOTPRINT = "MBU: not known, because the artifact's report holds no footprint; build it with validation.latency"
ON_A_DEVICE = "MBU: not known, because the bandwidth of a GPU is not measured here; the artifact's report may tell it"
SEVERAL_A_STEP = "MBU: not known, because speculation gives several tokens a step"


@dataclass(frozen=True)
class LoadSpec:
    """Which requests are sent: every concurrency or rate with every length, or a trace of arrivals.

    `data` is a JSON Lines file whose text prompts are cut from; None: random tokens. With `texts`, requests have so
    many to encode, each of `prompt_tokens`.
    """

    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    trace: Path | None = None
    prompt_tokens: tuple[int, ...] = (128,)
    output_tokens: tuple[int, ...] = (64,)
    data: Path | None = None
    texts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if sum(map(bool, (self.concurrency, self.rates, self.trace))) != 1:
            raise UsageError("expected one of concurrencies, rates and a trace of arrivals")
        if min((*self.concurrency, *self.prompt_tokens, *self.output_tokens, *self.texts), default=1) < 1:
            raise UsageError("concurrencies, prompt and output tokens, texts: expected whole numbers, 1 or more")

    def settings(self) -> list[Setting]:
        """List the points of the sweep: lengths in the outer loop."""
        loads = [*((count, None) for count in self.concurrency), *((None, rate) for rate in self.rates)]
        if self.texts:
            several = itertools.product(self.prompt_tokens, self.texts, loads)
            return [Setting(length, 0, *load, texts) for length, texts, load in several]
        sweep = itertools.product(self.prompt_tokens, self.output_tokens, loads)
        return [Setting(prompt, output, *load) for prompt, output, load in sweep]

    def describe(self, prefix_tokens: int) -> str:
        """Say where prompts are from."""
        source = "random tokens" if self.data is None else f"text of {self.data.name}"
        if self.trace is not None:
            return f"arrivals of {self.trace.name}; prompts without a text: {source}"
        shared = f", the first {prefix_tokens} tokens shared" if prefix_tokens else ""
        return f"prompts: {source}{shared}"


@dataclass(frozen=True)
class LocalEngine:
    """How the engine in this process runs; `footprint` is what its MBU is computed from, where it is known."""

    options: EngineOptions | None = None
    threads: int | None = None
    footprint: Footprint | None = None


def run(
    artifact: Path,
    name: str,
    load: LoadSpec,
    plan: SweepPlan,
    *,
    server: HttpServer | None = None,
    local: LocalEngine = LocalEngine(),
    progress: Progress = lambda done, total: None,
) -> BenchReport:
    """Measure the engine of `artifact`, called `name`, or an OpenAI-compatible `server` of the same tokenizer.

    Raises:
        InputError: the artifact cannot be used.
        UsageError: a prompt and its answer do not fit the context.
        DataError: a file of prompts or arrivals cannot be used.
        EnvironmentLacks: the server does not answer, or denies access.
    """
    config = RuntimeConfig.read(artifact / "engine" / FILE)
    encoder, threads = config.encoder, config.session.resolve(local.threads).threads
    tokenizer = read_tokenizer(artifact / "tokenizer" / "tokenizer.json")
    prompts, trace = _requests(load, config, tokenizer, plan.seed)

    def points_of(responder: Responder) -> list[LoadPoint]:
        if trace is None:
            return measure(responder, load.settings(), prompts, plan, progress)
        return [replay(responder, trace, plan.objective, progress)]

    record: BenchEngine | None = None
    notes: tuple[str, ...] = ()
    responder: Responder
    if server is not None:
        responder = Endpoint(server) if encoder is None else EncoderEndpoint(server, tokenizer, encoder)
        points = points_of(responder)
    elif encoder is not None:
        runner = load_encoder(artifact, local.threads)
        responder, points, note = _encoded(runner, name, points_of)
        notes = (f"{threads} threads; {note}",)
    else:
        with Engine.load(artifact, local.options, local.threads) as engine:
            responder = InProcess(engine, name)
            points, stats = points_of(responder), engine.stats()
            again = trace or loads(load.settings()[0], prompts, plan, (plan.seed, plan.repetitions, 0))[1]
            faster = speedup(engine, again) if stats.drafted_tokens else None
        record = _record(stats, threads, faster)
        points, unknown = _with_bandwidth(points, local.footprint, config, record)
        notes = (*stats.notes, *unknown)
    return BenchReport(
        llmforge=__version__,
        subject=responder.description,
        machine=machine.describe(),
        engine=record,
        workload=load.describe(plan.prefix_tokens),
        warmup=plan.warmup,
        seed=plan.seed,
        objective=None if plan.objective is None else plan.objective.text,
        points=tuple(points),
        notes=notes,
    )


def _with_bandwidth(
    points: list[LoadPoint], footprint: Footprint | None, config: RuntimeConfig, engine: BenchEngine
) -> tuple[list[LoadPoint], tuple[str, ...]]:
    """Add the share of the bandwidth that decoding uses to each point; else say why it is not known."""
    if footprint is None:
        return points, (NO_FOOTPRINT,)
    if config.device is not None:
        return points, (ON_A_DEVICE,)
    if engine.drafted_tokens:
        return points, (SEVERAL_A_STEP,)
    return utilization(points, footprint, slots=engine.slots, threads=engine.threads), ()


def _requests(
    load: LoadSpec, config: RuntimeConfig, tokenizer: Tokenizer, seed: int
) -> tuple[Prompts, list[LoadRequest] | None]:
    """Give what prompts are made of, and the arrivals that are replayed; check that they fit the engine."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    prompts = _prompts(load, encode, config.vocabulary if config.encoder is None else tokenizer.get_vocab_size())
    trace = None if load.trace is None else read_trace(load.trace, encode, prompts, seed=seed)
    _check_lengths(load, trace, config)
    return prompts, trace


def _prompts(load: LoadSpec, encode: Encode, vocabulary: int) -> Prompts:
    if load.data is None:
        return RandomPrompts(vocabulary)
    ids = [token for document in read_documents(load.data) for token in encode(document.text)]
    return TextPrompts(tuple(ids), str(load.data))


def _encoded(
    runner: EncoderRunner, name: str, points_of: Callable[[Responder], list[LoadPoint]]
) -> tuple[Responder, list[LoadPoint], str]:
    """Measure an embedder or a reranker in this process; and say how texts ran together."""
    with EncoderEngine(runner, EncoderOptions(max_queue=MOST_IN_FLIGHT)) as engine:
        responder = EncodesInProcess(engine, name)
        points, stats = points_of(responder), engine.stats()
    runs = max(sum(stats.batches.values()), 1)
    return responder, points, f"{stats.sequences / runs:.1f} texts a run of the graph on average"


def _check_lengths(load: LoadSpec, trace: Sequence[LoadRequest] | None, config: RuntimeConfig) -> None:
    if (encoder := config.encoder) is not None:
        if not load.texts or load.trace is not None:
            raise UsageError(f"the artifact is {encoder.title}: expected numbers of texts, and no trace of prompts")
        if max(load.prompt_tokens) > encoder.max_tokens:
            raise UsageError(
                f"texts of {max(load.prompt_tokens)} tokens; this artifact reads at most {encoder.max_tokens}",
                hint="use shorter ones, or build with a larger engine.max_context",
            )
        return
    if load.texts:
        raise UsageError("numbers of texts: the artifact is a language model, which answers prompts")
    max_context = config.max_context
    needed = max(load.prompt_tokens) + max(load.output_tokens) if trace is None else longest(trace)
    if needed > max_context:
        raise UsageError(
            f"prompt and answer have {needed} tokens together; this artifact allows at most {max_context}",
            hint="use shorter ones, or build with a larger engine.max_context",
        )


def _record(stats: EngineStats, threads: int, faster: Estimate | None) -> BenchEngine:
    looked_up = stats.prefix_query_tokens
    return BenchEngine(
        threads=threads,
        slots=stats.slots,
        prefix_hit_share=stats.prefix_hit_tokens / looked_up if looked_up else None,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        accepted_length=stats.accepted_length,
        speculation_speedup=faster,
    )
