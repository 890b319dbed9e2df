"""The operators of llmforge's own CPU kernels (docs/cpu-kernels.md), which the pass cpu-kernels writes."""

from __future__ import annotations

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir.operators.record import (
    BYTES,
    CPU,
    FLOAT,
    FP32,
    I32,
    I64,
    INT8,
    Input,
    Operator,
    OptionalInput,
    Output,
    Precision,
    integer,
    real,
)


class _Kernel(Operator, domain=CPU):
    precision = Precision.NO_HALF
    rounds = True
    indivisible = "what cpu-kernels packed is not divided; leave cpu-kernels out of the recipe"


class _Packed(_Kernel):
    N = integer()
    K = integer()
    bits = integer()
    block_size = integer()
    zero_points = integer()
    scales = integer(0)  # SCALE_* of llmforge/native/kernels.h
    trellis = integer(0)
    minimums = integer(0)  # a number beside the scale of each block, in place of a zero point


class CpuLinear(_Packed, op_type="Linear"):
    """A product with packed codes, perhaps with the norm in front of it and the sum behind it."""

    x = Input(FP32)
    weights = Input(BYTES, 2)
    bias = OptionalInput(FP32, 1)
    norm = OptionalInput(FP32, 1)
    residual = OptionalInput(FP32)
    terms = integer(1)  # of int8 that stand for a number of x
    outliers = real(0.0)  # of blocks of x that have two, over the mean of the largest magnitudes of a row's blocks
    activation = integer()  # ACTIVATION_* of llmforge/native/kernels.h
    epsilon = real()


class Embedding(_Packed):
    """Rows of packed codes."""

    ids = Input(I64)
    weights = Input(BYTES, 2, table=True)
    y = Output(dtype=FLOAT)


class CpuLowRankAdapter(_Kernel, op_type="LowRankAdapter"):
    """`llmforge::LowRankAdapter` with `a` [n + 1, P·R, K], a row for each sum."""

    base = Input(FP32, 3)
    x = Input(FP32, 3)
    adapter_ids = Input(I64, 1)
    a = Input(FP32, 3, of="adapters")
    b = Input(FP32, 3, of="adapters")
    widths = Input(I64, 1)


class CpuGroupQueryAttention(_Kernel, op_type="GroupQueryAttention"):
    """Attention over caches of fp32."""

    qkv = Input(FP32, 3)
    past_key = Input(FP32, 4)
    past_value = Input(FP32, 4)
    seqlens_k = Input(I32, 1)
    cos_cache = OptionalInput(FP32, 2, rotary=True)
    sin_cache = OptionalInput(FP32, 2, rotary=True)
    k_scale = OptionalInput(FP32)
    v_scale = OptionalInput(FP32)
    q_norm_weight = OptionalInput(FP32, 1)
    k_norm_weight = OptionalInput(FP32, 1)
    head_sink = OptionalInput(FP32, 1)
    num_heads = integer()
    kv_num_heads = integer()
    local_window_size = integer()
    rotary_interleaved = integer()
    per_channel = integer()
    scale = real()
    softcap = real()
    qk_norm_epsilon = real()
    y = Output()
    present_key = Output(like="past_key")
    present_value = Output(like="past_value")


class CpuLatentAttention(_Kernel, op_type="LatentAttention"):
    """Attention over latents, as the canonical one, with `up` [num_heads·(N+Dv), L]."""

    q = Input(FP32, 3)
    latent = Input(FP32, 3)
    up = Input(FP32, 2)
    past = Input(FP32, 4)
    past_lengths = Input(I32, 1)
    up_scale = OptionalInput(FP32, 2)
    sinks = OptionalInput(FP32, 1)
    num_heads = integer()
    window = integer()
    scale = real()
    softcap = real()
    y = Output()
    present = Output(like="past")
    rounds = False


class CpuEncoderAttention(_Kernel, op_type="EncoderAttention"):
    """Attention of sequences to themselves, as the canonical one, in fp32."""

    q = Input(FP32, 3)
    k = Input(FP32, 3)
    v = Input(FP32, 3)
    sequence_starts = Input(I32, 1)
    num_heads = integer()
    kv_num_heads = integer()
    left = integer()
    right = integer()
    packed = integer(0)  # 1: q, k and v are one tensor, [1, T, (num_heads + 2·kv_num_heads)·D]
    scale = real()
    softcap = real()
    y = Output()
    rounds = False


class LatentAttentionInt8(CpuLatentAttention):
    """The same, with codes in `up` and a scale for each block of a row."""

    up = Input({INT8}, 2)


class GroupQueryAttentionInt8(CpuGroupQueryAttention):
    """Attention over caches of int8."""

    past_key = Input({INT8}, 4)
    past_value = Input({INT8}, 4)


class GroupQueryAttentionSlots(CpuGroupQueryAttention):
    """Attention over caches of slots, [batch, kv_heads, capacity, bytes]: codes, and perhaps their own scales."""

    past_key = Input(BYTES, 4)
    past_value = Input(BYTES, 4)
    head_dim = integer()
    key_slot = integer()  # SLOT_* of llmforge/native/kernels.h
    value_slot = integer()
    turn_keys = integer()
    turn_values = integer()


class CpuAllReduce(Operator, domain=CPU, op_type="AllReduce"):
    """The sum of `x` over all ranks, processes of one machine, added in their order (docs/tensor-parallelism.md)."""

    x = Input(FP32)
    ranks = integer()
    y = Output(like="x")
    precision = Precision.NO_HALF


class CpuAllGather(Operator, domain=CPU, op_type="AllGather"):
    """What all ranks have in `x`, side by side along the last axis."""

    x = Input(FP32)
    ranks = integer()
    y = Output(dtype=FLOAT)
    precision = Precision.NO_HALF


def require_none(model: ir.Model) -> None:
    """Return if other runtimes have kernels for all of a graph.

    Raises:
        UnsupportedError: it has operators of this module.
    """
    if own := sorted({node.op_type for node in model.graph if node.domain == CPU}):
        raise UnsupportedError(
            f"other runtimes cannot load {', '.join(own)}, operators that only llmforge has kernels for",
            hint="leave genai-interface or optimum-interface out of the recipe, or the passes that write them",
        )
