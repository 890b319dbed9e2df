"""Model repositories for Triton's vLLM backend: in an artifact whose checkpoint vLLM loads, and out of one.

::

    <name>/config.pbtxt       backend: "vllm"
           README.md          launch line
           1/model.json       the arguments of vLLM's engine
             engine/          not inside an artifact, which has it already

vLLM reads the path of a model from where the server was started, as any program does. So a server of the repository in
an artifact is started in the artifact's folder, and one of an exported repository in that.
Source: triton-inference-server/vllm_backend, README.md and src/model.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from llmforge.artifact import Artifact
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

A checkpoint in the format of compressed-tensors, for Triton's vLLM backend
(`nvcr.io/nvidia/tritonserver:YY.MM-vllm-python-py3`). `1/model.json` names it from the folder where the server starts:

    cd {start} && tritonserver --model-repository={models}

Other entries are arguments of vLLM's engine: add `gpu_memory_utilization` or `tensor_parallel_size` as you need.
Without Triton: `vllm serve {start}/{engine}`.
"""


def write(model: TritonModel, artifact: Path) -> None:
    """Write the repository into the folder of an artifact, if its engine is one that vLLM loads."""
    if of_provider(model.runtime.provider).name == BACKEND:
        folder = artifact / FOLDER / model.name
        _write(model, folder, 1, "ARTIFACT", FOLDER, "engine")


def export(artifact: Artifact, model: TritonModel, models: Path, *, version: int = 1, copy: bool = False) -> Path:
    """Write `model` into the repository `models` as version `version`; return the model's folder.

    Raises:
        UnsupportedError: vLLM does not load the engine.
        UsageError: the model has that version already.
        EnvironmentLacks: the repository cannot be written.
    """
    backend = of_provider(model.runtime.provider)
    if backend.name != BACKEND:
        raise UnsupportedError(
            f"{artifact.path}: Triton has no backend for a {backend.title}",
            hint=None
            if backend.export_format is None
            else f"run `{backend.export_format.serve.format(engine='ARTIFACT/engine')}`",
        )
    with repository.published(models, model.name, version) as partial:
        engine = f"{model.name}/{version}/engine"
        _write(model, partial, version, "REPOSITORY", ".", engine)
        link = shutil.copy2 if copy else repository.link
        shutil.copytree(artifact.path / "engine", partial / str(version) / "engine", copy_function=link)
    return models / model.name


def _write(model: TritonModel, folder: Path, version: int, start: str, models: str, engine: str) -> None:
    """Write what all versions share, and the arguments of one."""
    (folder / str(version)).mkdir(parents=True)
    (folder / CONFIG).write_text(_CONFIG.format(instances=model.serving.triton.instances), encoding="utf-8")
    text = _README.format(name=model.name, start=start, models=models, engine=engine)
    (folder / README).write_text(text, encoding="utf-8")
    arguments = {
        "model": engine,
        "tokenizer": engine,
        "quantization": BACKEND,
        "max_model_len": model.runtime.max_context,
        "max_num_seqs": model.runtime.max_batch,
    }
    (folder / str(version) / ARGUMENTS).write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
