"""The seam of quantized checkpoints: parameters apart from what files hold, by a layout that the test makes up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import Checkpoint, quantized
from llmforge.checkpoint.quantized import Grouped, QuantizedLayout, QuantizedTensor, UnrepresentableCodes
from llmforge.checkpoint.safetensors_file import TensorEntry

NAME = "model.layers.0.mlp.up_proj.weight"


@dataclass(frozen=True, eq=False)
class Halves(QuantizedTensor):
    """A matrix as bytes, each of which stands for its half."""

    @property
    def format(self) -> str:
        return "bytes"

    def dequantize(self) -> NDArray[Any]:
        return (self.read("codes").astype(np.float32) / 2).astype(self.dtype.numpy())


class OfHalves(QuantizedLayout):
    name: ClassVar[str] = "halves"
    methods: ClassVar[tuple[str, ...]] = ("halves",)

    def check(self, config: Mapping[str, Any], where: Path) -> str:
        return "bytes"

    def group(self, settings: Mapping[str, Any], stored: Mapping[str, TensorEntry], folder: Path) -> Grouped:
        codes = {name: entry for name, entry in stored.items() if name.endswith(".codes")}
        made = [
            Halves(f"{name.removesuffix('.codes')}.weight", entry.shape, ir.DataType.BFLOAT16, {"codes": entry})
            for name, entry in codes.items()
        ]
        return Grouped(made, {name: entry for name, entry in stored.items() if name not in codes}, ["note"])


@pytest.fixture
def codes(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> NDArray[np.int8]:
    """Store one matrix of the checkpoint in that layout."""
    monkeypatch.setattr(quantized, "LAYOUTS", (OfHalves(),))
    weights = dict(load_file(tiny_checkpoint / "model.safetensors"))
    made = np.random.default_rng(1).integers(-9, 9, weights.pop(NAME).shape, np.int8)
    save_file({**weights, NAME.replace("weight", "codes"): made}, tiny_checkpoint / "model.safetensors")
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "halves"}
    (tiny_checkpoint / "config.json").write_text(json.dumps(config))
    return made


def test_parameters_are_apart_from_what_the_files_hold(tiny_checkpoint: Path, codes: NDArray[np.int8]) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert NAME in checkpoint.tensors
    assert NAME not in checkpoint.stored
    assert NAME.replace("weight", "codes") in checkpoint.stored
    assert checkpoint.tensors[NAME].size_bytes == codes.nbytes
    assert checkpoint.notes == ("note",)
    assert not hasattr(checkpoint.config, "quantization_config")
    tensor = checkpoint.tensor(NAME)
    assert tensor.dtype == ir.DataType.BFLOAT16
    assert np.array_equal(tensor.numpy().astype(np.float32), codes.astype(np.float32) / 2)
    assert checkpoint.require({NAME: codes.shape}) == {NAME: NAME}
    with pytest.raises(CheckpointError, match=r"up_proj.weight' has shape"):
        checkpoint.require({NAME: (1, 1)})


def test_the_digest_is_that_of_the_files(tiny_checkpoint: Path, codes: NDArray[np.int8]) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    before = checkpoint.verify()
    file = tiny_checkpoint / "model.safetensors"
    entry = checkpoint.stored[NAME.replace("weight", "codes")]
    data = bytearray(file.read_bytes())
    data[entry.offset] ^= 1
    file.write_bytes(data)
    assert Checkpoint.open(tiny_checkpoint).verify() != before


def test_a_parameter_that_is_there_twice_is_refused(tiny_checkpoint: Path, codes: NDArray[np.int8]) -> None:
    weights = dict(load_file(tiny_checkpoint / "model.safetensors"))
    save_file({**weights, NAME: np.zeros(codes.shape, np.float32)}, tiny_checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is there as codes and in model\.safetensors as it is"):
        Checkpoint.open(tiny_checkpoint)


def test_codes_that_nothing_here_holds_say_so(tiny_checkpoint: Path, codes: NDArray[np.int8]) -> None:
    tensor = Checkpoint.open(tiny_checkpoint).tensors[NAME]
    assert isinstance(tensor, Halves)
    for ask in (tensor.grid, tensor.codes):
        with pytest.raises(UnrepresentableCodes, match="are bytes, for which there is no format here"):
            ask()


def test_two_that_are_stored_alike_are_seen(tiny_checkpoint: Path, codes: NDArray[np.int8]) -> None:
    tensors = Checkpoint.open(tiny_checkpoint).tensors
    plain = tensors["model.layers.0.mlp.gate_proj.weight"]
    assert quantized.same_content(tensors[NAME], tensors[NAME])
    assert not quantized.same_content(tensors[NAME], plain)


def test_a_note_of_transformers_on_a_file_that_it_dequantized_is_no_layout() -> None:
    said = {"quantization_config": {"quant_method": "gguf", "gguf_file": "model.gguf", "dequantize": False}}
    assert quantized.settings_of(said) is None
    assert quantized.settings_of({"text_config": said}) is None
    own = {"quantization_config": {"quant_method": "gguf", "type": "Q4_0"}}  # of a file that is read here
    assert quantized.settings_of(own) == own["quantization_config"]
