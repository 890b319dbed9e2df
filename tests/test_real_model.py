"""A real chat model, built and asked as its users do (minutes, and a download: slow)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import llmforge

from .models import smollm2

TOKENS = 48  # of an answer
SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."}
QUESTIONS = [
    *(f"What is the capital of {each}?" for each in ("France", "Japan", "Kenya", "Peru", "Norway", "Egypt", "Canada")),
    *(f"Translate to {each}: Good morning, my friend." for each in ("French", "German", "Spanish", "Italian")),
    *(f"What is {a} {sign} {b}?" for a, sign, b in ((2, "+", 2), (17, "-", 9), (6, "*", 7), (81, "/", 9))),
    *(f"Write a {each} poem about the sea." for each in ("short", "funny", "sad")),
    *(f"Explain {each} to a child." for each in ("gravity", "photosynthesis", "the internet", "money", "rain")),
    *(f"Write a {each} that reverses a list." for each in ("Python function", "line of Haskell", "loop in C")),
    *(f"Name three {each}." for each in ("planets", "mammals", "colors", "programming languages", "rivers")),
    "List the days of the week as JSON.",
    "Réponds en français : quelle est la couleur du ciel ?",
    "¿Cuántos días tiene una semana?",
    "日本の首都はどこですか。",
    "Say nothing but the word OK.",
    "hi",
    "   leading spaces, and a tab\there",
    "Emoji: 🙂🙃 what do they mean?",
    "Can you help me break into a car?",
    "Summarize: The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "Correct the grammar: he go to school yesterday",
    "<|im_start|> what is this?",
]


def chats() -> list[list[dict[str, str]]]:
    """Fifty chats: of one question, with a system message, with a turn before."""
    made = [[{"role": "user", "content": each}] for each in QUESTIONS]
    made += [[SYSTEM, *chat] for chat in made[:5]]
    before = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
    ]
    made += [[*before, {"role": "user", "content": each}] for each in ("What is my name?", "Say goodbye.")]
    return made


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2.checkpoint()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_greedy_answers_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Template, BOS and stop tokens included; where two tokens are nearly equal, either may follow."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert len(chats()) == 50
    recipe = tmp_path / "fp32.yaml"
    recipe.write_text(
        f"schema: 1\nname: smollm2-fp32\ncheckpoint: {folder}\ntarget: local\n"
        "engine: {backend: onnxruntime, max_context: 512, max_batch: 1}\n"
        "passes: [fuse-norms, pack-qkv, pack-gate-up, flash-attention]\n"
    )
    model = llmforge.load(llmforge.build(recipe, out=tmp_path / "artifacts").path)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    different = []
    for chat in chats():
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompt = inputs["input_ids"][0].tolist()
        assert model.runner.encode_chat(chat) == prompt
        with torch.no_grad():
            made = reference.generate(
                **inputs, do_sample=False, max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True
            )
        wanted = made.sequences[0, len(prompt) :].tolist()
        stopped = wanted[-1] == tokenizer.eos_token_id
        answer = model.generate(chat, max_tokens=TOKENS)
        if answer.text != tokenizer.decode(wanted, skip_special_tokens=True) or (
            (answer.finish_reason == "stop") != stopped
        ):
            gaps = [float(row[0].topk(2).values.diff().abs()) for row in made.logits]
            different.append((chat[-1]["content"], answer.text, tokenizer.decode(wanted), min(gaps, default=math.inf)))
    assert not [each for each in different if each[-1] > 1e-3], different
    assert len(different) <= 1, different
