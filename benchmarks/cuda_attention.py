"""Ask the onnxruntime-gpu wheel which kernel it chooses for an attention, without a GPU (see cuda_wheel.py).

    python benchmarks/cuda_attention.py CASES.json

CASES is a list of objects: sm, dtype (float16, bfloat16), heads, kv_heads, head_dim, cache (null: that of the dtype,
int8), granularity (PER_TENSOR, PER_CHANNEL; of int8), softcap, window (0: none), sink (true, false), and where they
are wanted norms and rotary (true: of queries and keys, inside), split (true: query, key and value are not packed) and
blocks (tokens of a block: PagedAttention, else GroupQueryAttention) with at_least (tokens that the longest text of a
decode step of one row has at least; of 8192 at most). Printed is a list of [kernel of a prefill, kernel of a decode
step]; with at_least, `NumSplits=…` stands behind one that divides texts. In the place of a kernel stands why ONNX
Runtime refuses it.

cuDNN, which on SM 90 and above is asked first for a prefill, is left out: only the library itself knows what it takes.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cuda_wheel

CAPACITY, PROMPT, LONG = 512, 64, 8192


def ask(wheel: Path, cases: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the kernels of a prefill and a decode step, for each case."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps(cases), encoding="utf-8")
        debug = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1", "ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"}
        answer: list[list[str]] = cuda_wheel.inside(wheel, ["--inside", str(file)], debug, script=Path(__file__))[
            "kernels"
        ]
    return answer


def _model(case: Mapping[str, Any]) -> bytes:
    """Write one attention."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    kinds = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "int8": TensorProto.INT8}
    dtype, cache, int32 = kinds[case["dtype"]], kinds[case["cache"] or case["dtype"]], TensorProto.INT32
    heads, kv_heads, width, block = case["heads"], case["kv_heads"], case["head_dim"], case.get("blocks")
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "softcap": float(case["softcap"]),
        "do_rotary": int(case.get("rotary", False)),
    }
    if case["window"]:
        attributes["local_window_size"] = case["window"]
    initializers, given = [], {}
    weights = {
        "sinks": (case["sink"], [heads], ["head_sink"]),
        "gain": (case.get("norms"), [width], ["q_norm_weight", "k_norm_weight"]),
        "turns": (case.get("rotary"), [CAPACITY, width // 2], ["cos_cache", "sin_cache"]),
    }
    for name, (wanted, shape, inputs) in weights.items():
        if wanted:
            initializers.append(helper.make_tensor(name, dtype, shape, bytes(2 * math.prod(shape)), raw=True))
            given |= dict.fromkeys(inputs, name)
    if case["cache"] == "int8":
        attributes |= {"k_quant_type": case["granularity"], "v_quant_type": case["granularity"]}
        attributes |= {} if block else {"kv_cache_bit_width": 8}
        channels = (kv_heads, 1, width) if block else (1, kv_heads, 1, width)
        scales = np.ones(channels if case["granularity"] == "PER_CHANNEL" else 1, np.float32)
        initializers.append(numpy_helper.from_array(scales, "scale"))
        given |= {"k_scale": "scale", "v_scale": "scale"}
    caches, presents = ["past_key", "past_value"], ["present_key", "present_value"]
    if block:
        rows, slots = ["tokens"], ["blocks", block, kv_heads, width]
        places = {"cumulative_sequence_length": ["batch_plus_1"], "past_seqlens": ["batch"]}
        places |= {"block_table": ["batch", "blocks_of_a_row"], "attention_metadata": [3]}
        order = ["key", "value", *caches, *list(places)[:3], "cos_cache", "sin_cache", "", "head_sink", "q_norm_weight"]
        order += ["k_norm_weight", "k_scale", "v_scale", "attention_metadata"]
    else:
        rows, slots = ["batch", "sequence"], ["batch", kv_heads, CAPACITY, width]
        places = {"seqlens_k": ["batch"], "total_sequence_length": []}
        order = ["key", "value", *caches, *places, "cos_cache", "sin_cache", "", "", "head_sink", "k_scale", "v_scale"]
        order += ["q_norm_weight", "k_norm_weight"]
    projections = {"query": heads * width, "key": kv_heads * width, "value": kv_heads * width}
    if not case.get("split"):
        projections = {"query": sum(projections.values())}
    given |= {name: name for name in (*projections, *caches, *places)}
    node = helper.make_node(
        "PagedAttention" if block else "GroupQueryAttention",
        ["query", *(given.get(name, "") for name in order)],
        ["y", *presents],
        "attention",
        domain="com.microsoft",
        **attributes,
    )
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "attention",
        [
            *(value(name, dtype, [*rows, size]) for name, size in projections.items()),
            *(value(name, cache, slots) for name in caches),
            *(value(name, int32, shape) for name, shape in places.items()),
        ],
        [value("y", dtype, [*rows, heads * width]), *(value(name, cache, slots) for name in presents)],
        initializers,
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=12).SerializeToString())


def _inside(file: Path) -> None:
    """Inside the wheel: the work of `ask`."""
    import onnxruntime as ort

    found = []
    for case in json.loads(file.read_text(encoding="utf-8")):
        os.environ["STAND_IN_SM"] = str(case["sm"])
        options = ort.SessionOptions()
        options.log_severity_level = 4
        try:
            session = ort.InferenceSession(_model(case), options, providers=[cuda_wheel.PROVIDER])
        except Exception as error:  # noqa: BLE001 - the answer that was asked for
            found.append([str(error)] * 2)
            continue
        at_least = case.get("at_least")
        rows, length = (2, CAPACITY) if at_least is None else (1, LONG)
        config = {"max_context": CAPACITY, "max_batch": rows, "at_least": at_least or 1}
        if block := case.get("blocks"):
            config["kv_blocks"] = rows * length // block
        steps = cuda_wheel.Steps(ort, session, config)
        pair = [_kernel(steps, rows, PROMPT, PROMPT), _kernel(steps, rows, 1, length)]
        found.append(pair if at_least else [text.partition(" NumSplits=")[0] for text in pair])
    cuda_wheel.leave({"kernels": found})


def _kernel(steps: Any, batch: int, tokens: int, length: int) -> str:
    """Run a step; read the kernel off what ONNX Runtime prints to the process's standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            steps.run(batch, tokens, length, -1)
        except Exception as error:  # noqa: BLE001 - the answer that was asked for
            return str(error)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        printed = file.read().decode()
    kernel = re.search(r"SdpaKernel=(\w+)(?: (NumSplits=(?:[2-9]|\d\d+)\b))?", printed)
    return "none" if kernel is None else " ".join(filter(None, kernel.groups()))


def main() -> None:
    if sys.argv[1] == "--inside":
        _inside(Path(sys.argv[2]))
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(ask(cuda_wheel.install(cuda_wheel.CACHE), cases)))


if __name__ == "__main__":
    main()
