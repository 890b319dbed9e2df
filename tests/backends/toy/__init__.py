"""The record of a toy backend, which is this folder: ONNX Runtime without its own optimizations."""

from __future__ import annotations

from llmforge.backends.record import ANY, BackendRecord, Provider, Use

BACKEND = BackendRecord(
    name="toy",
    title="Toy",
    module="onnxruntime",
    compiled=False,
    scales="blocks",
    alone="it is a toy",
    providers=(
        Provider(
            name="toy",
            kind="cpu",
            package="toy-runtime",
            requirements=("onnxruntime=={version}",),
            builder="llmforge.backends.toy.builder",
            session="llmforge.backends.toy.session",
            dtypes={"fp32": Use(ANY), "int8": Use(("weights",))},
        ),
    ),
)
