"""`llmforge inspect` of what is no artifact: checkpoints, GGUF files, adapters, and folders of none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from llmforge.checkpoint import inspection
from llmforge.cli import cli

from ..checkpoint.quantized import test_bitsandbytes, writers
from ..models.checkpoints import write_checkpoint
from ..models.gguf_files import F16, Q4_0, Q8_0, STRING, UINT32, value, write
from ..sweep import render


def invoke(*args: str | Path) -> Result:
    result = CliRunner().invoke(cli, ["inspect", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def shown(path: Path) -> dict[str, str]:
    """The rows that are written, by their titles; rows without one belong to the row before."""
    result = invoke(path)
    assert result.exit_code == 0, result.output
    first, *rows = result.stdout.splitlines()
    assert first == str(path)
    made: dict[str, str] = {}
    title = ""
    for row in rows:
        title = row[2:15].strip() or title
        made[title] = f"{made[title]}\n{row[15:]}" if title in made else row[15:]
    return made


def data(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(invoke(path, "--json").stdout)
    return made


def test_a_plain_checkpoint(tiny_checkpoint: Path) -> None:
    rows = shown(tiny_checkpoint)
    assert rows["what"] == "Hugging Face checkpoint"
    assert (rows["architecture"], rows["model_type"], rows["layers"]) == ("LlamaForCausalLM", "llama", "2")
    assert rows["quantized"] == "no"
    assert "fp32" in rows["parameters"]
    assert "not quantized; taken as they are" in rows["parameters"]
    assert rows["build"] == "its architecture compiles (docs/architectures.md)"
    assert data(tiny_checkpoint)["parameters"] == 264 * 64 + 64 + 2 * (
        2 * 64 + 3 * 64 * 128 + 2 * 64 * 64 + 2 * 32 * 64
    )


def test_a_quantized_checkpoint_says_what_stays(tiny_checkpoint: Path) -> None:
    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, np.ndarray[Any, Any]]:
        drawn = writers.draw(*shape, 4, shape[1] // 32)
        return writers.gptq(name, drawn, 4), drawn.weight

    writers.quantize(tiny_checkpoint, {"quant_method": "gptq", "bits": 4, "group_size": 32}, store)
    made = data(tiny_checkpoint)
    assert made["layout"].startswith("GPTQ: ")
    by_outcome = {each["outcome"]: each for each in made["stored"]}
    assert by_outcome["codes kept"]["tensors"] == 14
    assert by_outcome["as it is"]["tensors"] == 6
    assert made["refusal"] is None
    assert "codes can be kept exactly as they are" in shown(tiny_checkpoint)["parameters"]


def test_what_has_to_be_dequantized_is_told_with_the_reason(tiny_checkpoint: Path) -> None:
    test_bitsandbytes.four_bits(tiny_checkpoint)
    rows = shown(tiny_checkpoint)
    assert rows["quantized"] == "bitsandbytes: bitsandbytes NF4"
    assert "dequantized: its codes are NF4, whose levels are not evenly spaced" in rows["parameters"]


def test_a_gguf_file_and_the_folder_of_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    write(tmp_path / "hf", file, kind=Q4_0)
    rows = shown(file)
    assert (rows["what"], rows["quantized"], rows["name"]) == ("GGUF file", "GGUF: most of it Q4_0", "tiny")
    assert "Q4_0" in rows["parameters"]
    assert "codes can be kept exactly" in rows["parameters"]
    assert data(tmp_path / "models") == data(file)
    write(tmp_path / "hf", tmp_path / "plain.gguf", kind=F16)
    rows = shown(tmp_path / "plain.gguf")
    assert rows["quantized"] == "no"
    assert "codes" not in rows["parameters"]


def test_a_gguf_file_says_of_each_part_whether_it_is_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    chat = {"tokenizer.chat_template": value(STRING, "{% for m in messages %}{{ m.content }}{% endfor %}")}
    write(tmp_path / "hf", tmp_path / "good.gguf", **chat)
    rows = shown(tmp_path / "good.gguf")
    assert rows["graph"] == "llama: supported"
    assert rows["tokenizer"] == "byte-level BPE (gpt2), pre-tokenizer gpt-2: supported"
    assert rows["chat"] == "50 characters: supported"
    assert rows["build"] == "its architecture compiles (docs/architectures.md)"

    other = {"tokenizer.ggml.pre": value(STRING, "nobody"), "tokenizer.chat_template": value(STRING, "{% for %}")}
    write(tmp_path / "hf", tmp_path / "bad.gguf", **other)
    rows = shown(tmp_path / "bad.gguf")
    why = 'tokenizer.ggml.pre is "nobody": how it splits text is not known here; docs/checkpoints.md has the '
    assert rows["graph"] == "llama: supported"
    assert rows["tokenizer"].startswith(f"byte-level BPE (gpt2), pre-tokenizer nobody: not supported: {why}")
    assert rows["chat"].startswith("9 characters: not supported: chat template:1: the chat template has an error")
    assert rows["build"] == "refused: tokenizer not supported\nhint: take the model's original checkpoint"
    made = data(tmp_path / "bad.gguf")
    assert made["refusal"]["message"].startswith(f"{tmp_path / 'bad.gguf'}: {why}")
    assert made["refusal"]["exit_code"] == 6
    assert {part["name"]: part["supported"] for part in made["parts"]} == {
        "graph": True, "tokenizer": False, "chat template": False
    }  # fmt: skip
    assert "{%" not in json.dumps(made)
    write(tmp_path / "hf", tmp_path / "none.gguf", drop=["tokenizer.ggml.model"])
    rows = shown(tmp_path / "none.gguf")
    assert rows["tokenizer"].startswith("none, pre-tokenizer gpt-2: not supported: has no tokenizer")
    assert rows["chat"] == "none"


def test_a_refusal_is_shown_and_is_no_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    write(tmp_path / "hf", tmp_path / "a.gguf", kind=Q8_0, **{"llama.new": value(UINT32, 1)})
    rows = shown(tmp_path / "a.gguf")
    assert rows["build"].startswith("refused: graph not supported\n")
    assert "hint: take the model's original checkpoint" in rows["build"]
    assert rows["graph"].startswith("llama: not supported: 'llama.new' is not known")
    assert rows["tokenizer"].endswith(": supported")
    assert data(tmp_path / "a.gguf")["refusal"]["exit_code"] == 6
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert "truncated" in shown(tmp_path / "b.gguf")["build"]


def test_a_checkpoint_that_is_quantized_otherwise_or_lacks_weights(tiny_checkpoint: Path) -> None:
    settings = json.loads((tiny_checkpoint / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "hqq"}
    (tiny_checkpoint / "config.json").write_text(json.dumps(settings))
    rows = shown(tiny_checkpoint)
    assert rows["quantized"] == "hqq"
    assert "is not taken" in rows["build"]
    assert "GPTQ" not in rows["quantized"]
    del settings["quantization_config"]
    (tiny_checkpoint / "config.json").write_text(json.dumps(settings | {"model_type": "bert"}))
    (tiny_checkpoint / "tokenizer.json").unlink()
    rows = shown(tiny_checkpoint)
    assert rows["tokenizer"] == "missing: no tokenizer.json"
    assert rows["build"].startswith("refused: architecture 'BertLMHeadModel' cannot be compiled")
    (tiny_checkpoint / "model.safetensors").rename(tiny_checkpoint / "pytorch_model.bin")
    assert "only pickled weights" in shown(tiny_checkpoint)["build"]


def test_an_architecture_that_is_in_no_table(tiny_checkpoint: Path) -> None:
    settings = json.loads((tiny_checkpoint / "config.json").read_text())
    (tiny_checkpoint / "config.json").write_text(json.dumps(settings | {"model_type": "brand_new"}))
    assert shown(tiny_checkpoint)["build"] == (
        "its architecture is in no table; `llmforge trace` says whether it compiles"
    )


def test_an_adapter(tmp_path: Path) -> None:
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base\x1b[2J",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["v_proj", "q_proj"],
        "use_dora": True,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert "no adapter_model.safetensors" in shown(tmp_path)["build"]
    matrices = {"lora_A.weight": (8, 4), "lora_B.weight": (6, 8), "lora_magnitude_vector": (6,)}
    held = {f"base_model.model.x.{name}": np.ones(shape, np.float32) for name, shape in matrices.items()}
    save_file(held, tmp_path / "adapter_model.safetensors")
    rows = shown(tmp_path)
    assert (rows["what"], rows["method"], rows["rank"]) == ("adapter (peft)", "LORA with DoRA", "8")
    assert rows["targets"] == "q_proj, v_proj"
    assert "\x1b" not in rows["base model"]
    assert "`adapters:`" in rows["build"]
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "init_lora_weights": "pissa"}))
    assert "taking a part out of the base" in shown(tmp_path)["build"]


@pytest.mark.parametrize("name", ["empty", "notes.txt"])
def test_what_is_none_of_them_gets_one_message(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("notes") if path.suffix else path.mkdir()
    result = invoke(path)
    assert result.exit_code == 5
    assert result.stdout == ""
    message = result.stderr
    for known in ("manifest.json", "config.json", ".gguf", "adapter_config.json"):
        assert known in message
    assert len(message.splitlines()) == 2  # with its hint


def test_verify_is_of_artifacts(tiny_checkpoint: Path) -> None:
    result = invoke(tiny_checkpoint, "--verify")
    assert result.exit_code == 2
    assert "not an artifact" in result.stderr


def test_it_needs_no_torch(tiny_checkpoint: Path) -> None:
    """torch takes seconds to import."""
    code = "import sys; from llmforge.cli import main; sys.argv[1:] = ['inspect', sys.argv[1]]\ntry: main()\n"
    code += "except SystemExit: pass\nprint([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_checkpoint)], capture_output=True, text=True, check=True
    )
    assert "Hugging Face checkpoint" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_has_the_table_of_the_document() -> None:
    """Else: python -m tests.sweep.render."""
    table = render.packaged(render.DOCUMENT.read_text(encoding="utf-8"))
    assert json.loads(inspection.TRACED.read_text(encoding="utf-8")) == table
    assert table["llama"] == ""
    assert "encoder" in table["bert"]
