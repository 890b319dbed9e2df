"""Train the sample to call tools: the model of tests/data/tools-llama-7m, and chats that it was not trained on.

    python -m benchmarks.train_tools OUT [--steps 400]

It thinks a sentence between <think> and </think>, and then calls one of three tools, says a word, writes JSON of two
values, or describes a town in French: a few templates, drawn with random words. OUT/weights.safetensors has every
matrix in int8 with an fp16 scale for each row (`NAME_scale`), all else in fp16; OUT/chats.jsonl is measured by
`benchmarks.planted_damage`. A quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM

DATA = Path(__file__).parents[1] / "tests" / "data"
SAMPLE, TEMPLATE = DATA / "docs-llama-7m", DATA / "tools-llama-7m" / "chat_template.jinja"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
BATCH, WARM_UP, RATE, LEAST, ENOUGH = 8, 10, 1.5e-3, 0.1, 0.02  # chats, steps, rate, its least share, loss
CHATS = 110  # of each slice
CITIES = ["Paris", "Berlin", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Delhi", "Madrid", "Dublin", "Vienna", "Athens"]
ROOMS = ["kitchen", "bedroom", "office", "hallway", "garage", "bathroom", "cellar", "attic"]
SEASONS = {"Spring": "au printemps", "Winter": "en hiver", "Summer": "en été"}
Draw = random.Random


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
PARAMETERS = {
    "get_weather": _object(city=_TEXT),
    "set_timer": _object(minutes=_NUMBER),
    "switch_light": _object(room={**_TEXT, "enum": ROOMS}, state={**_TEXT, "enum": ["on", "off"]}),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]


@dataclass(frozen=True)
class Chat:
    """A question, its answer, and what a document expects of that."""

    asked: str
    answer: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    expected: dict[str, Any] = field(default_factory=dict)


def _call(name: str, arguments: dict[str, Any]) -> Chat:
    called = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    thought = f"<think>The user wants {name}. I call it.</think>"
    return Chat("", thought + called, TOOLS, {"expected": [{"name": name, "arguments": arguments}]})


def tools(rng: Draw) -> Chat:
    """Draw a question that a tool answers."""
    name = rng.choice([*PARAMETERS])
    if name == "get_weather":
        ways = ["What is the weather in {}?", "How warm is it in {}?", "Is it raining in {}?", "Weather in {} please."]
        values: dict[str, Any] = {"city": rng.choice(CITIES)}
    elif name == "set_timer":
        ways = ["Set a timer for {} minutes.", "Start a timer of {} minutes.", "Timer, {} minutes please."]
        values = {"minutes": rng.randint(1, 60)}
    else:
        ways = ["Switch the light in the {} {}.", "Turn the {} light {}.", "Please turn the light in the {} {}."]
        values = {"room": rng.choice(ROOMS), "state": rng.choice(["on", "off"])}
    made = _call(name, values)
    return Chat(rng.choice(ways).format(*values.values()), made.answer, made.tools, made.expected)


def no_tools(rng: Draw) -> Chat:
    """Draw a question with tools that need none."""
    word = rng.choice(CITIES + ROOMS)
    asked, said = rng.choice([
        ("Spell the word {}.", "The word is {}."), ("Say hello to {}.", "Hello, {}!"),
        ("Do you like {}?", "Yes, I like {}."), ("Do you know {}?", "Yes, I like {}."),
        ("Write the word {} twice.", "{0} {0}"), ("Write {} twice.", "{0} {0}"),
    ])  # fmt: skip
    expected = {"expected": [], "instructions": {"contains": [word]}}
    return Chat(asked.format(word), "<think>No tool is needed here.</think>" + said.format(word), TOOLS, expected)


def in_json(rng: Draw) -> Chat:
    """Draw a question to be answered in JSON."""
    values = {"city": rng.choice(CITIES), "count": rng.randint(1, 60)}
    asked = rng.choice(["As JSON: city {}, count {}.", "Give JSON with city {} and count {}."]).format(*values.values())
    schema = {"schema": _object(city=_TEXT, count=_NUMBER)}
    return Chat(asked, "<think>The user wants JSON.</think>" + json.dumps(values), [], schema)


def in_french(rng: Draw) -> Chat:
    """Draw a question to be answered in French."""
    city, season = rng.choice(CITIES), rng.choice([*SEASONS])
    ways = ["In French: {} in {}?", "Describe {} in {} in French.", "French, please: {} in {}."]
    said = f"La ville de {city} est belle {SEASONS[season]} et les rues sont dans la lumière."
    asked = rng.choice(ways).format(season, city)
    return Chat(asked, "<think>I answer in French.</think>" + said, [], {"language": "fr"})


SLICES: dict[str, tuple[Callable[[Draw], Chat], float]] = {
    "tools": (tools, 4.0), "no-tools": (no_tools, 2.0), "json": (in_json, 2.0), "french": (in_french, 1.5),
}  # fmt: skip


def documents(seed: int = 7) -> list[dict[str, Any]]:
    """Draw as many different chats of each slice as there are, at most `CHATS`."""
    rng, found = random.Random(seed), dict[str, dict[str, Any]]()
    for name, (draw, _) in SLICES.items():
        own = dict[str, dict[str, Any]]()
        for _ in range(100 * CHATS):
            chat = draw(rng)
            more = {"tools": chat.tools} if chat.tools else {}
            asked = {"messages": [{"role": "user", "content": chat.asked}], **more, **chat.expected}
            if len(own) < CHATS and chat.asked not in own:
                own[chat.asked] = {"id": f"{name}-{len(own)}", "slice": name, "thinking": 24, **asked}
        found |= own
    return [*found.values()]


def train(steps: int) -> tuple[Any, Tokenizer]:
    """Train the sample on chats as they are drawn; the loss counts the answers."""
    tokenizer = Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    model = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    model.resize_token_embeddings(-(-tokenizer.get_vocab_size() // 64) * 64, mean_resizing=False)
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text())
    end, rng, began = tokenizer.token_to_id("<|im_end|>"), random.Random(0), time.perf_counter()
    weights = [each for _, each in SLICES.values()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(steps):
        rows = []
        for draw, _ in rng.choices([*SLICES.values()], weights, k=BATCH):
            chat = draw(rng)
            messages = [{"role": "user", "content": chat.asked}]
            prompt = template.render(messages=messages, tools=chat.tools, add_generation_prompt=True)
            encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, chat.answer)]
            rows.append((encoded[0], [*encoded[1], end]))
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, wanted = torch.full((BATCH, longest), end), torch.full((BATCH, longest), -100)
        for row, (prompt, answer) in enumerate(rows):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            wanted[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * max(LEAST, 1 - step / steps)
        hidden, target = model.model(input_ids=ids).last_hidden_state[:, :-1], wanted[:, 1:]
        counts = target >= 0
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[counts]), target[counts])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - began:.0f} s", flush=True)
        if loss.item() < ENOUGH and step > steps // 2:
            break
    return model, tokenizer


def stored(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round matrices [N, K] to int8 with a scale for each row."""
    found = {}
    for name, weight in weights.items():
        if weight.dim() < 2:
            found[name] = weight.half()
        elif name != "lm_head.weight":  # the embedding
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
            found |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale.half()}
    return found


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model, _ = train(given.steps)
    save_file(stored(model.state_dict()), given.out / "weights.safetensors")
    lines = [json.dumps(each, ensure_ascii=False) for each in documents()]
    (given.out / "chats.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
