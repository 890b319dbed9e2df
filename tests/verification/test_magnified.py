"""The run on larger numbers: which lookups are embeddings of tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.checkpoint import Checkpoint
from llmforge.trace import trace
from llmforge.verification import magnified, trace_verifier
from llmforge.verification.trace_comparison import LARGER

from ..sweep import shrink

TEXT = """
<ir_version: 10, opset_import: ["" : 18]>
wrapped (int64[batch, sequence] input_ids) => (float[batch, sequence, 4] y) {
    image = Constant<value_int = 3>()
    pad = Constant<value_int = 0>()
    is_image = Equal(input_ids, image)
    shown = Where(is_image, pad, input_ids)
    embedded = Gather(table, shown)
    other = Gather(other_table, shown)
    of_layers = Gather(layer_table, input_ids)
    both = Add(embedded, other)
    y = Add(both, of_layers)
}
"""


@pytest.mark.parametrize(("named", "scaled"), [("table", ["embedded"]), (None, ["of_layers"])])
def test_embeddings_are_scaled_where_images_are_left_out_and_tables_of_layers_are_not(
    named: str | None, scaled: list[str]
) -> None:
    made = ir.from_onnx_text(
        TEXT,
        initializers=[
            ir.tensor(np.ones((8, 4), np.float32), name=name) for name in ("table", "other_table", "layer_table")
        ],
    )
    for node in made.graph:
        if node.op_type == "Gather":
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    reference: Any = SimpleNamespace(norms=list, embedding=named)
    found = magnified.Magnified.of(made, reference).model
    assert [node.inputs[0].name for node in found.graph if node.op_type == "Mul"] == scaled  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own, about its models
@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_text", "gemma4_unified"])
def test_gemma_4_is_proven(model_type: str, tmp_path: Path) -> None:
    shrink.write(model_type, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    proof = trace_verifier.verify_trace(checkpoint, trace(checkpoint))
    assert LARGER in proof.probes
