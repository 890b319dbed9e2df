"""Collectives of a rank's graph as operators of `llmforge.cuda`, which meet through NCCL.

    y = llmforge::AllReduce(x)             becomes  y = llmforge.cuda::AllReduce(x)
    y = llmforge::AllGather(x)  axis -1    becomes  y = Reshape(Transpose(llmforge.cuda::AllGather(x)), [0, …, 0, -1])

NCCL puts what it gathers one behind the other: of [B, R, V/n] on n ranks, [n, B, R, V/n], which is turned to
[B, R, n, V/n] and read as [B, R, V].
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, operators
from llmforge.ir.operators import canonical, cuda
from llmforge.rewrite.pass_base import Rewritten


def write(model: ir.Model) -> list[Rewritten]:
    """Replace the collectives of `model` in place; list what changed.

    Raises:
        UnsupportedError: one gathers another axis than the last.
    """
    rewritten = []
    for node in list(model.graph):
        view = operators.view(node)
        if isinstance(view, canonical.AllReduce):
            made = cuda.CudaAllReduce.insert(node, {"x": view.x}, {"ranks": view.ranks}, name=view.name)
            graph.replace_value(view.output, made.output)
        elif isinstance(view, canonical.AllGather):
            graph.replace_value(view.output, _gather(model, view))
        else:
            continue
        rewritten.append(Rewritten(view.name, f"{view.op_type} of {view.ranks} ranks through NCCL"))
    if rewritten:
        graph.drop_unused(model)
    return rewritten


def _gather(model: ir.Model, view: canonical.AllGather) -> ir.Value:
    """Gather along the last axis."""
    dims = graph.dims(view.x)
    if dims is None or view.axis not in (-1, len(dims) - 1):
        raise UnsupportedError(f"{view.op_type} {view.name}: only the last axis of a tensor of known rank is gathered")
    last, name, node = len(dims) - 1, view.name, view.node
    gathered = cuda.CudaAllGather.insert(node, {"x": view.x}, {"ranks": view.ranks}, name=name).output
    gathered.type, gathered.shape = view.x.type, ir.Shape([view.ranks, *dims])
    turn = [*range(1, last + 1), 0, last + 1]
    [turned] = graph.insert(node, "Transpose", [gathered], {"perm": turn}, name=f"{name}/turn")
    turned.type, turned.shape = view.x.type, ir.Shape([*dims[:-1], view.ranks, dims[-1]])
    shape = graph.initializer(model, f"{name}.shape", np.array([*[0] * last, -1], np.int64))
    [whole] = graph.insert(node, "Reshape", [turned, shape], {}, name=f"{name}/whole")
    return whole
