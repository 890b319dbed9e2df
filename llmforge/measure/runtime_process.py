"""Runs an engine folder in a runtime of others, in an environment that has no llmforge.

Run by its path, `PYTHON -I runtime_process.py RUNTIME [FOLDER]`; it imports nothing of llmforge. The first line of
standard output, as JSON, is {"versions": {…}} or {"lacks": WHY}. Without FOLDER that is all. Then it reads one request
a line, {"prompt": [ids], "answer": [ids], "tokens": N, "ends": [ids], "logits": FILE}, and replies with a line each,
{"answer": [ids]}: its own greedy answer of at most N tokens, to the end of the text. FILE gets the bytes of
fp32 [S, V], its logits in front of each of the S tokens of the request's `answer`, read one by one after the prompt.

A request {"ids": [ids], "step": N or null, "logits": FILE} asks for the logits after each of the ids, read N at a time,
or at once; the reply is {"tokens": S}.
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
    "transformers": ("transformers", "compressed-tensors", "torch"),
    "llama-cpp": ("llama-cpp-python",),
}
MODULES = {
    "onnxruntime-genai": "onnxruntime_genai",
    "optimum": "optimum.onnxruntime",
    "transformers": "compressed_tensors",
    "llama-cpp": "llama_cpp",
}


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


class Stepwise:
    """What reads token ids over a cache of its own; a subclass says how."""

    def restart(self) -> None:
        """Begin a new text."""
        raise NotImplementedError

    def step(self, ids: list[int]) -> Any:
        """Read on, and give the logits after each of `ids`, fp32 [S, V]."""
        raise NotImplementedError

    def answer(self, prompt: list[int], tokens: int, ends: list[int]) -> list[int]:
        """Continue `prompt` greedily by at most `tokens`."""
        self.restart()
        made: list[int] = []
        read = prompt
        while len(made) < tokens:
            made.append(int(self.step(read)[-1].argmax()))
            if made[-1] in ends:
                break
            read = made[-1:]
        return made

    def logits(self, prompt: list[int], answer: list[int]) -> Any:
        """Give the logits in front of each token of `answer`, fp32 [S, V]."""
        import numpy as np

        self.restart()
        return np.stack([self.step(prompt)[-1], *(self.step([token])[-1] for token in answer[:-1])])

    def text(self, ids: list[int], step: int | None) -> Any:
        """Give the logits after each of `ids`, fp32 [S, V], reading `step` at a time."""
        import numpy as np

        self.restart()
        size = step or len(ids)
        return np.concatenate([self.step(ids[at : at + size]) for at in range(0, len(ids), size)])


class Transformers(Stepwise):
    """A checkpoint of compressed-tensors in transformers, in fp32 arithmetic.

    Weights are dequantized as they are loaded, which takes zero points (as codes, transformers 5.23 loads none), unless
    layers round what they read.
    """

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, CompressedTensorsConfig

        self._torch = torch
        described = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        rounds = any(group["input_activations"] for group in described["config_groups"].values())
        self._model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            quantization_config=CompressedTensorsConfig(dequantize=not rounds),
        )
        self._model.train(False)

    def restart(self) -> None:
        """Begin a new text."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)

    def step(self, ids: list[int]) -> Any:
        """Read on, and give the logits after each of `ids`, fp32 [S, V]."""
        with self._torch.no_grad():
            out = self._model(input_ids=self._torch.tensor([ids]), past_key_values=self._cache, use_cache=True)
        return out.logits[0].float().numpy()


class LlamaCpp(Stepwise):
    """A GGUF file in llama.cpp, on the CPU, with a cache in fp32."""

    CONTEXT = 4096

    def __init__(self, folder: str) -> None:
        import ctypes

        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        [file] = Path(folder).glob("*.gguf")
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError("llama.cpp does not load the file")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = self.CONTEXT
        settings.n_threads = settings.n_threads_batch = os.cpu_count() or 1
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which rounds to fp16
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(self.CONTEXT, 0, 1)
        self._read = 0

    def restart(self) -> None:
        """Begin a new text."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._read = 0

    def step(self, ids: list[int]) -> Any:
        """Read on, and give the logits after each of `ids`, fp32 [S, V]."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.logits[at] = token, self._read + at, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp failed to run the file")
        self._read += len(ids)
        made = self._api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(made, (len(ids), self._vocabulary)).copy()


ENGINES: dict[str, Any] = {
    "onnxruntime-genai": Genai,
    "optimum": Optimum,
    "transformers": Transformers,
    "llama-cpp": LlamaCpp,
}


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
    engine = ENGINES[runtime](folder)
    for line in sys.stdin:
        asked = json.loads(line)
        if "ids" in asked:
            engine.text(asked["ids"], asked["step"]).astype("<f4").tofile(asked["logits"])
            reply.write(json.dumps({"tokens": len(asked["ids"])}) + "\n")
            reply.flush()
            continue
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
