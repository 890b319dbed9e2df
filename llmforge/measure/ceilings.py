"""Ceilings of a CPU, measured: memory bandwidth by threads, and the rates of matrix products.

Bandwidth is that of reading a working set larger than the caches (`measure.machine.read_bandwidth`). Rates are
those of the kernels that engines run: ONNX Runtime's product of fp32 matrices; its product of int8 activations with
int8 and int4 weights (`MatMulNBits`, accuracy_level 4) and, where they are compiled, llmforge's own. Of quantized
layers the speed counts, too, at which they read their weights for a single row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from llmforge import native
from llmforge.ir import graph
from llmforge.ir.operators.contrib import INT8_ACTIVATIONS, MatMulNBits
from llmforge.ir.operators.record import OPSETS, STANDARD, Operator
from llmforge.ir.operators.standard import MatMul
from llmforge.measure.machine import OthersMeter, read_bandwidth
from llmforge.passes.cpu_kernels import CpuKernels
from llmforge.rewrite.pass_base import Budget, Context
from llmforge.targets import BlockDtype, Library, local

WORKING_SET_BYTES = 1 << 28  # a decode step of a small model, and more than any cache but those of large servers
LAYER_BYTES = 1 << 27  # of the weights that a single row is multiplied with
ROWS, COLUMNS, INNER = 512, 2048, 2048  # a prompt through a layer of a model of one to three billion parameters
BLOCK = 128
REPETITIONS = 5
QUIET_CORES = 0.2  # that other processes may take while it is measured; the best of several repetitions counts
_BITS: Mapping[BlockDtype, int] = {"int8": 8, "int4": 4}
_NAMES: Mapping[Library, str] = {"onnxruntime": "ONNX Runtime's MatMulNBits", "llmforge": "llmforge.cpu's Linear"}
_HALVES: Mapping[str, ir.DataType] = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class KernelRates:
    """What one library's kernels reach with weights in blocks, of one dtype."""

    rate: float  # of many rows, operations a second
    read: float  # of one row, bytes of weights a second


@dataclass(frozen=True)
class CpuCeilings:
    """What a CPU reaches; bytes and operations a second."""

    bandwidth: Mapping[int, float]  # by number of threads
    rates: Mapping[str, float]  # by dtype of the products
    kernels: Mapping[str, str]  # whose they are, by dtype
    quantized: Mapping[Library, Mapping[BlockDtype, KernelRates]]
    threads: int  # that the rates were measured with
    others: float = 0.0  # cores that other processes took meanwhile

    @property
    def disturbed(self) -> bool:
        """Whether others took so much that an idle machine would reach more."""
        return self.others > QUIET_CORES


def measure(threads: int, told: Callable[[str], None]) -> CpuCeilings:
    """Measure this CPU with up to `threads` threads; `told` hears of each step. Takes some seconds."""
    meter = OthersMeter()
    counts = sorted({1, *(2**power for power in range(1, 10) if 2**power < threads), threads})
    bandwidth = {}
    for count in counts:
        told(f"Memory bandwidth, {count} {'thread' if count == 1 else 'threads'}")
        bandwidth[count] = read_bandwidth(WORKING_SET_BYTES, count)
    told("fp32 matrix multiplication")
    rates = {"fp32": _rate(_dense(ir.DataType.FLOAT, ROWS, INNER, COLUMNS), threads)}
    kernels = {"fp32": "ONNX Runtime's MatMul"}
    libraries: tuple[Library, ...] = ("onnxruntime",) if native.library() is None else ("onnxruntime", "llmforge")
    quantized: dict[Library, dict[BlockDtype, KernelRates]] = {library: {} for library in libraries}
    for library, dtype in itertools.product(libraries, _BITS):
        told(f"Quantized layers in {dtype}, {_NAMES[library]}")
        quantized[library][dtype] = _layers(library, _BITS[dtype], threads)
    fastest = max(quantized, key=lambda each: quantized[each]["int8"].rate)
    rates["int8"], kernels["int8"] = quantized[fastest]["int8"].rate, _NAMES[fastest]
    return CpuCeilings(bandwidth, rates, kernels, quantized, threads, meter.cores())


def products(threads: int) -> tuple[dict[str, float], str]:
    """Measure products of a prompt's rows in fp32 and int8, in less than a second: operations a second, and whose."""
    rates = {"fp32": _rate(_dense(ir.DataType.FLOAT, ROWS, INNER, COLUMNS), threads)}
    libraries: tuple[Library, ...] = ("onnxruntime",) if native.library() is None else ("onnxruntime", "llmforge")
    found = {library: _rate(_many(library, 8), threads) for library in libraries}
    fastest = max(found, key=lambda each: found[each])
    return {**rates, "int8": found[fastest]}, f"fp32: ONNX Runtime's MatMul; int8: {_NAMES[fastest]}"


def _layers(library: Library, bits: int, threads: int) -> KernelRates:
    """Time a layer with many rows, and one beyond the caches with a single row."""
    few = _lowered(library, _quantized(1, LAYER_BYTES * 8 // bits // INNER, bits))
    return KernelRates(_rate(_many(library, bits), threads), LAYER_BYTES / _seconds(few, 1, threads))


def _many(library: Library, bits: int) -> ir.Model:
    """Make a layer that a prompt's rows go through."""
    return _lowered(library, _quantized(ROWS, COLUMNS, bits))


def _lowered(library: Library, layer: ir.Model) -> ir.Model:
    """Let `library` compute `layer`."""
    if library == "llmforge":
        CpuKernels(budget=Budget(kld_mean=1.0)).run(layer, Context(local(), None))
    return layer


def cuda_product(size: int) -> Callable[[str, Mapping[str, Any]], float]:
    """Make what times one product of `size` rows and columns on a GPU, by ONNX Runtime's CUDA provider. Unverified."""

    def product(dtype: str, options: Mapping[str, Any]) -> float:
        held, place = _HALVES[dtype], ("cuda", options["device_id"])
        session = _session(_dense(held, size, size, size), 1, [("CUDAExecutionProvider", dict(options))])
        binding = session.io_binding()
        # Random numbers, because zeros draw less power and multiply faster; as words, which numpy has for bf16 as well.
        numbers = np.random.default_rng(0).standard_normal((1, size, size), np.float32).astype(held.numpy())
        rows = ort.OrtValue.ortvalue_from_numpy(numbers.view(np.uint16), *place)
        binding.bind_input("x", *place, held.value, [1, size, size], rows.data_ptr())
        binding.bind_output("y", *place)
        return _best(lambda: (session.run_with_iobinding(binding), binding.synchronize_outputs())[1])

    return product


def _rate(model: ir.Model, threads: int) -> float:
    """Time `model`, one product of [ROWS, INNER] and [INNER, COLUMNS]: operations a second."""
    return 2 * ROWS * INNER * COLUMNS / _seconds(model, ROWS, threads)


def _seconds(model: ir.Model, rows: int, threads: int) -> float:
    """Time `model`, the product of so many rows with a matrix."""
    session = _session(model, threads, ["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((1, rows, INNER), np.float32)
    return _best(lambda: session.run(None, {"x": x}))


def _best(run: Callable[[], object]) -> float:
    """Time `run`, in seconds: the best of several, after two that warm up."""
    times = []
    for repetition in range(REPETITIONS + 2):
        began = time.perf_counter()
        run()
        if repetition >= 2:
            times.append(time.perf_counter() - began)
    return min(times)


def _session(model: ir.Model, threads: int, providers: list[Any]) -> ort.InferenceSession:
    """Load `model`, whose weights may be lazy."""
    for name, value in model.graph.initializers.items():
        tensor = graph.tensor(value)
        value.const_value = ir.Tensor(tensor.numpy(), name=name, dtype=tensor.dtype)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    native.register(options)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers)


def _dense(dtype: ir.DataType, rows: int, inner: int, columns: int) -> ir.Model:
    """Make y = x·W with random W, in `dtype`."""
    weight: NDArray[Any] = np.random.default_rng(1).standard_normal((inner, columns), np.float32).astype(dtype.numpy())
    return _model(dtype, MatMul, rows, inner, columns, {"w": ir.Tensor(weight, dtype=dtype)}, {})


def _quantized(rows: int, columns: int, bits: int) -> ir.Model:
    """Make y = x·W, x [rows, INNER] and W [INNER, columns] in 8 or 4 bits, as `quantize-weights` writes it."""
    rng = np.random.default_rng(0)
    blocks = INNER // BLOCK
    codes = rng.integers(0, 256, (columns, blocks, BLOCK * bits // 8), np.uint8)
    scales = np.full((columns, blocks), 0.01, np.float32)
    attributes = {"K": INNER, "N": columns, "bits": bits, "block_size": BLOCK, "accuracy_level": INT8_ACTIVATIONS}
    weights = {"w": ir.Tensor(codes), "s": ir.Tensor(scales)}
    return _model(ir.DataType.FLOAT, MatMulNBits, rows, INNER, columns, weights, attributes)


def _model(
    dtype: ir.DataType,
    operator: type[Operator],
    rows: int,
    inner: int,
    columns: int,
    weights: Mapping[str, ir.Tensor[Any]],
    attributes: Mapping[str, int],
) -> ir.Model:
    """Make a model of one node, from x [1, rows, inner] to y [1, rows, columns]."""
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([1, rows, inner]))
    values = []
    for name, tensor in weights.items():
        tensor.name = name
        values.append(ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor))
    inputs = [x, *values]
    node = ir.node(operator.op_type, inputs, attributes=dict(attributes), domain=operator.domain, name="product")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(dtype), ir.Shape([1, rows, columns])
    opsets = {**OPSETS, STANDARD: 21}
    product = ir.Graph([x], [y], nodes=[node], initializers=values, opset_imports=opsets, name="product")
    return ir.Model(product, ir_version=10)
