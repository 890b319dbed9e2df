"""The record of TensorRT: plans that it compiles on the GPU that runs them."""

from __future__ import annotations

from llmforge.backends.record import ANY, CUDA_BINDINGS, BackendRecord, Provider, Use

INT4_SM = 80  # TensorRT-RTX 1.7 refuses int4 weights on SM 7.5
HEAD_DIMS = range(16, 257, 8)  # channels of a head that a fused attention kernel exists for

BACKEND = BackendRecord(
    name="tensorrt",
    title="TensorRT",
    module="tensorrt",
    compiled=True,
    scales="channels",
    sparse=True,
    head_dims=HEAD_DIMS,
    providers=(
        # What TensorRT-RTX 1.7 built and refused by capability, without a GPU; TensorRT 11 is taken to do the same.
        # Blocks of int4 weights have no zero points; caches are updated in place, which takes 16 bits.
        Provider(
            name="tensorrt",
            kind="gpu",
            package="tensorrt",
            # The runtime imports onnxruntime whatever runs the engine; any version does.
            requirements=("onnxruntime", "tensorrt=={version}", CUDA_BINDINGS),
            builder="llmforge.backends.tensorrt.builder",
            session="llmforge.backends.tensorrt.session",
            dtypes={
                "fp16": Use(ANY),
                "bf16": Use(ANY),
                "int8": Use(("weights",)),
                "int4": Use(("weights",), INT4_SM, "TensorRT refuses int4 weights on SM 7.5"),
                "fp8": Use(("weights",)),
                "fp4": Use(("weights",)),
            },
            never={"fp32": "fused attention takes fp16 and bf16"},
            needs_device="TensorRT must build an engine on the GPU that runs it",
            index="NVIDIA's index",
            ranks=True,
            ranks_sm=80,  # NVIDIA, TensorRT 11.1 documentation, "Multi-Device Inference"
        ),
    ),
)
