"""Scratch memory of the compiled kernels' threads, which sessions of a process share with their thread pool.

A stand-in for ONNX Runtime's C interface calls the operators and decides when a thread takes which piece of work.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge import native
from llmforge.quantization import cpu_layout
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import round_to_nearest
from llmforge.rewrite.cpu_linear import grid_attributes

Array = NDArray[Any]
ENTRIES = 279  # of the table of functions, ort_abi.h
UNIT = CFUNCTYPE(None, c_void_p, c_size_t)


class CustomOp(ctypes.Structure):
    """What of an operator's record is called here (ort_abi.h)."""

    _fields_: ClassVar = [
        ("version", ctypes.c_uint32),
        ("create", c_void_p),
        ("name", CFUNCTYPE(c_char_p, c_void_p)),
        *((f"unused_{index}", c_void_p) for index in range(6)),
        ("destroy", CFUNCTYPE(None, c_void_p)),
        *((f"unused_{index}", c_void_p) for index in range(6, 13)),
        ("create_v2", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p))),
        ("compute_v2", CFUNCTYPE(c_void_p, c_void_p, c_void_p)),
    ]


class Runtime:
    """The entries of ONNX Runtime's table that the operators call. Handles are positions in `held`, from 1 on."""

    def __init__(self, library: Path) -> None:
        self.operators: dict[str, Any] = {}
        self.held: list[Any] = [None]
        self.between: Callable[[], None] | None = None  # called once, by the thread that works, between two pieces
        self.threads = 0  # that take pieces at once; 0: the caller's alone takes one after the other
        integer, size, handle = POINTER(c_int64), POINTER(c_size_t), POINTER(c_void_p)
        entries: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            0: (self.status, (c_int, c_char_p)),
            26: (lambda _name, out: self.give(out, 1), (c_char_p, handle)),
            27: (self.add, (c_void_p, c_void_p)),
            28: (lambda _options, _domain: None, (c_void_p, c_void_p)),
            51: (lambda value, out: self.give(out, self.held[value].ctypes.data), (c_void_p, handle)),
            61: (lambda shape, out: self.give(out, self.held[shape].ndim), (c_void_p, size)),
            62: (lambda shape, out, _rank: self.copy(out, self.held[shape].shape), (c_void_p, integer, c_size_t)),
            65: (lambda value, out: self.give(out, value), (c_void_p, handle)),
            85: (self.attribute, (c_void_p, c_char_p, POINTER(c_float))),
            86: (self.attribute, (c_void_p, c_char_p, integer)),
            90: (self.input, (c_void_p, c_size_t, handle)),
            91: (self.output, (c_void_p, c_size_t, integer, c_size_t, handle)),
            99: (lambda _shape: None, (c_void_p,)),
            274: (self.parallel, (c_void_p, UNIT, c_size_t, c_size_t, c_void_p)),
        }
        self.functions = {at: CFUNCTYPE(c_void_p, *types)(function) for at, (function, types) in entries.items()}
        self.table = (c_void_p * ENTRIES)()
        for at, function in self.functions.items():
            self.table[at] = ctypes.cast(function, c_void_p).value
        self.get_api = CFUNCTYPE(c_void_p, ctypes.c_uint32)(lambda _version: ctypes.addressof(self.table))
        base = (c_void_p * 2)(ctypes.cast(self.get_api, c_void_p).value, None)
        register = ctypes.CDLL(str(library)).RegisterCustomOps
        register.restype, register.argtypes = c_void_p, [c_void_p, c_void_p]
        assert register(None, ctypes.addressof(base)) is None

    @staticmethod
    def give(out: Any, what: int) -> None:
        out[0] = what

    @staticmethod
    def copy(out: Any, dims: tuple[int, ...]) -> None:
        for index, dim in enumerate(dims):
            out[index] = dim

    def keep(self, what: Any) -> int:
        self.held.append(what)
        return len(self.held) - 1

    def status(self, _code: int, message: bytes) -> int:
        return self.keep(message.decode())

    def add(self, _domain: int, at: int) -> None:
        op = CustomOp.from_address(at)
        self.operators[op.name(at).decode()] = op

    def attribute(self, info: int, name: bytes, out: Any) -> None:
        out[0] = self.held[info][name.decode()]

    def input(self, context: int, index: int, out: Any) -> None:
        inputs = self.held[context][0]
        out[0] = self.keep(inputs[index]) if index < len(inputs) and inputs[index] is not None else None

    def output(self, context: int, index: int, dims: Any, rank: int, out: Any) -> None:
        made = np.zeros(dims[:rank], np.float32)
        self.held[context][1][index] = made
        out[0] = self.keep(made)

    def parallel(self, _context: int, work: Any, total: int, _pieces: int, data: int) -> None:
        if self.threads:
            with ThreadPoolExecutor(self.threads) as pool:  # a call of the library lets others run meanwhile
                list(pool.map(lambda index: work(data, index), range(total)))
            return
        for index in range(total):
            if index and self.between is not None:
                between, self.between = self.between, None
                between()
            work(data, index)

    def compute(self, name: str, attributes: Mapping[str, float], *inputs: Array | None) -> Array:
        """Run one operator as a session of its own would; its first output."""
        op, kernel = self.operators[name], c_void_p()
        assert op.create_v2(ctypes.addressof(op), ctypes.addressof(self.table), self.keep(attributes), kernel) is None
        outputs: dict[int, Array] = {}
        status = op.compute_v2(kernel, self.keep((inputs, outputs)))
        op.destroy(kernel)
        assert status is None, self.held[status]
        return outputs[0]


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """The library once more, with state of its own: each copy registers its operators once."""
    return Runtime(Path(shutil.copy(native.require(), tmp_path)))


def linear(runtime: Runtime, rows: int, seed: int = 0) -> Array:
    """A quantized layer of [512, 1024]: large enough to be shared among threads."""
    rng, grid = np.random.default_rng(seed), Grid(4, 32, True)
    matrix = round_to_nearest(rng.standard_normal((512, 1024)).astype(np.float32), grid)
    weights = cpu_layout.arrange(matrix.codes, matrix.scales, matrix.zero_points, grid)
    attributes = {**grid_attributes(512, 1024, grid), "terms": 1, "outliers": 3.0, "activation": 0, "epsilon": 0}
    x = rng.standard_normal((rows, 1024)).astype(np.float32)
    return runtime.compute("Linear", attributes, x, weights)


def attention(runtime: Runtime, tokens: int) -> Array:
    """Attention of a prompt over an empty cache."""
    heads, dim = 4, 64
    qkv = np.random.default_rng(1).standard_normal((1, tokens, 3 * heads * dim)).astype(np.float32)
    cache = np.zeros((1, heads, tokens, dim), np.float32)
    attributes = {
        "num_heads": heads, "kv_num_heads": heads, "local_window_size": 0, "rotary_interleaved": 0, "per_channel": 0,
        "scale": 0.125, "softcap": 0, "qk_norm_epsilon": 0,
    }  # fmt: skip
    return runtime.compute("GroupQueryAttention", attributes, qkv, cache, cache, np.array([tokens - 1], np.int32))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("other", ["a prompt's attention", "another layer", "a long prompt's layer"])
def test_a_thread_may_work_for_another_session_between_two_pieces(runtime: Runtime, rows: int, other: str) -> None:
    """Rows that a thread rounded for a layer are gone where other work took their place, and are rounded anew."""
    works: dict[str, Callable[[], Array]] = {
        "a prompt's attention": lambda: attention(runtime, 40),
        "another layer": lambda: linear(runtime, 1, seed=2),
        "a long prompt's layer": lambda: linear(runtime, 2, seed=3),
    }
    alone, wanted = works[other](), linear(runtime, rows)
    found: list[Array] = []
    runtime.between = lambda: found.append(works[other]())
    np.testing.assert_array_equal(linear(runtime, rows), wanted)
    assert len(found) == 1
    np.testing.assert_array_equal(found[0], alone)


@pytest.mark.parametrize("rows", [1, 3])
def test_every_unit_of_a_layer_is_computed_once_by_however_many_threads(runtime: Runtime, rows: int) -> None:
    """Weights are spread over as many threads as came before: fewer must take over, more must help."""
    wanted = linear(runtime, rows)
    for runtime.threads in (3, 1, 7, 2, 0, 4):
        np.testing.assert_array_equal(linear(runtime, rows), wanted)
