"""bitsandbytes: what its tensors stand for, and what is refused; test_other_packages.py has the package itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmforge.base.errors import CheckpointError, UnsupportedError
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.quantized import QuantizedTensor, UnrepresentableCodes, bitsandbytes

from . import writers

UP = "model.layers.0.mlp.up_proj"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def packed_json(settings: dict[str, Any]) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(settings).encode(), np.uint8).copy()


def four_bits(
    folder: Path, kind: str = "nf4", *, nested: bool = False, harm: dict[str, Any] | None = None, **state: Any
) -> dict[str, NDArray[Any]]:
    """Store the linear layers of a checkpoint in 4 bits; `harm` replaces parts of `UP`, `state` what they say."""
    rng = np.random.default_rng(4)

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        count = shape[0] * shape[1]
        codes = rng.integers(0, 16, count, np.uint8)
        scales = rng.random(count // 64).astype(np.float32)
        said = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        made: writers.Tensors = {f"{name}.weight.quant_map": bitsandbytes.TABLES[kind]}
        if nested:
            table, own = (
                np.linspace(-1, 1, 256, dtype=np.float32),
                rng.random(-(-len(scales) // 256)).astype(np.float32),
            )
            quantized = rng.integers(0, 256, len(scales), np.uint8)
            scales = table[quantized] * np.repeat(own, 256)[: len(scales)] + np.float32(0.25)
            said |= {"nested_blocksize": 256, "nested_offset": 0.25, "nested_dtype": "float32"}
            made |= {
                f"{name}.weight.absmax": quantized,
                f"{name}.weight.nested_absmax": own,
                f"{name}.weight.nested_quant_map": table,
            }
        else:
            made[f"{name}.weight.absmax"] = scales
        made[f"{name}.weight"] = ((codes[::2] << 4) | codes[1::2])[:, None]
        made[f"{name}.weight.quant_state.bitsandbytes__{kind}"] = packed_json(said | (state if name == UP else {}))
        for part, array in (harm or {}).items() if name == UP else ():
            made.pop(f"{name}.weight{part}")
            if array is not None:
                made[f"{name}.weight{part}"] = array
        values = (bitsandbytes.TABLES[kind][codes] * np.repeat(scales, 64)).reshape(shape)
        return made, values.astype(writers.BF16)

    return writers.quantize(folder, FOUR, store)


def eight_bits(folder: Path, **parts: Any) -> dict[str, NDArray[Any]]:
    """Store the linear layers of a checkpoint in 8 bits; `parts` are further tensors of `UP`."""
    rng = np.random.default_rng(4)

    def store(name: str, shape: tuple[int, int]) -> tuple[writers.Tensors, NDArray[Any]]:
        codes, maxima = rng.integers(-127, 128, shape, np.int8), rng.random(shape[0]).astype(np.float32)
        made: writers.Tensors = {f"{name}.weight": codes, f"{name}.SCB": maxima}
        made[f"{name}.weight_format"] = np.zeros((), np.uint8)
        if name == UP:
            made |= {f"{name}.{part}": array for part, array in parts.items()}
        return made, codes.astype(np.float32) * maxima[:, None] * np.float32(7.874015718698502e-3)

    return writers.quantize(folder, EIGHT, store)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_of_four_bits(kind: str, nested: bool, tiny_checkpoint: Path) -> None:
    wanted = four_bits(tiny_checkpoint, kind, nested=nested)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for name, weight in wanted.items():
        made = checkpoint.tensor(name).numpy()
        assert made.dtype == weight.dtype
        assert (made == weight).all(), name
        tensor = checkpoint.tensors[name]
        assert isinstance(tensor, QuantizedTensor)
        assert tensor.format == f"{kind.upper()} in blocks of 64{', scales quantized' if nested else ''}"
        with pytest.raises(UnrepresentableCodes, match="not evenly spaced"):
            tensor.grid()
    assert len(checkpoint.tensors) == 20  # no part is left over


def test_weights_of_eight_bits(tiny_checkpoint: Path) -> None:
    wanted = eight_bits(tiny_checkpoint)
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for name, weight in wanted.items():
        assert (checkpoint.tensor(name).numpy() == weight).all(), name
    assert len(checkpoint.tensors) == 20


@pytest.mark.parametrize(
    ("harm", "state", "said"),
    [
        ({".absmax": None}, {}, f"'{UP}.weight.absmax' is not"),
        ({".absmax": np.ones(5, np.float32)}, {}, "does not fit"),
        ({".absmax": np.ones(128, np.uint8)}, {}, "are of another dtype than FLOAT"),
        ({}, {"shape": [128, 63]}, "shape [128, 63] does not fit"),
        ({}, {"quant_type": "int4"}, "quant_type is 'int4'"),
        ({}, {"blocksize": 2**70}, "blocksize is"),
        ({".quant_state.bitsandbytes__nf4": np.full(40, ord("["), np.uint8)}, {}, "not valid JSON"),
        ({".quant_state.bitsandbytes__nf4": np.zeros(5000, np.uint8)}, {}, "at most 4096 bytes of JSON"),
        ({".quant_state.bitsandbytes__nf4": None}, {}, "is UINT8, without scales"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    harm: dict[str, Any], state: dict[str, Any], said: str, tiny_checkpoint: Path
) -> None:
    four_bits(tiny_checkpoint, harm=harm, **state)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tiny_checkpoint)
    assert said in str(caught.value)


def test_scales_that_are_no_numbers_are_refused_when_they_are_read(tiny_checkpoint: Path) -> None:
    four_bits(tiny_checkpoint, harm={".absmax": np.full(128, np.inf, np.float32)})
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        Checkpoint.open(tiny_checkpoint).tensor(f"{UP}.weight").numpy()


def test_codes_in_tiles_of_a_gpu_are_refused(tiny_checkpoint: Path) -> None:
    eight_bits(tiny_checkpoint, weight_format=np.ones((), np.uint8))
    with pytest.raises(UnsupportedError, match="tiles of a GPU"):
        Checkpoint.open(tiny_checkpoint)


def test_maxima_of_other_rows_are_refused(tiny_checkpoint: Path) -> None:
    eight_bits(tiny_checkpoint, SCB=np.ones(3, np.float32))
    with pytest.raises(CheckpointError, match="of as many rows"):
        Checkpoint.open(tiny_checkpoint)
