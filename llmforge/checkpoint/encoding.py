"""What a checkpoint says that it gives for a text: an embedding, or scores; told by the files that lie in its folder.

A folder of sentence-transformers has `modules.json`: a Transformer, Pooling, perhaps Dense layers and Normalize, each
with a folder of its own, and prompts in `config_sentence_transformers.json`. Without that file, the model's class says
it: `…ForSequenceClassification` scores, and what has no head, or one for masked tokens, embeds by the mean of its
tokens, as sentence-transformers does where nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmforge.base import small_file
from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.pair_template import PairTemplate
from llmforge.base.wording import cut, shown
from llmforge.checkpoint import tokenizer_files
from llmforge.checkpoint.safetensors_file import DAMAGED, read_small

MODULES = "modules.json"
TRANSFORMER = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
_POOLINGS = {  # the field of Pooling's configuration → the mode of llmforge::PoolSequences; in the order of its output
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_NAMED = {"mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}  # what newer ones call otherwise
QWEN3 = "qwen3"
# Causal models that score pairs: what a pair is written as. Qwen3-Reranker's as its model card has it, with its
# instruction for searches (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
RERANKERS = {
    QWEN3: PairTemplate(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        "web search query, retrieve relevant passages that answer the query\n<Query>: ",
        "\n<Document>: ",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
}
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling: its folder, sizes, and activation."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str  # of ACTIVATIONS

    @property
    def weights(self) -> str:
        """The file of its tensors, relative to the checkpoint."""
        return f"{self.folder}/model.safetensors"


@dataclass(frozen=True)
class Answers:
    """Tokens whose logits behind a pair are its score: that of `yes`, less that of `no`."""

    yes: int
    no: int


@dataclass(frozen=True)
class Encoding:
    """What a checkpoint gives for a text."""

    kind: Literal["embedder", "reranker"]
    pooling: str = "mean"  # of an embedder: modes of llmforge::PoolSequences, one behind the other, with + between
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    answers: Answers | None = None  # of a causal model that scores a pair: its words for relevant and not
    template: PairTemplate | None = None  # of its pairs; None: two texts, as its tokenizer joins them
    max_tokens: int | None = None  # of a text, as sentence-transformers cuts it; None: as long as the model allows
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    files: tuple[str, ...] = ()  # that say this, relative to the checkpoint

    @property
    def title(self) -> str:
        """What the checkpoint is, for a reader."""
        return "an embedder" if self.kind == "embedder" else "a reranker"


def encoding_of(folder: Path, settings: Mapping[str, Any], reranker: str | None = None) -> Encoding | None:
    """Read what the checkpoint in `folder` gives, whose `config.json` has `settings`; None: it is a language model.

    `reranker` names one of `RERANKERS`, as which a causal model scores; None: as its files say.

    Raises:
        CheckpointError: a file cannot be read.
        UnsupportedError: a module is of a kind that is not compiled, or no causal model is there for `reranker`.
    """
    if reranker is not None or settings.get("is_original_qwen3_reranker") is True:  # vLLM's key of a configuration
        return _by_answers(folder, settings, RERANKERS[reranker or QWEN3])
    if (folder / MODULES).is_file():
        return _sentence_transformers(folder)
    names = settings.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith("ForSequenceClassification"):
        return Encoding("reranker", "cls")
    headless = name.endswith(("Model", "Encoder")) and not name.endswith(("LMHeadModel", "DoubleHeadsModel"))
    return Encoding("embedder") if headless or name.endswith(("ForMaskedLM", "ForPreTraining")) else None


def _by_answers(folder: Path, settings: Mapping[str, Any], template: PairTemplate) -> Encoding:
    """Let a causal model score pairs by its words for yes and no.

    Raises:
        CheckpointError: its tokenizer has no such token.
        UnsupportedError: it is no causal model.
    """
    names = settings.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not name.endswith(("ForCausalLM", "ForSequenceClassification")) or (folder / MODULES).is_file():
        raise UnsupportedError(
            f"{folder}: {MODULES if (folder / MODULES).is_file() else cut(name) or 'no class'}; only a causal language "
            "model (…ForCausalLM) answers with yes or no",
            hint="leave `reranker` out: what this checkpoint gives is told by its files",
        )
    tokenizer = tokenizer_files.load(folder)
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    if yes is None or no is None:
        raise CheckpointError(f"{folder}: its tokenizer has no tokens 'yes' and 'no', which score a pair")
    return Encoding("reranker", "last", answers=Answers(yes, no), template=template)


def _sentence_transformers(folder: Path) -> Encoding:
    """Read the modules of a folder of sentence-transformers."""
    modules = _read(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CheckpointError(f"{folder / MODULES}: expected a list of modules")
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    paths = [_below(folder, str(each.get("path", ""))) for each in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Dense", "Normalize"} or "Normalize" in kinds[2:-1]:
        raise UnsupportedError(
            f"{folder / MODULES}: modules {cut(', '.join(kinds))}; compiled are Transformer, Pooling, any Dense, and "
            "Normalize at the end"
        )
    if paths[0]:
        raise UnsupportedError(f"{folder / MODULES}: its Transformer lies in {cut(paths[0])}, not in the folder itself")
    files = [MODULES, f"{paths[1]}/config.json"]
    dense = [_dense(folder, path) for path, kind in zip(paths, kinds, strict=True) if kind == "Dense"]
    files += [f"{each.folder}/config.json" for each in dense]
    given = {}
    for name in (TRANSFORMER, PROMPTS):
        given[name] = _read(folder / name) if (folder / name).is_file() else {}
        files += [name] * (folder / name).is_file()
    longest, prompts = given[TRANSFORMER].get("max_seq_length"), given[PROMPTS].get("prompts") or {}
    default = given[PROMPTS].get("default_prompt_name")
    return Encoding(
        "embedder",
        _pooling(folder / paths[1] / "config.json"),
        tuple(dense),
        normalize=kinds[-1] == "Normalize",
        max_tokens=longest if isinstance(longest, int) else None,
        prompts={str(name): str(text) for name, text in prompts.items()},
        default_prompt=default if isinstance(default, str) else None,
        files=tuple(files),
    )


def _pooling(file: Path) -> str:
    settings = _read(file)
    named = settings.get("pooling_mode")
    if named is not None:  # as newer ones write it
        chosen = [_NAMED.get(named, named)] if isinstance(named, str) else []
    else:
        given = {"pooling_mode_mean_tokens": True, **settings}  # sentence-transformers' default
        chosen = [mode for name, mode in _POOLINGS.items() if given.get(name)]
    if not chosen or chosen[0] not in _POOLINGS.values():
        raise UnsupportedError(
            f"{file}: pools by {shown(named) if named is not None else 'nothing'}; compiled are "
            f"{', '.join(_POOLINGS.values())}"
        )
    if settings.get("include_prompt", True) is not True:
        raise UnsupportedError(
            f"{file}: include_prompt is {shown(settings['include_prompt'])}; prompts are pooled, too"
        )
    return "+".join(chosen)


def _dense(folder: Path, path: str) -> Dense:
    settings = _read(folder / path / "config.json")
    activation = ACTIVATIONS.get(str(settings.get("activation_function")))
    inputs, outputs = settings.get("in_features"), settings.get("out_features")
    if activation is None:
        raise UnsupportedError(
            f"{folder / path}: activation {shown(settings.get('activation_function'))}; known are "
            f"{', '.join(ACTIVATIONS)}"
        )
    if not (isinstance(inputs, int) and isinstance(outputs, int)):
        raise CheckpointError(f"{folder / path}: in_features and out_features are numbers")
    if not (folder / path / "model.safetensors").is_file():
        raise CheckpointError(f"{folder / path}: model.safetensors is missing; other formats run code when read")
    return Dense(path, inputs, outputs, bool(settings.get("bias", True)), activation)


def _below(folder: Path, path: str) -> str:
    """Return the path of a module, which must not lead out of the checkpoint."""
    if path and (Path(path).name != path or path in (".", "..") or "\0" in path):
        raise CheckpointError(f"{folder / MODULES}: {shown(path)} is no folder of the checkpoint")
    return path


def _read(file: Path) -> Any:
    return small_file.parse_json(read_small(file), file, error=CheckpointError, hint=DAMAGED)
