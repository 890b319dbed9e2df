"""Graphs that say something else than their checkpoint: what a wrong frontend could make, each by one small change.

`TABLE` lists them. Each is planted into a right graph, as it comes out of a trace, and must be refused by the proof of
the trace: of a model that runs whole, and of one that runs in part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.ir import graph, interface
from llmforge.ir.operators import canonical

from ...models import zoo, zoo_classic

DATA = Path(__file__).parents[2] / "data"
LAYERS = 6
MIDDLE = 2  # a layer that a model of `LAYERS`, cut short, does not have: it has 0, 3 and 5
STACK = "model.layers"

SAMPLE, WINDOWS, EXPERTS, ROUTED, LONG_ROPE = "sample", "windows", "experts", "routed", "long rope"


def write(model: str, folder: Path) -> Path:
    """Write the checkpoint of `model` into `folder`, if it has to be written; return where it is."""
    alternating = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    if model == SAMPLE:
        return DATA / "docs-llama-7m"
    if model == WINDOWS:  # norms of 1 + weight, soft caps, a scale of embeddings
        zoo.write("gemma2", folder, num_hidden_layers=LAYERS, sliding_window=64, max_position_embeddings=2048)
    elif model == EXPERTS:  # limits, sinks, biases, YaRN
        zoo.write("gpt-oss", folder, num_hidden_layers=LAYERS, sliding_window=32, layer_types=alternating)
    elif model == ROUTED:
        zoo.write("qwen3-moe", folder, num_hidden_layers=LAYERS, mlp_only_layers=[])
    elif model == LONG_ROPE:
        changes = {"num_hidden_layers": LAYERS, "max_position_embeddings": 1024, "sliding_window": None}
        zoo_classic.write("phi3-longrope", folder, original_max_position_embeddings=48, **changes)
    return folder


MODELS = (SAMPLE, WINDOWS, EXPERTS, ROUTED, LONG_ROPE)
Spoil = Callable[[ir.Model], None]


@dataclass(frozen=True)
class Mistranslation:
    """A wrong graph: how it comes about, of which models, and what the proof has to name (a regular expression)."""

    spoil: Spoil
    models: Sequence[str]
    names: str


def _nodes(model: ir.Model, op_type: str, layer: int | None = None) -> list[ir.Node]:
    start = "" if layer is None else f"{STACK}.{layer}"
    found = [
        node
        for node in model.graph
        if node.op_type == op_type and (not start or str(node.name).startswith((f"{start}.", f"{start}/")))
    ]
    assert found, f"no {op_type}"
    return found


def _set(nodes: Sequence[ir.Node], name: str, value: float) -> None:
    for node in nodes:
        assert node.attributes[name].value != value
        node.attributes[name] = ir.AttrFloat32(name, value) if isinstance(value, float) else ir.AttrInt64(name, value)


def window(value: int, layer: int | None = None) -> Spoil:
    """Give attention another window, in one layer or in all."""

    def spoil(model: ir.Model) -> None:
        nodes = [node for node in _nodes(model, "Attention", layer) if node.attributes["window"].value != value]
        _set(nodes, "window", value)

    return spoil


def no_window_at_all(model: ir.Model) -> None:
    """Drop every window."""
    windowed = [node for node in _nodes(model, "Attention") if node.attributes["window"].value]
    _set(windowed, "window", 0)


def window_off_by_one(model: ir.Model) -> None:
    """Show each query of a window one token more."""
    for node in _nodes(model, "Attention"):
        if width := node.attributes["window"].as_int():
            node.attributes["window"] = ir.AttrInt64("window", width + 1)


def attribute(op_type: str, name: str, factor: float, layer: int | None = None) -> Spoil:
    """Multiply a number of some operator."""

    def spoil(model: ir.Model) -> None:
        for node in _nodes(model, op_type, layer):
            before = node.attributes[name].value
            assert before, f"{name} is {before}"
            node.attributes[name] = ir.AttrFloat32(name, before * factor)

    return spoil


def flag(op_type: str, name: str, value: int, layer: int | None = None) -> Spoil:
    """Set an integer of some operator."""
    return lambda model: _set(_nodes(model, op_type, layer), name, value)


def _edit(model: ir.Model, name: str, edit: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
    value = model.graph.initializers[name]
    before = np.array(graph.tensor(value).numpy())
    after = edit(before.copy())
    assert not np.array_equal(before, after)
    value.const_value = ir.tensor(after.astype(before.dtype), name=name)


def tables(edit: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Spoil:
    """Change the rotary tables."""

    def spoil(model: ir.Model) -> None:
        for name in [name for name in model.graph.initializers if name.startswith("rotary.")]:
            _edit(model, name, edit)

    return spoil


def rotary_from(position: int) -> Spoil:
    """Turn positions from `position` on as the one before them."""

    def edit(table: NDArray[np.float32]) -> NDArray[np.float32]:
        table[position:] = table[position - 1 : -1].copy()
        return table

    return tables(edit)


def no_positions(model: ir.Model) -> None:
    """Leave out rotary embedding in one layer."""
    for node in _nodes(model, "RotaryEmbedding", MIDDLE):
        graph.replace_value(node.outputs[0], graph.operand(node, 0))
        model.graph.remove(node, safe=True)


def _ahead(model: ir.Model, name: str, op_type: str, number: int) -> None:
    """Let `op_type` with a number stand between the input `name` and its readers."""
    value = next(value for value in model.graph.inputs if value.name == name)
    readers = list(value.uses())
    other = graph.initializer(model, f"{op_type}_{number}", np.array(number, np.int64))
    node = ir.node(op_type, [value, other], name=f"spoilt/{op_type}", num_outputs=1)
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = f"spoilt/{op_type}", value.shape, value.type
    for reader, index in readers:
        reader.replace_input_with(index, node.outputs[0])
    model.graph.insert_before(model.graph[0], node)


def positions_clipped(at: int) -> Spoil:
    """Let no position be beyond `at`."""
    return lambda model: _ahead(model, interface.POSITION_IDS, "Min", at)


def positions_shifted(model: ir.Model) -> None:
    """Count positions from 1, which no short text of relative positions tells."""
    _ahead(model, interface.POSITION_IDS, "Add", 1)


def switch_moved(by: int) -> Spoil:
    """Change the factors of a long text at another length."""

    def spoil(model: ir.Model) -> None:
        moved = 0
        for node in model.graph:
            if any(value is not None and value.name == interface.TEXT_LENGTHS for value in node.inputs):
                other = graph.operand(node, 1)
                number = int(graph.tensor(other).numpy())
                new = graph.initializer(model, f"moved_{moved}", np.array(number + by, np.int64))
                node.replace_input_with(1, new)
                moved += 1
        assert moved

    return spoil


def long_half(table: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn a long text by the short one's angles, as far as these go."""
    table[48 : 48 + 48] = table[:48]
    return table


def swapped(leaf: str, other: str | None = None, layers: tuple[int, int] = (MIDDLE - 1, MIDDLE + 1)) -> Spoil:
    """Exchange a parameter of two layers, or two of one layer."""

    def spoil(model: ir.Model) -> None:
        first, second = layers if other is None else (MIDDLE, MIDDLE)
        a = model.graph.initializers[f"{STACK}.{first}.{leaf}"]
        b = model.graph.initializers[f"{STACK}.{second}.{other or leaf}"]
        a.const_value, b.const_value = b.const_value, a.const_value

    return spoil


def weights(leaf: str, edit: Callable[[NDArray[np.float32]], NDArray[np.float32]], layer: int | None = MIDDLE) -> Spoil:
    """Change the numbers of a parameter."""
    prefix = "" if layer is None else f"{STACK}.{layer}."
    return lambda model: _edit(model, prefix + leaf, edit)


def bypassed(op_type: str, layer: int | None = MIDDLE, at: int = 0) -> Spoil:
    """Leave out the first node of an operator: its first input takes the place of its result."""

    def spoil(model: ir.Model) -> None:
        node = _nodes(model, op_type, layer)[at]
        graph.replace_value(node.outputs[0], graph.operand(node, 0))
        model.graph.remove(node, safe=True)

    return spoil


def named(suffix: str, layer: int | None = MIDDLE) -> Spoil:
    """Leave out the node of this name."""

    def spoil(model: ir.Model) -> None:
        name = suffix if layer is None else f"{STACK}.{layer}{suffix}"
        [node] = [node for node in model.graph if node.name == name]
        graph.replace_value(node.outputs[0], graph.operand(node, 0))
        model.graph.remove(node, safe=True)

    return spoil


def no_sinks(model: ir.Model) -> None:
    """Drop the sinks of one layer."""
    [node] = _nodes(model, "Attention", MIDDLE)
    view = canonical.Attention.of(node)
    assert view is not None
    assert view.sinks is not None
    node.replace_input_with(list(node.inputs).index(view.sinks), None)


def softcap_lost(model: ir.Model) -> None:
    """Drop the cap of logits: the division, the tanh and the product at the end."""
    for op_type in ("Div", "Tanh", "Mul"):
        [node] = [node for node in model.graph if node.name == f"model/{op_type}"]
        graph.replace_value(node.outputs[0], graph.operand(node, 0))
        model.graph.remove(node, safe=True)


def untied(model: ir.Model) -> None:
    """Give the head a table of its own, with the rows one further on."""
    table = model.graph.initializers["model.embed_tokens.weight"]
    head = graph.initializer(model, "lm_head.weight", np.roll(graph.tensor(table).numpy(), 1, axis=0))
    for node, index in list(table.uses()):
        if node.op_type != "Gather":
            node.replace_input_with(index, head)


def caches_crossed(model: ir.Model) -> None:
    """Let a layer read the cache of its neighbour."""
    names = [f"past_key_values.{layer}.{part}" for layer in (MIDDLE, MIDDLE + 1) for part in ("key", "value")]
    inputs = {value.name: value for value in model.graph.inputs}
    for part in ("key", "value"):
        a, b = (inputs[f"past_key_values.{layer}.{part}"] for layer in (MIDDLE, MIDDLE + 1))
        for reader, index in list(a.uses()):
            reader.replace_input_with(index, b)
    assert names


def clipped_residual(model: ir.Model) -> None:
    """Clip what one layer hands over, at a number that no short text reaches."""
    node = _nodes(model, "Add", MIDDLE)[-1]
    low, high = (graph.initializer(model, f"clip_{x}", np.array(x, np.float32)) for x in (-64.0, 64.0))
    readers = list(node.outputs[0].uses())
    clip = ir.node("Clip", [node.outputs[0], low, high], name=f"{STACK}.{MIDDLE}/Clip", num_outputs=1)
    [clipped] = clip.outputs
    clipped.name, clipped.shape, clipped.type = f"{STACK}.{MIDDLE}/Clip", node.outputs[0].shape, node.outputs[0].type
    model.graph.insert_after(node, clip)
    for reader, index in readers:
        reader.replace_input_with(index, clipped)


def one_expert_fewer(model: ir.Model) -> None:
    """Choose one expert fewer in all layers."""
    for node in _nodes(model, "TopK"):
        k = graph.tensor(graph.operand(node, 1)).numpy()
        node.replace_input_with(1, graph.initializer(model, f"{node.name}/k", k - 1))


def unrenormalized(model: ir.Model) -> None:
    """Use the router's weights as they are."""
    for node in [node for node in _nodes(model, "Div") if "mlp" in str(node.name)]:
        graph.replace_value(node.outputs[0], graph.operand(node, 0))
        model.graph.remove(node, safe=True)


def half(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Halve a weight."""
    return array * np.float32(0.5)


def minus_one(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Take the 1 out of 1 + w."""
    return array - np.float32(1)


LAYER = rf"{STACK}\.{MIDDLE}\b"
ANY = ""

TABLE: dict[str, Mistranslation] = {
    # lengths and places
    "window of one layer lost": Mistranslation(window(0, MIDDLE), (WINDOWS, EXPERTS), LAYER),
    "windows lost": Mistranslation(no_window_at_all, (WINDOWS, EXPERTS), r"layers\.0\b|window"),
    "window one too long": Mistranslation(window_off_by_one, (WINDOWS, EXPERTS), r"layers\.0\b|window"),
    "window in one layer that has none": Mistranslation(window(64, MIDDLE + 1), (WINDOWS,), rf"{STACK}\.{MIDDLE + 1}"),
    "window of 64 in all layers": Mistranslation(window(64), (SAMPLE, ROUTED, LONG_ROPE), r"layers\.0\b|window"),
    "window of 600 in all layers": Mistranslation(window(600), (SAMPLE, LONG_ROPE), r"layers\.0\b|window"),
    "rotary tables wrong from 24": Mistranslation(rotary_from(24), MODELS, "position 24|layers|rotary"),
    "rotary tables wrong from 512": Mistranslation(rotary_from(512), (SAMPLE, WINDOWS), "position 512|rotary"),
    "last position of the rotary tables wrong": Mistranslation(rotary_from(1023), (SAMPLE,), "position 1023|rotary"),
    "positions clipped at 512": Mistranslation(positions_clipped(512), (SAMPLE, WINDOWS, LONG_ROPE), "position"),
    "positions clipped at 23": Mistranslation(positions_clipped(23), (SAMPLE, EXPERTS), "position"),
    "positions from 1": Mistranslation(positions_shifted, (SAMPLE, ROUTED, LONG_ROPE), "position"),
    "long rope switched a token late": Mistranslation(switch_moved(1), (LONG_ROPE,), "position|text|layers"),
    "long rope never switched": Mistranslation(switch_moved(10_000), (LONG_ROPE,), "position|text|layers"),
    "long rope with short angles": Mistranslation(tables(long_half), (LONG_ROPE,), "position|layers"),
    "no positions in one layer": Mistranslation(no_positions, (SAMPLE, WINDOWS), LAYER),
    "pairs of rotary embedding": Mistranslation(flag("RotaryEmbedding", "interleaved", 1, MIDDLE), (SAMPLE,), LAYER),
    # numbers
    "epsilon tenfold in one layer": Mistranslation(
        attribute("RMSNormalization", "epsilon", 10.0, MIDDLE), (SAMPLE, WINDOWS, EXPERTS), LAYER
    ),
    "epsilon tenfold": Mistranslation(attribute("RMSNormalization", "epsilon", 10.0), (SAMPLE, WINDOWS), ANY),
    "scale of attention off by a hundredth": Mistranslation(
        attribute("Attention", "scale", 1.01, MIDDLE), (SAMPLE, WINDOWS), LAYER
    ),
    "soft cap of attention lost in one layer": Mistranslation(
        lambda model: _set(_nodes(model, "Attention", MIDDLE), "softcap", 0.0), (WINDOWS,), LAYER
    ),
    "soft cap of attention lost": Mistranslation(
        lambda model: _set(_nodes(model, "Attention"), "softcap", 0.0), (WINDOWS,), ANY
    ),
    "soft cap of logits lost": Mistranslation(softcap_lost, (WINDOWS,), "follows"),
    "limit of experts ignored": Mistranslation(lambda model: _set(_nodes(model, "MoE"), "limit", 0.0), (EXPERTS,), ANY),
    "limit of experts ignored in one layer": Mistranslation(
        lambda model: _set(_nodes(model, "MoE", MIDDLE), "limit", 0.0), (EXPERTS,), LAYER
    ),
    "scale of embeddings lost": Mistranslation(named("model.embed_tokens/Mul", None), (WINDOWS,), ANY),
    "residuals clipped at 64": Mistranslation(clipped_residual, (SAMPLE, WINDOWS), LAYER),
    # weights
    "q_proj of two layers swapped": Mistranslation(swapped("self_attn.q_proj.weight"), (SAMPLE, EXPERTS), "q_proj"),
    "norms of two layers swapped": Mistranslation(
        swapped("input_layernorm.weight"), (SAMPLE, WINDOWS, LONG_ROPE), "input_layernorm"
    ),
    "experts of two layers swapped": Mistranslation(swapped("mlp.experts.down_proj"), (EXPERTS, ROUTED), "down_proj"),
    "keys and values of one layer swapped": Mistranslation(
        swapped("self_attn.k_proj.weight", "self_attn.v_proj.weight"), (SAMPLE, WINDOWS), "[kv]_proj"
    ),
    "a weight halved in one layer": Mistranslation(
        weights("mlp.down_proj.weight", half), (SAMPLE, WINDOWS), "down_proj"
    ),
    "1 of a norm lost in one layer": Mistranslation(
        weights("input_layernorm.weight", minus_one), (WINDOWS,), "input_layernorm"
    ),
    "embeddings of the last tokens wrong": Mistranslation(
        weights("model.embed_tokens.weight", lambda x: np.concatenate([x[:-1], x[:1]]), None), (SAMPLE,), "embed_tokens"
    ),
    "head untied": Mistranslation(untied, (SAMPLE,), "follows"),
    "bias dropped in one layer": Mistranslation(named(".self_attn.v_proj/Add"), (EXPERTS,), r"v_proj\.bias"),
    "sinks dropped in one layer": Mistranslation(no_sinks, (EXPERTS,), LAYER),
    # routers and caches
    "one expert fewer": Mistranslation(one_expert_fewer, (EXPERTS, ROUTED), r"layers\.0|does not run"),
    "router not renormalized": Mistranslation(unrenormalized, (ROUTED,), r"layers\.0"),
    "a layer reads the cache of another": Mistranslation(caches_crossed, (SAMPLE, WINDOWS), LAYER),
}
