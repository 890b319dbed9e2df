"""One side of benchmarks/encoders.py, run by the Python that has its runtime.

    python encoder_worker.py make SHAPE FOLDER LAYERS        a checkpoint of random weights (transformers)
    python encoder_worker.py export FOLDER MODEL.onnx        optimum's export, task feature-extraction
    python encoder_worker.py optimize IN.onnx OUT.onnx HEADS HIDDEN   ONNX Runtime's own fusions of BERT
    python encoder_worker.py quantize IN.onnx OUT.onnx       ONNX Runtime's dynamic int8 (quantize_dynamic)
    python encoder_worker.py serve RUNTIME MODEL THREADS     answer lines {"batch": B, "length": L, "runs": N} with ms

RUNTIME is `llmforge` (MODEL an engine's folder), `onnxruntime`, `openvino` (bf16, its default where a processor has
that) or `openvino-f32`. A run hands over token ids of B texts of L tokens, and takes embeddings, or hidden states that
are then averaged.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 30522  # BERT's, of Qwen3's shape too: a lookup takes as long in any table
Run = Callable[[Any], Any]


def make(shape: str, folder: str, layers: str) -> None:
    """Write a checkpoint of random weights: bert-base, or the shape of Qwen3-Embedding-0.6B, of so many layers."""
    import torch
    import transformers

    torch.manual_seed(0)
    if shape == "bert-base":
        model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=int(layers)), add_pooling_layer=False)
    else:
        config = transformers.Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=int(layers),
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=32768,
            rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.Qwen3Model(config)
    model.eval().save_pretrained(folder)


def export(folder: str, file: str) -> None:
    """Export to ONNX as optimum does for embedders."""
    from optimum.exporters.onnx import main_export

    out = Path(file).parent
    main_export(folder, out, task="feature-extraction", library_name="transformers", do_validation=False)


def optimize(source: str, file: str, heads: str, hidden: str) -> None:
    """Fuse attention, norms and GELU of BERT, as ONNX Runtime's optimizer does."""
    from onnxruntime.transformers import optimizer

    optimizer.optimize_model(source, "bert", num_heads=int(heads), hidden_size=int(hidden)).save_model_to_file(file)


def quantize(source: str, file: str) -> None:
    """Quantize weights to int8, activations as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    large = Path(source).with_suffix(".onnx_data").exists() or Path(source + "_data").exists()
    options = {"DefaultTensorType": 1}  # what fused operators give: fp32
    given = {"per_channel": True, "use_external_data_format": large, "extra_options": options}
    quantize_dynamic(source, file, weight_type=QuantType.QInt8, **given)


def _inputs(names: set[str], batch: int, length: int) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(1000, 20000, (batch, length))
    made = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
        "position_ids": np.arange(length)[None].repeat(batch, 0),
    }
    return {name: value for name, value in made.items() if name in names}


def _onnxruntime(model: str, threads: int) -> tuple[set[str], Run]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return {value.name for value in session.get_inputs()}, lambda feeds: session.run(None, feeds)[0].mean(1)


def _openvino(model: str, threads: int, precision: str | None) -> tuple[set[str], Run]:
    import openvino

    core = openvino.Core()
    given: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    if precision is not None:
        given["INFERENCE_PRECISION_HINT"] = precision
    compiled = core.compile_model(model, "CPU", given)
    request = compiled.create_infer_request()
    names = {name for port in compiled.inputs for name in port.names}
    return names, lambda feeds: next(iter(request.infer(feeds, share_inputs=True, share_outputs=True).values())).mean(1)


def _llmforge(folder: str, threads: int) -> tuple[set[str], Run]:
    from llmforge.backends.loading import open_encoder
    from llmforge.runtime.config import FILE, RuntimeConfig

    engine = open_encoder(Path(folder), RuntimeConfig.read(Path(folder) / FILE), threads)
    return {"input_ids"}, lambda feeds: engine.encode(list(feeds["input_ids"]))


def serve(runtime: str, model: str, threads: str) -> None:
    """Answer questions about a loaded model on standard input."""
    if runtime.startswith("openvino"):
        names, run = _openvino(model, int(threads), "f32" if runtime == "openvino-f32" else None)
    elif runtime == "onnxruntime":
        names, run = _onnxruntime(model, int(threads))
    else:
        names, run = _llmforge(model, int(threads))
    print(json.dumps({"ready": runtime}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        feeds, times = _inputs(names, asked["batch"], asked["length"]), []
        for _ in range(asked["runs"] + asked.get("warm", 0)):
            began = time.perf_counter()
            made = run(feeds)
            times.append(1e3 * (time.perf_counter() - began))
        assert len(made) == asked["batch"]
        print(json.dumps(times[asked.get("warm", 0) :]), flush=True)


if __name__ == "__main__":
    {"make": make, "export": export, "optimize": optimize, "quantize": quantize, "serve": serve}[sys.argv[1]](
        *sys.argv[2:]
    )
