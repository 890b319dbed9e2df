"""The operators of ONNX Runtime (`com.microsoft`), which passes write.

Source: onnxruntime 1.31, docs/ContribOperators.md.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from llmforge.ir.operators.record import (
    BYTES,
    FLOATS,
    FP32,
    I32,
    I64,
    INT8,
    MICROSOFT,
    UINT8,
    CachedAttention,
    ChosenExperts,
    Input,
    Operator,
    OptionalInput,
    Output,
    Precision,
    Stage,
    integer,
    optional_real,
    real,
    text,
)

INT8_ACTIVATIONS: Final = 4  # `accuracy_level` of MatMulNBits and QMoE: activations are rounded to int8
CACHE = FLOATS | {INT8, UINT8}  # uint8: two 4-bit values
_CODES = frozenset({UINT8, ir.DataType.INT4, ir.DataType.UINT4})


class GroupQueryAttention(CachedAttention, domain=MICROSOFT):
    """Attention over a KV buffer that past and present share; key and value are absent where the query is packed."""

    query = Input(FLOATS, 3)
    key = OptionalInput(FLOATS, 3)
    value = OptionalInput(FLOATS, 3)
    past_key = Input(CACHE, 4)
    past_value = Input(CACHE, 4)
    seqlens_k = Input(I32, 1)
    total_sequence_length = Input(I32, 0, 1)
    cos_cache = OptionalInput(FLOATS, 2, rotary=True)
    sin_cache = OptionalInput(FLOATS, 2, rotary=True)
    position_ids = OptionalInput(I64, 2)
    attention_bias = OptionalInput(FLOATS, 4)
    head_sink = OptionalInput(FLOATS, 1, heads=0)
    k_scale = OptionalInput(FP32, fp32=True, kv_heads=1)
    v_scale = OptionalInput(FP32, fp32=True, kv_heads=1)
    q_norm_weight = OptionalInput(FLOATS, 1)
    k_norm_weight = OptionalInput(FLOATS, 1)
    scale = optional_real()
    softcap = real(0.0)
    local_window_size = integer(-1)
    sliding_window_cache = integer(0)
    do_rotary = integer(0)
    rotary_interleaved = integer(0)
    smooth_softmax = integer(-1)
    causal = integer(1)
    qk_norm_epsilon = real(1e-6)
    k_quant_type = text("NONE")
    v_quant_type = text("NONE")
    kv_cache_bit_width = integer(0)

    @property
    def projections(self) -> tuple[ir.Value, ...]:
        """Query, key and value; one where the query holds all three side by side."""
        return (self.query,) if self.key is None or self.value is None else (self.query, self.key, self.value)


class PagedAttention(Operator, domain=MICROSOFT):
    """Attention of packed tokens [tokens, channels] over blocks [blocks, block_size, kv_heads, head_dim] by a table.

    Row b has the tokens cumulative_sequence_length[b] … [b + 1] - 1, which follow the past_seqlens[b] that its blocks
    block_table[b] hold. attention_metadata, on the host: at least the most tokens of a row, and of its text; and at
    most the tokens of the longest text.
    """

    query = Input(FLOATS, 2)
    key = OptionalInput(FLOATS, 2)
    value = OptionalInput(FLOATS, 2)
    key_cache = Input(CACHE, 4)
    value_cache = Input(CACHE, 4)
    cumulative_sequence_length = Input(I32, 1)
    past_seqlens = Input(I32, 1)
    block_table = Input(I32, 2)
    cos_cache = OptionalInput(FLOATS, 2, rotary=True)
    sin_cache = OptionalInput(FLOATS, 2, rotary=True)
    slot_mapping = OptionalInput(I32, 1)
    head_sink = OptionalInput(FLOATS, 1, heads=0)
    q_norm_weight = OptionalInput(FLOATS, 1)
    k_norm_weight = OptionalInput(FLOATS, 1)
    k_scale = OptionalInput(FP32, fp32=True)
    v_scale = OptionalInput(FP32, fp32=True)
    attention_metadata = OptionalInput(I32, 1)
    num_heads = integer()
    kv_num_heads = integer()
    scale = optional_real()
    softcap = real(0.0)
    local_window_size = integer(-1)
    do_rotary = integer(0)
    rotary_interleaved = integer(0)
    qk_norm_epsilon = real(1e-6)
    k_quant_type = text("NONE")
    v_quant_type = text("NONE")
    y = Output()
    key_cache_out = Output(like="key_cache")
    value_cache_out = Output(like="value_cache")
    stage = Stage.LOWERED
    precision = Precision.HALF

    @property
    def projections(self) -> tuple[ir.Value, ...]:
        """Query, key and value; one where the query holds all three side by side."""
        return (self.query,) if self.key is None or self.value is None else (self.query, self.key, self.value)


class MatMulNBits(Operator, domain=MICROSOFT):
    """A product with a matrix of blocks of codes: a [..., K], b [N, K / block_size, bytes of a block]."""

    a = Input()
    b = Input(BYTES, 2, 3)
    scales = Input(FLOATS, 1, 2)
    zero_points = OptionalInput(FLOATS | {UINT8}, 1, 2)
    g_idx = OptionalInput(I32, 1)
    bias = OptionalInput(FLOATS, 1)
    K = integer()
    N = integer()
    bits = integer()
    block_size = integer()
    accuracy_level = integer(0)
    weight_prepacked = integer(0)
    linear = True
    precision = Precision.HALF
    prepacked = True


class MatMulIntegerToFloat(Operator, domain=MICROSOFT):
    """A product of codes in the units of their scales: a [..., K], b [K, N], b_scale [N]."""

    a = Input(BYTES | {INT8})
    b = Input(BYTES | {INT8}, 2)
    a_scale = Input(FP32, 0, 1)
    b_scale = Input(FP32, 0, 1)
    a_zero_point = OptionalInput(BYTES | {INT8}, 0, 1)
    b_zero_point = OptionalInput(BYTES | {INT8}, 0, 1)
    bias = OptionalInput(FP32, 1)
    y = Output(like="a_scale")
    stage = Stage.LOWERED
    linear = True


class FusedMatMul(Operator, domain=MICROSOFT):
    """A product of matrices that may be transposed."""

    a = Input()
    b = Input()
    alpha = real(1.0)
    transA = integer(0)  # noqa: N815  # ONNX Runtime's name
    transB = integer(0)  # noqa: N815
    transBatchA = integer(0)  # noqa: N815
    transBatchB = integer(0)  # noqa: N815
    linear = True
    precision = Precision.HALF


class GatherBlockQuantized(Operator, domain=MICROSOFT):
    """Rows of a table of blocks of codes."""

    data = Input(_CODES, table=True)
    indices = Input(I32 | I64)
    scales = Input(table=True)
    zero_points = OptionalInput(_CODES, table=True)
    bits = integer(4)
    block_size = integer()
    gather_axis = integer(0)
    quantize_axis = integer(1)
    y = Output(like="scales")
    lookup = True


class _Experts(ChosenExperts, domain=MICROSOFT):
    input = Input()
    router_probs = Input(FLOATS, 2, chooses=True)
    k = integer()
    activation_type = text()
    activation_alpha = real(1.0)
    activation_beta = real(0.0)
    swiglu_fusion = integer(0)
    swiglu_limit = optional_real()
    normalize_routing_weights = integer(0)

    @property
    def chosen(self) -> int | None:
        return self.k


class ContribMoE(_Experts, op_type="MoE"):
    """Experts in floating point."""

    fc1_experts_weights = Input(FLOATS, 3, of="experts")
    fc1_experts_bias = OptionalInput(FLOATS, 2, of="experts")
    fc2_experts_weights = Input(FLOATS, 3, of="experts")
    fc2_experts_bias = OptionalInput(FLOATS, 2, of="experts")


class QMoE(_Experts):
    """Experts in codes of 4 or 8 bits."""

    fc1_experts_weights = Input(BYTES, 3, of="experts")
    fc1_scales = Input(FLOATS, 3, of="experts")
    fc1_experts_bias = OptionalInput(FLOATS, 2, of="experts")
    fc2_experts_weights = Input(BYTES, 3, of="experts")
    fc2_scales = Input(FLOATS, 3, of="experts")
    fc2_experts_bias = OptionalInput(FLOATS, 2, of="experts")
    fc3_experts_weights = OptionalInput(of="experts")
    fc3_scales = OptionalInput(of="experts")
    fc3_experts_bias = OptionalInput(of="experts")
    fc1_zero_points = OptionalInput(BYTES, 3, of="experts")
    fc2_zero_points = OptionalInput(BYTES, 3, of="experts")
    fc3_zero_points = OptionalInput(BYTES, 3, of="experts")
    router_weights = OptionalInput(FLOATS, 2, chooses=True)
    expert_weight_bits = integer()
    block_size = integer()
    accuracy_level = integer(0)
    weights_prepacked = integer(-1)
    prepacked = True


class ContribLinearAttention(Operator, domain=MICROSOFT, op_type="LinearAttention"):
    """Attention with a state of fixed size, which knows no padding and no rows that begin."""

    query = Input(FLOATS, 3)
    key = Input(FLOATS, 3)
    value = Input(FLOATS, 3)
    past_state = Input(FLOATS, 4)
    decay = Input(FLOATS, 3)
    beta = OptionalInput(FLOATS, 3)
    q_num_heads = integer()
    kv_num_heads = integer()
    scale = real()
    update_rule = text()
    y = Output()
    present_state = Output(like="past_state")
    stage = Stage.LOWERED


class _SkipNormalization(Operator, domain=MICROSOFT):
    input = Input()
    skip = Input()
    gamma = Input(FLOATS, 1)
    epsilon = real()
    y = Output()
    mean = Output()
    inverse_deviation = Output()
    sum = Output()
    adds_residual = True


class SkipSimplifiedLayerNormalization(_SkipNormalization):
    """RMSNormalization of a sum, which it gives out as well."""

    bias = OptionalInput(FLOATS, 1)


class SkipLayerNormalization(_SkipNormalization):
    """LayerNormalization of a sum, which it gives out as well."""

    beta = OptionalInput(FLOATS, 1)
    bias = OptionalInput(FLOATS, 1)
