"""benchmarks/layer_figure.py: the picture of a layer has its nodes, and the edges between them."""

from xml.etree import ElementTree

import onnx

from benchmarks.layer_figure import draw, nodes_of, ranks

GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[2] x) => (float[2] out) {
    first = Relu (x)
    second = Neg (first)
    third = Tanh (first)
    out = Add (second, third)
}
"""


def layer(number: int) -> onnx.ModelProto:
    model = onnx.parser.parse_model(GRAPH)
    for node, part in zip(model.graph.node, ("norm", "left", "right", "sum"), strict=True):
        node.name = f"model.layers.{number}.{part}/{node.op_type}"
    return model


def test_nodes_are_those_of_the_layer() -> None:
    assert [node.op_type for node in nodes_of(layer(1), "model.layers.1")] == ["Relu", "Neg", "Tanh", "Add"]
    assert nodes_of(layer(11), "model.layers.1") == []


def test_each_node_is_below_those_it_reads() -> None:
    assert list(ranks(list(layer(1).graph.node)).values()) == [0, 1, 1, 2]


def test_the_picture_has_every_node_and_edge() -> None:
    root = ElementTree.fromstring(draw(layer(1), layer(1)))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(operator) for operator in ("Relu", "Neg", "Tanh", "Add")] == [2, 2, 2, 2]
    assert "traced: 4 nodes per layer, 4 in all" in texts
    edges = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("d", "").count("C")]
    assert len(edges) == 8
