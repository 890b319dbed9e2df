"""The bindings of TensorRT 11.4 over libraries of nothing: every name that building and running plans uses is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .test_session import USED

pytestmark = pytest.mark.slow

WHEEL = "tensorrt_cu13_bindings==11.4.0.106"
LIBRARIES = ("libnvinfer", "libnvonnxparser", "libnvinfer_plugin")
FUNCTIONS = (
    *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
    *("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getNvOnnxParserVersion"),
    *("getBuilderPluginRegistry", "getPluginRegistry", "initLibNvInferPlugins"),
)
# What TensorRT-RTX alone has, and the session asks of that alone.
OF_RTX = {
    "IRuntimeCache": ["deserialize", "serialize"],
    "DynamicShapesKernelSpecializationStrategy": ["EAGER", "LAZY"],
    "CudaGraphStrategy": ["DISABLED", "WHOLE_GRAPH_CAPTURE"],
    "IRuntimeConfig": [
        "cuda_graph_strategy",
        "dynamic_shapes_kernel_specialization_strategy",
        "create_runtime_cache",
        "set_runtime_cache",
    ],
}
BUILDING = {  # llmforge/backends/tensorrt/compile_plan.py, layers.py, plan.py
    "Builder": [
        "create_network",
        "create_builder_config",
        "create_optimization_profile",
        "build_serialized_network_to_stream",
    ],
    "OnnxParser": ["parse_from_file", "num_errors", "get_error"],
    "IBuilderConfig": [
        "profiling_verbosity",
        "set_flag",
        "clear_flag",
        "add_optimization_profile",
        "create_timing_cache",
        "set_timing_cache",
    ],
    "INetworkDefinition": ["num_layers", "get_layer", "num_inputs", "get_input", "add_shape", "add_slice", "add_cast"],
    "IAttentionInputLayer": ["attention"],
    "IAttention": ["key_value_lengths", "decomposable", "causal_kind"],
    "ElementWiseOperation": ["SUM"],
    "IStreamWriter": ["write"],
    "IExecutionContext": ["set_communicator"],
}
ASK = """
import json, sys
import tensorrt_bindings as api
wanted = json.loads(sys.argv[1])
missing = [f"{kind}.{name}" for kind, names in wanted.items() for name in names
           if not hasattr(getattr(api, kind, None), name)]
print(json.dumps([api.__version__, missing, api.CausalMaskKind.__doc__]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A process that finds the bindings, and libraries whose functions return nothing."""
    folder = tmp_path_factory.mktemp("tensorrt")
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "wheel"), WHEEL]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"pip does not install {WHEEL} here")
    source = folder / "source.c"
    source.write_text("\n".join(f"void *{name}(void) {{ return 0; }}" for name in FUNCTIONS), encoding="utf-8")
    for library in LIBRARIES:
        file = folder / f"{library}.so.11"
        named = f"-Wl,-soname,{file.name}"
        subprocess.run(["cc", "-w", "-shared", "-fPIC", named, "-o", str(file), str(source)], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder / "wheel")}


def asked(environment: dict[str, str], names: dict[str, list[str]]) -> tuple[str, list[str], str]:
    command = [sys.executable, "-c", ASK, json.dumps(names)]
    done = subprocess.run(command, env=environment, cwd=Path("/"), check=True, capture_output=True, text=True)
    version, missing, said = json.loads(done.stdout.splitlines()[-1])
    return version, missing, said


def test_tensorrts_bindings_have_every_name_that_is_used(environment: dict[str, str]) -> None:
    own = {kind: [name for name in names if name not in OF_RTX.get(kind, [])] for kind, names in USED.items()}
    version, missing, _ = asked(environment, own)
    assert version == "11.4.0.106"
    assert missing == []
    assert asked(environment, BUILDING)[1] == []


def test_what_rtx_alone_has_is_missing(environment: dict[str, str]) -> None:
    wanted = [f"{kind}.{name}" for kind, names in OF_RTX.items() for name in names]
    assert asked(environment, OF_RTX)[1] == wanted


def test_causal_attention_without_a_mask_counts_from_the_size_of_the_keys(environment: dict[str, str]) -> None:
    """So a cache of a fixed capacity needs its mask (docs/tensorrt.md)."""
    said = asked(environment, {})[2]
    assert "j <= i + (s_kv - s_q)" in said
