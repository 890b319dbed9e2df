"""The bytes that each token of a tokenizer stands for."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space


def _byte_level_alphabet() -> dict[str, int]:
    """Characters that byte-level BPE writes bytes as: printable Latin-1 as it is, the others from U+0100 on.

    Source: `bytes_to_unicode` of GPT-2's encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """Gives the bytes of token ids of one tokenizer, byte-level BPE or SentencePiece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and _uses(json.loads(decoder.__getstate__()), "ByteLevel")

    def of(self, token: int) -> bytes:
        """Give the bytes of a token id, none of one that the tokenizer has no text for (padding of the vocabulary)."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level and all(character in _ALPHABET for character in piece):
            return bytes(_ALPHABET[character] for character in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_METASPACE, " ").encode()


def _uses(decoder: Any, kind: str) -> bool:
    """Say whether a decoder, as JSON, is of a type or a sequence that has one."""
    return decoder.get("type") == kind or any(_uses(part, kind) for part in decoder.get("decoders", ()))
