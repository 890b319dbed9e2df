"""A small model that calls tools, thinks, and answers in JSON and in French (tests/data/README.md), as a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors import numpy as safetensors
from tokenizers import AddedToken, Tokenizer

DATA = Path(__file__).parents[1] / "data"
SAMPLE, TOOLS = DATA / "docs-llama-7m", DATA / "tools-llama-7m"
CHATS = TOOLS / "chats.jsonl"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_SCALE = "_scale"  # ends the name of the scales of a matrix's rows


def write(folder: Path) -> Path:
    """Write the checkpoint in fp32: the sample's configuration and tokenizer, with its own weights and tags."""
    folder.mkdir(parents=True)
    stored = safetensors.load_file(TOOLS / "weights.safetensors")
    weights = {
        name: np.float32(value) * np.float32(stored.get(name + _SCALE, 1.0))
        for name, value in stored.items()
        if not name.endswith(_SCALE)
    }
    safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    rows = len(weights["model.embed_tokens.weight"])
    config = json.loads((SAMPLE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows, "dtype": "float32"}))
    tokenizer = Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(SAMPLE / "tokenizer_config.json", folder)
    shutil.copy(TOOLS / "chat_template.jinja", folder)
    ends = [tokenizer.token_to_id("<|im_end|>"), config["eos_token_id"]]
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": ends}))
    return folder
