"""The kernel that ONNX Runtime's CUDA provider computes an attention with, and what it says it did.

Of a PagedAttention, FLASH_ATTENTION from SM 80 on, and cuDNN for decode steps where it takes the shape, from SM 90 on;
below EFFICIENT_ATTENTION, or DECODER_ATTENTION for decode steps, as over int8 blocks that XQA does not take. Of a
GroupQueryAttention

    decode, one token a row    XQA, then as prefill
    prefill                    cuDNN (SM 90 and above), FLASH_ATTENTION (SM 80 and above), EFFICIENT_ATTENTION

The choice is made on the host. It was read off the wheel itself, onnxruntime-gpu 1.31.1, which was asked 2700 times
over a device that only claims to be there (`benchmarks/cuda_attention.py`; a test asks some again). That cuDNN is
preferred from SM 90 on, and takes no window, sinks, soft cap or int8, stands in ONNX Runtime's own documentation,
docs/contrib_ops/cuda/gqa.md; whether it takes a shape, only cuDNN says.

With ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1, set before the session is made, each run prints to the standard output of
the process, a line for every attention, in color:

    Operator=GroupQueryAttention Node=… DataType=fp16 SdpaKernel=XQA EffectiveKvLengthBound=128

A replayed CUDA graph prints nothing: no kernel is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from llmforge.backends.onnxruntime.cuda.operators import AMPERE, FLASH_LARGEST_HEAD, int8_reason
from llmforge.base.errors import VerificationError
from llmforge.ir import graph
from llmforge.ir.operators.contrib import GroupQueryAttention, PagedAttention

DEBUG_VARIABLE = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
XQA, CUDNN, FLASH, EFFICIENT = "XQA", "CUDNN_FLASH_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"
DECODER = "DECODER_ATTENTION"

_XQA_HEADS = frozenset({64, 128, 256})
_XQA_GROUPS = frozenset({1, 2, 4, 5, 8, 16, 32})  # query heads that share a KV head
_XQA_GROUPS_INT8 = frozenset({4, 8, 16, 32})
_XQA_GROUPS_BLOCKS = frozenset({4, 6, 8, 16, 32})  # of int8, in the wheel's own message
_HOPPER = 90

_LINE = re.compile(
    r"Operator=(?P<operator>\S+)(?: Node=(?P<node>.*?))? DataType=(?P<dtype>\w+) SdpaKernel=(?P<kernel>\w+)"
)


@dataclass(frozen=True)
class KernelCase:
    """What the choice of a kernel depends on, of one GroupQueryAttention or PagedAttention."""

    node: str
    heads: int
    kv_heads: int
    head_dim: int
    int8: bool  # cache of int8, not of the activations' dtype
    softcap: bool
    window: bool
    sinks: bool
    paged: bool = False
    norms: bool = False  # of queries and keys, inside

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class ChosenKernel:
    """One line of ONNX Runtime's debug output."""

    operator: str
    node: str
    dtype: str
    kernel: str


def of(model: ir.Model) -> Iterator[tuple[ir.Node, KernelCase]]:
    """Yield every GroupQueryAttention and PagedAttention of `model`."""
    found: list[GroupQueryAttention | PagedAttention] = [*GroupQueryAttention.all(model), *PagedAttention.all(model)]
    for attention in found:
        paged = isinstance(attention, PagedAttention)
        cache = attention.key_cache if isinstance(attention, PagedAttention) else attention.past_key
        yield (
            attention.node,
            KernelCase(
                attention.name,
                attention.num_heads,
                attention.kv_num_heads,
                graph.width(cache),
                int8=cache.dtype == ir.DataType.INT8,
                softcap=attention.softcap != 0,
                window=attention.local_window_size > 0,
                sinks=attention.head_sink is not None,
                paged=paged,
                norms=attention.q_norm_weight is not None,
            ),
        )


def reason_against(attention: KernelCase, sm: int) -> str | None:
    """Say why the provider has no kernel for `attention` on a device of `sm`; None where it has."""
    return int8_reason(attention.head_dim, sm) if attention.int8 and not attention.paged else None


def expected(attention: KernelCase, sm: int, *, decode: bool) -> frozenset[str]:
    """Return the kernels that a step may be computed with; two where cuDNN decides."""
    asks_cudnn = sm >= _HOPPER and not (attention.int8 or attention.softcap or attention.window or attention.sinks)
    if attention.paged:
        return _over_blocks(attention, sm, decode=decode, asks_cudnn=asks_cudnn)
    groups = _XQA_GROUPS_INT8 if attention.int8 else _XQA_GROUPS
    fits = attention.head_dim in _XQA_HEADS and attention.group in groups and not attention.softcap
    fits = fits and not (attention.int8 and attention.norms)
    if decode and fits and sm >= AMPERE:
        return frozenset({XQA})
    plain = EFFICIENT if sm < AMPERE or attention.head_dim > FLASH_LARGEST_HEAD else FLASH
    return frozenset({plain, CUDNN} if asks_cudnn else {plain})


def _over_blocks(attention: KernelCase, sm: int, *, decode: bool, asks_cudnn: bool) -> frozenset[str]:
    """As `expected`; XQA reads int8 blocks where the device says that its kernel has the shared memory it wants."""
    if decode and attention.int8:
        fits = attention.head_dim in _XQA_HEADS and attention.group in _XQA_GROUPS_BLOCKS and not attention.softcap
        return frozenset({XQA, DECODER} if fits and sm >= AMPERE else {DECODER})
    if sm < AMPERE or attention.head_dim > FLASH_LARGEST_HEAD:
        return frozenset({DECODER if decode else EFFICIENT})
    return frozenset({FLASH, CUDNN} if decode and asks_cudnn else {FLASH})


def parse(log: str) -> list[ChosenKernel]:
    """Read the choices off what ONNX Runtime printed, in their order."""
    return [
        ChosenKernel(found["operator"], found["node"] or "", found["dtype"], found["kernel"])
        for found in _LINE.finditer(log)
    ]


def check(log: str, model: ir.Model, sm: int, *, decode: bool) -> None:
    """Return if `log`, of steps of one kind, names an expected kernel for every attention of `model`.

    Raises:
        VerificationError: it names another one, or none.
    """
    said: dict[str, set[str]] = {}
    for choice in parse(log):
        said.setdefault(choice.node, set()).add(choice.kernel)
    for _, attention in of(model):
        wanted, found = expected(attention, sm, decode=decode), said.get(attention.node, set())
        if not found or not found <= wanted:
            raise VerificationError(
                f"{'decode' if decode else 'prefill'} step on SM {sm}: {attention.node} ran on "
                f"{', '.join(sorted(found)) or 'an unknown kernel'}; expected is "
                f"{' or '.join(sorted(wanted))}",
                hint=None if found else f"{DEBUG_VARIABLE}=1 must be set before the session is made",
            )
