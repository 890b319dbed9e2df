"""Tokenize lines with llama.cpp: a folder of GGUF files that hold a vocabulary alone, and lines.json in it.

Writes the ids of every line by the name of the file, as JSON, to tokens.json in that folder. Special tokens are parsed;
none is put in front.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp


def tokens(vocabulary: object, line: str) -> list[int]:
    """Tokenize one line."""
    data = line.encode()
    found = (ctypes.c_int32 * (len(data) + 8))()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), found, len(found), False, True)
    if count < 0:
        raise ValueError(f"{line!r} has more tokens than bytes")
    return list(found[:count])


def main(folder: Path) -> None:
    """Tokenize for every file in `folder`."""
    lines = json.loads((folder / "lines.json").read_text())
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    made = {}
    for file in sorted(folder.glob("*.gguf")):
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        if not model:
            raise ValueError(f"{file}: llama.cpp does not load it")
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        made[file.stem] = [tokens(vocabulary, line) for line in lines]
        llama_cpp.llama_model_free(model)
    (folder / "tokens.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
