"""What a build will take: CPU time by stage, memory and disk, from coefficients measured on this project's own builds.

Two cores of an AMD EPYC (Zen 4), CPU time of all processes. A llama of 6.8 M parameters, a mixture of experts of 11.5 M
and SmolLM2-135M, by the recipes that `init` writes for them: 16 × 512 tokens of calibration, 30,720 of evaluation,
prompts of 32 and 512 tokens timed six times. SmolLM2 took 492 s: 283 to calibrate int4 by GPTQ (11 to observe ranges
alone), 17 for proofs, 137 for quality, 40 for latency; other processes ran beside it, which costs some CPU time. It
answers the 64 chats that ship in 30 s, 24 of them in 12 (one thread): half of it reads the prompts, of 103 tokens each
with what fills them up, half writes 41 tokens each. Four
layers of Qwen3-0.6B (63 M parameters) took 69 s for 2,048 tokens. GPTQ takes a column of inputs after the other, 1.5 ms
each whatever its length up to 3,072; gradients and forward passes grow with the text. TensorRT: eight layers of 320 MB
in all, two profiles, 14 to 17 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmforge.backends import BACKENDS, BackendName
from llmforge.planning.scheme import BITS, DtypeScheme
from llmforge.planning.shape import LayerSizes, Shape

LOAD_S, CHECK_S, IMPORT_S = 1.1, 1.0, 2.0  # llmforge; recipe and data; torch and transformers
TRACE_S = 2.2  # of any depth: layers that repeat are copied
VERIFY_S, VERIFY_S_PER_B = 0.2, 12.0  # the trace against transformers; of 10**9 parameters
HASH_S_PER_GB = 1.7  # of checkpoint
GPTQ_S_PER_COLUMN = 1.5e-3  # of a layer's products; stacked experts are one
GPTQ_S_PER_TOKEN = 4e-11  # and parameter of a layer that a token uses: forward passes and gradients
TRAIN_S_PER_TOKEN = 9e-11  # and parameter that it uses: SmolLM2 took 337 s for 28,000 tokens, on busy cores
OBSERVE_S_PER_TOKEN = 1.3e-11  # and parameter: a forward pass
PASSES_S, PASSES_S_PER_B = 0.3, 9.0  # of 10**9 parameters
PROVE_S, PROVE_S_PER_TOKEN = 0.3, 3e-11  # and parameter, of a third of the windows of budgets
WRITE_S, WRITE_S_PER_B = 0.4, 10.0  # of 10**9 parameters
PLAN_S_PER_GB = 48.0  # of TensorRT's weights: 15.5 s for 0.32 GB
OPEN_S, OPEN_S_PER_B = 0.2, 3.0  # engine and baseline
QUALITY_S_PER_TOKEN = 2.4e-11  # and parameter that it uses: engine and baseline
QUALITY_S_PER_LOGIT = 2.4e-8  # two of which are compared
ASKED_S_PER_TOKEN = 2.5e-11  # and parameter of layers, of a prompt that the checkpoint answers
ANSWERED_S_PER_TOKEN = 4e-11  # and parameter, of an answer; many prompts take a step together
MOST_ASKED_BYTES = 8 << 30  # `MOST_BYTES` of llmforge.measure.chat_answers
TIMED_S_PER_TOKEN = 4.5e-11  # and parameter, of a prompt: engine and baseline
STEP_TOKENS = 8  # tokens of a prompt that take as long as a step, which is bound by memory
STEP_S = 2.8e-3  # of a step besides, of both
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

    def seconds(self, cores: int) -> float:
        """Predict its wall time where nothing else runs."""
        return self.cpu_s / (1 + SHARED * (min(cores, MOST_CORES) - 1) if self.spreads else 1)


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


@dataclass(frozen=True)
class BuildCost:
    """A prediction, good for the order of magnitude."""

    cpu_s: float
    memory_bytes: int
    disk_bytes: int  # besides the checkpoint
    checkpoint_bytes: int
    of: str  # what the coefficients were measured on
    stages: tuple[StageCost, ...] = field(default=(), repr=False)  # in their order

    def seconds(self, cores: int) -> float:
        """Predict the wall time on so many cores where nothing else runs."""
        return sum(stage.seconds(cores) for stage in self.stages)


def calibration_s(shape: Shape, tokens: int) -> float:
    """Predict the CPU time in which so many tokens choose codes for all weights."""
    used = shape.active_parameters - shape.embedding - shape.head
    columns = sum(count * _columns(layer, shape.hidden) for count, layer in shape.layers)
    return GPTQ_S_PER_COLUMN * columns + GPTQ_S_PER_TOKEN * used * tokens


def predict(
    shape: Shape,
    scheme: DtypeScheme,
    backend: BackendName,
    work: BuildWork | None = None,
    *,
    calibration_tokens: int = 0,
) -> BuildCost:
    """Predict a build of `shape` to `scheme`, of the `work` that a recipe asks for.

    Without it nothing is measured, and `calibration_tokens` choose codes (0: none do).
    """
    work = work or BuildWork(calibration_tokens=calibration_tokens)
    checkpoint = shape.parameters * BITS[shape.dtype] // 8
    weights = scheme.weight_bytes(shape)
    stages = tuple(_stages(shape, scheme, backend, work))
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
        yield StageCost("Answer chats", OPEN_S + billions * OPEN_S_PER_B + asked + answered, spreads=True)
    calibrated = OBSERVE_S_PER_TOKEN * used * work.observed_tokens
    if work.calibration_tokens:
        calibrated += calibration_s(shape, work.calibration_tokens)
    if calibrated:
        yield StageCost("Calibrate", calibrated, spreads=True)
    if work.trained_tokens:
        yield StageCost("Recover", TRAIN_S_PER_TOKEN * shape.active_parameters * work.trained_tokens, spreads=True)
    yield StageCost("Pass", PASSES_S + billions * PASSES_S_PER_B)
    plan_s = scheme.weight_bytes(shape) / 1e9 * PLAN_S_PER_GB if BACKENDS[backend].compiled else 0.0
    yield StageCost("Build engine", WRITE_S + billions * WRITE_S_PER_B + plan_s)
    proven = PROVE_S_PER_TOKEN * shape.active_parameters * work.budget_tokens
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


def _columns(layer: LayerSizes, hidden: int) -> int:
    """Count the inputs of a layer's products: of queries, keys, values, gate and up, and of the two behind them."""
    attention = layer.attention
    mixed = hidden if attention is None else attention.heads * attention.value_dim
    inner = layer.expert // (3 * hidden) if layer.experts else layer.width // 2
    return 5 * hidden + mixed + inner
