"""Tiny checkpoints of architectures that transformers knows, with random weights: to try a release on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmforge.trace.hooks import internals

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NOISE = 0.1  # added to vectors, so that none is all ones or zeros


def write(model_type: str, entries: Mapping[str, Any], folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of `model_type` in fp32: matrices with standard deviation 1/√in, so that all parts matter."""
    config = CONFIG_MAPPING[model_type](**entries)
    config.dtype = torch.float32
    generator = torch.Generator().manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(NOISE * drawn)
    with internals.no_progress_bars():
        model.save_pretrained(folder)
    vocabulary = {
        token: number for number, token in enumerate([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
