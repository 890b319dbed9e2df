"""The record of GGUF files, which llama.cpp loads."""

from __future__ import annotations

from llmforge.backends.record import ANY, BackendRecord, ExportFormat, Provider, Use

BACKEND = BackendRecord(
    name="gguf",
    title="GGUF file",
    module="gguf",
    compiled=False,
    scales="blocks",
    alone="llama.cpp divides the file itself",
    export_format=ExportFormat(
        servers="llama.cpp",
        serve="llama-server -m {engine}/model.gguf",
        emulated_by=None,
        served_by="llama-cpp",
        codes=frozenset({"blocks"}),
        block=32,
        tables=True,
        superblocks=True,
    ),
    providers=(
        Provider(
            name="gguf",
            kind=None,
            package="gguf",
            requirements=(),
            builder="llmforge.backends.gguf.builder",
            session="llmforge.backends.exported_session",
            dtypes={
                **dict.fromkeys(("fp32", "fp16", "bf16"), Use(ANY)),
                "int8": Use(("weights", "kv")),
                "int4": Use(("weights", "kv")),
                **dict.fromkeys(("int3", "int5", "int6"), Use(("weights",))),
            },
            never={"fp8": "GGUF has no fp8 weights", "fp4": "the formats that hold our codes have no fp4"},
        ),
    ),
)
