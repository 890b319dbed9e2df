"""The passes of a build in the cache: the keys of each, its proof, and the tensors that it made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.cache import Cache, CacheEntry, Key
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.adapters import Adapter
from llmforge.compile.reuse import (
    INDEX,
    PROOF,
    PROOF_CODE,
    TENSORS,
    Reuse,
    hash_of,
    hash_of_texts,
    modules_of,
    write_json,
)
from llmforge.gates import records
from llmforge.ir import graph
from llmforge.ir.scratch import Scratch
from llmforge.rewrite import options
from llmforge.rewrite.pass_base import Changes, Pass
from llmforge.verification.promises import Promises
from llmforge.verification.verifier import PassVerification

_SOURCE_CODE = "llmforge.checkpoint.quantized"
_ALIGNMENT_BYTES = 64
_LIMITS = ("budget", "retreat")  # options that decide nothing of what a pass writes


@dataclass(eq=False)
class PassChain:
    """The passes of one build, one after the other: `before` is the digest of all that the graph now depends on."""

    reuse: Reuse
    before: str
    calibration: str
    proven: Mapping[str, str]  # what proofs depend on besides: promises, texts, threads

    @classmethod
    def of(
        cls,
        reuse: Reuse,
        checkpoint: Checkpoint,
        calibration: str,
        promises: Promises,
        texts: Sequence[NDArray[np.int64]],
        threads: int,
        adapters: Sequence[Adapter] = (),
    ) -> PassChain:
        """Begin the chain of passes, which are held to `promises`; `texts` are those that budgets are measured on.

        Proofs run kernels on so many `threads`, which divide the work otherwise on others.
        `calibration` is the key of its results; `adapters` are those that requests choose.
        """
        of_weights = checkpoint.digest
        if checkpoint.layout is not None:  # they are what the code makes of them that reads its layout
            of_weights = reuse.key("source", [_SOURCE_CODE], checkpoint=of_weights).digest
        if adapters:
            of_weights = hash_of([of_weights, *((each.name, each.digest, each.source.weight) for each in adapters)])
        proven = {"promises": hash_of(asdict(promises)), "texts": hash_of_texts(texts), "threads": str(threads)}
        return cls(reuse, of_weights, calibration, proven)

    def step(self, step: Pass, model: ir.Model) -> CachedPass:
        """Make the keys of `step`, which is to run on `model`; the next pass follows it.

        A pass that is defined outside of the package has keys that no other build has: its code is not known.
        """
        modules = modules_of(step)
        outside = [module for module in modules if not self.reuse.code.has(module)]
        known = not outside
        given = options.values(step)
        parts = {
            "after": self.before,
            "graph": graph.fingerprint(model),
            "pass": step.name,
            "options": json.dumps(
                {name: value for name, value in given.items() if name not in _LIMITS}, sort_keys=True
            ),
            "calibration": self.calibration if step.demands() else "",
            "outside": "" if known else f"{', '.join(outside)}, in build {self.reuse.build}",
        }
        modules = modules if known else []
        tensors = self.reuse.key("tensors", modules, **parts)
        budget = json.dumps(given.get("budget"))
        proof = self.reuse.key("proof", [*modules, PROOF_CODE], **parts, **self.proven, budget=budget)
        self.before = tensors.digest
        return CachedPass(self.reuse.cache, tensors, proof if known else None)


@dataclass(frozen=True, eq=False)
class CachedPass:
    """A pass of a build, between the graph before and the one after it."""

    cache: Cache
    tensors: Key
    proof: Key | None  # None: it cannot be reused

    @contextmanager
    def computing(self) -> Iterator[CacheEntry | None]:
        """Be the only build that proves this pass on this graph; gives the proof where there is one."""
        if self.proof is None:
            yield None
            return
        with self.cache.computing(self.proof) as entry:
            yield entry

    def keep_tensors(
        self, model: ir.Model, before: Mapping[str, ir.TensorProtocol | None], scratch: Scratch | None = None
    ) -> None:
        """Compute the tensors that the pass made, once for all that read them, or take those of an earlier build.

        Of the initializers of `model` that were not there `before`, that is all but what is in memory and what can be
        seen to be made of others (`llmforge.ir.derived`): those stay references. The `scratch` of the pass is for where
        they cannot be kept.
        """
        there = {id(tensor) for tensor in before.values()}
        made = {
            name: value
            for name, value in model.graph.initializers.items()
            if type(value.const_value) is ir.LazyTensor and id(value.const_value) not in there
        }
        if not made:
            return
        entry = None if self.proof is None else self.cache.find(self.tensors)
        if entry is not None and set(entry.json(INDEX)) != set(made):
            self.cache.notes.append(
                f"cache: the tensors of pass {self.tensors.parts['pass']} are others than were kept"
            )
            return
        if entry is None:
            tensors = {name: graph.tensor(value) for name, value in made.items()}
            with nullcontext() if scratch is None else scratch.idle():
                entry = self.cache.put(self.tensors, partial(_write_tensors, tensors))
        if entry is None:  # the disk is full: they are computed whenever they are read
            return
        for name, (offset, size_bytes) in entry.json(INDEX).items():
            tensor = graph.tensor(made[name])
            read = partial(_mapped, entry.path / TENSORS, offset, size_bytes, tensor.dtype, tensor.shape.numpy(), name)
            made[name].const_value = ir.LazyTensor(read, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=name)

    def reused(self, entry: CacheEntry | None, model: ir.Model, changes: Changes) -> records.VerificationRecord | None:
        """Return what the kept proof `entry` found, where the pass did on `model` what it did when that was made."""
        if entry is None:
            return None
        kept = entry.json(PROOF)
        if kept["graph"] != graph.fingerprint(model) or kept["changes"] != _plain(changes):
            self.cache.notes.append(
                f"cache: pass {self.tensors.parts['pass']} made another graph than when it was proven; proven again"
            )
            return None
        return records.VerificationRecord.model_validate({**kept["found"], "seconds": 0.0}, strict=False)

    def keep_proof(self, found: PassVerification, model: ir.Model, changes: Changes) -> None:
        """Keep what the proof of the pass found."""
        if self.proof is not None and self.cache.find(self.proof) is None:
            record = records.VerificationRecord.model_validate(found, from_attributes=True)
            kept = {
                "graph": graph.fingerprint(model),
                "changes": _plain(changes),
                "found": record.model_dump(mode="json"),
            }
            self.cache.put(self.proof, partial(write_json, PROOF, kept))


def _plain(changes: Changes) -> dict[str, Any]:
    return asdict(changes)


def _write_tensors(tensors: Mapping[str, ir.TensorProtocol], folder: Path) -> None:
    """Write `tensors` one after the other, and where each begins; the largest is in memory, not all."""
    places = {}
    with (folder / TENSORS).open("wb") as stream:
        for name, tensor in tensors.items():
            stream.seek(math.ceil(stream.tell() / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
            places[name] = stream.tell(), tensor.nbytes
            if tensor.dtype.bitwidth < 8:  # packed where it is stored, and nowhere else
                stream.write(tensor.tobytes())
            else:  # without a copy
                stream.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)
    write_json(INDEX, places, folder)


def _mapped(
    file: Path, offset: int, size_bytes: int, dtype: ir.DataType, shape: Sequence[int], name: str
) -> ir.TensorProtocol:
    return ir.ExternalTensor(str(file), offset, size_bytes, dtype, shape=ir.Shape(shape), name=name)
