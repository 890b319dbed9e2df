"""Encoders: their traces and engines beside transformers; what is not compiled is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from llmforge import native, targets, trace
from llmforge.backends import signatures
from llmforge.backends.onnxruntime import builder
from llmforge.backends.onnxruntime.encoder import OnnxEncoder
from llmforge.base.errors import CheckpointError, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint, Encoding
from llmforge.ir import graph, interface
from llmforge.ir.operators.canonical import EncoderAttention, PoolSequences, SequenceSoftmax
from llmforge.ir.operators.standard import Softmax
from llmforge.runtime.config import SessionConfig
from llmforge.verification import encoder_runs, encoder_trace, probe
from llmforge.verification.trace_verifier import verify_trace

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 66, "pad_token_id": 0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {},
    "modernbert": {
        "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "qwen3": {"head_dim": 16, "num_key_value_heads": 1},
    "mpnet": {"pad_token_id": 1},
    "deberta-v2": {
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True, "position_buckets": 8,
        "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    },
}  # fmt: skip


def checkpoint(folder: Path, kind: str, *, head: str = "embedder", pooling: str = "mean", dense: int = 0) -> Checkpoint:
    """Write a random encoder, an embedder as a folder of sentence-transformers, and open it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **OWN.get(kind, {})})  # type: ignore[no-untyped-call]
    config.num_labels = 1
    made: Any = AutoModel if head == "embedder" else AutoModelForSequenceClassification
    model = made.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    vocabulary = {"[UNK]": 0, **{f"w{i}": i for i in range(1, SIZES["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    if head == "embedder":
        kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
        paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds) if at)]
        for path in paths[1:]:
            (folder / path).mkdir()
        modules = [
            {"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (path, kind) in enumerate(zip(paths, kinds, strict=True))
        ]
        write(folder / "modules.json", modules)
        modes = {"cls": "cls_token", "last": "lasttoken"}
        chosen = {f"pooling_mode_{modes.get(mode, f'{mode}_tokens')}": True for mode in pooling.split("+")}
        write(folder / "1_Pooling/config.json", {"pooling_mode_mean_tokens": False} | chosen)
        write(folder / "config_sentence_transformers.json", {"prompts": {"query": "w5 "}})
        if dense:
            activation = "torch.nn.modules.activation.Tanh"
            width = 32 * len(chosen)
            settings = {"in_features": width, "out_features": dense, "bias": True, "activation_function": activation}
            write(folder / "2_Dense/config.json", settings)
            tensors = {"linear.weight": torch.randn(dense, width), "linear.bias": torch.randn(dense)}
            save_file(tensors, folder / "2_Dense/model.safetensors")
    return Checkpoint.open(folder)


def write(file: Path, settings: Any) -> None:
    file.write_text(json.dumps(settings))


def encoding_of(opened: Checkpoint) -> Encoding:
    assert opened.encoding is not None
    return opened.encoding


def engine_of(opened: Checkpoint, model: ir.Model) -> OnnxEncoder:
    """Lower the graph, and load it as an engine is."""
    lowered, _ = builder.lower(model, targets.load("cpu-avx2"))
    config = signatures.encoder(lowered, encoding_of(opened), 64)
    arrays = {name: tensor.numpy() for name, tensor in probe.strip(lowered).items()}
    serialized = ir.serde.serialize_model(lowered).SerializeToString()
    own = native.library() is not None
    return OnnxEncoder(serialized, SessionConfig(1), config, initializers=arrays, own_kernels=own)


@pytest.mark.parametrize(
    ("kind", "head", "pooling", "dense"),
    [
        ("bert", "embedder", "mean", 8),
        pytest.param("bert", "reranker", "cls", 0, marks=pytest.mark.thorough),
        pytest.param("roberta", "embedder", "cls", 0, marks=pytest.mark.thorough),
        pytest.param("distilbert", "reranker", "cls", 0, marks=pytest.mark.thorough),
        pytest.param("modernbert", "embedder", "mean", 0, marks=pytest.mark.thorough),
        pytest.param("qwen3", "embedder", "last", 0, marks=pytest.mark.thorough),
        pytest.param("qwen3", "embedder", "weightedmean", 0, marks=pytest.mark.thorough),
        pytest.param("bert", "embedder", "cls+max+mean+mean_sqrt_len", 8, marks=pytest.mark.thorough),
        # Attention in code of their own, with biases by distance.
        pytest.param("mpnet", "embedder", "mean", 0, marks=pytest.mark.thorough),
        pytest.param("deberta-v2", "reranker", "cls", 0, marks=pytest.mark.thorough),
    ],
)
def test_graph_and_engine_compute_what_transformers_does(
    tmp_path: Path, kind: str, head: str, pooling: str, dense: int
) -> None:
    opened = checkpoint(tmp_path, kind, head=head, pooling=pooling, dense=dense)
    model = trace.trace(opened)
    proof = verify_trace(opened, model)
    assert isinstance(proof, encoder_trace.EncoderProof)
    assert proof.largest < 5e-5
    sides = {(layer.left, layer.right) for layer in EncoderAttention.all(model)}
    own = kind in ("mpnet", "deberta-v2")
    expected = {"modernbert": {(-1, -1), (4, 4)}, "qwen3": {(-1, 0)}}.get(kind, {(-1, -1)})
    assert sides == (set() if own else expected)
    assert (interface.FALLBACK in model.metadata_props) == bool(SequenceSoftmax.all(model)) == own
    engine = engine_of(opened, model)
    traced = encoder_runs.open_graph(model, encoding_of(opened), 1, probe.InitializerArrays())
    for run in encoder_runs.make_runs(SIZES["vocab_size"], 64, [], 3, [0, 1]):
        types = run.types if engine.config.token_types else None
        made = engine.encode(run.sequences, types)
        assert encoder_runs.deviation(traced.encode(run.sequences, types), made) < 1e-4
        alone = np.concatenate(
            [engine.encode([ids], None if types is None else [types[row]]) for row, ids in enumerate(run.sequences)]
        )
        np.testing.assert_allclose(made, alone, atol=1e-5)
    if head == "embedder":
        np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
    assert engine.config.prompts == ({"query": "w5 "} if head == "embedder" else {})


@pytest.mark.thorough
def test_own_attention_that_mixes_sequences_is_refused(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, "mpnet")
    model = trace.trace(opened)
    softmax = SequenceSoftmax.all(model)[0]
    plain = Softmax.insert(softmax.node, {"x": softmax.x}, {"axis": -1}, name="plain")
    graph.replace_uses(softmax.output, plain.output)
    with pytest.raises(UnsupportedError, match="tracing the attention from its own code failed too: the trace does"):
        verify_trace(opened, model)


@pytest.mark.thorough
def test_another_pooling_or_attention_is_refused(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, "bert")
    model = trace.trace(opened)
    [pooling] = PoolSequences.all(model)
    pooling.mode = "cls"
    with pytest.raises(VerificationError, match="does not compute what transformers does"):
        verify_trace(opened, model)
    pooling.mode = "mean"
    EncoderAttention.all(model)[-1].right = 40
    with pytest.raises(VerificationError, match="does not compute what transformers does"):
        verify_trace(opened, model)


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, "cls+mean"),  # as sentence-transformers reads it: its default is the mean
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False},
            "max+last",
        ),
    ],
)
def test_poolings_are_told_as_sentence_transformers_does(
    tmp_path: Path, settings: dict[str, Any], pooling: str
) -> None:
    opened = checkpoint(tmp_path, "bert")
    write(tmp_path / "1_Pooling/config.json", settings)
    assert encoding_of(Checkpoint.open(opened.path)).pooling == pooling


@pytest.mark.thorough
def test_what_is_not_compiled_is_refused(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "max", "bert", pooling="max")
    for wrong, said in (
        ({"pooling_mode": "whitening"}, '"whitening"'),
        ({"pooling_mode_mean_tokens": False}, "nothing"),
    ):
        write(tmp_path / "max/1_Pooling/config.json", wrong)
        with pytest.raises(UnsupportedError, match=f"pools by {said}; compiled are cls, max, mean, mean_sqrt_len, "):
            Checkpoint.open(opened.path)
    late = checkpoint(tmp_path / "eurobert", "eurobert", head="reranker")
    with pytest.raises(UnsupportedError, match="its head reads a sequence by classifier_pooling 'late'"):
        trace.trace(late)
    outside = tmp_path / "max/modules.json"
    write(outside, [{"path": "", "type": "a.Transformer"}, {"path": "../other", "type": "a.Pooling"}])
    with pytest.raises(CheckpointError, match="is no folder of the checkpoint"):
        Checkpoint.open(tmp_path / "max")


def test_modules_are_in_the_digest(tmp_path: Path) -> None:
    digest = checkpoint(tmp_path, "bert", dense=8).digest
    write(tmp_path / "1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    other = Checkpoint.open(tmp_path)
    assert other.digest != digest
    assert other.encoding == replace(encoding_of(other), pooling="cls")
    save_file(
        {"linear.weight": torch.ones(8, 32), "linear.bias": torch.ones(8)}, tmp_path / "2_Dense/model.safetensors"
    )
    assert Checkpoint.open(tmp_path).digest not in (digest, other.digest)
