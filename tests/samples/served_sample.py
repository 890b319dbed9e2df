"""The trained sample behind `llmforge serve`'s application, in this process: as int8, and as a build that lost much."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llmforge
from llmforge import serving
from llmforge.serving import Engine
from llmforge.serving import http as serve
from llmforge.serving.http.server import make_server

from .tiny_recipes import FUSED

TEXT = Path(__file__).parents[1] / "data" / "calibration.jsonl"
INT8 = {"bits": 8, "block_size": 32, "method": "rtn", "budget": {"kld_mean": 100}}
# The coarsest that a recipe may ask for: 3 bits in blocks of 128, round to nearest, embeddings and head too.
DAMAGED = {**INT8, "bits": 3, "block_size": 128, "symmetric": True, "embedding_bits": 3}


def build(folder: Path, checkpoint: Path, quantize: Mapping[str, Any] | None) -> Path:
    """Build the sample with weights quantized so, nothing measured; None: as they are."""
    folder.mkdir(parents=True)
    passes = [*FUSED, *([{"quantize-weights": dict(quantize)}] if quantize else [])]
    recipe = {
        "schema": 1, "name": "sample", "checkpoint": str(checkpoint), "target": "local",
        "engine": {"max_context": 512, "max_batch": 8, "threads": 2}, "passes": passes,
        "calibration": {"data": str(TEXT), "samples": 4, "length": 64},  # what budgets are measured on
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return llmforge.build(folder / "recipe.yaml", out=folder / "artifacts").path


@contextmanager
def served(artifact: Path) -> Iterator[str]:
    """Serve an artifact at the address that is given."""
    listening = socket.create_server(("127.0.0.1", 0))
    with Engine(serving.load(artifact)) as engine:
        server = make_server(serve.create_app(engine, "sample"), serve.Address(grace_s=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
