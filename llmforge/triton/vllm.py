"""Model repositories for Triton's vLLM backend: in an artifact whose checkpoint vLLM loads, and out of one.

::

    <name>/config.pbtxt       backend: "vllm"
           README.md          launch line
           1/model.json       the arguments of vLLM's engine
             engine/          not inside an artifact, which has it already
             manifest.json    nor this: it says which artifact it is

vLLM reads the path of a model from where the server was started, as any program does. So a server of the repository in
an artifact is started in the artifact's folder, and one of an exported repository in that.
Source: triton-inference-server/vllm_backend, README.md and src/model.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from llmforge.artifact import Artifact
from llmforge.artifact.sealed import MANIFEST
from llmforge.backends import of_provider
from llmforge.base.errors import UnsupportedError
from llmforge.triton import repository
from llmforge.triton.repository import CONFIG, FOLDER, README, TritonModel

BACKEND = "compressed-tensors"
ARGUMENTS = "model.json"

_CONFIG = """\
backend: "vllm"
instance_group [
  {{
    count: {instances}
    kind: KIND_MODEL
  }}
]
"""
_README = """\
# {name}

A quantized checkpoint, for Triton's vLLM backend (config.json names its format;
`nvcr.io/nvidia/tritonserver:YY.MM-vllm-python-py3`). `1/model.json` names it from the folder where the server starts:

    cd {start} && tritonserver --model-repository={models}

Other entries are arguments of vLLM's engine: add `gpu_memory_utilization` or `tensor_parallel_size` as you need.
Without Triton: `vllm serve {start}/{engine}`.
"""


class Exporter(Protocol):
    """How the model of an artifact gets into a repository."""

    def __call__(
        self, artifact: Artifact, model: TritonModel, models: Path, /, *, version: int = 1, copy: bool = False
    ) -> Path:
        """Write one version of the model; return the model's folder."""


def write(model: TritonModel, artifact: Path) -> dict[str, bytes]:
    """Write the repository into the folder of an artifact, if its engine is one that vLLM loads.

    Returns what was written, by path in the artifact.
    """
    if of_provider(model.runtime.provider).name != BACKEND:
        return {}
    made = _files(model, 1, "ARTIFACT", FOLDER, "engine")
    _write(made, artifact / FOLDER / model.name)
    return {f"{FOLDER}/{model.name}/{path}": content for path, content in made.items()}


def exporter(artifact: Artifact, model: TritonModel) -> Exporter:
    """Choose what exports the model of an artifact: `repository.export` where llmforge runs the engine, else `export`.

    Raises:
        UnsupportedError: no backend of Triton loads the engine.
    """
    backend = of_provider(model.runtime.provider)
    if backend.export_format is None:
        return repository.export
    if backend.name != BACKEND:
        raise UnsupportedError(
            f"{artifact.path}: Triton has no backend for a {backend.title}",
            hint=f"run `{backend.export_format.serve.format(engine='ARTIFACT/engine')}`",
        )
    return export


def export(artifact: Artifact, model: TritonModel, models: Path, *, version: int = 1, copy: bool = False) -> Path:
    """Write `model`, whose engine vLLM loads, into the repository `models`; return the model's folder.

    Raises:
        UsageError: the model has that version already.
        EnvironmentLacks: the repository cannot be written.
    """
    with repository.published(models, model.name, version) as partial:
        engine = f"{model.name}/{version}/engine"
        _write(_files(model, version, "REPOSITORY", ".", engine), partial)
        link = shutil.copy2 if copy else repository.link
        shutil.copytree(artifact.path / "engine", partial / str(version) / "engine", copy_function=link)
        shutil.copy2(artifact.path / MANIFEST, partial / str(version) / MANIFEST)
    return models / model.name


def _write(made: Mapping[str, bytes], folder: Path) -> None:
    for path, content in made.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def _files(model: TritonModel, version: int, start: str, models: str, engine: str) -> dict[str, bytes]:
    """Make what all versions share, and the arguments of one, by path in the model's folder."""
    text = _README.format(name=model.name, start=start, models=models, engine=engine)
    arguments = {
        "model": engine,
        "tokenizer": engine,
        "max_model_len": model.runtime.max_context,
        "max_num_seqs": model.runtime.max_batch,
    }
    return {
        CONFIG: _CONFIG.format(instances=model.serving.triton.instances).encode(),
        README: text.encode(),
        f"{version}/{ARGUMENTS}": (json.dumps(arguments, indent=2) + "\n").encode(),
    }
