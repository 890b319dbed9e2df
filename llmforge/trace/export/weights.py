"""Give the initializers of a traced graph the tensors of a checkpoint, lazily: nothing is read here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.encoding import Answers
from llmforge.checkpoint.safetensors_file import TensorEntry
from llmforge.ir import graph as g
from llmforge.ir.derived import Stored
from llmforge.ir.operators import standard

if TYPE_CHECKING:  # a graph that was kept is bound to a checkpoint without torch, which takes seconds to import
    import torch
    from transformers import PreTrainedModel

    from llmforge.trace.hooks import internals

BINDINGS = "llmforge.bindings"  # key of a model's `meta`, which is not written to files: its `Bindings`
HEAD = "lm_head.weight"  # transformers' name of the matrix that gives logits, where it is no other
SCORE = "score.weight"  # and of that of a decoder's classifier
UNUSED = "llmforge.unused_tensors"  # metadata_props key of a model: JSON list of the checkpoint's tensors without a use


@dataclass(frozen=True)
class ParameterSource:
    """Where a parameter comes from: one tensor as it is, or several through a converter of transformers."""

    tensors: tuple[str, ...]
    converted: Callable[[], Iterator[torch.Tensor]] | None = None  # slices of the first axis, in order: often only one
    matrices: tuple[tuple[str, ...], ...] = ()  # tensors on top of each other in each slice, where it is made so


@dataclass(frozen=True)
class TensorLookups:
    """What a checkpoint was asked for (`Checkpoint.require`), and which tensor it found for each."""

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]
    found: Mapping[str, str]


class WeightPlan(dict[str, ParameterSource]):
    """The source of every parameter, and what the checkpoint was asked for to find it."""

    def __init__(self, sources: Mapping[str, ParameterSource], asked: TensorLookups) -> None:
        super().__init__(sources)
        self.asked = asked


@dataclass(frozen=True)
class Bindings:
    """What initializers of a graph were bound to: by name, the source and whether it is held transposed."""

    asked: TensorLookups
    of: Mapping[str, tuple[ParameterSource, bool]]


def plan(model: PreTrainedModel, checkpoint: Checkpoint) -> WeightPlan:
    """Find the source of every parameter and persistent buffer of `model`, as transformers renames and converts.

    Raises:
        CheckpointError: a parameter has no tensor, or one of another shape.
        UnsupportedError: the model's state holds other things than weights.
    """
    from llmforge.trace.hooks import internals

    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    groups = internals.sources_by_parameter(model, list(checkpoint.tensors))
    sources: dict[str, ParameterSource] = {}
    names: dict[str, str] = {}  # parameter → the tensor that carries it under another name
    for target, group in groups.items():
        if group.converter is None:
            names[target] = group.keys[0]
        else:
            sources |= _converted(model, checkpoint, group, shapes)
    answers = None if checkpoint.encoding is None else checkpoint.encoding.answers
    plain = {name: shape for name, shape in shapes.items() if name not in sources and not (answers and name == SCORE)}
    for name in plain:
        if not state[name].is_floating_point():
            raise UnsupportedError(
                f"{name!r} of its state holds {state[name].dtype}, not weights",
                hint="needed: initializers of integers in the frontend, and a proof of what reads them",
            )
    ties = {names.get(a, a): names.get(b, b) for a, b in model.all_tied_weights_keys.items()}
    wanted = {names.get(name, name): shape for name, shape in plain.items()}
    found = checkpoint.require(wanted, ties)
    own = {name: ParameterSource((found[names.get(name, name)],)) for name in plain}
    if answers is not None:
        own[SCORE] = _score(model, checkpoint, answers, own)
    return WeightPlan(sources | own, TensorLookups(wanted, ties, found))


def _score(
    model: PreTrainedModel, checkpoint: Checkpoint, answers: Answers, sources: Mapping[str, ParameterSource]
) -> ParameterSource:
    """Make the matrix [1, H] of a head that scores, of a causal model's rows for its answers."""
    import torch

    table: Any = model.get_input_embeddings()
    shared = next(name for name, tensor in model.named_parameters() if tensor is table.weight)
    [tensor] = (HEAD,) if HEAD in checkpoint.tensors else sources[shared].tensors
    if checkpoint.tensors[tensor].shape != tuple(table.weight.shape):
        raise UnsupportedError(f"{tensor!r} is no table of logits, a row for each token")

    def read() -> Iterator[torch.Tensor]:
        rows = np.asarray(checkpoint.tensor(tensor).numpy()[[answers.yes, answers.no]], np.float32)
        yield torch.from_numpy(rows[:1] - rows[1:])

    return ParameterSource((tensor,), read)


def untie(model: PreTrainedModel, sources: Mapping[str, ParameterSource]) -> None:
    """Take parameters apart that the architecture ties and the checkpoint holds with different content."""
    import torch

    from llmforge.trace.hooks import internals

    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if sources[first.setdefault(id(parameter), name)] != sources[name]:
            owner, _, leaf = name.rpartition(".")
            with internals.mode_of(parameter):
                own = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=False)
            setattr(model.get_submodule(owner), leaf, own)


def attach(graph: ir.Model, prefix: str, model: PreTrainedModel, checkpoint: Checkpoint, sources: WeightPlan) -> None:
    """Name the initializers of `graph` by parameters of `model` and give them their tensors.

    `prefix` is what the trace put before parameter names. A weight that the graph only reads transposed becomes
    [K, N] itself, weights of experts [E, K, N]. Tables and constants that the model computed move from torch to numpy.
    """
    canonical = _canonical_names(model)
    bound: dict[str, tuple[ParameterSource, bool]] = {}
    for value in list(graph.graph.initializers.values()):
        name = (value.name or "").removeprefix(prefix)
        if name not in canonical:
            if value.const_value is not None:
                value.const_value = ir.Tensor(value.const_value.numpy(), name=name)
            value.name = name
            continue
        value.name = name = canonical[name]
        bound[name] = sources[name], _bind(graph, value, sources[name], checkpoint)
        g.set_sources(value, [name])
    used = {tensor for source in sources.values() for tensor in source.tensors}
    graph.metadata_props[UNUSED] = json.dumps(sorted(set(checkpoint.tensors) - used))
    g.drop_unused(graph)
    graph.meta[BINDINGS] = Bindings(
        sources.asked, {name: bound[name] for name in graph.graph.initializers if name in bound}
    )


def _canonical_names(model: PreTrainedModel) -> dict[str, str]:
    """Map each name of the model's state to the first of those that share its tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def _bind(graph: ir.Model, value: ir.Value, source: ParameterSource, checkpoint: Checkpoint) -> bool:
    """Give one initializer its tensor, transposed where all its readers transpose it; return whether they do."""
    uses = value.uses()
    readers = [view for node, _ in uses if (view := standard.Transpose.of(node)) is not None]
    transposed = 0 < len(readers) == len(uses) and all(
        list(transpose.perm) in ([1, 0], [0, 2, 1]) for transpose in readers
    )
    name, dtype, dims = value.name or "", value.dtype, g.dims(value)
    if dtype is None or dims is None:
        raise UnsupportedError(f"parameter {name} has no type or shape in the trace")
    shape = ir.Shape([*dims[:-2], dims[-1], dims[-2]] if transposed else dims)
    value.const_value = tensor_of(checkpoint, source, shape, dtype, name, transposed=transposed)
    value.shape = shape
    if transposed:
        for transpose in readers:
            g.replace_uses(transpose.output, value)
    return transposed


def tensor_of(
    checkpoint: Checkpoint, source: ParameterSource, shape: ir.Shape, dtype: ir.DataType, name: str, *, transposed: bool
) -> ir.TensorProtocol:
    """Make the tensor of a parameter: the file's bytes where dtype and layout match, else a lazy cast."""
    is_mapped = source.converted is None and isinstance(checkpoint.tensors[source.tensors[0]], TensorEntry)
    if not transposed and is_mapped and checkpoint.tensors[source.tensors[0]].dtype == dtype:
        tensor: ir.TensorProtocol = checkpoint.tensor(source.tensors[0])
        tensor.name = name
        return tensor
    sources = source.matrices if len(shape) > 2 else ()
    if source.converted is None and len(shape) == 2:
        sources = (source.tensors,)
    return Stored(_pieces(checkpoint, source), dtype, shape, name, transposed=transposed, sources=sources)


def _pieces(checkpoint: Checkpoint, source: ParameterSource) -> Callable[[], Iterable[NDArray[Any]]]:
    """Make the function that reads a parameter piece by piece, in its stored dtype and the layout of transformers."""
    converted = source.converted
    if converted is None:
        return lambda: [checkpoint.tensor(source.tensors[0]).numpy()]
    return lambda: map(_numpy, converted())


def load(checkpoint: Checkpoint, source: ParameterSource) -> torch.Tensor:
    """Read the parameter that `source` makes, in its stored dtype and the layout of transformers."""
    import torch

    if source.converted is None:
        return _torch(checkpoint.tensor(source.tensors[0]))
    return torch.cat(list(source.converted()))


def load_fp32(checkpoint: Checkpoint, source: ParameterSource) -> torch.Tensor:
    """Read it in fp32, which holds every number of bf16 and fp16; a table of a file is not copied on the way."""
    import torch

    if source.converted is not None:
        return load(checkpoint, source).to(torch.float32)
    [name] = source.tensors
    stored = checkpoint.tensor(name).numpy()
    widened = np.empty(stored.shape, np.float32)
    widened[...] = stored
    return torch.from_numpy(widened)


def _converted(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    group: internals.ConversionGroup,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, ParameterSource]:
    """Plan the parameters that one converter makes, by running it on tensors without memory."""
    import torch

    made = _convert(
        model, group, {key: torch.empty(checkpoint.tensors[key].shape, device="meta") for key in group.keys}
    )
    sources = {}
    for name, tensor in made.items():
        if name not in shapes:
            raise UnsupportedError(f"transformers converts {group.keys[0]!r} to {name!r}, which the model lacks")
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"{checkpoint.path}: {name!r}, made of {group.keys[0]!r}, has shape {list(tensor.shape)}, "
                f"the configuration makes it {list(shapes[name])}"
            )

        def read(name: str = name) -> Iterator[torch.Tensor]:
            for piece in group.pieces():
                yield _convert(model, piece, {key: _torch(checkpoint.tensor(key)) for key in piece.keys})[name]

        sources[name] = ParameterSource(tuple(group.keys), read, group.rows() if len(made) == 1 else ())
    return sources


def _convert(
    model: PreTrainedModel, group: internals.ConversionGroup, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    converter: Any = deepcopy(group.converter)  # typed for futures, which transformers fills it with
    for key, pattern in zip(group.keys, group.patterns, strict=True):
        converter.collected_tensors[pattern].append(tensors[key])
    results = converter.convert(group.target, model=model, config=model.config)
    return {name: result[0] if isinstance(result, list) else result for name, result in results.items()}


def _torch(tensor: ir.TensorProtocol) -> torch.Tensor:
    """Hand a mapped tensor to torch; bf16, which numpy lacks, through its bits."""
    import torch

    array = np.array(tensor.numpy())
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    """Take a tensor back from torch."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
