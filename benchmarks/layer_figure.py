"""Draw one layer of a model before and after the passes of a recipe: docs/images/layer.svg.

Usage: llmforge trace tests/data/docs-llama-7m --no-weights -o before.onnx
       python -m benchmarks.layer_figure before.onnx artifacts/NAME/VERSION/engine/model.onnx [-o docs/images/layer.svg]
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from html import escape
from pathlib import Path

import onnx

LAYER = "model.layers.1"  # neither the first nor the last: it has all kinds of edges
WIDTH, HEIGHT, GAP_X, GAP_Y, TOP = 138, 34, 16, 26, 58
STYLE = """
text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1f2328; text-anchor: middle; }
.part { font-size: 10px; fill: #59636e; }
.title { font-size: 14px; font-weight: 600; }
rect { fill: #eef2f7; stroke: #8c959f; rx: 4px; }
rect.weights { fill: #dbe9ff; stroke: #4a78c2; }
rect.ours { fill: #d8f3dc; stroke: #3c8d53; }
path { fill: none; stroke: #8c959f; marker-end: url(#arrow); }
"""


def nodes_of(model: onnx.ModelProto, layer: str) -> list[onnx.NodeProto]:
    """Return the nodes of `layer`, in topological order: those it names, and sums that end its blocks."""
    own = re.compile(rf"{re.escape(layer)}[./]")
    return [node for node in model.graph.node if own.match(node.name) or any(own.match(each) for each in node.output)]


def ranks(nodes: list[onnx.NodeProto]) -> dict[str, int]:
    """Return how many nodes of the layer lie on the longest way to each node, by name."""
    maker = {output: node.name for node in nodes for output in node.output}
    found: dict[str, int] = {}
    for node in nodes:
        found[node.name] = 1 + max((found[maker[each]] for each in node.input if each in maker), default=-1)
    return found


def column(nodes: list[onnx.NodeProto], weights: set[str], left: int, title: str) -> tuple[list[str], int, int]:
    """Draw `nodes` under `title`; return the elements, and the width and height that they take."""
    rank = ranks(nodes)
    rows = Counter(rank.values())
    width = max(rows.values()) * (WIDTH + GAP_X) - GAP_X
    at: dict[str, tuple[float, float]] = {}
    placed: Counter[int] = Counter()
    for node in nodes:
        row = rank[node.name]
        offset = (width - rows[row] * (WIDTH + GAP_X) + GAP_X) / 2
        at[node.name] = (left + offset + placed[row] * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y))
        placed[row] += 1
    maker = {output: node.name for node in nodes for output in node.output}
    elements = [f'<text class="title" x="{left + width / 2}" y="24">{escape(title)}</text>']
    for node in nodes:
        x, y = at[node.name]
        for each in dict.fromkeys(maker[each] for each in node.input if each in maker):
            elements.append(edge(at[each], (x, y), rank[node.name] - rank[each]))
    for node in nodes:
        x, y = at[node.name]
        ours = node.domain == "llmforge.cpu"
        kind = "ours" if ours else "weights" if node.op_type == "MatMul" and weights & set(node.input) else ""
        part = node.name.split("/")[0].rsplit(".", 1)[-1]
        part = "residual" if part.isdigit() else part
        elements.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}"/>')
        name = node.op_type.removesuffix("Int8").replace("GroupQueryAttention", "GroupQueryAttn")
        elements.append(f'<text x="{x + WIDTH / 2}" y="{y + 15}">{escape(name)}</text>')
        elements.append(f'<text class="part" x="{x + WIDTH / 2}" y="{y + 28}">{escape(part)}</text>')
    return elements, width, TOP + (max(rank.values()) + 1) * (HEIGHT + GAP_Y)


def edge(source: tuple[float, float], target: tuple[float, float], rows: int) -> str:
    """Draw an edge that goes down by `rows`: straight to the next row, along the right side to those below."""
    if rows == 1:
        (x, y), (to_x, to_y), bend = (source[0] + WIDTH / 2, source[1] + HEIGHT), target, GAP_Y / 2
        to_x += WIDTH / 2
        return f'<path d="M{x} {y} C{x} {y + bend} {to_x} {to_y - bend - 4} {to_x} {to_y - 4}"/>'
    (x, y), (to_x, to_y) = ((left + WIDTH, top + HEIGHT / 2) for left, top in (source, target))
    out = max(x, to_x) + 12 * rows
    return f'<path d="M{x} {y} C{out} {y} {out} {to_y} {to_x + 4} {to_y}"/>'


def draw(before: onnx.ModelProto, after: onnx.ModelProto, layer: str = LAYER) -> str:
    """Return an SVG of `layer` in both graphs, side by side."""
    left, elements, bottom = 16, [], 0
    for title, model in (("traced", before), ("after the passes", after)):
        nodes = nodes_of(model, layer)
        weights = {each.name for each in model.graph.initializer}
        title = f"{title}: {len(nodes)} nodes per layer, {len(model.graph.node)} in all"
        drawn, width, height = column(nodes, weights, left, title)
        elements += drawn
        left, bottom = left + max(width, 280) + 48, max(bottom, height)
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#8c959f;stroke:none;marker-end:none"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left - 32} {bottom}" width="{left - 32}">'
        f'<style>{STYLE}</style>{arrow}<rect style="fill:#fff;stroke:none" width="100%" height="100%"/>'
        + "\n".join(elements)
        + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/images/layer.svg"))
    given = parser.parse_args()
    before, after = (onnx.load(path, load_external_data=False) for path in (given.before, given.after))
    given.output.write_text(draw(before, after), encoding="utf-8")


if __name__ == "__main__":
    main()
