"""Environments as users make them with pip: in each, every command works or says in one line what to install."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmforge.artifact import archive
from llmforge.base import extras
from llmforge.cli import cli
from llmforge.recipe import ServingSpec

from .models import checkpoints
from .samples import published, stored, wheels

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.xdist_group("environments")  # they are made once

# The commands that do not work there, and the extras that they name.
LACKING = {
    "plain": {
        **dict.fromkeys(
            ("build", "bisect", "eval", "judge", "reproduce", "validate", "trace", "diff-graph", "passes", "schema"),
            "build,cpu",
        ),
        **dict.fromkeys(("run", "bench", "triton"), "cpu"),
        **dict.fromkeys(("serve", "batch"), "cpu,serve"),
        "up": "build,cpu,serve",
        "tune": "build,cpu,farm",
        "sign": "signing",
        "mlflow": "mlflow",
        **dict.fromkeys(("push", "pull"), "registry"),
    },
    "serving": {
        **dict.fromkeys(
            (
                "build",
                "bisect",
                "eval",
                "judge",
                "reproduce",
                "validate",
                "trace",
                "diff-graph",
                "passes",
                "schema",
                "up",
            ),
            "build",
        ),
        "tune": "build,farm",
        "sign": "signing",
        "mlflow": "mlflow",
        **dict.fromkeys(("push", "pull"), "registry"),
    },
    "everything": {
        "eval": "eval", "tune": "farm", "sign": "signing", "mlflow": "mlflow",
        **dict.fromkeys(("push", "pull"), "registry"),
    },
}  # fmt: skip
HEAVY = {"ml_dtypes", "onnx", "onnx-ir", "onnxscript", "safetensors", "torch", "transformers"}
EXTRAS = {"plain": "", "serving": "[cpu,serve]", "everything": "[build,cpu,serve,constraints]"}
MARKS = {"plain": (), "serving": pytest.mark.thorough, "everything": pytest.mark.slow}


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip."""

    name: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.folder), "install", "--quiet", "--prefer-binary"]
        constraints = ["--no-compile", "-c", str(ROOT / "constraints.txt")]
        done = subprocess.run([*command, *constraints, *arguments], capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr

    def execute(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, cwd=cwd, timeout=240, env=environ()
        )

    def llmforge(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return self.execute("-m", "llmforge", *arguments, cwd=cwd)

    def packages(self) -> set[str]:
        return {path.name.partition("-")[0].replace("_", "-") for path in self.folder.glob("lib/*/*/*.dist-info")}


def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.copy_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a machine without a C compiler; tests/test_packaging.py builds that of one with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "/bin/false")
        return wheels.build(source, tmp_path_factory.mktemp("bare"), "--wheel")


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment("plain", tmp_path_factory.mktemp("environments") / "plain")
    venv.create(made.folder, symlinks=True)
    made.install(str(wheel))
    return made


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS[name]) for name in MARKS])
def environment(
    request: pytest.FixtureRequest,
    plain: Environment,
    wheel: Path,
    source: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    """Each environment; the larger ones are copies of the plain one, which is quicker, with more installed."""
    name = str(request.param)
    if name == "plain":
        return plain
    made = Environment(name, plain.folder.with_name(name))
    if (ready := made.folder / "ready").exists():  # pytest makes it anew for each pair of `tried`
        return made
    shutil.copytree(plain.folder, made.folder, symlinks=True)
    if name == "everything":
        wheel = wheels.build(source, tmp_path_factory.mktemp("dist"), "--wheel")
        made.install("--no-deps", "--force-reinstall", str(wheel))
    made.install(f"{wheel}{EXTRAS[name]}")
    ready.touch()
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Path:
    """A folder with an artifact, its report in it, a checkpoint, a recipe that builds it, and two graphs."""
    folder = tmp_path_factory.mktemp("place")
    made = published.random_decoder(
        folder / "artifacts", sample_checkpoint, max_context=64, max_batch=2, serving=ServingSpec()
    )
    made.path.rename(folder / "artifact")
    for name in ("only", *(f"spare-{name}" for name in EXTRAS)):
        made = stored.put(folder / "artifacts", name=name)
        archive.save_file(made, folder / "artifact.tar")
    checkpoints.write_checkpoint(folder / "checkpoint")
    recipe = {
        "schema": 1, "name": "tiny", "checkpoint": "checkpoint", "target": "local", "passes": ["fuse-norms"],
        "engine": {"max_context": 64, "max_batch": 1},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    asked = {"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "If the file", "max_tokens": 4}}
    (folder / "requests.jsonl").write_text(json.dumps(asked), encoding="utf-8")
    (folder / "texts.jsonl").write_text(
        json.dumps({"text": "If the file does not exist, it is made."}), encoding="utf-8"
    )
    for name in ("a", "b"):
        shutil.copy(folder / "artifact" / "engine" / "model.onnx", folder / f"{name}.onnx")
    return folder


# Of `serve` and `up` only what ends by itself: their test stands alone.
ARGUMENTS: dict[str, Sequence[str]] = {
    "batch": ["artifact", "requests.jsonl", "-o", "answers.jsonl"],
    "bench": ["artifact", "--concurrency", "1", "--requests", "2", "--warmup", "0", "--prompt-tokens", "8",
              "--output-tokens", "4", "-o", "bench.json"],
    "bisect": ["artifact", "--recipe", "recipe.yaml"],
    "build": ["recipe.yaml", "--out", "built"],
    "cache": ["ls"],
    "completion": ["bash"],
    "diff": ["artifact", "artifact"],
    "diff-graph": ["a.onnx", "b.onnx"],
    "docs": ["gates"],
    "doctor": [],
    "eval": ["artifact", "--tasks", "task.yaml", "--recipe", "recipe.yaml"],
    "export": ["only/{only}", "-o", "exported.tar"],
    "gate": ["only/{only}"],
    "gc": ["--dry-run"],
    "help": ["all"],
    "history": ["only"],
    "import": ["artifact.tar", "--out", "imported"],
    "init": [str(ROOT / "tests/data/docs-llama-7m"), "--target", "h200", "-o", "{environment}.yaml"],
    "inspect": ["artifact", "--verify"],
    "judge": ["--url", "http://127.0.0.1:9", "--tokenizer", "artifact", "--data", "texts.jsonl"],
    "ls": ["only"],
    "migrate": ["recipe.yaml"],
    "mlflow": ["only/{only}"],
    "passes": ["quantize-weights"],
    "plan": [str(ROOT / "tests/data/docs-llama-7m"), "--target", "h200", "--plot", "roofline.svg"],
    "pull": ["localhost:9/models/tiny:1"],
    "push": ["only/{only}", "localhost:9/models/tiny:1"],
    "promote": ["only", "{only}", "--to", "prod"],
    "rm": ["spare-{environment}/{spare}"],
    "reproduce": ["artifact", "--recipe", "recipe.yaml"],
    "run": ["artifact", "If the file", "--max-tokens", "8"],
    "schema": [],
    "serve": ["artifact", "--port", "0"],
    "tag": ["only/{only}", "new"],
    "shadow": ["http://127.0.0.1:9", "http://127.0.0.1:9", "--trace", "texts.jsonl"],
    "sign": ["artifact", "--key", "recipe.yaml"],
    "targets": ["l4"],
    "trace": ["checkpoint", "-o", "traced.onnx"],
    "triton": ["artifact", "-o", "repository"],
    "tune": ["recipe.yaml", "--objective", "size"],
    "up": ["checkpoint", "--port", "0"],
    "validate": ["artifact", "--recipe", "recipe.yaml"],
    "verify": ["artifact"],
}  # fmt: skip


def test_every_command_is_tried() -> None:
    assert set(ARGUMENTS) == set(cli.commands)


def test_what_is_installed(environment: Environment) -> None:
    found = environment.packages()
    assert ("onnxruntime" in found) == (environment.name != "plain")
    assert bool({each.replace("_", "-") for each in HEAVY} & found) == (environment.name == "everything")
    assert "onnxruntime-gpu" not in found


def tried() -> list[object]:
    """Pair environments with commands."""
    found: list[object] = []
    for name in EXTRAS:
        for command in sorted(set(ARGUMENTS) - {"serve", "up"}):
            found.append(pytest.param(name, command, marks=MARKS[name]))
    return found


@pytest.mark.parametrize(("environment", "command"), tried(), indirect=["environment"])
def test_a_command_works_or_says_what_to_install(environment: Environment, place: Path, command: str) -> None:
    kept = {
        name: next((place / "artifacts" / name).glob("[!.]*"), Path()) for name in ("only", f"spare-{environment.name}")
    }
    only, spare = (path.name for path in kept.values())
    words = [word.format(environment=environment.name, only=only, spare=spare) for word in ARGUMENTS[command]]
    done = environment.llmforge(command, *words, cwd=place)
    judge(environment, command, done)


def judge(environment: Environment, command: str, done: subprocess.CompletedProcess[str]) -> None:
    named = LACKING[environment.name].get(command)
    if named is None and command in (
        "bisect",
        "reproduce",
    ):  # all packages are there; this artifact was made without a build
        assert done.returncode == 5
        assert "built without one" in done.stderr
        return
    if named is None and command == "validate":  # … and by another recipe
        assert done.returncode == 2
        assert "does not match" in done.stderr
        return
    if named is None and command in ("judge", "shadow"):  # nothing is served there
        assert done.returncode == 8
        assert "127.0.0.1:9" in done.stderr
        return
    if named is None:
        assert done.returncode == 0, done.stderr
        assert done.stdout
        return
    assert done.returncode == 8, done.stderr
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert re.fullmatch(r"error: [\w, -]+ (is|are) not installed", error)
    assert hint == f"hint: pip install 'llmforge[{named}]'"


def test_serve_answers_a_request_or_says_what_to_install(environment: Environment, place: Path) -> None:
    if "serve" in LACKING[environment.name]:
        judge(environment, "serve", environment.llmforge("serve", *ARGUMENTS["serve"], cwd=place))
    if "up" in LACKING[environment.name]:
        judge(environment, "up", environment.llmforge("up", *ARGUMENTS["up"], cwd=place))
    if "serve" in LACKING[environment.name]:
        return
    command = [environment.python, "-m", "llmforge", "serve", *ARGUMENTS["serve"]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=place, env=environ()) as server:
        try:
            assert server.stderr is not None
            url = next(match[1] for line in server.stderr if (match := re.search(r"(http://\S+/v1)", line)))
            body = json.dumps({"model": "random", "prompt": "If the file", "max_tokens": 4}).encode()
            asked = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] <= 4
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_every_command_helps_and_the_version_is_told(environment: Environment, place: Path) -> None:
    code = (
        "from click.testing import CliRunner\n"
        "from llmforge.cli import cli\n"
        "for words in ([], *([name] for name in cli.commands)):\n"
        "    done = CliRunner().invoke(cli, [*words, '--help'])\n"
        "    assert done.exit_code == 0 and done.output.startswith('Usage: '), (words, done.output)\n"
    )
    done = environment.execute("-c", code, cwd=place)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"llmforge, version \d\S+\n", environment.llmforge("--version", cwd=place).stdout)


def test_the_doctor_says_what_each_extra_is_for(environment: Environment, place: Path) -> None:
    done = environment.llmforge("doctor", "--json", cwd=place)
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    wanted = {
        "plain": {"build": "build,cpu", "run on the CPU": "cpu", "serve": "cpu,serve"},
        "serving": {"build": "build"},
    }
    hints = {name: f"pip install 'llmforge[{named}]'" for name, named in wanted.get(environment.name, {}).items()}
    for name in ("build", "run on the CPU", "serve"):
        assert found[name]["hint"] == hints.get(name), name
        assert (found[name]["state"] == "yes") == (name not in hints)


def test_a_recipe_is_planned_where_it_can_be_built(environment: Environment, place: Path) -> None:
    done = environment.llmforge("plan", "recipe.yaml", "--target", "h200", cwd=place)
    assert done.returncode == (0 if environment.name == "everything" else 8), done.stderr
    assert len(done.stderr.splitlines()) == (0 if environment.name == "everything" else 2)


def test_the_doctor_says_why_there_are_no_kernels(plain: Environment, place: Path) -> None:
    (line,) = (line for line in plain.llmforge("doctor", cwd=place).stdout.splitlines() if "CPU kernels" in line)
    assert line.split(maxsplit=3)[3].strip() == "not compiled: no C compiler was found at installation"


def test_the_metadata_says_what_the_source_tree_says(plain: Environment, place: Path) -> None:
    code = "from llmforge.base import extras\nfor each in sorted(map(repr, extras.requirements())): print(each)"
    said = plain.execute("-c", code, cwd=place).stdout.splitlines()
    assert len(said) == len(extras.requirements())
    names = {(each.extra, each.distribution, each.module, each.pin) for each in extras.requirements()}
    found = {
        re.search(r"extra='([^']*)'.*distribution='(.*)', module='(.*)', pin=(?:'(.*)'|None)", line) for line in said
    }
    assert {match.groups() for match in found if match is not None} == names


# what is broken


@pytest.mark.parametrize(
    ("packages", "content", "error", "hint"),
    [
        (["onnxruntime"], None, "onnxruntime is installed, but some of its files are missing", "--force-reinstall"),
        (["onnxruntime", "onnxruntime-gpu"], None, "are both installed", "uninstall -y onnxruntime onnxruntime-gpu"),
        (["onnxruntime", "onnxruntime-gpu"], "", "are both installed", "uninstall -y onnxruntime onnxruntime-gpu"),
        ([], None, "onnxruntime is not installed", "llmforge[cpu]"),
        (["onnxruntime"], "raise ImportError('no such symbol', name='onnxruntime')", None, None),
    ],
)
def test_an_onnxruntime_that_is_not_whole(
    plain: Environment,
    place: Path,
    tmp_path: Path,
    packages: list[str],
    content: str | None,
    error: str | None,
    hint: str | None,
) -> None:
    """Folders that pip leaves behind where one of two packages of the same module is uninstalled, and the like."""
    (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
    if content is not None:
        (tmp_path / "onnxruntime" / "__init__.py").write_text(content)
    for name in packages:
        folder = tmp_path / f"{name.replace('-', '_')}-1.31.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from llmforge.cli import main; main()"
    done = plain.execute("-c", code, "run", *ARGUMENTS["run"], cwd=place)
    if error is None or hint is None:
        assert done.returncode == 1
        assert "This is a bug in llmforge" in done.stderr
        return
    assert done.returncode == 8, done.stderr
    told, hinted = done.stderr.splitlines()
    assert error in told
    assert hint in hinted
    assert error in plain.execute("-c", code, "doctor", cwd=place).stdout
