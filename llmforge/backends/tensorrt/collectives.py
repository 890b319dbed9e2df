"""Collectives of a rank's graph as TensorRT's DistCollective, which its parser takes as an operator of ONNX's domain.

    y = llmforge::AllReduce(x)            becomes  y = DistCollective(x)  {all_reduce, sum}
    y = llmforge::AllGather(x)  axis -1   becomes  y = Transpose(DistCollective(Transpose(x)))  {all_gather}

A gathered tensor is put together along its first axis, so the last one is brought to the front: [B, R, V/n] becomes
[V/n, B, R], [V, B, R] and [B, R, V]. Attributes are those that the parser of TensorRT-RTX 1.7.1 reads; `root` -1 and no
group: all ranks.
"""

from __future__ import annotations

import onnx_ir as ir

from llmforge.ir import graph
from llmforge.ir.operators.canonical import AllGather, AllReduce

_TO_FRONT, _TO_BACK = [2, 0, 1], [1, 2, 0]


def reason_against(view: AllReduce | AllGather) -> str | None:
    """Say why a collective has no way to TensorRT; None where it has one."""
    if isinstance(view, AllGather) and (view.axis != -1 or len(graph.dims(view.output) or ()) != len(_TO_FRONT)):
        return "only the last axis of three is gathered"
    return None


def lower(view: AllReduce | AllGather) -> str:
    """Replace a collective that no reason is against; say what it became."""
    node, name, x = view.node, view.name, view.x
    common: dict[str, graph.Attribute] = {"root": -1, "group_size": 0, "nb_rank": view.ranks}
    if isinstance(view, AllReduce):
        attributes = {"collective_operation": "all_reduce", "reduce_op": "sum", **common}
        [y] = graph.insert(node, "DistCollective", [x], attributes, name=name)
    else:
        [turned] = graph.insert(node, "Transpose", [x], {"perm": _TO_FRONT}, name=f"{name}/front")
        attributes = {"collective_operation": "all_gather", "reduce_op": "none", **common}
        [whole] = graph.insert(node, "DistCollective", [turned], attributes, name=name)
        [y] = graph.insert(node, "Transpose", [whole], {"perm": _TO_BACK}, name=f"{name}/back")
        turned.type = whole.type = x.type
        dims, made = [*(x.shape or ())], [*(view.output.shape or ())]
        if dims and made:
            turned.shape = ir.Shape([dims[axis] for axis in _TO_FRONT])
            whole.shape = ir.Shape([made[axis] for axis in _TO_FRONT])
    graph.replace_value(view.output, y)
    return f"{view.op_type} to DistCollective of {view.ranks} ranks"
