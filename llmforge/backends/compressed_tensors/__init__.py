"""The record of checkpoints that vLLM and others load, in the format compressed-tensors."""

from __future__ import annotations

from llmforge.backends.record import ANY, BackendRecord, ExportFormat, Provider, Use

BACKEND = BackendRecord(
    name="compressed-tensors",
    title="compressed-tensors checkpoint",
    module="compressed_tensors",
    compiled=False,
    scales="blocks",
    alone="the servers that load the checkpoint divide it themselves",
    export_format=ExportFormat(
        servers="vLLM or SGLang",  # TensorRT-LLM loads one of the formats (docs/other-runtimes.md)
        serve="vllm serve {engine}",
        emulated_by="transformers",
        served_by="vllm",
        codes=frozenset({"blocks", "channels", "fp4", "mx", "experts"}),
        block=128,
        tables=False,
        bf16_scales=True,
        fp8_caches=True,
        loaded="llmforge.backends.compressed_tensors.servers",
    ),
    providers=(
        Provider(
            name="compressed-tensors",
            kind=None,
            package="compressed-tensors",
            requirements=(),
            builder="llmforge.backends.compressed_tensors.builder",
            session="llmforge.backends.exported_session",
            dtypes={
                **dict.fromkeys(("fp32", "fp16", "bf16"), Use(ANY)),
                "int8": Use(("weights",)),
                "int4": Use(("weights",)),
                "fp8": Use(("weights", "kv")),
                "fp4": Use(("weights",)),
            },
        ),
    ),
)
