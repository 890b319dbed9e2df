"""Latency as a recipe asks for it: its loads and workloads, the device's ceilings, data sheet and price."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.measure import energy, machine, start
from llmforge.measure.footprint import BytesRead
from llmforge.measure.latency import (
    Facts,
    Instruments,
    LatencyRun,
    TimedLoad,
    TimedModel,
    Until,
    host_bandwidth,
    measure,
)
from llmforge.measure.load import scenarios
from llmforge.measure.load.drive import InProcess
from llmforge.measure.load.scenarios import Served
from llmforge.measure.load.workload import LoadRequest, RandomPrompts, longest, read_trace
from llmforge.metrics.latency import Bandwidth, Compute, DataSheet, EngineStart, Footprint, HourlyPrice, Latency
from llmforge.metrics.workload import MeasuredWorkload, Slo
from llmforge.recipe import LatencySpec
from llmforge.serving import Engine, EngineOptions, Runner
from llmforge.targets import Target

_INT8_BYTES = 2.0  # of weights for each multiply-add: below, they are codes, and a CPU multiplies them as int8
_WARMUP_TOKENS = 8


@dataclass
class RecipeLatency:
    """Measures what a recipe asks for of the engine in the folder `artifact`, which `runner` has loaded."""

    artifact: Path
    runner: Runner
    spec: LatencySpec
    target: Target
    read: BytesRead
    threads: int
    ranks: int = 1
    notes: list[str] = field(default_factory=list)  # what could not be measured

    def run(
        self, ours: TimedModel, baseline: TimedModel | None, artifact_bytes: int, progress: Callable[[int, int], None]
    ) -> Latency:
        """Measure all that the recipe asks for: starts and workloads before the loads that take turns."""
        starts, workloads = self._starts(), self._workloads()
        return measure(
            ours,
            baseline,
            self.read.footprint(artifact_bytes),
            LatencyRun(
                loads(self.spec),
                vocabulary=self.runner.config.vocabulary,
                threads=self.threads,
                until=until(self.spec),
                facts=facts(self.target, self.ranks, slo(self.spec)),
                instruments=self._instruments(),
            ),
            starts=starts,
            workloads=workloads,
            progress=progress,
        )

    def _starts(self) -> list[EngineStart]:
        largest = max(loads(self.spec), key=lambda load: load.batch * (load.prompt_tokens + load.output_tokens))
        return [
            start.measure(
                self.artifact,
                threads=self.threads,
                batch=largest.batch,
                prompt_tokens=largest.prompt_tokens,
                output_tokens=largest.output_tokens,
            )
            for _ in range(self.spec.starts)
        ]

    def _workloads(self) -> tuple[MeasuredWorkload, ...]:
        if self.spec.workloads is None:
            return ()
        config = self.runner.config
        prompts = RandomPrompts(config.vocabulary)
        trace = None
        if self.spec.workloads.trace is not None:
            trace = read_trace(self.spec.workloads.trace.data, self.runner.encode, prompts)
            if longest(trace) > config.max_context:
                raise UsageError(
                    f"{self.spec.workloads.trace.data}: a prompt and its answer have {longest(trace)} tokens together; "
                    f"engine.max_context is {config.max_context}",
                    hint="use shorter ones, or a larger engine.max_context",
                )
        planned = scenarios.plan(self.spec.workloads, prompts, trace)
        engines: list[Engine] = []

        def served() -> Served:
            while engines:
                engines.pop().close()
            engine = Engine(self.runner, EngineOptions(max_queue=1 << 20))
            engines.append(engine)
            return Served(InProcess(engine, "engine"), partial(_prefix_hit_share, engine))

        warmup = LoadRequest(tuple(range(min(_WARMUP_TOKENS, config.vocabulary))), 2)
        try:
            return scenarios.measure(planned, served, warmup, slo(self.spec))
        finally:
            while engines:
                engines.pop().close()

    def _instruments(self) -> Instruments:
        if self.target.kind == "cpu":
            return Instruments(host_bandwidth, self._cpu, None, machine.NoiseProbe)
        joules = None
        try:
            joules = energy.counter(0)
        except EnvironmentLacks as error:
            self.notes.append(f"not measured: {error.message}{f' ({error.hint})' if error.hint else ''}")
        return Instruments(self._device_bandwidth, self._gpu, joules, machine.NoiseProbe)

    def _cpu(self) -> Compute:
        return host_compute(self.read, self.threads)

    def _device_bandwidth(self, footprint: Footprint, context: int, threads: int) -> Bandwidth | None:
        """Measure how fast the GPU copies its memory; its caches are too small to hold what a step reads."""
        from llmforge.measure import gpus

        try:
            rate = self.ranks * gpus.copy_bandwidth(gpus.first())
        except EnvironmentLacks as error:
            self.notes.append(f"MBU against this device: not measured: {error.message}")
            return None
        return Bandwidth(
            threads=threads,
            dram_bytes_per_second=rate,
            working_set_bytes=footprint.weight_bytes_per_token + context * footprint.kv_bytes_per_token,
            working_set_bytes_per_second=rate,
            probe="a copy on the device, bytes read and written",
        )

    def _gpu(self) -> Compute:
        from llmforge.measure import ceilings, gpus

        rates: dict[str, float] = {}
        try:
            measured = gpus.matrix_rates(gpus.first(), ceilings.cuda_product(gpus.PRODUCT))
            rates = {dtype: self.ranks * rate for dtype, rate in measured.items()}
        except EnvironmentLacks as error:
            self.notes.append(f"MFU against this device: not measured: {error.message}")
        dtype = "bf16" if "bf16" in rates else "fp16"
        return Compute(dtype=dtype, operations_per_second=rates, probe="ONNX Runtime's MatMul on the device")


def loads(spec: LatencySpec) -> list[TimedLoad]:
    """List the loads: one sequence at each prompt length, then the surface without what was there already.

    Of an encoder: every number of texts at every length.
    """
    if spec.lengths:
        return [TimedLoad(*at, 0, spec.repetitions) for at in sorted({*itertools.product(spec.batches, spec.lengths)})]
    made = {
        (1, prompt, spec.output_tokens): TimedLoad(1, prompt, spec.output_tokens, spec.repetitions)
        for prompt in spec.prompt_tokens
    }
    if (surface := spec.surface) is not None:
        for at in itertools.product(surface.batches, surface.prompt_tokens, surface.output_tokens):
            made.setdefault(at, TimedLoad(*at, surface.repetitions, surface.baseline_repetitions))
        return [made[at] for at in sorted(made)]
    return list(made.values())


def host_compute(read: BytesRead, threads: int) -> Compute:
    """Measure what the CPU multiplies a second, and say in what dtype an engine does, whose tokens `read` so much."""
    from llmforge.measure import ceilings

    rates, probe = ceilings.products(threads)
    each = read.multiply_adds
    codes = each is not None and read.weights < _INT8_BYTES * each
    return Compute(dtype="int8" if codes else "fp32", operations_per_second=rates, probe=probe)


def until(spec: LatencySpec) -> Until | None:
    """Say when a recipe's repetitions end; None: after the number that it gives."""
    return None if spec.precision is None else Until(spec.precision, spec.budget_s)


def slo(spec: LatencySpec) -> Slo | None:
    """Read the bounds of a recipe, which may have none."""
    return None if spec.slo is None else Slo(**spec.slo.model_dump())


def facts(target: Target, ranks: int, slo: Slo | None) -> Facts:
    """Read what the target's file says of `ranks` devices."""
    bandwidth, price = target.bandwidth_gbs, target.usd_per_hour
    sheet = None
    if bandwidth is not None or target.rates:
        sources = [each.source for each in (bandwidth, *target.rates.values()) if each is not None]
        sheet = DataSheet(
            target=target.name,
            bytes_per_second=None if bandwidth is None else ranks * bandwidth.value * 1e9,
            operations_per_second={dtype: ranks * rate.value * 1e12 for dtype, rate in target.rates.items()},
            source=sources[0],
        )
    cost = None
    if price is not None:
        cost = HourlyPrice(usd_per_hour=ranks * price.value, source=price.source, date=price.date)
    return Facts(sheet, cost, slo)


def _prefix_hit_share(engine: Engine) -> float | None:
    stats = engine.stats()
    return stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else None
