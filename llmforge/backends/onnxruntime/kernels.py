"""Kernels of an execution provider as data, and whether each node of a graph has one.

The CUDA provider cannot be asked on a machine without a GPU, so what the wheel holds is recorded in
`cuda_kernels.json` by `benchmarks/cuda_wheel.py`, which reads it from the wheel's own library:

    {"wheel": "onnxruntime-gpu==1.31.1", "provider": …, "read_by": …, "machine_code": [75, 80, …], "ptx": [],
     "kernels": {"com.microsoft::MatMulNBits": [[1, null, {"T1": "float16", "T2": "uint8", …}], …], …}}

`machine_code` lists the compute capabilities that the wheel has code for, `ptx` those of code that a driver compiles
for later ones. A kernel serves the versions first to last of its operator (null: no later one changed it), where every
parameter of its signature has one of the types named: that of the operator's schema, "T", or an input's own name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

import onnx_ir as ir
from onnxruntime.capi import onnxruntime_pybind11_state as native

from llmforge.base.errors import VerificationError
from llmforge.ir import operators
from llmforge.ir.operators.record import CUDA, FLOATS
from llmforge.ir.operators.standard import Cast, Constant, ConstantOfShape, DequantizeLinear, Loop

FILE = "cuda_kernels.json"

# As ONNX Runtime calls element types; those of its kernels that llmforge's graphs may hold.
_NAMES = (
    "float", "float16", "bfloat16", "double", "int4", "uint4", "int8", "uint8", "int32", "int64", "bool",
    "float8e4m3fn",
)  # fmt: skip
_DTYPES = {name: ir.DataType[name.upper()] for name in _NAMES}


@dataclass(frozen=True)
class Kernel:
    """One row of the record."""

    first: int
    last: int | None
    types: Mapping[str, frozenset[str]]

    def covers(self, since: int) -> bool:
        """Apply ONNX Runtime's rule (KernelRegistry::VerifyKernelDef): without an end, its own version alone."""
        return self.first == since or (self.last is not None and self.first < since <= self.last)

    def __str__(self) -> str:
        return ", ".join(f"{name}: {' or '.join(sorted(types))}" for name, types in sorted(self.types.items()))


@dataclass(frozen=True)
class Kernels:
    """The kernels of one provider, by (domain, operator)."""

    wheel: str
    table: Mapping[tuple[str, str], tuple[Kernel, ...]]

    def of(self, node: ir.Node, opset: int) -> list[Kernel]:
        """Return the kernels for the version of the node's operator that `opset` selects."""
        version = since(node, opset)
        return [kernel for kernel in self.table.get(operators.identity(node), ()) if kernel.covers(version)]

    def runs(self, node: ir.Node, opset: int, dtypes: Mapping[ir.Value, ir.DataType]) -> bool:
        """Say whether one of them takes the types of the node's inputs and outputs."""
        signature = _signature(node, since(node, opset), dtypes)
        return any(_fits(kernel, signature) for kernel in self.of(node, opset))


@functools.cache
def cuda() -> Kernels:
    """Read the record of the CUDA provider."""
    data = json.loads(resources.files("llmforge.backends.onnxruntime").joinpath(FILE).read_text(encoding="utf-8"))
    table = {}
    for name, rows in data["kernels"].items():
        domain, _, operator = name.rpartition("::")
        table[domain, operator] = tuple(
            Kernel(first, last, {key: frozenset(types.split()) for key, types in parameters.items()})
            for first, last, parameters in rows
        )
    return Kernels(data["wheel"], table)


def missing(model: ir.Model, kernels: Kernels, dtypes: Mapping[ir.Value, ir.DataType]) -> Iterator[tuple[ir.Node, str]]:
    """Yield the nodes of `model` that no kernel runs, subgraphs included, and what there is instead.

    A node with a subgraph, and a Constant, which becomes an initializer, need no kernel of their own types.
    """
    for node in model.graph.all_nodes():
        if Constant.matches(node) or node.op_identifier() in model.functions:
            continue
        opset = model.opset_imports.get(node.domain, 1)
        if node.domain == CUDA and operators.record(node) is not None:
            if dtypes[node.outputs[0]] not in FLOATS:
                yield node, "it takes fp16, bf16 and fp32"
            continue
        if kernels.runs(node, opset, dtypes):
            continue
        known = kernels.of(node, opset)
        if not known:
            yield node, "no kernel"
            continue
        # Only what the kernels constrain: the reader sees what differs.
        signature = _signature(node, since(node, opset), dtypes)
        asked = {name: dtype for name, dtype in signature.items() if any(name in kernel.types for kernel in known)}
        have = "; ".join(map(str, known))
        given = ", ".join(f"{name} {dtype}" for name, dtype in sorted(asked.items()))
        yield node, f"no kernel with {given}; it has {have}"


def _fits(kernel: Kernel, signature: Mapping[str, str]) -> bool:
    return all(dtype in kernel.types[name] for name, dtype in signature.items() if name in kernel.types)


def _signature(node: ir.Node, since: int, dtypes: Mapping[ir.Value, ir.DataType]) -> dict[str, str]:
    """Name the type of each parameter and each input of `node`."""
    schema = _schemas()[*operators.identity(node), since]
    signature: dict[str, str] = {}
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, value in enumerate(values):
            if value is None or value.name == "":  # left out
                continue
            parameter = formal[min(index, len(formal) - 1)]
            name = dtypes[value].name.lower()
            signature.setdefault(parameter.typeStr, name)
            signature.setdefault(parameter.name, name)
    return signature


def infer(model: ir.Model) -> dict[ir.Value, ir.DataType]:
    """Find the type of every value from the inputs and initializers on, by ONNX Runtime's schemas.

    What nodes declare for their outputs is not trusted: a pass may have changed the types in front of them.

    Raises:
        VerificationError: an operator has no schema, two inputs of one parameter have different types, or an output's
            type does not follow from the inputs.
    """
    dtypes: dict[ir.Value, ir.DataType] = {}
    _infer(model, model.graph, dtypes)
    return dtypes


def _infer(model: ir.Model, graph: ir.Graph, dtypes: dict[ir.Value, ir.DataType]) -> None:
    for value in [*graph.inputs, *graph.initializers.values()]:
        dtype = value.dtype if value.const_value is None else value.const_value.dtype
        if dtype is None:
            raise VerificationError(f"{value.name} has no type")
        dtypes[value] = dtype
    for node in graph:
        subgraphs = [item for item in node.attributes.values() if item.type == ir.AttributeType.GRAPH]
        for attribute in subgraphs:
            _infer(model, attribute.as_graph(), dtypes)
        if subgraphs:  # Loop, Scan and If: outputs have the types of the body's; a Loop's has its condition in front
            made = subgraphs[0].as_graph().outputs[1 if Loop.matches(node) else 0 :]
            dtypes |= {output: dtypes[inner] for output, inner in zip(node.outputs, made, strict=False)}
        elif node.domain == CUDA:  # of our own library: what they make has the type of what they read
            [read] = node.inputs
            assert read is not None
            dtypes[node.outputs[0]] = dtypes[read]
        else:
            _infer_node(node, model.opset_imports.get(node.domain, 1), dtypes)


def _infer_node(node: ir.Node, opset: int, dtypes: dict[ir.Value, ir.DataType]) -> None:
    schema = _schemas().get((*operators.identity(node), since(node, opset)))
    if schema is None:
        operator = f"{operators.qualified(node)} (opset {opset})"
        raise VerificationError(f"node {node.name}: ONNX Runtime has no operator {operator}")
    bound: dict[str, ir.DataType] = {}
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        parameter = schema.inputs[min(index, len(schema.inputs) - 1)]
        heterogeneous = not parameter.isHomogeneous
        if bound.setdefault(parameter.typeStr, dtypes[value]) != dtypes[value] and not heterogeneous:
            raise VerificationError(
                f"node {node.name}: input {parameter.name} of {node.op_type} is {dtypes[value].name}, another one of "
                f"type {parameter.typeStr} is {bound[parameter.typeStr].name}"
            )
    for index, value in enumerate(node.outputs):
        parameter = schema.outputs[min(index, len(schema.outputs) - 1)]
        dtypes[value] = _output(node, schema, parameter.typeStr, bound)


def _output(
    node: ir.Node, schema: native.schemadef.OpSchema, kind: str, bound: Mapping[str, ir.DataType]
) -> ir.DataType:
    """Find the type of an output whose parameter is `kind`."""
    if operators.is_a(node, Cast, Constant, ConstantOfShape, DequantizeLinear):  # an attribute, or the scales say it
        dtype = operators.view(node).output_dtype(0)
        if dtype is not None:
            return dtype
    if kind in bound:
        return bound[kind]
    constraints = {item.type_param_str: list(item.allowed_type_strs) for item in schema.type_constraints}
    allowed = constraints.get(kind, [kind])
    names = [name.removeprefix("tensor(").removesuffix(")") for name in allowed]
    if len(names) == 1 and names[0] in _DTYPES:
        return _DTYPES[names[0]]
    raise VerificationError(
        f"node {node.name}: the type of an output of {node.op_type} does not follow from its inputs"
    )


def since(node: ir.Node, opset: int) -> int:
    """Return the version of the node's operator that `opset` selects; 0 where there is none."""
    return max((each for each in _versions().get(operators.identity(node), ()) if each <= opset), default=0)


@functools.cache
def _schemas() -> dict[tuple[str, str, int], native.schemadef.OpSchema]:
    return {(schema.domain, schema.name, schema.since_version): schema for schema in native.get_all_operator_schema()}


@functools.cache
def _versions() -> dict[tuple[str, str], list[int]]:
    versions: dict[tuple[str, str], list[int]] = {}
    for domain, name, since in _schemas():
        versions.setdefault((domain, name), []).append(since)
    return versions
