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

_TO_FRONT, _TO_BACK = [2, 0, 1], [1, 2, 0]


def refusal_reason(node: ir.Node) -> str | None:
    """Say why a collective has no way to TensorRT; None where it has one."""
    if node.op_type == "AllGather" and (node.attributes.get_int("axis") != -1 or _rank(node) != len(_TO_FRONT)):
        return "only the last axis of three is gathered"
    return None


def lower(node: ir.Node) -> str:
    """Replace a collective that is not refused; say what it became."""
    x, ranks = node.inputs[0], node.attributes.get_int("ranks")
    assert x is not None
    common: dict[str, graph.Attribute] = {"root": -1, "group_size": 0, "nb_rank": ranks}
    if node.op_type == "AllReduce":
        attributes = {"collective_operation": "all_reduce", "reduce_op": "sum", **common}
        [y] = graph.insert(node, "DistCollective", [x], attributes, name=node.name)
    else:
        name = str(node.name)
        [turned] = graph.insert(node, "Transpose", [x], {"perm": _TO_FRONT}, name=f"{name}/front")
        attributes = {"collective_operation": "all_gather", "reduce_op": "none", **common}
        [whole] = graph.insert(node, "DistCollective", [turned], attributes, name=name)
        [y] = graph.insert(node, "Transpose", [whole], {"perm": _TO_BACK}, name=f"{name}/back")
        turned.type = whole.type = x.type
        dims, made = [*(x.shape or ())], [*(node.outputs[0].shape or ())]
        if dims and made:
            turned.shape = ir.Shape([dims[axis] for axis in _TO_FRONT])
            whole.shape = ir.Shape([made[axis] for axis in _TO_FRONT])
    graph.supersede(node.outputs[0], y)
    return f"{node.op_type} to DistCollective of {ranks} ranks"


def _rank(node: ir.Node) -> int:
    return len(graph.dims(node.outputs[0]) or ())
