"""Read a LoRA adapter as peft saves it: adapter_config.json and adapter_model.safetensors, never a pickle.

What the configuration asks for and is not read here is refused by name: an adapter that is applied in part is another
adapter. The arithmetic (peft 0.21, `tuners/lora`): W becomes W + s·B·A, A [r, K], B [N, r], s = alpha / r, or
alpha / √r with `use_rslora`. With `use_dora`, each row of that is scaled to the length that `lora_magnitude_vector` [N]
says, by its length in W + s·B·A of the base.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.wording import shown
from llmforge.checkpoint.adapters.source import CONFIG, WEIGHTS, AdapterSource, digest
from llmforge.checkpoint.safetensors_file import (
    DAMAGED,
    TensorEntry,
    digest_weights,
    listed,
    parse_json,
    read_header,
    read_small,
)

PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."  # of every tensor's name, before the name of a module of the base model
CONFIG_BYTES = 1 << 20
LARGEST_ALPHA = 1e6  # those in use are up to some thousand
PATTERN_LENGTH, PATTERN_REPEATS = 256, 2  # of a regular expression in the configuration: a match is polynomial

# What does not change what a trained adapter computes.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",  # its tensors say which
        "peft_version",
        "qalora_group_size",
        "r",  # the shape of each A says it, whatever `rank_pattern` does
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",  # the tensors say which
        "task_type",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "lora_bias",
        "peft_type",
        "use_dora",
        "use_rslora",
    }
)
# Ways to begin a training that leave the base as it was; others (PiSSA, OLoRA, CorDA, LoftQ, …) take a part out of it.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")

_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "bias",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_PART = re.compile(r"(?P<module>.+)\.(?P<part>" + "|".join(map(re.escape, _PARTS)) + ")")


@dataclass(frozen=True)
class LowRankUpdate:
    """What an adapter adds to the weight [N, K] of one module: scale·B·A."""

    module: str  # as the base model names it
    a: TensorEntry  # [r, K]
    b: TensorEntry  # [N, r]
    scale: float
    embedding: bool = False  # the table is [K, N]
    magnitude: TensorEntry | None = None  # [N], of DoRA
    bias: TensorEntry | None = None  # [N]: scale·bias is added to the module's

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [N, K] of the product."""
        return self.b.shape[0], self.a.shape[1]


@dataclass(eq=False)
class Adapter:
    """An opened adapter; its tensors are mapped, not read."""

    source: AdapterSource
    settings: Mapping[str, Any] = field(repr=False)
    low_rank: Mapping[str, LowRankUpdate] = field(repr=False)  # by module
    saved: Mapping[str, TensorEntry] = field(repr=False)  # by parameter: what takes the place of the base's

    @classmethod
    def open(cls, given: AdapterSource) -> Adapter:
        """Open the adapter in the folder that is `given`.

        Raises:
            CheckpointError: it is no adapter, or is damaged.
            UnsupportedError: it is not LoRA, or asks for what is not applied.
        """
        folder = given.path
        if not folder.is_dir():
            what = "is a file, an adapter is a folder" if folder.exists() else "no such folder"
            raise CheckpointError(f"{folder}: {what}", hint=f"it holds {CONFIG} and {WEIGHTS}, as peft saves them")
        if not (folder / CONFIG).exists():
            raise CheckpointError(
                f"{folder}: no {CONFIG}", hint="an adapter is a folder that peft's save_pretrained wrote"
            )
        settings = parse_json(read_small(folder / CONFIG, CONFIG_BYTES), folder / CONFIG)
        _check_settings(folder / CONFIG, settings)
        if not (folder / WEIGHTS).exists() and (folder / PICKLE).exists():
            raise CheckpointError(
                f"{folder}: only pickled weights ({PICKLE}); loading a pickle can run any code",
                hint=f"save it again with a newer peft, which writes {WEIGHTS}",
            )
        entries = read_header(folder / WEIGHTS)
        parts, saved = _sorted(folder / WEIGHTS, entries)
        scale = _scales(folder / CONFIG, settings)
        low_rank = {
            module: _low_rank(folder / WEIGHTS, module, own, scale, dora=bool(settings.get("use_dora")))
            for module, own in sorted(parts.items())
        }
        if not low_rank and not saved:
            raise CheckpointError(f"{folder / WEIGHTS}: holds no tensors")
        return cls(given, settings, low_rank, dict(sorted(saved.items())))

    @property
    def name(self) -> str:
        """What the recipe calls it."""
        return self.source.name

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.source.path

    @property
    def base(self) -> str:
        """What it says that it was trained on; "" where it does not."""
        name = self.settings.get("base_model_name_or_path")
        return name if isinstance(name, str) else ""

    @property
    def swaps_axes(self) -> bool:
        """Whether weights that are square are stored as [K, N]."""
        return bool(self.settings.get("fan_in_fan_out"))

    @property
    def largest_rank(self) -> int:
        """The largest rank of its products; 0 where it has none."""
        return max((each.rank for each in self.low_rank.values()), default=0)

    @property
    def size_bytes(self) -> int:
        """Size of all its tensors."""
        parts = (part for each in self.low_rank.values() for part in (each.a, each.b, each.magnitude, each.bias))
        return sum(part.size_bytes for part in (*parts, *self.saved.values()) if part is not None)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its two files, hexadecimal; reads them, and refuses NaN and infinity.

        Raises:
            CheckpointError: a weight is not finite, or the file changed since it was opened.
        """
        return self.verify(lambda count: None)

    def verify(self, advance: Callable[[int], None]) -> str:
        """Compute `digest`; `advance` gets the number of bytes of each read."""
        weights = self.path / WEIGHTS
        held = digest_weights(weights, list(read_header(weights).values()), advance)
        small = hashlib.sha256(read_small(self.path / CONFIG, CONFIG_BYTES)).hexdigest()
        return digest(small, held)


def _check_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Refuse what is not LoRA, and every option that would change its arithmetic in a way that is not read."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"{file}: peft_type is {shown(kind)}; LORA is supported, with rsLoRA and DoRA",
            hint="merge it into the checkpoint with peft's merge_and_unload, and build that",
        )
    beginning = settings.get("init_lora_weights")
    if beginning not in _BEGINNINGS:
        raise UnsupportedError(
            f"{file}: init_lora_weights is {shown(beginning)}: the training began by taking a part out of the base",
            hint="save it as plain LoRA: peft's save_pretrained with path_initial_model_for_weight_conversion",
        )
    unread = sorted(key for key, value in settings.items() if value and key not in _WITHOUT_EFFECT | _READ)
    if unread:
        raise UnsupportedError(
            f"{file}: {unread[0]} is {shown(settings[unread[0]])}, which is not applied; supported are plain LoRA, "
            "rsLoRA, DoRA, rank_pattern, alpha_pattern, modules_to_save and bias",
            hint="merge it into the checkpoint with peft's merge_and_unload, and build that",
        )


def _sorted(
    file: Path, entries: Mapping[str, TensorEntry]
) -> tuple[dict[str, dict[str, tuple[str, TensorEntry]]], dict[str, TensorEntry]]:
    """Tell the parts of products, by module and part, from parameters that are saved whole."""
    parts: dict[str, dict[str, tuple[str, TensorEntry]]] = {}
    saved: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        if not name.startswith(PREFIX):
            raise CheckpointError(
                f"{file}: tensor {name!r} does not begin with {PREFIX!r}",
                hint="peft writes that before the name of a module; is it an adapter of another library?",
            )
        if not entry.dtype.is_floating_point() or entry.dtype.bitwidth < 16:
            raise CheckpointError(f"{file}: tensor {name!r} is {entry.dtype.name}; fp32, fp16 and bf16 are supported")
        own = name.removeprefix(PREFIX)
        if (part := _PART.fullmatch(own)) is not None:
            role = _PARTS[part["part"]]
            given = parts.setdefault(part["module"], {})
            if role in given:
                raise CheckpointError(f"{file}: {part['module']}: {given[role][0]} and {part['part']} are both there")
            given[role] = part["part"], entry
        elif "lora_" in own or "token_adapter" in own:
            raise UnsupportedError(f"{file}: tensor {name!r} is of a kind that is not applied: {own.split('.')[-1]}")
        else:
            saved[own.replace(".base_layer.", ".")] = entry
    return parts, saved


def _low_rank(
    file: Path,
    module: str,
    given: Mapping[str, tuple[str, TensorEntry]],
    scale: Callable[[str, int], float],
    *,
    dora: bool,
) -> LowRankUpdate:
    """Put the parts of one product together."""
    where = f"{file}: {module}"
    missing = [part for part in ("a", "b") if part not in given]
    if missing:
        raise CheckpointError(f"{where}: has {listed([name for name, _ in given.values()])} without its counterpart")
    (name, a), (_, b) = given["a"], given["b"]
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise UnsupportedError(f"{where}: lora_A has shape {list(a.shape)}; linear layers and embeddings are supported")
    if a.shape[0] != b.shape[1] or not a.shape[0]:
        raise CheckpointError(
            f"{where}: lora_A {list(a.shape)} and lora_B {list(b.shape)} have no rank in common", hint=DAMAGED
        )
    embedding = "embedding" in name
    magnitude = given.get("magnitude")
    if dora != (magnitude is not None):
        raise CheckpointError(f"{where}: use_dora is {dora}, and its lora_magnitude_vector says otherwise")
    if dora and embedding:
        raise UnsupportedError(f"{where}: DoRA of an embedding is not supported")
    for role in ("magnitude", "bias"):
        if role in given and given[role][1].shape != (b.shape[0],):
            raise CheckpointError(f"{where}: {given[role][0]} has shape {list(given[role][1].shape)}, B has {b.shape}")
    bias = given.get("bias")
    return LowRankUpdate(
        module,
        a,
        b,
        scale(module, a.shape[0]),
        embedding,
        None if magnitude is None else magnitude[1],
        None if bias is None else bias[1],
    )


def _scales(file: Path, settings: Mapping[str, Any]) -> Callable[[str, int], float]:
    """Return what gives the factor of a module's product of some rank."""
    alpha, patterns = settings.get("lora_alpha", 8), settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{file}: alpha_pattern must map names to numbers, is {shown(patterns)}")
    compiled = [(_pattern(file, key), _number(file, "alpha_pattern", value)) for key, value in patterns.items()]
    default, root = _number(file, "lora_alpha", alpha), bool(settings.get("use_rslora"))

    def scale(module: str, rank: int) -> float:
        own = next((value for pattern, value in compiled if pattern.match(module)), default)
        return own / (math.sqrt(rank) if root else rank)

    return scale


def _pattern(file: Path, key: str) -> re.Pattern[str]:
    """Compile a name, the end of one, or a regular expression, as peft's `get_pattern_key` reads them."""
    if len(key) > PATTERN_LENGTH or sum(map(key.count, "*+{")) > PATTERN_REPEATS:
        raise UnsupportedError(f"{file}: alpha_pattern: {shown(key)} is too complex a regular expression")
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise CheckpointError(f"{file}: alpha_pattern: {shown(key)} is no regular expression: {error}") from error


def _number(file: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_ALPHA:
        what = f"{file}: {name} must be a number of at most {LARGEST_ALPHA:g}, is {shown(value)}"
        raise CheckpointError(what, hint=DAMAGED)
    return float(value)


def modules(adapters: Sequence[Adapter]) -> list[str]:
    """Name every module that one of `adapters` changes by a product, sorted."""
    return sorted({module for adapter in adapters for module in adapter.low_rank})
