"""Every hook of llmforge/trace/hooks/table.py is there, is called as it can be, and is that of a proven release.

A release that moves one fails here by name, before it fails anywhere else in some other way. That the table is complete
is tested, too: a name of transformers or of torch's private parts that the code imports stands in it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import transformers
from onnxscript._internal import ast_utils
from onnxscript._internal.values import TracedOnnxFunction
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.onnx._internal.exporter import _registration

import llmforge
from llmforge.checkpoint import versions
from llmforge.trace.hooks import internals, table
from llmforge.trace.hooks.table import HOOKS, Hook

PACKAGE = Path(llmforge.__file__).parent


@pytest.mark.parametrize("hook", HOOKS, ids=[hook.name for hook in HOOKS])
def test_every_hook_is_there_and_takes_what_it_is_given(hook: Hook) -> None:
    assert table.lost(hook) is None


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Hook("transformers.nowhere:a", "trace", "x"), "and is gone: No module named"),
        (Hook("transformers:nothing", "trace", "x"), "and is gone: module transformers has no attribute nothing"),
        (Hook("transformers:__version__", "trace", "x", ("a",)), "can no longer be called"),
        (
            Hook("transformers.core_model_loading:dot_natural_key", "trace", "x", ("a", "b")),
            "no longer takes a, b, but",
        ),
    ],
)
def test_what_is_lost_is_named(hook: Hook, message: str) -> None:
    assert message in (table.lost(hook) or "")


def test_the_installed_release_has_the_sources_that_were_proven() -> None:
    known = table.releases()
    assert tuple(known) == versions.PROVEN
    assert transformers.__version__ in known
    assert table.digests() == known[transformers.__version__]


def test_a_source_that_no_release_has_is_named() -> None:
    known = {"1": {"a": "x", "b": "y"}, "2": {"a": "z"}}
    assert table.changed({"a": "z", "b": "y"}, known) == []
    assert table.changed({"a": "y", "b": "y", "c": "x"}, known) == ["a", "c"]


@pytest.mark.parametrize("hook", HOOKS, ids=[hook.name for hook in HOOKS])
def test_the_module_that_relies_on_a_hook_exists(hook: Hook) -> None:
    file = PACKAGE.joinpath(*hook.user.split("."))
    assert file.with_suffix(".py").exists() or (file / "__init__.py").exists(), hook.user


def imported() -> Iterator[tuple[str, str]]:
    """Name what the code imports of transformers, and of torch's submodules; and the file that does."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                root = node.module.split(".")[0]
                if root == "transformers" or (root == "torch" and node.module != "torch"):
                    yield from ((f"{node.module}:{alias.name}", str(file)) for alias in node.names)


def test_the_table_names_all_that_the_code_imports() -> None:
    known = {hook.name.replace(":", ".") for hook in HOOKS}  # a module is imported as a name of its package
    missing = {
        name: file
        for name, file in imported()
        if not any(f"{entry}.".startswith(f"{name.replace(':', '.')}.") for entry in known)
        and name not in ("transformers:PreTrainedModel", "transformers:PretrainedConfig")  # types; methods are listed
    }
    assert not missing, f"name these in HOOKS, with what they are for: {missing}"


def test_a_fake_tensor_names_its_mode_and_a_translation_holds_an_onnx_ir_model() -> None:
    """Attributes that instances alone have."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = torch.empty(2)
    assert isinstance(fake, FakeTensor)
    assert fake.fake_mode is mode
    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2),))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        translated = torch.onnx.export(program, dynamo=True, opset_version=24, optimize=False, verbose=False)
    assert translated is not None
    assert isinstance(translated.model, ir.Model)


def test_models_call_attention_the_way_that_is_hooked() -> None:
    """An attention function registered by name is what a model calls, with the arguments that the trace reads."""
    called: list[dict[str, object]] = []

    def attend(module: torch.nn.Module, query: torch.Tensor, *args: object, **kwargs: object) -> object:
        called.append({"module": module, "query": query, **kwargs})
        return query.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("hook-test", attend)
    transformers.AttentionMaskInterface.register("hook-test", lambda **given: None)
    try:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
        )
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="hook-test")
        model(input_ids=torch.tensor([[1, 2, 3]]))
    finally:
        del transformers.AttentionInterface._global_mapping["hook-test"]
        del transformers.AttentionMaskInterface._global_mapping["hook-test"]
    assert len(called) == 1
    assert called[0]["query"].shape == (1, 2, 3, 16)  # type: ignore[attr-defined]
    assert called[0].keys() >= {"scaling", "dropout"}


def test_translations_are_listed_without_their_source_and_are_the_same() -> None:
    def listed() -> dict[object, list[tuple[object, ...]]]:
        known = _registration.ONNXRegistry.from_torchlib().functions
        return {
            target: [(each.onnx_function, each.is_custom, each.is_complex) for each in metas]
            for target, metas in known.items()
        }

    parsed: list[object] = []
    own = ast_utils.get_src_and_ast

    def parse(function: Callable[..., object]) -> object:
        parsed.append(function)
        return own(function)

    everything = listed()
    with pytest.MonkeyPatch.context() as patch, internals.translations_listed():
        patch.setattr(ast_utils, "get_src_and_ast", parse)
        assert listed() == everything
    assert not parsed
    assert len(everything) > 100
    function = next(
        each[0] for metas in everything.values() for each in metas if isinstance(each[0], TracedOnnxFunction)
    )
    assert function.function_ir.domain, "it is parsed again behind"


@pytest.mark.thorough
def test_what_is_left_out_of_an_import_is_not_missed() -> None:
    code = """
import sys
from llmforge.trace.hooks import imports
with imports.without_unused_imports():
    from llmforge.trace.export import strategy
import transformers
print("scipy.optimize" in sys.modules, transformers.utils.is_scipy_available())
print(*sorted(transformers.models._class_to_module.items()))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    names = " ".join(map(str, sorted(transformers.models._class_to_module.items())))
    assert found.splitlines() == [f"False {transformers.utils.is_scipy_available()}", names]
