"""The model repository for Triton's vLLM backend, inside an artifact whose checkpoint vLLM loads.

::

    triton/<name>/config.pbtxt       backend: "vllm"
                 1/model.json        the arguments of vLLM's engine
                 README.md           launch line

vLLM reads the path of a model from where the server was started, as any program does: `model.json` says `engine`, and
the server is started in the artifact's folder.
Source: triton-inference-server/vllm_backend, README.md and src/model.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from llmforge.recipe import Recipe
from llmforge.triton.repository import CONFIG, FOLDER, README

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
(`nvcr.io/nvidia/tritonserver:YY.MM-vllm-python-py3`).
`1/model.json` names it from the folder of the artifact, so start the server there:

    cd ARTIFACT && tritonserver --model-repository=triton

Its other entries are arguments of vLLM's engine: add `gpu_memory_utilization` or `tensor_parallel_size` as you need.
Without Triton: `vllm serve ARTIFACT/engine`.
"""


def write(recipe: Recipe, artifact: Path) -> None:
    """Write the repository into the folder of an artifact, if its backend is one that vLLM loads."""
    if recipe.engine.backend != BACKEND:
        return
    folder = artifact / FOLDER / recipe.name
    (folder / "1").mkdir(parents=True)
    (folder / CONFIG).write_text(_CONFIG.format(instances=recipe.serving.triton.instances), encoding="utf-8")
    (folder / README).write_text(_README.format(name=recipe.name), encoding="utf-8")
    arguments = {
        "model": "engine",
        "tokenizer": "engine",
        "quantization": BACKEND,
        "max_model_len": recipe.engine.max_context,
        "max_num_seqs": recipe.engine.max_batch,
    }
    (folder / "1" / ARGUMENTS).write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
