"""Prove that the initializers of a traced graph are the parameters that they are called by: all of them, by numbers.

What a parameter holds is taken from transformers' own model, where that has it in memory, or read from the checkpoint
by the safetensors library; not by the code that bound the graph. Small parameters are compared whole, and so are tables
of which tokens or positions choose rows, and the head: no run reads all their rows. Of others some rows are: that a
tensor belongs to another parameter, or lies transposed, shows in each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import graph, interface, operators
from llmforge.ir.derived import Stored
from llmforge.ir.operators import standard
from llmforge.trace.export.parameters import Parameters
from llmforge.trace.export.reference import ReferenceModel

WHOLE_BYTES = 1 << 16  # parameters up to this size are compared in all numbers: norms and biases
ROWS = 4  # of a larger one: the first, the last, and others
CHUNK_NUMBERS = 1 << 23  # of a table that are compared at a time
SEED = 20_250_311  # any fixed number

HINT = "this is a bug in llmforge's support of this architecture; nothing was built"


def require_bound(
    checkpoint: Checkpoint, model: ir.Model, reference: ReferenceModel, idle: Collection[str] = ()
) -> int:
    """Hold every parameter of `model` against that of the checkpoint; return how many there are.

    Parameters that are `idle` the model reads, too, and no number follows from them.

    Raises:
        VerificationError: one holds other numbers, one that is expected is not there, or the other way round.
    """
    rng = np.random.default_rng(SEED)
    held = {
        name: value
        for name, value in model.graph.initializers.items()
        if graph.sources(value) and (value.uses() or value.is_graph_output())
    }
    expected = Parameters(checkpoint, reference)
    if strange := sorted(set(held) - set(expected.names)):
        raise VerificationError(f"the traced graph has {strange[0]}, which is no parameter of the model", hint=HINT)
    lacking = sorted(set(expected.names) - set(held) - set(idle))
    if lacking and (lacking := sorted(reference.read_by_text(lacking))):
        raise VerificationError(
            f"nothing in the traced graph reads parameter {lacking[0]}, which the model has", hint=HINT
        )
    with expected:
        for name, value in held.items():
            if graph.sources(value) != [name]:
                raise VerificationError(f"the traced graph takes {name} from {graph.sources(value)}", hint=HINT)
            if _is_table(value):
                _compare_all(name, graph.tensor(value), expected)
            else:
                _compare(name, graph.tensor(value), expected, rng)
    return len(held)


def _is_table(value: ir.Value) -> bool:
    """Say whether a node looks up rows of a parameter, or makes the logits of its rows."""
    readers = [(node, index) for node, index in value.uses()]
    readers += [
        (node, 1) for reader, _ in readers if standard.Transpose.matches(reader) for node, _ in reader.outputs[0].uses()
    ]
    return len(graph.dims(value) or ()) == 2 and any(
        (operand := operators.operand(node, index)) is not None
        and (operand.table or any(made.name == interface.LOGITS for made in node.outputs))
        for node, index in readers
    )


def _refuse_cleared_rows(
    name: str, rows: NDArray[np.int64], wanted: NDArray[Any], ways: Sequence[NDArray[Any]]
) -> None:
    """Return if the rows that differ are no rows that transformers clears as it loads a checkpoint.

    Some of its models (Youtu, Emu3) initialize the row of the padding token through a view of the table, which their
    loader does not know to be loaded: it writes zeros over what the checkpoint holds.
    """
    for got in ways:
        differ = np.array([not np.array_equal(a, b) for a, b in zip(got, wanted, strict=True)])
        if wanted.ndim == 2 and not differ.all() and not wanted[differ].any():
            cleared = ", ".join(map(str, rows[differ]))
            raise CheckpointError(
                f"transformers writes zeros over row {cleared} of {name}, that of the padding token, while it loads "
                "the checkpoint, which holds other numbers there; servers that load it otherwise give other logits",
                hint="set pad_token_id to null in config.json, or write zeros into the row",
            )


def _compare(name: str, tensor: ir.TensorProtocol, expected: Parameters, rng: np.random.Generator) -> None:
    """Compare a parameter whole if it is small, else some of its rows."""
    shape = _shape(name, tensor, expected)
    count = shape[0] if shape else 1
    whole = tensor.nbytes <= WHOLE_BYTES or len(shape) < 2
    rows = np.arange(count) if whole else np.unique([0, count - 1, *rng.integers(0, count, ROWS - 2)])
    if (
        isinstance(tensor, Stored) and not tensor.is_matrix and shape
    ):  # of experts that lie apart, the first of those that are read together
        rows = rows[rows < tensor.first().shape[0]]
    _compare_rows(name, rows, expected.rows(name, rows), _ways(tensor, shape))


def _compare_all(name: str, tensor: ir.TensorProtocol, expected: Parameters) -> None:
    """Compare every row of a matrix, some at a time where they can be read so."""
    count, width = _shape(name, tensor, expected)
    ways = _ways(tensor, (count, width))
    size = max(1, CHUNK_NUMBERS // width) if expected.reads_rows(name) else count
    for at in range(0, count, size):
        rows = np.arange(at, min(at + size, count))
        _compare_rows(name, rows, expected.rows(name, rows), ways)


def _shape(name: str, tensor: ir.TensorProtocol, expected: Parameters) -> tuple[int, ...]:
    """Return the shape of a parameter, which `tensor` has, too, or that of its transposed matrix."""
    shape, stored = expected.shape(name), tuple(tensor.shape.numpy())
    turned = (*shape[:-2], *shape[:-3:-1])
    if stored not in (shape, turned):
        raise VerificationError(
            f"the traced graph holds {name} as {list(stored)}; the model has it as {list(shape)}", hint=HINT
        )
    return shape


def _compare_rows(
    name: str, rows: NDArray[np.int64], wanted: NDArray[np.float32], ways: Sequence[NDArray[Any]]
) -> None:
    read = [np.asarray(array[rows] if array.ndim else array).astype(np.float32) for array in ways]
    same_shape = [got for got in read if got.shape == wanted.shape]
    if any(np.array_equal(got, wanted) for got in same_shape):
        return
    _refuse_cleared_rows(name, rows, wanted, same_shape)
    raise VerificationError(
        f"the traced graph holds other numbers for parameter {name} than the checkpoint does", hint=HINT
    )


def _ways(tensor: ir.TensorProtocol, shape: tuple[int, ...]) -> list[NDArray[Any]]:
    """Read the parameter of `shape` that `tensor` holds, as it is or transposed: a square one either way."""
    stored = tuple(tensor.shape.numpy())
    if isinstance(tensor, Stored) and tensor.is_matrix:
        return [tensor.stored()]
    array = tensor.first() if isinstance(tensor, Stored) and len(shape) > 2 else tensor.numpy()
    ways = [array] if stored == shape else []
    if len(shape) >= 2 and stored == (*shape[:-2], shape[-1], shape[-2]):
        ways.append(array.swapaxes(-1, -2))
    return ways


MAGNITUDES = (1e-4, 1e-3, 1e-2, 1.0, 1e3)  # of the rows; 1e-4² is 1e-8, and epsilons are 1e-12 … 1e-5
NORM_TOLERANCE = 1e-4  # of a row's largest number: fp32
NORM_SEED = 20_250_607  # any fixed number


def require_right(model: ir.Model, reference: ReferenceModel) -> int:
    """Hold the norms of `model` against those of transformers' `reference` whose numbers are in memory.

    Return how many were; norms that are no modules are left to runs.

    Raises:
        VerificationError: one gives other numbers; names it.
    """
    modules = {norm.name: norm for norm in reference.norms()}
    rng, proven = np.random.default_rng(NORM_SEED), 0
    for node in model.graph:
        module = modules.get(str(node.name).split("/")[0])
        norm = standard.RMSNormalization.of(node) or standard.LayerNormalization.of(node)
        if module is None or norm is None or not module.in_memory:
            continue
        scale = _norm_weight(norm.scale)
        bias = graph.operand(node, 2)
        shift = None if bias is None else _norm_weight(bias)
        if scale is None or (bias is not None and shift is None):
            continue
        x = rng.standard_normal((len(MAGNITUDES), len(scale))).astype(np.float32)
        x *= np.array(MAGNITUDES, np.float32)[:, None]
        wanted = module.compute(x)
        got = _norm(x, scale, shift, norm.epsilon, centred=isinstance(norm, standard.LayerNormalization))
        proven += 1
        if not (np.abs(got - wanted).max(-1) <= NORM_TOLERANCE * np.abs(wanted).max(-1)).all():
            row = int(np.argmax(np.abs(got - wanted).max(-1) / np.abs(wanted).max(-1)))
            raise VerificationError(
                f"{node.name} (epsilon {norm.epsilon:g}) gives other numbers than the model's {module.kind} "
                f"for a row of magnitude {MAGNITUDES[row]:g}",
                hint=HINT,
            )
    return proven


def _norm(
    x: NDArray[np.float32],
    scale: NDArray[np.float32],
    shift: NDArray[np.float32] | None,
    epsilon: float,
    *,
    centred: bool,
) -> NDArray[np.float64]:
    """Compute ONNX's RMSNormalization, or LayerNormalization, of the last axis."""
    wide = x.astype(np.float64)
    wide -= wide.mean(-1, keepdims=True) if centred else 0.0
    y = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + epsilon) * scale
    return np.asarray(y if shift is None else y + shift)


def _norm_weight(value: ir.Value) -> NDArray[np.float32] | None:
    """Evaluate a vector that is an initializer, or the sum of two; None: it is something else."""
    if graph.is_constant(value):
        return np.asarray(graph.tensor(value).numpy(), np.float32)
    node = value.producer()
    if node is None or standard.Add.of(node) is None:
        return None
    a, b = (None if part is None else _norm_weight(part) for part in node.inputs)
    return None if a is None or b is None else a + b
