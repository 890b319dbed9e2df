"""The engine for ONNX Runtime on a GPU: the lowered graph, and `runtime.json` with what its CUDA provider is told.

Nothing here needs a GPU. Whether the provider runs a node is looked up in the record of its kernels
(`llmforge.engines.kernels`); what the graph computes is the CPU's business to prove, on the same graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.base.progress import Progress, Silent
from llmforge.engines import (
    Engine,
    cuda_attention,
    cuda_graphs,
    cuda_operators,
    kernels,
    onnx_file,
    require_device,
    signatures,
)
from llmforge.engines import onnxruntime as standard
from llmforge.ir import graph, operators
from llmforge.ir.operators import contrib
from llmforge.ir.operators.standard import Shape
from llmforge.lowering.pass_base import Changes, Skipped
from llmforge.recipe import EngineSpec
from llmforge.runtime.backends.config import (
    DATA_FILE,
    FILE,
    FORMAT,
    MODEL_FILE,
    DeviceFacts,
    RuntimeConfig,
    SessionOptions,
)
from llmforge.runtime.backends.cuda import DeviceSession
from llmforge.runtime.backends.device import require_cuda
from llmforge.targets import Target

VERSION = kernels.cuda().wheel.rpartition("=")[2]

# Session entries of the fast product of 4-bit and 8-bit weights (cuda_operators), in the wheel by these names.
FAST_ENTRY, FAST_ROWS_ENTRY = "ep.cuda.fpa_intb_gemm", "ep.cuda.fpa_intb_profile_m"

# Tokens of a prefill that it is tuned for at load, beside the rows of decode steps.
PREFILL_ROWS = (16, 64, 256, 1024)

check_context = standard.check_context


def require_host(target: Target, spec: EngineSpec) -> None:
    """Return if the GPU of `target` is at hand: an engine is loaded and its steps are captured as it is built.

    Raises:
        EnvironmentLacks: it is not.
        UnsupportedError: the wheel has no code for it.
    """
    require_code(target)
    require_device(target, "an engine for ONNX Runtime's CUDA provider is proven on the GPU that runs it")


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Rewrite what the passes left into operators that ONNX Runtime's CUDA provider runs in the graph's dtypes.

    As for the CPU, and then as `llmforge.engines.cuda_operators` says. What runs on a slower path than it might is
    listed as skipped, with the reason.

    Raises:
        UnsupportedError: the wheel has no code for the target, a node no kernel, or `spec` wants CUDA graphs of steps
            that cannot be captured.
    """
    sm = require_code(target)
    changes = Changes()
    lowered, changes.rewritten = standard.expand(model)
    changes.rewritten += cuda_operators.split_biases(lowered)
    changes.rewritten += cuda_operators.name_layouts(lowered)
    changes.rewritten += cuda_operators.widen(lowered)
    changes.skipped += [Skipped(str(node.name), reason) for node, reason in cuda_operators.slower(lowered)]
    check(lowered, target)
    _refuse(lowered, sm)
    cuda_graphs.require(lowered, spec)
    require_memory(lowered, target, spec)
    return lowered, changes


def require_code(target: Target) -> int:
    """Return the compute capability of `target`, 89, if the wheel has machine code for it.

    Raises:
        UnsupportedError: it has not.
    """
    if target.kind != "gpu" or target.sm is None:
        raise UnsupportedError(f"target {target.name} is a {target.kind}; this engine runs on GPUs")
    sm = int(target.sm)
    if not kernels.cuda().covers(sm):
        listed = ", ".join(map(str, kernels.cuda().machine_code))
        raise UnsupportedError(
            f"{kernels.cuda().wheel} has machine code for SM {listed} and nothing that a driver could compile for SM "
            f"{sm} (target {target.name}, {target.title})",
            hint="build `engine: {backend: tensorrt}` for this target",
        )
    return sm


def require_memory(model: ir.Model, target: Target, spec: EngineSpec) -> int:
    """Return the bytes that the lowered `model` wants on the device, if it has them.

    Raises:
        UnsupportedError: it has not.
    """
    wanted = cuda_graphs.memory(model, spec, cuda_graphs.plan(model, spec))
    assert target.memory_gb is not None
    if wanted.total > target.memory_gb.value * 1e9:
        raise UnsupportedError(
            f"the engine needs about {wanted.total / 1e9:.1f} GB: {wanted}; target {target.name} ({target.title}) has "
            f"{target.memory_gb.value:g} GB",
            hint="lower engine.max_batch, engine.max_context or the bits of weights and caches",
        )
    return wanted.total


def check(model: ir.Model, target: Target) -> None:
    """Return if the CUDA provider has a kernel for every node of the lowered `model`.

    Raises:
        UnsupportedError: names the nodes, their types, and what kernels there are.
    """
    known = kernels.cuda()
    found = list(kernels.missing(model, known, kernels.infer(model)))
    if not found:
        return
    attention = any(contrib.GroupQueryAttention.matches(node) for node, _ in found)
    lines = {f"{operators.qualified(node)}: {what}": node for node, what in reversed(found)}
    listed = "; ".join(f"{line} (node {node.name})" for line, node in sorted(lines.items()))
    raise UnsupportedError(
        f"the CUDA provider of {known.wheel} cannot run {len(found)} nodes (target {target.name}): {listed}",
        hint="add `lower-precision: {dtype: fp16}` to the recipe: GroupQueryAttention has no fp32 kernel on CUDA"
        if attention
        else "choose passes whose operators the target runs",
    )


def _refuse(model: ir.Model, sm: int) -> None:
    """Refuse what the provider takes when it loads the graph and refuses when it runs it."""
    found = [(node, cuda_attention.refusal_reason(attention, sm)) for node, attention in cuda_attention.of(model)]
    found += [(experts.node, cuda_operators.experts_refusal_reason(experts)) for experts in contrib.QMoE.all(model)]
    for node, reason in found:
        if reason is not None:
            raise UnsupportedError(
                f"{node.op_type} {node.name} on CUDA: {reason}",
                hint="leave quantize-kv-cache out of the recipe, or choose another target"
                if contrib.GroupQueryAttention.matches(node)
                else "exclude the experts from quantize-weights, and fuse them with fuse-experts",
            )


def build(
    model: ir.Model,
    folder: Path,
    *,
    spec: EngineSpec,
    target: Target,
    eos_token_ids: Sequence[int],
    bos_token_id: int | None,
    progress: Progress | None = None,
) -> Engine:
    """Write a lowered `model` into `folder` (created), load it on the target's GPU, run it and capture its steps.

    Raises:
        EnvironmentLacks: this machine has not that GPU.
        UnsupportedError: a node has no kernel, `spec.max_context` is more than the rotary tables reach, or the device
            has not the memory for what the engine needs.
        VerificationError: a step that must be captured is not, or logits are not finite.
    """
    require_host(target, spec)
    check(model, target)
    check_context(model, spec.max_context)
    config = configure(model, spec=spec, target=target, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
    write(model, folder, config, progress)
    session = DeviceSession(
        folder / MODEL_FILE,
        config.session.resolve(),
        require_cuda(),
        provider_options=config.provider_options,
        buckets=config.buckets,
        graphs=config.graphs,
    )
    notes = prove(session, config)
    size_bytes = sum((folder / name).stat().st_size for name in (MODEL_FILE, DATA_FILE, FILE))
    return Engine(folder, config, graph.nodes(model), size_bytes, notes=notes)


def write(model: ir.Model, folder: Path, config: RuntimeConfig, progress: Progress | None = None) -> None:
    """Write `model.onnx`, its data and `runtime.json` into `folder` (created)."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx_file.write(model, folder, progress or Silent())
    (folder / FILE).write_text(config.to_json(), encoding="utf-8")


def prove(session: DeviceSession, config: RuntimeConfig) -> tuple[str, ...]:
    """Capture the planned steps, read two tokens and generate on from them; return notes on what is not captured.

    Raises:
        VerificationError: a step that must be captured is not, or logits are not finite.
    """
    cache = session.allocate(config.max_batch, config.max_context)
    for past, ids in ((0, [[0, 0]]), (2, [[0]]))[: config.max_context - 1]:
        logits = session.step(np.array(ids, np.int64), np.array([past], np.int32), cache.rows(0, 1))
        if not np.isfinite(logits).all():
            raise VerificationError(f"the engine yields logits that are not finite, after {past} tokens of id 0")
    return session.notes


def configure(
    model: ir.Model,
    *,
    spec: EngineSpec,
    target: Target,
    eos_token_ids: Sequence[int],
    bos_token_id: int | None,
) -> RuntimeConfig:
    """Say how the lowered `model` runs on `target`.

    Raises:
        UnsupportedError: the wheel has no code for the device, or it has not the memory.
    """
    graphs = cuda_graphs.plan(model, spec)
    buckets = cuda_graphs.decode_batches(spec)
    return RuntimeConfig(
        format=FORMAT,
        onnxruntime=VERSION,
        kernels=None,
        max_context=spec.max_context,
        max_batch=spec.max_batch,
        vocabulary=signatures.vocabulary(model),
        eos_token_ids=tuple(eos_token_ids),
        bos_token_id=bos_token_id,
        caches=signatures.caches(model),
        session=session_options(model, buckets),
        provider="cuda",
        provider_options=provider_options(graphs.mode != "off"),
        buckets=buckets,
        device=DeviceFacts(require_code(target), require_memory(model, target, spec)),
        graphs=graphs,
    )


def session_options(model: ir.Model, buckets: Sequence[int]) -> SessionOptions:
    """Choose how ONNX Runtime runs the graph.

    - `session.disable_cpu_ep_fallback`: a node that the CUDA provider does not take fails the load, and is not moved to
      the CPU in silence. Not where the graph computes with shapes: ONNX Runtime does that on the host by choice.
    - `session.use_device_allocator_for_initializers`: weights lie outside of the arena, which never shrinks.
    - `ep.cuda.fpa_intb_gemm`, with the rows that its kernels are chosen for before anything is captured: only where a
      product is fit for it. There `MatMulNBitsFusion` stays off, by which ONNX Runtime would put a bias back into the
      operator, and the product on the slow path: seen in the wheel.
    """
    on_host = any(map(Shape.matches, model.graph.all_nodes()))
    entries = {
        "session.disable_cpu_ep_fallback": "0" if on_host else "1",
        "session.use_device_allocator_for_initializers": "1",
    }
    if cuda_operators.any_fast(model):
        entries |= {
            FAST_ENTRY: "1",
            FAST_ROWS_ENTRY: ",".join(map(str, sorted({*buckets, *PREFILL_ROWS}))),
            "optimization.disable_specified_optimizers": "MatMulNBitsFusion",
        }
    return SessionOptions(threads=1, optimize=True, entries=entries)


def provider_options(graphs: bool) -> dict[str, str]:
    """Choose options of the CUDA provider; each is written down, where it is ONNX Runtime's default too.

    - `arena_extend_strategy` kSameAsRequested: the arena grows by what is asked, and not by powers of two, because what
      it takes it keeps.
    - `cudnn_conv_algo_search` HEURISTIC: a convolution of a few taps is not worth a search in its first step.
    - `use_tf32` 0: what is left in fp32 stays exact to fp32.
    - `enable_skip_layer_norm_strict_mode` 1: sums of squares in fp32, whatever the graph computes in.
    """
    return {
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "do_copy_in_default_stream": "1",
        "enable_cuda_graph": "1" if graphs else "0",
        "enable_skip_layer_norm_strict_mode": "1",
        "use_tf32": "0",
    }
