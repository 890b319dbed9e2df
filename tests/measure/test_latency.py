from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import UsageError, VerificationError
from llmforge.gates import verdict
from llmforge.ir import logits_rows
from llmforge.measure import footprint, latency, machine
from llmforge.measure.latency import Instruments, TimedLoad, TimedModel, Until
from llmforge.metrics import catalog
from llmforge.metrics.latency import Bandwidth, Footprint, Noise
from llmforge.metrics.metric import Measured
from llmforge.metrics.workload import Slo
from llmforge.report import view
from llmforge.serving import Sampling, StepOutput

FOOTPRINT = Footprint(artifact_bytes=5000, weight_bytes_per_token=4000, kv_bytes_per_token=10)
BANDWIDTH = 1e6


@dataclass
class Fake:
    """Takes `ttft_ms` a prompt token and `tpot_ms` a later token of a clock that only it moves; 10 times that first."""

    name: str
    clock: list[float]
    log: list[tuple[str, int, bytes]]
    ttft_ms: float
    tpot_ms: float
    short_by: int = 0
    calls: int = field(default=0)

    def generate(self, ids: NDArray[np.int64], tokens: int) -> Iterator[int]:
        self.log.append((self.name, ids.shape[1], ids.tobytes()))
        slow = 10 if self.calls < 2 else 1 + self.calls / 1000  # both warm-ups; then a slow drift
        self.calls += 1
        for i in range(tokens - self.short_by):
            self.clock[0] += slow * (self.ttft_ms * ids.size if i == 0 else self.tpot_ms) / 1e3
            yield i

    @property
    def subject(self) -> TimedModel:
        return TimedModel(self.name, self.generate, load_seconds=0.25)


@dataclass
class Bench:
    clock: list[float]
    log: list[tuple[str, int, bytes]]

    def fake(self, name: str, ttft_ms: float, tpot_ms: float, short_by: int = 0) -> Fake:
        return Fake(name, self.clock, self.log, ttft_ms, tpot_ms, short_by)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    clock = [0.0]
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(latency, "read_bandwidth", lambda size, threads: BANDWIDTH)
    return Bench(clock, [])


def run(artifact: Fake, baseline: Fake | None, **changes: object) -> latency.Latency:
    repetitions = changes.pop("repetitions", 7)
    loads = changes.pop("loads", [TimedLoad(1, prompt, 5, repetitions) for prompt in (4, 16)])
    others = {name: changes.pop(name) for name in ("starts", "workloads", "progress") if name in changes}
    return latency.measure(
        artifact.subject,
        None if baseline is None else baseline.subject,
        FOOTPRINT,
        latency.LatencyRun(loads, **{"vocabulary": 100, "threads": 1, **changes}),  # type: ignore[arg-type]
        **others,  # type: ignore[arg-type]
    )


def test_durations_are_those_of_the_clock_and_warm_up_does_not_count(bench: Bench) -> None:
    got = run(bench.fake("artifact", 1.0, 2.0), bench.fake("baseline", 3.0, 8.0))
    first, second = got.points
    # Calls 0 and 1 warm up (ten times as slow); repetitions are calls 2, 4 … 14 of the first length: median 8.
    assert first.artifact.ttft_ms.p50.value == pytest.approx(4 * 1.008)
    assert first.artifact.tpot_ms.p50.value == pytest.approx(2 * 1.008)
    assert first.artifact.tpot_ms.p95.value == pytest.approx(2 * np.quantile(1 + np.arange(2, 15, 2) / 1000, 0.95))
    assert first.artifact.tokens_per_second == pytest.approx(1000 / 2.016)
    assert second.artifact.ttft_ms.p50.value == pytest.approx(16 * 1.009)
    assert first.baseline is not None
    assert first.baseline.tpot_ms.p50.value == pytest.approx(8 * 1.008)
    assert first.ttft_speedup is not None
    assert first.tpot_speedup is not None
    assert first.ttft_speedup.value == pytest.approx(3)
    assert first.tpot_speedup.value == pytest.approx(4)
    assert first.artifact.itl_ms.p99.value == pytest.approx(2 * 1.014)  # the 4 slowest of 28
    assert (got.artifact_load_ms, got.baseline_load_ms) == (250, 250)


def test_medians_have_bounds_from_six_repetitions_on(bench: Bench) -> None:
    tpot = run(bench.fake("artifact", 1.0, 2.0), None).points[0].artifact.tpot_ms.p50
    assert tpot.low == pytest.approx(2 * 1.002)
    assert tpot.high == pytest.approx(2 * 1.014)
    assert (tpot.samples, tpot.of) == (7, "repetitions")
    few = run(bench.fake("artifact", 1.0, 2.0), None, repetitions=5).points[0].artifact.tpot_ms.p50
    assert (few.low, few.high) == (None, None)


def test_sides_take_turns_on_the_same_new_prompt(bench: Bench) -> None:
    run(bench.fake("A", 1.0, 2.0), bench.fake("B", 3.0, 8.0), repetitions=2)
    assert [(name, tokens) for name, tokens, _ in bench.log] == [("A", 4), ("B", 4), ("A", 16), ("B", 16)] * 3
    prompts = [ids for _, _, ids in bench.log]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == len(prompts) // 2


def test_the_baseline_may_take_its_turn_in_the_first_repetitions_alone(bench: Bench) -> None:
    loads = [
        TimedLoad(1, 4, 5, 3),
        TimedLoad(2, 4, 5, 3, baseline_repetitions=1),
        TimedLoad(4, 4, 5, 3, baseline_repetitions=0),
    ]
    seen: list[tuple[int, int]] = []
    got = run(
        bench.fake("A", 1.0, 2.0), bench.fake("B", 3.0, 8.0), loads=loads, progress=lambda *at: seen.append(at),
        until=Until(0.001, 4.0),
    )  # fmt: skip
    assert "".join(name for name, _, _ in bench.log[:18]) == "ABABA" * 2 + "ABAA" * 2
    both, once, never = got.points
    assert both.baseline is not None
    assert len(both.baseline.generations_ms) == len(both.artifact.generations_ms) > 3  # goes on until it is precise
    assert once.baseline is not None
    assert (len(once.artifact.generations_ms) > 3, len(once.baseline.generations_ms)) == (True, 1)
    assert once.tpot_speedup is not None
    assert (once.tpot_speedup.value, once.tpot_speedup.low) == (pytest.approx(4, rel=0.01), None)
    assert (never.baseline, never.tpot_speedup) == (None, None)
    assert next(done for done, total in seen if done == total) == 18
    said = view.how_measured(got)
    assert "of them in turns with the baseline" in said
    assert not list(verdict._timings(got))  # `verify` makes the same figures of what was kept


def test_prompts_follow_the_seed(bench: Bench) -> None:
    logs = []
    for seed in (1, 1, 2):
        bench.log.clear()
        run(bench.fake("A", 1.0, 2.0), None, seed=seed)
        logs.append(list(bench.log))
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_bandwidth_utilization(bench: Bench) -> None:
    got = run(bench.fake("A", 1.0, 2.0), None)
    assert got.points[0].bytes_read_per_token == 4000 + 10 * (4 + 5 // 2)
    assert got.points[1].bytes_read_per_token == 4000 + 10 * (16 + 5 // 2)
    assert got.points[0].bandwidth_utilization == pytest.approx(4060 / 2.016e-3 / BANDWIDTH)
    assert got.bandwidth.working_set_bytes == 4060


def test_gates_see_the_worst_length(bench: Bench) -> None:
    estimates = catalog.estimates(Measured(latency=run(bench.fake("A", 1.0, 2.0), None)))
    assert estimates["ttft_p50_ms"].value == pytest.approx(16 * 1.009)
    assert estimates["tpot_p50_ms"].value == pytest.approx(2 * 1.009)


def test_without_a_baseline_there_is_nothing_to_compare(bench: Bench) -> None:
    point = run(bench.fake("A", 1.0, 2.0), None).points[0]
    assert (point.baseline, point.ttft_speedup, point.tpot_speedup) == (None, None, None)


def test_a_side_that_stops_early_fails(bench: Bench) -> None:
    with pytest.raises(VerificationError, match="B yielded 4 tokens after a prompt of 4; expected 5"):
        run(bench.fake("A", 1.0, 2.0), bench.fake("B", 1.0, 2.0, short_by=1))


@pytest.mark.parametrize("wrong", [(1, 4, 1, 7), (1, 4, 5, 0), (1, 0, 5, 7), (0, 4, 5, 7)])
def test_nothing_to_measure_is_refused(bench: Bench, wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="expected 1 repetition or more"):
        TimedLoad(*wrong)
    with pytest.raises(UsageError, match="latency of no load"):
        run(bench.fake("A", 1.0, 2.0), None, loads=[])


def test_progress_counts_generations(bench: Bench) -> None:
    seen: list[tuple[int, int]] = []
    run(
        bench.fake("A", 1.0, 2.0),
        bench.fake("B", 1.0, 2.0),
        repetitions=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(done, 8) for done in range(9)]


def test_runner_is_asked_for_greedy_tokens_past_eos() -> None:
    asked: list[tuple[list[list[int]], list[Sampling]]] = []

    def generate_batch(prompts: list[list[int]], samplings: list[Sampling]) -> Iterator[StepOutput]:
        asked.append((prompts, samplings))
        yield StepOutput((7,), (None,))
        yield StepOutput((8,), ("length",))

    subject = TimedModel.of_runner(SimpleNamespace(generate_batch=generate_batch), description="r", load_seconds=1.0)
    assert list(subject.generate(np.array([[1, 2]]), 2)) == [(7,), (8,)]
    assert asked == [([[1, 2]], [Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)])]


FOOTPRINT_GRAPH = """
<ir_version: 11, opset_import: ["" : 24]>
untied (int64[1, sequence] input_ids, float[batch, 2, capacity, 8] "past_key_values.0.key",
        int8[batch, 2, capacity, 16] "past_key_values.0.value")
    => (float[1, sequence, 6] logits, float[batch, 2, capacity, 8] "present.0.key",
        int8[batch, 2, capacity, 16] "present.0.value")
<float[6, 4] embedding = {ZEROS}, float[4, 6] head = {ZEROS}, float[4] norm = {0, 0, 0, 0}>
{
    embedded = Gather (embedding, input_ids)
    scaled = Mul (embedded, norm)
    again = Mul (scaled, norm)
    logits = MatMul (again, head)
    "present.0.key" = Identity ("past_key_values.0.key")
    "present.0.value" = Identity ("past_key_values.0.value")
}
""".replace("ZEROS", "0" + ", 0" * 23)


def test_footprint_leaves_out_the_looked_up_embedding() -> None:
    got = footprint.count(ir.from_onnx_text(FOOTPRINT_GRAPH)).footprint(artifact_bytes=999)
    assert got.artifact_bytes == 999
    assert got.weight_bytes_per_token == 4 * (4 * 6 + 4)
    assert got.kv_bytes_per_token == 2 * 8 * 4 + 2 * 16


def test_weights_of_all_layers_are_one_group_and_none_is_read() -> None:
    def tensor(name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
        lazy = ir.LazyTensor(_not_to_be_read, dtype=dtype, shape=ir.Shape(shape), name=name)
        return ir.Value(name=name, shape=lazy.shape, type=ir.TensorType(dtype), const_value=lazy)

    layers = [tensor(f"h.{layer}.mlp.weight", ir.DataType.INT4, [8, 4]) for layer in range(12)]
    others = [tensor("h.12.mlp.weight", ir.DataType.FLOAT, [8, 4]), tensor("wte.2", ir.DataType.UINT8, [99])]
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=[*layers, *others]), ir_version=10)
    assert footprint.weights(model) == [
        footprint.TensorGroup("h.*.mlp.weight", "int4", tensors=12, size_bytes=12 * 16),
        footprint.TensorGroup("h.*.mlp.weight", "float", tensors=1, size_bytes=128),
        footprint.TensorGroup("wte.2", "uint8", tensors=1, size_bytes=99),
    ]


def _not_to_be_read() -> ir.Tensor:
    raise AssertionError


def test_footprint_counts_a_tied_embedding_once() -> None:
    text = FOOTPRINT_GRAPH.replace(", float[4, 6] head = {0" + ", 0" * 23 + "}", "").replace(
        "logits = MatMul (again, head)", "head = Transpose (embedding)\n logits = MatMul (again, head)"
    )
    assert footprint.count(ir.from_onnx_text(text)).weights == 4 * (6 * 4 + 4)


@pytest.mark.parametrize(
    ("domain", "op_type", "index"),
    [
        ("com.microsoft", "GatherBlockQuantized", 0),
        ("com.microsoft", "GatherBlockQuantized", 2),
        ("", "RotaryEmbedding", 1),
        ("com.microsoft", "GroupQueryAttention", 8),
        ("llmforge.cpu", "GroupQueryAttention", 5),
        ("llmforge.cpu", "Embedding", 1),
    ],
)
def test_footprint_leaves_out_tables_of_which_rows_are_read(domain: str, op_type: str, index: int) -> None:
    table, norm = (ir.val(name, ir.DataType.FLOAT, [8], const_value=ir.tensor([0.0] * 8)) for name in ("table", "norm"))
    inputs: list[ir.Value | None] = [None] * 9
    inputs[index], inputs[6] = table, norm
    node = ir.Node(domain, op_type, inputs)
    model = ir.Model(ir.Graph([], node.outputs, nodes=[node], initializers=[table, norm]), ir_version=10)
    assert footprint.count(model).weights == 32


def test_footprint_counts_the_experts_that_a_token_chooses() -> None:
    """Three ways to hold 8 experts of which 2 are read, beside a norm of 8 numbers."""
    for operator, first, attributes in (
        (("llmforge", "MoE"), 3, {}),
        (("com.microsoft", "MoE"), 2, {"k": 2}),
        (("com.microsoft", "QMoE"), 2, {"k": 2}),
    ):
        norm = ir.val("norm", ir.DataType.FLOAT, [8], const_value=ir.tensor([0.0] * 8))
        held = ir.val("held", ir.DataType.UINT8, [8, 10], const_value=ir.tensor(np.zeros((8, 10), np.uint8)))
        inputs: list[ir.Value | None] = [norm, ir.val("ids", ir.DataType.INT64, [1, 1, 2]), None, None]
        inputs[first] = held
        node = ir.Node(*operator, inputs, ir.convenience.convert_attributes(attributes))
        model = ir.Model(ir.Graph([], node.outputs, nodes=[node], initializers=[held, norm]), ir_version=10)
        assert footprint.count(model).weights == 8 * 4 + 20


def test_bandwidth_of_this_machine_is_plausible() -> None:
    assert 1e8 < machine.read_bandwidth(2**22, threads=2, seconds=0.05) < 1e13


def test_machine_names_no_host() -> None:
    import platform

    described = machine.describe()
    assert described.memory_bytes > 2**28
    assert described.usable_cpus >= 1
    assert described.cpu
    assert platform.node() not in described.model_dump_json() or len(platform.node()) < 4


def test_a_load_of_several_sequences(bench: Bench) -> None:
    loads = [TimedLoad(1, 4, 5, 7), TimedLoad(3, 4, 9, 7)]
    got = run(bench.fake("A", 1.0, 2.0), None, loads=loads)
    one, three = got.points
    assert (one.batch, three.batch, three.output_tokens) == (1, 3, 9)
    assert three.bytes_read_per_token == 4000 + 3 * 10 * (4 + 9 // 2)
    assert three.bandwidth_utilization == pytest.approx(4240 / 2.018e-3 / BANDWIDTH, rel=1e-3)
    assert three.artifact.tokens_per_second == pytest.approx(3 / 2.018e-3, rel=1e-3)
    whole = three.artifact.ttft_ms.p50.value + 8 * three.artifact.tpot_ms.p50.value
    assert three.artifact.e2e_ms.p50.value == pytest.approx(whole)
    assert three.output_tokens_per_second.value == pytest.approx(27e3 / whole)
    assert got.bandwidth is not None
    assert got.bandwidth.working_set_bytes == 4060, "the smallest load"
    gates = catalog.estimates(Measured(latency=got))
    assert gates["tpot_p50_ms"] == one.artifact.tpot_ms.p50, "of one sequence"
    assert gates["throughput_tokens_per_second"] == three.output_tokens_per_second


@dataclass
class Shaky(Fake):
    """Takes times that follow no drift: 1 and 3 in turn for so many generations, then the middle."""

    wide_for: int = 0

    def generate(self, ids: NDArray[np.int64], tokens: int) -> Iterator[int]:
        factor = 2 if self.calls >= self.wide_for else 1 + 2 * (self.calls % 2)
        self.calls += 1
        for i in range(tokens):
            self.clock[0] += factor / 1e3
            yield i


def test_repetitions_go_on_until_intervals_are_narrow(bench: Bench) -> None:
    shaky = Shaky("A", bench.clock, bench.log, 1.0, 1.0, wide_for=9)
    got = run(shaky, None, loads=[TimedLoad(1, 4, 3, 7)], until=Until(0.1, 1e6))
    timed = got.points[0].artifact
    assert got.stopped == "every interval is within ± 10.0%"
    assert 7 < len(timed.generations_ms) < 60
    for figure in (timed.ttft_ms.p50, timed.tpot_ms.p50):
        assert max(figure.high - figure.value, figure.value - figure.low) <= 0.1 * figure.value
    before = [each[0] for each in timed.generations_ms[:-1]]
    assert latency.Estimate.median(before, of="").high > 1.1 * np.median(before), "not a round too late"


def test_only_loads_that_are_not_narrow_go_on(bench: Bench) -> None:
    @dataclass
    class Uneven(Shaky):
        def generate(self, ids: NDArray[np.int64], tokens: int) -> Iterator[int]:
            if ids.shape[1] == 16:
                yield from super().generate(ids, tokens)
            else:
                for i in range(tokens):
                    self.clock[0] += 0.002
                    yield i

    uneven = Uneven("A", bench.clock, bench.log, 1.0, 1.0, wide_for=9)
    got = run(uneven, None, loads=[TimedLoad(1, 4, 3, 7), TimedLoad(1, 16, 3, 7)], until=Until(0.1, 1e6))
    assert len(got.points[0].artifact.generations_ms) == 7
    assert len(got.points[1].artifact.generations_ms) > 7


def test_a_budget_of_seconds_ends_it(bench: Bench) -> None:
    shaky = Shaky("A", bench.clock, bench.log, 1.0, 1.0, wide_for=10**6)
    got = run(shaky, None, loads=[TimedLoad(1, 4, 3, 7)], until=Until(0.01, 0.2))
    assert got.stopped == "the budget of 0.2 s ended"
    assert 0.2 <= bench.clock[0] < 0.22
    short = run(
        Shaky("A", bench.clock, bench.log, 1.0, 1.0, 10**6),
        None,
        loads=[TimedLoad(1, 4, 3, 7)],
        until=Until(0.01, 1e-9),
    )
    assert len(short.points[0].artifact.generations_ms) == 7, "what the recipe asks for is always done"


def test_recorded_times_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "MOST_TIMES", 60)
    sides = [Shaky(name, bench.clock, bench.log, 1.0, 1.0, wide_for=10**6) for name in "AB"]
    got = run(*sides, loads=[TimedLoad(1, 4, 3, 7)], until=Until(0.01, 1e6))
    assert got.stopped == "60 times are recorded"
    assert len(got.points[0].artifact.generations_ms) == 10  # of 3 tokens, on two sides
    monkeypatch.setattr(latency, "MOST_REPETITIONS", 8)
    got = run(*sides, loads=[TimedLoad(1, 4, 3, 7)], until=Until(0.01, 1e6))
    assert got.stopped == "8 repetitions were made"


def test_energy_is_that_of_each_generation(bench: Bench) -> None:
    instruments = Instruments(energy_j=lambda: 50 * bench.clock[0])  # 50 W
    point = run(bench.fake("A", 1.0, 2.0), bench.fake("B", 3.0, 8.0), instruments=instruments).points[0]
    assert point.artifact.joules_per_token.value == pytest.approx(50 * (4 + 8) * 1.008e-3 / 5)
    assert point.baseline is not None
    assert point.baseline.joules_per_token.value == pytest.approx(50 * (12 + 32) * 1.008e-3 / 5)
    assert "joules_per_token" not in run(bench.fake("A", 1.0, 2.0), None).points[0].artifact.figures


def test_noise_is_probed_before_each_round_and_told(bench: Bench) -> None:
    class Meter:
        def __init__(self) -> None:
            self.times: list[float] = []

        def probe(self) -> None:
            self.times.append(1.0 if len(self.times) % 2 else 1.5)

        def read(self) -> Noise:
            return Noise(probe_ms=tuple(self.times), stolen_share=0.0, waits=1, load_average=0.5)

    got = run(bench.fake("A", 1.0, 2.0), None, instruments=Instruments(noise=Meter))
    assert got.noise is not None
    assert got.noise.probe_ms == (1.5, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5)
    assert catalog.estimates(Measured(latency=got))["machine_noise"].value == pytest.approx(0)  # 1.5 is the median
    quiet = got.model_copy(update={"noise": got.noise.model_copy(update={"probe_ms": (1.0,) * 9 + (2.0,) * 3})})
    assert catalog.estimates(Measured(latency=quiet))["machine_noise"].value == pytest.approx(1)


def test_this_machine_tells_its_noise() -> None:
    probe = machine.NoiseProbe()
    for _ in range(3):
        probe.probe()
    found = probe.read()
    assert len(found.probe_ms) == 3
    assert min(found.probe_ms) > 0
    assert found.stolen_share is None or 0 <= found.stolen_share <= 1


def test_good_requests_are_counted_under_the_slo(bench: Bench) -> None:
    # TTFT of the repetitions: 4 ms times 1.002, 1.004 … 1.014: four are within 4.033 ms.
    facts = latency.Facts(slo=Slo(ttft_ms=4.033))
    got = run(bench.fake("A", 1.0, 2.0), None, loads=[TimedLoad(1, 4, 5, 8)], facts=facts)
    point = got.points[0]
    met = sum(each[0] <= 4.033 for each in point.artifact.generations_ms)
    assert 2 <= met <= 7
    assert point.good_share.value == met / 8
    assert point.goodput_rps == pytest.approx(met / 8 * point.output_tokens_per_second.value / 5)
    gate = catalog.estimates(Measured(latency=got))["goodput_share"]
    assert gate.low < met / 8 < gate.high
    assert run(bench.fake("A", 1.0, 2.0), None).points[0].good_share is None


def test_multiply_adds_of_a_traced_graph() -> None:
    """The head alone multiplies: the embedding is looked up, and a norm is a vector. Every row gets logits."""
    model = ir.from_onnx_text(FOOTPRINT_GRAPH)
    assert (footprint.multiply_adds(model), footprint.head_multiply_adds(model, model)) == (4 * 6, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_multiplies_the_rows_that_get_logits(tied: bool) -> None:
    head = "head = Transpose (embedding)" if tied else ""
    weights = "" if tied else f", float[4, 6] head = {{{'0' + ', 0' * 23}}}"
    model = ir.from_onnx_text(f"""
        <ir_version: 11, opset_import: ["" : 24]>
        selected (int64[1, sequence] input_ids, int64[rows] logits_rows) => (float[1, rows, 6] logits)
        <float[6, 4] embedding = {{{"0" + ", 0" * 23}}}, float[4, 4] layer = {{{"0" + ", 0" * 15}}}{weights}>
        {{
            {head}
            embedded = Gather (embedding, input_ids)
            hidden = MatMul (embedded, layer)
            chosen = Gather <axis = 1> (hidden, logits_rows)
            logits = MatMul (chosen, head)
        }}
    """)
    assert (footprint.multiply_adds(model), footprint.head_multiply_adds(model, model)) == (4 * 4 + 4 * 6, 4 * 6)
    every_row = model.clone()
    logits_rows.give_all(every_row)
    assert footprint.head_multiply_adds(model, every_row) == 0


def test_a_device_is_said_to_have_copied_and_one_thing_is_no_plural(bench: Bench) -> None:
    def bandwidth(dram: float) -> dict[str, str]:
        made = Bandwidth(
            threads=1, dram_bytes_per_second=dram, working_set_bytes=10**8, working_set_bytes_per_second=4e12,
            probe="a copy",
        )  # fmt: skip
        return dict(view.latency_facts(got.model_copy(update={"bandwidth": made})))

    got = run(bench.fake("A", 1.0, 2.0), None, loads=[TimedLoad(1, 4, 3, 1), TimedLoad(2, 4, 3, 1)])
    assert bandwidth(4e12)["MBU is relative to"] == "4.00 TB/s (a copy)"
    assert bandwidth(1e12)["MBU is relative to"] == (
        "4.00 TB/s (a copy, 1 thread, a working set of 100 MB; beyond all caches 1.00 TB/s)"
    )
    assert view.how_measured(got) == "1 load of one sequence, 1 of several, 3 output tokens, 1 repetition, 1 thread."
