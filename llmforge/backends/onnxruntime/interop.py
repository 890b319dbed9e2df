"""Files that runtimes of others want beside `model.onnx`, so that they load an engine folder unchanged.

- A graph of the pass genai-interface: `genai_config.json` and the tokenizer, for `onnxruntime_genai.Model(folder)`;
  and what optimum-onnx wants, where it would read the model right.
- A graph of optimum-interface: `config.json`, `generation_config.json` and the tokenizer, for
  `ORTModelForCausalLM.from_pretrained(folder)` of optimum-onnx.

Which of the two a graph is for is read off its inputs. The same model and checkpoint give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from llmforge.backends.engines import BuiltEngine
from llmforge.backends.onnxruntime.builder import tokenizer_files
from llmforge.base import small_file
from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph, interface
from llmforge.ir.operators import cpu
from llmforge.ir.operators.contrib import GroupQueryAttention
from llmforge.runtime.config import MODEL_FILE

GENAI_FILE = "genai_config.json"
OPTIMUM_FILES = ("config.json", "generation_config.json")

# Search options of onnxruntime-genai that a checkpoint's generation_config.json names alike.
_SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size")

# How optimum-onnx 0.1.0 (optimum/onnxruntime/modeling_decoder.py, ORTModelForCausalLM.__init__) tells the shape of an
# empty cache from a configuration, by model_type: these read head_dim, others hidden_size / num_attention_heads …
_OPTIMUM_HEAD_DIM = frozenset({"gemma", "gemma3_text", "gpt_oss", "nemotron"})
# … and these read num_key_value_heads, others num_attention_heads.
_OPTIMUM_KV_HEADS = frozenset(
    {
        *("arcee", "cohere", "deepseek_v3", "gemma", "gemma3_text", "glm", "gpt_oss", "granite", "helium", "llama"),
        *("mistral", "nemotron", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm"),
    }
)
# These it reads in ways of their own, which nothing here repeats.
_OPTIMUM_OTHER = frozenset({"deepseek_v3", "falcon", "gemma3", "gpt_bigcode"})


def write(model: ir.Model, engine: BuiltEngine, checkpoint: Checkpoint) -> tuple[Mapping[str, bytes], tuple[str, ...]]:
    """Write what the runtimes that `model`, lowered, has the interface of want in the folder of `engine`.

    Returns:
        The files, by name; and who loads the folder, and who does not, with a reason. None of either where the graph
        has llmforge's own interface.

    Raises:
        UnsupportedError: no runtime of others would read the model right.
    """
    if interface.ATTENTION_MASK not in {value.name for value in model.graph.inputs}:
        return {}, ()
    check(model, checkpoint)
    made: dict[str, bytes] = {}
    notes, reason = [], _optimum_reason(model, checkpoint)
    if not _grows(model):
        text = json.dumps(genai_config(model, engine, checkpoint), indent=2, sort_keys=True) + "\n"
        made[GENAI_FILE] = text.encode()
        notes.append("engine/ also loads in onnxruntime-genai")
    if reason is None:
        for name in OPTIMUM_FILES:
            if (source := checkpoint.path / name).exists():
                made[name] = source.read_bytes()
        notes.append("engine/ also loads in optimum-onnx (ORTModelForCausalLM)")
    else:
        notes.append(f"engine/ does not load in optimum-onnx: {reason}")
    made |= tokenizer_files(checkpoint)
    for name, content in made.items():
        (engine.folder / name).write_bytes(content)
    return made, tuple(notes)


def genai_config(model: ir.Model, engine: BuiltEngine, checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe an engine as onnxruntime-genai 0.18 reads it (its src/config.h).

    The type is "decoder", its word for a language model with no ways of its own. Every length, size and number is
    that of the graph and the engine, not of the checkpoint's configuration.
    """
    config = engine.config
    generation = _generation(checkpoint)
    pad = generation.get("pad_token_id", getattr(checkpoint.config, "pad_token_id", None))
    names = {str(value.name) for value in model.graph.inputs}
    key = next(cache for cache in config.caches if cache.name == interface.past_part(0, "key"))
    options: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": []}
    if config.session.threads is not None:
        options["intra_op_num_threads"] = config.session.threads
    described: dict[str, Any] = {
        "type": "decoder",
        "context_length": config.max_context,
        "vocab_size": config.vocabulary,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.eos_token_ids[0] if pad is None else pad,
        "decoder": {
            "filename": MODEL_FILE,
            "session_options": options,
            "head_size": key.head_dim,
            "num_key_value_heads": key.kv_heads,
            # Of the first attention: onnxruntime-genai wants one number, and does not use it.
            "num_attention_heads": GroupQueryAttention.all(model)[0].num_heads,
            "num_hidden_layers": len(config.caches) // 2,
            "inputs": {
                **{name: name for name in (interface.INPUT_IDS, interface.ATTENTION_MASK)},
                **{name: name for name in (interface.POSITION_IDS,) if name in names},
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": interface.LOGITS,
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
    if config.bos_token_id is not None:
        described["bos_token_id"] = config.bos_token_id
    search = {name: generation[name] for name in _SEARCH if generation.get(name) is not None}
    fixed = {"max_length": config.max_context, "num_beams": 1, "past_present_share_buffer": True}
    return {"model": described, "search": {"do_sample": False, **search, **fixed}}


def check(model: ir.Model, checkpoint: Checkpoint) -> None:
    """Return if the runtime that `model`, lowered, has the interface of would read it right.

    Raises:
        UnsupportedError: it would not.
    """
    if interface.ATTENTION_MASK not in {value.name for value in model.graph.inputs}:
        return
    cpu.require_none(model)
    if graph.PRUNED in model.metadata_props:
        raise UnsupportedError(
            "other runtimes read the number of layers and heads from one configuration; after prune-structure layers "
            "differ",
            hint="leave genai-interface or optimum-interface out of the recipe, or prune-structure",
        )
    if _grows(model):
        if (reason := _optimum_reason(model, checkpoint)) is not None:
            raise UnsupportedError(reason, hint="leave optimum-interface out of the recipe")
    elif not checkpoint.eos_token_ids:
        raise UnsupportedError(
            "the checkpoint has no end-of-sequence token; onnxruntime-genai would use the padding token instead",
            hint="set eos_token_id in the checkpoint's generation_config.json",
        )


def _optimum_reason(model: ir.Model, checkpoint: Checkpoint) -> str | None:
    """Say why optimum-onnx would make empty caches of another shape than the model's; None where it would not."""
    config = checkpoint.config
    kind = str(config.model_type)
    if kind in _OPTIMUM_OTHER:
        return f"optimum-onnx 0.1.0 uses a different cache layout for model type {kind}"
    heads = int(config.num_attention_heads)
    kv_heads = int(config.num_key_value_heads) if kind in _OPTIMUM_KV_HEADS else heads
    channels = int(config.head_dim) if kind in _OPTIMUM_HEAD_DIM else int(config.hidden_size) // heads
    for value in model.graph.inputs:
        dims = graph.dims(value)
        if interface.present_of(str(value.name)) != value.name and dims and (dims[1], dims[3]) != (kv_heads, channels):
            return (
                f"cache {value.name} has {dims[1]} heads of {dims[3]} channels; optimum-onnx 0.1.0 expects model type "
                f"{kind} to have {kv_heads} of {channels} so its caches would not fit"
            )
    return None


def _grows(model: ir.Model) -> bool:
    """Say whether the caches of `model` grow in every step."""
    presents = {str(value.name): graph.dims(value) for value in model.graph.outputs}
    for value in model.graph.inputs:
        past, present = graph.dims(value), presents.get(interface.present_of(str(value.name)))
        if past is not None and present is not None and len(past) == 4:
            return interface.grows(past, present)
    return False


def _generation(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Read the checkpoint's generation_config.json; {} where there is none."""
    path: Path = checkpoint.path / "generation_config.json"
    settings: dict[str, Any] = small_file.read_json(path, error=CheckpointError) if path.exists() else {}
    return settings
