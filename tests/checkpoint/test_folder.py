"""What a checkpoint says about itself, and the message for each way in which it cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import CheckpointError, ForgeError, UnsupportedError
from llmforge.checkpoint import Checkpoint, Geometry, names_end
from llmforge.checkpoint.folder import _geometry

from ..models.checkpoints import CONFIG, safetensors_bytes, shapes, write_checkpoint

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def edit(file: Path, **changes: Any) -> None:
    """Change entries of a JSON file; None removes one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refusal(folder: Path, kind: type[ForgeError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint.open(folder)
    assert type(caught.value) is kind
    assert caught.value.exit_code == (6 if kind is UnsupportedError else 5)
    return str(caught.value)


class TestFacts:
    def test_sample(self, sample_checkpoint: Path) -> None:
        checkpoint = Checkpoint.open(sample_checkpoint)
        assert checkpoint.geometry == Geometry(6, 256, 8192, 1024)
        assert checkpoint.parameters == 6_819_072
        assert checkpoint.size_bytes == 2 * 6_819_072
        assert checkpoint.eos_token_ids == (0,)
        assert checkpoint.bos_token_id == 0
        assert checkpoint.chat_template is not None
        assert checkpoint.chat_template.startswith("{% for m in messages %}")
        assert checkpoint.special_tokens["eos_token"] == "<|endoftext|>"
        assert checkpoint.tokenizer.get_vocab_size() == 8192
        assert checkpoint.config.model_type == "llama"

    @pytest.mark.parametrize("shards", [1, 3])
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_tensors_are_those_that_were_written(self, tmp_path: Path, dtype: str, shards: int) -> None:
        written = write_checkpoint(tmp_path, dtype=dtype, shards=shards)
        checkpoint = Checkpoint.open(tmp_path)
        assert set(checkpoint.tensors) == set(written)
        for name, array in written.items():
            mapped = checkpoint.tensor(name)
            assert isinstance(mapped, ir.ExternalTensor)
            assert mapped.numpy().dtype == array.dtype
            np.testing.assert_array_equal(mapped.numpy(), array)

    def test_agrees_with_the_safetensors_library(self, sample_checkpoint: Path) -> None:
        checkpoint = Checkpoint.open(sample_checkpoint)
        with safe_open(sample_checkpoint / "model.safetensors", "numpy") as reference:
            assert set(reference.keys()) == set(checkpoint.tensors)
            for name, entry in checkpoint.tensors.items():
                assert tuple(reference.get_slice(name).get_shape()) == entry.shape

    def test_generation_config_wins_over_config(self, tiny_checkpoint: Path) -> None:
        assert Checkpoint.open(tiny_checkpoint).eos_token_ids == (0, 2)
        edit(tiny_checkpoint / "generation_config.json", eos_token_id=7, bos_token_id=5)
        checkpoint = Checkpoint.open(tiny_checkpoint)
        assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((7,), 5)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("{{ x }}", "{{ x }}"),
            ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
            ([{"name": "rag", "template": "r"}], None),
            (None, None),
        ],
    )
    def test_chat_template_in_the_tokenizer_config(
        self, tiny_checkpoint: Path, value: object, expected: str | None
    ) -> None:
        edit(tiny_checkpoint / "tokenizer_config.json", chat_template=value)
        assert Checkpoint.open(tiny_checkpoint).chat_template == expected
        (tiny_checkpoint / "chat_template.jinja").write_text("file")
        assert Checkpoint.open(tiny_checkpoint).chat_template == "file"

    def test_special_tokens_as_objects(self, tiny_checkpoint: Path) -> None:
        edit(tiny_checkpoint / "tokenizer_config.json", bos_token={"content": "<s>", "lstrip": False})
        assert Checkpoint.open(tiny_checkpoint).special_tokens == {"bos_token": "<s>", "eos_token": "<|endoftext|>"}

    def test_hub_snapshot_of_symlinks(self, tiny_checkpoint: Path, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, file in enumerate(sorted(tiny_checkpoint.iterdir())):
            shutil.copy(file, blobs / str(number))
            (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
        linked, plain = Checkpoint.open(snapshot), Checkpoint.open(tiny_checkpoint)
        assert linked.digest == plain.digest
        name = "model.norm.weight"
        np.testing.assert_array_equal(linked.tensor(name).numpy(), plain.tensor(name).numpy())
        (blobs / "0").unlink()
        assert "a symbolic link to ../../blobs/0, which is missing" in refusal(snapshot)

    def test_relative_path(self, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tiny_checkpoint.parent)
        checkpoint = Checkpoint.open(Path(tiny_checkpoint.name))
        monkeypatch.chdir("/")
        assert checkpoint.tensor("model.norm.weight").numpy().shape == (64,)


class TestDigest:
    def test_depends_on_content_alone(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "a")
        write_checkpoint(tmp_path / "elsewhere" / "b")
        first, second = Checkpoint.open(tmp_path / "a"), Checkpoint.open(tmp_path / "elsewhere" / "b")
        assert first.digest == second.digest == first.verify()
        assert len(first.digest) == 64

    @pytest.mark.parametrize(
        "name",
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"],
    )
    def test_every_small_file_counts(self, tiny_checkpoint: Path, name: str) -> None:
        before = Checkpoint.open(tiny_checkpoint).digest
        with (tiny_checkpoint / name).open("a") as stream:
            stream.write("{}" if stream.tell() == 0 else " ")
        assert Checkpoint.open(tiny_checkpoint).digest != before

    def test_one_bit_of_a_weight_counts(self, tiny_checkpoint: Path) -> None:
        before = Checkpoint.open(tiny_checkpoint).digest
        file = tiny_checkpoint / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-4] ^= 1
        file.write_bytes(content)
        assert Checkpoint.open(tiny_checkpoint).digest != before

    def test_other_files_do_not_count(self, tiny_checkpoint: Path) -> None:
        before = Checkpoint.open(tiny_checkpoint).digest
        (tiny_checkpoint / "README.md").write_text("hello")
        assert Checkpoint.open(tiny_checkpoint).digest == before

    def test_progress_ends_at_the_total(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, shards=2)
        seen: list[tuple[int, int]] = []

        class Recorder:
            def stage(self, title: str) -> None:
                raise AssertionError(title)

            def advance(self, done: int, total: int) -> None:
                seen.append((done, total))

        Checkpoint.open(tmp_path).verify(Recorder())
        total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
        assert seen[-1] == (total, total)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    def test_file_that_changes_after_open(self, tiny_checkpoint: Path) -> None:
        checkpoint = Checkpoint.open(tiny_checkpoint)
        file = tiny_checkpoint / "model.safetensors"
        os.truncate(file, file.stat().st_size - 4)
        with pytest.raises(CheckpointError, match="changed its size while it was being read"):
            checkpoint.verify()
        with file.open("ab") as stream:
            stream.write(b"12345678")
        with pytest.raises(CheckpointError, match="changed its size while it was being read"):
            checkpoint.verify()


FLOATS = [
    np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu,
]  # fmt: skip
SAFETENSORS = dict(
    zip(
        FLOATS,
        ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"],
        strict=True,
    )
)


class TestFinite:
    def write(self, folder: Path, array: np.ndarray[Any, Any]) -> Checkpoint:
        entry = {
            "dtype": SAFETENSORS[array.dtype.type], "shape": list(array.shape), "data_offsets": [0, array.nbytes]
        }  # fmt: skip
        (folder / "model.safetensors").write_bytes(safetensors_bytes({"w": entry}, array.tobytes()))
        return Checkpoint.open(folder)

    @pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.__name__)
    def test_every_bit_pattern(self, tiny_checkpoint: Path, kind: type) -> None:
        """All patterns of 8 and 16 bits (for wider types: of their upper 16) against numpy's isfinite."""
        size = np.dtype(kind).itemsize
        count = 1 << min(16, 8 * size)
        patterns = (np.arange(count, dtype=np.uint64) << max(0, 8 * size - 16)).astype(f"<u{size}").view(kind)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            finite, is_nan = np.isfinite(patterns), np.isnan(patterns)
        assert not finite.all()
        self.write(tiny_checkpoint, patterns[finite]).verify()
        for index in np.flatnonzero(~finite)[:: max(1, count // 512)]:
            checkpoint = self.write(tiny_checkpoint, patterns[[0, index]] if finite[0] else patterns[[1, index]])
            word = "NaN" if is_nan[index] else "infinity"
            with pytest.raises(CheckpointError, match=rf"tensor 'w' holds {word} at \[1\]; weights must be finite"):
                checkpoint.verify()

    def test_place_beyond_the_first_chunk(self, tiny_checkpoint: Path) -> None:
        array = np.zeros((3, 700, 500), np.float32)  # 4.2 MB: several chunks
        array[2, 699, 498] = -np.inf
        with pytest.raises(CheckpointError, match=r"holds infinity at \[2, 699, 498\]"):
            self.write(tiny_checkpoint, array).verify()

    def test_unaligned_data(self, tiny_checkpoint: Path) -> None:
        """A header of odd length is allowed and puts every tensor at an odd address."""
        array = np.array([1, np.nan], np.float32)
        header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        header += b" " * (1 - len(header) % 2)
        (tiny_checkpoint / "model.safetensors").write_bytes(safetensors_bytes(header, array.tobytes()))
        checkpoint = Checkpoint.open(tiny_checkpoint)
        assert checkpoint.tensors["w"].offset % 2 == 1
        assert checkpoint.tensor("w").numpy()[0] == 1
        with pytest.raises(CheckpointError, match=r"holds NaN at \[1\]"):
            checkpoint.verify()

    def test_integers_have_no_nan(self, tiny_checkpoint: Path) -> None:
        codes = np.full(8, -1, np.int32)
        save_file({"w": codes}, tiny_checkpoint / "model.safetensors")
        Checkpoint.open(tiny_checkpoint).verify()
        with pytest.raises(CheckpointError, match=r"holds NaN at \[0\]"):
            self.write(tiny_checkpoint, codes.view(np.float32)).verify()


class TestRequire:
    def open(self, folder: Path) -> Checkpoint:
        return Checkpoint.open(folder)

    def test_each_parameter_gets_its_tensor(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, tie_word_embeddings=False)
        wanted = shapes({**CONFIG, "tie_word_embeddings": False})
        assert self.open(tmp_path).require(wanted, TIED) == {name: name for name in wanted}

    def test_declared_tie(self, tiny_checkpoint: Path) -> None:
        wanted = shapes({**CONFIG, "tie_word_embeddings": False})
        sources = self.open(tiny_checkpoint).require(wanted, TIED)
        assert sources["lm_head.weight"] == sources["model.embed_tokens.weight"] == "model.embed_tokens.weight"

    def test_declared_tie_stored_under_the_head(self, tiny_checkpoint: Path) -> None:
        file = tiny_checkpoint / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        save_file(tensors, file)
        sources = self.open(tiny_checkpoint).require(shapes({**CONFIG, "tie_word_embeddings": False}), TIED)
        assert sources["lm_head.weight"] == sources["model.embed_tokens.weight"] == "lm_head.weight"

    @pytest.mark.parametrize(("change", "source"), [(0, "model.embed_tokens.weight"), (1, "lm_head.weight")])
    def test_declared_tie_with_both_stored(self, tiny_checkpoint: Path, change: int, source: str) -> None:
        file = tiny_checkpoint / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
        save_file(tensors, file)
        sources = self.open(tiny_checkpoint).require(shapes({**CONFIG, "tie_word_embeddings": False}), TIED)
        assert sources["lm_head.weight"] == source
        assert sources["model.embed_tokens.weight"] == "model.embed_tokens.weight"

    @pytest.mark.parametrize("ties", [TIED, {}])
    def test_undeclared_tie(self, tiny_checkpoint: Path, ties: dict[str, str]) -> None:
        edit(tiny_checkpoint / "config.json", tie_word_embeddings=False)
        with pytest.raises(CheckpointError) as caught:
            self.open(tiny_checkpoint).require(shapes({**CONFIG, "tie_word_embeddings": False}), ties)
        assert "lacks 'lm_head.weight', and config.json does not declare tie_word_embeddings" in str(caught.value)
        assert "hint: if the model shares 'model.embed_tokens.weight', set \"tie_word_embeddings\"" in str(caught.value)

    def test_missing_parameters_are_named_and_counted(self, tiny_checkpoint: Path) -> None:
        wanted = shapes({**CONFIG, "num_hidden_layers": 3})
        with pytest.raises(CheckpointError) as caught:
            self.open(tiny_checkpoint).require(wanted, TIED)
        assert "lacks 'model.layers.2.input_layernorm.weight'" in str(caught.value)
        assert "and 6 more: 9 of the 29 parameters that Llama needs with this config.json" in str(caught.value)

    def test_other_names(self, tiny_checkpoint: Path) -> None:
        file = tiny_checkpoint / "model.safetensors"
        save_file({name.removeprefix("model."): array for name, array in load_file(file).items()}, file)
        with pytest.raises(CheckpointError, match=r"hint: it holds 'embed_tokens\.weight', 'layers\.0"):
            self.open(tiny_checkpoint).require(shapes(CONFIG), TIED)

    def test_wrong_shape(self, tiny_checkpoint: Path) -> None:
        wanted = {**shapes(CONFIG), "model.norm.weight": (65,)}
        with pytest.raises(CheckpointError, match=r"'model.norm.weight' has shape \[64\], config.json makes .* \[65\]"):
            self.open(tiny_checkpoint).require(wanted, TIED)

    def test_integer_weights(self, tiny_checkpoint: Path) -> None:
        file = tiny_checkpoint / "model.safetensors"
        save_file({**load_file(file), "model.norm.weight": np.ones(64, np.int8)}, file)
        with pytest.raises(CheckpointError, match="is INT8; weights must be of a floating-point dtype"):
            self.open(tiny_checkpoint).require(shapes(CONFIG), TIED)


class TestFolder:
    def test_missing(self, tmp_path: Path) -> None:
        message = refusal(tmp_path / "nowhere")
        assert "nowhere: no such folder" in message
        assert "hint: give a folder, or ORG/NAME on the Hub" in message

    def test_a_file(self, tiny_checkpoint: Path) -> None:
        assert "is a file, a checkpoint is a folder" in refusal(tiny_checkpoint / "config.json")

    def test_not_a_checkpoint(self, tmp_path: Path) -> None:
        message = refusal(tmp_path)
        assert "not a Hugging Face checkpoint: it has no config.json" in message
        assert "hint: the folder must hold config.json, tokenizer.json and model.safetensors" in message

    def test_adapter(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        assert "hint: this is an adapter: name its base" in refusal(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickle(self, tiny_checkpoint: Path, name: str) -> None:
        (tiny_checkpoint / "model.safetensors").unlink()
        (tiny_checkpoint / name).write_bytes(b"\x80\x04.")
        message = refusal(tiny_checkpoint)
        assert f"only pickled weights ('{name}'); loading a pickle can run any code" in message
        assert "hint: convert it where you trust it" in message
        assert "save_pretrained('NEW_FOLDER')" in message

    def test_no_weights(self, tiny_checkpoint: Path) -> None:
        (tiny_checkpoint / "model.safetensors").rename(tiny_checkpoint / "consolidated.safetensors")
        message = refusal(tiny_checkpoint)
        assert "no weights: neither model.safetensors nor model.safetensors.index.json" in message
        assert "hint: it holds 'consolidated.safetensors'" in message

    def test_lfs_pointer(self, tiny_checkpoint: Path) -> None:
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        (tiny_checkpoint / "model.safetensors").write_bytes(pointer)
        assert "a Git LFS pointer, not the file it points to\nhint: run `git lfs pull`" in refusal(tiny_checkpoint)
        (tiny_checkpoint / "config.json").write_bytes(pointer)
        assert "config.json: a Git LFS pointer" in refusal(tiny_checkpoint)


class TestConfig:
    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
    def test_remote_code(self, tiny_checkpoint: Path, name: str) -> None:
        edit(tiny_checkpoint / name, auto_map={"AutoConfig": "evil.Config"})
        (tiny_checkpoint / "evil.py").write_text("raise SystemExit('executed')")
        message = refusal(tiny_checkpoint)
        assert f"{name}: auto_map requires running Python code of the checkpoint, which llmforge never does" in message
        assert "hint: if transformers supports the model_type" in message

    @pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}", b'{"a": 1'])
    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
    def test_invalid_json(self, tiny_checkpoint: Path, name: str, content: bytes) -> None:
        (tiny_checkpoint / name).write_bytes(content)
        assert f"{name}: not valid JSON: " in refusal(tiny_checkpoint)

    def test_not_an_object(self, tiny_checkpoint: Path) -> None:
        (tiny_checkpoint / "config.json").write_text("[]")
        assert "config.json: must hold a JSON object, holds list" in refusal(tiny_checkpoint)

    def test_unknown_architecture(self, tiny_checkpoint: Path) -> None:
        edit(tiny_checkpoint / "config.json", model_type="lama")
        message = refusal(tiny_checkpoint, UnsupportedError)
        assert "config.json: model_type 'lama' is unknown to transformers" in message
        assert "hint: nearest: llama" in message

    def test_no_architecture(self, tiny_checkpoint: Path) -> None:
        edit(tiny_checkpoint / "config.json", model_type=None)
        assert "model_type must name the architecture, is None" in refusal(tiny_checkpoint)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"hidden_size": "wide"}, "transformers refuses it: .*hidden_size"),
            ({"num_attention_heads": 7}, "transformers refuses it: "),
            ({"num_attention_heads": 0}, "transformers refuses it: "),
            ({"vocab_size": [1]}, "transformers refuses it: .*vocab_size"),
            ({"dtype": "float99"}, "transformers refuses it: "),
            ({"id2label": {"a": "b"}}, "transformers refuses it: "),
            ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1, is -1"),
            ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, is 0"),
        ],
    )
    def test_wild_values(self, tiny_checkpoint: Path, change: dict[str, object], said: str) -> None:
        edit(tiny_checkpoint / "config.json", **change)
        with pytest.raises(CheckpointError, match=f"(?s)config.json: {said}"):
            Checkpoint.open(tiny_checkpoint)

    def test_quantized_already(self, tiny_checkpoint: Path) -> None:
        edit(tiny_checkpoint / "config.json", quantization_config={"quant_method": "of tomorrow", "bits": 4})
        message = refusal(tiny_checkpoint, UnsupportedError)
        assert 'already quantized (quantization_config: "of tomorrow")' in message
        assert "hint: start from the unquantized checkpoint" in message

    def test_an_empty_quantization_config_says_nothing(self, tiny_checkpoint: Path) -> None:
        edit(tiny_checkpoint / "config.json", quantization_config={})
        assert Checkpoint.open(tiny_checkpoint).layout is None

    def test_layers_of_several_models(self, tiny_checkpoint: Path) -> None:
        (tiny_checkpoint / "config.json").write_text('{"model_type": "blt"}')
        assert "blt gives no single " in refusal(tiny_checkpoint, UnsupportedError)

    def test_heads_that_differ_from_layer_to_layer(self, tiny_checkpoint: Path) -> None:
        (tiny_checkpoint / "config.json").write_text('{"model_type": "gemma4_text"}')
        assert Checkpoint.open(tiny_checkpoint).geometry.layers > 1

    def test_no_context(self, tiny_checkpoint: Path) -> None:
        (tiny_checkpoint / "config.json").write_text('{"model_type": "bloom"}')
        assert Checkpoint.open(tiny_checkpoint).geometry.context is None

    @pytest.mark.parametrize("value", ["x", -1, True, [0, None]])
    def test_wild_end_token(self, tiny_checkpoint: Path, value: object) -> None:
        edit(tiny_checkpoint / "generation_config.json", eos_token_id=value)
        assert "eos_token_id must be a token id or a list of them" in refusal(tiny_checkpoint)


class TestTokenizer:
    def test_missing(self, tiny_checkpoint: Path) -> None:
        (tiny_checkpoint / "tokenizer.json").unlink()
        message = refusal(tiny_checkpoint)
        assert "no tokenizer.json" in message
        assert "AutoTokenizer.from_pretrained" in message

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"model": {"type": "none"}}'])
    def test_broken(self, tiny_checkpoint: Path, content: bytes) -> None:
        (tiny_checkpoint / "tokenizer.json").write_bytes(content)
        assert "tokenizer.json: tokenizers cannot read it: " in refusal(tiny_checkpoint)

    def test_wild_chat_template(self, tiny_checkpoint: Path) -> None:
        edit(tiny_checkpoint / "tokenizer_config.json", chat_template=7)
        assert "tokenizer_config.json: chat_template must be text, is int" in refusal(tiny_checkpoint)
        (tiny_checkpoint / "chat_template.jinja").write_bytes(b"\xff")
        assert "chat_template.jinja: not UTF-8" in refusal(tiny_checkpoint)


class TestShards:
    SHARD = "model-00002-of-00003.safetensors"

    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        write_checkpoint(tmp_path, shards=3)
        return tmp_path

    @pytest.fixture
    def remap(self, sharded: Path) -> Callable[..., None]:
        index = sharded / "model.safetensors.index.json"

        def change(**entries: object) -> None:
            edit(index, weight_map={**json.loads(index.read_text())["weight_map"], **entries})

        return change

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / self.SHARD).unlink()
        message = refusal(sharded)
        assert f"1 of 3 shards missing: '{self.SHARD}'" in message
        assert "hint: fetch the checkpoint again" in message

    def test_index_names_a_tensor_that_its_shard_lacks(self, sharded: Path, remap: Callable[..., None]) -> None:
        remap(ghost=self.SHARD)
        assert f"names tensor 'ghost' in {self.SHARD}, which does not hold it" in refusal(sharded)

    def test_tensor_in_two_shards(self, sharded: Path) -> None:
        tensors = load_file(sharded / self.SHARD)
        save_file({**tensors, "model.embed_tokens.weight": np.zeros((2, 2), np.float32)}, sharded / self.SHARD)
        message = refusal(sharded)
        assert f"'model.embed_tokens.weight' is in model-00001-of-00003.safetensors and in {self.SHARD}" in message

    @pytest.mark.parametrize(
        "shard",
        ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".x.safetensors", "x.bin", "..", "", 3, None],
    )
    def test_shard_elsewhere(self, sharded: Path, remap: Callable[..., None], shard: object) -> None:
        save_file({"w": np.zeros(2, np.float32)}, sharded.parent / "secret.safetensors")
        remap(w=shard)
        assert "expected the name of a .safetensors file in the same folder" in refusal(sharded)

    @pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
    def test_no_map(self, sharded: Path, weight_map: object) -> None:
        edit(sharded / "model.safetensors.index.json", weight_map=weight_map)
        assert "weight_map must map tensor names to shard files" in refusal(sharded)

    def test_single_file_wins_over_an_index(self, sharded: Path) -> None:
        save_file({"w": np.zeros(2, np.float32)}, sharded / "model.safetensors")
        assert set(Checkpoint.open(sharded).tensors) == {"w"}


def test_help_does_not_pay_for_torch() -> None:
    """Importing the module is cheap: transformers, and torch with it, come with `open`."""
    code = "import sys, llmforge.checkpoint; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Sizes beside optimum's ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "GPT2Config",
        "GPTNeoXConfig",
        "GPTJConfig",
        "OPTConfig",
        "BloomConfig",
        "FalconConfig",
        "Phi3Config",
        "MptConfig",
    ],
)
def test_sizes_are_those_that_optimum_reads(kind: str, tmp_path: Path) -> None:
    """optimum has a table of names by model type; here one rule serves all of them."""
    import transformers
    from optimum.utils import NormalizedConfigManager

    config = getattr(transformers, kind)()
    geometry = _geometry(config, tmp_path)
    normalized = NormalizedConfigManager.get_normalized_config_class(config.model_type)(config)
    assert geometry.layers == normalized.num_layers
    assert geometry.hidden == normalized.hidden_size
    assert geometry.vocabulary == normalized.vocab_size


def test_a_file_that_is_too_large_is_not_said_to_be_forbidden(tmp_path: Path) -> None:
    from llmforge.checkpoint import safetensors_file

    file = tmp_path / "tokenizer.json"
    file.write_bytes(b" " * 11)
    with pytest.raises(CheckpointError, match="11 bytes; at most 10 are allowed") as caught:
        safetensors_file.read_small(file, 10)
    assert caught.value.hint == safetensors_file.TOO_LARGE


@pytest.mark.parametrize(
    ("generation", "settings", "named"),
    [
        (None, {"eos_token_id": 2}, True),
        (None, {"text_config": {"eos_token_id": [2, 3]}}, True),
        (None, {"eos_token_id": None}, False),
        ({"eos_token_id": 0}, {}, True),
        ({"eos_token_id": None}, {"eos_token_id": 2}, False),  # which transformers takes as it is
        ({"temperature": 1}, {"eos_token_id": 2}, True),
        ({"eos_token_id": []}, {}, False),
    ],
)
def test_a_checkpoint_may_name_what_ends_a_text(
    tmp_path: Path, generation: dict[str, object] | None, settings: dict[str, object], named: bool
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert names_end(tmp_path, settings) is named
