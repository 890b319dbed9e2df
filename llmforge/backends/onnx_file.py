"""A lowered graph on disk: `model.onnx`, and its larger initializers in `model.onnx.data`; or those of several ranks.

The same graph gives the same bytes: nothing of the machine, of paths or of time is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from llmforge.base.progress import Progress
from llmforge.ir import onnx_file
from llmforge.runtime.config import DATA_FILE, MODEL_FILE, rank_file


def write(model: ir.Model, folder: Path, progress: Progress) -> dict[str, str]:
    """Write `model.onnx` and stream its larger initializers, in the order of their names, to `model.onnx.data`.

    Returns the SHA-256 of what was written, by the names of files.
    """
    return onnx_file.write([_stripped(model)], [folder / MODEL_FILE], [folder / DATA_FILE], progress=progress)


def write_ranks(models: Sequence[ir.Model], folder: Path, progress: Progress) -> dict[str, str]:
    """Write the graph of each rank (`rank_file`), and its larger initializers.

    Those that are one tensor in the graphs of all ranks, under one name, are written once, to `model.onnx.data`; what
    a rank has for itself lies beside its graph. Returns the SHA-256 of what was written, by the names of files.
    """
    files = [folder / rank_file(rank) for rank in range(len(models))]
    data = [file.with_name(f"{file.name}.data") for file in files]
    return onnx_file.write([*map(_stripped, models)], files, data, folder / DATA_FILE, progress=progress)


def _stripped(model: ir.Model) -> ir.Model:
    """Copy a graph without what no runtime reads and what may differ between two builds: texts, metadata, producers."""
    model = model.clone()
    model.producer_name, model.producer_version, model.domain, model.doc_string = "llmforge", None, None, None
    model.metadata_props.clear()
    model.graph.doc_string = None
    model.graph.metadata_props.clear()
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph.all_nodes():
        node.doc_string = None
        node.metadata_props.clear()
        values += node.outputs
    for value in values:
        value.doc_string = None
        value.metadata_props.clear()
    return model
