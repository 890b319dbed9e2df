"""The engine for ONNX Runtime on a GPU: the lowered graph, and `runtime.json` with what its CUDA provider is told.

Nothing here needs a GPU. Whether the provider runs a node is looked up in the record of its kernels
(`llmforge.backends.onnxruntime.kernels`); what the graph computes is the CPU's business to prove, on the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from llmforge import native
from llmforge.backends import onnx_file, signatures
from llmforge.backends.engines import BuildRequest, BuiltEngine, require_device
from llmforge.backends.loading import module_of
from llmforge.backends.onnxruntime import PAGED, kernels
from llmforge.backends.onnxruntime import builder as standard
from llmforge.backends.onnxruntime.cuda import graphs as cuda_graphs
from llmforge.backends.onnxruntime.cuda import operators as cuda_operators
from llmforge.backends.onnxruntime.cuda import tensorrt, topk
from llmforge.backends.onnxruntime.cuda.captured import failed_operator
from llmforge.backends.ranks import session as rank_session
from llmforge.backends.ranks.session import RankSession
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.ir import graph, interface, logits_rows, operators
from llmforge.ir.operators import contrib
from llmforge.ir.operators.standard import OnnxShape
from llmforge.recipe import EngineSpec
from llmforge.rewrite import next_ids, paged_attention, topk_outputs
from llmforge.rewrite.pass_base import Changes, Rewritten, Skipped
from llmforge.runtime.config import FILE, MODEL_FILE, DeviceFacts, GraphPlan, RuntimeConfig, SessionOptions
from llmforge.runtime.device.cuda import CudaDevice
from llmforge.runtime.interface import Decoder, StepInputs
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK, SHAPES
from llmforge.targets import Target

VERSION = kernels.cuda().wheel.rpartition("=")[2]

# Session entries of the fast product of 4-bit and 8-bit weights (cuda_operators), in the wheel by these names.
FAST_ENTRY, FAST_ROWS_ENTRY = "ep.cuda.fpa_intb_gemm", "ep.cuda.fpa_intb_profile_m"
FUSIONS_ENTRY = "optimization.disable_specified_optimizers"

CUDNN_SM = 90  # compute capability from which on attention is cuDNN's, unless it is told otherwise
# Provider option: all attention kernels but cuDNN's, as a sum: 1 flash, 2 memory-efficient, 16 unfused.
SDPA_KERNEL, WITHOUT_CUDNN = "sdpa_kernel", str(1 + 2 + 16)

# Tokens of the steps that prove an engine: kernels of products are chosen by the power of two at or above them.
PROVED_TOKENS = tuple(sorted({*(1 << i for i in range(10)), *(3 << i for i in range(8))}))  # 1 … 512


def require_host(target: Target, spec: EngineSpec) -> None:
    """Return if the GPU of `target` is here: an engine is loaded and its steps are captured as it is built.

    Raises:
        EnvironmentLacks: it is not, or `spec` wants TensorRT, which is not here.
        UnsupportedError: the wheel has no code for it.
    """
    require_device(target, spec)
    if spec.tensorrt:
        tensorrt.require_here()


def lower(model: ir.Model, target: Target, spec: EngineSpec) -> tuple[ir.Model, Changes]:
    """Rewrite what the passes left into operators that ONNX Runtime's CUDA provider runs in the graph's dtypes.

    As for the CPU, and then as `llmforge.backends.onnxruntime.cuda.operators` says. What runs on a slower path than
    it might is listed as skipped, with the reason.

    Raises:
        UnsupportedError: the wheel has no code for the target, a node no kernel, or `spec` wants CUDA graphs of steps
            that cannot be captured.
    """
    sm = int(target.require_gpu().sm)
    target.require_engine(spec.backend)
    if graph.SPARSITY in model.metadata_props:
        raise UnsupportedError(
            "sparsify-weights: ONNX Runtime has no kernels for 2:4 weights: the engine would be as slow as without",
            hint="choose `engine: {backend: tensorrt-rtx}` or `tensorrt`, or leave sparsify-weights out of the recipe",
        )
    changes, meeting = Changes(), model.clone()
    met = cuda_operators.write_collectives(meeting)
    lowered, changes.rewritten = standard.expand(meeting)
    changes.rewritten += met
    blocked = (reason := _slots_reason(lowered, target, spec)) is None
    inside, outside = cuda_operators.take_norms(lowered, blocks=blocked)
    changes.rewritten += inside
    changes.skipped += outside
    if blocked:
        changes.rewritten += paged_attention.lower(lowered, block_size(lowered))
    elif spec.kv_cache is None:
        changes.notes.append(f"KV cache in slots, not in blocks: {reason}")
    changes.rewritten += cuda_operators.split_biases(lowered)
    changes.rewritten += cuda_operators.keep_out(lowered)
    changes.rewritten += cuda_operators.name_layouts(lowered)
    changes.rewritten += cuda_operators.widen(lowered)
    if reason is not None:
        changes.rewritten += _choose_rows(lowered)
    rows, vocabulary = max(cuda_graphs.decode_batches(spec)), graph.width(graph.output_named(lowered, interface.LOGITS))
    slices = topk.slices(rows, vocabulary, sm, target.require_gpu().multiprocessors)
    changes.rewritten.append(topk_outputs.add_topk_outputs(lowered, slices))
    if all(value.name != interface.INPUTS_EMBEDS for value in lowered.graph.inputs):
        changes.rewritten.append(next_ids.feed_back(lowered))  # else a negative id stands for an embedding
    changes.skipped += [Skipped(str(node.name), reason) for node, reason in cuda_operators.slower(lowered)]
    check(lowered, target)
    _refuse(lowered, sm)
    if spec.tensorrt:
        tensorrt.require(lowered)
    cuda_graphs.require(lowered, spec)
    require_memory(lowered, target, spec)
    return lowered, changes


def block_size(model: ir.Model) -> int:
    """Choose the tokens of a block, so that attention reads the blocks of every layer of `model` in place."""
    return max(
        PAGED.block_tokens(graph.static(layer.past_key)[3], int8=layer.past_key.dtype == ir.DataType.INT8)
        for layer in contrib.GroupQueryAttention.all(model)
    )


def _choose_rows(lowered: ir.Model) -> list[Rewritten]:
    """Let prompts of several rows run in one step; other runtimes' graphs, which give all rows, stay as they are."""
    names = {value.name for value in lowered.graph.inputs}
    if interface.LOGITS_ROWS not in names or interface.ATTENTION_MASK in names:
        return []
    return [Rewritten(*logits_rows.choose_by_row(lowered))]


def _slots_reason(lowered: ir.Model, target: Target, spec: EngineSpec) -> str | None:
    """Say why the KV cache of `lowered` lies in slots; None: it lies in blocks of a pool.

    Raises:
        UnsupportedError: `spec` wants blocks, and the graph cannot read them.
    """
    if spec.kv_cache == "slots":
        return "the recipe says so"
    reason = paged_attention.reason_against(lowered)
    if spec.kv_cache is None:
        caches = [layer.past_key for layer in contrib.GroupQueryAttention.all(lowered)]
        widest = max(map(graph.width, caches), default=0)
        if widest > PAGED.most_channels:
            reason = f"heads have {widest} channels, and FlashAttention, which reads blocks in place, up to "
            reason += str(PAGED.most_channels)
        if any(cache.dtype == ir.DataType.INT8 for cache in caches):
            reason = reason or PAGED.int8_slots
        return target.require_engine(spec.backend).slots_reason(target.sm, spec.tensor_parallel) or reason
    if reason is not None:
        raise UnsupportedError(
            f"engine.kv_cache is paged, and the graph cannot read blocks: {reason}",
            hint="set `engine: {kv_cache: slots}`, or choose passes that leave GroupQueryAttention in every layer",
        )
    return None


def require_memory(model: ir.Model, target: Target, spec: EngineSpec) -> int:
    """Return the bytes that the lowered `model` wants on the device, if it has them.

    Raises:
        UnsupportedError: it has not.
    """
    capacity_gb, graphs = target.require_gpu().memory_gb.value, cuda_graphs.plan(model, spec)
    wanted = cuda_graphs.memory(model, spec, graphs, _pool_blocks(model, target, spec, graphs) or 0)
    if wanted.total > capacity_gb * 1e9:
        raise UnsupportedError(
            f"the engine needs about {wanted.total / 1e9:.1f} GB ({wanted}); target {target.name} ({target.title}) has "
            f"{capacity_gb:g} GB",
            hint="lower engine.max_batch, engine.max_context or the bits of weights and caches",
        )
    return wanted.total


def _pool_blocks(model: ir.Model, target: Target, spec: EngineSpec, graphs: GraphPlan) -> int | None:
    """Count the blocks of the pool of the lowered `model`; None: it has slots."""
    if not contrib.PagedAttention.all(model):
        return None
    return cuda_graphs.pool_blocks(model, spec, graphs, target.require_gpu().memory_gb.value * 1e9)


def check(model: ir.Model, target: Target) -> None:
    """Return if the CUDA provider has a kernel for every node of the lowered `model`.

    Raises:
        UnsupportedError: names the nodes, their types, and what kernels there are.
    """
    known = kernels.cuda()
    found = list(kernels.missing(model, known, kernels.infer(model)))
    if not found:
        return
    attention = any(operators.is_a(node, contrib.GroupQueryAttention, contrib.PagedAttention) for node, _ in found)
    lines = {f"{operators.qualified(node)}: {what}": node for node, what in reversed(found)}
    listed = "; ".join(f"{line} (node {node.name})" for line, node in sorted(lines.items()))
    raise UnsupportedError(
        f"the CUDA provider of {known.wheel} cannot run {len(found)} nodes (target {target.name}): {listed}",
        hint="add `lower-precision: {dtype: fp16}` to the recipe: attention has no fp32 kernel on CUDA"
        if attention
        else "use passes whose operators the target supports",
    )


def _refuse(model: ir.Model, sm: int) -> None:
    """Refuse what the provider takes when it loads the graph and refuses when it runs it."""
    rows, blocks = (
        "leave quantize-kv-cache out of the recipe, or choose another target",
        "set `engine: {kv_cache: slots}`",
    )
    experts_hint = "exclude the experts from quantize-weights, and fuse them with fuse-experts"
    found = [
        (layer.node, cuda_operators.int8_reason(graph.width(layer.past_key), sm), rows)
        for layer in contrib.GroupQueryAttention.all(model)
        if layer.past_key.dtype == ir.DataType.INT8
    ]
    for layer in contrib.PagedAttention.all(model):
        found.append((layer.node, cuda_operators.blocks_reason(layer, sm), blocks))
    kernels_of_experts: list[contrib.ContribMoE | contrib.QMoE] = [
        *contrib.ContribMoE.all(model),
        *contrib.QMoE.all(model),
    ]
    for experts in kernels_of_experts:
        hint = "choose another target" if sm < cuda_operators.EXPERTS_SINCE_SM else experts_hint
        found.append((experts.node, cuda_operators.experts_reason(experts, sm), hint))
    for node, reason, hint in found:
        if reason is not None:
            raise UnsupportedError(f"{node.op_type} {node.name} on CUDA: {reason}", hint=hint)


def build(request: BuildRequest) -> BuiltEngine:
    """Write a lowered model, load it on the target's GPU, run it and capture its steps.

    Raises:
        EnvironmentLacks: this machine has not that GPU.
        UnsupportedError: a node has no kernel, `spec.max_context` is more than the rotary tables reach, or the device
            has not the memory for what the engine needs.
        VerificationError: a step that must be captured is not, or logits are not finite.
    """
    require_host(request.target, request.spec)
    for model in request.ranks or (request.model,):
        check(model, request.target)
        signatures.check_context(model, request.spec.max_context)
    config, written = write(request)
    config, notes = open_and_prove(request.folder, config, lambda chosen: _opened(request.folder, chosen))
    facts = {"ranks": f"{config.ranks} processes, one GPU each"} if request.ranks else {}
    return BuiltEngine.built(request, config, facts, notes, written=written)


def _opened(folder: Path, config: RuntimeConfig) -> Decoder[Any]:
    """Open what was written on the GPU of this machine, or on the first of them."""
    if config.ranks > 1:
        return rank_session.open_engine(folder, config, None)
    session: Decoder[Any] = module_of(config).open_engine(folder / MODEL_FILE, config, None, CudaDevice())
    return session


def open_and_prove(
    folder: Path, config: RuntimeConfig, open_session: Callable[[RuntimeConfig], Decoder[Any]]
) -> tuple[RuntimeConfig, tuple[str, ...]]:
    """Open an engine and prove it; where its fast products do not run, without them, which `runtime.json` then says.

    Not every number of rows has a tactic on every device (onnxruntime#29691), and once weights lie in the order of the
    fast product there is no other way for them: it is all or none. A failure of another operator is not theirs.

    Raises:
        UnsupportedError: ONNX Runtime refuses the engine, or fails to run it.
        VerificationError: as `prove`.
    """
    try:
        return config, _proven(open_session(config), config)
    except (UnsupportedError, VerificationError) as error:
        products = (None, contrib.MatMulNBits.op_type)
        if FAST_ENTRY not in config.session.entries or failed_operator(error) not in products:
            raise
        reason = error.message
    own = {FAST_ENTRY, FAST_ROWS_ENTRY, FUSIONS_ENTRY}
    entries = {name: value for name, value in config.session.entries.items() if name not in own}
    slower = replace(config, session=replace(config.session, entries=entries))
    notes = _proven(open_session(slower), slower)
    (folder / FILE).write_text(slower.to_json(), encoding="utf-8")
    return slower, (f"{FAST_ENTRY} is off, and products of codes are slower: with it, {reason}", *notes)


def _proven(session: Decoder[Any], config: RuntimeConfig) -> tuple[str, ...]:
    """Prove an engine (`prove`), and end the processes of its ranks."""
    try:
        return prove(session, config)
    finally:
        if isinstance(session, RankSession):
            session.close()


def write(request: BuildRequest) -> tuple[RuntimeConfig, dict[str, str]]:
    """Write `model.onnx`, or the graph of each rank, its data and `runtime.json`.

    Returns what the last one says, and the SHA-256 of what was written to the others, by name.
    """
    config = configure(request)
    request.folder.mkdir(parents=True, exist_ok=True)
    if request.ranks:
        written = onnx_file.write_ranks(request.ranks, request.folder, request.progress)
    else:
        written = onnx_file.write(request.model, request.folder, request.progress)
    if request.spec.tensorrt:
        own = {**config.provider_options, tensorrt.CACHE_PREFIX: tensorrt.prefix(written)}
        config = replace(config, provider_options=own)
    (request.folder / FILE).write_text(config.to_json(), encoding="utf-8")
    return config, written


def prove(session: Decoder[Any], config: RuntimeConfig) -> tuple[str, ...]:
    """Capture the planned steps, run two (`onnxruntime.prove`) and one of each of `PROVED_TOKENS`; return notes.

    They are on what is not captured.

    Raises:
        VerificationError: a step that must be captured is not, or logits are not finite.
    """
    row = session.allocate(config.max_batch, config.max_context).rows(0, 1)
    standard.prove(session, row)
    for tokens in PROVED_TOKENS:
        if tokens <= min(row.capacity, session.longest_step or row.capacity):
            logits = session.step(StepInputs(np.zeros((1, tokens), np.int64), np.zeros(1, np.int32)), row)
            if not np.isfinite(logits).all():
                raise VerificationError(f"the engine returns NaN or infinite logits for a prompt of {tokens} tokens")
    return session.notes


def configure(request: BuildRequest) -> RuntimeConfig:
    """Say how the lowered model runs on the target.

    Raises:
        UnsupportedError: the target is no GPU, or has not the memory.
    """
    model, target, spec = request.model, request.target, request.spec
    graphs = cuda_graphs.plan(model, spec)
    buckets = cuda_graphs.decode_batches(spec)
    options = provider_options(graphs.mode != "off")
    if request.ranks and int(target.require_gpu().sm) >= CUDNN_SM:
        # cuDNN refuses a shape when it comes; a rank that opened its graph again would leave the others waiting.
        options[SDPA_KERNEL] = WITHOUT_CUDNN
    if spec.tensorrt:
        options |= tensorrt.options(model)
    return replace(
        signatures.config(request, session_options(model, buckets)),
        onnxruntime=VERSION,
        kernels=native.VERSION if request.ranks else None,
        ranks=len(request.ranks) or 1,
        provider="cuda",
        provider_options=options,
        buckets=buckets,
        device=DeviceFacts(int(target.require_gpu().sm), require_memory(model, target, spec)),
        graphs=graphs,
        kv_blocks=_pool_blocks(model, target, spec, graphs),
    )


def session_options(model: ir.Model, buckets: Sequence[int]) -> SessionOptions:
    """Choose how ONNX Runtime runs the graph.

    - `session.disable_cpu_ep_fallback`: a node that the CUDA provider does not take fails the load, and is not moved to
      the CPU in silence. Not where the graph computes with shapes: ONNX Runtime does that on the host by choice.
    - `session.use_device_allocator_for_initializers`: weights lie outside of the arena, which never shrinks.
    - `ep.cuda.fpa_intb_gemm`, with the rows of decode steps and the tokens of prefills, for which its kernels are
      chosen before anything is captured: only where a product is fit for it. There `MatMulNBitsFusion` stays off, by
      which ONNX Runtime would put a bias back into the operator, and the product on the slow path: seen in the wheel.
    """
    on_host = any(map(OnnxShape.matches, model.graph.all_nodes()))
    entries = {
        "session.disable_cpu_ep_fallback": "0" if on_host else "1",
        "session.use_device_allocator_for_initializers": "1",
    }
    if cuda_operators.any_fast(model):
        entries |= {
            FAST_ENTRY: "1",
            FAST_ROWS_ENTRY: ",".join(map(str, _rows_of_steps(model, buckets))),
            FUSIONS_ENTRY: "MatMulNBitsFusion",
        }
    return SessionOptions(threads=1, optimize=True, entries=entries)


def _rows_of_steps(model: ir.Model, buckets: Sequence[int]) -> list[int]:
    """List the tokens of steps that products are tuned for; kernels are chosen by the next power of two.

    Over slots prompts are padded to a few shapes; over blocks a step may have any number, of those that decode, too.
    """
    if not contrib.PagedAttention.all(model):
        return sorted({*buckets, *SHAPES})
    most = PREFILL_CHUNK + max(buckets)
    return sorted({*buckets, *(1 << exponent for exponent in range((most - 1).bit_length() + 1))})


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
