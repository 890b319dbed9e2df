"""Train the small embedder and reranker of the tests, each a folder as sentence-transformers writes it.

BERT of 1.1 M parameters, from scratch, on the calibration text that ships and this documentation. What is learnt is
which passage a few words of it were taken from (the inverse cloze task, arXiv:1906.00300), against the other passages
of the batch; the reranker goes on from the embedder, against passages of the same document. The queries of the
retrieval corpus, and all passages of the evaluation text, are not trained on.

    python -m benchmarks.train_retrieval tests/data
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from llmforge import recipes
from llmforge.metrics.retrieval.passages import passages

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, HIDDEN, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 6000, 128, 2, 4, 384, 256
QUERY_TOKENS, TEXT_TOKENS = 16, 56
BATCH, CANDIDATES, QUERIES = 48, 8, 8
TEMPERATURE = 0.05
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = re.compile(r"\S+")


def documents() -> list[list[str]]:
    """Give the passages of each document that is trained on."""
    lines = (recipes.TEXT / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    texts += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    return [found for text in texts if len(found := list(passages(text))) > 1]


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train a WordPiece tokenizer as BERT's, lower-case."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", tokenizer.token_to_id("[SEP]")), ("[CLS]", tokenizer.token_to_id("[CLS]"))
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def cloze(passage: str, rng: random.Random) -> tuple[str, str]:
    """Take some words of a passage as its query, not all in their order; they mostly stay in the passage."""
    words = _WORDS.findall(passage)
    length = rng.randint(4, 12)
    at = rng.randrange(max(1, len(words) - length))
    chosen = words[at : at + length]
    kept = [word for word in chosen if rng.random() > 0.25] or chosen
    if rng.random() < 0.5:
        rng.shuffle(kept)
    rest = words[:at] + words[at + length :] if rng.random() < 0.3 else words
    return " ".join(kept), " ".join(rest or words)


def encode(tokenizer: Tokenizer, texts: Sequence[Any], most: int) -> dict[str, torch.Tensor]:
    """Tokenize texts, or pairs, and pad them."""
    tokenizer.enable_truncation(most, strategy="longest_first")
    tokenizer.enable_padding(pad_id=0)
    found = tokenizer.encode_batch(list(texts))
    return {
        "input_ids": torch.tensor([each.ids for each in found]),
        "attention_mask": torch.tensor([each.attention_mask for each in found]),
        "token_type_ids": torch.tensor([each.type_ids for each in found]),
    }


def embed(model: BertModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Pool the mean over tokens, at length 1."""
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def learn(parameters: Any, steps: int, rate: float, loss_of: Any, what: str) -> None:
    """Run AdamW with a warm-up and a linear decay."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, max(0.0, 1 - step / steps))
    )
    began, mean = time.process_time(), 0.0
    for step in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        schedule.step()
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            print(f"{what} {step}: loss {mean:.3f}, {time.process_time() - began:.0f} s of CPU", flush=True)


def train_embedder(tokenizer: Tokenizer, groups: list[list[str]], steps: int, rng: random.Random) -> BertModel:
    """Learn to find a query's passage among those of a batch, a quarter of which are of its own document."""
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=FEED_FORWARD, max_position_embeddings=CONTEXT, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    every = [passage for group in groups for passage in group]

    def loss() -> torch.Tensor:
        group = rng.choice(groups)
        texts = rng.sample(every, BATCH * 3 // 4)
        texts = list(dict.fromkeys([*texts, *rng.sample(group, min(len(group), BATCH // 4))]))
        queries, found = zip(*(cloze(text, rng) for text in texts), strict=True)
        left = embed(model, encode(tokenizer, queries, QUERY_TOKENS))
        right = embed(model, encode(tokenizer, found, TEXT_TOKENS))
        scores = left @ right.T / TEMPERATURE
        target = torch.arange(len(texts))
        return (
            torch.nn.functional.cross_entropy(scores, target) + torch.nn.functional.cross_entropy(scores.T, target)
        ) / 2

    learn(model.parameters(), steps, 2e-3, loss, "embedder")
    return model


def train_reranker(
    tokenizer: Tokenizer, groups: list[list[str]], embedder: BertModel, steps: int, rng: random.Random
) -> BertForSequenceClassification:
    """Learn to give a query's passage the highest of the logits of some passages."""
    config = BertConfig(**{**embedder.config.to_dict(), "num_labels": 1, "architectures": None})
    model = BertForSequenceClassification(config)
    model.bert.load_state_dict(embedder.state_dict(), strict=False)
    with torch.no_grad():  # tokens begin by looking for themselves in the other text, which takes long to be learnt
        attention = model.bert.encoder.layer[0].attention.self
        for part in (attention.query, attention.key):
            part.weight.copy_(torch.eye(HIDDEN))
            part.bias.zero_()
    every = [passage for group in groups for passage in group]

    def loss() -> torch.Tensor:
        pairs: list[tuple[str, str]] = []
        for _ in range(QUERIES):
            group = rng.choice(groups)
            near = rng.sample(group, min(len(group), CANDIDATES // 2))
            query, text = cloze(near[0], rng)
            others = [*near[1:], *rng.sample(every, CANDIDATES - len(near))]
            pairs += [(query, text), *((query, other) for other in others)]
        scores = model(**encode(tokenizer, pairs, QUERY_TOKENS + TEXT_TOKENS)).logits.view(QUERIES, CANDIDATES)
        return torch.nn.functional.cross_entropy(scores, torch.zeros(QUERIES, dtype=torch.long))

    learn(model.parameters(), steps, 1e-3, loss, "reranker")
    return model


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the weights in fp16, and the tokenizer."""
    model.half().save_pretrained(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **names)
    fast.save_pretrained(folder)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def describe_embedder(folder: Path) -> None:
    """Say how sentences are embedded, as sentence-transformers reads it."""
    kind = "sentence_transformers.models"
    write_json(folder / "modules.json", [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{kind}.Normalize"},
    ])  # fmt: skip
    write_json(folder / "1_Pooling/config.json", {
        "word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False, "pooling_mode_lasttoken": False, "include_prompt": True,
    })  # fmt: skip
    (folder / "2_Normalize").mkdir(exist_ok=True)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": CONTEXT, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", {
        "prompts": {"query": "", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine",
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the two models' folders")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--reranker-steps", type=int, default=700)
    given = parser.parse_args()
    torch.set_num_threads(1)  # matrices are small; and the result does not depend on the machine's cores
    torch.manual_seed(0)
    rng = random.Random(0)
    groups = documents()
    tokenizer = train_tokenizer(passage for group in groups for passage in group)
    print(f"{sum(map(len, groups))} passages of {len(groups)} documents", flush=True)
    embedder = train_embedder(tokenizer, groups, given.steps, rng)
    reranker = train_reranker(tokenizer, groups, embedder, given.reranker_steps, rng)
    save(embedder, tokenizer, given.out / "docs-embedder-1m")
    describe_embedder(given.out / "docs-embedder-1m")
    save(reranker, tokenizer, given.out / "docs-reranker-1m")


if __name__ == "__main__":
    main()
