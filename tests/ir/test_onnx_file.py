"""Graphs as files: weights that are hard links, and files that are not what they say."""

import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.base.errors import InputError
from llmforge.ir import onnx_file
from llmforge.ir.graph import tensor

WEIGHT = np.arange(1 << 12, dtype=np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A graph, its weight in a file of its own beside it."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([len(WEIGHT)]))
    weight = ir.Value(name="w", type=x.type, shape=x.shape, const_value=ir.Tensor(WEIGHT, name="w"))
    node = ir.node("Add", [x, weight], name="add")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", x.type, x.shape
    graph = ir.Graph([x], [*node.outputs], nodes=[node], initializers=[weight], opset_imports={"": 21}, name="g")
    (tmp_path / "a").mkdir()
    onnx_file.save(ir.Model(graph, ir_version=10), tmp_path / "a" / "g.onnx")
    return tmp_path / "a" / "g.onnx"


def data(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def test_weights_with_several_hard_links_are_read(path: Path, tmp_path: Path) -> None:
    """As `llmforge triton` makes them."""
    os.link(data(path), tmp_path / "elsewhere")
    loaded = onnx_file.load(path)
    np.testing.assert_array_equal(tensor(loaded.graph.initializers["w"]).numpy(), WEIGHT)
    onnx_file.save(loaded, tmp_path / "b" / "g.onnx")
    again = onnx_file.load(tmp_path / "b" / "g.onnx")
    assert tensor(again.graph.initializers["w"]).tobytes() == WEIGHT.tobytes()


@pytest.mark.parametrize("how", ["name", "symbolic link"])
def test_weights_outside_of_the_folder_are_refused(path: Path, tmp_path: Path, how: str) -> None:
    data(path).rename(tmp_path / "secret")
    if how == "name":
        (tmp_path / "secret").rename(tmp_path / "x.secret")
        path.write_bytes(path.read_bytes().replace(b"g.onnx.data", b"../x.secret"))  # as long as the name before
    else:
        data(path).symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=r"weights of w are outside its folder") as caught:
        onnx_file.load(path)
    assert caught.value.hint is not None


def test_weights_that_are_cut_off_are_refused(path: Path) -> None:
    data(path).write_bytes(data(path).read_bytes()[:-4])
    with pytest.raises(InputError, match=r"g\.onnx\.data: ends at byte 16,380, but w ends at 16,384"):
        onnx_file.load(path)


def test_a_graph_without_its_weights_is_read(path: Path) -> None:
    data(path).unlink()
    assert [node.name for node in onnx_file.load(path).graph] == ["add"]


def test_what_is_no_graph_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "a.onnx": b"",
        "b.json": b"{}",
        "c.textproto": b"ir_version: x",
        "d.onnx": b"\xff" * 99,
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="not an ONNX model") as caught:
            onnx_file.load(tmp_path / name)
        assert caught.value.hint is not None
    with pytest.raises(InputError, match="it is a folder") as caught:
        onnx_file.load(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        onnx_file.load(tmp_path / "absent.onnx")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ir, "load", denied)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        onnx_file.load(tmp_path / "a.onnx")
