"""Print greedy answers of onnxruntime-genai as JSON; FOLDER is the argument, a JSON list of prompts the input."""

import json
import sys

import numpy as np
import onnxruntime_genai as og

TOKENS = 64


def answer(model: og.Model, batch: list[list[int]], pad: int) -> list[list[int]]:
    """Continue every row of `batch` (int32 [rows, longest], padded on the right) by at most `TOKENS` tokens."""
    longest = max(map(len, batch))
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=longest + TOKENS, batch_size=len(batch))
    generator = og.Generator(model, params)
    padded = np.array([row + [pad] * (longest - len(row)) for row in batch], np.int32)
    generator.append_tokens(padded)
    made: list[list[int]] = [[] for _ in batch]
    while not generator.is_done():
        generator.generate_next_token()
        for row, token in zip(made, generator.get_next_tokens(), strict=True):
            row.append(int(token))
    return made


def main() -> None:
    """Write the prompts' token ids, the answers one by one and as one batch, and their texts."""
    folder, prompts = sys.argv[1], json.loads(sys.stdin.read())
    model = og.Model(folder)
    tokenizer = og.Tokenizer(model)
    ids = [[int(token) for token in tokenizer.encode(prompt)] for prompt in prompts]
    alone = [answer(model, [row], tokenizer.pad_token_id)[0] for row in ids]
    batch = answer(model, ids, tokenizer.pad_token_id)
    texts = [tokenizer.decode(np.array(row, np.int32)) for row in alone]
    json.dump({"ids": ids, "alone": alone, "batch": batch, "texts": texts}, sys.stdout)


main()
