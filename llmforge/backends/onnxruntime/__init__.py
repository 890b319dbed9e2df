"""The record of ONNX Runtime: a graph in ONNX, on CPUs and through its CUDA provider."""

from __future__ import annotations

from llmforge.backends.record import (
    ANY,
    CUDA_BINDINGS,
    BackendRecord,
    PagedBlocks,
    Provider,
    SlowerProducts,
    Use,
)

# FlashAttention, which reads blocks of the activations' dtype where they lie, begins with Ampere; of int8, XQA reads
# multiples of 128 tokens (onnxruntime 1.31, paged_attention.cc).
PAGED = PagedBlocks(
    session="llmforge.backends.onnxruntime.cuda.paged",
    least_sm=80,
    most_channels=256,
    tokens=((64, 256), (128, 128), (1 << 30, 64)),
    least_int8_tokens=128,
    int8_slots="over int8 blocks each step with prompts copies all its texts in 16 bits first",
)

BACKEND = BackendRecord(
    name="onnxruntime",
    title="ONNX Runtime",
    module="onnxruntime",
    compiled=False,
    scales="blocks",
    providers=(
        Provider(
            name="cpu",
            kind="cpu",
            package="onnxruntime",
            requirements=("onnxruntime=={version}",),
            builder="llmforge.backends.onnxruntime.builder",
            session="llmforge.backends.onnxruntime.session",
            dtypes={
                "fp32": Use(ANY),
                "int8": Use(("weights", "kv")),
                "int4": Use(("weights", "kv")),
                **dict.fromkeys(("int6", "int5", "int3"), Use(("weights",))),  # by llmforge's CPU kernels
            },
            never=dict.fromkeys(("fp16", "bf16"), "CPU engines compute in fp32, or in int8 on quantized weights"),
            verified=True,
            ranks=True,
        ),
        # GroupQueryAttention, MatMulNBits and their caches: the kernel registry of onnxruntime-gpu 1.31.1. The wheel
        # holds machine code (backends/onnxruntime/cuda_kernels.json) and no PTX, so that nothing else runs.
        Provider(
            name="cuda",
            kind="gpu",
            package="onnxruntime-gpu",
            requirements=("onnxruntime-gpu[cuda,cudnn]=={version}", CUDA_BINDINGS),
            builder="llmforge.backends.onnxruntime.cuda.builder",
            session="llmforge.backends.onnxruntime.cuda.session",
            dtypes={
                "fp16": Use(ANY),
                "bf16": Use(ANY),
                "int8": Use(("weights", "kv")),
                "int4": Use(("weights", "kv")),
                "fp8": Use(("kv",)),
            },
            never={
                "fp32": "GroupQueryAttention on CUDA takes fp16 and bf16",
                "fp8": "onnxruntime would dequantize fp8 weights before every matmul",
                "fp4": "onnxruntime would dequantize fp4 weights before every matmul",
            },
            capabilities=("75", "80", "86", "89", "90", "120"),
            uncovered="the onnxruntime-gpu 1.31.1 wheel holds neither code for SM {sm} nor PTX to make it from",
            needs_device="an engine for ONNX Runtime's CUDA provider is verified on the GPU that runs it",
            ranks=True,
            paged=PAGED,
            # cuobjdump -sass of the wheel: fpA_intB has HMMA.16816 alone for SM 90, as for SM 80, and no GMMA. A
            # multiprocessor does 2,048 operations a clock so, and 4,096 by GMMA, which its data sheet counts.
            slower_products={
                "90": SlowerProducts(0.5, "the wheel multiplies quantized weights by SM80's instructions on SM90")
            },
        ),
    ),
)
