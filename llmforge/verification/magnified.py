"""A second run of a traced graph, on numbers that are larger than those of a text: limits, clips and soft caps are met.

Norms get larger weights, so that what products, routers and experts take grows, and the embeddings of one row are
larger, so that hidden states grow: in the graph by inputs, and in transformers' model in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph, interface
from llmforge.ir.operators import standard
from llmforge.trace.export.reference import Given, Observation, ReferenceModel
from llmforge.verification import magnified, probe
from llmforge.verification.trace_comparison import LARGER, rows_of

ADDED = 7.0  # to the weights of norms, which are about 1, or about 0 where a norm adds 1 itself
SCALES = (1.0, 64.0)  # of the embeddings, row by row
SCALE = "llmforge.scale"  # the input that the embeddings are multiplied by, fp32 [B, 1, 1]
TOKENS = 12
SEED = 20_250_812  # any fixed number


@dataclass(frozen=True, eq=False)
class Magnified:
    """A graph whose norms' weights and whose scale of embeddings are inputs."""

    model: ir.Model
    weights: Mapping[str, NDArray[np.float32]]  # of norms, as the checkpoint has them

    @classmethod
    def of(cls, model: ir.Model, reference: ReferenceModel) -> Magnified:
        """Make it of a clone of `model`, the graph of `reference`'s; weights that norms do not own alone are left."""
        clone = model.clone()
        weights = {}
        for norm in reference.norms():
            name = f"{norm.name}.weight"
            value = clone.graph.initializers.get(name)
            if value is not None:
                weights[name] = np.asarray(graph.tensor(value).numpy(), np.float32)
                del clone.graph.initializers[name]
                value.const_value = None
                clone.graph.inputs.append(value)
        scale = ir.Value(name=SCALE, shape=ir.Shape(("batch", 1, 1)), type=ir.TensorType(ir.DataType.FLOAT))
        clone.graph.inputs.append(scale)
        for lookup in _embeddings(clone, reference):
            _scale(clone, lookup.output, scale)
        return cls(clone, weights)

    def given(self, run: probe.Run) -> Mapping[str, NDArray[np.float32]]:
        """Return the inputs that `run` takes besides those of its steps: larger ones in the run of that name."""
        larger = run.name == LARGER
        scales = SCALES if larger else (1.0,) * run.batch
        added = np.float32(ADDED if larger else 0.0)
        made = {name: weight + added for name, weight in self.weights.items()}
        return {**made, SCALE: np.array(scales, np.float32)[:, None, None]}


def _embeddings(model: ir.Model, reference: ReferenceModel) -> list[standard.Gather]:
    """List what looks up the embeddings that `reference` multiplies.

    A multimodal model looks up another token where it puts what a tower makes, Where(…, pad, input_ids), and Gemma 4
    has other tables that it reads by `input_ids`, one a layer: the table tells, where a module holds it.
    """
    lookups = [each for each in standard.Gather.all(model) if each.output.dtype == ir.DataType.FLOAT]
    own = [each for each in lookups if each.data.name == reference.embedding]
    return own or [each for each in lookups if each.indices.name == interface.INPUT_IDS]


def run(vocabulary: int, context: int | None) -> probe.Run:
    """Make the run: a prefill of a row for each of `SCALES`, within `context` tokens (None: not bounded)."""
    rng = np.random.default_rng(SEED)
    tokens = TOKENS if context is None else min(TOKENS, context)
    rows = [rng.integers(0, vocabulary, tokens, np.int64) for _ in SCALES]
    return probe.schedule(LARGER, rows, [(tokens,) * len(rows)])


def _scale(model: ir.Model, value: ir.Value, scale: ir.Value) -> None:
    """Multiply `value` by `scale` for all its readers."""
    readers = list(value.uses())
    node = ir.node("Mul", [value, scale], name=f"{value.name}/scaled", num_outputs=1)
    output = node.outputs[0]
    output.name, output.shape, output.type = f"{value.name}/scaled", value.shape, value.type
    model.graph.insert_after(value.producer(), node)  # type: ignore[arg-type]
    for reader, index in readers:
        reader.replace_input_with(index, output)


class ReferenceRuns:
    """Runs of a checkpoint's model in transformers, whole or a `part` of it, each computed once.

    A run is known by its tokens and by what is computed of it: what was computed otherwise before is computed anew.
    """

    def __init__(self, checkpoint: Checkpoint, *, part: bool) -> None:
        self.part = part
        self.reference = ReferenceModel(checkpoint, part=part)
        self.given: list[Given] = []  # to each layer, in the run that was `watched`
        self._made: dict[tuple[Any, ...], list[Observation]] = {}

    def observed(
        self,
        run: probe.Run,
        kept: int,
        *,
        head: bool,
        watched: bool = False,
        shallow: bool = False,
        magnified_weights: Collection[str] | None = None,
    ) -> list[Observation]:
        """Run the rows of `run` one by one, and keep the logits of the last tokens of each.

        If it is `watched`, what each layer is given is written down in `given`; if `shallow`, some layers run. With
        `magnified_weights` of norms, all rows run at once, on larger embeddings and those weights.
        """
        rows = rows_of(run)
        weights = None if magnified_weights is None else tuple(sorted(magnified_weights))
        key = *(ids.tobytes() for ids in rows), kept, head, watched, shallow, weights
        if key in self._made:
            return self._made[key]
        if weights is not None:
            with self.reference.magnified(weights, magnified.ADDED, magnified.SCALES):
                made = self.reference.run_batch(np.stack(rows), kept, head=head)
        elif shallow:
            with self.reference.shallow():
                made = [self.reference.run(ids, min(len(ids), kept), head=head) for ids in rows]
        elif watched:
            with self.reference.watched() as self.given:
                made = [self.reference.run(ids, min(len(ids), kept), head=head) for ids in rows]
        else:
            made = [self.reference.run(ids, min(len(ids), kept), head=head) for ids in rows]
        return self._made.setdefault(key, made)
