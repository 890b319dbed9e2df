"""Time attention of the CPU kernels over each format of the KV cache: python benchmarks/kv_cache.py [--rounds N].

One thread, one layer of 16 query heads and 8 KV heads of 128 channels, without rotary embedding: a decode step behind
32 and 2048 tokens, each of 12 layers with its own cache in turn, and a prompt of 512 tokens. Formats take turns; a
time is the least of all rounds, as whatever else the machine does adds to it.
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from llmforge import native
from llmforge.quantization import kv_cache
from llmforge.quantization.formats import KvFormat, SlotFormat

HEADS, KV_HEADS, DIM, LAYERS = 16, 8, 128, 12
STATIC, TOKEN8, TOKEN4 = SlotFormat("int8", "channel"), SlotFormat("int8", "token"), SlotFormat("int4", "token")
TURNED8, TURNED4 = SlotFormat("int8", "token", hadamard=True), SlotFormat("int4", "token", hadamard=True)
FORMATS = [
    KvFormat(*each)
    for each in (
        (STATIC, STATIC), (TOKEN8, TOKEN8), (TURNED8, TURNED8), (STATIC, TOKEN4), (TOKEN8, TOKEN4), (TOKEN4, TOKEN4),
        (TURNED4, TURNED4),
    )
]  # fmt: skip
SCALES = np.full((KV_HEADS, 1, DIM), 0.03, np.float32)
INPUTS = ("qkv", "past_key", "past_value", "seqlens_k", "", "", "ks", "vs")


def slot(form: SlotFormat) -> int:
    """SLOT_* of native/kernels.h."""
    return 0 if form.portable else 2 if form.dtype == "int4" else 1


@cache
def filled(form: SlotFormat, capacity: int) -> NDArray[np.uint8]:
    """Make a cache of random keys, or values, [1, KV heads, capacity, bytes]; they come again after 64 tokens."""
    x = np.random.default_rng(0).standard_normal((1, KV_HEADS, 64, DIM)).astype(np.float32)
    slots = kv_cache.write(x, form, SCALES)
    return np.tile(slots, (1, 1, -(-capacity // 64), 1))[:, :, :capacity]


def attention(form: KvFormat, past: int, sequence: int) -> tuple[Any, Any]:
    """Make a session of one attention behind `past` tokens, and what is bound to it, its cache in place."""
    rng = np.random.default_rng(0)
    caches: list[NDArray[Any]] = [filled(each, past + sequence).copy() for each in (form.keys, form.values)]
    more: dict[str, Any] = {"head_dim": DIM, "key_slot": slot(form.keys), "value_slot": slot(form.values)}
    more |= {"turn_keys": int(form.keys.hadamard), "turn_values": int(form.values.hadamard)}
    if form.portable:
        caches, more = [each.view(np.int8) for each in caches], {}
    held = {"ks": form.keys.portable, "vs": form.values.portable}
    feeds = {
        "qkv": rng.standard_normal((1, sequence, (HEADS + 2 * KV_HEADS) * DIM)).astype(np.float32),
        "past_key": caches[0],
        "past_value": caches[1],
        "seqlens_k": np.array([past + sequence - 1], np.int32),
    }
    node = helper.make_node(
        "GroupQueryAttentionInt8" if form.portable else "GroupQueryAttentionSlots",
        [name if held.get(name, True) else "" for name in INPUTS], ["y", "key", "value"], domain=native.DOMAIN,
        num_heads=HEADS, kv_num_heads=KV_HEADS, local_window_size=0, rotary_interleaved=0, per_channel=1,
        scale=DIM**-0.5, softcap=0.0, qk_norm_epsilon=0.0, **more,
    )  # fmt: skip
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in ("y", "key", "value")]
    constants = [numpy_helper.from_array(SCALES, name) for name, wanted in held.items() if wanted]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(native.DOMAIN, 1)]
    model = helper.make_model(
        helper.make_graph([node], "g", given, made, constants), opset_imports=opsets, ir_version=10
    )
    for output in model.graph.output:
        output.ClearField("type")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    native.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    y = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, sequence, HEADS * DIM), np.float32))
    for name, value in (("y", y), ("key", values["past_key"]), ("value", values["past_value"])):
        binding.bind_ortvalue_output(name, value)
    return session, (binding, values, y)


def seconds(layers: list[tuple[Any, Any]]) -> float:
    """Time one step, a layer."""
    begin = time.perf_counter()
    for session, (binding, *_) in layers:
        session.run_with_iobinding(binding)
    return (time.perf_counter() - begin) / len(layers)


def main() -> None:
    """Print a table, in microseconds a layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print("| cache | bytes a token | after 32, µs | after 2048, µs | prompt of 512, ms |\n|---|--:|--:|--:|--:|")
    best: dict[str, list[float]] = {form.name: [] for form in FORMATS}
    for past, sequence in ((32, 1), (2048, 1), (0, 512)):
        made = {
            form.name: [attention(form, past, sequence) for _ in range(LAYERS if sequence == 1 else 1)]
            for form in FORMATS
        }
        taken = [{name: seconds(layers) for name, layers in made.items()} for _ in range(rounds)]
        for name in made:
            best[name].append(min(each[name] for each in taken))
    for form in FORMATS:
        short, long, prompt = best[form.name]
        size = KV_HEADS * form.bytes_per_token(DIM, DIM)
        print(f"| {form.name} | {size:,} | {short * 1e6:.0f} | {long * 1e6:.0f} | {prompt * 1e3:.1f} |")


if __name__ == "__main__":
    main()
