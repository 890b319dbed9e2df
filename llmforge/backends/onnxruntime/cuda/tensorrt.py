"""ONNX Runtime's TensorRT provider before its CUDA provider: TensorRT compiles what its parser takes of a graph.

Attention over caches, norms with their residual and quantized products are operators of ONNX Runtime's own, which the
parser has not: these stay with the CUDA provider. So what TensorRT gets of a decoder is the products between them.

Plans are compiled on the GPU that runs them, when a step has a shape that none of them covers, and are kept in the
user's cache. The provider names them by the graph alone, without its weights: a prefix tells those apart.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from llmforge.backends.tensorrt.plan_cache import default_folder
from llmforge.base.errors import EnvironmentLacks, UnsupportedError

if TYPE_CHECKING:
    import onnx_ir as ir

PROVIDER = "TensorrtExecutionProvider"
OPTION = "trt_"  # begins the names of the provider's options
CACHE_PREFIX = "trt_engine_cache_prefix"
LIBRARIES = ("libnvinfer.so.10", "libnvonnxparser.so.10")  # that the provider of onnxruntime-gpu 1.31.1 links
INSTALL = "pip install 'tensorrt-cu13>=10.13,<11' --extra-index-url https://pypi.nvidia.com"
# Products of codes, which are com.microsoft's: TensorRT would get what lies between them, and no product.
NOT_TAKEN = ("MatMulNBits", "QMoE", "MoE")


def require(model: ir.Model) -> None:
    """Return if TensorRT takes the products of the lowered `model`.

    Raises:
        UnsupportedError: it has none of the operators that compute them; names those, and a node of each.
    """
    refused = {node.op_type: str(node.name) for node in model.graph.all_nodes() if node.op_type in NOT_TAKEN}
    if refused:
        listed = ", ".join(f"{name} (node {node})" for name, node in sorted(refused.items()))
        raise UnsupportedError(
            f"engine.tensorrt: TensorRT's parser has no {listed}, and would get no product of the graph",
            hint="leave quantize-weights and fuse-experts out of the recipe, quantize with quantize-channels, or set "
            "`engine: {backend: tensorrt}`, whose int4 weights TensorRT multiplies",
        )


def options(model: ir.Model) -> dict[str, str]:
    """Choose options of the provider by what the recipe made of the lowered `model`; each is written down.

    - `trt_fp16_enable`, `trt_bf16_enable`: where the graph has numbers of that type, after `lower-precision`.
    - `trt_int8_enable`: where it has codes of int8 with scales, after `quantize-channels`.
    - `trt_layer_norm_fp32_fallback`: sums of squares in fp32, as the CUDA provider's.
    - `trt_engine_cache_enable`, `trt_timing_cache_enable`: a plan is compiled once, and kernels are timed once.
    """
    dtypes = {value.dtype.name for value in model.graph.initializers.values() if value.dtype is not None}
    codes = any(node.op_type == "DequantizeLinear" for node in model.graph.all_nodes()) and "INT8" in dtypes
    flags = {"fp16": "FLOAT16" in dtypes, "bf16": "BFLOAT16" in dtypes, "int8": codes}
    return {
        **{f"trt_{name}_enable": str(on) for name, on in flags.items()},  # the provider reads True and False alone
        "trt_layer_norm_fp32_fallback": "True",
        "trt_engine_cache_enable": "True",
        "trt_timing_cache_enable": "True",
    }


def prefix(written: Mapping[str, str]) -> str:
    """Name the plans of a graph by the SHA-256 of its files."""
    return hashlib.sha256("".join(f"{name} {written[name]}\n" for name in sorted(written)).encode()).hexdigest()[:16]


def split(given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Tell options of the TensorRT provider from those of the CUDA provider."""
    own = {name: value for name, value in given.items() if name.startswith(OPTION)}
    return own, {name: value for name, value in given.items() if name not in own}


def provider(own: Mapping[str, str], index: int, stream: Any) -> tuple[str, dict[str, str]]:
    """Name the provider with its options on device `index`; plans and timings lie in the user's cache."""
    folder = default_folder() / "onnxruntime-tensorrt"
    folder.mkdir(parents=True, exist_ok=True)
    places = {"trt_engine_cache_path": str(folder), "trt_timing_cache_path": str(folder)}
    where = {"device_id": str(index), "user_compute_stream": str(stream)}
    return PROVIDER, {**own, **places, **where}


def require_here() -> None:
    """Load the libraries that the provider links, out of the packages that pip installs.

    Raises:
        EnvironmentLacks: they are not here.
    """
    for name in LIBRARIES:
        try:
            ctypes.CDLL(next((str(file) for file in _installed(name)), name), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise EnvironmentLacks(f"the engine wants TensorRT 10 beside onnxruntime: {error}", hint=INSTALL) from error


def require_loaded(session: Any, said: str) -> None:
    """Return if a session has the provider, which ONNX Runtime leaves out where it cannot load it.

    Raises:
        EnvironmentLacks: it has not.
    """
    if PROVIDER not in session.get_providers():
        raise EnvironmentLacks(
            f"onnxruntime {ort.__version__} could not load its {PROVIDER}: {said or 'it gives no reason'}", hint=INSTALL
        )


def _installed(name: str) -> Iterator[Path]:
    """Find a library in the package tensorrt_libs."""
    found = importlib.util.find_spec("tensorrt_libs")
    for folder in () if found is None else found.submodule_search_locations or ():
        yield from Path(folder).glob(name)
