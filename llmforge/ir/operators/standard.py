"""The operators of ONNX (opset 24) that the package knows.

Sources: https://onnx.ai/onnx/operators; inputs have the names that the dialect's messages use. An operator of a
family that adds no input and no attribute of its own is one line (`Operator.named`), unless annotations name it.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from llmforge.ir import interface
from llmforge.ir.operators.record import (
    ANY,
    BOOL,
    BOOLS,
    FLOAT,
    FLOAT8,
    FLOATS,
    HALVES,
    I32,
    I64,
    INT8,
    INT64,
    NUMBERS,
    Input,
    Operator,
    OptionalInput,
    Output,
    Precision,
    Reduction,
    Seen,
    Sign,
    Stage,
    integer,
    integers,
    optional_integer,
    optional_real,
    optional_tensor,
    real,
    text,
)

_BYTES = frozenset({INT8, FLOAT8})
_SEEN = FLOATS | I64  # numbers that TensorRT was seen to build most operators with
_MOVED = _SEEN | BOOLS


# Pointwise: one number in, one number out ------------------------------------------------------------------------


class _Unary(Operator):
    x = Input()
    pointwise = True
    tensorrt = Seen(FLOATS)


class Abs(_Unary):
    x = Input(NUMBERS)
    moves = True
    sign = Sign.NEVER_NEGATIVE
    tensorrt = Seen(_SEEN)


class Gelu(_Unary):
    approximate = text("none")


Erf = _Unary.named("Erf")
Floor = _Unary.named("Floor")
Neg = _Unary.named("Neg", moves=True, tensorrt=Seen(_SEEN))
Relu = _Unary.named("Relu", moves=True, sign=Sign.NEVER_NEGATIVE)
Sigmoid = _Unary.named("Sigmoid", sign=Sign.NEVER_NEGATIVE)
Tanh = _Unary.named("Tanh")

Cos = _Unary.named("Cos", precision=Precision.FP32)
Exp = _Unary.named("Exp", precision=Precision.FP32, sign=Sign.NEVER_NEGATIVE)
Log = _Unary.named("Log", precision=Precision.FP32)
Reciprocal = _Unary.named("Reciprocal", precision=Precision.FP32)
Sin = _Unary.named("Sin", precision=Precision.FP32)
Softplus = _Unary.named("Softplus", precision=Precision.FP32, sign=Sign.NEVER_NEGATIVE)
Sqrt = _Unary.named("Sqrt", precision=Precision.FP32)


class _Binary(Operator):
    a = Input(NUMBERS)
    b = Input(NUMBERS)
    pointwise = True
    tensorrt: ClassVar[Seen | None] = Seen(_SEEN)

    @property
    def either_way(self) -> tuple[tuple[ir.Value, ir.Value], ...]:
        """Its operands in both orders, for a pattern of which either is one side."""
        return (self.a, self.b), (self.b, self.a)


class Add(_Binary):
    sign = Sign.AS_ALL


class Mul(_Binary):
    sign = Sign.AS_ALL


Div = _Binary.named("Div", sign=Sign.AS_ALL)
Mod = _Binary.named("Mod", stage=Stage.LOWERED, tensorrt=None)
Pow = _Binary.named("Pow", precision=Precision.FP32, sign=Sign.AS_FIRST, tensorrt=Seen(FLOATS))
Sub = _Binary.named("Sub")


class _Compared(Operator):
    a = Input(NUMBERS | BOOLS)
    b = Input(NUMBERS | BOOLS)
    y = Output(dtype=BOOL)
    pointwise = True
    tensorrt = Seen(_SEEN, BOOLS)


Equal = _Compared.named("Equal", tensorrt=Seen(_MOVED, BOOLS))
Greater = _Compared.named("Greater")
GreaterOrEqual = _Compared.named("GreaterOrEqual")
Less = _Compared.named("Less")
LessOrEqual = _Compared.named("LessOrEqual")


class _Logical(Operator):
    a = Input(BOOLS)
    b = Input(BOOLS)
    y = Output(dtype=BOOL)
    pointwise = True
    tensorrt = Seen(BOOLS)


And = _Logical.named("And")
Or = _Logical.named("Or")


class Not(Operator):
    x = Input(BOOLS)
    y = Output(dtype=BOOL)
    pointwise = True
    tensorrt = Seen(BOOLS)


class _Extremum(Operator):
    x = Input(NUMBERS)
    variadic = True
    pointwise = True
    moves = True
    tensorrt = Seen(_SEEN)


class Max(_Extremum):
    sign = Sign.AS_ANY


Min = _Extremum.named("Min")


class Clip(Operator):
    x = Input(NUMBERS)
    min = OptionalInput(NUMBERS, 0)
    max = OptionalInput(NUMBERS, 0)
    pointwise = True
    tensorrt = Seen(_SEEN)


class Where(Operator):
    condition = Input(BOOLS)
    x = Input(NUMBERS | BOOLS)
    y = Input(NUMBERS | BOOLS)
    chosen = Output(like="x")
    pointwise = True
    tensorrt = Seen(_SEEN, BOOLS)


class Cast(Operator):
    x = Input(ANY)
    to = integer()
    saturate = integer(1)
    pointwise = True
    sign = Sign.AS_FIRST
    tensorrt = Seen(_MOVED | I32)

    def output_dtype(self, index: int) -> ir.DataType | None:
        return ir.DataType(self.to)


class CastLike(Operator):
    x = Input(ANY)
    like = Input(ANY)
    saturate = integer(1)
    y = Output(like="like")
    stage = Stage.OWN_ATTENTION


class Identity(Operator):
    x = Input(ANY)
    stage = Stage.LOWERED
    pointwise = True
    moves = True


# What carries the work -------------------------------------------------------------------------------------------


class MatMul(Operator):
    x = Input()
    w = Input()
    linear = True
    precision = Precision.HALF
    tensorrt = Seen(FLOATS)


class Gemm(Operator):
    a = Input(FLOATS, 2)
    b = Input(FLOATS, 2)
    c = OptionalInput()
    alpha = real(1.0)
    beta = real(1.0)
    transA = integer(0)  # noqa: N815  # ONNX's name
    transB = integer(0)  # noqa: N815
    stage = Stage.OWN_ATTENTION
    linear = True
    precision = Precision.HALF


class _Normalization(Operator):
    x = Input()
    scale = Input(FLOATS, 1)
    axis = integer(-1)
    epsilon = real(1e-5)
    stash_type = integer(int(FLOAT), fixed=True)  # ONNX Runtime sums in fp32 whatever it says, others do not


class RMSNormalization(_Normalization):
    epsilon = real(1e-5, stated=True)  # models differ in it: none may take the default by accident
    tensorrt = Seen(FLOATS)


class LayerNormalization(_Normalization):
    bias = OptionalInput(FLOATS, 1)
    tensorrt = Seen(FLOATS)


class SimplifiedLayerNormalization(_Normalization):
    """ONNX Runtime's, in the standard domain."""

    epsilon = real(1e-5, stated=True)
    y = Output()
    inverse_deviation = Output()


class RotaryEmbedding(Operator):
    x = Input(FLOATS, 3)
    cos = Input(FLOATS, 2, rotary=True)
    sin = Input(FLOATS, 2, rotary=True)
    position_ids = Input(I64, 2)
    num_heads = integer()
    interleaved = integer(0)
    rotary_embedding_dim = integer(0)
    precision = Precision.HALF
    tensorrt = Seen(HALVES, I64)


class TensorScatter(Operator):
    """Write a step into a cache: past, new, past lengths → present, along the slots."""

    past = Input(FLOATS, 4)
    new = Input(FLOATS, 4)
    past_lengths = Input(I64, 1)
    axis = integer()
    mode = text("linear")
    stage = Stage.OWN_ATTENTION
    moves = True
    precision = Precision.HALF
    tensorrt = Seen(HALVES, I64)

    def check(self) -> None:
        name = self.past.name or ""
        self.require(interface.PAST.fullmatch(name) is not None, f"writes into {name!r}, which is no cache")
        self.require(self.axis == 2, "writes along another axis than the slots")
        made, wanted = self.output.name, interface.present_of(name)
        self.require(made == wanted, f"makes {made!r}, must make {wanted!r}")


class Softmax(Operator):
    x = Input()
    axis = integer()
    precision = Precision.FP32
    sign = Sign.NEVER_NEGATIVE
    tensorrt = Seen(FLOATS)


class CumSum(Operator):
    x = Input(NUMBERS)
    axis = Input(I64 | I32)
    exclusive = integer(0)
    reverse = integer(0)
    stage = Stage.OWN_ATTENTION
    precision = Precision.FP32


# Codes -----------------------------------------------------------------------------------------------------------


class DequantizeLinear(Operator):
    codes = Input(_BYTES)
    scales = Input(FLOATS, 0, 1, 2)
    zero_points = OptionalInput(_BYTES)
    axis = integer(1)
    block_size = integer(0)  # along the axis; 0: scales are of channels, or of the tensor
    y = Output(like="scales")
    lookup = True
    indivisible = "layers in codes of a channel are not divided; split the graph before quantize-channels"
    tensorrt = Seen(HALVES, _BYTES | {FLOAT, ir.DataType.INT4, ir.DataType.FLOAT4E2M1})


class QuantizeLinear(Operator):
    x = Input()
    scale = Input(FLOATS, 0)
    zero_point = Input(_BYTES, 0)
    y = Output(like="zero_point")
    tensorrt = Seen(HALVES, _BYTES)


# What moves numbers ----------------------------------------------------------------------------------------------


class Gather(Operator):
    data = Input(ANY, table=True)
    indices = Input(I32 | I64)
    axis = integer(0)
    lookup = True
    moves = True
    sign = Sign.AS_FIRST
    tensorrt = Seen(_SEEN, I64)


class GatherND(Operator):
    data = Input(ANY)
    indices = Input(I64)
    batch_dims = integer(0)
    moves = True


class GatherElements(Operator):
    data = Input(NUMBERS)
    indices = Input(I64)
    axis = integer()
    moves = True
    sign = Sign.AS_FIRST
    tensorrt = Seen(_SEEN, I64)


class _Moved(Operator):
    x = Input(ANY)
    moves = True
    sign = Sign.AS_FIRST
    tensorrt = Seen(_MOVED)


class Transpose(_Moved):
    perm = integers()


class Reshape(_Moved):
    shape = Input(I64, 1)
    allowzero = integer(0)


class Expand(_Moved):
    shape = Input(I64, 1)


class Unsqueeze(_Moved):
    axes = Input(I64, 1)


class Squeeze(_Moved):
    axes = OptionalInput(I64, 1)


class Slice(_Moved):
    starts = Input(I64, 1)
    ends = Input(I64, 1)
    axes = OptionalInput(I64, 1)
    steps = OptionalInput(I64, 1)


class Split(_Moved):
    split = OptionalInput(I64, 1)
    axis = integer(0)
    num_outputs = optional_integer()
    most_outputs = 64
    tensorrt = Seen(_SEEN)


class Concat(_Moved):
    axis = integer()
    variadic = True
    sign = Sign.AS_ALL


class OnnxTile(Operator, op_type="Tile"):
    x = Input(NUMBERS | BOOLS)
    repeats = Input(I64, 1)
    stage = Stage.OWN_ATTENTION


class _Scatter(Operator):
    data = Input(NUMBERS)
    indices = Input(I64)
    updates = Input(NUMBERS)
    reduction = text("none")
    stage = Stage.OWN_ATTENTION


class ScatterElements(_Scatter):
    axis = integer()


ScatterND = _Scatter.named("ScatterND")


# Choices and reductions ------------------------------------------------------------------------------------------


class TopK(Operator):
    x = Input()
    k = Input(I64, 1)
    axis = integer(-1)
    largest = integer(1)
    sorted = integer(1)
    values = Output(like="x")
    indices = Output(dtype=INT64)
    moves = True
    sign = Sign.AS_FIRST
    tensorrt = Seen(_SEEN, I64)


class ArgMax(Operator):
    x = Input()
    axis = integer()
    keepdims = integer(1)
    select_last_index = integer(0)
    y = Output(dtype=INT64)
    tensorrt = Seen(_SEEN, I64)


class ReduceSum(Reduction):
    precision = Precision.FP32
    sign = Sign.AS_FIRST
    tensorrt = Seen(_SEEN, I64)


class ReduceMax(Reduction):
    moves = True
    sign = Sign.AS_FIRST
    tensorrt = Seen(_SEEN, I64)


class ReduceMin(Reduction):
    stage = Stage.LOWERED
    moves = True


class ReduceMean(Reduction):
    precision = Precision.FP32
    tensorrt = Seen(FLOATS, I64)


# Sizes and places ------------------------------------------------------------------------------------------------


class OnnxShape(Operator, op_type="Shape"):
    x = Input(ANY)
    start = integer(0)
    end = optional_integer()
    y = Output(dtype=INT64)
    stage = Stage.OWN_ATTENTION
    tensorrt = Seen(_MOVED, I64)


class ConstantOfShape(Operator):
    shape = Input(I64, 1)
    value = optional_tensor()
    stage = Stage.OWN_ATTENTION

    def output_dtype(self, index: int) -> ir.DataType | None:
        return FLOAT if self.value is None else self.value.dtype  # zeros in fp32


class Range(Operator):
    start = Input(NUMBERS)
    limit = Input(NUMBERS)
    delta = Input(NUMBERS)
    stage = Stage.OWN_ATTENTION


class NonZero(Operator):
    x = Input(NUMBERS | BOOLS)
    y = Output(dtype=INT64)
    stage = Stage.LOWERED


class Unique(Operator):
    x = Input(NUMBERS)
    sorted = integer(1)
    axis = optional_integer()
    y = Output()
    indices = Output(dtype=INT64)
    inverse_indices = Output(dtype=INT64)
    counts = Output(dtype=INT64)
    stage = Stage.LOWERED


class Constant(Operator):
    value = optional_tensor()
    stage = Stage.LOWERED

    def output_dtype(self, index: int) -> ir.DataType | None:
        return None if self.value is None else self.value.dtype


# What lowerings write --------------------------------------------------------------------------------------------


class Pad(Operator):
    x = Input(NUMBERS)
    pads = Input(I64, 1)
    sign = Sign.AS_FIRST
    stage = Stage.LOWERED
    tensorrt = Seen(_SEEN, I64)


class _WithBody(Operator):
    variadic = True
    stage = Stage.LOWERED

    def output_dtype(self, index: int) -> ir.DataType | None:
        return None  # the body's


class Loop(_WithBody):
    """A body that is run for each expert that a step chooses (`llmforge.ir.expansion`)."""

    trip_count = OptionalInput(I64)
    condition = OptionalInput(BOOLS)
    initial = OptionalInput(ANY)


class Scan(_WithBody):
    """A body that is run for each token of a recurrent layer (`llmforge.ir.recurrence`)."""

    initial = OptionalInput(ANY)
    num_scan_inputs = integer()


class OnnxAttention(Operator, op_type="Attention"):
    """ONNX's own, over heads [B, H, S, D]."""

    q = Input(FLOATS, 3, 4)
    k = Input(FLOATS, 3, 4)
    v = Input(FLOATS, 3, 4)
    attn_mask = OptionalInput(FLOATS | BOOLS)
    past_key = OptionalInput(FLOATS, 4)
    past_value = OptionalInput(FLOATS, 4)
    nonpad_kv_seqlen = OptionalInput(I64, 1)
    scale = optional_real()
    softcap = real(0.0)
    y = Output()
    present_key = Output(like="k")
    present_value = Output(like="v")
    stage = Stage.LOWERED
    tensorrt = Seen(HALVES, BOOLS)


class TRT_FP4DynamicQuantize(Operator):  # noqa: N801  # TensorRT's name
    """TensorRT's, in the domain of ONNX: blocks of x as e2m1, and their scales as e4m3 in units of `scale`."""

    x = Input(HALVES)
    scale = Input({FLOAT}, 0)
    axis = integer(-1)
    block_size = integer(16)
    scale_type = integer(int(FLOAT8))
    codes = Output(dtype=ir.DataType.FLOAT4E2M1)
    scales = Output(dtype=FLOAT8)
    stage = Stage.LOWERED
    tensorrt = Seen(HALVES, frozenset({FLOAT, FLOAT8, ir.DataType.FLOAT4E2M1}))


class DistCollective(Operator):
    """TensorRT's, in the domain of ONNX."""

    x = Input()
    stage = Stage.LOWERED
    tensorrt = Seen(FLOATS)
