"""What each command says to files and values that it cannot use: one message and a hint, and never a traceback."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from llmforge.cli import cli
from llmforge.recipe import ServingSpec
from llmforge.triton.launch import find

from ..samples import published

HIGH = "\udcff"  # what a byte that is no UTF-8 becomes on the command line


def invoke(*args: str | Path) -> Result:
    result = CliRunner().invoke(cli, [*map(str, args)], prog_name="llmforge")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(code: int, says: str, *args: str | Path) -> None:
    result = invoke(*args)
    assert result.exit_code == code, result.output
    assert says in result.stderr.replace("\n", " ")
    assert "hint: " in result.stderr
    assert result.stdout == ""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("artifacts")
    return published.random_decoder(out, sample_checkpoint, max_context=64, max_batch=2, serving=ServingSpec()).path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that nothing can use, in which commands run."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "empty.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "recipe.yaml").write_text("schema: 1\nname: s\ncheckpoint: .\ntarget: local\npasses: []\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


Deny = Callable[[Path], None]


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> Deny:
    """Refuse to look at a path and what is below it, as the system does to a user without rights (root has all)."""

    def denying(locked: Path) -> None:
        for name in ("stat", "lstat", "open"):
            original = getattr(Path, name)

            def guarded(
                self: Path, *args: object, original: Callable[..., object] = original, **more: object
            ) -> object:
                if self.absolute().is_relative_to(locked):
                    raise PermissionError(13, "Permission denied", str(self))
                return original(self, *args, **more)

            monkeypatch.setattr(Path, name, guarded)

    return denying


@pytest.mark.parametrize("command", [("verify",), ("run", "hi"), ("serve",), ("bench",), ("triton", "-o", "repo")])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("absent", "absent: no such artifact or folder"),
        ("-", "-: no such artifact or folder"),
        ("empty", "empty: is a file, an artifact is a folder"),
        ("folder", "folder: not an artifact: it has no manifest.json"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_is_no_artifact(command: tuple[str, ...], what: str, says: str) -> None:
    refused(5, says, command[0], what, *command[1:])


@pytest.mark.parametrize("locked", ["", "manifest.json"])
def test_an_artifact_that_may_not_be_read(built: Path, deny: Deny, locked: str) -> None:
    deny(built / locked if locked else built)
    refused(5, "cannot be read: Permission denied", "inspect", built)


def test_a_file_of_an_artifact_that_may_not_be_read(built: Path, deny: Deny) -> None:
    deny(built / "engine" / "model.onnx")
    refused(5, "model.onnx: cannot be read: Permission denied", "inspect", built, "--verify")


@pytest.mark.parametrize(
    ("file", "content", "code", "says"),
    [
        ("manifest.json", b"", 5, "manifest.json: not valid JSON"),
        ("engine/model.onnx", b"x", 5, "changed: engine/model.onnx"),
        ("engine/model.onnx", None, 5, "missing: engine/model.onnx"),
        ("tokenizer/tokenizer.json", b"{}", 5, "changed: tokenizer/tokenizer.json"),
        ("tokenizer/tokenizer.json", None, 5, "missing: tokenizer/tokenizer.json"),
    ],
)
def test_an_artifact_that_is_damaged(
    built: Path, tmp_path: Path, file: str, content: bytes | None, code: int, says: str
) -> None:
    copy = Path(shutil.copytree(built, tmp_path / "copy", copy_function=shutil.copyfile))
    for folder in (copy, (copy / file).parent):
        folder.chmod(0o755)
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_bytes(content)
    refused(code, says, "run", copy, "hi", "--max-tokens", "1")


def test_an_engine_that_is_built_is_not_finished(built: Path) -> None:
    refused(5, "its engine is already built", "build", "--finish", built, "--quiet")


@pytest.mark.usefixtures("here")
def test_a_checkpoint_that_may_not_be_read(here: Path, deny: Deny) -> None:
    deny(here / "folder")
    for command in (
        ("trace", "folder"),
        ("plan", "folder", "--target", "h200"),
        ("plan", "folder/x", "--target", "l4"),
    ):
        refused(5, "cannot be read: Permission denied", *command)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "model_type must name"),
        ('{"model_type": "llama", "num_hidden_layers": -1}', "must be a positive integer"),
        ('{"model_type": "llama", "hidden_size": "big"}', "transformers refuses it"),
    ],
)
def test_a_configuration_that_makes_no_sense(here: Path, config: str, says: str) -> None:
    (here / "folder" / "config.json").write_text(config)
    refused(5, says, "plan", "folder", "--target", "h200")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("absent.yaml", "cannot be read: No such file"),
        ("empty.yaml", "is empty"),
        ("bytes.yaml", "is not UTF-8"),
        ("list.yaml", "expected a mapping with"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_is_no_recipe_and_no_target(file: str, says: str) -> None:
    for command in (("build", file), ("plan", file), ("targets", file)):
        refused(2, says, *command)


@pytest.mark.usefixtures("here")
def test_a_recipe_is_no_target() -> None:
    result = invoke("targets", "recipe.yaml")
    assert result.exit_code == 2
    assert "hint: this is a recipe" in result.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("targets", ""), "no target is named ''"),
        (("passes", ""), "no pass is named ''"),
        (("passes", "/"), "no pass is named '/'"),
        (("doctor", "--measure", "--write", "machine.json"), "the name must end in .yaml"),
        (("doctor", "--measure", "--write", "absent/machine.yaml"), "there is no folder"),
        (("plan", "folder", "--target", "h200", "--plot", "x"), "the name must end in .svg or .html"),
        (("plan", "folder", "--target", "h200", "--plot", "folder"), "the name must end in .svg or .html"),
        (("plan", "folder", "--target", "h200", "--price", "nan"), "--price nan: expected a finite number"),
        (("trace", "folder", "-o", "graph"), "the name must end in .onnx"),
        (("trace", "folder", "-o", "empty/graph.onnx"), "there is no folder"),
    ],
)
@pytest.mark.usefixtures("here")
def test_values_are_refused_before_any_work(command: tuple[str, ...], says: str) -> None:
    refused(2, says, *command)


@pytest.mark.parametrize(("path", "says"), [("folder", "it is a folder"), ("absent/x.json", "there is no folder")])
@pytest.mark.usefixtures("here")
def test_a_report_of_bench_that_could_not_be_written_is_refused_before_it_is_measured(
    built: Path, path: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmforge.measure import load as bench

    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("it was measured"))
    refused(2, says, "bench", built, "-o", path)


@pytest.mark.usefixtures("here")
def test_a_report_of_bench_that_turns_out_not_to_be_written(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmforge.measure import load as bench

    monkeypatch.setattr(bench, "run", lambda *_, **__: SimpleNamespace(to_json=lambda: "{}"))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    refused(8, "report.json: cannot be written: No space left on device", "bench", built, "-o", "report.json")


@pytest.mark.parametrize("options", [("--temperature", "nan"), ("--top-p", "2"), ("--json-schema", "absent")])
def test_wrong_values_of_options_point_at_the_help(built: Path, options: tuple[str, ...]) -> None:
    result = invoke("run", built, "hi", *options)
    assert result.exit_code == 2
    assert "hint: see `llmforge run --help`" in result.stderr


@pytest.mark.parametrize("text", [HIGH, f"text {HIGH}"])
def test_a_prompt_that_is_no_text(built: Path, text: str) -> None:
    refused(2, "is an unpaired surrogate", "run", built, text)


@pytest.mark.usefixtures("here")
def test_a_repository_that_cannot_be_written(built: Path, here: Path, deny: Deny) -> None:
    refused(8, "empty: cannot be written", "triton", built, "-o", "empty")
    deny(here / "folder")
    refused(8, "cannot be written", "triton", built, "-o", "folder")


@pytest.mark.usefixtures("here")
def test_a_server_that_is_named_is_not_looked_up_on_the_path(here: Path) -> None:
    (here / "ls").mkdir()
    from llmforge.base.errors import EnvironmentLacks

    with pytest.raises(EnvironmentLacks, match="ls: no environment with nvidia-pytriton"):
        find(Path("ls"))
    program = here / "server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find(Path("server")).program == program
