"""A new operator is one record and its arithmetic: what reads the table of operators then knows it.

The operator, a pass that writes it, and all that is asked of them stand in this file alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from pydantic.dataclasses import dataclass

from llmforge.backends.onnxruntime import builder as onnxruntime
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.ir import dialect, graph, operators
from llmforge.ir.operators.record import CANONICAL, FLOATS, I64, Input, Operator, Output, real
from llmforge.ir.operators.standard import Gather
from llmforge.measure import footprint
from llmforge.parallel import shard_plan
from llmforge.rewrite import precision
from llmforge.rewrite.pass_base import Changes, Context, Numerics, Pass, Rewritten, Skipped

from ..models import graphs


class ScaledRows(Operator, domain=CANONICAL):
    """Rows of a table, times a number: table [V, H], ids [...] → [..., H]."""

    ids = Input(I64)
    table = Input(FLOATS, 2, table=True)
    scale = real()
    y = Output(like="table")
    lookup = True
    indivisible = "scaled rows are not divided"

    def check(self) -> None:
        self.require(self.scale > 0, "scale must be positive")

    def expand(self, model: ir.Model) -> None:
        scale = graph.initializer(model, f"{self.name}.scale", np.float32([self.scale]))
        [rows] = graph.insert(self.node, "Gather", [self.table, self.ids], {"axis": 0})
        [y] = graph.insert(self.node, "Mul", [rows, scale])
        graph.replace_value(self.output, y)


@dataclass(frozen=True)
class ScaleRows(Pass):
    """Look rows of a table up with ScaledRows, scaled by 1."""

    name: ClassVar[str] = "scale-rows"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    scale: float = 1.0

    def run(self, model: ir.Model, context: Context) -> Changes:
        changes = Changes()
        for gather in Gather.all(model):
            if not graph.is_constant(gather.data):
                changes.skipped.append(Skipped(gather.name, "it reads no table"))
                continue
            inputs = {"table": gather.data, "ids": gather.indices}
            rows = ScaledRows.insert(gather.node, inputs, {"scale": self.scale}, name=gather.name)
            graph.replace_value(gather.output, rows.y)
            model.graph.remove(gather.node, safe=True)
            changes.rewritten.append(Rewritten(gather.name, "scaled by 1"))
        return changes


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operators.TABLE, ScaledRows.identity, ScaledRows)


def _scaled() -> ir.Model:
    model = graphs.llama(graphs.Llama(layers=1))
    assert ScaleRows().run(model, graphs.CPU)
    return model


def test_a_pass_that_writes_it_is_proven(tmp_path: Path) -> None:
    model = graphs.llama(graphs.Llama(layers=1))
    changes, verification = graphs.prove(ScaleRows(), model, tmp_path)
    assert graphs.lines(model, ["ScaledRows"]) == ["embedded = ScaledRows(input_ids, model.embed_tokens.weight)"]
    assert changes.rewritten == [Rewritten("embedded_node", "scaled by 1")]
    assert [(each.node, each.reason) for each in changes.skipped] == [("selected_node", "it reads no table")]
    assert verification.largest_difference == 0


def test_a_pass_that_lies_with_it_is_caught(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="pass scale-rows"):
        graphs.prove(ScaleRows(scale=2.0), graphs.llama(graphs.Llama(layers=1)), tmp_path)


def test_the_dialect_knows_it() -> None:
    model = _scaled()
    dialect.check(model)
    [rows] = ScaledRows.all(model)
    rows.scale = -1.0
    with pytest.raises(VerificationError, match="node 'embedded_node': scale must be positive"):
        dialect.check(model)
    rows.scale = 1.0
    rows.node.attributes["bits"] = ir.AttrInt64("bits", 4)
    with pytest.raises(VerificationError, match="attribute 'bits' is unknown; known are scale"):
        dialect.check(model)
    del rows.node.attributes["bits"]
    rows.ids = rows.table
    with pytest.raises(VerificationError, match="input 'ids': is FLOAT, must be one of INT64"):
        dialect.check(model)


def test_its_dtype_is_inferred() -> None:
    model = _scaled()
    [rows] = ScaledRows.all(model)
    rows.y.type = None
    operators.complete_dtypes(model)
    assert rows.y.dtype == ir.DataType.FLOAT


def test_it_is_looked_up_in_half_precision() -> None:
    model = _scaled()
    operators.complete_dtypes(model)
    [rows] = ScaledRows.all(model)
    assert rows.node in precision.assign(model, head_in_fp32=False).half


def test_a_graph_with_it_is_not_divided() -> None:
    with pytest.raises(UnsupportedError, match=r"ScaledRows embedded_node cannot .*: scaled rows are not divided"):
        shard_plan.plan(_scaled(), 2)


def test_a_decode_step_reads_few_rows_of_its_table() -> None:
    model = _scaled()
    [rows] = ScaledRows.all(model)
    whole = footprint.count(model).weights
    own = graph.initializer(model, "table", graph.tensor(rows.table).numpy() + 1)
    rows.table = own  # the head alone reads the other one
    assert footprint.count(model).weights == whole


def test_an_engine_runs_its_expansion() -> None:
    lowered, changes = onnxruntime.lower(_scaled(), graphs.TARGET)
    assert "ScaledRows expanded to standard ONNX" in [change.what for change in changes.rewritten]
    assert not ScaledRows.all(lowered)
