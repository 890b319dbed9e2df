"""Operators that ONNX lacks, where a model computes with them from constants alone: their result becomes one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from llmforge.trace.hooks import internals

LACKING = (torch.ops.aten.erfinv.default,)  # the quantile of a normal distribution, of a sparsity (Gemma 3n)


def fold(program: torch.export.ExportedProgram) -> None:
    """Replace each scalar that an operator of `LACKING` makes of constants by its value; others are left."""
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if node.target in LACKING]:
        value = _value(program, node)
        if not isinstance(value, Tensor) or value.dim():
            continue
        with graph.inserting_before(node):
            made = graph.call_function(
                torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _value(program: torch.export.ExportedProgram, node: fx.Node) -> Any:
    """Compute what `node` makes; None where it depends on something else than constants of the program."""
    if node.op == "placeholder":
        name = program.graph_signature.inputs_to_lifted_tensor_constants.get(node.name)
        constant = None if name is None else program.constants.get(name)
        return None if internals.is_fake(constant) else constant
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    known = {source: _value(program, source) for source in node.all_input_nodes}
    if any(value is None for value in known.values()):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    with internals.real_tensors():
        return node.target(*args, **kwargs)
