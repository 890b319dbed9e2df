"""An engine that is not built yet: the lowered graph, its weights, and what its GPU's host needs to build it.

`engine/` holds `model.onnx`, `model.onnx.data` and `pending.json` until then; of several ranks, the graph of each.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from llmforge.backends import BackendName, onnx_file
from llmforge.backends.engines import BuildRequest
from llmforge.base import small_file, strict_json
from llmforge.base.errors import InputError
from llmforge.base.progress import Progress
from llmforge.base.wording import cut
from llmforge.ir.onnx_file import load as load_graph
from llmforge.recipe import EngineSpec
from llmforge.runtime.artifact_files import PENDING_FILE
from llmforge.runtime.config import MODEL_FILE, rank_file
from llmforge.targets import Target

FORMAT = 2


@dataclass(frozen=True)
class Pending:
    """Content of `pending.json`: what a builder is asked for, beside the graph."""

    format: int
    backend: BackendName
    target: str
    sm: str
    engine: str  # the recipe's section `engine`, as JSON
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    weight_bytes_per_token: int  # read by a decode step at batch 1: the lowered graph does not tell experts apart
    kv_bytes_per_token: int
    multiply_adds_per_token: int | None = None  # of the weights; None: an older build did not count them
    head_multiply_adds: int = 0  # of these, those that only the last token of a prompt takes; an older build: 0

    @property
    def spec(self) -> EngineSpec:
        """The recipe's section `engine`."""
        return EngineSpec.model_validate_json(self.engine)

    def to_json(self) -> str:
        """Write the file's text: sorted keys, one trailing newline."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    def request(self, source: Path, folder: Path, target: Target, progress: Progress) -> BuildRequest:
        """Ask for the engine that is pending in `source` to be built in `folder`."""
        spec = self.spec
        several = spec.tensor_parallel > 1
        files = [rank_file(rank) for rank in range(spec.tensor_parallel)] if several else [MODEL_FILE]
        models = [load_graph(source / name) for name in files]
        request = BuildRequest(models[0], folder, spec, target, self.eos_token_ids, self.bos_token_id, progress)
        return dataclasses.replace(request, ranks=models) if several else request


def write(
    request: BuildRequest,
    *,
    weight_bytes_per_token: int,
    kv_bytes_per_token: int,
    multiply_adds_per_token: int | None,
    head_multiply_adds: int = 0,
) -> tuple[Pending, dict[str, str]]:
    """Write what a later build takes into the folder of `request` (created); return it, and SHA-256 of files by name.

    Those are of what was written: what changes a file afterwards is found by them.
    """
    pending = Pending(
        format=FORMAT,
        backend=request.spec.backend,
        target=request.target.catalog_name,
        sm=request.target.require_gpu().sm,
        engine=request.spec.model_dump_json(),
        eos_token_ids=tuple(request.eos_token_ids),
        bos_token_id=request.bos_token_id,
        weight_bytes_per_token=weight_bytes_per_token,
        kv_bytes_per_token=kv_bytes_per_token,
        multiply_adds_per_token=multiply_adds_per_token,
        head_multiply_adds=head_multiply_adds,
    )
    request.folder.mkdir(parents=True, exist_ok=True)
    if request.ranks:
        written = onnx_file.write_ranks(request.ranks, request.folder, request.progress)
    else:
        written = onnx_file.write(request.model, request.folder, request.progress)
    (request.folder / PENDING_FILE).write_text(pending.to_json(), encoding="utf-8")
    return pending, written


def read(folder: Path) -> Pending:
    """Read what is pending in an engine's folder.

    Raises:
        InputError: nothing is, or the file is not of this version.
    """
    file = folder / PENDING_FILE
    if not file.is_file():
        raise InputError(
            f"{folder.parent}: its engine is already built"
            if (folder / MODEL_FILE).exists() or (folder / rank_file(0)).exists() or any(folder.glob("*.plan"))
            else f"{file} is missing: {folder.parent} is not an artifact with a deferred engine",
            hint="--finish takes an artifact of `llmforge build RECIPE --defer`",
        )
    data = small_file.read_json(file)
    if isinstance(data, dict):
        data = {"multiply_adds_per_token": None, "head_multiply_adds": 0, **data}  # an older build did not count them
    found = strict_json.read(Pending, data, str(file))
    if found.format != FORMAT:
        raise InputError(
            f"{file}: format {found.format}; this llmforge reads format {FORMAT}",
            hint="finish with the llmforge that built the artifact, or build it again",
        )
    try:
        _ = found.spec
    except ValueError as error:
        raise InputError(
            f"{file}: engine is not the section `engine` of a recipe: {cut(str(error))}",
            hint="run `llmforge verify ARTIFACT` to list changed files",
        ) from error
    return found
