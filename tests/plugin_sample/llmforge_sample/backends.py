"""The record of a backend: data, and modules by their names, for a serving environment reads it, too."""

from llmforge.backends.record import BackendRecord, Provider, Use

PLAIN = BackendRecord(
    name="sample-plain",
    title="ONNX Runtime without its optimizations",
    module="onnxruntime",
    compiled=False,
    scales="blocks",
    alone="its operators do not communicate between processes",
    providers=(
        Provider(
            name="sample-plain",
            kind="cpu",
            package="onnxruntime",
            requirements=("onnxruntime=={version}",),
            builder="llmforge_sample.builder",
            session="llmforge_sample.session",
            dtypes={
                "fp32": Use(("compute", "weights", "kv")),
                "int8": Use(("weights", "kv")),
                "int4": Use(("weights", "kv")),
            },
        ),
    ),
)
