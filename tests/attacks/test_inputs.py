"""Inputs from strangers: what was found by trying is kept in `finds`, and what stands in for all the rest is fuzzed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from llmforge.base.errors import InputError, RecipeError, UsageError
from llmforge.base.wording import bounded, quoted, shown
from llmforge.cli import cli
from llmforge.cli.parameters import ArtifactPath, FilePath, Location
from llmforge.recipe import ServingSpec

from ..samples import published, stored

ROOT = Path(__file__).resolve().parents[2]
FINDS = sorted((Path(__file__).parent / "finds").iterdir())
BLOCKS_S = 30.0  # a FIFO that is opened blocks for ever


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import fuzz_inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"])  # which it sets for its own process
        yield fuzz_inputs
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def readers(fuzz: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {kind.name: kind for kind in fuzz.kinds(tmp_path_factory.mktemp("fuzz") / "kinds")}


@pytest.mark.parametrize("cases", [60, pytest.param(1000, marks=pytest.mark.thorough)])
def test_fuzzed_inputs(fuzz: ModuleType, tmp_path: Path, cases: int) -> None:
    """Some of what benchmarks/fuzz_inputs.py makes 10,000 of."""
    found = fuzz.run(cases, 2, 1, tmp_path)
    assert found["cases"] == cases + 2
    assert found["memory_mb"] < 1000
    refused = sum(count for end, count in found["ends"].items() if "refused" in end)
    assert refused > cases / 2
    assert {end.partition(":")[0] for end in found["ends"]} == {kind.name for kind in fuzz.kinds(tmp_path / "again")}


@pytest.mark.parametrize("find", FINDS, ids=lambda path: path.name)
def test_finds_are_refused(fuzz: ModuleType, readers: dict[str, object], find: Path, tmp_path: Path) -> None:
    ended = fuzz.judge(readers[find.name.partition("-")[0]], find.read_bytes(), tmp_path)
    assert ended.startswith("refused with "), ended


def invoke(*args: str | Path) -> Result:
    began = time.monotonic()
    result = CliRunner().invoke(cli, [*map(str, args)], prog_name="llmforge")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert time.monotonic() - began < BLOCKS_S
    assert len(result.stderr.encode()) <= 1000 + len("Usage: …") + 200, result.stderr
    return result


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("artifacts")
    return published.random_decoder(out, sample_checkpoint, max_context=64, max_batch=2, serving=ServingSpec()).path


@pytest.fixture
def opened(built: Path, tmp_path: Path) -> Path:
    """A copy of an artifact whose files can be exchanged."""
    return Path(shutil.copytree(built, tmp_path / "deep" / "artifact", copy_function=shutil.copyfile))


FILES = (
    "engine/runtime.json", "engine/model.onnx", "engine/model.onnx.data", "tokenizer/tokenizer.json",
    "tokenizer/chat_template.jinja", "tokenizer/special_tokens_map.json", "manifest.json",
)  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["fifo", "device", "folder", "link"])
@pytest.mark.parametrize("file", FILES)
def test_files_of_an_artifact_that_are_none(opened: Path, file: str, what: str, tmp_path: Path) -> None:
    place = opened / file
    place.unlink()
    if what == "fifo":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    elif what == "device":
        place.symlink_to("/dev/zero")
    else:
        place.symlink_to(tmp_path / "nowhere")
    result = invoke("run", opened, "hi", "--max-tokens", "1", "--chat")
    if what == "link" and file.startswith("tokenizer/") and file != "tokenizer/tokenizer.json":
        return  # not there: an artifact need not have it
    assert result.exit_code == 5, result.stderr
    assert Path(file).name in result.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("path", ["/dev/zero", "fifo", "x" * 5000, "x/" * 3000, "a\0b"])
@pytest.mark.parametrize(
    "command",
    [("build",), ("plan",), ("targets",), ("run", "@", "hi", "--json-schema"), ("bench", "@", "--arrivals"),
     ("inspect",), ("trace",), ("verify",)],
    ids=lambda words: words[0],
)  # fmt: skip
def test_paths_that_are_no_files(
    built: Path, command: tuple[str, ...], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    result = invoke(*(str(built) if word == "@" else word for word in command), path)
    assert result.exit_code in (2, 5), result.stderr


RECIPE = ("--recipe", str(ROOT / "recipes" / "fp32.yaml"))
BESIDE = {  # what a command needs beside its arguments
    "batch": ("-o", "answers.jsonl"), "bisect": RECIPE,
    "eval": (*RECIPE, "--tasks", str(ROOT / "docs/tasks/next-sentence.jsonl")),
    "export": ("-o", "x.tar"), "reproduce": RECIPE, "sign": ("--key", "key.pem"), "triton": ("-o", "repo"),
    "tune": ("--objective", "size"), "validate": RECIPE,
}  # fmt: skip
FILLED = {"reference": "localhost:1/a:b", "prompt": "hi", "tag": "t", "server_options": ""}


def named_inputs() -> Iterator[tuple[str, str]]:
    """Yield each command, and each of its arguments that names a file, a folder or an artifact."""
    for name, command in cli.commands.items():
        for parameter in command.params:
            if isinstance(parameter.type, FilePath | ArtifactPath | Location):
                if parameter.param_type_name == "argument":
                    yield name, str(parameter.name)
                elif isinstance(parameter.type, ArtifactPath):
                    yield name, parameter.opts[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["link", "fifo"])
@pytest.mark.parametrize(
    ("name", "which"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] == "eval")) for each in named_inputs()],  # imports lm-eval
)
def test_what_is_no_file_of_every_command(
    built: Path, name: str, which: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that leads to itself, and a FIFO that nobody writes to: a message that names them, and no traceback."""
    monkeypatch.chdir(tmp_path)
    if what == "link":
        Path("odd").symlink_to("odd")
    else:
        os.mkfifo("odd")
    key = ec.generate_private_key(ec.SECP256R1())
    Path("key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    model = str(built / "engine" / "model.onnx")
    filled = {**FILLED, "artifact": str(built), **({"a": model, "b": model} if name == "diff-graph" else {})}
    words = [which, "odd"]
    if not which.startswith("-"):
        given = [str(each.name) for each in cli.commands[name].params if each.param_type_name == "argument"]
        words = ["odd" if each == which else filled.get(each, str(built)) for each in given]
    result = invoke(name, *[word for word in words if word], *BESIDE.get(name, ()))
    assert result.exit_code in (2, 5), result.stderr
    assert "odd: " in result.stderr


def test_every_command_with_an_artifact_is_tried() -> None:
    assert len([name for name, which in named_inputs() if which == "artifact"]) >= 15


@pytest.mark.parametrize("key", ["calibration.data", "validation.quality.data", "checkpoint", "target"])
@pytest.mark.parametrize("value", ["/dev/zero", "FIFO", "x" * 5000, "x.yaml/" * 700, '"a\\0b"'])
def test_paths_in_a_recipe(key: str, value: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    value = value.replace("FIFO", str(tmp_path / "fifo"))
    result = invoke("build", ROOT / "recipes" / "quickstart.yaml", "--set", f"{key}={value}")
    assert result.exit_code in (2, 5), result.stderr


def test_ten_megabytes_of_passes(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("passes: [" + "a, " * 3_000_000 + "]\n")
    result = invoke("build", tmp_path / "recipe.yaml")
    assert (result.exit_code, "at most 65536 are allowed" in result.stderr) == (2, True)


def test_a_manifest_that_names_another_folder_writes_nothing_there(opened: Path, tmp_path: Path) -> None:
    manifest = json.loads((opened / "manifest.json").read_text())
    (opened / "manifest.json").unlink()
    (opened / "manifest.json").write_text(
        json.dumps({**manifest, "name": "../triton/kill"}, indent=1, sort_keys=True) + "\n"
    )
    (opened / "triton" / "kill").mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    for command in (("triton", opened, "-o", tmp_path / "deep" / "repo"), ("inspect", opened), ("verify", opened)):
        result = invoke(*command)
        assert result.exit_code == 5
        assert "name '../triton/kill' cannot be that of an artifact" in result.stderr
    assert set(tmp_path.rglob("*")) == before


def rewritten(opened: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the record of evidence, and call it by its SHA-256 again."""
    (file,) = (opened / "evidence").iterdir()
    record = json.loads(file.read_text())
    change(record)
    file.unlink()
    raw = json.dumps(record, separators=(",", ":")).encode()
    (opened / "evidence" / f"{hashlib.sha256(raw).hexdigest()}.json").write_bytes(raw)


DOCUMENT = {"document": "", "tokens": 1, "baseline_nll": 0, "nll": 0, "kld": 0, "same_top": 0, "delta_p_squared": 0}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["quality"].update(per_document=[DOCUMENT] * 10_001), "should have at most 10000 items"),
        (lambda r: r["quality"].update(per_document=[DOCUMENT] * 100_000), "more than the 400,000 values"),
        (lambda r: r.update(notes=["x" * (17 << 20)]), "at most 16777216 are allowed"),
        (lambda r: r.update(notes=[[]] * 5_000_000), "more than the 400,000 values"),
        (lambda r: r["versions"].update(torch="\x1b[2J"), "versions.torch"),
        (lambda r: r.update(name="../../evil"), "cannot be the name"),
        (lambda r: r.update(created="0001-01-01T00:00:00+23:59"), "not a record of evidence"),
        (lambda r: r["latency"]["points"][0].pop("tpot_speedup"), None),
        (lambda r: r["checkpoint"].update(size_bytes=0), "checkpoint.size_bytes"),
    ],
    ids=["documents", "many-documents", "bytes", "values", "version", "name", "year", "figures", "size"],
)  # fmt: skip
def test_a_record_of_evidence_of_a_stranger(
    opened: Path, change: Callable[[dict[str, Any]], object], says: str | None
) -> None:
    """What has no figures is told so by `inspect`; the rest by each command, soon, and in little memory."""
    rewritten(opened, change)
    began = time.process_time()
    result = invoke("inspect" if says is None else "verify", opened)
    assert time.process_time() - began < 5
    assert result.exit_code == 5, result.stderr
    assert (says or "its newest report cannot be shown") in result.stderr


@pytest.mark.parametrize("escape", ["..", "link"])
def test_weights_outside_of_the_engine(opened: Path, escape: str, tmp_path: Path) -> None:
    """ONNX Runtime refuses the one, `open_engine` the other."""
    model, weights = opened / "engine" / "model.onnx", opened / "engine" / "model.onnx.data"
    if escape == "..":
        graph = model.read_bytes()
        assert b"model.onnx.data" in graph
        shutil.copyfile(weights, opened / "outside.data")
        model.write_bytes(graph.replace(b"model.onnx.data", b"../outside.data"))
    else:
        shutil.move(weights, tmp_path / "weights")
        weights.symlink_to(tmp_path / "weights")
    result = invoke("run", opened, "hi", "--max-tokens", "1")
    assert result.exit_code == 5, result.stderr
    from llmforge.ir import onnx_file

    if escape == "..":
        with pytest.raises(InputError, match="outside its folder"):
            onnx_file.load(model)


def test_an_engine_that_is_cut_off(opened: Path) -> None:
    for name in ("model.onnx", "model.onnx.data", "runtime.json"):
        file = opened / "engine" / name
        whole = file.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 2):  # the last byte of JSON says nothing
            file.write_bytes(whole[:size])
            result = invoke("run", opened, "hi", "--max-tokens", "1")
            assert result.exit_code == 5, (name, size, result.stderr)
        file.write_bytes(whole)


def test_click_does_not_repeat_long_values() -> None:
    for words in (("x" * 5000,), ("build", "--" + "x" * 5000), ("run", "a", "b", "--max-tokens", "9" * 5000)):
        result = CliRunner().invoke(cli, list(words), prog_name="llmforge")
        assert result.exit_code == 2
        assert len(result.stderr.encode()) < 1000


def test_messages_are_bounded_and_plain() -> None:
    error = RecipeError("\x1b[2J" + "word " * 5000, hint="x" * 5000)
    assert len(str(error).encode()) < 1000
    assert "\x1b" not in str(error)
    assert bounded("a\nb") == "a\nb"
    many = bounded("\n".join(f"line {number}" for number in range(1000)))
    assert many.startswith("line 0\nline 1\n")
    assert many.endswith(" more lines")
    assert len(bounded("é" * 5000).encode()) <= 700
    path = "/" + "folder/" * 60 + "file"  # what fits is not cut
    assert bounded(f"{path}: no such file") == f"{path}: no such file"


@pytest.mark.parametrize(
    "value",
    [10**5000, "x" * 10**6, [[[]] * 1000] * 1000, {"a": "b" * 1000}, float("nan"), None],
    ids=["digits", "text", "lists", "object", "nan", "none"],
)
def test_values_are_shown_short(value: object) -> None:
    assert len(shown(value)) <= 60
    assert len(quoted(value)) <= 60


def test_a_build_publishes_no_record_that_nobody_would_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 16,777,216 are read"):
        stored.put(tmp_path, notes=("x" * (17 << 20),))
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == [".lock"]


def test_quality_is_measured_on_as_many_documents_as_are_read_back(tmp_path: Path) -> None:
    texts_file = tmp_path / "texts.jsonl"
    texts_file.write_text("".join(f'{{"id": "{number}", "text": "text {number}"}}\n' for number in range(10_001)))
    recipe = ROOT / "recipes" / "quickstart.yaml"
    result = invoke("build", recipe, "--out", tmp_path, "--set", f"validation.quality.data={texts_file}")
    assert (result.exit_code, "10001 documents; quality is measured on at most 10000" in result.stderr) == (5, True)
