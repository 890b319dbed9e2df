"""What a build takes from the cache, and what it leaves there for the next one: a key for each, and how it is kept.

A pass is run again over the graph, which takes milliseconds; what takes minutes, its proof and the numbers of the
tensors that it made, is reused. A graph that comes out otherwise than when it was proven is proven anew.

Keys form a chain: what a pass makes depends on the checkpoint, on all passes before it with their options, on the code
that computes them, of this package and of installed ones, and on what is calibrated. The target is no part of them:
passes cannot read it. Budgets are part of proofs alone: to change one proves one pass again.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge import artifact, trace
from llmforge.base import process
from llmforge.base.errors import CheckpointError
from llmforge.base.progress import Progress
from llmforge.cache import Cache, Code, Key, installed, processor, settings
from llmforge.checkpoint import Checkpoint, Configuration, Geometry
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile.frontend import Frontend
from llmforge.compile.overlap import PendingProof, ProofPool
from llmforge.gates import records
from llmforge.ir import graph
from llmforge.measure.baseline import Baseline, baseline_on
from llmforge.measure.quality import Logits
from llmforge.measure.streamed_baseline import States, StreamedBaseline
from llmforge.rewrite.pass_base import Pass
from llmforge.trace.export import kept_graph

PROOF, TENSORS, INDEX, CONFIGURATION = "proof.json", "tensors", "index.json", "configuration.json"
_CONFIGURATION_CODE = "llmforge.checkpoint.folder"
_TRACE_CODE = ("llmforge.trace", "llmforge.trace.export.kept_graph")
_TRACE_PROOF_CODE = "llmforge.verification.trace_verifier"
PROOF_CODE = "llmforge.verification.encoder_passes"  # and, which it imports, of decoders
_ENGINE_CODE = ("llmforge.backends.onnxruntime.builder", "llmforge.verification.streamed_execution")
_BASELINE_CODE = "llmforge.measure.baseline"
BASELINE_SHARE = 1 / 8  # of the cache that the logits of one text may take: 2.5 GB of 20, or 16,000 tokens of 150,000


@dataclass(frozen=True, eq=False)
class Reuse:
    """The cache of one build, and what all its keys have: code, tools, processor, settings of libraries."""

    cache: Cache
    code: Code = field(default_factory=Code)
    common: Mapping[str, str] = field(
        default_factory=lambda: {
            "tools": json.dumps(artifact.tool_versions()),
            "processor": processor(),
            "libraries": settings(),
        }
    )
    installed: Callable[[], str] = field(default_factory=lambda: once(installed.digest))  # digest of packages' code
    build: str = field(default_factory=lambda: secrets.token_hex(16))  # no other is called so
    stages: list[Literal["trace", "trace-proof", "engine", "baseline"]] = field(
        default_factory=list
    )  # that were reused
    layers: list[int] = field(default_factory=list)  # whose calibration was reused
    frontend: Frontend | None = None  # imports torch; None: this process does

    def record(self, passes: Iterable[records.PassRecord]) -> records.ReusedRecord:
        """Say what this build did not compute."""
        reused = tuple(done.name for done in passes if done.reused)
        return records.ReusedRecord(stages=tuple(self.stages), layers=tuple(sorted(self.layers)), passes=reused)

    def key(self, kind: str, modules: Sequence[str], **parts: str) -> Key:
        """Make the key of what the code of `modules` computes of `parts`."""
        of_all = {**self.common, "installed": self.installed(), "code": self.code.digest(*modules)}
        assert not parts.keys() & of_all.keys(), "a part that would be lost: all keys have one of its name"
        return Key(kind, {**parts, **of_all})

    def read_code(self, steps: Sequence[Pass]) -> None:
        """Read the code that the keys of a build with `steps` depend on, which `key` would do when it is asked."""
        modules = {module for step in steps for module in modules_of(step)}
        self.code.digest(*filter(self.code.has, modules), *_TRACE_CODE, *_ENGINE_CODE, _TRACE_PROOF_CODE, PROOF_CODE)

    def configure(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Let transformers read the configuration of `checkpoint`, or take what it read of the same settings before.

        Raises:
            CheckpointError, UnsupportedError: see `Checkpoint.open`.
        """
        key = self.key("configuration", [_CONFIGURATION_CODE], settings=hash_of(checkpoint.settings))
        with self.cache.computing(key) as entry:
            if entry is not None:
                checkpoint.configuration = _configuration(entry.json(CONFIGURATION))
            else:
                progress.stage("Load torch and transformers")
                if self.frontend is not None:
                    made = self.frontend.configuration(checkpoint.opened_from)
                    checkpoint.configuration = _configuration(made)
                else:
                    with process.unwatched():
                        from llmforge.trace.export import strategy  # noqa: F401  what tracing imports, and transformers
                    made = asdict(checkpoint.configuration)
                self.cache.put(key, partial(write_json, CONFIGURATION, made))
        checkpoint.check_tokens()

    def trace(self, checkpoint: Checkpoint, progress: Progress) -> ir.Model:
        """Trace the model of `checkpoint`, or take the graph of a checkpoint with this configuration and these shapes.

        Which of its tensors are equal is looked up again; nothing else of a trace depends on their content.

        Raises:
            CheckpointError, UnsupportedError: see `llmforge.trace.trace`.
        """
        shapes = [(e.name, e.dtype.name, e.shape) for e in sorted(checkpoint.tensors.values(), key=lambda e: e.name)]
        encoding = None if checkpoint.encoding is None else asdict(checkpoint.encoding)
        settings = hash_of([checkpoint.settings, encoding])
        key = self.key("trace", _TRACE_CODE, configuration=settings, tensors=hash_of(shapes))
        with self.cache.computing(key) as entry:
            found = None if entry is None else kept_graph.read(entry.path, checkpoint)
            progress.stage("Trace" if found is None else "Trace: reused")
            if found is not None:
                self.stages.append("trace")
                return found
            if self.frontend is not None:
                files = self.frontend.trace(checkpoint.opened_from)
                bound = kept_graph.load(files, checkpoint)
                if bound is None:
                    raise CheckpointError(f"{checkpoint.path}: it changed while it was traced")
                if entry is None:  # else it is of a checkpoint with other ties
                    self.cache.put(key, partial(kept_graph.store, files))
                return bound
            with process.uncollected():
                model = trace.trace(checkpoint)
            if entry is not None:  # of a checkpoint with other ties
                return model
            written = self.cache.put(key, partial(kept_graph.write, model))
            # This build goes on with what the next one will find.
            read = None if written is None else kept_graph.read(written.path, checkpoint)
            if read is None:
                return model
            assert graph.fingerprint(read) == graph.fingerprint(model), "a kept graph is not the one that was traced"
            return read

    def trace_proof(
        self,
        checkpoint: Checkpoint,
        model: ir.Model,
        threads: int,
        progress: Progress,
        proofs: ProofPool,
        prove: Callable[[], str],
    ) -> PendingProof[str]:
        """Begin the proof of a trace, or take that of an earlier build; it finds a note, which is what `prove` says.

        `prove` runs on so many `threads`.
        """
        parts = {"checkpoint": checkpoint.digest, "graph": graph.fingerprint(model), "threads": str(threads)}
        key = self.key("trace-proof", [_TRACE_PROOF_CODE], **parts)
        with ExitStack() as held:
            entry = held.enter_context(self.cache.computing(key))
            progress.stage("Verify trace" if entry is None else "Verify trace: reused")
            if entry is not None:
                self.stages.append("trace-proof")
                return PendingProof(str(entry.json(PROOF)))

            def run() -> str:
                note = prove()
                self.cache.put(key, partial(write_json, PROOF, note))
                return note

            return proofs.begin(held.pop_all(), run)

    def engine_proof(
        self, files: Mapping[str, str], facts: Mapping[str, str], prove: Callable[[], None], modules: Sequence[str] = ()
    ) -> None:
        """Load and run an engine of `files`, SHA-256 by name, unless an earlier build did; `facts` say how.

        `modules` are those of a plug-in that build and load it.
        """
        key = self.key("engine-proof", (*_ENGINE_CODE, *modules), files=hash_of(dict(files)), **facts)
        with self.cache.computing(key) as entry:
            if entry is not None:
                self.stages.append("engine")
                return
            prove()
            self.cache.put(key, partial(write_json, PROOF, "it was loaded, and its logits were finite"))

    def baseline(
        self,
        checkpoint: Checkpoint,
        windows: Sequence[TokenWindow],
        threads: int,
        baseline: Baseline | StreamedBaseline,
        progress: Progress,
    ) -> Logits:
        """Keep what the logits of the baseline, on so many threads, are on `windows`, and return them from there.

        Of one that runs layer by layer, the hidden states after its last layer are kept, which are smaller. Nothing is
        kept where the cache is this build's alone, or it would take more than `BASELINE_SHARE` of it.
        """
        texts = [window.ids for window in windows if len(window.ids) > 1]
        streamed = isinstance(baseline, StreamedBaseline)
        width = baseline.hidden if isinstance(baseline, StreamedBaseline) else checkpoint.geometry.vocabulary
        size_bytes = sum(map(len, texts)) * width * np.dtype(np.float32).itemsize
        if self.cache.limit_bytes is None or size_bytes > self.cache.limit_bytes * BASELINE_SHARE:
            return baseline_on(texts, baseline, progress)
        parts = {"checkpoint": checkpoint.digest, "texts": hash_of_texts(texts), "threads": str(threads)}
        key = self.key("baseline-states" if streamed else "baseline", [_BASELINE_CODE], **parts)
        with self.cache.computing(key) as entry:
            progress.stage("Run baseline" if entry is None else "Run baseline: reused")
            if entry is not None:
                self.stages.append("baseline")
            else:
                if isinstance(baseline, StreamedBaseline):
                    entry = self.cache.put(key, partial(_write_states, texts, baseline, progress))
                else:
                    entry = self.cache.put(key, partial(_write_logits, texts, baseline.logits, progress))
        if entry is None:  # the disk is full
            return baseline_on(texts, baseline, progress)
        if isinstance(baseline, StreamedBaseline):
            return baseline.logits_of(States((entry.path / TENSORS).open("rb"), entry.json(INDEX)))
        places, file = entry.json(INDEX), entry.path / TENSORS

        def kept(ids: NDArray[np.int64]) -> NDArray[np.float32]:
            offset, shape = places[hash_of_texts([ids])]
            return np.fromfile(file, np.float32, math.prod(shape), offset=offset).reshape(shape)

        return kept


@contextmanager
def opened(
    cache: Callable[[], Cache] | None, staging: Path, progress: Progress, frontend: Frontend | None = None
) -> Iterator[Reuse]:
    """Open the cache of a build; None: one in `staging` that is deleted at the end, so that nothing is reused."""
    private = staging / ".cache"
    with ThreadPoolExecutor(1, "installed") as pool, Cache(private) if cache is None else cache() as used:
        # Of a cache that is deleted nothing is reused: it needs not tell one state of the packages from another.
        packages = pool.submit(installed.digest if cache is not None else str)
        used.waiting = lambda: progress.stage("Wait for a build that computes the same")
        yield Reuse(used, Code(), installed=packages.result, frontend=frontend)
        if used.remote is not None and used.remote.signer is not None:
            progress.stage("Write to the remote cache")
            used.upload()
    if cache is None:
        shutil.rmtree(private)


def modules_of(step: Pass) -> list[str]:
    """Name the modules that compute a pass: its own, and those of the methods that it computes by."""
    return list(dict.fromkeys([type(step).__module__, *(method.__module__ for method in step.uses())]))


def _configuration(read: Mapping[str, Any]) -> Configuration:
    """Make a configuration of what was kept of one."""
    facts = dict(read)
    geometry = Geometry(**facts.pop("geometry"))
    lengths = tuple((name, tokens) for name, tokens in facts.pop("lengths"))
    return Configuration(geometry=geometry, lengths=lengths, **facts)


def hash_of(facts: Any) -> str:
    """Hash plain data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def hash_of_texts(texts: Sequence[NDArray[np.int64]]) -> str:
    """Hash the tokens of texts, and where each ends."""
    digest = hashlib.sha256()
    for ids in texts:
        digest.update(np.int64(len(ids)).tobytes() + np.asarray(ids, np.int64).tobytes())
    return digest.hexdigest()


def _write_logits(texts: Sequence[NDArray[np.int64]], logits: Logits, progress: Progress, folder: Path) -> None:
    """Write the logits [S, V] of each text, fp32, and where they are."""
    places = {}
    with (folder / TENSORS).open("wb") as stream:
        for done, ids in enumerate(texts):
            progress.advance(done, len(texts))
            made = np.ascontiguousarray(logits(ids), np.float32)
            places[hash_of_texts([ids])] = stream.tell(), made.shape
            stream.write(made.tobytes())
    write_json(INDEX, places, folder)


def _write_states(
    texts: Sequence[NDArray[np.int64]], baseline: StreamedBaseline, progress: Progress, folder: Path
) -> None:
    """Write the hidden states of each text after the last layer, and what they are."""
    with (folder / TENSORS).open("w+b") as stream:
        states = baseline.walk(texts, progress.advance, stream)
        write_json(INDEX, states.index, folder)


def write_json(name: str, facts: Any, folder: Path) -> None:
    """Write a file of an entry."""
    (folder / name).write_text(json.dumps(facts), encoding="utf-8")
