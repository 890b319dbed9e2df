"""The compiled CPU kernels, for every instruction set of this machine, against arithmetic and ONNX Runtime's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from llmforge import native
from llmforge.base.errors import UsageError
from llmforge.quantization import cpu_layout, grids
from llmforge.quantization.grid import Grid, Scale
from llmforge.quantization.grids import QuantizedMatrix, round_to_nearest
from llmforge.quantization.initializers import arrange
from llmforge.rewrite.cpu_linear import grid_attributes
from tests.models import kernel_cases

Array = NDArray[Any]


def available() -> list[str]:
    names = []
    for name in native.INSTRUCTION_SETS:
        try:
            names.append(native.instruction_set(name))
        except UsageError:
            continue
    native.instruction_set()
    return names


@pytest.fixture(params=available())
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """One instruction set after the other; the best one again at the end."""
    yield native.instruction_set(request.param)
    native.instruction_set()


def session(
    op: str, inputs: dict[str, Array], held: dict[str, Array], outputs: list[str], threads: int = 2, **attributes: Any
) -> ort.InferenceSession:
    """Make a session of one node; `inputs` are examples of what is fed, `held` are initializers, both in order."""
    names = [name if name in inputs or name in held else "" for name in attributes.pop("order")]
    node = helper.make_node(op, names, outputs, domain=attributes.pop("domain", native.DOMAIN), **attributes)
    fed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        for name, array in inputs.items()
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs]
    graph = helper.make_graph([node], "g", fed, made, [numpy_helper.from_array(v, k) for k, v in held.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(node.domain, 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    native.register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    for output in model.graph.output:
        output.ClearField("type")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


LINEAR = ("x", "w", "bias", "norm", "residual")


def linear(
    matrix: QuantizedMatrix,
    x: Array,
    activation: int = 0,
    epsilon: float = 1e-5,
    terms: int = 1,
    outliers: float = 0.0,
    **extra: Array,
) -> Array:
    (n, k), grid = matrix.shape, matrix.grid
    order = cpu_layout.alternating(n) if activation else np.arange(n)
    weights = arrange(grids.rows(matrix, order))
    held = {name: value for name, value in extra.items() if name != "residual"}
    fed = {"x": x, **({"residual": extra["residual"]} if "residual" in extra else {})}
    node = session(
        "Linear", fed, {"w": weights, **held}, ["y"], order=LINEAR, **grid_attributes(n, k, grid),
        terms=terms, outliers=outliers, activation=activation, epsilon=epsilon,
    )  # fmt: skip
    return np.asarray(node.run(None, fed)[0])


def dequantized(matrix: QuantizedMatrix) -> NDArray[np.float64]:
    zero = (
        matrix.grid.middle if matrix.zero_points is None else np.repeat(matrix.zero_points, matrix.grid.block_size, 1)
    )
    return (matrix.codes.astype(np.float64) - zero) * np.repeat(matrix.scales, matrix.grid.block_size, 1)


def rounded(x: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """Round rows to int8 in blocks, and back."""
    blocks = x.reshape(len(x), -1, block)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


def random_matrix(n: int, k: int, grid: Grid, seed: int = 0) -> QuantizedMatrix:
    return round_to_nearest(np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32), grid)


def close(found: Array, wanted: Array) -> None:
    """Within 1 % of a deviation: a value on the border between two integers may be rounded to either."""
    assert np.abs(found - wanted).max() < 1e-2 * wanted.std()
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 5e-4 * wanted.std()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 13, 40])
@pytest.mark.parametrize("grid", [Grid(b, s, sym) for b in (4, 8) for s in (32, 128) for sym in (True, False)], ids=str)
def test_linear_is_the_product_with_rounded_rows(kernels: str, grid: Grid, rows: int) -> None:
    matrix = random_matrix(100, 256, grid)  # 100: the last group of 16 is not full
    x = np.random.default_rng(1).standard_normal((rows, 256)).astype(np.float32)
    close(linear(matrix, x), rounded(x.astype(np.float64), grid.block_size) @ dequantized(matrix).T)


@pytest.mark.parametrize("grid", kernel_cases.FORMATS, ids=str)
def test_every_instruction_set_gives_the_bits_of_plain_c(grid: Grid) -> None:
    matrix = kernel_cases.any_matrix(
        np.random.default_rng(484), 100, 384, grid
    )  # 384: the second superblock is half one
    values = grids.dequantize(matrix).astype(np.float64)
    for rows in (1, 2, 5, 30):
        x = np.random.default_rng(rows).standard_normal((rows, 384)).astype(np.float32)
        found = {}
        for name in available():
            native.instruction_set(name)
            found[name] = linear(matrix, x)
        native.instruction_set()
        close(found["generic"], rounded(x.astype(np.float64), grid.block_size) @ values.T)
        for name, y in found.items():
            np.testing.assert_array_equal(y, found["generic"], err_msg=name)


@pytest.mark.parametrize("grid", kernel_cases.FORMATS[::3], ids=str)
def test_two_terms_are_nearly_fp32_and_have_the_bits_of_plain_c(grid: Grid) -> None:
    matrix = kernel_cases.any_matrix(np.random.default_rng(7), 100, 384, grid)
    values = grids.dequantize(matrix).astype(np.float64)
    for rows in (1, 3, 4, 13, 30):
        x = np.random.default_rng(rows).standard_normal((rows, 384)).astype(np.float32)
        found = {}
        for name in available():
            native.instruction_set(name)
            found[name] = linear(matrix, x, terms=2)
        native.instruction_set()
        exact = x.astype(np.float64) @ values.T
        assert np.abs(found["generic"] - exact).max() < 2e-4 * exact.std()
        wanted = kernel_cases.rounded_twice(x, grid.block_size) @ values.T
        assert np.abs(found["generic"] - wanted).max() < 5e-6 * exact.std()
        for name, y in found.items():
            np.testing.assert_array_equal(y, found["generic"], err_msg=name)


def test_two_terms_go_with_all_that_a_layer_takes_over(kernels: str) -> None:
    grid, rng = Grid(8, 32, True), np.random.default_rng(2)
    matrix = random_matrix(64, 128, grid)
    x = 3 * rng.standard_normal((7, 128)).astype(np.float32)
    x[4, 5] = np.nan
    gamma, bias = (1 + rng.standard_normal(128) / 5).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * gamma
    gate, up = np.split(normed @ dequantized(matrix).T + bias, 2, axis=1)
    order = cpu_layout.alternating(64)
    y = linear(matrix, x, 1, terms=2, norm=gamma, bias=bias[order])
    assert np.isnan(y[4]).all()
    others = np.arange(7) != 4
    wanted = (gate / (1 + np.exp(-gate)) * up)[others]
    assert np.abs(y[others] - wanted).max() < 1e-3 * wanted.std()
    for terms in (0, 3):
        with pytest.raises(Exception, match="terms is 1 or 2"):
            linear(matrix, x, terms=terms)


@pytest.mark.parametrize("grid", kernel_cases.FORMATS, ids=str)
def test_embedding_gives_the_rows_of_any_format(kernels: str, grid: Grid) -> None:
    matrix = kernel_cases.any_matrix(np.random.default_rng(163), 35, 128, grid)
    weights = arrange(matrix)
    ids = np.arange(35)[None]
    node = session(
        "Embedding", {"ids": ids}, {"w": weights}, ["y"], order=("ids", "w"), **grid_attributes(35, 128, grid)
    )
    np.testing.assert_array_equal(node.run(None, {"ids": ids})[0][0], grids.dequantize(matrix))


def test_norm_bias_and_residual_go_into_the_layer(kernels: str) -> None:
    grid, rng = Grid(4, 64, True), np.random.default_rng(2)
    matrix = random_matrix(48, 128, grid)
    x = 3 * rng.standard_normal((2, 4, 128)).astype(np.float32)
    gamma, bias = (1 + rng.standard_normal(128) / 5).astype(np.float32), rng.standard_normal(48).astype(np.float32)
    residual = rng.standard_normal((2, 4, 48)).astype(np.float32)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * gamma
    product = rounded(normed.reshape(8, 128), 64) @ dequantized(matrix).T
    close(linear(matrix, x, norm=gamma, bias=bias, residual=residual), product.reshape(2, 4, 48) + bias + residual)


@pytest.mark.parametrize("activation", [1, 2])
def test_gated_activations_go_into_the_layer(kernels: str, activation: int) -> None:
    grid = Grid(4, 32, False)
    matrix = random_matrix(64, 96, grid)
    x = np.random.default_rng(3).standard_normal((7, 96)).astype(np.float32) / 3
    gate, up = np.split(rounded(x.astype(np.float64), 32) @ dequantized(matrix).T, 2, axis=1)
    silu = gate / (1 + np.exp(-gate))
    gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    close(linear(matrix, x, activation), (silu if activation == 1 else gelu) * up)


def test_rows_do_not_depend_on_the_rows_beside_them(kernels: str) -> None:
    matrix = random_matrix(96, 256, Grid(4, 32, False))
    x = np.random.default_rng(4).standard_normal((31, 256)).astype(np.float32)
    together = linear(matrix, x)
    for rows in (slice(0, 1), slice(3, 8), slice(10, 31)):
        np.testing.assert_array_equal(linear(matrix, x[rows]), together[rows])


def test_zeros_give_zeros_and_a_nan_spoils_its_row_alone(kernels: str) -> None:
    matrix = random_matrix(32, 64, Grid(4, 32, False))
    x = np.random.default_rng(5).standard_normal((3, 64)).astype(np.float32)
    x[0], x[1, 40] = 0, np.nan
    y = linear(matrix, x)
    assert not y[0].any()
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[2]).all()


def test_rows_of_an_embedding(kernels: str) -> None:
    for grid in (Grid(4, 32, True), Grid(8, 128, False)):
        matrix = random_matrix(50, 128, grid)
        weights = arrange(matrix)
        ids = np.array([[0, 49, 17], [16, 15, 0]])
        node = session(
            "Embedding", {"ids": ids}, {"w": weights}, ["y"], order=("ids", "w"), **grid_attributes(50, 128, grid)
        )  # fmt: skip
        np.testing.assert_allclose(node.run(None, {"ids": ids})[0], dequantized(matrix)[ids], rtol=1e-6)
        with pytest.raises(Exception, match="outside the vocabulary"):
            node.run(None, {"ids": np.array([[50]])})


def test_operands_of_another_size_are_refused() -> None:
    matrix = random_matrix(32, 64, Grid(4, 32, True))
    with pytest.raises(Exception, match=r"X is not \[\.\.\., K\]"):
        linear(matrix, np.zeros((1, 32), np.float32))
    with pytest.raises(Exception, match="norm is not"):
        linear(matrix, np.zeros((1, 64), np.float32), norm=np.ones(32, np.float32))
    with pytest.raises(Exception, match="weights have another size"):
        session(
            "Linear", {"x": np.zeros((1, 64), np.float32)}, {"w": np.zeros((2, 64), np.uint8)}, ["y"], order=LINEAR,
            **grid_attributes(32, 64, Grid(4, 32, True)), terms=1, activation=0, epsilon=0.0,
        ).run(None, {"x": np.zeros((1, 64), np.float32)})  # fmt: skip


CPU = ("qkv", "pk", "pv", "lengths", "cos", "sin", "ks", "vs", "qn", "kn", "sink")
MICROSOFT = ("qkv", "", "", "pk", "pv", "lengths", "total", "cos", "sin", "", "", "sink", "ks", "vs")
POSITIONS, CAPACITY = 600, 512


def attention_pair(
    heads: int, kv_heads: int, dim: int, *, int8: bool = False, per_channel: bool = False, rotary: bool = True,
    interleaved: int = 0, window: int = 0, softcap: float = 0.0, sink: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Make our attention and ONNX Runtime's, as functions of qkv and the tokens that each row holds."""
    rng = np.random.default_rng(6)
    angles = np.arange(POSITIONS)[:, None] / 10000 ** (np.arange(dim // 2) / (dim // 2))
    held: dict[str, Array] = {}
    if rotary:
        held |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    if int8:
        shape = (kv_heads, 1, dim) if per_channel else (1,)
        held |= {name: (rng.random(shape) * 0.01 + 0.02).astype(np.float32) for name in ("ks", "vs")}
    if sink:
        held["sink"] = rng.standard_normal(heads).astype(np.float32)
    cache_type = np.int8 if int8 else np.float32
    example = {"qkv": np.zeros((1, 1, 1), np.float32), "pk": np.zeros((1, 1, 1, 1), cache_type)}
    example |= {"pv": example["pk"], "lengths": np.zeros(1, np.int32)}
    common = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": dim**-0.5, "softcap": softcap}
    ours = session(
        "GroupQueryAttentionInt8" if int8 else "GroupQueryAttention", example, held, ["y", "ok", "ov"], order=CPU,
        local_window_size=window, rotary_interleaved=interleaved, per_channel=int(per_channel), qk_norm_epsilon=0.0,
        **common,
    )  # fmt: skip
    kind = "PER_CHANNEL" if per_channel else "PER_TENSOR"
    quantized = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 8} if int8 else {}
    theirs = session(
        "GroupQueryAttention", {**example, "total": np.zeros((), np.int32)}, held, ["y", "ok", "ov"], order=MICROSOFT,
        domain="com.microsoft", local_window_size=window or -1, do_rotary=int(rotary), rotary_interleaved=interleaved,
        **common, **quantized,
    )  # fmt: skip

    def run(node: ort.InferenceSession, qkv: Array, pasts: list[int], cache: Array) -> list[Array]:
        lengths = np.array(pasts, np.int32) + qkv.shape[1] - 1
        feeds = {"qkv": qkv, "pk": cache[0].copy(), "pv": cache[1].copy(), "lengths": lengths.astype(np.int32)}
        if node is theirs:
            feeds["total"] = np.array(lengths.max() + 1, np.int32)
        return [np.asarray(array) for array in node.run(None, feeds)]

    return (lambda *a: run(ours, *a)), (lambda *a: run(theirs, *a))


SHAPES: list[tuple[int, list[int]]] = [(1, [0]), (1, [5, 0, 300]), (17, [0, 0]), (40, [0]), (7, [130]), (200, [250])]


@pytest.mark.parametrize(
    "kind",
    [
        {"heads": 4, "kv_heads": 2, "dim": 32},
        {"heads": 16, "kv_heads": 8, "dim": 128},
        {"heads": 4, "kv_heads": 2, "dim": 32, "int8": True, "per_channel": True},
        {"heads": 4, "kv_heads": 4, "dim": 64, "int8": True, "interleaved": 1},
        {"heads": 8, "kv_heads": 2, "dim": 128, "int8": True, "per_channel": True},
        {"heads": 6, "kv_heads": 2, "dim": 48, "window": 40},
        {"heads": 8, "kv_heads": 1, "dim": 64, "rotary": False, "softcap": 20.0, "sink": True},
        {"heads": 5, "kv_heads": 1, "dim": 80, "sink": True},
    ],
    ids=str,
)
def test_attention_is_onnx_runtimes(kernels: str, kind: dict[str, Any]) -> None:
    ours, theirs = attention_pair(**kind)
    rng, int8 = np.random.default_rng(7), kind.get("int8", False)
    heads, kv_heads, dim = kind["heads"], kind["kv_heads"], kind["dim"]
    # bf16 rounds queries and weights to 8 bits of mantissa; it multiplies int8 caches alone.
    largest, rms = (5e-2, 3e-3) if int8 and kernels == "avx512bf16" else (1e-3, 1e-4) if int8 else (5e-5, 5e-6)
    for sequence, pasts in SHAPES:
        qkv = rng.standard_normal((len(pasts), sequence, (heads + 2 * kv_heads) * dim)).astype(np.float32)
        cache = rng.standard_normal((2, len(pasts), kv_heads, CAPACITY, dim))
        cache = np.clip(np.rint(cache * 40), -128, 127).astype(np.int8) if int8 else cache.astype(np.float32)
        found, wanted = ours(qkv, pasts, cache), theirs(qkv, pasts, cache)
        assert np.abs(found[0] - wanted[0]).max() < largest * wanted[0].std()
        assert np.sqrt(np.mean((found[0] - wanted[0]) ** 2)) < rms * wanted[0].std()
        for mine, other in zip(found[1:], wanted[1:], strict=True):
            for row, past in enumerate(pasts):
                written = slice(0, past + sequence)
                difference = np.abs(mine[row, :, written].astype(np.float64) - other[row, :, written])
                assert difference.max() <= (1 if int8 else 1e-5)


def test_attention_continues_several_rows_at_once(kernels: str) -> None:
    """Which ONNX Runtime's own refuses: each row gets what it gets alone."""
    ours, _ = attention_pair(4, 2, 32)
    rng = np.random.default_rng(8)
    qkv = rng.standard_normal((3, 20, 8 * 32)).astype(np.float32)
    cache = rng.standard_normal((2, 3, 2, CAPACITY, 32)).astype(np.float32)
    pasts = [0, 7, 200]
    together = ours(qkv, pasts, cache)
    for row, past in enumerate(pasts):
        alone = ours(qkv[row : row + 1], [past], cache[:, row : row + 1])
        np.testing.assert_array_equal(together[0][row : row + 1], alone[0])


def test_a_step_does_not_depend_on_where_steps_begin(kernels: str) -> None:
    """Blocks of keys begin at fixed places, so that a prompt in pieces gives the numbers of the whole prompt."""
    ours, _ = attention_pair(4, 2, 32)
    qkv = np.random.default_rng(9).standard_normal((1, 300, 8 * 32)).astype(np.float32)
    cache = np.zeros((2, 1, 2, CAPACITY, 32), np.float32)
    whole = ours(qkv, [0], cache)[0]
    pieces, at = [], 0
    for size in (100, 37, 163):
        y, key, value = ours(qkv[:, at : at + size], [at], cache)
        cache, at = np.stack([key, value]), at + size
        pieces.append(y)
    np.testing.assert_array_equal(np.concatenate(pieces, 1), whole)


def test_lengths_outside_the_cache_are_refused() -> None:
    ours, _ = attention_pair(4, 2, 32)
    cache = np.zeros((2, 1, 2, CAPACITY, 32), np.float32)
    for past in (-1, CAPACITY):
        with pytest.raises(Exception, match="outside the cache"):
            ours(np.zeros((1, 1, 256), np.float32), [past], cache)


def test_the_documentation_counts_the_bits_of_every_format() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "cpu-kernels.md").read_text()
    is_row = re.compile(r"\| (trellis, )?\d bits \|").match
    rows = [line.split("|")[1:-1] for line in documented.splitlines() if is_row(line)]
    assert len(rows) == 21
    kinds: list[tuple[Scale, bool]] = [
        (scale, symmetric) for scale in ("fp32", "fp16", "int8") for symmetric in (True, False)
    ]
    for codes, block, *cells in rows:
        trellis = "trellis" in codes
        for (scale, symmetric), cell in zip(kinds, cells, strict=True):
            if not cell.strip():
                assert trellis
                assert not symmetric
                continue
            grid = Grid(int(codes.split()[-2]), int(block), symmetric, scale, trellis)
            bits = cpu_layout.group_bytes(2048, grid) * 8 / (cpu_layout.LANES * 2048)
            assert cell.strip() == f"{bits:.2f}", (codes, block)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(UsageError, match="avx1024"):
        native.instruction_set("avx1024")


def test_rows_alternate_between_halves() -> None:
    order = cpu_layout.alternating(64)
    assert order[:16].tolist() == list(range(16))
    assert order[16:32].tolist() == list(range(32, 48))
    assert sorted(order) == list(range(64))


def test_onnx_knows_none_of_the_operators() -> None:
    """They need the library: a runtime without it refuses the graph, and does not compute something else."""
    assert not onnx.defs.has("Linear", domain=native.DOMAIN)
