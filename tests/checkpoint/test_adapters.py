import json
import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import AdapterSource, merging
from llmforge.trace.export import skeleton

from ..models import checkpoints
from ..models.adapters import ATTENTION, MLP, PREFIX, base_of, merged, write_adapter

Q = "model.layers.0.self_attn.q_proj"


def write_checkpoint(folder: Path, dtype: str = "float32", **changes: Any) -> Path:
    checkpoints.write_checkpoint(folder, dtype=dtype, **changes)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", tie_word_embeddings=False)


def opened(base: Path, *adapters: Path, weights: tuple[float, ...] = ()) -> Checkpoint:
    sources = [
        AdapterSource(path.name, path, weight) for path, weight in zip(adapters, weights or (1.0,) * 9, strict=False)
    ]
    return Checkpoint.open(base, sources)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_merges_what_the_formula_says(base: Path, tmp_path: Path, *, dora: bool, rslora: bool) -> None:
    adapter = write_adapter(tmp_path / "style", base, dora=dora, settings={"use_rslora": rslora})
    checkpoint, expected = opened(base, adapter), merged(base, adapter)
    changed = 0
    for name, value in base_of(base).items():
        found = checkpoint.tensor(name).numpy()
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=2e-6)
        changed += not np.array_equal(found, value)
    assert changed == 14
    assert checkpoint.tensors.keys() == base_of(base).keys()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rounds_once_to_the_dtype_of_the_checkpoint(tmp_path: Path, dtype: Any) -> None:
    name = {np.float16: "float16"}.get(dtype, "bfloat16")
    base = write_checkpoint(tmp_path / "base", name, tie_word_embeddings=False)
    first, second = (write_adapter(tmp_path / f"a{seed}", base, seed=seed, size=0.01) for seed in (1, 2))
    found = opened(base, first, second, weights=(0.5, -2.0)).tensor(f"{Q}.weight").numpy()
    plain = base_of(base)[f"{Q}.weight"].astype(np.float64)
    exact = merged(base, first, 0.5)[f"{Q}.weight"] + merged(base, second, -2.0)[f"{Q}.weight"] - plain
    assert found.dtype == dtype
    away = np.abs(found.astype(np.float64) - exact)
    step = np.abs(exact) * {"float16": 2**-11, "bfloat16": 2**-8}[name] * 1.001 + 1e-7
    assert (away <= step).all()  # half a step of the dtype: rounded once, to nearest


def test_blocks_of_rows_make_no_difference(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path / "style", base, dora=True)
    whole = opened(base, adapter).tensor(f"{Q}.weight").numpy()
    monkeypatch.setattr(merging, "_BLOCK", 5 * 64)
    np.testing.assert_allclose(opened(base, adapter).tensor(f"{Q}.weight").numpy(), whole, rtol=0, atol=1e-6)


def test_reads_patterns_of_ranks_and_alphas(base: Path, tmp_path: Path) -> None:
    one = base_of(base)[f"{Q}.weight"]
    a, b = np.ones((2, one.shape[1]), np.float32), np.ones((one.shape[0], 2), np.float32)
    more = {f"{PREFIX}{Q}.lora_A.weight": a, f"{PREFIX}{Q}.lora_B.weight": b}
    settings = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 3, "k_proj": 100}}
    adapter = write_adapter(tmp_path / "style", base, targets=("v_proj",), settings=settings, more=more)
    found = opened(base, adapter).tensor(f"{Q}.weight").numpy()
    np.testing.assert_allclose(found, one + 3 / 2 * 2, rtol=1e-6)


def test_square_weights_are_swapped_as_the_configuration_says(base: Path, tmp_path: Path) -> None:
    plain = write_adapter(tmp_path / "plain", base, targets=("q_proj",))
    swapped = write_adapter(tmp_path / "swapped", base, targets=("q_proj",), settings={"fan_in_fan_out": True})
    weight = base_of(base)[f"{Q}.weight"]
    delta = opened(base, plain).tensor(f"{Q}.weight").numpy() - weight
    np.testing.assert_allclose(opened(base, swapped).tensor(f"{Q}.weight").numpy(), weight + delta.T, atol=2e-6)


def test_embeddings_biases_and_saved_modules(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", tie_word_embeddings=False)
    held = base_of(base)
    rng = np.random.default_rng(3)
    table, head = held["model.embed_tokens.weight"], held["lm_head.weight"]
    a, b = rng.standard_normal((3, len(table))), rng.standard_normal((table.shape[1], 3))
    new_head = rng.standard_normal(head.shape).astype(np.float32)
    more = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": a.astype(np.float32),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": b.astype(np.float32),
        f"{PREFIX}lm_head.weight": new_head,
    }
    settings = {"modules_to_save": ["lm_head"]}
    checkpoint = opened(base, write_adapter(tmp_path / "a", base, targets=(), settings=settings, more=more))
    np.testing.assert_allclose(
        checkpoint.tensor("model.embed_tokens.weight").numpy(), table + 8 / 3 * (b @ a).T, atol=1e-5
    )
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight").numpy(), new_head)


def test_digest_names_base_adapters_and_weights(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "style", base)
    other = write_adapter(tmp_path / "other", base, seed=5)
    digests = [
        Checkpoint.open(base).digest,
        opened(base, adapter).digest,
        opened(base, adapter, weights=(0.5,)).digest,
        opened(base, other).digest,
        opened(base, adapter, other).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert opened(base, adapter).digest == digests[1]
    assert AdapterSource("x", adapter).digest() == opened(base, adapter).merge.adapters[0].digest  # type: ignore[union-attr]


def test_transformers_loads_the_merged_numbers(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "style", base)
    checkpoint, expected = opened(base, adapter), merged(base, adapter)
    state = skeleton.load(checkpoint).state_dict()
    for name in (f"{Q}.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        np.testing.assert_allclose(state[name].numpy(), expected[name], rtol=0, atol=2e-6)


def refused(base: Path, adapter: Path, weight: float = 1.0) -> str:
    with pytest.raises((CheckpointError, UnsupportedError)) as raised:
        opened(base, adapter, weights=(weight,)).digest  # noqa: B018
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is .*IA3.*; LORA is supported"),
        ({"init_lora_weights": "pissa"}, "taking a part out of the base"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is .*not applied"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is .*not applied"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"of_the_future": True}, "of_the_future"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(a+)+(b+)+$": 3}}, "too complex"),
        ({"alpha_pattern": {"(": 3}}, "no regular expression"),
        ({"use_dora": True}, "use_dora is True"),
    ],
)
def test_refuses_what_it_does_not_apply(base: Path, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    assert re.search(words, refused(base, write_adapter(tmp_path / "style", base, settings=settings)))


def test_refuses_adapters_of_another_base(base: Path, tmp_path: Path) -> None:
    deep = write_checkpoint(tmp_path / "deep", num_hidden_layers=3, tie_word_embeddings=False)
    wide = write_checkpoint(tmp_path / "wide", hidden_size=128, tie_word_embeddings=False)
    message = refused(base, write_adapter(tmp_path / "a", deep))
    assert "'model.layers.2." in message
    assert "it was trained on deep" in message
    message = refused(base, write_adapter(tmp_path / "b", wide, targets=MLP))
    assert re.search(r"its product is \[128, 128\], 'model.layers.0.mlp.down_proj.weight' \[64, 128\]", message)


def test_refuses_what_ties_share(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    table = base_of(base)["model.embed_tokens.weight"]
    more = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": np.ones((1, len(table)), np.float32),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": np.ones((table.shape[1], 1), np.float32),
    }
    checkpoint = opened(base, write_adapter(tmp_path / "a", base, targets=(), more=more))
    shape = tuple(table.shape)
    with pytest.raises(UnsupportedError, match="tie_word_embeddings"):
        checkpoint.require(
            {"model.embed_tokens.weight": shape, "lm_head.weight": shape},
            {"lm_head.weight": "model.embed_tokens.weight"},
        )


def test_refuses_weights_of_what_cannot_be_weighted(base: Path, tmp_path: Path) -> None:
    assert "DoRA has no weight 0.5" in refused(base, write_adapter(tmp_path / "a", base, dora=True), 0.5)


def test_refuses_files_that_are_none(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "style", base, targets=ATTENTION)
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = f"{PREFIX}{Q}.lora_A.weight"
    for broken, words in (
        ({key: value for key, value in tensors.items() if key != name}, "without its counterpart"),
        (tensors | {name: tensors[name][:2]}, "no rank in common"),
        (tensors | {name: np.full_like(tensors[name], np.nan)}, "holds NaN"),
        (tensors | {name: tensors[name].astype(np.int8)}, "is INT8"),
        (tensors | {"model.other": np.ones(2, np.float32)}, "does not begin with"),
        (tensors | {f"{PREFIX}{Q}.lora_C.weight": np.ones(2, np.float32)}, "not applied"),
        ({}, "holds no tensors"),
    ):
        save_file(broken, weights)
        assert words in refused(base, adapter)
    data = bytearray((write_adapter(adapter, base) / "adapter_model.safetensors").read_bytes())
    weights.write_bytes(data[:-7])
    assert "truncated" in refused(base, adapter)
    weights.unlink()
    (adapter / "adapter_model.bin").write_bytes(b"x")
    assert "pickle" in refused(base, adapter)
    (adapter / "adapter_config.json").write_text(json.dumps([]))
    assert "must hold a JSON object" in refused(base, adapter)
    assert "no such folder" in refused(base, tmp_path / "nowhere")
