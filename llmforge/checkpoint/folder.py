"""A Hugging Face checkpoint folder: configuration, tokenizer, lazily mapped tensors, a digest of the content.

Nothing in the folder is executed: no `trust_remote_code`, no pickle. `Checkpoint.open` reads headers and refuses what
cannot be used; `Checkpoint.verify` is the one walk over all weight bytes. The folder may be a Hub snapshot, whose
files are symbolic links.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from llmforge.base import process
from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.progress import Progress, Silent
from llmforge.base.wording import cut, shown
from llmforge.checkpoint import gguf, hub, lengths, quantized, tokenizer_files, versions
from llmforge.checkpoint.adapters import AdapterSource, Merge
from llmforge.checkpoint.adapters.merging import unmergeable
from llmforge.checkpoint.encoding import Encoding, encoding_of
from llmforge.checkpoint.quantized import Grouped, QuantizedLayout, QuantizedTensor, same_content
from llmforge.checkpoint.safetensors_file import (
    DAMAGED,
    DENIED,
    TensorEntry,
    digest_weights,
    external,
    listed,
    parse_json,
    read_header,
    read_small,
)
from llmforge.checkpoint.shards import WEIGHTS_INDEX, read_headers, weight_files
from llmforge.checkpoint.tokenizer_files import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from llmforge.quantization.stored import StoredChannels, StoredCodes, StoredFp4, UnrepresentableCodes

if TYPE_CHECKING:
    import onnx_ir as ir
    from transformers import PretrainedConfig

CONFIG = "config.json"
CONTEXTS = ("max_position_embeddings", "max_seq_len")  # how configurations name the longest text they are made for
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

# Besides the weights, what a build can depend on: all of it is in the digest.
SMALL_FILES = (CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE, WEIGHTS_INDEX)
CONFIG_BYTES = 4 << 20  # of config.json, generation_config.json, tokenizer_config.json: up to some 100 kB
MOST_LAYERS = 4096  # the deepest that are known have some hundred
MOST_OF_A_SIZE = 2**53  # where a configuration means "no limit", it writes such numbers
DIGEST_FORMAT = b"llmforge checkpoint 1\n"
Origin = tuple[Path, tuple[AdapterSource, ...], str | None]  # what a checkpoint is opened from


@dataclass(frozen=True)
class Geometry:
    """The sizes of a decoder, from its configuration."""

    layers: int
    hidden: int
    vocabulary: int
    context: int | None  # tokens; None where the configuration states none, as where positions are unbounded (ALiBi)


@dataclass(frozen=True)
class Configuration:
    """What transformers reads out of a `config.json`, as far as it is asked."""

    architecture: str  # the model's class, or the configuration's where that is not said
    geometry: Geometry
    ties: bool  # whether it declares that embedding and head are one
    eos_token_id: Any  # unchanged
    bos_token_id: Any
    lengths: tuple[tuple[str, int], ...] = ()  # what it names of windows, chunks and borders: field, tokens

    @classmethod
    def of(cls, config: PretrainedConfig, folder: Path) -> Configuration:
        """Read it off what transformers made of the file in `folder`.

        Raises:
            CheckpointError, UnsupportedError: a size is none.
        """
        text = config.get_text_config()
        return cls(
            architecture=str((config.architectures or [type(config).__name__])[0]),
            geometry=_geometry(text, folder),
            ties=bool(getattr(config, "tie_word_embeddings", False)),
            eos_token_id=getattr(text, "eos_token_id", None),
            bos_token_id=getattr(text, "bos_token_id", None),
            lengths=tuple(lengths.named(config.to_dict())),
        )


@dataclass(eq=False)
class Checkpoint:
    """An opened checkpoint; its tensors are mapped, not read."""

    path: Path  # absolute
    settings: Mapping[str, Any] = field(repr=False)  # what stands in its config.json
    tensors: Mapping[str, TensorEntry | QuantizedTensor] = field(repr=False)  # its parameters
    stored: Mapping[str, TensorEntry] = field(repr=False)  # what its files hold: others, where it is quantized
    tokenizer: Tokenizer = field(repr=False)
    chat_template: str | None = field(repr=False)
    special_tokens: Mapping[str, str]  # "bos_token": "<s>", …: those that the tokenizer configuration names
    generation: Mapping[str, Any] = field(repr=False)  # what stands in its generation_config.json
    weight_files: tuple[Path, ...] = field(repr=False)
    layout: QuantizedLayout | None = None  # None: its weights are not quantized
    notes: tuple[str, ...] = ()  # what is in it and is not taken, a sentence each
    merge: Merge | None = field(default=None, repr=False)  # adapters that are a part of what `tensor` gives
    encoding: Encoding | None = None  # None: a language model, which predicts tokens
    reranker: str | None = None  # as which a causal model was opened
    _digest: str | None = field(default=None, init=False, repr=False)
    _codes: dict[str, StoredCodes] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def open(cls, path: Path, adapters: Sequence[AdapterSource] = (), reranker: str | None = None) -> Checkpoint:
        """Open the checkpoint in folder `path`, or in a GGUF file, with `adapters` merged into its tensors.

        `reranker`: see `encoding_of`.

        Raises:
            CheckpointError: the folder is not a usable checkpoint, or an adapter is not one of it.
            UnsupportedError: its architecture is unknown, or its weights are quantized in a way that is not taken.
            VersionMismatch: another transformers or torch is installed than this llmforge was proven with.
        """
        checkpoint = cls.located(path, adapters, reranker)
        checkpoint.check_tokens()
        return checkpoint

    @classmethod
    def located(cls, path: Path, adapters: Sequence[AdapterSource] = (), reranker: str | None = None) -> Checkpoint:
        """Open it as far as that needs no transformers, which takes seconds to import.

        Until `check_tokens`, nothing has looked at what is configured.

        Raises:
            CheckpointError, UnsupportedError, VersionMismatch: as `open`.
        """
        versions.check()
        folder = gguf.folder_of(path.absolute())
        settings = read_settings(folder)
        tokenizer_settings = _read_optional(folder / TOKENIZER_CONFIG)
        _refuse_remote_code(folder / TOKENIZER_CONFIG, tokenizer_settings)
        files = weight_files(folder)
        stored = read_headers(folder, files)
        encoding = encoding_of(folder, settings, reranker)
        if encoding is not None:
            files, stored = _with_dense(folder, encoding, files, stored)
        layout = quantized.layout_of(settings, folder / CONFIG)
        grouped = Grouped((), stored) if layout is None else layout.group(settings, stored, folder)
        tensors = _parameters(grouped)
        return cls(
            path=folder,
            settings=settings,
            tensors=tensors,
            stored=stored,
            tokenizer=tokenizer_files.load(folder),
            chat_template=tokenizer_files.chat_template(folder, tokenizer_settings),
            special_tokens=tokenizer_files.special_tokens(tokenizer_settings),
            generation=_read_optional(folder / GENERATION_CONFIG),
            weight_files=files,
            layout=layout,
            notes=tuple(grouped.notes),
            merge=Merge.of(adapters, tensors, folder) if adapters else None,
            encoding=encoding,
            reranker=reranker,
        )

    @property
    def name(self) -> str:
        """What messages and records call it."""
        return hub.title(self.path)

    @property
    def opened_from(self) -> Origin:
        """What `located` takes to open the same in another process."""
        adapters = () if self.merge is None else tuple(adapter.source for adapter in self.merge.adapters)
        return self.path, adapters, self.reranker

    @cached_property
    def config(self) -> PretrainedConfig:
        """What transformers makes of the configuration: imports it.

        Raises:
            CheckpointError, UnsupportedError: see `load_config`.
        """
        return load_config(self.path, self.settings)

    @cached_property
    def configuration(self) -> Configuration:
        """What is asked of the configuration. It may be set to what was read of the same `settings` before."""
        return Configuration.of(self.config, self.path)

    def check_tokens(self) -> None:
        """Return if the ids of the tokens that begin and end a text are ids.

        Raises:
            CheckpointError: one is not.
        """
        _ = self.eos_token_ids, self.bos_token_id

    @property
    def geometry(self) -> Geometry:
        """The sizes of the decoder."""
        return self.configuration.geometry

    @property
    def architecture(self) -> str:
        """Name the model's class, or its configuration's where that is not said."""
        return self.configuration.architecture

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ids = self.generation.get("eos_token_id", self.configuration.eos_token_id)
        return _token_ids(ids, "eos_token_id", self.path)

    @property
    def bos_token_id(self) -> int | None:
        """The token that a text begins with, if any."""
        ids = self.generation.get("bos_token_id", self.configuration.bos_token_id)
        return next(iter(_token_ids(ids, "bos_token_id", self.path)), None)

    @property
    def parameters(self) -> int:
        """Count the elements of all parameters."""
        return sum(prod(entry.shape) for entry in self.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.size_bytes for entry in self.tensors.values())

    @property
    def digest(self) -> str:
        """SHA-256 of the content, hexadecimal: equal for equal files, wherever they lie. Runs `verify` if need be."""
        return self._digest if self._digest is not None else self.verify()

    def verify(self, progress: Progress | None = None) -> str:
        """Walk once over all weight bytes: hash them, and refuse NaN and infinity. Returns `digest`.

        The digest is SHA-256 over one line `<name> <SHA-256>` for every file read, sorted by name. `progress` is told
        the bytes done.

        Raises:
            CheckpointError: a weight is not finite, or a file changed since it was opened.
        """
        progress = progress or Silent()
        total = sum(file.stat().st_size for file in self.weight_files)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress.advance(done, total)

        names = {file: self._called(file) for file in self.weight_files}
        hashes = {
            gguf.WEIGHTS if file.suffix == gguf.SUFFIX else name: digest_weights(file, self._stored_in(file), advance)
            for file, name in names.items()
        }
        for file, name in names.items():
            if name in hashes:
                hub.check_content(file, hashes[name])
        small = [*SMALL_FILES, *(self.encoding.files if self.encoding is not None else ())]
        small = [name for name in small if (self.path / name).exists()]
        hashes |= {name: hashlib.sha256(read_small(self.path / name)).hexdigest() for name in small}
        lines = "".join(f"{name} {digest}\n" for name, digest in sorted(hashes.items()))
        own = hashlib.sha256(DIGEST_FORMAT + lines.encode()).hexdigest()
        self._digest = own if self.merge is None else self.merge.digest(own)
        return self._digest

    def _called(self, file: Path) -> str:
        """Name a weight file in the digest: files of modules below the folder by their path in it."""
        return file.relative_to(self.path).as_posix() if file.is_relative_to(self.path) else file.name

    def _stored_in(self, file: Path) -> list[TensorEntry]:
        """List what a file holds behind its header, without holes."""
        entries = [entry for entry in self.stored.values() if entry.file == file]
        return entries + gguf.read(file).gaps() if file.suffix == gguf.SUFFIX else entries

    def tensor(self, name: str) -> ir.ExternalTensor | ir.LazyTensor:
        """Map one parameter, its bytes are read when it is; one that is stored as codes is dequantized whenever it is.

        Adapters are merged into it then.

        Raises:
            CheckpointError: when it is read: parts of what is stored as codes hold what their layout forbids.
        """
        import onnx_ir as ir

        entry = self.tensors[name]
        if isinstance(entry, TensorEntry):
            return self._with_adapters(external(entry))

        def read() -> ir.TensorProtocol:
            return ir.Tensor(entry.dequantize(), dtype=entry.dtype, name=name)

        return self._with_adapters(ir.LazyTensor(read, entry.dtype, ir.Shape(entry.shape), name=name))

    def _with_adapters(self, tensor: ir.ExternalTensor | ir.LazyTensor) -> ir.ExternalTensor | ir.LazyTensor:
        return tensor if self.merge is None else self.merge.apply(tensor)

    def codes(self, name: str) -> StoredCodes:
        """Return the codes as which a parameter is stored; they are read later.

        Raises:
            UnrepresentableCodes: it is not stored as codes, or in none of our formats; an adapter is merged into it.
            CheckpointError: what says how they lie is damaged.
        """
        entry = self._as_codes(name)
        if name not in self._codes:
            self._codes[name] = StoredCodes(entry.grid(), entry.columns(), entry.codes)
        return self._codes[name]

    def channels(self, name: str) -> StoredChannels:
        """Return the codes of a parameter that is stored in 8 bits with a scale an output feature, or one for all.

        Raises:
            UnrepresentableCodes, CheckpointError: as `codes`.
        """
        return self._as_codes(name).channels()

    def fp4(self, name: str) -> StoredFp4:
        """Return the codes of a parameter that is stored in NVFP4.

        Raises:
            UnrepresentableCodes, CheckpointError: as `codes`.
        """
        return self._as_codes(name).fp4()

    def _as_codes(self, name: str) -> QuantizedTensor:
        entry = self.tensors[name]
        if isinstance(entry, TensorEntry):
            raise UnrepresentableCodes(f"are none: the checkpoint stores it in {entry.dtype.name}", is_plain=True)
        if self.merge is not None and name in self.merge.steps:
            raise UnrepresentableCodes("do not hold what an adapter adds to it")
        return entry

    def require(
        self, parameters: Mapping[str, tuple[int, ...]], tied: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Name the tensor that supplies each parameter of a model.

        `parameters` gives the shape of each; `tied` maps a parameter to the one that its architecture can share it
        with (`{"lm_head.weight": "model.embed_tokens.weight"}`). A tie holds only where the configuration declares
        it and, as in transformers, only where no tensor of other content is there: either name may supply both.

        Raises:
            CheckpointError: a parameter is missing, has another shape, or is not of a floating-point dtype.
        """
        ties = (tied or {}) if self._declares_tie() else {}
        found = {name: self._supplier(name, ties) for name in parameters}
        sources = {name: source for name, source in found.items() if source is not None}
        if missing := [name for name in parameters if name not in sources]:
            raise self._lacks(missing, parameters)
        for name, source in sources.items():
            self._check_tensor(name, self.tensors[source], parameters[name])
        shared = [pair for pair in ties.items() if sources.get(pair[0], "") == sources.get(pair[1])]
        if self.merge is not None and (refused := unmergeable(self.merge, shared)) is not None:
            raise refused
        return sources

    def _supplier(self, name: str, ties: Mapping[str, str]) -> str | None:
        partner = ties.get(name, "")
        if name in self.tensors:
            shared = partner in self.tensors and same_content(self.tensors[name], self.tensors[partner])
            return partner if shared else name
        others = [partner, *(tied for tied, to in ties.items() if to == name)]
        return next((other for other in others if other in self.tensors), None)

    def _declares_tie(self) -> bool:
        return self.configuration.ties

    def _lacks(self, missing: list[str], parameters: Mapping[str, tuple[int, ...]]) -> CheckpointError:
        needs = f"{self.path}: the checkpoint lacks {listed(missing)}"
        head = (self.geometry.vocabulary, self.geometry.hidden)
        alike = [entry.name for entry in self.tensors.values() if entry.shape == head]
        if [parameters[name] for name in missing] == [head] and alike and not self._declares_tie():
            return CheckpointError(
                f"{needs}, and {CONFIG} does not declare tie_word_embeddings",
                hint=f'if the model shares {alike[0]!r}, set "tie_word_embeddings": true in {CONFIG}',
            )
        unused = sorted(set(self.tensors) - set(parameters))
        kind = type(self.config).__name__.removesuffix("Config")
        return CheckpointError(
            f"{needs}: {len(missing)} of the {len(parameters)} parameters that {kind} needs with this {CONFIG}",
            hint=f"it holds {listed(unused)} instead" if unused else "some of the weights were not saved",
        )

    def _check_tensor(self, name: str, entry: TensorEntry | QuantizedTensor, shape: tuple[int, ...]) -> None:
        where = f"{entry.file}: tensor {entry.name!r}"
        if entry.shape != shape:
            raise CheckpointError(f"{where} has shape {list(entry.shape)}, {CONFIG} makes {name!r} {list(shape)}")
        if not entry.dtype.is_floating_point():
            raise CheckpointError(f"{where} is {entry.dtype.name}; weights must be of a floating-point dtype")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read `config.json`, or what a GGUF file says instead, and refuse what no later stage may meet.

    Raises:
        CheckpointError: there is no such file, or it asks for code.
        UnsupportedError: the weights are quantized in a way that is not taken.
    """
    folder = gguf.folder_of(folder)
    file = folder / CONFIG
    try:
        if not folder.is_dir():
            what = "is a file, a checkpoint is a folder" if folder.exists() else "no such folder"
            hint = "give a folder, or ORG/NAME on the Hub: see `llmforge docs checkpoints`"
            raise CheckpointError(f"{folder}: {what}", hint=hint)
        there = file.exists() or file.is_symlink()
    except PermissionError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}", hint=DENIED) from error
    if not there:
        hint = "the folder must hold config.json, tokenizer.json and model.safetensors, or its shards and their index"
        if (folder / "adapter_config.json").exists():
            hint = "this is an adapter: name its base as the checkpoint, and it under `adapters` (docs/adapters.md)"
        raise CheckpointError(f"{folder}: not a Hugging Face checkpoint: it has no {CONFIG}", hint=hint)
    settings = parse_json(read_small(file, CONFIG_BYTES), file)
    _check_sizes(file, settings)
    _refuse_remote_code(file, settings)
    quantized.layout_of(settings, file)
    return settings


def _parameters(grouped: Grouped) -> dict[str, TensorEntry | QuantizedTensor]:
    """Put the parameters of a checkpoint together, sorted by name."""
    of_codes: dict[str, TensorEntry | QuantizedTensor] = {tensor.name: tensor for tensor in grouped.quantized}
    for name in of_codes.keys() & grouped.plain.keys():
        raise CheckpointError(
            f"{of_codes[name].file}: tensor {name!r} is there as codes and in {grouped.plain[name].file.name} as it is",
            hint=DAMAGED,
        )
    return dict(sorted({**grouped.plain, **of_codes}.items()))


def _with_dense(
    folder: Path, encoding: Encoding, files: tuple[Path, ...], stored: Mapping[str, TensorEntry]
) -> tuple[tuple[Path, ...], dict[str, TensorEntry]]:
    """Add the files of Dense modules, and their tensors, each called `<folder>.linear.weight` or `.bias`."""
    found = dict(stored)
    for dense in encoding.dense:
        file = folder / dense.weights
        files = (*files, file)
        for name, entry in read_header(file).items():
            found[f"{dense.folder}.{name}"] = replace(entry, name=f"{dense.folder}.{name}")
    return files, found


def _check_sizes(file: Path, settings: Mapping[str, Any], inside: str = "") -> None:
    """Refuse sizes of which making a model would take all memory, or hours, before anything is made of them."""
    for key, value in settings.items():
        name = f"{inside}{key}"
        if isinstance(value, dict) and not inside:
            _check_sizes(file, value, f"{name}.")
        layers = "layer" in key and key.startswith(("n", "max"))  # num_hidden_layers, n_layer, max_window_layers
        most = MOST_LAYERS if layers else MOST_OF_A_SIZE
        if type(value) is int and abs(value) > most and (layers or not key.startswith("max")):
            raise CheckpointError(f"{file}: {cut(name)} is {shown(value)}; at most {most} is supported", hint=DAMAGED)


def _read_optional(file: Path) -> dict[str, Any]:
    return parse_json(read_small(file, CONFIG_BYTES), file) if file.exists() or file.is_symlink() else {}


def _refuse_remote_code(file: Path, settings: Mapping[str, Any]) -> None:
    if "auto_map" in settings:
        raise CheckpointError(
            f"{file}: auto_map requires running Python code of the checkpoint, which llmforge never does",
            hint="if transformers supports the model_type, remove auto_map from a copy of the file",
        )


def load_config(folder: Path, settings: Mapping[str, Any]) -> PretrainedConfig:
    """Make the configuration of transformers from `settings`, which `folder` holds.

    Raises:
        CheckpointError: transformers refuses it.
        UnsupportedError: transformers does not know the architecture.
    """
    process.import_whole("transformers")  # the proof of a trace may be at it
    from huggingface_hub.errors import StrictDataclassError  # here, because transformers imports torch
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = folder / CONFIG
    model_type = settings.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{file}: model_type must name the architecture, is {model_type!r}", hint=DAMAGED)
    if model_type not in CONFIG_MAPPING:
        near = get_close_matches(model_type, list(CONFIG_MAPPING), n=3)
        raise UnsupportedError(
            f"{file}: model_type {model_type!r} is unknown to transformers {__version__}",
            hint=f"nearest: {', '.join(near)}" if near else "a newer architecture needs a newer llmforge",
        )
    # transformers' validation lets the errors of its own arithmetic on wild values through
    wild = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (StrictDataclassError, *wild) as error:
        raise CheckpointError(f"{file}: transformers refuses it: {error}", hint=DAMAGED) from error
    if hasattr(config, "quantization_config"):  # the model is that of the weights, however those are stored
        del config.quantization_config
    return config


def _geometry(text: PretrainedConfig, folder: Path) -> Geometry:
    """Read the sizes by the names that transformers gives them for every architecture (its `attribute_map`).

    Sizes of heads and caches are only checked: a dry run of the model tells them, layer by layer (`llmforge.trace`).
    """

    def size(name: str) -> int:
        value = getattr(text, name, None)
        if type(value) is not int:
            raise UnsupportedError(
                f"{folder / CONFIG}: {text.model_type} gives no single {name}",
                hint="needed: a model of one stack of layers, each with a cache of its own; several stacks, of which "
                "one reads another, are not compiled",
            )
        if value < 1:
            raise CheckpointError(f"{folder / CONFIG}: {name} must be at least 1, is {value}")
        return value

    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        try:
            given = getattr(text, name, None)
        except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError: layers differ
            continue
        if type(given) is int:
            size(name)
    context = next((found for name in CONTEXTS if (found := getattr(text, name, None)) is not None), None)
    return Geometry(
        layers=size("num_hidden_layers"),
        hidden=size("hidden_size"),
        vocabulary=size("vocab_size"),
        context=context if type(context) is int and context > 0 else None,
    )


def names_end(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Say whether the checkpoint in `folder`, of these `settings`, itself names the token that ends a text.

    Raises:
        CheckpointError: a file cannot be read, or is damaged.
    """
    key, generation = "eos_token_id", _read_optional(folder / GENERATION_CONFIG)
    if key in generation:  # which counts, whatever it says
        said = [generation]
    else:
        said = [dict(settings), *(each for each in settings.values() if isinstance(each, dict))]  # of the text model
    return any(each.get(key) not in (None, []) for each in said)


def find_chat_template(folder: Path) -> str | None:
    """Find the chat template of the checkpoint in `folder`; None: it has none.

    Raises:
        CheckpointError: a file cannot be read, or is damaged.
    """
    return tokenizer_files.chat_template(folder, _read_optional(folder / TOKENIZER_CONFIG))


def _token_ids(value: object, name: str, folder: Path) -> tuple[int, ...]:
    """Normalize a token id, a list of them, or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise CheckpointError(f"{folder}: {name} must be a token id or a list of them, is {value!r}")
    return tuple(ids)
