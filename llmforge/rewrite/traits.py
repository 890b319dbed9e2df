"""Traits of a pass beyond its numerics, as data: dtypes that it leaves, what a plan predicts of it, what `init` writes.

`planning`, `init`, `bisect` and exports read these of whatever stands in `passes.ALL`, and know no pass by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmforge.backends.record import BackendRecord, Dtype, StoredDtype
from llmforge.quantization.formats import KvFormat
from llmforge.targets import WORTH, Target

if TYPE_CHECKING:
    from llmforge.quantization.costs import ModelFormats, ProbedCosts
    from llmforge.quantization.grid import Grid, Scale

Goal = Literal["latency", "throughput", "size", "quality"]
# By what shares a scale: a block of inputs, an output feature, 16 inputs in fp8, 32 under a power of two; of experts
# any of these.
Codes = Literal["blocks", "channels", "fp4", "mx", "experts"]


@dataclass(frozen=True)
class Storage:
    """Dtypes in which a decoder is stored and computed, as far as something is said; None: nothing is said."""

    compute: Dtype | None = None  # of activations between layers
    weights: StoredDtype | None = None
    kv: Dtype | None = None
    product: Dtype | None = None  # in which matrices are multiplied
    embedding: StoredDtype | None = None
    head: StoredDtype | None = None
    block: int | None = None  # weights that share a scale; 0: those of an output feature
    symmetric: bool | None = None
    cache: KvFormat | None = None  # that of the CPU kernels, with scales of its own
    scale: Scale | None = None  # as what scales of blocks are stored; None: in the dtype of activations
    minimums: bool | None = None  # each block has one, in place of a zero point

    def or_else(self, other: Storage) -> Storage:
        """Take from `other` what nothing is said about here."""
        return replace(other, **{name: value for name, value in vars(self).items() if value is not None})


NOTHING_SAID = Storage()


@dataclass(frozen=True)
class Deployment:
    """What a prediction or a proposal depends on: where an engine runs, what for, and what the checkpoint is like."""

    target: Target
    backend: BackendRecord
    compute: Dtype
    goal: Goal = "latency"
    caches_latents: bool = False
    is_quantized: bool = False  # the checkpoint comes quantized
    stored: Grid | None = None  # on which its codes lie; None: on none that is known here
    own_kernels: bool = False  # llmforge's CPU kernels are compiled
    is_bf16: bool = False  # the checkpoint is in bf16
    has_experts: bool = False  # … and has routed experts, a tensor for each matrix of each

    @property
    def on_cpu(self) -> bool:
        """Whether the target is a CPU."""
        return self.target.kind == "cpu"

    @property
    def encodes_in_int8(self) -> bool:
        """Whether an embedder or a reranker is to be stored and multiplied in int8: our kernels do, and it pays."""
        faster = self.target.speedup("int8")
        return self.own_kernels and self.goal != "quality" and (faster is None or faster.times > 1 + WORTH)

    @property
    def in_onnxruntime(self) -> bool:
        """Whether ONNX Runtime runs the graph as it is written."""
        return self.backend.module == "onnxruntime"

    @property
    def serves_fp8(self) -> bool:
        """Whether servers of others load the engine and multiply fp8 by fp8 on the target."""
        other = self.backend.export_format
        return other is not None and "channels" in other.codes and not self.on_cpu and "fp8" in self.target.rates

    @property
    def exported(self) -> bool:
        """Whether servers of others load the engine: passes change no more of the model than its codes."""
        return self.backend.export_format is not None


@dataclass(frozen=True)
class FewerKernels:
    """The effect of a pass that saves kernels in every layer, and with `scores` the bytes of attention's scores."""

    kernels: int
    what: str  # for people; `{scores_gb}` are gigabytes of scores of the prompt
    scores: bool = False  # prompts gain by scores that are not written, instead of by kernels


@dataclass(frozen=True)
class OwnKernels:
    """The effect of a pass that lets llmforge's kernels compute quantized layers instead of ONNX Runtime's."""

    what: str


Effect = Storage | FewerKernels | OwnKernels


@dataclass(frozen=True)
class Prediction:
    """A way to use a pass, whose effect `plan` predicts."""

    change: str  # how it is shown: "quantize-weights, bits: 4"
    effect: Effect


@dataclass(frozen=True)
class Proposal:
    """A way to use a pass, which `init` may write into a recipe.

    Of those that store weights it writes the one that the goal gains most from, of all others each.
    """

    options: str = ""  # as a recipe has them; `{budget}` is where the budget stands
    kld: float = 0.0  # of the budget, nats a token
    stores: Storage = NOTHING_SAID
    change: str = ""  # of the `Prediction` that it is judged by
    reason: str = ""  # for people; "": what the prediction says
    calibrated: bool = False  # calibration text chooses what it writes
    observes: bool = False  # it reads calibration text, forwards and once: few tokens will do
    share: float = 1.0  # that its method leaves of what weights rounded to nearest lose
    near_lossless: bool = False  # hardly to be told from the checkpoint
    bits: int = 16  # of a weight, for the goal `size`
    formats: ModelFormats | None = None  # that a probe can measure
    adds: Callable[[ProbedCosts], float] | None = None  # nats a token, by what a probe measured; None: that is unknown
    retreat: tuple[int, ...] = ()  # bits that layers may get where the budget is exceeded
    max_bytes: int | None = None  # that all weights may then take; None: no layer retreats
    rerounds: bool = False  # what layers read is rounded to int8 before it and after it, not to the same numbers

    def against_before(self, costs: ProbedCosts) -> float | None:
        """Predict what it costs against the graph before it; None: that is unknown.

        Where both graphs round what layers read to int8, that counts twice.
        """
        if self.adds is None:
            return None
        return self.adds(costs) + 2 * costs.activations * self.rerounds

    def line(self, name: str) -> str:
        """Write the entry of a recipe's passes, on several lines where layers retreat."""
        budget = f"budget: {{kld_mean: {self.kld:g}}}"
        if self.retreat and self.max_bytes is not None:
            bits = ", ".join(map(str, self.retreat))
            budget += f",\n      retreat: {{bits: [{bits}], max_bytes: {self.max_bytes}}}"
        return name if not self.options else f"{name}: {{{self.options.replace('{budget}', budget)}}}"


@dataclass(frozen=True)
class FinerCodes:
    """How a pass keeps some weights in more bits: once more in the recipe, with these options and its own globs."""

    bits: int
    options: Mapping[str, Any]


class Traits:
    """What a pass declares for `plan` and `init`; a pass that shipped does so in `llmforge.rewrite.declared`."""

    name: ClassVar[str]  # verb-noun, kebab-case
    writes_codes: ClassVar[Codes | None] = None  # of weights, which it chooses or takes from the checkpoint

    @property
    def server_format(self) -> str | None:
        """Name the format that it writes for servers of others, as their table does; None: it has none there."""
        return None

    @classmethod
    def predicts(cls, there: Deployment) -> Iterable[Prediction]:
        """List the ways to use it that a plan judges."""
        return ()

    @classmethod
    def proposes(cls, there: Deployment) -> Iterable[Proposal]:
        """List the ways to use it that `init` chooses from."""
        return ()

    @classmethod
    def proposes_to_encode(cls, there: Deployment) -> Iterable[Proposal]:
        """List the ways to use it that `init` writes for an embedder or a reranker, each of them."""
        return ()
