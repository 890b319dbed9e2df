"""Drive the runtime's session for GPUs over the onnxruntime-gpu wheel's own host code, on a machine without a GPU.

    python benchmarks/cuda_session.py [--wheel DIR] [--sm 90] [--kv-cache paged]
                                                                   JSON: what became of each planned CUDA graph

The sample checkpoint is lowered to fp16 for the CUDA provider, and `DeviceSession` loads it into the real provider over
the stand-ins of `cuda_wheel.py`: a device whose memory is the host's, and that computes nothing. So ONNX Runtime itself
accepts or refuses what is bound by address, captures and replays. For each planned capture: captures and replays after
an eager step, the first captured one, one with its inputs bound elsewhere, and one more; then the replays of decode
steps by their number of rows, as the scheduler begins them; then what is sent to which stream, and waited for, while
one step is begun behind another one whose heads are awaited (call, stream, bytes). Prefills are padded to their few
shapes, all of which run as the cache is allocated. Logits are zeros. With `--kv-cache paged` the same over blocks of a
pool, and `PagedSession`; its prefill is a step in which two prompts are read while two texts decode. With `--cudnn`
attention asks a stand-in for cuDNN, which takes each graph, refuses each, or fails when one runs.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np

from llmforge.runtime.interface import StepInputs

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
TARGET, MAX_BATCH, MAX_CONTEXT = "h100-sxm", 8, 1024


def write_engine(folder: Path, kv_cache: str) -> None:
    """Lower the sample checkpoint and write its engine, without loading it."""
    from llmforge import targets
    from llmforge.backends.engines import BuildRequest
    from llmforge.backends.onnxruntime.cuda import builder as cuda
    from llmforge.checkpoint import Checkpoint
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
    spec = EngineSpec(max_context=MAX_CONTEXT, max_batch=MAX_BATCH, kv_cache=kv_cache)
    lowered, _ = cuda.lower(model, target, spec)
    ends = checkpoint.eos_token_ids, checkpoint.bos_token_id
    cuda.write(BuildRequest(lowered, folder, spec, target, *ends))


class Runtime:
    """Stands for cuda.bindings.runtime: its functions, of the stand-in for the library that they are of."""

    def __init__(self, library: Any) -> None:
        import cuda.bindings.runtime as real

        self._library, self._real = library, real
        library.cudaGetErrorName.restype = library.stand_in_calls.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        if not re.match("cuda[A-Z]", name) or isinstance(getattr(self._real, name), type | int):
            return getattr(self._real, name)  # types and constants
        given = {
            "cudaGetDeviceCount": [ctypes.c_int],
            "cudaDeviceGetAttribute": [ctypes.c_int],
            "cudaMemGetInfo": [ctypes.c_size_t, ctypes.c_size_t],
            "cudaMalloc": [ctypes.c_void_p],
            "cudaHostAlloc": [ctypes.c_void_p],
            "cudaStreamCreateWithFlags": [ctypes.c_void_p],
            "cudaEventCreateWithFlags": [ctypes.c_void_p],
        }.get(name, [])
        function = getattr(self._library, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            results = [kind() for kind in given]
            plain = [_plain(each) for each in arguments]
            status = function(*map(ctypes.byref, results), *plain)
            return (self._real.cudaError_t(status), *(each.value or 0 for each in results))

        return call

    def cudaGetDeviceProperties(self, index: int) -> tuple[Any, ...]:  # noqa: N802  (the name is CUDA's)
        """Give the name alone."""
        return self._real.cudaError_t.cudaSuccess, types.SimpleNamespace(name=b"stand-in")

    def cudaMemcpyBatchAsync(self, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
        """Copy pieces, each by a call of its own."""
        targets, sources, sizes, *_, stream = arguments
        both = self._real.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.cudaMemcpyAsync(target, source, size, both, stream)
        return (self._real.cudaError_t.cudaSuccess,)


def _plain(value: Any) -> Any:
    """Give a number as wide as an address, for all that CUDA takes."""
    return ctypes.c_size_t(int(value))


def rehearse(folder: Path) -> dict[str, Any]:
    """Inside the wheel: load the engine, allocate its cache, which captures, and take steps of every kind."""
    import onnxruntime as ort

    from llmforge.backends.loading import module_of
    from llmforge.backends.onnxruntime.cuda.paged import PagedSession, Piece
    from llmforge.runtime.config import FILE, MODEL_FILE, RuntimeConfig
    from llmforge.runtime.device import backend as device_backend
    from llmforge.runtime.device import cuda as device_module
    from llmforge.runtime.device.cuda import CudaDevice
    from llmforge.runtime.device.graph_capture import ONE, OTHER, CaptureResult

    ort.preload_dlls = lambda *_, **__: None  # the stand-ins are loaded already
    fake = ctypes.CDLL("libcudart.so.13")
    config = RuntimeConfig.read(folder / FILE)
    found: dict[str, Any] = {"captures": [], "decode": {}, "heads": {}}

    device_module._bindings = lambda install: Runtime(fake)

    def counted(before: tuple[int, int]) -> tuple[int, int]:
        return fake.stand_in_captures() - before[0], fake.stand_in_replays() - before[1]

    def watch(capture: Any, probe: Any, *_: Any) -> CaptureResult:
        before = counted((0, 0))
        seen = []
        for token, options in (
            (ONE, {"graph": False}),
            (ONE, {"graph": True}),
            (OTHER, {"graph": True, "moved": True}),
            (OTHER, {"graph": True}),
        ):
            probe(token, **options)
            seen.append(counted(before))
        found["captures"].append({**dataclasses.asdict(capture), "captured_and_replayed": seen})
        return CaptureResult(capture, None, 0.0, 0.0, 0)

    device_backend.verify_capture = watch
    session = module_of(config).open_engine(folder / MODEL_FILE, config, None, CudaDevice())
    infos = zip(session._session.get_inputs(), session._session.get_input_memory_infos(), strict=True)
    found["read_on_host"] = [f"{value.name}: {info.name}" for value, info in infos if info.name != "Cuda"]
    found["providers"] = session._session.get_providers()
    found["caches_as_configured"] = session.signature.caches == config.caches
    cache = session.allocate(config.max_batch, config.max_context)
    before = counted((0, 0))
    if isinstance(session, PagedSession):
        found["blocks"] = [cache.pool.blocks, cache.pool.block_size]
        tables = [cache.pool.open(()) for _ in range(config.max_batch)]
        for table in tables:
            cache.pool.grow(table, 0, 45)
        mixed = [Piece([0], 40, tables[0], True), Piece([0], 7, tables[1], True)]
        mixed += [Piece([0] * 40, 0, tables[2], True), Piece([0] * 13, 0, tables[3], False)]
        run = session.begin(mixed, cache, np.ones(3, np.float32))
        found["heads"]["mixed"] = [run.top_logits().masses.shape, run.logits(2).shape]
    else:
        session.step(StepInputs(np.zeros((1, 40), np.int64), np.array([0], np.int32)), cache.rows(2, 3))
        session.step(StepInputs(np.zeros((1, 4), np.int64), np.array([40], np.int32), np.arange(4)), cache.rows(2, 3))
    found["prefill"] = counted(before)
    ones = np.ones(config.max_batch, np.float32)
    for rows in (1, 2, 3, 4, 8):
        before = counted((0, 0))
        if isinstance(session, PagedSession):
            run = session.begin([Piece([0], 40, table, True) for table in tables[:rows]], cache, ones[:rows])
        else:
            inputs = StepInputs(np.zeros((rows, 1), np.int64), np.full(rows, 40, np.int32), temperatures=ones[:rows])
            run = session.begin_decode(inputs, cache.rows(0, rows))
        found["heads"][rows] = [run.top_logits().masses.shape, run.logits(rows - 1).shape]
        found["decode"][rows] = counted(before)
    if session.guesses_tokens:
        rows = config.max_batch

        def begin(step: int) -> Any:
            ids = -1 - np.arange(rows)[:, None] if step else np.zeros((rows, 1), np.int64)
            if not isinstance(session, PagedSession):
                return session.begin_decode(
                    StepInputs(ids, np.full(rows, 40 + step, np.int32), temperatures=ones), cache.rows(0, rows)
                )
            return session.begin(
                [Piece([int(own[0])], 40 + step, table, True) for own, table in zip(ids, tables, strict=True)],
                cache,
                ones,
            )

        first, second = begin(0), begin(1)
        first.top_logits()
        fake.stand_in_calls()
        third = begin(2)
        second.top_logits()
        third.launched()
        found["calls"] = [each.split() for each in fake.stand_in_calls().decode().splitlines()]
        third.top_logits()
    cudnn = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudnn.so" in line]
    found["cudnn"] = ctypes.CDLL(cudnn[0]).stand_in_cudnn_executed() if cudnn else 0
    return {**found, "notes": session.notes, "forbidden": fake.stand_in_forbidden()}


def main() -> None:
    sys.path[:0] = [str(ROOT), str(HERE.parent)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="folder that pip installs the wheel into; default: the user's cache")
    parser.add_argument("--sm", type=int, default=90, help="compute capability that the device claims")
    parser.add_argument("--kv-cache", choices=["slots", "paged"], default="slots", help="engine.kv_cache of the engine")
    parser.add_argument(
        "--cudnn", choices=["accept", "refuse", "fail"], help="ask cuDNN for attention, which does so; default: do not"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps(rehearse(arguments.inside)), flush=True)
        os._exit(0)  # destructors of libraries expect a device
    import cuda_wheel

    wheel = cuda_wheel.install(arguments.wheel or cuda_wheel.CACHE)
    with tempfile.TemporaryDirectory() as folder:
        libraries, engine = Path(folder, "libraries"), Path(folder, "engine")
        libraries.mkdir()
        write_engine(engine, arguments.kv_cache)
        cuda_wheel.stand_ins(wheel, libraries)
        paths = {"PYTHONPATH": f"{wheel}{os.pathsep}{ROOT}", "LD_LIBRARY_PATH": str(libraries)}
        own = {**paths, "STAND_IN_SM": str(arguments.sm)}
        variables = {**os.environ, **own}
        if arguments.cudnn is None:
            variables["ORT_ENABLE_CUDNN_FLASH_ATTENTION"] = "0"
        else:
            variables["STAND_IN_CUDNN"] = arguments.cudnn
        command = [sys.executable, str(HERE), "--inside", str(engine)]
        done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    print(json.dumps(json.loads(done.stdout.splitlines()[-1]), indent=2))


if __name__ == "__main__":
    main()
