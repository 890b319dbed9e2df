"""Train an EAGLE-3 head for the sample: the checkpoint of tests/data/eagle3-docs-llama-7m.

    python -m benchmarks.train_head OUT [--steps 500]

It learns the sample's own greedy tokens on `calibration.jsonl`, of the 320 that come most often, with two tokens of a
draft in a row: in the second pass the head reads what it gave in the first. Weights are in bf16. Some minutes on one
core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.documents import read_documents
from llmforge.checkpoint.eagle3 import LAYER, Eagle3Head
from llmforge.trace.export.eagle3 import HeadReference

DATA = Path(__file__).parents[1] / "tests" / "data"
SAMPLE = DATA / "docs-llama-7m"
WINDOW, BATCH, RATE, WARM_UP, LEAST, SECOND = 128, 8, 3e-3, 20, 0.05, 0.7
LAYERS = (2, 3, 5)  # what enters them is read
VOCABULARY = 320
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "vocab_size": 8192,
    "draft_vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": list(LAYERS),
}


def observed() -> tuple[Tensor, Tensor, Tensor]:
    """Run the sample on text: ids [N, WINDOW], what enters `LAYERS` [N, WINDOW, 3 · 256], greedy tokens [N, WINDOW]."""
    tokenizer = Checkpoint.open(SAMPLE).tokenizer
    texts = [each.text for each in read_documents(DATA / "calibration.jsonl")]
    ids = [token for text in texts for token in [0, *tokenizer.encode(text, add_special_tokens=False).ids]]
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)
    model = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    states, greedy = [], []
    with torch.inference_mode():
        for rows in windows.split(BATCH):
            made = model(input_ids=rows, output_hidden_states=True)
            states.append(torch.cat([made.hidden_states[layer] for layer in LAYERS], -1))
            greedy.append(made.logits.argmax(-1))
    return windows, torch.cat(states).clone(), torch.cat(greedy).clone()


def drawn(ids: Tensor) -> dict[str, Tensor]:
    """Draw the weights to begin with; draft tokens are `ids`."""
    size, attended, kept = CONFIG["hidden_size"], 4 * 32, 2 * 32
    shapes = {
        "fc": (size, 3 * 256),
        "midlayer.self_attn.q_proj": (attended, 2 * size),
        "midlayer.self_attn.k_proj": (kept, 2 * size),
        "midlayer.self_attn.v_proj": (kept, 2 * size),
        "midlayer.self_attn.o_proj": (size, attended),
        "midlayer.mlp.gate_proj": (CONFIG["intermediate_size"], size),
        "midlayer.mlp.up_proj": (CONFIG["intermediate_size"], size),
        "midlayer.mlp.down_proj": (size, CONFIG["intermediate_size"]),
        "lm_head": (len(ids), size),
    }
    made = {f"{name}.weight": torch.randn(n, k) / k**0.5 for name, (n, k) in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        made[f"midlayer.{name}.weight"] = torch.ones(size)
    return {**made, "norm.weight": torch.ones(size), "d2t": ids - torch.arange(len(ids))}


def train(folder: Path, steps: int) -> None:
    """Train the head in `folder`, and write it there again."""
    windows, states, greedy = observed()
    counts = torch.bincount(greedy.flatten(), minlength=CONFIG["vocab_size"])
    ids = counts.topk(VOCABULARY).indices.sort().values
    print(f"{windows.numel()} tokens, {counts[ids].sum() / counts.sum():.2f} in the draft vocabulary", flush=True)
    draft = torch.full((CONFIG["vocab_size"],), -100).index_put((ids,), torch.arange(VOCABULARY))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    first = drawn(ids)
    save_file(first, folder / "model.safetensors")
    reference = HeadReference(Eagle3Head.open(folder, Checkpoint.open(SAMPLE)))
    model: Any = reference.model
    trained = {name: each for name, each in model.named_parameters() if "embed_tokens" not in name}
    for each in trained.values():
        each.requires_grad_(True)
    optimizer, began = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.95)), time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * max(LEAST, 1 - step / steps)
        rows = torch.randint(len(windows), (BATCH,))
        tokens, hidden, wanted = windows[rows, 1:], states[rows, :-1], draft[greedy[rows, 1:]]
        own = torch.zeros(*tokens.shape, CONFIG["hidden_size"])
        losses = []
        for _ in range(2):
            reference.states.hidden, reference.states.own = hidden, own
            logits = model(input_ids=tokens, use_cache=False).logits
            losses.append(cross_entropy(logits.flatten(0, 1), wanted.flatten()))
            right = (logits.argmax(-1) == wanted).float().mean()
            # At the next place it reads what it gave at this one, and no states of the sample.
            own, tokens, wanted = reference.states.next[:, :-1], tokens[:, 1:], wanted[:, 1:]
            hidden = torch.zeros_like(hidden[:, 1:])
        loss = losses[0] + SECOND * losses[1]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: {losses[0]:.3f} {losses[1]:.3f}, {right:.2f}, {time.time() - began:.0f} s", flush=True)
        if step % 100 == 99 or step == steps - 1:
            found = {_stored(name): each.detach().bfloat16() for name, each in trained.items()}
            save_file({**found, "d2t": first["d2t"]}, folder / "model.safetensors")


def _stored(name: str) -> str:
    """Name a parameter as checkpoints of heads do."""
    inside = name.removeprefix(f"{LAYER}.")
    if inside == name or inside.startswith("fc."):
        return inside.removeprefix("model.")
    return f"midlayer.{inside}"


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train(given.out, given.steps)


if __name__ == "__main__":
    main()
