"""What each engine takes on each device: dtypes of arithmetic, of stored weights and of cached keys and values.

Kept by engine and compute capability, because devices of one capability do not differ here. A dtype that is absent is
refused when a plan is made; the reasons say why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Backend = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
Dtype = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4"]
Role = Literal["compute", "weights", "kv"]


@dataclass(frozen=True)
class Support:
    """What an engine takes on one kind of device.

    `compute` are dtypes of activations between layers, `weights` of stored matrices (int8 and int4 are weights alone,
    multiplied in the compute dtype; fp8 and fp4 round activations as well), `kv` of the cache. `why` gives the reason
    where something that the hardware or the engine has elsewhere is missing.
    """

    compute: frozenset[Dtype]
    weights: frozenset[Dtype]
    kv: frozenset[Dtype]
    why: Mapping[Dtype, str] = field(default_factory=dict)
    verified: bool = False  # read off the package, or seen when an engine was built or refused

    def refusal(self, dtype: Dtype, role: Role) -> str | None:
        """Say why `dtype` cannot be used in `role`; None where it can."""
        allowed: frozenset[Dtype] = getattr(self, role)
        if dtype in allowed:
            return None
        known = self.why.get(dtype) if role != "kv" else None
        what = {"compute": "computes in", "weights": "stores weights as", "kv": "caches keys and values as"}[role]
        return known or f"it {what} {', '.join(sorted(allowed))}"


_HALF: frozenset[Dtype] = frozenset({"fp16", "bf16"})
_NO_BF16 = "SM 7.5 has no bf16 arithmetic, which came with SM 8.0"

# TensorRT-RTX 1.7: built for every capability, without a GPU, and refused where it says so. INT4 weights are
# dequantized in blocks of 128 without zero points; caches are updated in place, which takes 16 bits.
RTX_CAPABILITIES = ("75", "80", "86", "89", "120")
# SASS that the onnxruntime-gpu 1.31.1 wheel holds; it has no PTX, so that nothing else runs.
ORT_CAPABILITIES = ("75", "80", "86", "89", "90", "120")


def support(backend: Backend, sm: str | None) -> Support | None:
    """Return what `backend` takes on capability `sm` ("89"; None: a CPU); None where it does not run at all."""
    if sm is None:
        return _CPU if backend == "onnxruntime" else None
    if unsupported(backend, sm) is not None:
        return None
    return _onnxruntime(sm) if backend == "onnxruntime" else _tensorrt(sm, verified=backend == "tensorrt-rtx")


def unsupported(backend: Backend, sm: str | None) -> str | None:
    """Say why `backend` has no engine at all for capability `sm`; None where it has."""
    if sm is None:
        return None if backend == "onnxruntime" else "it builds engines for NVIDIA GPUs alone"
    if backend == "tensorrt-rtx" and sm not in RTX_CAPABILITIES:
        return f"TensorRT-RTX 1.7 has no target SM {_dotted(sm)}"
    if backend == "onnxruntime" and sm not in ORT_CAPABILITIES:
        return f"the onnxruntime-gpu 1.31.1 wheel holds neither code for SM {_dotted(sm)} nor PTX to make it from"
    return None


_CPU = Support(
    compute=frozenset({"fp32"}),
    weights=frozenset({"fp32", "int8", "int4"}),
    kv=frozenset({"fp32", "int8"}),
    why=dict.fromkeys(("fp16", "bf16"), "CPU engines compute in fp32, or in int8 on int8 and int4 weights"),
    verified=True,
)


def _onnxruntime(sm: str) -> Support:
    """GroupQueryAttention, MatMulNBits and their caches on CUDA (kernel registry of onnxruntime-gpu 1.31.1)."""
    half = _HALF - {"bf16"} if sm == "75" else _HALF
    eight: tuple[Dtype, ...] = ("fp8",) if int(sm) >= 89 else ()
    return Support(
        compute=half,
        weights=half | {"int8", "int4"},
        kv=frozenset({*half, "int8", "int4", *eight}),
        why={
            "fp32": "GroupQueryAttention on CUDA takes fp16 and bf16",
            "fp8": "onnxruntime would dequantize fp8 weights before every product",
            "fp4": "onnxruntime would dequantize fp4 weights before every product",
            **({"bf16": _NO_BF16} if sm == "75" else {}),
        },
    )


def _tensorrt(sm: str, *, verified: bool) -> Support:
    """What TensorRT-RTX 1.7 built and refused by capability; TensorRT 11 is taken to do the same."""
    half = _HALF - {"bf16"} if sm == "75" else _HALF
    weights: set[Dtype] = {*half, "int8"}
    why: dict[Dtype, str] = {"fp32": "fused attention takes fp16 and bf16"}
    if sm == "75":
        why |= {"bf16": _NO_BF16, "int4": "TensorRT refuses int4 weights on SM 7.5"}
    else:
        weights.add("int4")
    if int(sm) >= 89:
        weights.add("fp8")
    else:
        why["fp8"] = f"SM {_dotted(sm)} has no fp8 arithmetic, which came with SM 8.9"
    if int(sm) >= 100:
        weights.add("fp4")
    else:
        why["fp4"] = f"SM {_dotted(sm)} has no fp4 arithmetic, which came with SM 10.0"
    return Support(half, frozenset(weights), half, why, verified)


def _dotted(sm: str) -> str:
    return f"{sm[:-1]}.{sm[-1]}"
