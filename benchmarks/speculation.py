"""How much faster answers come by speculation: edits of code and of JSON, and chats, with and without, in turns.

    python benchmarks/speculation.py ARTIFACT [--method prompt-lookup] [--prompts 12] [--tokens 160] [-o report.json]

One request at a time, greedy, each prompt once without drafts and once with them, by two engines of one process and in
alternating order; a warm-up of each kind goes before. The speed-up is the ratio of the times of a token after the first
(TPOT), geometric mean over prompts with a bootstrap interval; the accepted length is tokens by verification, the last
of which is not drafted. Both answers are compared token by token.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

import llmforge
from llmforge.serving import EngineOptions, Request, Sampling
from llmforge.serving.engine import Engine

CODE = (
    "Change the name of `{old}` to `{new}` in this code. Answer with the whole code, and nothing else.\n\n"
    "```python\n{code}\n```"
)
JSON = 'Set "{key}" to {value} in this JSON. Answer with the whole JSON, and nothing else.\n\n```json\n{data}\n```'
CHATS = (
    "Why is the sky blue?",
    "Give me three ideas for a birthday present for my grandmother.",
    "Write a short story about a lighthouse keeper.",
    "Explain what a compiler does to somebody who has never programmed.",
    "What should I pack for a week of hiking in autumn?",
    "Describe how bread is made, step by step.",
    "What are the advantages of trains over planes?",
    "Write a polite letter that asks for a refund.",
    "How do I learn to play the guitar as an adult?",
    "Tell me about the history of the printing press.",
    "What makes a good leader?",
    "How does a refrigerator work?",
    "Recommend a plan for running five kilometres in two months.",
    "Write a poem about the sea in winter.",
    "What is the difference between weather and climate?",
    "How can a small shop attract more customers?",
)


def code_edits(count: int, chance: random.Random) -> list[str]:
    """Ask for a name to be changed in functions of 8 to 22 lines of this package."""
    found = []
    for path in sorted(Path(llmforge.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.FunctionDef)
                and 8 <= (node.end_lineno or 0) - node.lineno <= 22
                and node.col_offset == 0
            ):
                found.append((node.name, ast.get_source_segment(text, node) or ""))
    return [
        CODE.format(old=name, new=f"new_{name.strip('_')}", code=code) for name, code in chance.sample(found, count)
    ]


def json_edits(count: int, chance: random.Random) -> list[str]:
    """Ask for one value to be changed in records of people and orders."""
    names, cities = ("Ada", "Boris", "Chen", "Dana", "Emeka", "Fatima"), ("Oslo", "Lima", "Kyoto", "Accra", "Quito")
    made = []
    for _ in range(count):
        items = [
            {"id": chance.randrange(1000, 9999), "name": chance.choice(names), "city": chance.choice(cities),
             "active": chance.random() < 0.5, "score": round(chance.random() * 100, 1)}
            for _ in range(4)
        ]  # fmt: skip
        data = {"version": chance.randrange(9), "owner": chance.choice(names), "items": items}
        made.append(JSON.format(key="owner", value=f'"{chance.choice(names)}"', data=json.dumps(data, indent=2)))
    return made


def answer(engine: Engine, prompt: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], Any]:
    """Answer one prompt greedily; return its tokens and its usage."""
    chunks = list(engine.stream(Request(prompt, Sampling(max_tokens=tokens))))
    return tuple(chunk.token_id for chunk in chunks if chunk.token_id is not None), chunks[-1].usage


def measure(plain: Engine, drafting: Engine, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Answer each prompt by both engines, in turns."""
    logs, equal, verified = [], 0, [0, 0]
    before = drafting.stats()
    for number, prompt in enumerate(prompts):
        ids = tuple(plain.encoder.encode_chat([{"role": "user", "content": prompt}]))
        made = {}
        for engine in (plain, drafting) if number % 2 else (drafting, plain):
            made[engine] = answer(engine, ids, tokens)
        equal += made[plain][0] == made[drafting][0]
        slow, fast = (made[engine][1].tpot_ms for engine in (plain, drafting))
        if slow is not None and fast is not None:
            logs.append(float(np.log(slow / fast)))
    after = drafting.stats()
    verified = [after.verified_tokens - before.verified_tokens, after.accepted_tokens - before.accepted_tokens]
    drafted = after.drafted_tokens - before.drafted_tokens
    chance = np.random.default_rng(0)
    means = np.exp([np.mean(chance.choice(logs, len(logs))) for _ in range(2000)])
    runs = verified[0] - verified[1]
    return {
        "prompts": len(prompts),
        "equal": equal,
        "speedup": float(np.exp(np.mean(logs))),
        "speedup_95": [float(each) for each in np.quantile(means, (0.025, 0.975))],
        "accepted_length": verified[0] / runs if runs else None,
        "accepted_share": verified[1] / drafted if drafted else None,
    }


def main() -> None:
    """Measure each kind of prompt and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--method", default="prompt-lookup", choices=["prompt-lookup", "draft"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    chance = random.Random(0)
    kinds = {"code": code_edits(options.prompts, chance), "json": json_edits(options.prompts, chance)}
    kinds["chat"] = [CHATS[number % len(CHATS)] for number in range(options.prompts)]
    engines = [
        Engine.load(options.artifact, EngineOptions(speculation=method, prefix_cache_bytes=0))
        for method in ("off", options.method)
    ]
    for engine in engines:
        answer(engine, tuple(engine.encoder.encode("A warm-up of some words.")), 32)
    found = {}
    for kind, prompts in kinds.items():
        found[kind] = each = measure(*engines, prompts, options.tokens)
        low, high = each["speedup_95"]
        length = "-" if each["accepted_length"] is None else f"{each['accepted_length']:.2f}"
        print(f"{kind}: {each['speedup']:.2f} x ({low:.2f} to {high:.2f}), accepted length {length}, "
              f"{each['equal']} of {each['prompts']} equal", flush=True)  # fmt: skip
    for engine in engines:
        engine.close()
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
