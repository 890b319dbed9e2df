"""What a build will take: CPU time by stage, memory and disk, from coefficients measured on this project's own builds.

Two cores of an AMD EPYC (Zen 4) with the rates of `REFERENCE`, CPU time of all processes; other machines, or that one
on another day, are predicted by their rates. The recipes that `init` writes: a llama of 6.8 M parameters took 58 s (12
to calibrate int4 by GPTQ on 16 × 512 tokens, 16 for quality on 30,720, 6 for latency), a mixture of experts of 11.5 M
72 s (16, 19, 8), SmolLM2-135M, in 6 bits that take no calibration, 226 s (38 for passes and proofs, 23 for the answers
of 24 chats, 95 for quality on 15,360 tokens, 60 for latency). int4 by GPTQ of SmolLM2-135M: 180 s beside other
processes. GPTQ's time is that of forward passes and gradients, which grow with the text, and of rounding, which grows
with rows and pairs of inputs: 125 CPU s for SmolLM2-135M alone, 839 for the shape of Qwen3-0.6B and twice the
tokens, 400 and 648 for one and two layers of Qwen3-30B-A3B's (python -m benchmarks.calibration). Qwen3-0.6B,
rounded to nearest, without validation: 60 s beside other processes. TensorRT: eight layers of 320 MB in all, two
profiles, 14 to 17 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llmforge.backends import BACKENDS, BackendName
from llmforge.measure.rates import MachineRates
from llmforge.planning.scheme import BITS, DtypeScheme
from llmforge.planning.shape import LayerSizes, Shape

REFERENCE = MachineRates(products=1.09e11, python=1.54e7)  # of those cores, when they were measured
LOAD_S, CHECK_S, IMPORT_S = 1.6, 1.0, 2.6  # llmforge; recipe and data; torch and transformers
TRACE_S = 2.5  # of any depth: layers that repeat are copied
VERIFY_S, VERIFY_S_PER_B = 0.2, 14.0  # the trace against transformers; of 10**9 parameters
HASH_S_PER_GB = 1.7  # of checkpoint
# Of rounding, for each row of a weight and pair of its inputs; experts and tables are not rounded again with the errors
# of other rows in view, and those of a table have no corrections.
ROUND_S_PER_PAIR, ROUND_S_PER_EXPERT_PAIR, ROUND_S_PER_TABLE_PAIR = 3e-10, 1.85e-10, 8e-11
ROUND_S_PER_COLUMN, ROUND_S_PER_EXPERT = 9e-5, 0.1  # of a layer's products; stacked experts are one
GPTQ_START_S = 3.0
GPTQ_S_PER_TOKEN = 7.7e-11  # and parameter of a layer that a token uses: forward passes and gradients
GPTQ_S_PER_TOKEN_AND_LAYER = 6.7e-5
LOSS_S_PER_TOKEN = 2.7e-11  # and parameter of the head, of tokens that gradients are taken of
# … so many, or more where linears have many outputs: those of llmforge.calibration.gradients, which imports torch.
LOSS_TOKENS, LOSS_TOKENS_PER_OUTPUT, MOST_LOSS_TOKENS = 4096, 3, 16384
CARRIED_S_PER_TOKEN = 2e-11  # and parameter, of these what carries tokens through layers and sums their inputs
PRICE_S_PER_PARAMETER = 9e-7  # of linears, whose formats are priced and tried: SmolLM2 took 93 s more than GPTQ
TRAIN_S_PER_TOKEN = 9e-11  # and parameter that it uses: SmolLM2 took 337 s for 28,000 tokens, on busy cores
OBSERVE_S_PER_TOKEN = 1.3e-11  # and parameter: a forward pass
OBSERVE_S_PER_B = 60.0  # of 10**9 parameters, which are read, and looked into: SmolLM2 took 14 s on busy cores
PASSES_S, PASSES_S_PER_B = 0.3, 9.0  # of 10**9 parameters
PROVE_S, PROVE_S_PER_TOKEN = 0.3, 5e-11  # and parameter, of a third of the windows of budgets
ENGINE_TOKENS = 300  # on which the engine is proven as it was written
WRITE_S, WRITE_S_PER_B = 0.4, 10.0  # of 10**9 parameters
PLAN_S_PER_GB = 48.0  # of TensorRT's weights: 15.5 s for 0.32 GB
OPEN_S, OPEN_S_PER_B = 0.2, 3.0  # engine and baseline
QUALITY_S_PER_TOKEN = 3.5e-11  # and parameter that it uses: engine and baseline
QUALITY_S_PER_LOGIT = 3e-8  # two of which are compared
ANSWER_S, ANSWER_S_PER_LAYER = 2.0, 0.2  # of the steps of answers, besides
ASKED_S_PER_TOKEN = 2e-11  # and parameter of layers, of a prompt that the checkpoint answers
ANSWERED_S_PER_TOKEN = 3.5e-11  # and parameter, of an answer; many prompts take a step together
MOST_ASKED_BYTES = 8 << 30  # `MOST_BYTES` of llmforge.measure.chat_answers
TIMED_S_PER_TOKEN = 6.6e-11  # and parameter, of a prompt: engine and baseline
STEP_TOKENS = 8  # tokens of a prompt that take as long as a step, which is bound by memory
STEP_S = 1e-2  # of a step besides, of both
PUBLISH_S = 0.3
START_BYTES = 550_000_000  # resident after the trace
HELD_LAYERS = 2  # with which the trace is verified, in fp32, with the tables
PLANS_DISK = 2  # TensorRT keeps the ONNX with its weights beside the plan
SHARED = 0.7  # of a further core that a stage keeps busy: half of it with 7 M parameters, nearly all with 135 M
MOST_CORES = 8  # that a stage may be trusted to keep busy; seen on two


@dataclass(frozen=True)
class StageCost:
    """A stage; `title` is what the progress of a build calls it, or begins with."""

    title: str
    cpu_s: float
    spreads: bool = False  # over all cores; else it is one thread after the other
    workers: int = 0  # which take `carried_s` of it, one CPU each, beside this machine
    carried_s: float = 0.0

    def seconds(self, cores: int) -> float:
        """Predict its wall time where nothing else runs; workers have CPUs of their own, as fast as those here."""
        here = self.cpu_s / (1 + SHARED * (min(cores, MOST_CORES) - 1) if self.spreads else 1)
        if not self.workers:
            return here
        return here * (1 - self.carried_s / self.cpu_s) + self.carried_s / self.workers

    def at(self, rate: float) -> StageCost:
        """Predict it where a second of CPU time does `rate` times as much."""
        return replace(self, cpu_s=self.cpu_s / rate, carried_s=self.carried_s / rate)


@dataclass(frozen=True)
class BuildWork:
    """What a recipe asks a build to do, besides storing weights."""

    calibration_tokens: int = 0  # that choose codes
    observed_tokens: int = 0  # whose ranges are observed
    budget_tokens: int = 0  # on which budgets of lossy passes are held
    quality_tokens: int = 0  # that are evaluated
    prompt_tokens: int = 0  # of the prompts that are timed, all repetitions together
    timed_steps: int = 0  # of decoding, likewise
    asked_tokens: int = 0  # of the prompts that the checkpoint answers, filled up to the longest of a batch
    answered_tokens: int = 0  # of its answers, at most
    trained_tokens: int = 0  # that train scales
    chooses_formats: bool = False  # of weights, each by what it would lose
    workers: int = 0  # of calibration


@dataclass(frozen=True)
class BuildCost:
    """A prediction, good for the order of magnitude."""

    cpu_s: float
    memory_bytes: int
    disk_bytes: int  # besides the checkpoint
    checkpoint_bytes: int
    of: str  # what the coefficients were measured on
    rates: MachineRates  # of the machine that it is predicted for
    stages: tuple[StageCost, ...] = field(default=(), repr=False)  # in their order

    def seconds(self, cores: int) -> float:
        """Predict the wall time on so many cores where nothing else runs."""
        return sum(stage.seconds(cores) for stage in self.stages)

    @property
    def speed(self) -> tuple[float, float]:
        """How many times as fast as where the coefficients were measured: matrix products, and Python."""
        return self.rates.products / REFERENCE.products, self.rates.python / REFERENCE.python


def calibration_s(shape: Shape, tokens: int) -> float:
    """Predict the CPU time in which so many tokens choose codes for all weights, embedding and head among them."""
    used = shape.active_parameters - shape.embedding - shape.head
    outputs = max(
        max(_mixed(layer, shape.hidden), 0 if layer.experts else _inner(layer, shape.hidden))
        for _, layer in shape.layers
    )
    loss_tokens = min(tokens, max(LOSS_TOKENS, LOSS_TOKENS_PER_OUTPUT * outputs), MOST_LOSS_TOKENS)
    per_token = GPTQ_S_PER_TOKEN * used + GPTQ_S_PER_TOKEN_AND_LAYER * shape.depth
    rounded = sum(count * _rounding_s(layer, shape.hidden) for count, layer in shape.layers)
    tables = ROUND_S_PER_TABLE_PAIR * (shape.embedding + shape.head) * shape.hidden
    loss = LOSS_S_PER_TOKEN * loss_tokens * shape.head_matrix
    return GPTQ_START_S + tokens * per_token + loss + rounded + tables


def predict(
    shape: Shape,
    scheme: DtypeScheme,
    backend: BackendName,
    work: BuildWork | None = None,
    *,
    calibration_tokens: int = 0,
    rates: MachineRates = REFERENCE,
) -> BuildCost:
    """Predict a build of `shape` to `scheme`, of the `work` that a recipe asks for, on a machine of these `rates`.

    Without `work` nothing is measured, and `calibration_tokens` choose codes (0: none do). Stages that spread over
    cores go with the rate of products, others with that of Python.
    """
    work = work or BuildWork(calibration_tokens=calibration_tokens)
    products, python = rates.products / REFERENCE.products, rates.python / REFERENCE.python
    checkpoint = shape.parameters * BITS[shape.dtype] // 8
    weights = scheme.weight_bytes(shape)
    stages = tuple(stage.at(products if stage.spreads else python) for stage in _stages(shape, scheme, backend, work))
    compiled = BACKENDS[backend].compiled
    widest = max(layer.parameters for _, layer in shape.layers)
    held = 4 * (shape.embedding + shape.head + HELD_LAYERS * widest)
    memory = START_BYTES + held + (weights if compiled else 0)
    return BuildCost(
        cpu_s=sum(stage.cpu_s for stage in stages),
        memory_bytes=memory,
        disk_bytes=weights * (PLANS_DISK if compiled else 1),
        checkpoint_bytes=checkpoint,
        of="two cores of an AMD EPYC (Zen 4), with up to 0.13 billion parameters",
        rates=rates,
        stages=stages,
    )


def _stages(shape: Shape, scheme: DtypeScheme, backend: BackendName, work: BuildWork) -> Iterator[StageCost]:
    """Predict the stages in their order."""
    billions = shape.parameters / 1e9
    used = shape.active_parameters - shape.embedding - shape.head
    yield StageCost("Load llmforge", LOAD_S)
    yield StageCost("Check recipe", CHECK_S)
    yield StageCost("Load torch", IMPORT_S)
    yield StageCost("Trace", TRACE_S)
    yield StageCost("Read checkpoint", shape.parameters * BITS[shape.dtype] / 8e9 * HASH_S_PER_GB)
    yield StageCost("Finish proofs", VERIFY_S + billions * VERIFY_S_PER_B, spreads=True)
    if work.answered_tokens and 4 * shape.parameters <= MOST_ASKED_BYTES:
        asked = ASKED_S_PER_TOKEN * used * work.asked_tokens
        answered = ANSWERED_S_PER_TOKEN * shape.active_parameters * work.answered_tokens
        steps = ANSWER_S + ANSWER_S_PER_LAYER * shape.depth
        yield StageCost("Answer chats", billions * OPEN_S_PER_B + steps + asked + answered, spreads=True)
    carried = OBSERVE_S_PER_TOKEN * used * work.observed_tokens
    opened = OBSERVE_S_PER_B * billions if work.observed_tokens else 0.0
    if work.chooses_formats:
        yield StageCost("Calibrate", 0.0)  # opens the text
        yield StageCost("Choose formats", PRICE_S_PER_PARAMETER * used, spreads=True)
    calibrated = carried + opened
    if work.calibration_tokens:
        calibrated += calibration_s(shape, work.calibration_tokens)
        carried += CARRIED_S_PER_TOKEN * used * work.calibration_tokens
    if calibrated:
        yield StageCost("Calibrate", calibrated, spreads=True, workers=work.workers, carried_s=carried)
    if work.trained_tokens:
        yield StageCost("Recover", TRAIN_S_PER_TOKEN * shape.active_parameters * work.trained_tokens, spreads=True)
    yield StageCost("Pass", PASSES_S + billions * PASSES_S_PER_B)
    plan_s = scheme.weight_bytes(shape) / 1e9 * PLAN_S_PER_GB if BACKENDS[backend].compiled else 0.0
    yield StageCost("Build engine", WRITE_S + billions * WRITE_S_PER_B + plan_s)
    proven = PROVE_S_PER_TOKEN * shape.active_parameters * (work.budget_tokens + ENGINE_TOKENS)
    yield StageCost("Finish proofs", PROVE_S + proven, spreads=True)
    yield StageCost("Load engine", OPEN_S + billions * OPEN_S_PER_B)
    if tokens := work.quality_tokens:
        each = QUALITY_S_PER_TOKEN * shape.active_parameters + QUALITY_S_PER_LOGIT * shape.vocabulary
        yield StageCost("Measure quality", tokens * each, spreads=True)
    if work.prompt_tokens or work.timed_steps:
        read = work.prompt_tokens + STEP_TOKENS * work.timed_steps
        timed = TIMED_S_PER_TOKEN * shape.active_parameters * read + STEP_S * work.timed_steps
        yield StageCost("Measure latency", timed, spreads=True)
    yield StageCost("Publish", PUBLISH_S)


def _rounding_s(layer: LayerSizes, hidden: int) -> float:
    """Predict the CPU time in which codes of a layer are chosen, once what its products read is summed."""
    mixed, inner = _mixed(layer, hidden), _inner(layer, hidden)
    columns = 5 * hidden + mixed + inner  # of queries, keys, values, gate and up, and of the two after them
    outwards = hidden * (mixed + (0 if layer.experts else inner))  # parameters that do not read hidden states
    pairs = max(layer.matrices - outwards, 0) * hidden + hidden * mixed**2 + (0 if layer.experts else hidden * inner**2)
    of_expert = 2 * hidden * inner * hidden + hidden * inner**2
    experts = layer.experts * (ROUND_S_PER_EXPERT + ROUND_S_PER_EXPERT_PAIR * of_expert)
    return ROUND_S_PER_PAIR * pairs + ROUND_S_PER_COLUMN * columns + experts


def _mixed(layer: LayerSizes, hidden: int) -> int:
    """Return how many inputs the product after attention has."""
    return hidden if layer.attention is None else layer.attention.heads * layer.attention.value_dim


def _inner(layer: LayerSizes, hidden: int) -> int:
    """Return how many inputs the last product of the layer, or of one of its experts, has."""
    return layer.expert // (3 * hidden) if layer.experts else layer.width // 2
