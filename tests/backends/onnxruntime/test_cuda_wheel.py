"""What llmforge holds of the onnxruntime-gpu wheel, beside the wheel itself, on a machine without a GPU.

benchmarks/cuda_wheel.py loads the wheel's CUDA provider over stand-ins for the CUDA libraries: ONNX Runtime's own code
then lists kernels, places nodes, chooses attention kernels and decides what is captured. Nothing is computed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx_ir as ir
import pytest

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.backends.onnxruntime.cuda import operators as cuda_operators
from llmforge.backends.onnxruntime.cuda import tensorrt, topk
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir.operators import contrib
from llmforge.passes import (
    FlashAttention,
    FuseExperts,
    FuseNorms,
    LowerPrecision,
    PackGateUp,
    PackQkv,
    QuantizeKvCache,
    QuantizeWeights,
)
from llmforge.quantization.statistics import KvRange, Statistics
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Budget, Context, Pass
from llmforge.trace import trace

from ...models import attention_kernels as cuda_attention
from ...models import zoo
from .test_cuda_attention import EXPECTED, PLAIN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BUDGET = Budget(kld_mean=5)
SPEC = EngineSpec(max_context=64, max_batch=2, cuda_graphs="allow", kv_cache="slots")
INT4 = QuantizeWeights(BUDGET, method="rtn", symmetric=True)


def script(name: str) -> ModuleType:
    """Import a file of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cuda_wheel = script("cuda_wheel")
cuda_attention_script = script("cuda_attention")
cuda_launches = script("cuda_launches")
TOPK = ("RadixTopK", "FindPartitionTopK")  # one block a row; the fast kernels


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel, as pip leaves it: LLMFORGE_CUDA_WHEEL, or the user's cache, where it is downloaded to."""
    if sys.platform != "linux" or not all(map(shutil.which, ("cc", "nm", "readelf"))):
        pytest.skip("needs Linux, a C compiler and binutils")
    try:
        return cuda_wheel.install(Path(os.environ.get("LLMFORGE_CUDA_WHEEL", cuda_wheel.CACHE)))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip does not install {cuda_wheel.WHEEL} here: {error}")


def test_the_recorded_kernels_are_those_of_the_wheel(wheel: Path) -> None:
    assert cuda_wheel.dump(cuda_wheel.kernels(wheel)) == cuda_wheel.DATA.read_text(encoding="utf-8")


def test_the_fast_product_has_no_tactic_for_odd_halves_of_64_inputs(wheel: Path, tmp_path: Path) -> None:
    """Why `cuda_operators.keep_out` gives such a product a bias: without it, a prefill fails."""
    zoo.write("llama-mha-biases", tmp_path / "checkpoint")
    model, target = trace(Checkpoint.open(tmp_path / "checkpoint")), targets.load("h100-sxm")
    for step in (FuseNorms(), PackQkv(), FlashAttention(), INT4, LowerPrecision(BUDGET, "fp16")):
        step.run(model, Context(target))
    lowered, _ = cuda.lower(model, target, SPEC)
    odd = [product for product in contrib.MatMulNBits.all(lowered) if product.K % 64]
    assert {product.K for product in odd} == {96}
    cuda.write(BuildRequest(lowered, tmp_path / "kept", SPEC, target, (0,), 0))
    assert cuda_wheel.rehearse(wheel, tmp_path / "kept", 90)["forbidden"] == 0
    for product in odd:
        product.bias = None
    cuda.write(BuildRequest(lowered, tmp_path / "taken", SPEC, target, (0,), 0))
    with pytest.raises(SystemExit, match="No valid fpA_intB MatMulN"):
        cuda_wheel.rehearse(wheel, tmp_path / "taken", 90)


def test_long_texts_over_blocks_are_divided_where_attention_knows_that_they_are_long(wheel: Path) -> None:
    """Why the third number of `attention_metadata` is given (llmforge/backends/onnxruntime/cuda/paged.py)."""
    case = {"sm": 90, "dtype": "float16", "heads": 32, "kv_heads": 8, "head_dim": 128, "cache": None, "softcap": 0}
    case |= {"window": 0, "sink": False, "blocks": 128}
    found = cuda_attention_script.ask(wheel, [{**case, "at_least": tokens} for tokens in (1, 512, 513, 4097)])
    assert [decode for _, decode in found[:2]] == ["FLASH_ATTENTION"] * 2
    assert all(re.fullmatch(r"FLASH_ATTENTION NumSplits=[2-9]", decode) for _, decode in found[2:])


def test_norms_inside_change_no_kernel_but_over_int8_rows(wheel: Path) -> None:
    """Of what reads 16 bits, and of blocks of either: why `cuda_operators.take_norms` moves them there and only there.

    Decode over int8 blocks says DECODER_ATTENTION here, and XQA where a device tells how much shared memory it wants.
    """
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "softcap": 0, "sink": False}
    cases = [
        {"sm": sm, **sizes, "rotary": True, "window": window, "split": split, "norms": norms, "blocks": blocks, **cache}
        for sm in (80, 90, 120)
        for window in (0, 16)
        for split in (False, True)
        for blocks in (None, 128)
        for cache in ({"cache": None}, {"cache": "int8", "granularity": "PER_CHANNEL"})
        for norms in (False, True)
    ]
    found = cuda_attention_script.ask(wheel, cases)
    for case, without, inside in zip(cases[::2], found[::2], found[1::2], strict=True):
        if case["blocks"] is None and case["cache"] == "int8":
            assert (without, inside) == (["FLASH_ATTENTION", "XQA"], ["FLASH_ATTENTION", "FLASH_ATTENTION"])
        else:
            assert without == inside
            decode = {(None, None): "XQA", (128, None): "FLASH_ATTENTION", (128, "int8"): "DECODER_ATTENTION"}
            assert inside == ["FLASH_ATTENTION", decode[case["blocks"], case["cache"]]]


def test_attention_is_computed_by_the_expected_kernels(wheel: Path) -> None:
    """The table of test_cuda_attention.py, less what cuDNN decides."""
    cases = []
    for changes, sm, _, _ in EXPECTED:
        fields = {**vars(PLAIN), **changes}
        cases.append(
            {
                "sm": sm,
                "dtype": "float16",
                **{name: fields[name] for name in ("heads", "kv_heads", "head_dim")},
                "cache": "int8" if fields["int8"] else None,
                "granularity": "PER_CHANNEL" if fields["int8"] else None,
                "softcap": 30 if fields["softcap"] else 0,
                "window": 16 if fields["window"] else 0,
                "sink": bool(fields["sinks"]),
                "norms": fields["norms"],
            }
        )
    refused = [{**cases[-1], "sm": 75}, {**cases[-1], "head_dim": 512}]
    found = cuda_attention_script.ask(wheel, [*cases, *refused])
    without_cudnn = [[(kernels - {cuda_attention.CUDNN}) for kernels in row[2:]] for row in EXPECTED]
    assert [[{kernel} for kernel in pair] for pair in found[: len(cases)]] == without_cudnn
    for pair in found[len(cases) :]:
        assert all("No available GroupQueryAttention kernel supports the quantized KV cache" in text for text in pair)


def test_two_ranks_meet_on_the_stream_of_the_provider(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of llmforge.cuda are placed on CUDA, and captured with their steps: a replay calls nothing."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    found = script("cuda_ranks").run(wheel, 90)
    sums = 1 + 2 * 6  # of a step: the embedding, and two in each layer
    warm = found["cache"][0]["gathers"]  # a step of each shape of prompts, and four of each that is captured
    assert warm > 3 * 4
    for stage, steps in (("cache", warm), ("prefill", warm + 1), ("decode", warm + 1)):
        each = {"sums": sums * steps, "gathers": steps, "on_streams": (sums + 1) * steps}
        assert found[stage] == [each, each], stage
    assert [rank["device"] for rank in found["ranks"]] == ["0", "1"]
    for rank in found["ranks"]:
        assert rank["providers"][0] == "CUDAExecutionProvider"
        assert [each["batch"] for each in rank["captured"]] == [4, 2, 1]
        assert (rank["captures"], rank["forbidden"]) == (3, "")
    assert found["heads_4"] == [4, 8192]


WIDE = {"intermediate_size": 128}  # experts of a width that QMoE takes
# model and changes to it, dtype, passes, SM
ENGINES = [
    ("llama", {}, "fp16", (), 90),
    ("llama-mha-biases", {}, "fp16", (INT4,), 80),
    ("llama-tied", {}, "fp16", (QuantizeWeights(BUDGET, method="rtn", bits=8, symmetric=True),), 89),
    ("qwen2", {}, "bf16", (QuantizeWeights(BUDGET, method="rtn"), QuantizeKvCache(BUDGET)), 90),
    ("llama-mha-biases", {}, "bf16", (INT4,), 90),
    ("gemma2", {}, "fp16", (QuantizeKvCache(BUDGET, granularity="per_tensor"),), 120),
    ("gpt-oss", {}, "fp16", (), 90),
    ("phimoe", {}, "bf16", (), 86),
    ("glm4-moe", {}, "fp16", (), 80),
    ("deepseek-v2", {}, "fp16", (), 90),
    ("mixtral", WIDE, "fp16", (INT4,), 90),
    ("qwen3", {}, "fp16", (), 90),  # norms inside attention
    ("qwen3", {}, "bf16", (QuantizeKvCache(BUDGET),), 80),  # norms in front of it
    ("gemma3", {}, "bf16", (), 120),
    ("mixtral", WIDE, "bf16", (QuantizeWeights(BUDGET, method="rtn", bits=8),), 80),
]


def kv_ranges(model: ir.Model) -> Statistics:
    """Calibrate caches: every key and value reaches to 1."""
    shapes = {value.name: value.shape for value in model.graph.inputs if value.name.endswith(".key")}
    peaks = {int(key.split(".")[1]): np.ones((shape[1], shape[3]), np.float32) for key, shape in shapes.items()}
    return Statistics(0, 0, {}, {layer: KvRange(peak, peak) for layer, peak in peaks.items()})


# models over blocks of a pool, with what is particular to each, and the SM
PAGED = [
    ("llama", "fp16", (), 75),
    ("llama-mha-biases", "fp16", (INT4,), 80),
    ("qwen2", "bf16", (), 90),
    ("gemma2", "fp16", (), 89),  # windows, soft caps
    ("gpt-oss", "bf16", (), 90),  # windows, sinks
    ("qwen3", "fp16", (QuantizeKvCache(BUDGET),), 90),  # norms inside, int8 blocks
]


OLD = {  # what fails on SM 75, as `cuda` says before anything runs
    "experts": ("mixtral", "slots", (), "Arch unsupported for MoE GEMM"),
    "quantized experts": ("mixtral", "slots", (INT4,), "Arch unsupported for MoE GEMM"),
    "sinks": ("gpt-oss", "paged", (), "'head_sink' is only supported by the FlashAttention and paged decode backends"),
}


@pytest.mark.parametrize("case", OLD)
def test_what_an_old_device_has_no_kernels_for(case: str, wheel: Path, tmp_path: Path) -> None:
    name, kv_cache, more, said = OLD[case]
    zoo.write(name, tmp_path / "checkpoint", **(WIDE if name == "mixtral" else {}))
    model, target = trace(Checkpoint.open(tmp_path / "checkpoint")), targets.load("h100-sxm")
    for step in (FuseNorms(), PackQkv(), FlashAttention(), *more, FuseExperts(), LowerPrecision(BUDGET, "fp16")):
        step.run(model, Context(target))
    spec = SPEC.model_copy(update={"kv_cache": kv_cache})
    lowered, _ = cuda.lower(model, target, spec)
    cuda.write(BuildRequest(lowered, tmp_path / "engine", spec, target, (0,), 0))
    with pytest.raises(SystemExit, match=said):
        cuda_wheel.rehearse(wheel, tmp_path / "engine", 75)
    with pytest.raises(UnsupportedError, match="need SM 80"):
        cuda.lower(model, targets.load("t4"), spec)


@pytest.mark.parametrize(("name", "dtype", "more", "sm"), PAGED)
def test_engines_over_blocks_load_and_are_captured(
    name: str, dtype: str, more: tuple[Pass, ...], sm: int, wheel: Path, tmp_path: Path
) -> None:
    zoo.write(name, tmp_path / "checkpoint")
    model, target = trace(Checkpoint.open(tmp_path / "checkpoint")), targets.load("h100-sxm")
    ranges = kv_ranges(model)
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention(), *more, FuseExperts()):
        step.run(model, Context(target, ranges))
    LowerPrecision(BUDGET, dtype).run(model, Context(target))
    spec = EngineSpec(max_context=64, max_batch=2, kv_cache="paged")
    lowered, _ = cuda.lower(model, target, spec)
    cuda.write(BuildRequest(lowered, tmp_path / "engine", spec, target, (0,), 0))
    found = cuda_wheel.rehearse(wheel, tmp_path / "engine", sm)
    assert found["captured"] == {"1": [1, 2], "2": [1, 2]}
    assert found["forbidden"] == 0, found["first_forbidden"]
    steps = found["log"].partition("PREFILL")[2].split("DECODE", 1)
    said = [set(re.findall(r"Operator=PagedAttention .*SdpaKernel=(\w+)", step)) for step in steps]
    prefill = {"FLASH_ATTENTION" if sm >= 80 else "EFFICIENT_ATTENTION"}
    in_place = sm < 80 or any(isinstance(step, QuantizeKvCache) for step in more)
    assert said == [prefill, {"DECODER_ATTENTION"} if in_place else prefill]


@pytest.mark.parametrize(("name", "changes", "dtype", "more", "sm"), ENGINES)
def test_engines_load_and_are_captured(
    name: str, changes: dict[str, int], dtype: str, more: tuple[Pass, ...], sm: int, wheel: Path, tmp_path: Path
) -> None:
    zoo.write(name, tmp_path / "checkpoint", **changes)
    model, target = trace(Checkpoint.open(tmp_path / "checkpoint")), targets.load("h100-sxm")
    ranges = kv_ranges(model)
    first = (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention())
    for step in (*first, *more, FuseExperts(), LowerPrecision(BUDGET, dtype)):
        step.run(model, Context(target, ranges))
    lowered, _ = cuda.lower(model, target, SPEC)
    config, _ = cuda.write(BuildRequest(lowered, tmp_path / "engine", SPEC, target, (0,), 0))
    found = cuda_wheel.rehearse(wheel, tmp_path / "engine", sm)
    assert config.graphs is not None
    assert [capture.id for capture in config.graphs.captures] == [1, 2]
    assert found["captured"] == {"1": [1, 2], "2": [1, 2]}  # captured once; launched by both steps
    assert found["forbidden"] == 0, found["first_forbidden"]
    fast = [each for each in contrib.MatMulNBits.all(lowered) if cuda_operators.slow_reason(each) is None]
    prefill, decode = found["log"].partition("PREFILL")[2].split("DECODE", 1)
    assert prefill.count("[fpA_intB_debug] M=") == len(fast)
    if any(True for _ in cuda_attention.of(lowered)):
        cuda_attention.check(prefill, lowered, sm, decode=False)
        cuda_attention.check(decode, lowered, sm, decode=True)


def test_the_largest_logits_have_the_fast_kernels_as_long_as_their_rows_are_on_the_device_at_once(wheel: Path) -> None:
    """What `cuda.topk` says of the wheel, at its borders, and that slices keep it; empty ones launch nothing."""
    cases = []
    for name in ("t4", "a100-80", "a10g", "l4", "h100-sxm", "rtx-5090"):  # one of every SM
        gpu = targets.load(name).require_gpu()
        about = {"sm": int(gpu.sm), "processors": gpu.multiprocessors}
        for vocabulary in (32_000, 128_256, 151_936, 262_144):
            held = topk.rows_at_once(vocabulary, int(gpu.sm), gpu.multiprocessors)
            cases += [
                {**about, "vocabulary": vocabulary, "rows": rows, "slices": slices}
                for rows, slices in ((held, []), (held + 1, []), (held + 1, [held]), (1, [held]))
            ]
    found = cuda_launches.topk(wheel, cases)
    for case, launches in zip(cases, found, strict=True):
        counts = {kernel: sum(n for name, (n, _) in launches.items() if kernel in name) for kernel in TOPK}
        slow = not case["slices"] and case["rows"] > topk.rows_at_once(
            case["vocabulary"], case["sm"], case["processors"]
        )
        runs = 1 + (bool(case["slices"]) and case["rows"] > case["slices"][0])
        assert counts == (
            {"RadixTopK": 1, "FindPartitionTopK": 0} if slow else {"RadixTopK": 0, "FindPartitionTopK": runs}
        )


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 120])
def test_what_merges_partitions_takes_of_a_multiprocessor_what_is_said(wheel: Path, sm: int) -> None:
    usage = cuda_launches.usage(wheel, sm)
    place = list(topk._MULTIPROCESSORS).index(sm)
    two = {32: "8ELi4ELi1E", 64: "8ELi8ELi1E", 128: "8ELi8ELi2E", 256: "8ELi8ELi4E"}
    for most, factors in ({4: "4ELi1ELi1E", 8: "8ELi1ELi1E", 16: "16ELi1ELi1E"} | two).items():
        merge = topk._MERGES[most]
        [(registers, shared)] = [
            each for name, each in usage.items() if f"CooperativeReduceILi256ELi256ELi{factors}" in name
        ]
        assert registers == merge.registers[place]
        assert shared - (1024 if sm >= 90 else 0) == merge.shared_bytes


@pytest.mark.parametrize(("kv_cache", "launches"), [("paged", 136), ("slots", 119)])
def test_a_decode_step_launches_as_many_kernels_as_is_said(
    wheel: Path, kv_cache: str, launches: int, tmp_path: Path
) -> None:
    """Of the sample: what docs/cuda.md counts, besides cuBLAS's products."""
    script("cuda_session").write_engine(tmp_path / "engine", kv_cache)
    steps = cuda_launches.step(wheel, tmp_path / "engine", 90, 132)
    assert [step["rows"] for step in steps] == [8, 4, 2, 1]
    counts = {sum(count for count, _ in step["launches"].values()) for step in steps}
    assert counts == {launches}
    said = (BENCHMARKS.parent / "docs" / "cuda.md").read_text(encoding="utf-8")
    assert "launches 136 kernels for 6 layers, over slots 119" in said


PRELOADED = """
import ctypes, json
from pathlib import Path
import onnxruntime
from llmforge.backends.onnxruntime.cuda import session
said = session._preload()
provider = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
try:
    ctypes.CDLL(str(provider))
except OSError as error:
    said += str(error)
print(json.dumps([said, [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]]))
"""


@pytest.mark.parametrize("beside", [True, False])
def test_libraries_of_cuda_are_found_wherever_they_are_installed(wheel: Path, tmp_path: Path, beside: bool):
    """`preload_dlls` looks beside onnxruntime alone; as an environment over another one, it would not find them."""
    libraries, system, site = tmp_path / "made", tmp_path / "system", tmp_path / "base"
    for folder in (libraries, system):
        folder.mkdir()
    if beside:
        site = tmp_path / "own"
        (site / "onnxruntime").mkdir(parents=True)
        for each in (wheel / "onnxruntime").iterdir():
            (site / "onnxruntime" / each.name).symlink_to(each)
    script("cuda_wheel").stand_ins(wheel, libraries)
    for library in libraries.iterdir():
        own = {"libcuda.": system, "libnv": system, "libcudnn": site / "nvidia" / "cudnn" / "lib"}
        goes = next((place for name, place in own.items() if library.name.startswith(name)), None)
        goes = goes or site / "nvidia" / "cu13" / "lib"
        goes.mkdir(parents=True, exist_ok=True)
        shutil.move(library, goes / library.name)
    paths = [site, wheel, BENCHMARKS.parent] if beside else [wheel, site, BENCHMARKS.parent]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "LD_LIBRARY_PATH": str(system)}
    done = subprocess.run([sys.executable, "-c", PRELOADED], env=variables, capture_output=True, text=True, check=True)
    said, mapped = json.loads(done.stdout.splitlines()[-1])
    assert said == ""
    assert str(site / "nvidia" / "cu13" / "lib" / "libcudart.so.13") in mapped
    assert str(site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9") in mapped


OPTIONS = """
import json, os, sys
import numpy as np
import onnx
import onnxruntime
value = onnx.helper.make_tensor_value_info("y", 1, [1])
graph = onnx.helper.make_graph([], "g", [], [value], [onnx.numpy_helper.from_array(np.ones(1, np.float32), "y")])
model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
found = []
for options in json.loads(sys.argv[1]):
    providers = [("TensorrtExecutionProvider", options), "CUDAExecutionProvider"]
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers, enable_fallback=0)
        found.append(session.get_providers()[0])
    except Exception as error:
        found.append(str(error))
print(json.dumps({"found": found}), flush=True)
os._exit(0)
"""


def test_the_tensorrt_provider_takes_the_options_that_are_chosen(wheel: Path, tmp_path: Path, monkeypatch) -> None:
    """Asked of the wheel: names and values, of which it reads True and False and no 1."""
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path))
    zoo.write("llama", tmp_path / "checkpoint")
    model = trace(Checkpoint.open(tmp_path / "checkpoint"))
    chosen = {**tensorrt.options(model), tensorrt.CACHE_PREFIX: "0123456789abcdef"}
    own = tensorrt.provider(chosen, 0, 1)[1]
    cases = [own, {**own, "trt_fp16_enable": "1"}, {**own, "trt_no_such": "True"}]
    (tmp_path / "script.py").write_text(OPTIONS, encoding="utf-8")
    found = cuda_wheel.inside(wheel, [json.dumps(cases)], script=tmp_path / "script.py")["found"]
    assert found[0] == tensorrt.PROVIDER
    assert "should be 'True' or 'False'" in found[1]
    assert "Invalid TensorRT EP option: trt_no_such" in found[2]
    linked = subprocess.run(
        ["readelf", "-d", str(wheel / "onnxruntime" / "capi" / "libonnxruntime_providers_tensorrt.so")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert all(f"[{name}]" in linked for name in tensorrt.LIBRARIES)


def test_a_wheel_with_the_code_of_one_device_lists_the_same_kernels(wheel: Path, tmp_path: Path, monkeypatch) -> None:
    """What is carried to a borrowed machine (benchmarks/verify_gpu/slim.py)."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    from benchmarks.verify_gpu import slim

    shutil.copytree(wheel / "onnxruntime", tmp_path / "onnxruntime")
    provider = tmp_path / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    content = bytearray(provider.read_bytes())
    kept, dropped = slim.slim(content, 90)
    assert kept < dropped
    provider.write_bytes(content)
    found = cuda_wheel.inside(tmp_path, ["_kernels"])["kernels"]
    assert found == cuda_wheel.inside(wheel, ["_kernels"])["kernels"]
