"""Encoders: `python -m tests.sweep.encoders --out encoders.json [--only a,b] [--jobs N] [--table FILE]`.

Every type of text models that transformers maps to masked language modelling, to sequence classification, or to text
encoding runs twice, as far as it has both: its model without a head as an embedder (the mean of tokens), and its
classifier with one label as a reranker. The graph runs sequences of unequal lengths side by side; transformers runs
each alone, and some padded in a batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from llmforge.base.errors import UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect
from llmforge.trace import trace
from llmforge.verification import encoder_runs, probe
from llmforge.verification.trace_verifier import prove_candidate

from ..models.checkpoints import write_tokenizer
from . import render, run, shrink
from .compare import TOLERANCE
from .reference import ReferenceFails

EMBEDDER, RERANKER = "embedder", "reranker"
LENGTHS = (9, 12, 5, 40, 1, 2, 23)  # of sequences side by side: 40 is longer than every window and original context
PADDED = (0, 1, 2, 6)  # of them, one batch of transformers
SHORTEST = {"canine": 4, "funnel": 3}  # tokens, of types whose code pools tokens and ends in an error on fewer
# Encoders that transformers maps to causal language models, and to none of the others.
CAUSAL = {"bert-generation", "cpmant", "openai-gpt", "xlnet"}
# Encoder-decoders whose encoder transformers has alone.
ENCODERS_ALONE = {"mt5", "t5", "t5gemma", "umt5"}
# Configurations of their own, where the general rules of `shrink` make something that is no model.
OVERRIDES: dict[str, dict[str, Any]] = {
    # As published checkpoints have it: biases by distance, of contents and of places, in buckets by logarithms.
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 32},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "share_att_key": True,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "esm": {  # as in published checkpoints; the defaults name no vocabulary
        "vocab_size": shrink.VOCABULARY,
        "pad_token_id": 0,
        "mask_token_id": 4,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "emb_layer_norm_before": False,
    },
    "esmc": {"vocab_size": shrink.VOCABULARY, "num_key_value_heads": 4, "head_dim": 16},  # keys of every head
    "emu3": {"vocabulary_map": {"<image>": 4, "<|visual token 000000|>": 5, "<|extra_200|>": 6}},
    "funnel": {"block_sizes": [2, 2], "block_repeats": [1, 1], "architectures": ["FunnelModel"]},  # not its base
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12},  # four and two of them are the hidden size
    **{each: {"decoder_start_token_id": 0} for each in ("mt5", "t5", "umt5")},  # as in published checkpoints
    "lilt": {"hidden_size": 96},  # six coordinates share it
    "mpnet": {"pad_token_id": 1, "bos_token_id": 0},  # its code takes token 1 for padding, whatever this says
}


@dataclass
class Outcome:
    """What became of one type in one role."""

    model_type: str  # type@role
    outcome: str
    reason: str = ""
    difference: float | None = None  # largest, in root mean squares of what is given
    rounding: float | None = None  # of transformers' fp32 beside its fp64; where it decides
    nodes: int | None = None
    seconds: float | None = None
    where: str = ""


def roles() -> list[str]:
    """Name every type in every role, as `type@role`; decoders that are no encoders have the second role alone."""
    encoders = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES}
    classifiers = {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
    encoders |= classifiers - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    encoders |= CAUSAL
    names = {f"{each}@{EMBEDDER}" for each in encoders if each in MODEL_MAPPING_NAMES}
    return sorted(names | {f"{each}@{RERANKER}" for each in classifiers})


def job(name: str) -> run.Record:
    """Write, trace and compare one type in one role (in a process of its own)."""
    run.quiet()
    model_type, _, role = name.partition("@")
    with tempfile.TemporaryDirectory(prefix=f"sweep-{model_type}-") as folder:
        try:
            write(model_type, role, Path(folder))
        except Exception as error:  # noqa: BLE001  # whatever a configuration or model of transformers raises
            first = next(iter(str(error).strip().splitlines()), "no message")
            return dataclasses.asdict(
                Outcome(name, "transformers-fails", f"{type(error).__name__}: {first[:300]}", where=run.ends(error))
            )
        return dataclasses.asdict(compare(name, Path(folder)))


def write(model_type: str, role: str, folder: Path) -> None:
    """Write a tiny checkpoint of random weights, as transformers saves it, with a byte tokenizer."""
    torch.manual_seed(0)
    settings = shrink.config(model_type, changes=OVERRIDES.get(model_type, {}))
    settings.num_labels = 1
    text = settings.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = shrink.SPECIAL_IDS["pad_token_id"]  # else classifiers of decoders read one text at a time
    if role == EMBEDDER and model_type in ENCODERS_ALONE:
        settings.is_encoder_decoder = False  # as `T5GemmaEncoderModel` demands
    model = auto_class(settings, role).from_config(settings, dtype=torch.float32, attn_implementation="eager")
    shrink.draw(model.eval())
    model.save_pretrained(folder)
    settings.architectures = [type(model).__name__]
    settings.save_pretrained(folder)
    write_tokenizer(folder)


def auto_class(settings: PretrainedConfig, role: str) -> Any:
    """Choose what makes the model: of an encoder-decoder its encoder, where transformers has that alone."""
    if role == RERANKER:
        return AutoModelForSequenceClassification
    alone = settings.model_type in ENCODERS_ALONE
    return AutoModelForTextEncoding if alone else AutoModel


def compare(name: str, folder: Path) -> Outcome:
    """Run the frontend on the checkpoint in `folder` and compare with transformers."""
    outcome = Outcome(name, "transformers-fails")
    role = name.partition("@")[2]
    try:
        alone, padded = reference(folder, role, torch.float32)
    except Exception as error:  # noqa: BLE001  # whatever a model of transformers raises is a result of the sweep
        first = next(iter(str(error).strip().splitlines()), "no message")
        outcome.reason = f"{type(error).__name__}: {first[:300]}"
        return outcome
    try:
        checkpoint = Checkpoint.open(folder)
        graph = trace(checkpoint)
        dialect.check(graph)
        prove_candidate(checkpoint, graph)
    except UnsupportedError as error:
        needed = f"; {error.hint}" if (error.hint or "").startswith("needed: ") else ""
        outcome.outcome, outcome.reason = "refused", f"{error.message}{needed}"
        return outcome
    outcome.nodes = len(graph.graph)
    encoding = checkpoint.encoding
    assert encoding is not None, "neither an embedder nor a reranker"
    opened = encoder_runs.open_graph(graph, encoding, 1, probe.InitializerArrays())
    made = opened.encode(_texts(name.partition("@")[0]), None)
    spread = float(np.sqrt(np.mean(np.square(alone, dtype=np.float64))))
    apart = [np.abs(made - alone).max(), np.abs(made[list(PADDED)] - padded).max()]
    outcome.difference = float(max(apart)) / spread if np.isfinite(made).all() else float("inf")
    if outcome.difference > TOLERANCE:
        exact, _ = reference(folder, role, torch.float64)
        outcome.rounding = float(np.abs(exact - alone).max()) / spread
        outcome.reason = f"transformers' own rounding {outcome.rounding:.1e}, its padding {_padding(alone, padded):.1e}"
    right = outcome.difference <= max(TOLERANCE, outcome.rounding or 0.0)
    outcome.outcome = "right" if right else "wrong"
    return outcome


def _padding(alone: NDArray[np.float64], padded: NDArray[np.float64]) -> float:
    """Return how much padding changes what transformers gives."""
    return float(np.abs(alone[list(PADDED)] - padded).max())


@torch.no_grad()
def reference(folder: Path, role: str, dtype: torch.dtype) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give what transformers computes of each text alone, and of `PADDED` in one batch.

    Raises:
        ReferenceFails: its tensors are not those of the model, or its numbers are not finite, or all the same.
    """
    kind = auto_class(AutoConfig.from_pretrained(folder), role)
    model, info = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise ReferenceFails(f"transformers does not load what it saved: {what} {sorted(info[what])[:3]}")
    model.eval()
    texts = _texts(model.config.model_type)
    alone = np.concatenate([_run(model, role, [text]) for text in texts])
    if not np.isfinite(alone).all() or alone.std() == 0:
        raise ReferenceFails("what it gives is not finite, or all the same")
    return alone, _run(model, role, [texts[at] for at in PADDED])


def _run(model: Any, role: str, texts: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    padding = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    ids = torch.full((len(texts), max(map(len, texts))), padding)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text), 1
    decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder and role == EMBEDDER else {}
    output = model(input_ids=ids, attention_mask=mask, **decoded)
    if role == RERANKER:
        return output.logits.double().numpy()
    if not hasattr(output, "last_hidden_state"):
        raise ReferenceFails(f"AutoModel makes it a {type(model).__name__}, which gives no hidden states")
    hidden, mask = output.last_hidden_state.double(), mask[..., None].double()
    return ((hidden * mask).sum(1) / mask.sum(1)).numpy()


def _texts(model_type: str) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(0)
    texts = [random.integers(5, 250, max(length, SHORTEST.get(model_type, 1))) for length in LENGTHS]
    for text in texts:
        text[-1] = shrink.SPECIAL_IDS["eos_token_id"]  # classifiers of encoder-decoders read the token that ends a text
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with the records; made or added to")
    parser.add_argument("--only", help="types, or types@roles, to run (again), with commas between")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", type=Path, help="write the table of all records into this document")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    records: dict[str, run.Record] = json.loads(options.out.read_text()) if options.out.exists() else {}
    chosen = [name for name in roles() if name not in records]
    if options.only:
        chosen = [
            name for each in options.only.split(",") for name in roles() if each in (name, name.partition("@")[0])
        ]
    for record in run.sweep(chosen, options.jobs, job):
        records[record["model_type"]] = record
        print(f"{record['model_type']:36} {record['outcome']:20} {record['reason'][:140]}", file=sys.stderr)
        run.write(options.out, json.dumps(dict(sorted(records.items())), indent=1))
    if options.table is not None:
        run.write(options.table, render.with_encoders(options.table.read_text(), records))
    print(json.dumps(Counter(record["outcome"] for record in records.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
