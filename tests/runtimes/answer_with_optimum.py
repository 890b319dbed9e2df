"""Print greedy answers of ORTModelForCausalLM as JSON; FOLDER is the argument, a JSON list of prompts the input."""

import json
import sys

import torch
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer

TOKENS = 64


def answer(model: ORTModelForCausalLM, encoded: dict[str, torch.Tensor]) -> list[list[int]]:
    """Continue every row of `encoded`, padded on the left, by at most `TOKENS` tokens."""
    with torch.no_grad():
        ids = model.generate(**encoded, max_new_tokens=TOKENS, do_sample=False)
    made: list[list[int]] = ids[:, encoded["input_ids"].shape[1] :].tolist()
    return made


def main() -> None:
    """Write the prompts' token ids, the answers one by one and as one batch, their texts, and one forward's logits."""
    folder, prompts = sys.argv[1], json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = ORTModelForCausalLM.from_pretrained(folder)
    encoded = [tokenizer(prompt, return_tensors="pt") for prompt in prompts]
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in encoded]
    alone = [answer(model, row)[0] for row in rows]
    together = tokenizer(prompts, return_tensors="pt", padding=True)
    batch = answer(model, {name: together[name] for name in ("input_ids", "attention_mask")})
    logits = model(**rows[0]).logits
    json.dump(
        {
            "ids": [row["input_ids"][0].tolist() for row in rows],
            "alone": alone,
            "batch": batch,
            "texts": [tokenizer.decode(row, skip_special_tokens=True) for row in alone],
            "logits": list(logits.shape),
        },
        sys.stdout,
    )


main()
