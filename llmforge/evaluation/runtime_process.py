"""Runs an engine folder in onnxruntime-genai or optimum-onnx, in an environment that has no llmforge.

Run by its path, `PYTHON -I runtime_process.py RUNTIME [FOLDER]`; it imports nothing of llmforge. The first line of
standard output, as JSON, is {"versions": {…}} or {"lacks": WHY}. Without FOLDER that is all. Then it reads one request
a line, {"prompt": [ids], "answer": [ids], "tokens": N, "ends": [ids], "logits": FILE}, and replies with a line each,
{"answer": [ids]}: its own greedy answer of at most N tokens, to the end of the text. FILE gets the bytes of
fp32 [S, V], its logits in front of each of the S tokens of the request's `answer`, read one by one after the prompt.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

PACKAGES = {
    "onnxruntime-genai": ("onnxruntime-genai", "onnxruntime"),
    "optimum": ("optimum-onnx", "optimum", "transformers", "torch", "onnxruntime"),
}
MODULES = {"onnxruntime-genai": "onnxruntime_genai", "optimum": "optimum.onnxruntime"}


class Genai:
    """onnxruntime-genai."""

    def __init__(self, folder: str) -> None:
        import onnxruntime_genai

        self._og = onnxruntime_genai
        self._model = onnxruntime_genai.Model(folder)

    def _generator(self, prompt: list[int], tokens: int) -> Any:
        import numpy as np

        params = self._og.GeneratorParams(self._model)
        greedy = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
        params.set_search_options(max_length=len(prompt) + tokens, batch_size=1, **greedy)
        generator = self._og.Generator(self._model, params)
        generator.append_tokens(np.array([prompt], np.int32))
        return generator

    def answer(self, prompt: list[int], tokens: int, ends: list[int]) -> list[int]:
        """Continue `prompt` greedily by at most `tokens`."""
        generator = self._generator(prompt, tokens)
        made: list[int] = []
        while len(made) < tokens and not generator.is_done():
            generator.generate_next_token()
            made.append(int(generator.get_next_tokens()[0]))
        return made

    def logits(self, prompt: list[int], answer: list[int]) -> Any:
        """Give the logits in front of each token of `answer`, fp32 [S, V]."""
        import numpy as np

        generator = self._generator(prompt, len(answer))
        rows = [np.array(generator.get_logits())[0, -1]]
        for token in answer[:-1]:
            generator.append_tokens(np.array([[token]], np.int32))
            rows.append(np.array(generator.get_logits())[0, -1])
        return np.stack(rows)


class Optimum:
    """ORTModelForCausalLM of optimum-onnx."""

    def __init__(self, folder: str) -> None:
        import torch
        from optimum.onnxruntime import ORTModelForCausalLM

        self._torch = torch
        self._model = ORTModelForCausalLM.from_pretrained(folder)

    def answer(self, prompt: list[int], tokens: int, ends: list[int]) -> list[int]:
        """Continue `prompt` greedily by at most `tokens`."""
        from transformers import GenerationConfig

        pad = ends[0] if ends else 0
        self._model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=pad)  # type: ignore[no-untyped-call]
        ids = self._torch.tensor([prompt])
        with self._torch.no_grad():
            made = self._model.generate(
                input_ids=ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
        return [int(token) for token in made[0, len(prompt) :]]

    def logits(self, prompt: list[int], answer: list[int]) -> Any:
        """Give the logits in front of each token of `answer`, fp32 [S, V]."""
        import numpy as np

        rows, past, read = [], None, 0
        for step in ([*prompt], *([token] for token in answer[:-1])):
            read += len(step)
            mask = self._torch.ones((1, read), dtype=self._torch.int64)
            more: dict[str, Any] = {} if past is None else {"past_key_values": past}
            with self._torch.no_grad():
                out = self._model(input_ids=self._torch.tensor([step]), attention_mask=mask, use_cache=True, **more)
            past = out.past_key_values
            rows.append(out.logits[0, -1].numpy())
        return np.stack(rows)


def versions(runtime: str) -> dict[str, str]:
    """Tell the versions of what is installed, and of Python."""
    found = {"python": platform.python_version()}
    for package in PACKAGES[runtime]:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def serve(runtime: str, folder: str, reply: TextIO) -> None:
    """Load `folder` and answer one request after the other, until there are no more."""
    engine = Genai(folder) if runtime == "onnxruntime-genai" else Optimum(folder)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = engine.answer(asked["prompt"], asked["tokens"], asked["ends"])
        engine.logits(asked["prompt"], asked["answer"]).astype("<f4").tofile(asked["logits"])
        reply.write(json.dumps({"answer": answer}) + "\n")
        reply.flush()


def main() -> int:
    """Say what is here, and serve; libraries that print do so on standard error."""
    runtime, *folder = sys.argv[1:]
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    first: dict[str, Any]
    try:
        importlib.import_module(MODULES[runtime])
        first = {"versions": versions(runtime)}
    except ImportError as error:
        first = {"lacks": str(error)}
    reply.write(json.dumps(first) + "\n")
    reply.flush()
    if folder and "lacks" not in first:
        serve(runtime, str(Path(folder[0])), reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
