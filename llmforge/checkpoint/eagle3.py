"""An EAGLE-3 head: a checkpoint folder of one layer that drafts for the model of another (arXiv 2503.01840).

Its files are those that SpecForge, vLLM and SGLang read: `config.json` of architecture LlamaForCausalLMEagle3, and
safetensors with

- `fc.weight` [hidden, 3 · target's hidden]: of what enters three layers of the target;
- `midlayer.*`: a layer of Llama whose q, k and v read [normed embedding, normed states], 2 · hidden; `hidden_norm`;
- weights of a last norm and of a head, norm and lm_head, [draft vocabulary, hidden];
- `d2t` int64 [draft vocabulary]: what to add to the number of a draft token for the target's, where the draft
  vocabulary is a part of the target's; `t2d` says the same from the other side, and is not read;
- an embedding, embed_tokens, [vocabulary, hidden]; where it is missing, the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.base.wording import shown
from llmforge.checkpoint.folder import CONFIG, Checkpoint, load_config, read_settings
from llmforge.checkpoint.quantized import QuantizedTensor
from llmforge.checkpoint.safetensors_file import TensorEntry, external
from llmforge.checkpoint.shards import read_headers, weight_files

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER = "model.layers.0"  # where its parameters stand in a model of transformers
LAYERS_READ = 3
EMBEDDING = "embed_tokens.weight"
_NOT_PARAMETERS = ("d2t", "t2d")


@dataclass(frozen=True, eq=False)
class Eagle3Head:
    """A head that fits its target.

    Attributes:
        checkpoint: its parameters, by the names that `llmforge.trace.export.eagle3` gives them; config and tokenizer
            are in place of a language model's.
        layers: of the target, those whose inputs the head reads side by side, in its order.
        target_hidden: width of each.
        draft_vocabulary: tokens that it tells apart.
        target_ids: int64 [draft_vocabulary], the target's token of each; None: the same ones.
        norms_residual: whether its residual stream begins with what `hidden_norm` gave.
    """

    checkpoint: Checkpoint
    layers: tuple[int, ...]
    target_hidden: int
    draft_vocabulary: int
    target_ids: NDArray[np.int64] | None
    norms_residual: bool

    @classmethod
    def open(cls, folder: Path, target: Checkpoint) -> Eagle3Head:
        """Open the head in `folder`, which drafts for `target`.

        Raises:
            CheckpointError: a file is missing or damaged, or the head is that of another model.
            UnsupportedError: it is no EAGLE-3 head of one layer of Llama.
        """
        folder = folder.absolute()
        settings, file = read_settings(folder), folder / CONFIG
        _check_architecture(settings, file)
        geometry = target.geometry
        _match(settings, file, "vocab_size", geometry.vocabulary, "the target's vocabulary")
        _match(settings, file, "target_hidden_size", geometry.hidden, "the target's hidden size")
        stored = read_headers(folder, weight_files(folder))
        tensors: dict[str, TensorEntry | QuantizedTensor] = {
            _renamed(name): entry for name, entry in stored.items() if name not in _NOT_PARAMETERS
        }
        config = load_config(folder, settings)
        hidden = config.hidden_size
        if f"model.{EMBEDDING}" not in tensors:
            tensors[f"model.{EMBEDDING}"] = _embedding(target, folder, hidden)
        fc = tensors.get(f"{LAYER}.fc.weight")
        if fc is not None and fc.shape != (hidden, LAYERS_READ * geometry.hidden):
            raise CheckpointError(
                f"{fc.file}: tensor 'fc.weight' has shape {list(fc.shape)}; a head of hidden size {hidden} for "
                f"{target.name}, whose hidden size is {geometry.hidden}, has "
                f"{[hidden, LAYERS_READ * geometry.hidden]}",
                hint="a head drafts for the model that it was trained on, and for no other",
            )
        config.vocab_size, config.tie_word_embeddings = geometry.vocabulary, False
        count = settings.get("draft_vocab_size") or geometry.vocabulary
        opened = replace(
            target,
            path=folder,
            settings=settings,
            tensors=dict(sorted(tensors.items())),
            stored=stored,
            weight_files=weight_files(folder),
            layout=None,
            notes=(),
            merge=None,
        )
        opened.__dict__["config"] = config  # in place of what `Checkpoint.config` reads
        return cls(
            opened,
            _layers(settings, geometry.layers, file),
            geometry.hidden,
            count,
            _target_ids(stored.get("d2t"), count, geometry.vocabulary, folder),
            bool(settings.get("norm_before_residual", False)),
        )


def _check_architecture(settings: Mapping[str, Any], file: Path) -> None:
    architectures = settings.get("architectures")
    if architectures != [ARCHITECTURE] or settings.get("model_type") != "llama":
        raise UnsupportedError(
            f"{file}: architectures is {shown(architectures)}, model_type {shown(settings.get('model_type'))}; "
            f"an EAGLE-3 head has [{ARCHITECTURE!r}] and 'llama'",
            hint="heads of EAGLE-1 and 2, of other layers than Llama's, and of speculators' form are not compiled",
        )
    if settings.get("num_hidden_layers") != 1:
        raise UnsupportedError(
            f"{file}: num_hidden_layers is {shown(settings.get('num_hidden_layers'))}; heads of one layer are compiled"
        )
    count = settings.get("draft_vocab_size")
    if count is not None and (type(count) is not int or count < 1):
        raise CheckpointError(f"{file}: draft_vocab_size is {shown(count)}; expected a number of tokens")
    eagle = settings.get("eagle_config")
    if isinstance(eagle, Mapping) and eagle.get("use_aux_hidden_state") is False:
        raise UnsupportedError(f"{file}: use_aux_hidden_state is false; heads that read three layers are compiled")


def _match(settings: Mapping[str, Any], file: Path, name: str, wanted: int, what: str) -> None:
    given = settings.get(name, wanted)
    if given != wanted:
        raise CheckpointError(
            f"{file}: {name} is {shown(given)}, and {what} is {wanted}",
            hint="a head drafts for the model that it was trained on, and for no other",
        )


def _renamed(name: str) -> str:
    """Name a parameter as the model of `llmforge.trace.export.eagle3` does."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return f"{LAYER}.{name.removeprefix('midlayer.')}"
    if name.startswith("fc."):
        return f"{LAYER}.{name}"
    return name if name.startswith("lm_head.") else f"model.{name}"


def _embedding(target: Checkpoint, folder: Path, hidden: int) -> TensorEntry | QuantizedTensor:
    """Find the embedding of `target`, which a head without one shares."""
    found = [entry for name, entry in target.tensors.items() if name.endswith(EMBEDDING)]
    if len(found) != 1 or found[0].shape != (target.geometry.vocabulary, hidden):
        shapes = [list(entry.shape) for entry in found]
        raise CheckpointError(
            f"{folder}: the head has no {EMBEDDING} [{target.geometry.vocabulary}, {hidden}], and {target.name} none "
            f"to share: {shapes or 'there is no such tensor'}"
        )
    return found[0]


def _layers(settings: Mapping[str, Any], depth: int, file: Path) -> tuple[int, ...]:
    """Read which layers of a target of `depth` layers a head reads the inputs of.

    `eagle_aux_hidden_state_layer_ids` are, at the top of a configuration, layers whose inputs count (vLLM), and in its
    `eagle_config` layers whose outputs do (SGLang). Default: EAGLE's own, the inputs of layers 2, n / 2 and n - 3.
    """
    key, eagle = "eagle_aux_hidden_state_layer_ids", settings.get("eagle_config")
    given: Any = settings.get(key)
    if given is None and isinstance(eagle, Mapping) and isinstance(eagle.get(key), list):
        given = [each + 1 if type(each) is int else each for each in eagle[key]]
    layers = (2, depth // 2, depth - 3) if given is None else given
    whole = isinstance(layers, list | tuple) and len(layers) == LAYERS_READ
    if not whole or any(type(each) is not int or not 0 <= each < depth for each in layers):
        raise CheckpointError(
            f"{file}: the head reads the inputs of layers {shown(layers)}; the target's are 0 to {depth - 1}, and "
            f"a head reads {LAYERS_READ}"
        )
    return tuple(layers)


def _target_ids(d2t: TensorEntry | None, count: int, vocabulary: int, folder: Path) -> NDArray[np.int64] | None:
    """Read the target's token of each draft token."""
    if d2t is None:
        if count != vocabulary:
            raise CheckpointError(
                f"{folder}: the head tells {count} tokens apart, its target has {vocabulary}, and no tensor 'd2t' "
                "says which they are"
            )
        return None
    where = f"{d2t.file}: tensor 'd2t'"
    if d2t.dtype.name not in ("INT64", "INT32") or d2t.shape != (count,):
        raise CheckpointError(f"{where} is {d2t.dtype.name} {list(d2t.shape)}; expected int64 [{count}]")
    ids = np.arange(count) + external(d2t).numpy().astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) < count:
        wrong = next((i for i, each in enumerate(ids) if not 0 <= each < vocabulary), None)
        what = "two draft tokens are one of the target's" if wrong is None else f"draft token {wrong} is {ids[wrong]}"
        raise CheckpointError(f"{where}: {what}; expected different tokens from 0 to {vocabulary - 1}")
    return ids
