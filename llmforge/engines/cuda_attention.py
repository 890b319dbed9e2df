"""Which kernel ONNX Runtime's CUDA provider computes an attention with, and what it says it did.

Of a PagedAttention, FLASH_ATTENTION from SM 80 on, below EFFICIENT_ATTENTION, or DECODER_ATTENTION for decode steps; of
a GroupQueryAttention

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

from llmforge.base.errors import VerificationError
from llmforge.ir import graph
from llmforge.ir.operators.contrib import GroupQueryAttention, PagedAttention

DEBUG_VARIABLE = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
XQA, CUDNN, FLASH, EFFICIENT = "XQA", "CUDNN_FLASH_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"
DECODER = "DECODER_ATTENTION"

_XQA_HEADS = frozenset({64, 128, 256})
_XQA_GROUPS = frozenset({1, 2, 4, 5, 8, 16, 32})  # query heads that share a KV head
_XQA_GROUPS_INT8 = frozenset({4, 8, 16, 32})
_FLASH_LARGEST_HEAD = 256
_AMPERE, _HOPPER = 80, 90

_LINE = re.compile(
    r"Operator=(?P<operator>\S+)(?: Node=(?P<node>.*?))? DataType=(?P<dtype>\w+) SdpaKernel=(?P<kernel>\w+)"
)


@dataclass(frozen=True)
class Attention:
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

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Choice:
    """One line of ONNX Runtime's debug output."""

    operator: str
    node: str
    dtype: str
    kernel: str


def of(model: ir.Model) -> Iterator[tuple[ir.Node, Attention]]:
    """Yield every GroupQueryAttention and PagedAttention of `model`."""
    found: list[GroupQueryAttention | PagedAttention] = [*GroupQueryAttention.all(model), *PagedAttention.all(model)]
    for attention in found:
        paged = isinstance(attention, PagedAttention)
        cache = attention.key_cache if isinstance(attention, PagedAttention) else attention.past_key
        yield (
            attention.node,
            Attention(
                attention.name,
                attention.num_heads,
                attention.kv_num_heads,
                graph.width(cache),
                int8=cache.dtype == ir.DataType.INT8,
                softcap=attention.softcap != 0,
                window=attention.local_window_size > 0,
                sinks=attention.head_sink is not None,
                paged=paged,
            ),
        )


def reason_against(attention: Attention, sm: int) -> str | None:
    """Say why the provider has no kernel for `attention` on a device of `sm`; None where it has."""
    if not attention.int8:
        return None
    if sm < _AMPERE:
        return f"int8 caches need SM {_AMPERE} or above, not SM {sm}"
    if attention.head_dim > _FLASH_LARGEST_HEAD:
        return f"int8 caches need heads of up to {_FLASH_LARGEST_HEAD} channels, not {attention.head_dim}"
    return None


def expected(attention: Attention, sm: int, *, decode: bool) -> frozenset[str]:
    """Return the kernels that a step may be computed with; two where cuDNN decides."""
    if attention.paged:
        slow = DECODER if decode else EFFICIENT
        return frozenset({slow if sm < _AMPERE or attention.head_dim > _FLASH_LARGEST_HEAD else FLASH})
    groups = _XQA_GROUPS_INT8 if attention.int8 else _XQA_GROUPS
    fits = attention.head_dim in _XQA_HEADS and attention.group in groups and not attention.softcap
    if decode and fits and sm >= _AMPERE:
        return frozenset({XQA})
    plain = EFFICIENT if sm < _AMPERE or attention.head_dim > _FLASH_LARGEST_HEAD else FLASH
    asks_cudnn = sm >= _HOPPER and not (attention.int8 or attention.softcap or attention.window or attention.sinks)
    return frozenset({plain, CUDNN} if asks_cudnn else {plain})


def parse(log: str) -> list[Choice]:
    """Read the choices off what ONNX Runtime printed, in their order."""
    return [
        Choice(found["operator"], found["node"] or "", found["dtype"], found["kernel"]) for found in _LINE.finditer(log)
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
