"""The kernel of low-rank adapters: the reference's numbers, and each row's bits whatever stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from llmforge import native
from llmforge.backends.onnxruntime.session import open_graph, run, session_options
from llmforge.base.errors import RunFailed, UsageError
from llmforge.ir import dialect, graph
from llmforge.ir.operators import canonical, cpu
from llmforge.rewrite import cpu_linear
from llmforge.runtime.config import SessionConfig

from ..models import graphs
from ..passes.test_add_adapters import lora

pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels are not compiled")
Array = NDArray[Any]


@pytest.fixture(params=native.INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        yield native.instruction_set(request.param)
    except UsageError:
        pytest.skip("this processor lacks it")
    finally:
        native.instruction_set()


def layer(k: int, widths: list[int], rank: int, count: int, *, extra: str = "") -> tuple[ir.Model, Array, Array]:
    rng, n = np.random.default_rng(0), sum(widths)
    a = rng.standard_normal((count + 1, k, rank * len(widths))).astype(np.float32)
    b = rng.standard_normal((count + 1, rank, n)).astype(np.float32)
    a[0], b[0] = 0, 0
    text = f"""<ir_version: 12, opset_import: ["" : 24, "llmforge" : 1]>
    g (float[batch, sequence, {n}] base, float[batch, sequence, {k}] x, int64[batch] adapter_ids) =>
      (float[batch, sequence, {n}] y) {{
      y = llmforge.LowRankAdapter<widths: ints = [{",".join(map(str, widths))}]>(base, x, adapter_ids, a, b)
    }}"""
    return graphs.parse(text, {"a": a, "b": b}), a, b


def opened(model: ir.Model, threads: int = 1) -> Any:
    options = session_options(SessionConfig(threads=threads))
    native.register(options)
    return open_graph(ir.serde.serialize_model(model).SerializeToString(), options, ["CPUExecutionProvider"], "test")


def lowered(model: ir.Model) -> ir.Model:
    [adapter] = canonical.LowRankAdapter.all(model)
    cpu_linear.lower_adapter(adapter)
    graph.drop_unused(model)
    assert cpu.CpuLowRankAdapter.all(model)
    return model


def fed(k: int, n: int, batch: int, sequence: int) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        "base": rng.standard_normal((batch, sequence, n)).astype(np.float32),
        "x": rng.standard_normal((batch, sequence, k)).astype(np.float32),
    }


@pytest.mark.parametrize(
    ("k", "widths", "rank"), [(5, [7], 1), (64, [40, 24, 24], 4), (130, [33, 65], 9), (256, [2300], 16)]
)
@pytest.mark.parametrize("sequence", [1, 3, 9])
def test_the_kernel_is_the_reference(instruction_set: str, k: int, widths: list[int], rank: int, sequence: int) -> None:
    model, a, b = layer(k, widths, rank, 3)
    given, ids = fed(k, sum(widths), 4, sequence), np.array([2, 0, 3, 1])
    [y] = run(opened(lowered(model)), None, {**given, "adapter_ids": ids})
    expected = lora(**given, ids=ids, a=a, b=b, widths=widths)
    np.testing.assert_allclose(y, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(y[1], given["base"][1])  # to the bit


def test_a_row_has_the_same_bits_in_every_batch_and_on_every_thread() -> None:
    model, _, _ = layer(512, [700, 300, 300], 16, 3)
    given, ids = fed(512, 1300, 6, 7), np.array([1, 2, 0, 3, 1, 2])
    lowered(model)
    together = [run(opened(model, threads), None, {**given, "adapter_ids": ids})[0] for threads in (1, 2, 3)]
    np.testing.assert_array_equal(together[0], together[1])
    np.testing.assert_array_equal(together[0], together[2])
    session = opened(model)
    for row in range(6):
        for tokens in (slice(0, 7), slice(2, 3), slice(3, 7)):
            own = {name: value[row : row + 1, tokens] for name, value in given.items()}
            [alone] = run(session, None, {**own, "adapter_ids": ids[row : row + 1]})
            np.testing.assert_array_equal(alone, together[0][row : row + 1, tokens])


@pytest.mark.parametrize("wrong", [[4, 0], [-1, 0], [2**40, 0]])
def test_an_adapter_that_is_not_there_is_refused(wrong: list[int]) -> None:
    model, _, _ = layer(8, [8], 2, 3)
    with pytest.raises(RunFailed, match="there is no such adapter"):
        run(opened(lowered(model)), None, {**fed(8, 8, 2, 1), "adapter_ids": np.array(wrong)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"widths": np.array([3, 4])}, "do not agree"),
        ({"widths": np.array([9])}, "do not add up"),
        ({"widths": np.array([2**62, 2**62])}, "do not agree|do not add up"),
        ({"widths": np.array([], np.int64)}, "1 to 64 parts"),
        ({"a": np.zeros((4, 2, 7), np.float32)}, "do not agree"),
        ({"b": np.zeros((3, 2, 8), np.float32)}, "do not agree"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, Array], words: str) -> None:
    model = lowered(layer(8, [8], 2, 3)[0])
    [node] = cpu.CpuLowRankAdapter.all(model)
    for name, array in changes.items():
        setattr(node, name, graph.initializer(model, f"wrong_{name}", array))
    with pytest.raises(RunFailed, match=words):
        run(opened(model), None, {**fed(8, 8, 2, 1), "adapter_ids": np.array([1, 2])})


def test_what_is_added_behind_goes_in_front() -> None:
    model, _, _ = layer(6, [6], 2, 2)
    [adapter] = canonical.LowRankAdapter.all(model)
    x = graph.input_named(model, "x")
    base = graph.input_named(model, "base")
    [made] = graph.insert(adapter.node, "Tanh", [base], name="layer")
    made.name, made.type, made.shape = "made", base.type, base.shape
    adapter.base = made
    add = ir.Node("", "Add", [adapter.output, x], name="residual")
    graph.insert_behind(adapter.output, [add], "before")
    before = opened(dialect.expand(model))
    cpu_linear.add_before_adapter(canonical.LowRankAdapter.all(model)[0])
    assert graphs.lines(model, ["Add", "LowRankAdapter"]) == [
        "made.sum = Add(x, made)",
        "y = LowRankAdapter(made.sum, x, adapter_ids, a, b)",
    ]
    given = {**fed(6, 6, 3, 2), "adapter_ids": np.array([1, 0, 2])}
    np.testing.assert_allclose(
        run(opened(lowered(model)), None, given)[0], run(before, None, given)[0], rtol=0, atol=1e-5
    )
