"""Drive two ranks over the onnxruntime-gpu wheel's own host code and a stand-in for NCCL, on a machine without a GPU.

    python benchmarks/cuda_ranks.py [--wheel DIR] [--sm 90]        JSON: what the ranks' devices and NCCL were asked

The sample checkpoint is split for two ranks and lowered to fp16 for the CUDA provider. `RankSession` starts their
processes, each of which opens its graph in the real provider over the stand-ins of `cuda_wheel.py`: ONNX Runtime itself
places the collectives, hands them its stream, and captures and replays steps. Nothing is computed but what
tests/fakes/fake_nccl.c does, which counts what it is asked: sums and gathers of each rank, and how many of both were
sent to a stream, after the load, after the cache (which runs all shapes of prefills, and captures), a prefill and two
decode steps that are replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from llmforge.runtime.interface import StepInputs

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
TARGET, MAX_BATCH, MAX_CONTEXT, RANKS = "h100-sxm", 4, 256, 2


def write_engine(folder: Path) -> None:
    """Split the sample checkpoint, lower it and write its engine, without loading it."""
    from llmforge import targets
    from llmforge.backends.engines import BuildRequest
    from llmforge.backends.onnxruntime.cuda import builder as cuda
    from llmforge.checkpoint import Checkpoint
    from llmforge.parallel.split import split
    from llmforge.passes.flash_attention import FlashAttention
    from llmforge.passes.fuse_norms import FuseNorms
    from llmforge.passes.lower_precision import LowerPrecision
    from llmforge.passes.pack_gate_up import PackGateUp
    from llmforge.passes.pack_qkv import PackQkv
    from llmforge.recipe import EngineSpec
    from llmforge.rewrite.pass_base import Budget, Context
    from llmforge.trace import trace

    checkpoint, target = Checkpoint.open(ROOT / "tests" / "data" / "docs-llama-7m"), targets.load(TARGET)
    model, any_cost = trace(checkpoint), Budget(kld_mean=1e9)
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention(), LowerPrecision(any_cost, "fp16")):
        step.run(model, Context(target))
    spec = EngineSpec(max_context=MAX_CONTEXT, max_batch=MAX_BATCH, tensor_parallel=RANKS)
    lowered = [cuda.lower(each, target, spec)[0] for each in split(model, RANKS).ranks]
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    cuda.write(BuildRequest(lowered[0], folder, spec, target, *ends, ranks=lowered))


def calls(folder: Path) -> list[dict[str, int]]:
    """Read what the stand-in for NCCL was asked, by rank."""
    [file] = folder.glob("meeting-*")
    numbers = struct.unpack("33I", file.read_bytes()[:132])  # joined; by rank: meetings, sums, gathers, on streams
    names = {"sums": 1, "gathers": 2, "on_streams": 3}
    return [{name: numbers[1 + 8 * at + rank] for name, at in names.items()} for rank in range(RANKS)]


def rehearse(folder: Path, counts: Path) -> dict[str, Any]:
    """Inside the wheel: start the ranks, allocate their caches, and take steps."""
    from llmforge.backends.ranks import session as rank_session
    from llmforge.runtime.config import FILE, RuntimeConfig

    rank_session._WORKER = "cuda_rank"
    config = RuntimeConfig.read(folder / FILE)
    session = rank_session.open_engine(folder, config, None)
    found: dict[str, Any] = {"planned": len(config.graphs.captures), "load": calls(counts)}
    cache = session.allocate(MAX_BATCH, MAX_CONTEXT)
    found["cache"] = calls(counts)
    session.step(StepInputs(np.zeros((1, 40), np.int64), np.array([0], np.int32)), cache.rows(2, 3))
    found["prefill"] = calls(counts)
    for rows in (1, 4):
        inputs = StepInputs(
            np.zeros((rows, 1), np.int64), np.full(rows, 40, np.int32), temperatures=np.ones(rows, np.float32)
        )
        run = session.begin_decode(inputs, cache.rows(0, rows))
        found[f"heads_{rows}"] = [len(run.top_logits().ids), len(run.logits(rows - 1))]
    found["decode"] = calls(counts)
    found["ranks"] = [json.loads((counts / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    session.close()
    return found


def run(wheel: Path | None, sm: int) -> dict[str, Any]:
    """Write the engine and the stand-ins, and rehearse inside the wheel."""
    import cuda_wheel

    wheel = cuda_wheel.install(wheel or cuda_wheel.CACHE)
    with tempfile.TemporaryDirectory() as work:
        libraries, engine, counts = (Path(work, name) for name in ("libraries", "engine", "counts"))
        libraries.mkdir()
        counts.mkdir()
        write_engine(engine)
        cuda_wheel.stand_ins(wheel, libraries)
        fake = [str(libraries / "libnccl.so.2"), str(ROOT / "tests/fakes/fake_nccl.c")]
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", *fake], check=True)
        own = {"PYTHONPATH": str(wheel), "LD_LIBRARY_PATH": str(libraries), "STAND_IN_SM": str(sm)}
        own |= {"STAND_IN_DEVICES": str(RANKS), "FAKE_NCCL": str(counts), "CUDA_RANKS": str(counts)}
        variables = {**os.environ, **own, "ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"}
        command = [sys.executable, str(HERE), "--inside", str(engine), str(counts)]
        done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    sys.path[:0] = [str(ROOT), str(HERE.parent)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="folder that pip installs the wheel into; default: the user's cache")
    parser.add_argument("--sm", type=int, default=90, help="compute capability that the devices claim")
    parser.add_argument("--inside", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps(rehearse(*arguments.inside)), flush=True)
        os._exit(0)  # destructors of libraries expect a device
    print(json.dumps(run(arguments.wheel, arguments.sm), indent=2))


if __name__ == "__main__":
    main()
