"""The process of one rank of `cuda_ranks.py`: the runtime's own, over a device that computes nothing.

After every command it writes what the device was asked, to the file `rankN.json` of the folder CUDA_RANKS.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import onnxruntime as ort

from llmforge.backends import loading
from llmforge.backends.ranks import worker
from llmforge.backends.ranks.messages import Call
from llmforge.runtime.config import RuntimeConfig
from llmforge.runtime.device import backend as device_backend
from llmforge.runtime.device.graph_capture import ONE, OTHER, CaptureResult
from tests.fakes.host_device import HostDevice


class StandIn(HostDevice):
    kind, name = "cuda", "stand-in"
    stream = 1  # whatever it is, the stand-in takes it

    def __init__(self, index: int, sm: int) -> None:
        self.index, self.sm = index, sm


def reach(config: RuntimeConfig, index: int, file: Path) -> StandIn:
    return StandIn(index, config.device.sm)


def take(capture: Any, probe: Any, *_: Any) -> CaptureResult:
    """Take the steps of a proof, whose results are zeros."""
    probe(ONE, graph=False)
    probe(ONE, graph=True)
    probe(OTHER, graph=True, moved=True)
    probe(OTHER, graph=True)
    return CaptureResult(capture, None, 0.0, 0.0, 0)


class Rank(worker._RankProcess):
    def do(self, call: Call) -> None:
        super().do(call)
        session, device = self._session._session, ctypes.CDLL("libcudart.so.13")
        device.stand_in_first_forbidden.restype = ctypes.c_char_p
        found = {
            "providers": session.get_providers(),
            "device": session.get_provider_options()["CUDAExecutionProvider"]["device_id"],
            "captures": device.stand_in_captures(),
            "replays": device.stand_in_replays(),
            "forbidden": device.stand_in_first_forbidden().decode(),
            "captured": [dataclasses.asdict(each.capture) for each in self._session.capture_results],
        }
        Path(os.environ["CUDA_RANKS"], f"rank{self._rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    ort.preload_dlls = lambda *_, **__: None  # the stand-ins are loaded already
    loading.reach, device_backend.verify_capture, worker._RankProcess = reach, take, Rank
    worker.main()
