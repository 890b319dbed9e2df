"""Files of every architecture that is read: the model of the checkpoint that they were made of, tensor by tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.integrations import ggml
from transformers.integrations.gguf import gguf_tokenizer_mapping

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint, gguf
from llmforge.checkpoint.gguf import architectures, tokenizer
from llmforge.checkpoint.quantized.gguf import GgufTensor, grouped
from llmforge.quantization.grids import dequantize
from llmforge.quantization.stored import UnrepresentableCodes

from ...models import zoo
from ...models.checkpoints import write_checkpoint
from ...models.gguf_files import ARRAY, BOOL, F16, F32, FLOAT32, Q4_0, Q8_0, STRING, UINT32, Tensor, value, write

# GGUF's name → the model of the zoo, with changes that GGUF has no key for
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-mha-biases", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3-moe", {"mlp_only_layers": []}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
}
# What two configurations of one model may differ in.
APART = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "pad_token_id", "use_cache"}


def numbers(settings: Any) -> Any:
    """Round to fp32, in which GGUF states numbers, and leave out what is not of the model."""
    if isinstance(settings, dict):
        return {key: numbers(item) for key, item in settings.items() if key not in APART}
    return struct.unpack("f", struct.pack("f", settings))[0] if isinstance(settings, float) else settings


def tiny(folder: Path, architecture: str = "llama", kind: int = F32, drop: tuple[str, ...] = (), **more: bytes) -> Path:
    """A random Llama of one layer as a GGUF file."""
    write_checkpoint(folder / "hf", num_hidden_layers=1)
    file = folder / "tiny.gguf"
    write(folder / "hf", file, architecture=architecture, kind=kind, drop=drop, **more)
    return file


def test_every_architecture_has_a_model_here() -> None:
    assert set(MODELS) == set(architectures.ARCHITECTURES)


@pytest.mark.parametrize("architecture", MODELS)
def test_the_model_of_a_file_is_that_of_its_checkpoint(architecture: str, tmp_path: Path) -> None:
    name, changes = MODELS[architecture]
    zoo.write(name, tmp_path / "hf", **changes)
    file = tmp_path / "model.gguf"
    parameters = write(tmp_path / "hf", file, architecture=architecture)
    found = Checkpoint.open(file)
    own = AutoConfig.from_pretrained(tmp_path / "hf").to_dict()
    unsaid = {"head_dim": None} if "head_dim" not in own else {}  # of Qwen 2, which has no field for it
    assert numbers({**found.config.to_dict(), **unsaid}) == numbers({**own, **unsaid})
    assert set(found.tensors) == set(parameters)
    for each, stored in parameters.items():
        # norms of Gemma are stored with 1 added, which rounds
        assert np.allclose(found.tensor(each).numpy(), stored, rtol=0, atol=2e-7 if "gemma" in architecture else 0), (
            each
        )


def test_keys_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Its table is of keys and fields, for architectures that have a key's field under that name."""
    for architecture, ours in architectures.ARCHITECTURES.items():
        theirs = ggml.GGUF_CONFIG_MAPPING[ours.model_type.removesuffix("_text")]
        named = {**architectures._SIZES, "feed_forward_length": "intermediate_size"}
        named |= {"attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
        assert {key: theirs.get(key) for key in named} == named, architecture
        known = {*architectures._SIZES, *architectures._READ, *ours.keys}
        assert {key for key, field in theirs.items() if field is not None} <= known, architecture


@pytest.mark.parametrize("kind", [F16, Q4_0, Q8_0])
def test_rows_of_queries_and_keys_are_put_back(kind: int, tmp_path: Path) -> None:
    """In plain numbers, in blocks, and as codes: row by row what the checkpoint has, within its format's error."""
    write_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    parameters = write(tmp_path / "hf", file, kind=kind)
    found = Checkpoint.open(file)
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{part}.weight"
        tensor, wanted = found.tensors[name], parameters[name]
        made = found.tensor(name).numpy().astype(np.float32)
        step = {F16: 1e-3, Q4_0: 0.14, Q8_0: 0.006}[kind] * np.abs(wanted).max()
        assert np.abs(made - wanted).max() < step
        assert np.abs(made - np.roll(wanted, 1, axis=0)).max() > 4 * step
        if kind == F16:
            continue
        assert isinstance(tensor, GgufTensor)
        codes = tensor.codes()
        assert codes.grid == tensor.grid()
        assert codes.grid.scale == "fp16"
        assert (dequantize(codes) == made).all()


def test_blocks_without_a_scale_keep_their_zeros(tmp_path: Path) -> None:
    """Such a scale would be 0, which no grid of ours has."""
    write_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    write(tmp_path / "hf", file, kind=Q4_0)
    info = gguf.read(file).tensors["blk.0.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    data[info.offset : info.offset + 2] = bytes(2)
    file.write_bytes(data)
    tensor = Checkpoint.open(file).tensors["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(tensor, GgufTensor)
    assert (tensor.codes().scales != 0).all()
    assert (dequantize(tensor.codes()) == tensor.dequantize()).all()
    assert not tensor.dequantize()[0, :32].any()


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    file = tiny(tmp_path, kind=Q8_0)
    info = gguf.read(file).tensors["blk.0.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    data[info.offset : info.offset + 2] = b"\x00\x7e"
    file.write_bytes(data)
    tensor = Checkpoint.open(file).tensors["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(tensor, GgufTensor)
    for read in (tensor.dequantize, tensor.codes):
        with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' \(Q8_0\) holds .*NaN"):
            read()


def test_plain_numbers_have_no_codes(tmp_path: Path) -> None:
    header = gguf.read(tiny(tmp_path, kind=F16))
    for tensor in grouped(header, architectures.settings(header)).quantized:
        with pytest.raises(UnrepresentableCodes, match="plain numbers"):
            tensor.grid()


def test_nan_in_plain_numbers_is_found_by_the_walk_over_the_file(tmp_path: Path) -> None:
    file = tiny(tmp_path)
    info = gguf.read(file).tensors["blk.0.attn_norm.weight"]
    data = bytearray(file.read_bytes())
    data[info.offset : info.offset + 4] = struct.pack("<f", float("nan"))
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.attn_norm\.weight' holds NaN"):
        Checkpoint.open(file).verify()


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    file = tiny(tmp_path)
    first = Checkpoint.open(file).digest
    (tmp_path / "other").mkdir()
    moved = file.rename(tmp_path / "other" / "renamed.gguf")
    assert Checkpoint.open(moved).digest == first
    data = bytearray(moved.read_bytes())
    data[-64] ^= 1
    moved.write_bytes(data)
    assert Checkpoint.open(moved).digest != first


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    file = tiny(tmp_path).rename(tmp_path / "models" / "a.gguf")
    assert Checkpoint.open(tmp_path / "models").path == Checkpoint.open(file).path
    assert Checkpoint.open(file).path.name == "a"
    (tmp_path / "models" / "b.gguf").symlink_to(file)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files: 'a\.gguf', 'b\.gguf'"):
        Checkpoint.open(tmp_path / "models")


def test_another_file_in_its_place_is_another_checkpoint(tmp_path: Path) -> None:
    file = tiny(tmp_path)
    first = Checkpoint.open(file)
    write_checkpoint(tmp_path / "hf", num_hidden_layers=2)
    write(tmp_path / "hf", file)
    second = Checkpoint.open(file)
    assert (first.geometry.layers, second.geometry.layers) == (1, 2)


# rotary frequencies


def divisors(tmp_path: Path, factors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Write a Llama with divisors of its frequencies, and read its configuration."""
    write_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    file = tmp_path / "m.gguf"
    freqs = ("rope_freqs.weight", (len(factors),), F32, factors.astype(np.float32).tobytes())
    theta = {"llama.rope.freq_base": value(FLOAT32, 500000.0)}
    write(tmp_path / "hf", file, change=lambda tensors: [*tensors, freqs], **theta)
    return architectures.settings(gguf.read(file))["rope_parameters"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_told_by_its_divisors(factor: float, tmp_path: Path) -> None:
    """llama.cpp's file holds what its converter computes of the four numbers, which are not in it."""
    made = []
    for frequency in 1.0 / 500000.0 ** (np.arange(0, 16, 2) / 16):  # generate_extra_tensors of LlamaModel
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            made.append(1.0)
        elif wavelength > 8192 / 1:
            made.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            made.append(1 / ((1 - smooth) / factor + smooth))
    assert divisors(tmp_path, np.array(made)) == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_divisors_of_one_scale_nothing_and_others_are_refused(tmp_path: Path) -> None:
    assert divisors(tmp_path, np.ones(8)) == {"rope_type": "default", "rope_theta": 500000.0}
    with pytest.raises(UnsupportedError, match="otherwise than Llama 3 does"):
        divisors(tmp_path, np.linspace(1, 3, 8))


def test_scaling_by_keys(tmp_path: Path) -> None:
    yarn = {
        "llama.rope.scaling.type": value(STRING, "yarn"),
        "llama.rope.scaling.factor": value(FLOAT32, 4.0),
        "llama.rope.scaling.original_context_length": value(UINT32, 32),
    }
    made = architectures.settings(gguf.read(tiny(tmp_path, **yarn)))["rope_parameters"]
    assert made == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


# refusals


@pytest.mark.parametrize(
    ("more", "said", "code"),
    [
        ({"llama.new_thing": value(UINT32, 1)}, "'llama.new_thing' is not known, and may change", 6),
        ({"llama.expert_count": value(UINT32, 8)}, "'llama.expert_count' is not known", 6),
        ({"llama.rope.scaling.type": value(STRING, "longrope")}, 'rope.scaling.type "longrope" is not taken', 6),
        ({"llama.rope.dimension_count": value(UINT32, 8)}, "keys of 16 channels, of which 8 turn", 6),
        ({"llama.attention.head_count_kv": value(ARRAY, (UINT32, [2, 1]))}, "differs from layer to layer", 6),
        ({"general.architecture": value(STRING, "mamba")}, "architecture 'mamba' is not read from GGUF; read are", 6),
        ({"llama.embedding_length": value(STRING, "64")}, 'is "64"; a whole number from 1 on is expected', 5),
        ({"llama.attention.head_count": value(UINT32, 0)}, "is 0; a whole number", 5),
        ({"llama.rope.freq_base": value(FLOAT32, float("inf"))}, "a finite number is expected", 5),
    ],
)
def test_what_is_configured_otherwise_is_refused(more: dict[str, bytes], said: str, code: int, tmp_path: Path) -> None:
    header = gguf.read(tiny(tmp_path, **more))
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        architectures.settings(header)
    assert said in str(caught.value)
    assert caught.value.exit_code == code


def test_experts_of_none_are_no_experts(tmp_path: Path) -> None:
    """Older converters write it of every model."""
    header = gguf.read(tiny(tmp_path, **{"llama.expert_count": value(UINT32, 0)}))
    assert architectures.settings(header)["model_type"] == "llama"


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    header = gguf.read(tiny(tmp_path, architecture="llama"))
    with pytest.raises(UnsupportedError, match=r"tensor 'blk\.1\.attn_q\.weight' has no place in a llama model"):
        architectures.target(header, "blk.1.attn_q.weight", architectures.settings(header))
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.ssm_a' has no place"):
        architectures.target(header, "blk.0.ssm_a", architectures.settings(header))


@pytest.mark.parametrize("name", ["blk.1.attn_norm.weight", "blk.0.attn_q.weight", "output_norm.weight"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    file = tmp_path / "m.gguf"
    write(tmp_path / "hf", file, change=lambda tensors: [each for each in tensors if each[0] != name])
    with pytest.raises(CheckpointError, match=f"lacks the tensor '{name}', which a llama model of 2 layers has"):
        Checkpoint.open(file)

    def doubled(tensor: Tensor) -> Tensor:
        own, shape, kind, data = tensor
        return (own, (shape[0] * 2, *shape[1:]), kind, 2 * data) if own == name else tensor

    write(tmp_path / "hf", file, change=lambda tensors: [doubled(each) for each in tensors])
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[128.*the file's own keys make it \[64"):
        Checkpoint.open(file)


# the tokenizer


def test_the_tokenizer_is_that_of_the_checkpoint(sample_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "sample.gguf"
    write(sample_checkpoint, file, kind=Q8_0)
    ours, own = Checkpoint.open(file), Checkpoint.open(sample_checkpoint)
    for text in ("Hello, world!", "  def f(x):\n\treturn x**2\n", "Grüße, 東京 <|im_start|>user", ""):
        assert ours.tokenizer.encode(text).ids == own.tokenizer.encode(text).ids
        ids = own.tokenizer.encode(text).ids
        assert ours.tokenizer.decode(ids) == own.tokenizer.decode(ids)
    assert (ours.bos_token_id, ours.eos_token_ids) == (own.bos_token_id, own.eos_token_ids)


def test_what_stands_before_every_text(tmp_path: Path) -> None:
    """A key says so, or else the kind of tokenizer does."""
    for more, begins in (
        ({}, False),
        ({"tokenizer.ggml.add_bos_token": value(BOOL, True)}, True),
        ({"tokenizer.ggml.pre": value(STRING, "llama-bpe")}, True),
        (
            {"tokenizer.ggml.pre": value(STRING, "llama-bpe"), "tokenizer.ggml.add_bos_token": value(BOOL, False)},
            False,
        ),
    ):
        made = Checkpoint.open(tiny(tmp_path, **more)).tokenizer
        assert (made.encode("hi").ids[0] == 0) == begins, more
        assert made.encode("hi", add_special_tokens=False).ids[0] != 0
        whole_words = json.loads(made.to_str())["model"]["ignore_merges"]
        assert whole_words == ("tokenizer.ggml.pre" in more)


def sentencepiece(**more: bytes) -> dict[str, bytes]:
    """A vocabulary of SentencePiece's BPE: bytes, letters, and what they merge to, by their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "h", "i", "hi", "▁hi"]
    return {
        "tokenizer.ggml.model": value(STRING, "llama"),
        "tokenizer.ggml.pre": value(STRING, "default"),
        "tokenizer.ggml.tokens": value(ARRAY, (STRING, tokens)),
        "tokenizer.ggml.scores": value(ARRAY, (FLOAT32, [0.0] * 259 + [-4.0, -5.0, -6.0, -1.0, -2.0])),
        "tokenizer.ggml.token_type": value(ARRAY, (5, [2, 3, 3] + [6] * 256 + [1] * 5)),
        "tokenizer.ggml.bos_token_id": value(UINT32, 1),
        "tokenizer.ggml.eos_token_id": value(UINT32, 2),
        **more,
    }


def test_a_tokenizer_of_sentencepiece(tmp_path: Path) -> None:
    """Merges come from scores; texts begin with BOS and a space."""
    file = tiny(tmp_path, **sentencepiece(), **{"tokenizer.ggml.merges": value(ARRAY, (STRING, ["h i", "▁ hi"]))})
    for made in (
        Checkpoint.open(file),
        Checkpoint.open(tiny(tmp_path, drop=("tokenizer.ggml.merges",), **sentencepiece())),
    ):
        assert made.tokenizer.encode("hi hié").tokens == ["<s>", "▁hi", "▁hi", "<0xC3>", "<0xA9>"]
        assert made.tokenizer.decode(made.tokenizer.encode("hi hié").ids) == "hi hié"
        assert (made.bos_token_id, made.eos_token_ids) == (1, (2,))
    with pytest.raises(UnsupportedError, match="add_space_prefix is false"):
        Checkpoint.open(tiny(tmp_path, **sentencepiece(**{"tokenizer.ggml.add_space_prefix": value(BOOL, False)})))


def test_the_end_of_a_turn_ends_a_text_too(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.eot_token_id": value(UINT32, 2), "tokenizer.chat_template": value(STRING, "{{ messages }}")}
    found = Checkpoint.open(tiny(tmp_path, **more))
    assert found.eos_token_ids == (0, 2)
    assert found.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("more", "said", "code"),
    [
        ({"tokenizer.ggml.model": value(STRING, "bert")}, 'tokenizer.ggml.model is "bert"; taken are gpt2, llama', 6),
        ({"tokenizer.ggml.pre": value(STRING, "nobody")}, 'tokenizer.ggml.pre is "nobody": how it splits text', 6),
        ({"tokenizer.ggml.tokens": value(ARRAY, (UINT32, [1]))}, "tokenizer.ggml.tokens must be a list of str", 5),
        ({"tokenizer.ggml.token_type": value(ARRAY, (5, [1]))}, "264 tokens, and 1 of tokenizer.ggml.token_type", 5),
        ({"tokenizer.ggml.merges": value(ARRAY, (STRING, ["no such pair", "x"]))}, "its tokenizer cannot be made", 5),
        ({"tokenizer.ggml.bos_token_id": value(UINT32, 264)}, "bos_token_id is 264; there are 264 tokens", 5),
    ],
)
def test_a_tokenizer_that_makes_no_sense_is_refused(
    more: dict[str, bytes], said: str, code: int, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        Checkpoint.open(tiny(tmp_path, **more))
    assert said in str(caught.value)
    assert caught.value.exit_code == code


def test_what_is_private_in_transformers_is_there() -> None:
    assert callable(gguf_tokenizer_mapping.convert_gguf_tokenizer)
    theirs = gguf_tokenizer_mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    ours = {key: name for key, (name, _) in tokenizer._LISTS.items()} | dict(tokenizer._KINDS)
    assert {key: theirs[key] for key in ours} == ours
    assert set(tokenizer._TAKEN) <= set(gguf_tokenizer_mapping.GGUF_TOKENIZER_TYPES)
