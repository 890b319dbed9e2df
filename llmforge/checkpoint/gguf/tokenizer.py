"""The tokenizer of a GGUF file: the text of a tokenizer.json, made of its metadata.

Byte-level BPE is put together here, as llama.cpp's src/llama-vocab.cpp does it. SentencePiece's BPE is what
transformers makes of it: private, for it offers that only for a whole checkpoint; a test checks that its function still
exists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmforge.base import process
from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.wording import quoted, shown
from llmforge.checkpoint.gguf.header import Header
from llmforge.checkpoint.gguf.splits import INEXPRESSIBLE, SPLITS, TextSplit
from llmforge.checkpoint.safetensors_file import DAMAGED, listed

# Keys behind `tokenizer.`, and what transformers' builders call them (its GGUF_TOKENIZER_MAPPING): kind of value.
_LISTS = {"ggml.tokens": ("tokens", str), "ggml.merges": ("merges", str)} | {
    "ggml.scores": ("scores", float),
    "ggml.token_type": ("token_type", int),
}
_KINDS = {"ggml.model": "tokenizer_type", "ggml.pre": "pre_tokenizer_type"}
_TAKEN = ("gpt2", "llama")  # byte-level BPE, and SentencePiece's BPE
_SPECIAL_TYPES = (2, 3)  # of tokens (LLAMA_TOKEN_TYPE_…): unknown and control
_USER_DEFINED = 4  # found in a text as a whole, too
_UNDERLINE = "\u2581"
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
    settings = tokenizer_config(header)
    split = given.get("pre_tokenizer_type")
    if given["tokenizer_type"] == "gpt2" and split not in SPLITS:
        raise UnsupportedError(
            f"{header.file}: tokenizer.ggml.pre is {shown(split)}: {_why_not(split)}",
            hint="take the model's original checkpoint",
        )
    process.import_whole("transformers")
    from tokenizers import processors

    try:
        made = _byte_level(given, SPLITS[str(split)]) if given["tokenizer_type"] == "gpt2" else _theirs(header, given)
        if settings["add_bos_token"]:
            bos = settings["bos_token"]
            made.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, given["tokens"].index(bos))]
            )
    except Exception as error:  # the builders of transformers and tokenizers raise nothing more specific
        raise CheckpointError(
            f"{header.file}: its tokenizer cannot be made: {type(error).__name__}: {error}", hint=DAMAGED
        ) from error
    text: str = made.to_str()
    return text


def _why_not(split: str | None) -> str:
    if split is None:
        return "how it splits text is not said, and llama.cpp warns of what it takes instead"
    if split in INEXPRESSIBLE:
        return INEXPRESSIBLE[split]
    return f"how it splits text is not known here; docs/checkpoints.md has the {len(SPLITS)} names that are taken"


def _theirs(header: Header, given: dict[str, Any]) -> Any:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    return mapping.convert_gguf_tokenizer(header.architecture, given)[0]


def _byte_level(given: Mapping[str, Any], split: TextSplit) -> Any:
    """Put a tokenizers.Tokenizer together.

    Raises:
        ValueError, Exception: a token appears twice, a merge is no pair of tokens, or bytes have no tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens, kinds = given["tokens"], given.get("token_type", [])
    vocabulary = {token or f"[EMPTY_{index}]": index for index, token in enumerate(tokens)}  # as llama.cpp names it
    if len(vocabulary) < len(tokens):
        raise ValueError(f"{len(tokens) - len(vocabulary)} tokens appear more than once")
    missing = (
        []
        if split.bytes_as_characters
        else [name for name in map("<0x{:02X}>".format, range(256)) if name not in vocabulary]
    )
    if missing:
        raise ValueError(f"bytes without a token: {listed(missing)}")
    model = models.BPE(
        vocabulary,
        [_pair(merge) for merge in given["merges"]],
        ignore_merges=split.whole_words,
        byte_fallback=not split.bytes_as_characters,
    )
    made = Tokenizer(model)
    pieces: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    if split.bytes_as_characters:
        pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        made.decoder = decoders.ByteLevel()
    else:
        made.decoder = decoders.Sequence([decoders.Replace(_UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    if split.spaces_as_underlines:
        made.normalizer = normalizers.Replace(" ", _UNDERLINE)
    found = [
        AddedToken(token, normalized=False, special=kind in _SPECIAL_TYPES)
        for token, kind in zip(tokens, kinds, strict=False)
        if token and (kind in _SPECIAL_TYPES or kind == _USER_DEFINED)
    ]
    for special in (True, False):
        added = [token for token in found if token.special is special]
        if added:
            (made.add_special_tokens if special else made.add_tokens)(added)
    return made


def _pair(merge: str) -> tuple[str, str]:
    """Split a merge at the first space that is not its first character, as llama.cpp does."""
    left, space, right = merge[1:].partition(" ")
    if not space:
        raise ValueError(f"the merge {quoted(merge)} is no pair")
    return merge[:1] + left, right


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
    known = SPLITS.get(str(split))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or (known is not None and known.adds_bos))
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
