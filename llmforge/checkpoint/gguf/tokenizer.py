"""The tokenizer of a GGUF file, as transformers makes it of the metadata: the text of a tokenizer.json.

Private: transformers offers it only for a whole checkpoint. A test checks that its function still exists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmforge.base import process
from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.wording import shown
from llmforge.checkpoint.gguf.header import Header
from llmforge.checkpoint.safetensors_file import DAMAGED

# Keys behind `tokenizer.`, and what transformers' builders call them (its GGUF_TOKENIZER_MAPPING): kind of value.
_LISTS = {"ggml.tokens": ("tokens", str), "ggml.merges": ("merges", str)} | {
    "ggml.scores": ("scores", float),
    "ggml.token_type": ("token_type", int),
}
_KINDS = {"ggml.model": "tokenizer_type", "ggml.pre": "pre_tokenizer_type"}
_TAKEN = ("gpt2", "llama")  # byte-level BPE, and SentencePiece's BPE
# Of byte-level BPE, `tokenizer.ggml.pre` names how text is split. llama.cpp's src/llama-vocab.cpp says of which it
# takes whole words that are tokens before it merges, and puts BOS in front where no key says otherwise.
_GPT2_SPLITS = ("gpt-2", "phi-2")
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def tokenizer_json(header: Header) -> str:
    """Let transformers make the tokenizer: imports it.

    Raises:
        UnsupportedError: it is of a kind that is not taken.
        CheckpointError: its parts make no sense.
    """
    given = _parts(header)
    if given["tokenizer_type"] not in _TAKEN:
        raise UnsupportedError(
            f"{header.file}: tokenizer.ggml.model is {shown(given['tokenizer_type'])}; taken are {', '.join(_TAKEN)}",
            hint="take the model's original checkpoint",
        )
    process.import_whole("transformers")
    from tokenizers import processors
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    split = given.get("pre_tokenizer_type")
    known = sorted({*_GPT2_SPLITS, *mapping.GGUF_PRE_TOKENIZER_SPLITS})
    if given["tokenizer_type"] == "gpt2" and split not in known:
        raise UnsupportedError(
            f"{header.file}: tokenizer.ggml.pre is {shown(split)}: how it splits text is not known here; taken are "
            f"{', '.join(known)}",
            hint="take the model's original checkpoint",
        )
    settings = tokenizer_config(header)
    try:
        backend, _ = mapping.convert_gguf_tokenizer(header.architecture, given)
        if split in _WHOLE_WORDS:
            model = backend.model
            model.ignore_merges = True
            backend.model = model
        if settings["add_bos_token"]:
            bos = settings["bos_token"]
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, given["tokens"].index(bos))]
            )
    except Exception as error:  # its builders and tokenizers raise nothing more specific
        raise CheckpointError(
            f"{header.file}: transformers cannot make its tokenizer: {type(error).__name__}: {error}", hint=DAMAGED
        ) from error
    text: str = backend.to_str()
    return text


def tokenizer_config(header: Header) -> dict[str, Any]:
    """Return what stands in the tokenizer_config.json of the same model.

    Raises:
        CheckpointError: a special token is none of the vocabulary.
        UnsupportedError: texts do not begin with a space.
    """
    tokens, metadata = _parts(header)["tokens"], header.metadata
    made: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        identity = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if identity is None:
            continue
        if type(identity) is not int or not 0 <= identity < len(tokens):
            raise CheckpointError(
                f"{header.file}: tokenizer.ggml.{key}_token_id is {shown(identity)}; there are {len(tokens)} tokens",
                hint=DAMAGED,
            )
        made[name] = tokens[identity]
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or split in _WHOLE_WORDS)
    made["add_bos_token"] = bool(adds_bos) and "bos_token" in made
    if (
        kind == "llama"
        and not metadata.get("tokenizer.ggml.add_space_prefix", True)
        and "gemma" not in header.architecture
    ):
        raise UnsupportedError(
            f"{header.file}: tokenizer.ggml.add_space_prefix is false, which is not taken of {header.architecture}",
            hint="take the model's original checkpoint",
        )
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        made["chat_template"] = template
    return made


def _parts(header: Header) -> dict[str, Any]:
    """Return what transformers' builders take, each of its kind.

    Raises:
        CheckpointError: a part is missing, or of another kind or length.
    """
    metadata: Mapping[str, Any] = header.metadata
    made: dict[str, Any] = {}
    for key, name in _KINDS.items():
        value = metadata.get(f"tokenizer.{key}")
        if value is not None:
            made[name] = str(value)
    for key, (name, kind) in _LISTS.items():
        value = metadata.get(f"tokenizer.{key}")
        if value is None:
            continue
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise CheckpointError(f"{header.file}: tokenizer.{key} must be a list of {kind.__name__}", hint=DAMAGED)
        made[name] = value
    if "tokenizer_type" not in made or not made.get("tokens"):
        raise CheckpointError(f"{header.file}: has no tokenizer: no tokenizer.ggml.model or tokens", hint=DAMAGED)
    if made["tokenizer_type"] == "gpt2":
        made.setdefault("merges", [])  # of bytes alone
    for name in ("scores", "token_type"):
        if name in made and len(made[name]) != len(made["tokens"]):
            raise CheckpointError(
                f"{header.file}: {len(made['tokens'])} tokens, and {len(made[name])} of tokenizer.ggml.{name}",
                hint=DAMAGED,
            )
    return made


def dump(settings: Mapping[str, Any]) -> str:
    """Write settings as JSON, always the same way."""
    return json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
