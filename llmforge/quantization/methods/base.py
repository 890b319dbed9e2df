"""A method of quantization: options, a demand on calibration, and arithmetic from weights to codes."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from llmforge.quantization.formats import Format

if TYPE_CHECKING:  # what chooses codes counts with a method, not with all that knows what one is
    from llmforge.quantization.grid import Grid
    from llmforge.quantization.grids import Float32, QuantizedMatrix


class InputStatistic(enum.Enum):
    """A sum over the calibration tokens, fp32, that a method may demand of each linear layer.

    x [K] is what the layer reads, behind layers that are quantized already, and x̃ what it would read in the checkpoint;
    r [N] is what the layer's output is added to, r̃ what it would be added to in the checkpoint.
    """

    MOMENTS = "Σ x xᵀ"  # [K, K]
    DRIFT = "Σ (x̃ - x) xᵀ"  # [K, K]
    RESIDUAL = "Σ (r̃ - r) xᵀ"  # [N, K]; only of a layer whose output is added to something
    SUMS = "Σ x̃"  # [K]
    SQUARES = "Σ x̃²"  # [K]


BY_CHANNEL = frozenset({InputStatistic.SUMS, InputStatistic.SQUARES})  # of the checkpoint as it is: one run forwards


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What calibration saw a linear layer, or one expert, read: `tokens` inputs, and the `sums` that were demanded.

    An expert is `routed`: it sees the tokens that chose it, each with its weight there as a factor of x and x̃ - x.
    `held` has the same sums over a part of the tokens alone, for choices that should fit text on which they were not
    made; None: there are too few.
    `outputs` are, of each of the layers on top of each other, the mean of g gᵀ, [N, N], g the gradient of the loss in
    the layer's output; empty where gradients are not known. `threads` is how many may compute.
    A method puts to `notes` what a reader of the report should know of this layer.
    """

    tokens: int
    routed: bool
    sums: Mapping[InputStatistic, Float32]
    held: Mapping[InputStatistic, Float32] | None = None
    outputs: tuple[Float32, ...] = ()
    threads: int = 1
    notes: list[str] = field(default_factory=list)


NO_INPUTS = LayerInputs(0, False, {})  # for a method that demands nothing


class Method(ABC):
    """A way to choose the codes of a weight.

    Subclasses are `pydantic.dataclasses.dataclass(frozen=True)`: each field is an option, typed, bounded and described
    with `Annotated[..., Field(...)]`, and becomes an option of the pass that chooses the method.
    """

    name: ClassVar[str]  # in a recipe
    summary: ClassVar[str]  # what it does, in a line
    formats: ClassVar[tuple[Format, ...]]  # that it can give
    demands: ClassVar[frozenset[InputStatistic]] = frozenset()  # none: it needs no calibration text
    demands_outputs: ClassVar[bool] = False  # whether it uses `LayerInputs.outputs`
    remedy: ClassVar[str] = ""  # an option that helps where the inputs do not allow it, "more damping"

    @classmethod
    def is_by_channel(cls) -> bool:
        """Whether it demands no more than `BY_CHANNEL`, so that weights are quantized when they are written."""
        return bool(cls.demands) and cls.demands <= BY_CHANNEL

    @abstractmethod
    def quantize(self, weight: NDArray[Any], grid: Grid, inputs: LayerInputs = NO_INPUTS) -> QuantizedMatrix:
        """Choose codes for a weight [N, K] of any floating-point dtype, or of several layers that read the same.

        Raises:
            ValueError: the weight is no matrix of finite numbers, or `inputs` do not allow this method.
        """
