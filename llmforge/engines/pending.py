"""An engine that is not built yet: the lowered graph, its weights, and what its GPU's host needs to build it.

`engine/` holds `model.onnx`, `model.onnx.data` and `pending.json` until then.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from llmforge import engines
from llmforge.base.backends import BackendName
from llmforge.base.errors import InputError
from llmforge.base.progress import Progress
from llmforge.engines import Engine, onnx_file
from llmforge.recipe import EngineSpec
from llmforge.runtime.backends import strict_json
from llmforge.runtime.backends.config import MODEL_FILE, PENDING_FILE
from llmforge.targets import Target

FORMAT = 1


@dataclass(frozen=True)
class Pending:
    """Content of `pending.json`: the arguments of a builder, beside the graph."""

    format: int
    backend: BackendName
    target: str
    sm: str
    engine: str  # the recipe's section `engine`, as JSON
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def write(
    lowered: ir.Model,
    folder: Path,
    *,
    spec: EngineSpec,
    target: Target,
    eos_token_ids: Sequence[int],
    bos_token_id: int | None,
    progress: Progress,
) -> int:
    """Write a lowered graph into `folder` (created) for a later `build`; return the bytes of all files."""
    assert target.sm is not None  # an engine for a CPU is never pending: `require_host` would have refused it
    pending = Pending(
        format=FORMAT,
        backend=spec.backend,
        target=target.known_as,
        sm=target.sm,
        engine=spec.model_dump_json(),
        eos_token_ids=tuple(eos_token_ids),
        bos_token_id=bos_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    onnx_file.write(lowered, folder, progress)
    text = json.dumps(dataclasses.asdict(pending), indent=1, sort_keys=True) + "\n"
    (folder / PENDING_FILE).write_text(text, encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


def read(folder: Path) -> Pending:
    """Read what is pending in an engine's folder.

    Raises:
        InputError: nothing is, or the file is not of this version.
    """
    file = folder / PENDING_FILE
    if not file.is_file():
        raise InputError(
            f"{folder.parent}: its engine is built: there is nothing to finish"
            if (folder / MODEL_FILE).exists() or any(folder.glob("*.plan"))
            else f"{file} is missing: {folder.parent} is not an artifact whose engine is pending"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise InputError(f"{file}: not a JSON file: {error}") from error
    found = strict_json.read(Pending, data, str(file))
    if found.format != FORMAT:
        raise InputError(
            f"{file}: format {found.format}; this llmforge reads format {FORMAT}",
            hint="finish with the llmforge that built the artifact, or build it again",
        )
    return found


def build(source: Path, folder: Path, *, spec: EngineSpec, target: Target, progress: Progress) -> Engine:
    """Build in `folder` (created) the engine that is pending in the folder `source`.

    Raises:
        InputError: nothing is pending there.
        EnvironmentLacks: this machine has not what builds it.
        UnsupportedError, VerificationError: it cannot be built after all.
    """
    pending = read(source)
    return engines.for_target(pending.backend, target).build(
        ir.load(source / MODEL_FILE),
        folder,
        spec=spec,
        target=target,
        eos_token_ids=pending.eos_token_ids,
        bos_token_id=pending.bos_token_id,
        progress=progress,
    )
