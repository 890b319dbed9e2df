"""Model repositories as files, and what a model reads, without a server."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner, Result

import llmforge
from llmforge.artifact import Artifact, admission
from llmforge.base.errors import EnvironmentLacks, InputError, RecipeError, Unavailable, UsageError, VersionMismatch
from llmforge.cache.code import imports_of
from llmforge.cli import cli
from llmforge.recipe import Recipe, ServingSpec
from llmforge.runtime.config import FILE, DeviceFacts, PlanFacts, RuntimeConfig
from llmforge.serving import Runner, load
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.interface import EngineOptions, EngineStats
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol.client_json import JsonLimits
from llmforge.serving.request import Chunk, Usage
from llmforge.triton import repository, sources
from llmforge.triton.backend import checks, inputs, settings, signature, worker_pool
from llmforge.triton.launch import PYTRITON, Ports, TritonServer, command, find

from ..models.tool_templates import HERMES
from ..samples import published
from ..servers.triton_env import SERVER


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    serving = ServingSpec(max_queue=7, timeout_s=20)
    out = tmp_path_factory.mktemp("artifacts")
    return published.random_decoder(out, sample_checkpoint, max_context=64, max_batch=2, serving=serving)


@pytest.fixture(scope="module")
def runner(artifact: Artifact) -> Runner:
    return load(artifact.path)


def export(artifact: Artifact, repo: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["triton", str(artifact.path), "-o", str(repo), *options])


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_version_of_a_repository_and_what_it_is_of(artifact: Artifact, tmp_path: Path) -> None:
    model = repository.of_artifact(artifact)
    assert repository.newest(tmp_path, model.name) == 0
    for version in (2, 10):
        repository.export(artifact, model, tmp_path, version=version)
    assert repository.newest(tmp_path, model.name) == 10
    version = tmp_path / model.name / "10"
    assert repository.is_of(version, artifact)
    manifest = version / "manifest.json"
    manifest.chmod(0o600)
    manifest.write_text("{}")
    assert not repository.is_of(version, artifact)
    assert not repository.is_of(tmp_path / model.name / "11", artifact)


def test_an_artifact_whose_files_a_repository_links_is_read_as_before(artifact: Artifact, tmp_path: Path) -> None:
    assert export(artifact, tmp_path / "repo").exit_code == 0
    graph = artifact.path / "engine" / "model.onnx"
    linked = tmp_path / "repo" / "random" / "1" / "engine" / "model.onnx"
    assert linked.samefile(graph)
    for words, says in {
        ("diff-graph", graph, linked): "no difference",
        ("inspect", artifact.path, "--verify"): "verified: ",
        ("run", artifact.path, "graph", "--max-tokens", "2"): "",
    }.items():
        result = CliRunner().invoke(cli, [*map(str, words)])
        assert result.exit_code == 0, (words, result.output, result.exception)
        assert says in result.stdout


class TestRepository:
    def test_an_artifact_carries_one(self, artifact: Artifact) -> None:
        artifact.verify()
        own = artifact.path / "triton" / "random"
        assert files(own) >= {
            "config.pbtxt", "README.md", "warmup/prompt", "warmup/sampling_parameters",
            "1/model.py", "1/requirements.txt",
            "1/llmforge/serving/engine.py", "1/llmforge/triton/backend/model.py",
        }  # fmt: skip
        assert not any(path.startswith("1/engine") for path in files(own))
        for path, source in sources.shipped().items():
            assert (own / "1" / path).read_bytes() == source.read_bytes()
        # what serves is part of what the version names
        assert "triton/random/1/llmforge/serving/engine.py" in artifact.manifest.files

    def test_the_readme_names_what_is_needed(self, artifact: Artifact) -> None:
        text = (artifact.path / "triton" / "random" / "README.md").read_text()
        assert f"onnxruntime=={onnxruntime.__version__}" in text
        assert "/v2/models/random/generate_stream" in text
        assert "context 64 tokens, 2 answers at once" in text

    def test_export_stands_alone_and_shares_the_engine(self, artifact: Artifact, tmp_path: Path) -> None:
        result = export(artifact, tmp_path / "repo", "--name", "llm")
        assert result.exit_code == 0, result.output
        folder = tmp_path / "repo" / "llm"
        assert Path(result.stdout.splitlines()[-1]) == folder
        assert [path.name for path in (tmp_path / "repo").iterdir()] == ["llm"]
        for name in ("engine/model.onnx.data", "tokenizer/tokenizer.json"):
            assert (folder / "1" / name).samefile(artifact.path / name)
        config = (folder / "config.pbtxt").read_text()
        assert 'name: "llm"' in config
        assert 'key: "artifact" value { string_value: "." }' in config
        assert load(folder / "1").config == load(artifact.path).config
        artifact.verify()

    def test_another_chat_template_stands_beside_the_artifacts(self, artifact: Artifact, tmp_path: Path) -> None:
        other = tmp_path / "other.jinja"
        other.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
        done = export(artifact, tmp_path / "repo", "--chat-template", str(other), "--tool-prompt")
        assert done.exit_code == 0, done.output
        folder = tmp_path / "repo" / "random"
        assert (
            'key: "chat_template" value { string_value: "chat_template.jinja" }'
            in (folder / "config.pbtxt").read_text()
        )
        written = (folder / "1" / "chat_template.jinja").read_text()
        assert written.endswith(other.read_text())
        assert "<tool_call>" in written
        assert (folder / "1" / "tokenizer" / "chat_template.jinja").samefile(
            artifact.path / "tokenizer" / "chat_template.jinja"
        )
        admission.admit(folder / "1")

    def test_copies_are_files_of_their_own(self, artifact: Artifact, tmp_path: Path) -> None:
        assert export(artifact, tmp_path, "--copy").exit_code == 0
        copy = tmp_path / "random" / "1" / "engine" / "model.onnx.data"
        assert copy.read_bytes() == (artifact.path / "engine" / "model.onnx.data").read_bytes()
        assert not copy.samefile(artifact.path / "engine" / "model.onnx.data")

    def test_the_exported_runtime_is_the_artifacts(self, artifact: Artifact, tmp_path: Path) -> None:
        export(artifact, tmp_path)
        for path in files(artifact.path / "triton" / "random" / "1"):
            assert (tmp_path / "random" / "1" / path).read_bytes() == (
                artifact.path / "triton" / "random" / "1" / path
            ).read_bytes()

    def test_versions_stand_side_by_side_and_never_change(self, artifact: Artifact, tmp_path: Path) -> None:
        assert export(artifact, tmp_path).exit_code == 0
        again = export(artifact, tmp_path)
        assert again.exit_code == 2
        assert "already exists; published versions never change" in again.stderr
        assert "use another --model-version or --name" in again.stderr
        assert export(artifact, tmp_path, "--model-version", "2", "--set", "triton.versions=").exit_code == 0
        assert {path.name for path in (tmp_path / "random").iterdir() if path.is_dir()} == {"1", "2", "warmup"}
        assert "version_policy { all { } }" in (tmp_path / "random" / "config.pbtxt").read_text()
        assert [path.name for path in tmp_path.iterdir()] == ["random"]

    def test_overrides_change_how_it_is_served(self, artifact: Artifact, tmp_path: Path) -> None:
        changes = ["max_queue=3", "triton.instances=2", "triton.kind=gpu", "triton.gpus=[0, 1]", "speculation=off"]
        result = export(artifact, tmp_path, *[word for change in changes for word in ("--set", change)])
        assert result.exit_code == 0, result.output
        config = (tmp_path / "random" / "config.pbtxt").read_text()
        assert "kind: KIND_GPU count: 2 gpus: [ 0, 1 ]" in config
        assert 'key: "max_queue" value { string_value: "3" }' in config
        assert 'key: "timeout_s" value { string_value: "20.0" }' in config

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("max_que=3", "no key 'max_que'; known: max_queue, step_tokens"),
            ("max_queue=-1", "--set max_queue=-1: max_queue: "),
            ("triton.kind=tpu", "must be 'cpu' or 'gpu', not \"tpu\""),
            ("speculation=always", "must be 'off' or 'prompt-lookup'"),
        ],
    )
    def test_overrides_that_make_no_sense(
        self, artifact: Artifact, tmp_path: Path, override: str, message: str
    ) -> None:
        result = export(artifact, tmp_path, "--set", override)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
        assert not any(tmp_path.iterdir())

    def test_a_changed_artifact_is_not_exported(self, artifact: Artifact, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(artifact.path, tmp_path / "copy"))
        changed = copy / "triton" / "random" / "1" / "model.py"
        changed.chmod(0o644)
        changed.write_text("import os")
        result = CliRunner().invoke(cli, ["triton", str(copy), "-o", str(tmp_path / "repo")])
        assert result.exit_code == 5
        assert "changed: triton/random/1/model.py" in " ".join(result.stderr.split())

    def test_an_artifact_without_one_is_refused(self, artifact: Artifact) -> None:
        manifest = replace(artifact.manifest, name="other")
        with pytest.raises(InputError, match="has no triton/other"):
            repository.of_artifact(Artifact(artifact.path, manifest))

    def test_a_file_in_the_way_is_named(self, artifact: Artifact, tmp_path: Path) -> None:
        (tmp_path / "repo").write_text("")
        result = export(artifact, tmp_path / "repo")
        assert result.exit_code == 8
        assert "cannot be written" in result.stderr


class TestSources:
    def test_every_import_of_llmforge_is_shipped(self) -> None:
        shipped = sources.shipped()
        for path, file in shipped.items():
            for module, taken in imports_of(file.read_bytes()):
                if taken and module.startswith("llmforge"):
                    below = module.replace(".", "/")
                    assert {f"{below}.py", f"{below}/__init__.py"} & shipped.keys(), f"{path}: {module}"

    def test_the_compiled_operators_are_shipped_where_an_engine_needs_them(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        library = Path(sources.native.__file__).with_name("_kernels.abi3.so")
        monkeypatch.setattr(sources.native, "library", lambda: library)
        assert sources.shipped(kernels=True) == sources.shipped() | {"llmforge/native/_kernels.abi3.so": library}
        monkeypatch.setattr(sources.native, "library", lambda: None)
        with pytest.raises(EnvironmentLacks, match="are not compiled in this installation"):
            sources.shipped(kernels=True)
        assert sources.shipped(kernels=None) == sources.shipped()

    def test_engines_for_gpus_carry_the_kernels_that_draw_their_tokens(
        self, artifact: Artifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked: list[bool | None] = []

        def shipped(_: tuple[str, ...], *, kernels: bool | None) -> dict[str, Path]:
            asked.append(kernels)
            return {"llmforge/triton/sources.py": Path(sources.__file__)}

        monkeypatch.setattr(sources, "shipped", shipped)
        model = repository.of_artifact(artifact)
        for device in (None, DeviceFacts(89, 1)):  # None: if there are any
            runtime = replace(model.runtime, device=device, kernels=None)
            repository.write(replace(model, runtime=runtime), tmp_path / f"repository{len(asked)}")
        assert asked == [False, None]

    def test_it_is_small_and_has_no_build_side(self) -> None:
        shipped = sources.shipped()
        assert "llmforge/base/errors.py" in shipped
        assert "llmforge/ir/interface.py" in shipped
        assert not {"llmforge/cli.py", "llmforge/recipe.py", "llmforge/triton/repository.py"} & shipped.keys()
        assert sum(file.stat().st_size for file in shipped.values()) < 1 << 20

    def test_the_copy_runs_with_nothing_of_llmforge_beside_it(self, artifact: Artifact, tmp_path: Path) -> None:
        export(artifact, tmp_path)
        own = tmp_path / "random" / "1"
        program = (
            f"import sys; sys.path[:0] = [{str(own)!r}]\n"
            "from pathlib import Path\n"
            "import llmforge.serving\n"
            f"runner = llmforge.serving.load(Path({str(own)!r}))\n"
            "chunks = runner.generate('a', llmforge.serving.Sampling(max_tokens=5))\n"
            "print(llmforge.__file__, ''.join(chunk.text for chunk in chunks))\n"
            "print(*sorted({'torch', 'transformers', 'onnx', 'onnx_ir', 'pydantic'} & sys.modules.keys()))"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path
        )
        file, _, rest = done.stdout.partition(" ")
        assert Path(file).is_relative_to(own)
        said = "".join(
            chunk.text for chunk in load(artifact.path).generate("a", llmforge.serving.Sampling(max_tokens=5))
        )
        assert rest == f"{said}\n\n"


class TestChecks:
    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        checks.environment()  # this one has all
        monkeypatch.setattr(checks, "NEEDED", {"numpy": "1.26", "no_such_package": None})
        with pytest.raises(EnvironmentLacks, match=r"has no no_such_package\nhint: pip install -r requirements.txt"):
            checks.environment()

    def test_an_old_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "NEEDED", {"numpy": "99.1"})
        with pytest.raises(VersionMismatch, match=r"numpy \S+ is installed; this model needs 99.1 or newer"):
            checks.environment()

    def test_an_old_python_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "PYTHON", (4, 0))
        with pytest.raises(VersionMismatch, match=r"Python 3\.\d+ runs this model, which needs 4\.0 or newer"):
            checks.environment()

    def test_numpy_2_needs_a_backend_that_knows_it(self, tmp_path: Path) -> None:
        old, new = tmp_path / "old", tmp_path / "new"
        old.write_bytes(b"\0numpy.core.multiarray\0")
        new.write_bytes(b"\0numpy._core\0numpy.core\0")
        for version, stub in (("1.26.4", old), ("1.26.4", new), ("2.0.0", new), ("2.4.6", new)):
            checks.numpy_fits(version, stub)
        with pytest.raises(VersionMismatch, match=r"numpy 2\.0\.0 is installed.*every answer would be empty"):
            checks.numpy_fits("2.0.0", old)

    def test_that_is_how_an_extension_of_today_knows_it(self, tmp_path: Path) -> None:
        """ONNX Runtime's own module is made with a pybind11 that knows numpy 2."""
        (module,) = (Path(onnxruntime.__file__).parent / "capi").glob("onnxruntime_pybind11_state*.so")
        checks.numpy_fits(np.__version__, module)
        older = tmp_path / module.name
        older.write_bytes(module.read_bytes().replace(b"numpy._core", b"numpy.ocore"))
        with pytest.raises(VersionMismatch, match="every answer would be empty"):
            checks.numpy_fits("2.0.0", older)

    def test_requirements_are_those_of_the_package(self) -> None:
        project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        for name in ("jinja2", "tokenizers"):
            assert f'"{name}>={checks.NEEDED[name]}"' in project
        assert all(f'"{requirement}"' in project for requirement in checks.OPTIONAL)


class TestSettings:
    def test_options_of_the_engine(self) -> None:
        texts = {"artifact": ".", "max_queue": "3", "timeout_s": "2.5", "speculation": "prompt-lookup", "threads": "2"}
        read = settings.read({name: {"string_value": text} for name, text in texts.items()})
        assert read.engine == EngineOptions(max_queue=3, timeout_s=2.5, speculation="prompt-lookup")
        assert (read.artifact, read.threads) == (".", 2)

    def test_what_is_not_given_is_the_runtimes_own(self) -> None:
        read = settings.read({"artifact": {"string_value": "."}, "EXECUTION_ENV_PATH": {"string_value": "/venv"}})
        assert read == settings.ModelSettings(".")
        assert read.engine == EngineOptions()

    def test_a_recipe_can_say_no_more_than_the_engine_knows(self) -> None:
        names = {field for field in ServingSpec.model_fields if field != "triton"}
        assert names <= set(EngineOptions.__dataclass_fields__)

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (
                {"artifact": ".", "max_que": "3"},
                "unknown parameters max_que; known: artifact, allow, chat_template, threads, max_queue",
            ),
            ({"max_queue": "3"}, "the parameter artifact is missing"),
            ({"artifact": ".", "max_queue": "many"}, "parameter max_queue is 'many'; expected int"),
            ({"artifact": ".", "max_queue": "-1"}, "max_queue -1: expected 0 or more"),
        ],
    )
    def test_what_makes_no_sense(self, texts: dict[str, str], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            settings.read({name: {"string_value": text} for name, text in texts.items()})


@pytest.fixture
def model_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What runs inside the process that Triton makes for a model, of whose own module nothing more is needed here."""
    module = ModuleType("triton_python_backend_utils")
    vars(module).update(Logger=Mock(), TritonModelException=RuntimeError)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(checks, "numpy_fits", lambda version: None)  # this process is no backend of Triton's
    for name in ("model", "responses", "metrics"):  # imported with that module, and not to be kept
        monkeypatch.delitem(sys.modules, f"llmforge.triton.backend.{name}", raising=False)
    return importlib.import_module("llmforge.triton.backend.model")


def test_chats_wait_for_each_other_and_for_nothing_else() -> None:
    went, order, died = threading.Event(), [], []
    waiting = worker_pool.QueueWorker("chat", 2, lambda: died.append(True))
    waiting.put(lambda: went.wait(10) and order.append(0))
    while waiting._waiting.qsize():
        time.sleep(0.001)
    for number in (1, 2):
        waiting.put(lambda number=number: order.append(number))
    with pytest.raises(Unavailable, match="the queue is full: 2 requests of kind 'chat' are waiting"):
        waiting.put(lambda: None)
    went.set()
    waiting.close()
    assert (order, died) == ([0, 1, 2], [])


def test_a_bug_while_a_chat_is_read_ends_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    died = threading.Event()
    made = worker_pool.QueueWorker("chat", 2, died.set)
    made.put(lambda: 1 // 0)
    made._thread.join(10)
    assert died.is_set()
    assert len(told) == 1


def test_a_gpu_instance_of_a_cpu_engine_is_refused(artifact: Artifact, model_module: Any) -> None:
    arguments = {
        "model_config": json.dumps({"parameters": {"artifact": {"string_value": "../../.."}}}),
        "model_instance_kind": "GPU",
        "model_instance_name": "random_0_0",
        "model_repository": str(artifact.path / "triton" / "random"),
        "model_version": "1",
    }
    with pytest.raises(RuntimeError, match="says KIND_GPU, but the engine is for a CPU\nhint: kind: KIND_CPU"):
        model_module.TritonPythonModel().initialize(arguments)


def test_a_model_is_held_to_its_manifest_and_its_gates_when_it_loads(
    artifact: Artifact, model_module: Any, tmp_path: Path
) -> None:
    """As exported: alone, with manifest and evidence beside engine and tokenizer."""

    def load(allow: str | None) -> None:
        repository = tmp_path / f"repository-{allow}"
        words = ["triton", str(artifact.path), "-o", str(repository), "--copy", "--allow", "fail"]
        assert CliRunner().invoke(cli, words).exit_code == 0
        (record,) = (repository / "random" / "1" / "evidence").glob("*.json")
        raw = record.read_bytes().replace(b'"verdict": "none"', b'"verdict": "fail"', 1)
        record.unlink()
        record.with_name(f"{hashlib.sha256(raw).hexdigest()}.json").write_bytes(raw)
        config = (repository / "random" / "config.pbtxt").read_text()
        assert 'key: "allow"' in config
        parameters = {"artifact": ".", **({} if allow is None else {"allow": allow})}
        arguments = {
            "model_config": json.dumps({"parameters": {key: {"string_value": v} for key, v in parameters.items()}}),
            "model_instance_kind": "GPU",  # which is refused after
            "model_instance_name": "random_0_0",
            "model_repository": str(repository / "random"),
            "model_version": "1",
        }
        if allow == "damaged":
            arguments["model_config"] = arguments["model_config"].replace("damaged", "fail")
            engine = repository / "random" / "1" / "engine" / "model.onnx"
            engine.chmod(0o644)
            engine.write_bytes(engine.read_bytes()[:-1] + b"!")
        model_module.TritonPythonModel().initialize(arguments)

    with pytest.raises(RuntimeError, match=r"the verdict of random .* is FAIL.*\n.*llmforge triton --allow fail"):
        load(None)
    with pytest.raises(RuntimeError, match="says KIND_GPU, but the engine is for a CPU"):
        load("fail")
    with pytest.raises(RuntimeError, match=r"changed: engine/model\.onnx"):
        load("damaged")


def test_a_model_renders_chats_with_the_template_beside_it(
    artifact: Artifact, model_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other.jinja"
    other.write_text("other{{ eos_token }}")
    assert export(artifact, tmp_path / "repo", "--chat-template", str(other)).exit_code == 0
    loaded = Mock(side_effect=EnvironmentLacks("seen enough"))
    monkeypatch.setattr(model_module, "EngineProcess", loaded)
    settings_of = {"artifact": ".", "chat_template": "chat_template.jinja"}
    arguments = {
        "model_config": json.dumps({"parameters": {key: {"string_value": v} for key, v in settings_of.items()}}),
        "model_instance_kind": "CPU",
        "model_instance_name": "random_0_0",
        "model_repository": str(tmp_path / "repo" / "random"),
        "model_version": "1",
    }
    with pytest.raises(RuntimeError, match="seen enough"):
        model_module.TritonPythonModel().initialize(arguments)
    assert loaded.call_args.args[-1].render([]) == "other<|endoftext|>"


def test_a_model_says_that_its_verdict_is_not_verified(
    artifact: Artifact, model_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    families: dict[str, Mock] = {}
    utils = sys.modules["triton_python_backend_utils"]
    monkeypatch.setattr(
        utils, "MetricFamily", Mock(side_effect=lambda name, **_: families.setdefault(name, Mock())), raising=False
    )
    stats = EngineStats(**{field.name: 0 for field in fields(EngineStats)} | {"finished": {}, "notes": ()})
    engine = Mock(stats=lambda: stats, **{"encoder.config.max_batch": 1, "options.max_queue": 1})
    monkeypatch.setattr(model_module, "EngineProcess", Mock(return_value=engine))
    monkeypatch.setattr(model_module, "JsonLimits", Mock())
    monkeypatch.setattr(model_module, "ResponseSender", Mock())
    monkeypatch.setattr(model_module, "QueueWorker", Mock())
    model = model_module.TritonPythonModel()
    model.initialize(
        {
            "model_config": json.dumps({"parameters": {"artifact": {"string_value": "../../.."}}}),
            "model_instance_kind": "CPU",
            "model_instance_name": "random_0_0",
            "model_name": "random",
            "model_repository": str(artifact.path / "triton" / "random"),
            "model_version": "1",
        }
    )
    model._metrics.close()
    (metric,) = families["llmforge_artifact_info"].Metric.call_args_list
    of_artifact = {"artifact_version": artifact.manifest.version, "verdict": "none", "verified": "false"}
    assert metric.kwargs["labels"].items() >= of_artifact.items()
    said = " ".join(call.args[0] for call in utils.Logger.log_warn.call_args_list)
    assert f"the verdict of random {artifact.manifest.version}, none, is not verified here" in said


def test_an_instance_of_a_gpu_engine_gets_the_gpu_of_its_group(artifact: Artifact, model_module: Any) -> None:
    config = RuntimeConfig.read(artifact.path / "engine" / "runtime.json")
    arguments = {"model_instance_kind": "GPU", "model_instance_device_id": "3"}
    assert model_module._device(replace(config, provider="cuda"), arguments) == 3
    with pytest.raises(EnvironmentLacks, match="says KIND_CPU, but the engine is for a GPU"):
        model_module._device(replace(config, provider="cuda"), {**arguments, "model_instance_kind": "CPU"})
    assert model_module._device(config, {**arguments, "model_instance_kind": "CPU"}) == 0


def test_a_model_on_several_gpus_says_so_once(model_module: Any) -> None:
    """Triton writes all GPUs into a group that names none, and starts an instance on each."""
    group = {"kind": "KIND_GPU", "count": 1, "gpus": [2, 0, 1]}
    said = [model_module._copies({"instance_group": [group]}, device) for device in (0, 1, 2)]
    assert said[1:] == [None, None]
    assert said[0].startswith(
        "a copy of the model, with weights and a KV cache of its own, runs on each of the GPUs 0, 1, 2;"
    )
    assert "serving.triton.gpus" in said[0]
    assert model_module._copies({"instance_group": [{**group, "gpus": [1]}]}, 1) is None
    assert model_module._copies({}, 0) is None


def test_the_environment_of_an_engine_is_that_of_what_runs_it(artifact: Artifact) -> None:
    config = RuntimeConfig.read(artifact.path / "engine" / "runtime.json")
    assert f"onnxruntime=={config.onnxruntime}" in repository.requirements(config).splitlines()
    cuda = repository.requirements(replace(config, provider="cuda")).splitlines()
    assert {f"onnxruntime-gpu[cuda,cudnn]=={config.onnxruntime}", "cuda-bindings>=13,<14"} <= set(cuda)
    assert f"onnxruntime=={config.onnxruntime}" not in cuda
    facts = PlanFacts("tensorrt_rtx", "1.7.1.116", "model.plan", ())
    plan = repository.requirements(replace(config, provider="tensorrt-rtx", onnxruntime=None, plan=facts))
    assert {"tensorrt-rtx==1.7.1.116", "onnxruntime", "cuda-bindings>=13,<14"} <= set(plan.splitlines())


def ask(
    encoder: PromptEncoder, parameters: dict[str, Any] | None = None, timeout_s: float | None = None, **tensors: Any
) -> inputs.InferenceRequest:
    """Read a request whose tensors are given as Python values."""
    types = {spec.name: spec.data_type for spec in signature.INPUTS}
    dtypes = {"TYPE_STRING": np.object_, "TYPE_BOOL": np.bool_, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64,
              "TYPE_INT32": np.int32, "TYPE_INT64": np.int64}  # fmt: skip
    arrays = {}
    for name, values in tensors.items():
        values = values if isinstance(values, list) else [values]
        values = [value.encode() if isinstance(value, str) else value for value in values]
        arrays[name] = np.array([values], dtypes[types[name]])
    return inputs.read(arrays, json.dumps(parameters or {}), timeout_s, encoder, JsonLimits.of(encoder))


class TestInputs:
    def test_a_text(self, runner: Runner) -> None:
        read = ask(runner, text_input="héllo 日本", max_tokens=5)
        assert list(read.request.prompt) == runner.encode("héllo 日本")
        assert read.request.sampling.max_tokens == 5
        assert (read.stream, read.echo, read.omitted) == (False, "", frozenset())

    def test_decimals_are_what_the_client_wrote(self, runner: Runner) -> None:
        assert float(np.float32(0.7)) != 0.7
        sampling = ask(runner, text_input="a", temperature=0.7, top_p=0.95).request.sampling
        assert (sampling.temperature, sampling.top_p) == (0.7, 0.95)

    def test_parameters_from_three_places(self, runner: Runner) -> None:
        sampling = ask(
            runner,
            {"top_k": 5, "triton_enable_empty_final_response": True},
            text_input="a",
            seed=2**63,
            stop_words=["x", "y"],
            sampling_parameters=json.dumps({"max_tokens": "7", "temperature": 0.5}),
        ).request.sampling
        assert (sampling.top_k, sampling.seed, sampling.stop) == (5, 2**63, ("x", "y"))
        assert (sampling.max_tokens, sampling.temperature) == (7, 0.5)

    def test_a_priority_is_the_engines(self, runner: Runner) -> None:
        assert ask(runner, text_input="a").request.priority == 0
        assert ask(runner, {"priority": -3}, text_input="a").request.priority == -3
        given = json.dumps({"priority": 2, "max_tokens": 4})
        assert ask(runner, text_input="a", sampling_parameters=given).request.priority == 2
        for wrong in ("high", 1.5, True, 101, [1] * 99):
            with pytest.raises(UsageError, match=r"priority .{1,40}: expected a whole number from -100 to 100"):
                ask(runner, {"priority": wrong}, text_input="a")
        with pytest.raises(UsageError, match="priority: given twice"):
            ask(runner, {"priority": 1}, text_input="a", sampling_parameters=given)

    def test_each_may_be_given_once(self, runner: Runner) -> None:
        with pytest.raises(UsageError, match="top_k: given twice, also as a parameter"):
            ask(runner, {"top_k": 5}, text_input="a", top_k=4)

    def test_bytes_that_are_no_text(self, runner: Runner) -> None:
        with pytest.raises(UsageError, match="text_input: byte 1 is not UTF-8"):
            ask(runner, text_input=b"a\xff")

    def test_one_prompt_a_request(self, runner: Runner) -> None:
        with pytest.raises(UsageError, match="text_input: 2 values; expected one"):
            ask(runner, text_input=["a", "b"])

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{}", r'messages: expected a list of {"role": …, "content": …}, not empty'),
            ("[]", "not empty"),
            ('[{"role": 1}]', r"messages\[0\]: expected an object"),
            ('[{"role": "user"}]', r"messages\[0\]: content is NoneType"),
            ('["a"]', r"messages\[0\]: expected an object"),
            ('[{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image"}]}]', r"messages\[1\]"),
            ('[{"role": "user", "content": "\\ud800"}]', "messages holds an unpaired surrogate"),
            pytest.param("[" * 5000, "messages is not JSON", id="nested"),
            pytest.param(f"[{'{},' * 11_000}{{}}]", "messages has 22,002 values; at most 10,256", id="values"),
            pytest.param(f"[{' ' * 2_000_000}]", "messages is larger than 1,048,576 bytes", id="bytes"),
        ],
    )
    def test_messages_that_make_no_sense(self, runner: Runner, text: str, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            ask(runner, messages=text)

    def test_json_that_is_nested_too_deeply(self, runner: Runner) -> None:
        with pytest.raises(UsageError, match="sampling_parameters is not JSON"):
            ask(runner, text_input="a", sampling_parameters="[" * 5000)

    def test_token_ids_are_counted_before_anything_is_made_of_them(self, runner: Runner) -> None:
        with pytest.raises(UsageError, match="100000 tokens; this artifact allows at most 63"):
            ask(runner, input_ids=[7] * 100_000)

    @pytest.mark.parametrize(
        ("parameters", "timeout_s", "expected"),
        [
            ({}, None, None),
            ({}, 2.5, 2.5),
            ({"timeout": 1_500_000}, None, 1.5),
            ({"timeout_ms": 1500}, None, 1.5),
            ({"timeout_ms": 0.5}, None, 0.0005),
            ({"timeout": 0}, None, None),
        ],
    )
    def test_a_deadline(
        self, runner: Runner, parameters: dict[str, Any], timeout_s: float | None, expected: float | None
    ) -> None:
        assert ask(runner, parameters, timeout_s, text_input="a").request.timeout_s == expected

    @pytest.mark.parametrize(
        ("parameters", "timeout_s", "message"),
        [
            ({"timeout": -1}, None, "timeout -1: expected a number of microseconds; 0 is none"),
            ({"timeout_ms": True}, None, "timeout_ms True: expected a number of milliseconds"),
            ({"timeout_ms": "soon"}, None, "timeout_ms soon: expected a number"),
            ({"timeout_ms": float("nan")}, None, "timeout_ms nan: expected a number"),
            ({"timeout_ms": 10**400}, None, "timeout_ms 1000"),
            ({"timeout": 5, "timeout_ms": 5}, None, "timeout and timeout_ms: a request has one deadline"),
            ({"timeout_ms": 5}, 1.0, "the request's timeout and timeout_ms: a request has one deadline"),
        ],
    )
    def test_a_deadline_that_is_none(
        self, runner: Runner, parameters: dict[str, Any], timeout_s: float | None, message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            ask(runner, parameters, timeout_s, text_input="a")

    def test_what_is_left_out_and_what_stands_before(self, runner: Runner) -> None:
        read = ask(runner, text_input="a b", exclude_input_in_output=False, return_num_output_tokens=False)
        assert (read.echo, read.omitted) == ("a b", {"num_output_tokens"})
        with pytest.raises(UsageError, match="requires text_input and no streaming"):
            ask(runner, text_input="a", exclude_input_in_output=False, stream=True)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "ping", **function}}


class TestTools:
    ASK = '[{"role": "user", "content": "a"}]'

    @pytest.fixture
    def encoder(self, runner: Runner) -> PromptEncoder:
        return PromptEncoder(runner.config, runner.tokenizer, ChatTemplate(HERMES, {}, "chat_template.jinja"))

    def test_they_are_json_or_the_text_of_it(self, encoder: PromptEncoder) -> None:
        given = {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "ping"}}}
        texts = {name: json.dumps(value) for name, value in given.items()}
        one = ask(encoder, messages=self.ASK, sampling_parameters=json.dumps({**given, "parallel_tool_calls": False}))
        two = ask(encoder, {**texts, "parallel_tool_calls": "false"}, messages=self.ASK)
        assert one.request == two.request
        assert one.request.sampling.constraint is not None
        assert one.parser is not None
        assert "ping" in encoder.tokenizer.decode(list(one.request.prompt))
        free = ask(encoder, {"tools": texts["tools"]}, messages=self.ASK)
        assert (free.request.sampling.constraint, free.parser is None) == (None, False)
        for nothing in ({}, {"tools": "[]"}, {"tools": texts["tools"], "tool_choice": "none"}):
            assert ask(encoder, nothing, messages=self.ASK).parser is None

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"tools": "["}, "tools is not JSON"),
            ({"tools": [tool()], "tool_choice": "{"}, "tool_choice is not JSON"),
            ({"tools": [tool()], "parallel_tool_calls": "perhaps"}, "parallel_tool_calls is not JSON"),
            ({"tools": [tool()], "parallel_tool_calls": 3}, "parallel_tool_calls 3: expected true or false"),
            ({"tools": "[" + "0," * 200_000 + "0]"}, "values"),
            ({"tools": [tool()], "tool_choice": "required", "guided_regex": "a"}, "a form of answers"),
        ],
    )
    def test_what_makes_no_sense(self, encoder: PromptEncoder, parameters: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=re.escape(message)):
            ask(encoder, parameters, messages=self.ASK)

    @pytest.mark.parametrize("stream", [False, True])
    def test_calls_are_told_apart_from_text(self, encoder: PromptEncoder, model_module: Any, stream: bool) -> None:
        responses = importlib.import_module("llmforge.triton.backend.responses")
        asked = ask(encoder, {"tools": [tool()]}, messages=self.ASK, stream=stream)
        sender = object.__new__(responses.ResponseSender)
        active = responses.ActiveRequest(Mock(), asked, 0.0)
        said = ["So: <tool", '_call>\n{"name": "ping", "arguments": {"a"', ": 1}}\n</tool_call>"]
        seen: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(responses, "_tensor", lambda spec, value: (spec.name, value))
            sender._metrics = Mock()
            sender._active = set()
            fake = Mock(InferenceResponse=lambda output_tensors: dict(output_tensors))
            patched.setattr(responses, "pb_utils", fake)
            active.sender.send = lambda response, flags=0: seen.append(response)
            for text in said:
                sender._send(sender._assign((active, Chunk(text, 1), 0.0)))
            sender._send(sender._assign((active, Chunk("", None, "stop", Usage(1, 3, 1.0, 1.0)), 0.0)))
        assert "".join(each["text_output"] for each in seen) == "So:"
        assert seen[-1]["finish_reason"] == "tool_calls"
        assert sum(each["num_output_tokens"] for each in seen) == 3
        calls = [call for each in seen for call in json.loads(each.get("tool_calls", "[]"))]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
        assert calls[0]["function"]["name"] == "ping"
        assert len(seen) == (4 if stream else 1)
        assert all(("index" in call) == stream for call in calls)

    def test_without_messages_they_are_refused(self, encoder: PromptEncoder) -> None:
        with pytest.raises(UsageError, match="with messages alone"):
            ask(encoder, {"tools": [tool()]}, text_input="a")


class TestLaunch:
    def test_without_a_server_it_says_so(self, artifact: Artifact, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        result = export(artifact, tmp_path / "repo", "--launch")
        assert result.exit_code == 8
        assert "no tritonserver is on PATH" in result.stderr
        needed = artifact.path / "triton" / artifact.manifest.name / "1" / "requirements.txt"
        assert needed.is_file()
        way = f"python3 -m venv triton && triton/bin/pip install {PYTRITON} 'numpy<2' -r {needed}"
        assert f"{way}, then add --server triton" in result.stderr
        assert "llmforge docs triton" in result.stderr
        assert not (tmp_path / "repo").exists()
        with pytest.raises(EnvironmentLacks, match="not an executable"):
            find(tmp_path / "tritonserver")

    def test_an_environment_with_pytriton_is_a_server(self, tmp_path: Path, monkeypatch: Any) -> None:
        home = tmp_path / "lib/python3.11/site-packages/pytriton/tritonserver"
        for file in ("bin/tritonserver", "python_backend_stubs/3.11/triton_python_backend_stub"):
            (home / file).parent.mkdir(parents=True)
            (home / file).write_text(file)
        (home / "backends/python").mkdir(parents=True)
        (tmp_path / "libpython3.11.so.1.0").touch()
        python = tmp_path / "bin/python"
        python.parent.mkdir()
        python.write_text(f"""#!/bin/sh\necho '["{tmp_path}", "libpython3.11.so.1.0"]'\n""")
        python.chmod(0o755)
        monkeypatch.setenv("PYTHONPATH", "/elsewhere")
        found = find(tmp_path)
        assert found.program == home / "bin/tritonserver"
        assert (home / "backends/python/triton_python_backend_stub").read_text().startswith("python_backend_stubs/3.11")
        assert found.environment["PATH"].startswith(f"{tmp_path}/bin:")
        assert found.environment["LD_LIBRARY_PATH"].startswith(f"{tmp_path}:{home.parents[1]}/nvidia_pytriton.libs")
        assert "PYTHONPATH" not in found.environment
        assert f"--backend-directory={home}/backends" in command(found, tmp_path, Ports())
        (tmp_path / "libpython3.11.so.1.0").unlink()
        with pytest.raises(EnvironmentLacks, match=r"needs libpython3\.11\.so"):
            find(tmp_path)
        (home / "python_backend_stubs/3.11").rename(home / "python_backend_stubs/3.8")
        with pytest.raises(EnvironmentLacks, match=r"knows no Python 3\.11; it knows 3\.8"):
            find(tmp_path)
        (home / "bin/tritonserver").unlink()
        with pytest.raises(EnvironmentLacks, match="no environment with nvidia-pytriton"):
            find(tmp_path)

    def test_the_server_of_the_tests_is_the_one_that_users_are_told_of(self) -> None:
        assert (PYTRITON,) == SERVER

    def test_the_command_listens_on_the_loopback_and_loads_nothing_else(self, tmp_path: Path) -> None:
        words = command(
            TritonServer(Path("/bin/tritonserver"), {}), tmp_path, Ports(http=1, grpc=2, metrics=3), ["--log-verbose=1"]
        )
        assert words[0] == "/bin/tritonserver"
        assert words[-1] == "--log-verbose=1"
        assert {"--model-control-mode=none", "--disable-auto-complete-config", "--http-address=127.0.0.1"} <= {*words}
        assert {"--http-port=1", "--grpc-port=2", "--metrics-port=3"} <= {*words}

    def test_options_for_no_server_are_refused(self, artifact: Artifact, tmp_path: Path) -> None:
        result = export(artifact, tmp_path, "--", "--log-verbose=1")
        assert result.exit_code == 2
        assert "SERVER_OPTIONS require --launch" in result.stderr


def test_ranks_have_the_gpus_behind_the_one_that_is_named(artifact: Artifact) -> None:
    runtime = RuntimeConfig.read(artifact.path / "engine" / FILE)
    runtime = replace(runtime, provider="cuda", ranks=2, device=DeviceFacts(90, 1))

    def config(*changes: str) -> str:
        model = repository.TritonModel("m", "gpu", ServingSpec().changed(changes), runtime, {})
        return repository.config(model, ".")

    assert "kind: KIND_GPU count: 1 gpus: [ 0 ]" in config()
    assert "gpus: [ 4, 2 ]" in config("triton.gpus=[4, 2]")
    with pytest.raises(UsageError, match=r"gpus is \[0, 1\]: an instance has 2 ranks") as caught:
        config("triton.gpus=[0, 1]")
    assert caught.value.hint == "name GPUs that are 2 apart: [0, 2]"
    assert repository.NCCL in repository.requirements(runtime).splitlines()
    assert repository.NCCL not in repository.requirements(replace(runtime, provider="cpu", device=None))


def test_serving_in_a_recipe_is_checked(sample_checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "schema: 1\nname: tiny\ntarget: local\nengine: {max_context: 64}\npasses: []\n"
        f"checkpoint: {sample_checkpoint}\nserving:\n  max_queue: 5\n  triton: {{kinds: cpu}}\n"
    )
    with pytest.raises(RecipeError, match=r"recipe.yaml:9:12: serving.triton.kinds: unknown key") as caught:
        Recipe.load(recipe)
    assert caught.value.hint == "did you mean 'kind'?"
    with pytest.raises(ValueError, match="`gpus` requires kind gpu, not cpu"):
        ServingSpec.model_validate_json('{"triton": {"kind": "cpu", "gpus": [0]}}')
    with pytest.raises(RecipeError, match=r"--set triton.instances=0: triton.instances: "):
        ServingSpec().changed(["triton.instances=0"])
    with pytest.raises(
        RecipeError, match=r"triton\.kind: must be 'cpu' or 'gpu': an instance of KIND_MODEL has no device"
    ):
        ServingSpec().changed(["triton.kind=model"])


@pytest.mark.parametrize(
    ("target", "triton", "said"),
    [
        ("h100-sxm", "kind: cpu", r":8:21: serving\.triton\.kind: asks for a cpu, .* target h100-sxm run on a gpu"),
        ("cpu-avx2", "kind: gpu", r":8:21: serving\.triton\.kind: asks for a gpu, .* target cpu-avx2 run on a cpu"),
        ("cpu-avx2", "gpus: [1]", r":8:21: serving\.triton\.gpus: asks for a gpu"),
        ("h100-sxm", "kind: model", r":8:21: serving\.triton\.kind: must be 'cpu' or 'gpu': an instance of KIND_MODEL"),
        ("h100-sxm", "gpus: [1]", None),
        ("cpu-avx2", "kind: cpu", None),
    ],
)
def test_instances_are_of_the_kind_of_the_target(
    target: str, triton: str, said: str | None, sample_checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"schema: 1\nname: tiny\ntarget: {target}\nengine: {{max_context: 64}}\npasses: []\n"
        f"checkpoint: {sample_checkpoint}\nserving:\n  triton: {{         {triton}}}\n"
    )
    if said is None:
        Recipe.load(recipe)
        return
    with pytest.raises(RecipeError, match=said):
        Recipe.load(recipe)
