"""What the tests of the scheduler and of the engine share: a small artifact, prompts, and collected answers."""

from __future__ import annotations

import queue
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmforge import targets
from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime import builder as engine
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import ForgeError
from llmforge.checkpoint import Checkpoint
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.recipe import EngineSpec
from llmforge.rewrite.pass_base import Context
from llmforge.runtime.config import RuntimeConfig
from llmforge.serving import Chunk, load
from llmforge.serving.prompts import read_tokenizer
from llmforge.serving.runner import Runner
from llmforge.serving.speculation import Payoff
from llmforge.trace import trace

from .decoder_graph import decoder

VOCABULARY = 8192
EOS = 5
SPEC = EngineSpec(max_context=96, max_batch=3, threads=1)


def small_runner(folder: Path, checkpoint: Path, spec: EngineSpec = SPEC) -> Runner:
    """Build the decoder of random weights into `folder` and load it with the sample checkpoint's tokenizer."""
    model, _ = engine.lower(decoder(VOCABULARY), targets.local())
    engine.build(BuildRequest(model, folder, spec, targets.local(), (EOS,), 0))
    config = RuntimeConfig.read(folder / "runtime.json")
    session = Session(folder / "model.onnx", config.session.resolve())
    return Runner(session, config, read_tokenizer(checkpoint / "tokenizer.json"), None)


def sample_runner(folder: Path, checkpoint: Path) -> Runner:
    """Build the trained sample checkpoint in fp32, fused as every recipe fuses it, for 8 answers at once."""
    opened, target = Checkpoint.open(checkpoint), targets.local()
    model = trace(opened)
    for step in (FuseNorms(), PackQkv(), PackGateUp(), FlashAttention()):
        assert step.run(model, Context(target))
    lowered, _ = engine.lower(model, target)
    spec = EngineSpec(max_context=1024, max_batch=8, threads=1)
    ends = opened.eos_token_ids, opened.bos_token_id
    engine.build(BuildRequest(lowered, folder / "engine", spec, target, *ends))
    engine.write_tokenizer(opened, folder / "tokenizer")
    return load(folder)


class AlwaysPays(Payoff):
    """Lets every draft be verified."""

    def pays(self, key: Hashable, drafted: int, rows: int) -> bool:
        return True


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(10, VOCABULARY, length).tolist())


@dataclass
class Received:
    """Collects one answer; `receive` is what an engine calls."""

    chunks: list[Chunk] = field(default_factory=list)
    error: ForgeError | None = None
    done: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def receive(self, item: Chunk | ForgeError) -> None:
        assert not self.ended, "nothing comes after the end"
        if isinstance(item, ForgeError):
            self.error = item
        else:
            self.chunks.append(item)
        if self.ended:
            self.done.put(None)

    def wait(self, seconds: float = 60) -> Received:
        self.done.get(timeout=seconds)
        return self

    @property
    def ended(self) -> bool:
        return self.error is not None or (bool(self.chunks) and self.chunks[-1].finish_reason is not None)

    @property
    def tokens(self) -> list[int]:
        return [chunk.token_id for chunk in self.chunks if chunk.token_id is not None]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def reason(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None
