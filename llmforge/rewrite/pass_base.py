"""The interface of a pass: a frozen record of options that rewrites a graph, and says what it did."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from llmforge.base import plugins
from llmforge.base.errors import ForgeError, UnsupportedError
from llmforge.base.plugins import Plugin, Seam
from llmforge.ir.scratch import Scratch
from llmforge.quantization.statistics import Demand, Statistics
from llmforge.rewrite.traits import NOTHING_SAID, FinerCodes, Storage, Traits
from llmforge.targets import WORTH, Rate, Target

if TYPE_CHECKING:
    import onnx_ir as ir

    from llmforge.checkpoint.adapters import Adapter
    from llmforge.quantization.grid import Grid
    from llmforge.quantization.methods.base import Method
    from llmforge.quantization.stored import QuantizedSource


class Numerics(enum.Enum):
    """How far a pass may move the logits; the pipeline proves it after every pass."""

    EXACT = "exact"  # bit-equal
    ROUNDING = "rounding"  # same arithmetic in another order: the tolerance of the dtype (`verification.verifier`)
    LOSSY = "lossy"  # within the budget that the recipe states


class Budget(BaseModel):
    """What a lossy pass may cost, against the graph before it, on text of the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kld_mean: float = Field(
        gt=0,
        description="maximum mean KL divergence from the graph before the pass, in nats per token; of embedders and "
        "rerankers, per text",
    )


class Retreat(BaseModel):
    """How a pass that exceeds its budget may lose less: layers that it lost most in get more bits, within a size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: tuple[Literal[4, 5, 6, 8], ...] = Field(
        min_length=1, description="bits that a layer may get, one after another"
    )
    max_bytes: int = Field(gt=0, description="bytes of all weights, at most, after the pass")

    def after(self, bits: int) -> tuple[int, ...]:
        """List what comes after so many bits, the least first."""
        return tuple(sorted({each for each in self.bits if each > bits}))


@dataclass(frozen=True)
class Rewritten:
    """One place that a pass changed."""

    node: str  # name of a node that was there before the pass, or of an initializer
    what: str


@dataclass(frozen=True)
class Skipped:
    """One place that a pass considered and left alone."""

    node: str
    reason: str


@dataclass
class Changes:
    """What a pass did; falsy exactly when the graph is unchanged."""

    rewritten: list[Rewritten] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the reader of a build must not miss: fallbacks

    def __bool__(self) -> bool:
        return bool(self.rewritten)


@dataclass(frozen=True)
class Context:
    """What a pass may look at besides the graph.

    A pass may refuse the target, and cannot read it: what passes write, and their proofs, are reused for every target.
    What is to differ between targets is an option of the pass, or left to the lowering of the engine. Methods return
    where the target allows what they are called after, and raise UnsupportedError, with the figure, where not.
    """

    target: InitVar[Target]
    statistics: Statistics | None = None  # present when any pass of the recipe has demands
    scratch: Scratch | None = None  # where tensors are kept that are read more than once
    stored: QuantizedSource | None = None  # codes of the checkpoint, by tensor; None: it has none
    adapters: Sequence[Adapter] = ()  # that requests choose from
    _target: Target = field(init=False, repr=False)

    def __post_init__(self, target: Target) -> None:
        object.__setattr__(self, "_target", target)

    def require_onnxruntime(self, step: str, why: str) -> None:
        """Return if the target has ONNX Runtime, which the pass `step` wants; `why` says for what, as a sentence."""
        if "onnxruntime" not in self._target.engines:
            raise UnsupportedError(
                f"{step}: target {self._target.name} runs {', '.join(self._target.engines)}; {why}",
                hint=f"leave {step} out of the recipe",
            )

    @property
    def is_cpu(self) -> bool:
        """Whether the target is a CPU with ONNX Runtime, which llmforge's kernels are for."""
        return "onnxruntime" in self._target.engines and self._target.kind == "cpu"

    def require_cpu(self, step: str) -> None:
        """Return if the target is a CPU with ONNX Runtime, for which the kernels of the pass `step` are."""
        if not self.is_cpu:
            raise UnsupportedError(
                f"{step}: target {self._target.name} runs no ONNX Runtime on a CPU, which the kernels are for",
                hint=f"leave {step} out of the recipe, or choose a CPU target",
            )

    def refuse_cpu(self, why: str, hint: str) -> None:
        """Return if the target is no CPU; `why` says what a CPU does not run, with the name of the pass."""
        if self._target.kind == "cpu":
            raise UnsupportedError(f"{why} (target {self._target.name})", hint=hint)

    def require_dtype(self, step: str, dtype: str, otherwise: str = "") -> None:
        """Return if the target, where it is a GPU, computes in `dtype`; `otherwise` ends the hint of the refusal."""
        if self._target.kind == "gpu" and dtype not in self._target.rates:
            raise UnsupportedError(
                f"{step}: target {self._target.name} ({self._target.title}) does not compute in {dtype}; supported: "
                f"{', '.join(self._target.rates)}",
                hint=f"set `dtype` to one of these{otherwise}",
            )

    def require_sparse(self, step: str) -> None:
        """Return if the target multiplies matrices of 2:4 sparsity faster than dense ones, with an engine that does."""
        known = self._target.sparse_speedup()
        if known.times > 1 + WORTH:
            return
        raise UnsupportedError(
            f"{step}: does not pay on target {self._target.name} ({self._target.title}): {known}",
            hint="leave it out: quantize-weights or quantize-channels take fewer bytes",
        )

    def require_fewer_bytes(self, step: str, before: int, after: int) -> None:
        """Return if a decode step that reads `after` of `before` parameters is worth what the pass `step` costs."""
        if (times := before / after) > 1 + WORTH:
            return
        raise UnsupportedError(
            f"{step}: does not pay on target {self._target.name}: a decode step would read {after:,} parameters, not "
            f"{before:,}, {times:.2f} times fewer; {1 + WORTH:.2f} is the least that is worth a loss",
            hint=f"ask for more, or leave {step} out: quantize-weights takes fewer bytes at less loss",
        )

    def require_faster(self, step: str, dtype: Rate, otherwise: str) -> None:
        """Return unless the target is known not to multiply faster in `dtype` than without; `otherwise` is the hint."""
        if (known := self._target.speedup(dtype)) is None or known.times > 1 + WORTH:
            return
        raise UnsupportedError(
            f"{step}: does not pay on target {self._target.name} ({self._target.title}): {known}",
            hint=f"{otherwise}: weights alone take fewer bytes, which is what decoding waits for",
        )


class Pass(Traits, ABC):
    """A named graph transformation.

    Subclasses are `pydantic.dataclasses.dataclass(frozen=True)`: each field is an option, typed, bounded and
    described with `Annotated[..., Field(...)]`. A lossy pass has a required field `budget: Budget`.
    """

    numerics: ClassVar[Numerics]
    requires: ClassVar[frozenset[str]] = frozenset()  # facts that earlier passes of the recipe must provide
    provides: ClassVar[frozenset[str]] = frozenset()
    loads_in: ClassVar[frozenset[str]] = frozenset()  # other runtimes that its interface is for
    adds_adapters: ClassVar[bool] = False  # it puts the adapters into the graph that requests choose from
    drops_caches: ClassVar[bool] = False  # it may take layers out, and with them their caches
    own_operators: ClassVar[bool] = False  # it writes operators that only llmforge has kernels for
    keeps_parameters: ClassVar[bool] = False  # it changes how a graph runs, and not what a file of parameters holds
    servers_alone: ClassVar[bool] = False  # what it says, servers of others do: engines of llmforge gain nothing by it

    @classmethod
    def taking(cls, options: Mapping[str, object]) -> type[Pass]:
        """Give the class that takes `options` as a recipe writes them, those of a plug-in's method among them."""
        return cls

    def uses(self) -> tuple[type[Method], ...]:
        """Name the methods that it computes by: their code is part of its keys in the cache."""
        return ()

    def plugins_used(self) -> tuple[Plugin, ...]:
        """List the plug-ins of those methods.

        Raises:
            PluginError: one clashes with another, or is written for another interface.
        """
        return ()

    def demands(self) -> tuple[Demand, ...]:
        """Name the calibration statistics that `run` will read from its context."""
        return ()

    def stores(self, stored: Grid | None) -> Storage:
        """Say which dtypes it leaves; `stored` is the grid of a checkpoint that comes quantized."""
        return NOTHING_SAID

    @property
    def may_retreat(self) -> Retreat | None:
        """How layers get more bits where the budget is exceeded; None: they do not."""
        return None

    def retreated(self, layer_bits: Mapping[str, int]) -> Pass:
        """Return the pass with more bits for the weights whose parameters match a glob."""
        raise NotImplementedError(f"{self.name} has no layers to give more bits to")

    def finer(self, written: Mapping[str, Any]) -> FinerCodes | None:
        """Say how, in place of options `written`, it keeps weights in more bits; None: only as they are."""
        return None

    @property
    def takes_stored(self) -> bool:
        """Whether codes are those of the checkpoint."""
        return False

    def chooses_codes(self) -> bool:
        """Say whether it chooses codes for weights: on a checkpoint that has codes already, a recipe must want that."""
        return self.writes_codes is not None and not self.takes_stored

    @abstractmethod
    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite `model` in place.

        Raises:
            UnsupportedError: the target cannot run what the pass would write.
        """


def run(step: Pass, model: ir.Model, context: Context) -> Changes:
    """Run `step`; an error that is none of ours leaves with the name of the pass, or of the plug-in that brings it."""
    plugin = of_plugin(step)
    with plugins.blamed(plugin):
        try:
            changes = step.run(model, context)
        except ForgeError:
            raise
        except Exception as error:
            error.add_note(f"in pass {step.name}")
            raise
    if plugin is not None and not isinstance(changes, Changes):
        raise plugins.refusal(plugin, f"it returned a {type(changes).__name__}, not Changes")
    return changes


def of_plugin(step: Pass | type[Pass]) -> Plugin | None:
    """Find the plug-in that brings a pass; None: none does."""
    cls = step if isinstance(step, type) else type(step)
    loaded = (each for each in plugins.found().plugins if each.kind == SEAM.kind and each.name == cls.name)
    return next((each for each in loaded if SEAM.loaded(each) is cls), None)


def _check(plugin: Plugin, given: Any) -> type[Pass]:
    """Return the class that a plug-in gives, if it is a pass and says what ours say."""
    cls: type[Pass] = plugins.step_class(plugin, given, Pass)
    if not isinstance(getattr(cls, "numerics", None), Numerics):
        raise ValueError(f"{cls.__name__}.numerics is no Numerics")
    required = {each.name for each in fields(cast(Any, cls)) if each.default is each.default_factory is MISSING}
    if ("budget" in required) != (cls.numerics is Numerics.LOSSY):
        raise ValueError("a lossy pass has a required option `budget`, and no other pass has one")
    TypeAdapter(cls).json_schema()  # raises where an option has no type that a recipe can write
    return cls


SEAM = Seam("passes", _check)
