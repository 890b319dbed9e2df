"""What a checkpoint has for other inputs than text: towers for images and sound, projectors, indexers; with sizes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator

import onnx_ir as ir

from llmforge.checkpoint import Checkpoint
from llmforge.trace.export import weights

_NUMBER = re.compile(r"\.\d+(?=\.)")
_NAMED = 6  # modules that a note names


def note(checkpoint: Checkpoint, model: ir.Model) -> str | None:
    """Say which modules of `checkpoint` are not in `model`, its traced graph, with their sizes; None: all of them are.

    A tensor that only repeats another, tied to it, is not named.
    """
    bindings = model.meta.get(weights.BINDINGS)
    if not isinstance(bindings, weights.Bindings):
        return None
    used = {tensor for source, _ in bindings.of.values() for tensor in source.tensors}
    tied = {*bindings.asked.ties, *bindings.asked.ties.values()}
    rest = {name: entry for name, entry in checkpoint.tensors.items() if name not in used | tied}
    sizes: Counter[str] = Counter()
    for name, entry in rest.items():
        sizes[_NUMBER.sub(".*", _module(name, used))] += entry.size_bytes
    if not sizes:
        return None
    named = [f"{module} ({_size(size)})" for module, size in sizes.most_common(_NAMED)]
    more = f", and {len(sizes) - _NAMED} more" if len(sizes) > _NAMED else ""
    towers = "only the language model is compiled; " if any(map(_is_outside_layers, sizes)) else ""
    return f"{towers}{len(rest)} tensors not used for text are left out: {', '.join(named)}{more}"


def _module(name: str, used: Collection[str]) -> str:
    """Return the largest module with the tensor `name` in it that holds none of those `used`."""
    for module in _modules(name):
        if not any(each.startswith(module + ".") for each in used):
            return module
    return name


def _modules(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _is_outside_layers(module: str) -> bool:
    """Say whether a module is no part of a layer."""
    return "*" not in module


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count} bytes"
