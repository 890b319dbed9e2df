"""Write checkpoints for servers of others from traced models, and read them again apart from the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from safetensors import safe_open

from llmforge import targets
from llmforge.backends.compressed_tensors import builder as compressed_tensors
from llmforge.backends.engines import BuildRequest, exporter
from llmforge.backends.exported_parameters import Exported
from llmforge.checkpoint import Checkpoint
from llmforge.compile import export_proxy
from llmforge.ir import graph, interface
from llmforge.ir.operators.canonical import MoE
from llmforge.passes import QuantizeChannels, QuantizeFp4, QuantizeWeights
from llmforge.quantization.statistics import InputRange, KvRange, Smoothed, Statistics
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context

Traced = tuple[Checkpoint, ir.Model]
LOOSE = Budget(kld_mean=1.0)
LOCAL = targets.local()
GPUS = {QuantizeChannels: targets.load("l4"), QuantizeFp4: targets.load("b200")}
EXPONENTS = [0, 1, 2, 3, 0]
SPEC = EngineSpec(backend="compressed-tensors", max_context=32)
BY_MODELOPT = EngineSpec(backend="compressed-tensors", max_context=32, quant_method="modelopt")
LAYER = "model.layers.0.mlp.down_proj"


def blocks(**changes: Any) -> QuantizeWeights:
    options = {"bits": 4, "block_size": 32, "scales": "fp16", "embedding_bits": 16, "method": "rtn", **changes}
    if options["bits"] == 8:
        options["symmetric"] = True
    return QuantizeWeights(budget=LOOSE, **options)


def export(traced: Traced, *steps: Any) -> tuple[ir.Model, Exported]:
    """Run passes over the graph, with ranges of 4.0 for what a linear layer reads, and outliers in some features."""
    checkpoint, model = traced
    copy = model.clone()
    inputs = {}
    for name, entry in checkpoint.tensors.items():
        exponents = np.zeros(entry.shape[-1], np.int8)
        exponents[:5] = EXPONENTS[: len(exponents)]
        inputs[name] = InputRange(np.full(entry.shape[-1], 4.0, np.float32), Smoothed(exponents, 0.5, 1.0, 2.0))
    for layer in MoE.all(copy):  # what experts read has a range by the parameter of all of them
        for name in (*graph.sources(layer.up), *graph.sources(layer.down)):
            inputs[name] = InputRange(np.full(1, 4.0, np.float32), None)
    statistics = Statistics(0, 0, {}, _kv_ranges(copy), inputs)
    for step in steps:
        target = GPUS.get(type(step), LOCAL)
        assert step.run(copy, Context(target, statistics))
    return copy, export_proxy.exported(copy, model, checkpoint)


def _kv_ranges(model: ir.Model) -> dict[int, KvRange]:
    """Give keys of layer i a range of i + 1, and values one of i + 2."""
    found = {}
    for value in model.graph.inputs:
        if (past := interface.PAST.fullmatch(str(value.name))) is not None and past[2] == "key":
            layer, heads, channels = int(past[1]), int(value.shape[1]), int(value.shape[3])  # type: ignore[index]
            ones = np.ones((heads, channels), np.float32)
            found[layer] = KvRange(ones * (layer + 1), ones * (layer + 2))
    return found


def check(exported: Exported, spec: EngineSpec = SPEC) -> None:
    exporter("compressed-tensors", LOCAL).check(exported, spec)


def write(traced: Traced, folder: Path, *steps: Any, spec: EngineSpec = SPEC) -> tuple[ir.Model, Path]:
    model, exported = export(traced, *steps)
    compressed_tensors.build(BuildRequest(model, folder / "engine", spec, LOCAL, [0], 0, exported=exported))
    return model, folder / "engine"


def dense(words: NDArray[np.int32], bits: int) -> NDArray[np.int64]:
    """Read signed codes of a dense row of words, bit by bit: the definition, apart from the code under test."""
    rows = [
        "".join(f"{word & 0xFFFFFFFF:032b}"[::-1] for word in row)  # the lowest bit first
        for row in words.astype(np.int64).tolist()
    ]
    codes = [[int(row[at : at + bits][::-1], 2) for at in range(0, len(row), bits)] for row in rows]
    return np.array(codes) - (1 << bits - 1)


def tensors(file: Path) -> dict[str, NDArray[Any]]:
    with safe_open(str(file), "pt") as opened:
        import torch

        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        return {
            name: (value.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn))
            if value.dtype == torch.float8_e4m3fn
            else value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
            if value.dtype == torch.bfloat16
            else value.numpy()
            for name, value in found.items()
        }


def settings(engine: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((engine / "config.json").read_text())
    return found


def of_engine(model: ir.Model) -> Mapping[str, NDArray[Any]]:
    """What ONNX Runtime's engine of the same graph holds, by the name of the initializer."""
    lowered, _ = exporter("onnxruntime", LOCAL).lower(model, LOCAL, SPEC)
    return {name: graph.tensor(value).numpy() for name, value in lowered.graph.initializers.items()}


POINTS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of e2m1, by the lower three bits


def of_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Read e2m1 of bytes, the first of two in the lower bits: the definition, apart from the code under test."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    return np.where(nibbles & 8, -1, 1).astype(np.float32) * POINTS[nibbles & 7]
