"""Convert computation, weights and caches to fp16 or bf16.

    y = MatMul(x, W)                 stays, with x, W and y in the dtype
    p = Softmax(x)                   becomes  p = Softmax(Cast(x)), in fp32
    logits = MatMul(x, W)            becomes  logits = Cast(MatMul(x, W)): fp32, of the rows that were asked for

Every floating-point initializer that a node in half precision reads is stored in it: a lazy tensor, rounded to nearest
when it is written; a checkpoint of that dtype is stored as it is. Caches of keys, values and convolutions take and give
the dtype; int8 caches stay, and so do their scales, fp32 [1] or [1, kv_heads, 1, head_dim].

Fires for every graph of the dialect in fp32, with whatever passes before it wrote: packed and fused layers,
com.microsoft::GroupQueryAttention, MatMulNBits, MoE and QMoE, whose scales follow the activations. In half precision
compute matrix products, attention, experts, rotary embedding, norms (whose sums are fp32: `stash_type` 1), convolutions
and what is pointwise between them.

What stays in fp32, behind Casts, is listed in `rewrite.precision`; with `head: fp32` the head does, too, its weight
included.

Comes after `fuse-norms`, `pack-qkv`, `pack-gate-up`, `flash-attention`, `quantize-weights`, `fuse-experts` and
`quantize-kv-cache`, which read fp32 graphs. Refused where the target does not compute in the dtype.

Numerics: lossy, within the budget of the recipe, measured in an fp32 twin that rounds as the graph does
(`rewrite.emulation`). A weight or an activation beyond 65504, where fp16 ends, is an error and never an infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass as record
from dataclasses import field
from typing import Annotated, ClassVar, Literal

import onnx_ir as ir
from pydantic import Field
from pydantic.dataclasses import dataclass

from llmforge.base.errors import UnsupportedError
from llmforge.ir import derived, graph, interface, operators
from llmforge.ir.operators import canonical
from llmforge.ir.operators.record import Precision
from llmforge.quantization.grid import Grid
from llmforge.rewrite import precision
from llmforge.rewrite.declared import LowerPrecisionTraits
from llmforge.rewrite.pass_base import Budget, Changes, Context, Numerics, Pass, Rewritten, Skipped
from llmforge.rewrite.traits import Storage

FLOAT = ir.DataType.FLOAT
_DTYPES: Mapping[str, ir.DataType] = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class LowerPrecision(LowerPrecisionTraits, Pass):
    """Convert computation, weights and caches to fp16 or bf16."""

    numerics: ClassVar[Numerics] = Numerics.LOSSY
    provides: ClassVar[frozenset[str]] = frozenset({"precision"})

    budget: Annotated[Budget, Field(description="quality budget of the pass")]
    dtype: Annotated[
        Literal["fp16", "bf16"],
        Field(description="fp16: 11 significant bits, up to 65504; bf16: 8 significant bits, the range of fp32"),
    ]
    head: Annotated[Literal["same", "fp32"], Field(description="dtype of the output head")] = "same"

    def stores(self, stored: Grid | None) -> Storage:
        """Say the dtype of activations."""
        return Storage(compute=self.dtype)

    def run(self, model: ir.Model, context: Context) -> Changes:
        """Rewrite all of `model`.

        Raises:
            UnsupportedError: the target does not compute in the dtype, or the graph is in another half precision.
        """
        context.require_dtype(self.name, self.dtype)
        if self.dtype == "bf16":
            context.refuse_cpu(
                f"{self.name}: ONNX Runtime has no kernels for bf16 on a CPU",
                hint=f"leave {self.name} out of the recipe: a CPU computes in fp32 fastest",
            )
        dtype = _DTYPES[self.dtype]
        operators.complete_dtypes(model)
        if (held := _half_of(model)) is not None:
            if held != dtype:
                raise UnsupportedError(f"{self.name}: the graph computes in {held.name} already, not in {self.dtype}")
            return Changes(skipped=[Skipped(str(model.graph.name), f"already computes in {self.dtype}")])
        for node in model.graph:
            if operators.view(node).precision is Precision.NO_HALF:
                raise UnsupportedError(
                    f"{self.name}: {node.op_type} {node.name} computes in fp32 only",
                    hint=f"leave {self.name} or cpu-kernels out of the recipe",
                )
            if canonical.MoE.matches(node):
                context.refuse_cpu(
                    f"{self.name}: {node.name} becomes a Loop that adds in {self.dtype}; no CPU kernel does",
                    hint="put fuse-experts or quantize-weights before it",
                )
        assignment = precision.assign(model, head_in_fp32=self.head == "fp32")
        _HalfPrecision(model, dtype, self.dtype, assignment).run()
        work = [str(node.name) for node in assignment.half if operators.view(node).precision is Precision.HALF]
        return Changes(
            [Rewritten(name, f"in {self.dtype}") for name in sorted(work)],
            [Skipped(str(node.name), reason) for node, reason in assignment.kept.items()],
        )


def _half_of(model: ir.Model) -> ir.DataType | None:
    """Return the half precision of `model`; None where all of it is fp32."""
    held = [*model.graph.inputs, *model.graph.initializers.values()]
    return next((value.dtype for value in held if value.dtype in _DTYPES.values()), None)


@record(eq=False)
class _HalfPrecision:
    """One run of the pass over one graph."""

    model: ir.Model
    dtype: ir.DataType
    suffix: str  # of what is made in that dtype
    assignment: precision.Assignment
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)

    def run(self) -> None:
        for value in self.model.graph.inputs:
            if precision.is_float(value) and not precision.keeps_fp32(str(value.name)):
                value.type = ir.TensorType(self.dtype)
        for value in list(self.model.graph.initializers.values()):
            if precision.is_float(value) and not value.is_graph_input():
                self._store(value)
        for node in list(self.model.graph):
            self._rewrite(node)
        logits = graph.output_named(self.model, interface.LOGITS)
        if logits.dtype != FLOAT:
            cast = ir.Node("", "Cast", [logits], [ir.AttrInt64("to", int(FLOAT))], name=f"{logits.name}/fp32")
            cast.outputs[0].type = ir.TensorType(FLOAT)
            graph.insert_behind(logits, [cast], self.suffix)

    def _wanted(self, node: ir.Node, index: int) -> ir.DataType:
        """Return the dtype that `node` wants of its floating-point input `index`."""
        read = operators.operand(node, index)
        fixed = read is not None and read.fp32
        return self.dtype if node in self.assignment.half and not fixed else FLOAT

    def _store(self, value: ir.Value) -> None:
        """Store an initializer in the dtype, or a second one beside it where a node in fp32 reads it, too."""
        readers = [(node, index) for node, index in value.uses() if self._wanted(node, index) == self.dtype]
        if not readers:
            return
        tensor, name = graph.tensor(value), str(value.name)
        if len(readers) == len(value.uses()):
            value.const_value = derived.cast(tensor, self.dtype, name)
            value.type = ir.TensorType(self.dtype)
            return
        own = f"{name}.{self.suffix}"
        beside = graph.initializer(self.model, own, derived.cast(tensor, self.dtype, own), graph.sources(value))
        for node, index in readers:
            node.replace_input_with(index, beside)

    def _rewrite(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            if value is not None and precision.is_float(value):
                wanted = self._wanted(node, index)
                if value.dtype != wanted and not precision.keeps_fp32(str(value.name)):
                    node.replace_input_with(index, self._cast(value, wanted, node))
        if node in self.assignment.half:
            for value in node.outputs:
                if precision.is_float(value):
                    value.type = ir.TensorType(self.dtype)

    def _cast(self, value: ir.Value, dtype: ir.DataType, reader: ir.Node) -> ir.Value:
        """Return `value` in `dtype`: one Cast for all readers, in front of the first."""
        if (value, dtype) not in self.casts:
            suffix = "fp32" if dtype == FLOAT else self.suffix
            name = f"{value.name}/{suffix}"
            [cast] = graph.insert(reader, "Cast", [value], {"to": int(dtype)}, name=name)
            cast.name, cast.type, cast.shape = f"{value.name}.{suffix}", ir.TensorType(dtype), value.shape
            self.casts[value, dtype] = cast
        return self.casts[value, dtype]
