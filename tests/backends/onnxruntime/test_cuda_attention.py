"""Which kernel computes an attention on CUDA, and what ONNX Runtime says of it."""

from __future__ import annotations

import dataclasses

import pytest

from llmforge import targets
from llmforge.base.errors import VerificationError
from llmforge.passes import FlashAttention
from llmforge.rewrite.pass_base import Context

from ...models import attention_kernels as cuda_attention
from ...models import graphs
from ...models.attention_kernels import (
    CUDNN,
    DECODER,
    EFFICIENT,
    FLASH,
    XQA,
    ChosenKernel,
    KernelCase,
)

PLAIN = KernelCase("a", heads=32, kv_heads=8, head_dim=128, int8=False, softcap=False, window=False, sinks=False)
# As the wheel prints it, of an engine with two layers on a device that claimed SM 80, then 90, then 75.
LOG = (
    "\x1b[36mAttentionKernelOptions: FLASH_ATTENTION=1 EFFICIENT_ATTENTION=1 TRT_FUSED_ATTENTION=1 "
    "CUDNN_FLASH_ATTENTION=0 TRT_FLASH_ATTENTION=1 TRT_CROSS_ATTENTION=1 DECODER_ATTENTION=1 MATH=1\x1b[0m\n"
    "\x1b[36mOperator=GroupQueryAttention Node=model.layers.0.self_attn/Attention DataType=fp16 "
    "SdpaKernel=FLASH_ATTENTION NumSplits=0 EffectiveKvLengthBound=8\x1b[0m\n"
    "2026-11-21 20:26:03.798453411 [I:onnxruntime:, inference_session.cc:4046 RunImpl] Start another run\n"
    "\x1b[36mOperator=GroupQueryAttention Node=model.layers.1.self_attn/Attention DataType=bf16 "
    "SdpaKernel=XQA EffectiveKvLengthBound=128\x1b[0m\n"
    "\x1b[36mOperator=GroupQueryAttention DataType=fp16 SdpaKernel=EFFICIENT_ATTENTION\x1b[0m\n"
)


def test_choices_are_read_off_the_log() -> None:
    assert cuda_attention.parse(LOG) == [
        ChosenKernel("GroupQueryAttention", "model.layers.0.self_attn/Attention", "fp16", FLASH),
        ChosenKernel("GroupQueryAttention", "model.layers.1.self_attn/Attention", "bf16", XQA),
        ChosenKernel("GroupQueryAttention", "", "fp16", EFFICIENT),
    ]
    assert cuda_attention.parse("SdpaKernel=\n") == []


# changes to PLAIN, SM → kernels of a prefill, of a decode step
EXPECTED = [
    ({}, 75, {EFFICIENT}, {EFFICIENT}),
    ({}, 80, {FLASH}, {XQA}),
    ({}, 89, {FLASH}, {XQA}),
    ({}, 90, {FLASH, CUDNN}, {XQA}),
    ({"window": True}, 90, {FLASH}, {XQA}),
    ({"sinks": True}, 120, {FLASH}, {XQA}),
    ({"softcap": True}, 90, {FLASH}, {FLASH}),
    ({"heads": 56}, 86, {FLASH}, {FLASH}),  # seven to a KV head
    ({"heads": 56}, 90, {FLASH, CUDNN}, {FLASH, CUDNN}),
    ({"head_dim": 80}, 86, {FLASH}, {FLASH}),
    ({"head_dim": 512}, 86, {EFFICIENT}, {EFFICIENT}),
    ({"int8": True}, 90, {FLASH}, {XQA}),
    ({"int8": True, "kv_heads": 32}, 90, {FLASH}, {FLASH}),  # one to a KV head
    ({"int8": True, "softcap": True}, 89, {FLASH}, {FLASH}),
    ({"norms": True}, 90, {FLASH, CUDNN}, {XQA}),
    ({"norms": True, "int8": True}, 80, {FLASH}, {FLASH}),  # which is why they stay in front there
]


@pytest.mark.parametrize(("changes", "sm", "prefill", "decode"), EXPECTED)
def test_expected_kernels(changes: dict[str, int], sm: int, prefill: set[str], decode: set[str]) -> None:
    attention = dataclasses.replace(PLAIN, **changes)
    assert cuda_attention.expected(attention, sm, decode=False) == prefill
    assert cuda_attention.expected(attention, sm, decode=True) == decode
    assert cuda_attention.reason_against(attention, sm) is None


@pytest.mark.parametrize(
    ("changes", "sm", "prefill", "decode"),
    [({}, 75, EFFICIENT, {DECODER}), ({}, 80, FLASH, {FLASH}), ({"window": True, "sinks": True}, 90, FLASH, {FLASH}),
     ({}, 90, FLASH, {FLASH, CUDNN}), ({"norms": True}, 80, FLASH, {FLASH}),
     ({"head_dim": 512}, 90, EFFICIENT, {DECODER}), ({"int8": True}, 90, FLASH, {XQA, DECODER}),
     ({"int8": True, "softcap": True}, 90, FLASH, {DECODER}),
     ({"int8": True}, 75, EFFICIENT, {DECODER})],
)  # fmt: skip
def test_expected_kernels_over_blocks(changes: dict[str, int], sm: int, prefill: str, decode: set[str]) -> None:
    attention = dataclasses.replace(PLAIN, paged=True, **changes)
    assert cuda_attention.expected(attention, sm, decode=False) == {prefill}
    assert cuda_attention.expected(attention, sm, decode=True) == decode
    assert cuda_attention.reason_against(attention, sm) is None


@pytest.mark.parametrize(
    ("changes", "sm", "reason"),
    [
        ({"int8": True}, 75, "int8 caches need SM 80 or above, not SM 75"),
        ({"int8": True, "head_dim": 512}, 90, "heads of up to 256 channels, not 512"),
    ],
)
def test_what_no_kernel_computes(changes: dict[str, int], sm: int, reason: str) -> None:
    assert reason in (cuda_attention.reason_against(dataclasses.replace(PLAIN, **changes), sm) or "")


def test_a_log_is_held_against_a_graph() -> None:
    model = graphs.llama()
    FlashAttention().run(model, Context(targets.load("l4")))
    names = [node.name for node, _ in cuda_attention.of(model)]
    assert len(names) == 2
    said = "".join(
        f"Operator=GroupQueryAttention Node={name} DataType=fp16 SdpaKernel=FLASH_ATTENTION NumSplits=0\n"
        for name in names
    )
    cuda_attention.check(said, model, 89, decode=True)
    with pytest.raises(VerificationError, match=rf"decode step on SM 75: {names[0]} ran on FLASH_ATTENTION; exp"):
        cuda_attention.check(said, model, 75, decode=True)
    with pytest.raises(VerificationError, match=f"{names[1]} ran on an unknown kernel") as caught:
        cuda_attention.check(said.splitlines()[0], model, 89, decode=False)
    assert cuda_attention.DEBUG_VARIABLE in (caught.value.hint or "")
