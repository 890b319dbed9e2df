"""The kind of a file or folder that someone has, and what a build would make of it: read from headers, without torch.

Of a GGUF file transformers makes the tokenizer, as for a build.

Known are Hugging Face checkpoints, plain and quantized, GGUF files, and adapters of peft.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmforge.base.errors import CheckpointError, ForgeError, InputError, UnsupportedError
from llmforge.checkpoint import gguf, quantized
from llmforge.checkpoint.adapters import Adapter, AdapterSource
from llmforge.checkpoint.adapters.source import CONFIG as ADAPTER_CONFIG
from llmforge.checkpoint.adapters.source import WEIGHTS
from llmforge.checkpoint.folder import CONFIG, CONFIG_BYTES, read_settings
from llmforge.checkpoint.gguf import architectures, tokenizer
from llmforge.checkpoint.quantized.gguf import Gguf, GgufTensor, grouped
from llmforge.checkpoint.quantized.layout import Grouped, QuantizedTensor, settings_of
from llmforge.checkpoint.safetensors_file import TensorEntry, parse_json, read_header, read_small
from llmforge.checkpoint.shards import PICKLES, read_headers, weight_files
from llmforge.checkpoint.tokenizer_files import TOKENIZER
from llmforge.quantization.stored import UnrepresentableCodes

TRACED = Path(__file__).with_name("architectures.json")  # model_type → why it is not compiled, "" where it is
# Kinds of tokenizers in GGUF files, `tokenizer.ggml.model`.
_TOKENIZERS = {"gpt2": "byte-level BPE (gpt2)", "llama": "SentencePiece's BPE (llama)", "None": "none"}
AS_IT_IS, EXACT, DEQUANTIZED = "as it is", "codes kept", "dequantized"
_NAMES = {
    "FLOAT": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16", "DOUBLE": "fp64", "FLOAT8E4M3FN": "fp8 (E4M3)",
    "FLOAT8E5M2": "fp8 (E5M2)",
}  # fmt: skip


@dataclass(frozen=True)
class StoredParameters:
    """Parameters that are stored in one format, and what becomes of them."""

    format: str
    tensors: int
    parameters: int
    size_bytes: int
    outcome: str  # AS_IT_IS, EXACT or DEQUANTIZED
    reason: str = ""  # of DEQUANTIZED: why no format of ours holds the codes; of EXACT: where alone one does
    example: str = ""  # the name of one


@dataclass(frozen=True)
class Refusal:
    """Why a build would end before it begins."""

    message: str
    hint: str | None
    exit_code: int

    @classmethod
    def of(cls, error: ForgeError) -> Refusal:
        """Keep what an error says."""
        return cls(error.message, error.hint, error.exit_code)


@dataclass(frozen=True)
class GgufPart:
    """A part of a GGUF file that a build has to take over."""

    name: str  # graph, tokenizer, chat template
    what: str
    supported: bool | None  # None: not known, or there is nothing to support
    reason: str | None = None  # why it is not


@dataclass(frozen=True)
class Inspection:
    """What `llmforge inspect` says of what is not an artifact."""

    path: str
    kind: str  # Hugging Face checkpoint, GGUF file, adapter (peft)
    facts: Mapping[str, str | int | None] = field(default_factory=dict)  # name → what is stated, in order
    layout: str | None = None  # how it is quantized
    stored: Sequence[StoredParameters] = ()
    notes: Sequence[str] = ()
    refusal: Refusal | None = None
    compiles: bool | None = None  # whether the architecture was seen to; None: it is not in the table
    reason: str | None = None  # why it does not
    parts: Sequence[GgufPart] = ()  # of a GGUF file
    chat_template: str | None = field(default=None, repr=False)  # likewise

    @property
    def parameters(self) -> int:
        """Count all parameters."""
        return sum(each.parameters for each in self.stored)


def inspect(path: Path, taking: Mapping[str, str]) -> Inspection:
    """Say what `path` is; `taking` are the passes that take codes as they are, by what shares a scale in those.

    Raises:
        InputError: it is nothing that is known here, or cannot be read.
    """
    try:
        if (path / ADAPTER_CONFIG).is_file():
            return _adapter(path)
        file = gguf.file_of(path)
        if file is not None and not (path / CONFIG).is_file():
            return _gguf(file)
        if (path / CONFIG).is_file():
            return _checkpoint(path, taking)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    raise InputError(
        f"{path}: neither an artifact (manifest.json), nor a checkpoint ({CONFIG}), nor a GGUF file ({gguf.SUFFIX}), "
        f"nor an adapter ({ADAPTER_CONFIG})",
        hint="give a folder, or ORG/NAME on the Hub: see `llmforge docs checkpoints`",
    )


def _checkpoint(folder: Path, taking: Mapping[str, str]) -> Inspection:
    settings = parse_json(read_small(folder / CONFIG, CONFIG_BYTES), folder / CONFIG)
    config = settings_of(settings)
    method = config.get("quant_method") if isinstance(config, dict) else config
    made = Inspection(
        str(folder),
        "Hugging Face checkpoint",
        _facts(settings) | {"tokenizer": None if (folder / TOKENIZER).exists() else f"missing: no {TOKENIZER}"},
        layout=None if config is None else str(method),
        **_architecture(settings),
    )
    try:
        read_settings(folder)
        stored = read_headers(folder, weight_files(folder))
        layout = quantized.layout_of(settings, folder / CONFIG)
        if layout is None:
            return _with(made, Grouped((), stored))
        described = layout.check(config, folder / CONFIG)
        return _with(made, layout.group(settings, stored, folder), f"{layout.name}: {described}", taking=taking)
    except (CheckpointError, UnsupportedError) as error:
        return _with(made, Grouped((), {}), refusal=error)


def _gguf(file: Path) -> Inspection:
    made = Inspection(str(file), "GGUF file", layout="GGUF")
    try:
        header = gguf.read(file)
    except (CheckpointError, UnsupportedError) as error:
        return _with(made, Grouped((), {}), made.layout, refusal=error)
    made = Inspection(str(file), "GGUF file", {"architecture": header.architecture}, layout="GGUF")
    try:
        settings = architectures.settings(header)
        facts = _facts(settings) | {"name": str(header.metadata.get("general.name", "")) or None}
        config, layout = settings["quantization_config"], Gguf()
        described = None if layout.is_plain(config) else f"{layout.name}: {layout.check(config, file)}"
        made = Inspection(str(file), "GGUF file", facts, described, **_architecture(settings))
        made = _with(made, grouped(header, settings), made.layout)
    except (CheckpointError, UnsupportedError) as error:
        made = _with(made, Grouped((), {}), made.layout, refusal=error)
    graph = GgufPart("graph", header.architecture, made.compiles, made.reason)
    if made.refusal is not None:
        graph = replace(graph, supported=False, reason=_less_file(made.refusal.message, file))
    read, refusal = _gguf_tokenizer(header)
    template = header.metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    chat = GgufPart("chat template", "none" if template is None else f"{len(template):,} characters", None)
    return replace(made, refusal=made.refusal or refusal, parts=(graph, read, chat), chat_template=template)


def _gguf_tokenizer(header: gguf.Header) -> tuple[GgufPart, Refusal | None]:
    """Make the tokenizer, as a build does: nothing less says whether it is taken. Imports transformers."""
    kind, split = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    what = _TOKENIZERS.get(str(kind), str(kind)) + ("" if split is None else f", pre-tokenizer {split}")
    try:
        tokenizer.tokenizer_json(header)
    except (CheckpointError, UnsupportedError) as error:
        return GgufPart("tokenizer", what, False, _less_file(error.message, header.file)), Refusal.of(error)
    return GgufPart("tokenizer", what, True), None


def _less_file(message: str, file: Path) -> str:
    return message.removeprefix(f"{file}: ")


def _adapter(folder: Path) -> Inspection:
    settings = parse_json(read_small(folder / ADAPTER_CONFIG, CONFIG_BYTES), folder / ADAPTER_CONFIG)
    targets = settings.get("target_modules")
    variants = [name for key, name in (("use_dora", "DoRA"), ("use_rslora", "rsLoRA")) if settings.get(key)]
    facts: dict[str, str | int | None] = {
        "method": " with ".join([str(settings.get("peft_type", "unknown")), *variants]),
        "base model": _text(settings.get("base_model_name_or_path")),
        "rank": _text(settings.get("r")),
        "alpha": _text(settings.get("lora_alpha")),
        "targets": ", ".join(sorted(map(str, targets))) if isinstance(targets, list) else _text(targets),
        "task": _text(settings.get("task_type")),
    }
    made = Inspection(str(folder), "adapter (peft)", facts)
    try:
        if not (folder / WEIGHTS).exists():
            pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
            raise CheckpointError(
                f"{folder}: no {WEIGHTS}" + (f", only pickles ({', '.join(pickles)})" if pickles else ""),
                hint="save the adapter again with peft's save_pretrained, which writes safetensors",
            )
        Adapter.open(AdapterSource(folder.name, folder))
        return _with(made, Grouped((), read_header(folder / WEIGHTS)))
    except (CheckpointError, UnsupportedError) as error:
        return _with(made, Grouped((), {}), refusal=error)


def _with(
    made: Inspection,
    found: Grouped,
    layout: str | None = None,
    refusal: ForgeError | None = None,
    taking: Mapping[str, str] = MappingProxyType({}),
) -> Inspection:
    """Add what is stored, and what keeps it from being built."""
    rows: dict[tuple[str, str, str], list[TensorEntry | QuantizedTensor]] = {}
    try:
        for entry in found.plain.values():
            rows.setdefault((_NAMES.get(entry.dtype.name, entry.dtype.name.lower()), AS_IT_IS, ""), []).append(entry)
        for tensor in found.quantized:
            rows.setdefault(_row(tensor, taking), []).append(tensor)
    except (CheckpointError, UnsupportedError) as error:
        refusal = error
    stored = [
        StoredParameters(
            name,
            len(entries),
            sum(prod(entry.shape) for entry in entries),
            sum(entry.size_bytes for entry in entries),
            outcome,
            reason,
            entries[0].name,
        )
        for (name, outcome, reason), entries in rows.items()
    ]
    return replace(
        made,
        layout=layout or made.layout,
        stored=sorted(stored, key=lambda each: -each.parameters),
        notes=tuple(found.notes),
        refusal=None if refusal is None else Refusal.of(refusal),
    )


def _row(tensor: QuantizedTensor, taking: Mapping[str, str]) -> tuple[str, str, str]:
    """Say in which format a parameter is, whether its codes can stay as they are, and why not."""
    if isinstance(tensor, GgufTensor) and not tensor.kind.quantized:
        return _NAMES[tensor.dtype.name], AS_IT_IS, ""
    try:
        grid = tensor.grid()
    except UnrepresentableCodes as error:
        taken = _taken_by(tensor, taking)
        return (
            tensor.format,
            DEQUANTIZED,
            f"its codes {error}" + (f"; {taken} takes them for TensorRT" if taken else ""),
        )
    return tensor.format, EXACT, "" if grid.portable else "on CPUs; other targets dequantize them"


def _taken_by(tensor: QuantizedTensor, taking: Mapping[str, str]) -> str | None:
    """Name the pass that takes codes that no grid holds; None: there is none."""
    for codes, read in (("channels", tensor.channels), ("fp4", tensor.fp4)):
        with contextlib.suppress(UnrepresentableCodes):
            read()
            return f"`{taking[codes]}: {{method: stored}}`"
    return None


def _facts(settings: Mapping[str, Any]) -> dict[str, str | int | None]:
    """Read the sizes that a configuration states, in the language model where that stands inside of another."""
    inside = settings.get("text_config")
    text = {**settings, **inside} if isinstance(inside, dict) else settings
    classes = settings.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else None
    return {
        "architecture": _text(named),
        "model_type": _text(settings.get("model_type")),
        "layers": _text(text.get("num_hidden_layers")),
        "hidden": _text(text.get("hidden_size")),
        "vocabulary": _text(text.get("vocab_size")),
        "context": _text(text.get("max_position_embeddings")),
    }


def _architecture(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Look up whether models of this type compile, and why not."""
    found = json.loads(TRACED.read_text(encoding="utf-8"))
    kind = settings.get("model_type")
    reason = found.get(kind) if isinstance(kind, str) else None
    return {"compiles": None if reason is None else not reason, "reason": reason or None}


def _text(value: object) -> str | int | None:
    return value if value is None or type(value) is int else str(value)
