"""Find the weight files of a checkpoint folder: one safetensors file, or shards and their index.

The index is `model.safetensors.index.json`: `{"weight_map": {<tensor>: <shard file>}, …}`, as transformers writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import gguf
from llmforge.checkpoint.safetensors_file import TensorEntry, listed, parse_json, read_header, read_small

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """List the safetensors files; the single file wins over an index, as in transformers. Or the one GGUF file.

    Raises:
        CheckpointError: there are none, a shard is missing, or the index is not one.
    """
    single = folder / WEIGHTS
    if single.exists() or single.is_symlink():
        return (single,)
    if (folder / gguf.WEIGHTS).is_symlink():
        return ((folder / gguf.WEIGHTS).readlink(),)  # messages name the file that was given
    if not (folder / WEIGHTS_INDEX).exists():
        raise _no_weights(folder)
    files = tuple(folder / shard for shard in sorted(set(_weight_map(folder / WEIGHTS_INDEX).values())))
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(files)} shards missing: {listed(missing)}",
            hint="fetch the checkpoint again; complete files are not downloaded again",
        )
    return files


def tensor_names(folder: Path) -> frozenset[str] | None:
    """Name the tensors of a folder, by its one file or its index; None: it has neither, but perhaps a configuration.

    Raises:
        CheckpointError: the file, or the index, is none.
    """
    if (folder / WEIGHTS).exists():
        return frozenset(read_header(folder / WEIGHTS))
    index = folder / WEIGHTS_INDEX
    return frozenset(_weight_map(index)) if index.exists() else None


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{folder}: only pickled weights ({listed(pickles)}); loading a pickle can run any code, "
            f"llmforge reads {WEIGHTS} or its shards",
            hint='convert it where you trust it: python -c "from transformers import AutoModelForCausalLM as M; '
            "M.from_pretrained('FOLDER', dtype='auto').save_pretrained('NEW_FOLDER')\", and copy the tokenizer's files",
        )
    other = sorted(file.name for file in folder.glob("*.safetensors"))
    return CheckpointError(
        f"{folder}: no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}",
        hint=f"it holds {listed(other)}: are they shards without their index?"
        if other
        else "give a folder, or ORG/NAME on the Hub: see `llmforge docs checkpoints`",
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Read tensor name → shard file name, each a bare name in the same folder."""
    weight_map = parse_json(read_small(index), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to shard files")
    for name, shard in weight_map.items():
        bare = isinstance(shard, str) and shard.isprintable() and not shard.startswith(".") and "/" not in shard
        if not bare or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {name!r} is mapped to {shard!r}; "
                "expected the name of a .safetensors file in the same folder"
            )
    return weight_map


def read_headers(folder: Path, files: Collection[Path]) -> dict[str, TensorEntry]:
    """Read the headers of all weight files: the tensors by name, sorted.

    Raises:
        CheckpointError: a file is refused by `read_header`, a tensor is there twice or none at all, or the index
            names a tensor that its shard lacks.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        entries = gguf.read(file).entries() if file.suffix == gguf.SUFFIX else read_header(file)
        for name, entry in entries.items():
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name!r} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = entry
    if not tensors:
        raise CheckpointError(f"{folder}: the weight files hold no tensors")
    if folder / WEIGHTS not in files and not any(file.suffix == gguf.SUFFIX for file in files):
        _check_index(folder / WEIGHTS_INDEX, tensors)
    return dict(sorted(tensors.items()))


def _check_index(index: Path, tensors: Mapping[str, TensorEntry]) -> None:
    for name, shard in _weight_map(index).items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"{index}: names tensor {name!r} in {shard}, which does not hold it",
                hint="index and shards come from different versions; fetch the checkpoint again",
            )
