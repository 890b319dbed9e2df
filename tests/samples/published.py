"""Small artifacts, published as a build publishes them, without the build: for what loads and serves them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from llmforge import artifact, targets
from llmforge.artifact import Artifact
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.recipe import EngineSpec, ServingSpec
from llmforge.triton import repository

from ..models.decoder_graph import decoder, value
from . import stored

VOCABULARY = 8192  # of the sample checkpoint's tokenizer
EOS = 5
DEADLY = VOCABULARY - 1  # a token that breaks the engine of `scripted` where it is read
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json")


def random_decoder(
    out: Path,
    checkpoint: Path,
    *,
    max_context: int,
    max_batch: int,
    serving: ServingSpec,
    template: str | None = None,
) -> Artifact:
    """Publish a decoder of random fp32 weights with the tokenizer of `checkpoint`, and its chat template or another."""
    model, _ = engine.lower(decoder(VOCABULARY, capacity=max_context), targets.local())
    spec = EngineSpec(max_context=max_context, max_batch=max_batch)
    return _publish(out, "random", model, checkpoint, spec, serving, template)


def scripted(
    out: Path,
    checkpoint: Path,
    text: str,
    *,
    max_context: int,
    serving: ServingSpec,
    gates: Mapping[str, Any] | None = None,
) -> Artifact:
    """Publish a model that says `text` again and again, from where the length of its prompt points in it.

    `gates` are decided on figures that are made up (`stored`). Token `DEADLY` in a prompt makes ONNX Runtime fail.
    """
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    model = _recital(ids, max_context)
    spec = EngineSpec(max_context=max_context, max_batch=2)
    return _publish(out, "scripted", model, checkpoint, spec, serving, gates=gates)


def _publish(
    out: Path,
    name: str,
    model: ir.Model,
    checkpoint: Path,
    spec: EngineSpec,
    serving: ServingSpec,
    template: str | None = None,
    gates: Mapping[str, Any] | None = None,
) -> Artifact:
    spec = spec.model_copy(update={"threads": 1})
    recipe = {"serving": serving.model_dump(mode="json"), **({"gates": dict(gates)} if gates else {})}
    with artifact.staging(out, name) as folder:
        built = engine.build(BuildRequest(model, folder / "engine", spec, targets.local(), (EOS,), 0))
        (folder / "tokenizer").mkdir()
        for file in TOKENIZER_FILES:
            shutil.copy(checkpoint / file, folder / "tokenizer" / file)
        if template is not None:
            (folder / "tokenizer" / "chat_template.jinja").write_text(template)
        described = repository.TritonModel(name, "cpu", serving, built.config, {"checkpoint": "none"})
        repository.write(described, folder / repository.FOLDER / name)
        return stored.publish(folder, recipe=recipe, target="local")


def _recital(ids: list[int], capacity: int) -> ir.Model:
    """Make a graph whose logits name `ids[position % len(ids)]`; its cache is there, and unused."""
    nodes: list[ir.Node] = []
    initializers: list[ir.Value] = []

    def constant(name: str, array: np.ndarray) -> ir.Value:
        made = value(name, ir.DataType.from_numpy(array.dtype), list(array.shape))
        made.const_value = ir.tensor(array, name=name)
        initializers.append(made)
        return made

    def node(op: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
        nodes.append(made := ir.node(op, inputs, attributes, name=f"{op}_{len(nodes)}"))
        return made.outputs[0]

    tokens = value("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    seqlens = value("seqlens_k", ir.DataType.INT32, ["batch"])
    total = value("total_sequence_length", ir.DataType.INT32, [])
    rows = constant("logits_rows", np.array([-1], np.int64))
    rows.shape = ir.Shape(["rows"])
    past = [
        value(f"past_key_values.0.{kind}", ir.DataType.FLOAT, ["batch", 1, "capacity", 16]) for kind in ("key", "value")
    ]
    presents = [node("Identity", [each]) for each in past]
    for present, kind in zip(presents, ("key", "value"), strict=True):
        present.name, present.type = f"present.0.{kind}", ir.TensorType(ir.DataType.FLOAT)
        present.shape = ir.Shape(["batch", 1, "capacity", 16])

    script = constant("script", np.resize(np.array(ids, np.int64), capacity))
    said = node("Gather", [script, seqlens])  # [batch]
    width, on_off = constant("width", np.array(VOCABULARY, np.int64)), constant("on_off", np.array([0, 9], np.float32))
    logits = node("Unsqueeze", [node("OneHot", [said, width, on_off]), constant("axis", np.array([1]))])
    # Reads every token, out of a table that lacks the deadly one; adds nothing.
    heard = node("Gather", [constant("nothing", np.zeros((DEADLY, 1), np.float32)), tokens])
    logits = node("Add", [logits, node("Gather", [heard, rows], axis=1)])
    logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", "rows", VOCABULARY])
    graph = ir.Graph(
        [tokens, seqlens, total, *past, rows],
        [logits, *presents],
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": 24},
        name="recital",
    )
    return ir.Model(graph, ir_version=10)
