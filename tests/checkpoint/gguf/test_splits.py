"""How byte-level BPE splits text under each `tokenizer.ggml.pre`, against llama.cpp's own tokenizer.

splits.json holds what llama.cpp of llama-cpp-python 0.3.36 makes of lines.HARD with a vocabulary that
joins them. `python -m tests.checkpoint.gguf.test_splits PYTHON` writes it again, by an
interpreter that has that package.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint.gguf import read, tokenizer
from llmforge.checkpoint.gguf.splits import APPROXIMATED, INEXPRESSIBLE, SPLITS

from ...models import smollm2
from ...models.gguf_files import ARRAY, F32, STRING, UINT32, gguf, value
from ...models.runtimes import RUNTIMES, environment
from .lines import HARD, many

RECORDED = Path(__file__).with_name("splits.json")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def respelled(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The same vocabulary with U+2581 for a space and a token for each byte, as SentencePiece has them."""
    tokens, kinds, merges = (keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    return {
        **keys,
        "tokenizer.ggml.tokens": [token.replace("Ġ", "▁") for token in tokens] + BYTES,
        "tokenizer.ggml.token_type": [*kinds, *[6] * 256],
        "tokenizer.ggml.merges": [merge.replace("Ġ", "▁") for merge in merges],
    }


def vocabulary_file(keys: Mapping[str, Any], name: str) -> bytes:
    """The bytes of a GGUF file with that vocabulary, a split of that name, and a row of a matrix."""
    spelled = keys if name not in SPLITS or SPLITS[name].bytes_as_characters else respelled(keys)
    lists = {
        f"tokenizer.ggml.{key}": value(ARRAY, (kind, spelled[f"tokenizer.ggml.{key}"]))
        for key, kind in (("tokens", STRING), ("token_type", 5), ("merges", STRING))
    }
    more = {
        "general.architecture": value(STRING, "llama"),
        "tokenizer.ggml.model": value(STRING, "gpt2"),
        "tokenizer.ggml.pre": value(STRING, name),
        "tokenizer.ggml.bos_token_id": value(UINT32, 0),
        "tokenizer.ggml.eos_token_id": value(UINT32, 0),
    }
    return gguf({**more, **lists}, [("token_embd.weight", (1, 32), F32, bytes(128))])


def write_all(keys: Mapping[str, Any], folder: Path) -> None:
    """Write such a file for every name that is taken."""
    for name in SPLITS:
        (folder / f"{name}.gguf").write_bytes(vocabulary_file(keys, name))


def ours(folder: Path, lines: list[str]) -> dict[str, list[list[int]]]:
    """Tokenize with the tokenizer that a build makes of each file in `folder`."""
    made = {}
    for file in sorted(folder.glob("*.gguf")):
        taken = Tokenizer.from_str(tokenizer.tokenizer_json(read(file)))
        made[file.stem] = [found.ids for found in taken.encode_batch(lines, add_special_tokens=False)]
    return made


def theirs(python: Path, folder: Path, lines: list[str]) -> dict[str, list[list[int]]]:
    """Tokenize with llama.cpp."""
    (folder / "lines.json").write_text(json.dumps(lines))
    subprocess.run([python, RUNTIMES / "llama_cpp_tokens.py", folder], check=True)
    made: dict[str, list[list[int]]] = json.loads((folder / "tokens.json").read_text())
    return made


def long_keys() -> dict[str, Any]:
    """A vocabulary whose merges join the whole hard lines, by twos: where a text is split, none reaches across."""
    spelling = ByteLevel(add_prefix_space=False, use_regex=False)
    rows = [list("".join(piece for piece, _ in spelling.pre_tokenize_str(line))) for line in HARD]
    tokens = sorted(ByteLevel.alphabet())
    merges: dict[str, tuple[str, str]] = {}
    for _ in range(5):
        pairs = {pair for row in rows for pair in pairwise(row)}
        for left, right in sorted(pairs, key=lambda pair: crc32("".join(pair).encode())):  # in no order of the text
            merges.setdefault(left + right, (left, right))
        rows = [["".join(row[at : at + 2]) for at in range(0, len(row), 2)] for row in rows]
    tokens += [token for token in merges if token not in set(tokens)]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges.values()],
    }


def write_recorded(python: Path) -> None:
    """Record what llama.cpp makes of the hard lines, each different result once."""
    with tempfile.TemporaryDirectory() as folder:
        write_all(long_keys(), Path(folder))
        found = theirs(python, Path(folder), HARD)
    different: list[list[list[int]]] = []
    for ids in found.values():
        if ids not in different:
            different.append(ids)
    names = {name: different.index(ids) for name, ids in sorted(found.items())}
    RECORDED.write_text(json.dumps({"names": names, "ids": different}, separators=(",", ":")) + "\n")


@pytest.fixture(scope="module")
def keys() -> dict[str, Any]:
    return long_keys()


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_hard_lines_get_the_tokens_that_llama_cpp_gives_them(
    name: str, keys: dict[str, Any], recorded: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.gguf").write_bytes(vocabulary_file(keys, name))
    found = ours(tmp_path, HARD)[name]
    assert found == recorded["ids"][recorded["names"][name]]


def test_each_name_is_recorded(recorded: dict[str, Any]) -> None:
    assert set(recorded["names"]) == set(SPLITS)
    assert set(APPROXIMATED) <= set(SPLITS)
    assert not set(INEXPRESSIBLE) & set(SPLITS)


def test_hard_lines_tell_splits_apart(recorded: dict[str, Any]) -> None:
    """Nearly every two differ in a line, or a mistake in one would not show."""
    results = {(split.patterns, split.whole_words): recorded["names"][name] for name, split in SPLITS.items()}
    assert len(results) - len(set(results.values())) <= 2  # bailingmoe splits all texts as qwen2 does


def test_special_tokens_are_whole_whatever_their_characters(keys: dict[str, Any], tmp_path: Path) -> None:
    """DeepSeek's have some that no byte is spelled with."""
    more = {"<｜User｜>": 3, "<think>": 4, "<｜unused▁token｜>": 1}
    tokens, kinds = (list(keys[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    lists = {"tokenizer.ggml.tokens": [*tokens, *more], "tokenizer.ggml.token_type": [*kinds, *more.values()]}
    file = tmp_path / "vocabulary.gguf"
    file.write_bytes(vocabulary_file({**keys, **lists}, "deepseek-v3"))
    made = Tokenizer.from_str(tokenizer.tokenizer_json(read(file)))
    found = made.encode("<｜User｜>a<think>")
    assert found.ids == [len(tokens), tokens.index("a"), len(tokens) + 1]
    assert made.decode(found.ids) == "a<think>"
    assert made.decode(found.ids, skip_special_tokens=False) == "<｜User｜>a<think>"
    assert len(made.encode("<｜unused▁token｜>").ids) > 1  # an ordinary token is spelled in bytes
    assert made.get_vocab_size() == len(tokens) + len(more)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": ["a", "b", "a"]}, "1 tokens appear more than once"),
        ({"tokens": ["a", "b", ""], "merges": ["ab"]}, "the merge 'ab' is no pair"),
    ],
)
def test_a_vocabulary_that_makes_no_sense_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    keys = {"tokens": ["a", "b", ""], "merges": [], **change}
    file = tmp_path / "vocabulary.gguf"
    given = {f"tokenizer.ggml.{key}": found for key, found in {**keys, "token_type": [1] * 3}.items()}
    file.write_bytes(vocabulary_file(given, "gpt-2"))
    with pytest.raises(CheckpointError, match=said):
        tokenizer.tokenizer_json(read(file))


def test_bytes_need_tokens_where_no_character_stands_for_them(keys: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.gguf"
    file.write_bytes(vocabulary_file(keys, "sarvam-moe").replace(b"<0x0A>", b"<0xZZ>"))
    with pytest.raises(CheckpointError, match="bytes without a token: '<0x0A>'"):
        tokenizer.tokenizer_json(read(file))


@pytest.mark.parametrize("name", sorted(INEXPRESSIBLE))
def test_what_cannot_be_expressed_is_refused(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.gguf"
    file.write_bytes(vocabulary_file(keys, name))
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.tokenizer_json(read(file))
    assert f'tokenizer.ggml.pre is "{name}": {INEXPRESSIBLE[name]}' in caught.value.message


def test_the_documentation_has_all_names() -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    assert ", ".join(f"`{name}`" for name in sorted(SPLITS)) in page
    assert ", ".join(f"`{name}`" for name in APPROXIMATED) in page
    assert all(f"`{name}`" in page for name in INEXPRESSIBLE)


@pytest.mark.slow  # two minutes of llama.cpp on 2,000 lines under 86 names, and its compilation where none is kept
@pytest.mark.timeout(3600)
def test_lines_get_the_tokens_that_llama_cpp_gives_them(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("environments")
    python, lines = environment("llama_cpp", scratch), many(2000)
    write_all(read(smollm2.gguf()).metadata, tmp_path)
    wanted, found = theirs(python, tmp_path, lines), ours(tmp_path, lines)
    assert set(found) == set(wanted) == set(SPLITS)
    differ = {
        name: [line for line, a, b in zip(lines, found[name], wanted[name], strict=True) if a != b] for name in found
    }
    assert not {name: wrong[:3] for name, wrong in differ.items() if wrong}
    assert sum(map(len, found["smollm"])) > 100_000


if __name__ == "__main__":
    write_recorded(Path(sys.argv[1]))
