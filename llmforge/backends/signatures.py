"""The facts that a runtime needs of a lowered graph, read off its inputs and outputs: no session is needed for it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from llmforge.backends import ProviderName, plugin_of
from llmforge.backends.engines import BuildRequest
from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Encoding
from llmforge.ir import graph, interface, operators
from llmforge.ir.operators import contrib, cpu
from llmforge.runtime.config import FORMAT, PluginFacts, RuntimeConfig, SessionOptions
from llmforge.runtime.encoder import EncoderConfig
from llmforge.runtime.signature import CacheInput


def vocabulary(model: ir.Model) -> int:
    """Read the number of logits off the output [batch, rows, vocabulary]; of an encoder, the rows of its table."""
    if interface.encodes(model):
        reads = graph.input_named(model, interface.INPUT_IDS).uses()
        if own := [table.N for node, _ in reads if (table := cpu.Embedding.of(node)) is not None]:
            return max(own)
        tables = [value for node, _ in reads for value in node.inputs if value is not None and value.is_initializer()]
        return max(graph.static(table)[0] for table in tables)
    return graph.width(graph.output_named(model, interface.LOGITS))


def encoder(model: ir.Model, encoding: Encoding, max_context: int) -> EncoderConfig:
    """Say of the graph of an encoder what a runtime must know."""
    output = model.graph.outputs[0]
    limits = [max_context, *([] if encoding.max_tokens is None else [encoding.max_tokens])]
    if (limit := interface.recorded_limit(model)) is not None:
        limits.append(limit.tokens)
    embeds = encoding.kind == "embedder"
    return EncoderConfig(
        encoding.kind,
        encoding.pooling,
        encoding.normalize,
        graph.width(output) if embeds else 0,
        min(limits),
        0 if embeds else graph.width(output),
        encoding.prompts,
        encoding.default_prompt,
        template=encoding.template,
        token_types=any(value.name == interface.TOKEN_TYPE_IDS for value in model.graph.inputs),
        packed=any(cpu.CpuEncoderAttention.all(model)),
    )


def caches(model: ir.Model) -> tuple[CacheInput, ...]:
    """Read the caches of keys and values off the inputs, in their order.

    [batch, kv_heads, capacity, head_dim], or where they are blocks, [blocks, block_size, kv_heads, head_dim].
    """
    found = []
    paged = contrib.PagedAttention.all(model) != []
    for value in model.graph.inputs:
        name = str(value.name)
        if interface.present_of(name) == name or interface.is_state(name):
            continue
        _, rows, slots, channels = graph.static(value)
        heads = slots if paged else rows
        found.append(CacheInput(name, graph.dtype(value).numpy().name, heads, channels))
    return tuple(found)


def config(request: BuildRequest, session: SessionOptions) -> RuntimeConfig:
    """Say of an engine what is told for all of them alike; what its provider needs besides is `replace`d.

    Of a backend of a plug-in that is the provider, and who brings it.
    """
    spec = request.spec
    own: dict[str, Any] = {}
    if (plugin := plugin_of(spec.backend)) is not None:
        own["provider"] = request.target.require_engine(spec.backend).name
        own["plugin"] = PluginFacts(plugin.package.name, plugin.package.version)
    return RuntimeConfig(
        format=FORMAT,
        onnxruntime=None,
        kernels=None,
        max_context=spec.max_context,
        max_batch=spec.max_batch,
        vocabulary=vocabulary(request.model),
        eos_token_ids=tuple(request.eos_token_ids),
        bos_token_id=request.bos_token_id,
        caches=caches(request.model),
        session=session,
        encoder=None if request.encoding is None else encoder(request.model, request.encoding, spec.max_context),
        adapters=tuple(json.loads(request.model.metadata_props.get(interface.ADAPTERS, "[]"))),
        speculation=request.speculation,
        **own,
    )


def export_format(request: BuildRequest, provider: ProviderName) -> RuntimeConfig:
    """Say of an engine that servers of others load what is told for all of them alike."""
    return replace(config(request, SessionOptions(None, optimize=True, entries={})), provider=provider)


def check_context(model: ir.Model, max_context: int) -> None:
    """Refuse a context that the rotary tables [positions, rotary_dim / 2] do not reach: kernels read beyond them.

    Nor may it be longer than the texts that the graph is right for.

    Raises:
        UnsupportedError: names the table, or what is computed otherwise in longer texts.
    """
    if (limit := interface.recorded_limit(model)) is not None and limit.tokens < max_context:
        raise UnsupportedError(
            f"engine.max_context is {max_context}; the graph is right for texts of up to {limit.tokens} tokens: "
            f"{limit.reason}",
            hint=f"set engine.max_context to at most {limit.tokens}",
        )
    for view in map(operators.view, model.graph.all_nodes()):
        for table in filter(None, [view.operand(field) for field in view.inputs if field.rotary]):
            positions = (graph.dims(table) or (None,))[0]
            if table.is_initializer() and isinstance(positions, int) and positions < max_context:
                raise UnsupportedError(
                    f"engine.max_context is {max_context}; the rotary table {table.name} of node {view.name} has "
                    f"{positions} positions",
                    hint=f"set engine.max_context to at most {positions}",
                )
