"""Passes that change nothing and have every kind of option, for tests of what reads passes."""

from typing import Annotated, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.ir import graph
from llmforge.passes.pack_qkv import PackQkv
from llmforge.quantization.statistics import Demand, KvRangeDemand
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten


class Inert(Pass):
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, model: ir.Model, context: Context) -> Changes:
        return Changes()


@dataclass(frozen=True)
class Tidy(Inert):
    """Tidy up."""

    name: ClassVar[str] = "tidy-up"


@dataclass(frozen=True)
class Lay(Inert):
    """Lay the ground."""

    name: ClassVar[str] = "lay-ground"
    provides: ClassVar[frozenset[str]] = frozenset({"ground"})


@dataclass(frozen=True)
class Squeeze(Inert):
    """Squeeze weights.

    All of them.
    """

    name: ClassVar[str] = "squeeze-weights"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    requires: ClassVar[frozenset[str]] = frozenset({"ground"})

    budget: Annotated[Budget, Field(description="what it may cost")]
    bits: Annotated[Literal[4, 8], Field(description="bits of a weight")] = 4
    block_size: Annotated[int, Field(ge=16, le=256, description="neighbours that share a scale")] = 32
    damping: Annotated[float, Field(gt=0, description="share of the mean diagonal")] = 0.01
    method: Literal["plain", "calibrated"] = "plain"
    layers: tuple[int, ...] = ()

    def demands(self) -> tuple[Demand, ...]:
        return (KvRangeDemand(),) if self.method == "calibrated" else ()


REGISTRY: tuple[type[Pass], ...] = (Tidy, Lay, Squeeze)


@dataclass(frozen=True)
class LieDeep(Pass):
    """Do to every layer what is right, and to one of them, `layer`, something else."""

    WAYS: ClassVar[tuple[str, ...]] = (
        "nothing",
        "weight",
        "packed",
        "operator",
        "attribute",
        "swap",
        "cache",
        "output",
    )
    name: ClassVar[str] = "lie-deep"
    how: str
    layer: int
    numerics: Numerics  # type: ignore[misc]  # an instance's own, in a test only

    def run(self, model: ir.Model, context: Context) -> Changes:
        if self.how == "nothing":
            return self._flip(model, context)
        changes = PackQkv().run(model, context) if self.how == "packed" else self._flip(model, context)
        getattr(self, f"_{self.how}")(model)
        return changes

    def _flip(self, model: ir.Model, context: Context) -> Changes:
        """Negate the gate of each layer twice: exact."""
        changes = Changes()
        for node in [node for node in model.graph if node.op_type == "Sigmoid"]:
            gate = node.inputs[0]
            assert gate is not None
            [once] = graph.insert(node, "Neg", [gate], name=f"{node.name}/once")
            [twice] = graph.insert(node, "Neg", [once], name=f"{node.name}/twice")
            once.name, twice.name = f"{node.name}/once", f"{node.name}/twice"
            node.replace_input_with(0, twice)
            changes.rewritten.append(Rewritten(str(node.name), "negated twice"))
        return changes

    def _scale(self, model: ir.Model, name: str) -> None:
        value = model.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None
        assert value.shape is not None
        value.const_value = ir.LazyTensor(
            lambda: ir.Tensor(tensor.numpy() * np.float32(1.01), name=name), tensor.dtype, value.shape, name=name
        )

    def _weight(self, model: ir.Model) -> None:
        """Scale a weight that the pass has nothing to do with."""
        self._scale(model, f"model.layers.{self.layer}.mlp.down_proj.weight")

    def _packed(self, model: ir.Model) -> None:
        """Scale a weight that the pass made."""
        self._scale(model, f"model.layers.{self.layer}.self_attn.qkv_proj.weight")

    def _operator(self, model: ir.Model) -> None:
        self._node(model, "sigmoid").op_type = "Tanh"

    def _attribute(self, model: ir.Model) -> None:
        self._node(model, "normed").attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.1)

    def _swap(self, model: ir.Model) -> None:
        """Normalize with the weight of another norm of the layer."""
        other = model.graph.initializers[f"model.layers.{self.layer}.post_attention_layernorm.weight"]
        self._node(model, "normed").replace_input_with(1, other)

    def _cache(self, model: ir.Model) -> None:
        """Let the layer read and write the caches the wrong way round."""
        attention = self._node(model, "attention")
        for number in (3, 4):
            inputs = {value.name: value for value in model.graph.inputs}
            other = inputs[f"past_key_values.{self.layer}.{'value' if number == 3 else 'key'}"]
            attention.replace_input_with(number, other)

    def _output(self, model: ir.Model) -> None:
        """Give the logits of one row for those of another: no layer's lie, and seen at the end alone."""
        node = next(
            node for node in model.graph if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 1
        )
        hidden = node.inputs[0]
        assert hidden is not None
        [again] = graph.insert(node, "Add", [hidden, hidden], name="doubled")
        again.name = "doubled"
        node.replace_input_with(0, again)

    def _node(self, model: ir.Model, what: str) -> ir.Node:
        names = (f"l{self.layer}_{what}", f"l{self.layer}_{what}_node")
        return next(node for node in model.graph if node.name in names)
