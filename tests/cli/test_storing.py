"""The commands that keep artifacts, through the runner: exit codes, both streams, messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge import artifact
from llmforge.artifact import tags
from llmforge.cli import cli
from llmforge.runtime.config import RuntimeConfig, SessionOptions
from llmforge.runtime.encoder import EncoderConfig

from ..samples import stored
from ..samples.stored import FAILS, PASSES, UNDECIDED, put, several


@pytest.fixture(autouse=True)
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMFORGE_ARTIFACTS", str(tmp_path / "store"))
    return tmp_path / "store"


def invoke(*args: str) -> Result:
    result = CliRunner().invoke(cli, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_ls_of_nothing() -> None:
    done = invoke("ls")
    assert (done.exit_code, done.stdout) == (0, "")
    assert re.fullmatch(r"no artifacts in .*store\n", done.stderr)
    assert invoke("ls", "--json").stdout == "[]\n"
    assert invoke("gc").stdout == "0 versions, 0 B removed\n"


def test_ls(out: Path) -> None:
    mine, other = put(out).path.name, put(out, name="other", gates=FAILS).path.name
    tags.move(out / "tiny", "new", mine)
    head, second, first = invoke("ls").stdout.splitlines()
    assert head.split() == ["ARTIFACT", "GATES", "SIZE", "CREATED", "(UTC)", "TARGET", "TAGS"]
    assert second.startswith(f"other/{other}  fail")
    assert first.startswith(f"tiny/{mine}   pass")
    assert first.endswith("cpu-avx2  new")
    (facts,) = json.loads(invoke("ls", "tiny", "--json").stdout)
    assert facts["artifact"] == f"tiny/{mine}"
    assert facts["tags"] == ["new"]
    assert facts["verdict"] == "pass"
    done = invoke("ls", "tyni")
    assert done.exit_code == 2
    assert "named 'tyni'\nhint: known: other, tiny" in done.stderr


def test_tag_and_history(out: Path) -> None:
    one, two = several(out, 2)
    assert invoke("tag", f"tiny/{one}", "new").stdout == f"tiny:new is now on {one}\n"
    assert invoke("tag", f"tiny/{two}", "new").stdout == f"tiny:new is now on {two}; it was on {one}\n"
    assert invoke("tag", "tiny:new", "new").stdout == f"tiny:new is on {two} already\n"
    assert json.loads(invoke("tag", "tiny:new", "new", "--delete", "--json").stdout)["moved"]["from"] == two
    lines = invoke("ls", "--history").stdout.splitlines()
    assert [line.split()[2:] for line in lines[1:]] == [
        ["tiny:new", "tag", "–", one],
        ["tiny:new", "tag", one, two],
        ["tiny:new", "delete", two, "–"],
    ]
    assert len(json.loads(invoke("ls", "--history", "--json").stdout)) == 3


def test_rm(out: Path, tmp_path: Path) -> None:
    one, two, three = several(out, 3)
    done = invoke("rm", f"tiny/{one}", str(out / "tiny" / two))
    assert done.stdout == f"removed tiny/{one}\nremoved tiny/{two}\n"
    assert [path.name for path in (out / "tiny").glob("[!.]*")] == [three]
    other = put(tmp_path / "elsewhere").path
    for what in (str(other), str(out), str(out / "tiny"), str(out / "tiny" / three / "engine"), "/"):
        done = invoke("rm", f"tiny/{three}", what)
        assert done.exit_code == 2
        assert "not a version of an artifact in" in done.stderr
    assert other.is_dir()
    assert [path.name for path in (out / "tiny").glob("[!.]*")] == [three]


def test_gc(out: Path) -> None:
    found = several(out, 3)
    done = invoke("gc", "--keep", "2", "--dry-run")
    assert re.fullmatch(rf"would remove tiny/{found[0]}\n1 version, .* to be removed\n", done.stdout)
    removed = json.loads(invoke("gc", "--keep", "0", "--json").stdout)["removed"]
    assert sorted(removed) == sorted(f"tiny/{version}" for version in found)


def test_promote_and_rollback(out: Path) -> None:
    one, two = several(out, 2)
    assert invoke("promote", "tiny", one, "--to", "prod").stdout == f"tiny:prod is now on {one}\n"
    assert invoke("promote", "tiny", two[:6], "--to", "prod").stdout == f"tiny:prod is now on {two}; it was on {one}\n"
    assert invoke("inspect", "tiny:prod").stdout.startswith(f"tiny {two}\n")
    rolled = invoke("promote", "tiny", "--to", "prod", "--rollback").stdout
    assert rolled == f"tiny:prod is now on {one}; it was on {two}\n"
    done = invoke("promote", "tiny", "--to", "prod", "--rollback")
    assert done.exit_code == 2
    assert "tiny:prod has no version to return to" in done.stderr


@pytest.mark.parametrize(
    ("gates", "code", "said"),
    [
        (FAILS, 3, "cannot be promoted: a gate failed\nkld_mean: 0.020873"),
        (UNDECIDED, 4, "cannot be promoted: a gate is inconclusive\nkld_mean: 0.020873"),
        ({}, 4, "cannot be promoted: its recipe has no gates"),
    ],
)
def test_promote_asks_the_gates(out: Path, gates: dict[str, object], code: int, said: str) -> None:
    good, bad = put(out, "good").path.name, put(out, "bad", gates=gates).path.name
    invoke("promote", "tiny", good, "--to", "prod")
    done = invoke("promote", "tiny", bad, "--to", "prod")
    assert done.exit_code == code
    assert f"tiny/{bad} {said}" in done.stderr
    assert tags.current(out / "tiny", "prod") == good
    # nor by another way
    assert invoke("tag", f"tiny/{bad}", "prod", "--force").exit_code == 2
    assert tags.current(out / "tiny", "prod") == good


def test_a_tag_on_a_version_whose_gates_failed_wants_force(out: Path) -> None:
    bad = put(out, "bad", gates=FAILS).path.name
    done = invoke("tag", f"tiny/{bad}", "new")
    assert done.exit_code == 3
    assert f"tiny/{bad} cannot be tagged: a gate failed\nkld_mean: 0.020873" in done.stderr
    assert "hint: use --force" in done.stderr
    assert tags.names(out / "tiny") == []
    assert invoke("tag", f"tiny/{bad}", "new", "--force").exit_code == 0
    assert tags.current(out / "tiny", "new") == bad
    assert invoke("tag", "tiny:new", "new", "--delete").exit_code == 0


def test_a_version_whose_gates_are_undecided_takes_a_tag_and_that_is_said(out: Path) -> None:
    undecided, none = put(out, "a", gates=UNDECIDED).path.name, put(out, "b", gates={}).path.name
    done = invoke("tag", f"tiny/{undecided}", "new")
    assert done.exit_code == 0
    assert f"note: a gate of tiny/{undecided} is inconclusive" in done.stderr
    assert invoke("tag", f"tiny/{none}", "new").stderr == ""


def test_promote_believes_figures_not_words(out: Path) -> None:
    """A record that claims a verdict, and files that were changed."""
    bad = put(out, "bad", gates=FAILS, verdict="pass").path.name
    done = invoke("promote", "tiny", bad, "--to", "prod")
    assert done.exit_code == 5
    assert "verdict: it says pass, its figures give fail" in done.stderr
    made = put(out, "good")
    (made.path / "engine/model.onnx").chmod(0o644)
    (made.path / "engine/model.onnx").write_text("other")
    done = invoke("promote", "tiny", made.path.name, "--to", "prod")
    assert done.exit_code == 5
    assert "changed: engine/model.onnx" in done.stderr
    assert tags.names(out / "tiny") == []


def test_the_newest_record_that_decided_counts(out: Path) -> None:
    """A build again that is slower fails, whatever was before; one that measures nothing takes nothing back."""
    version = put(out).path.name
    put(out, latency=stored.latency(tpot_ms=7.0), days=1)
    assert invoke("promote", "tiny", version, "--to", "prod").exit_code == 3
    unmeasured = stored.reports.ENGINE.model_copy(update={"unmeasured": "not asked"})
    files = stored.report(put(out).manifest).engine.files
    undecided = {"quality": None, "latency": None, "engine": unmeasured.model_copy(update={"files": files})}
    put(out, latency=stored.latency(tpot_ms=7.0), days=2)
    put(out, days=3, **undecided)
    shown = invoke("inspect", f"tiny/{version}", "--verify").stdout
    assert [line.split()[-2] for line in shown.splitlines() if "report.html" in line][:5] == [
        "pass", "fail", "pass", "fail", "inconclusive"
    ]  # fmt: skip
    assert "gates       fail" in shown
    assert "gates: fail" in shown
    assert invoke("promote", "tiny", version, "--to", "prod").exit_code == 3
    put(out, days=4)
    assert invoke("promote", "tiny", version, "--to", "prod").exit_code == 0


@pytest.mark.parametrize("words", [(), ("one", "--rollback")])
def test_promote_takes_a_version_or_rolls_back(words: tuple[str, ...]) -> None:
    done = invoke("promote", "tiny", *words, "--to", "prod")
    assert done.exit_code == 2
    assert "expected either VERSION or --rollback" in done.stderr


def put_runtime(out: Path, content: str = "graph", **changes: Any) -> str:
    """Publish one that says in `engine/runtime.json` what runs it; return its version."""
    facts: dict[str, Any] = {
        "format": 3, "onnxruntime": None, "kernels": None, "max_context": 96, "max_batch": 4, "vocabulary": 100,
        "eos_token_ids": (1,), "bos_token_id": None, "caches": (), "session": SessionOptions(None, True, {}), **changes,
    }  # fmt: skip
    with artifact.staging(out, "tiny") as folder:
        (folder / "engine").mkdir()
        (folder / "engine/model.onnx").write_text(content)
        (folder / "engine/runtime.json").write_text(RuntimeConfig(**facts).to_json())
        return stored.publish(folder, recipe={"name": "tiny", "gates": PASSES, "serving": {}}).path.name


def test_promote_adds_what_vllm_loads_to_a_repository_once(out: Path, tmp_path: Path) -> None:
    one = put_runtime(out, "one", provider="compressed-tensors")
    two = put_runtime(out, "two", provider="compressed-tensors")
    models = tmp_path / "models"
    promote = ("promote", "tiny", "--to", "prod", "--triton", str(models))
    for version in (one, two, two):
        done = invoke(*promote, version)
        assert done.exit_code == 0, done.stderr
    assert 'backend: "vllm"' in (models / "tiny/config.pbtxt").read_text()
    for number, version in enumerate((one, two), 1):
        folder, source = models / "tiny" / str(number), out / "tiny" / version
        arguments = json.loads((folder / "model.json").read_text())
        assert models / arguments["model"] == folder / "engine"
        assert (folder / "engine/model.onnx").read_bytes() == (source / "engine/model.onnx").read_bytes()
    assert not (models / "tiny" / "3").exists()
    assert invoke(*promote, "--rollback").exit_code == 0
    assert (models / "tiny/3/manifest.json").read_bytes() == (out / "tiny" / one / "manifest.json").read_bytes()


CLASSIFIER = EncoderConfig("reranker", "cls", normalize=False, dimensions=0, max_tokens=96, labels=3)


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"provider": "gguf"}, 6, "Triton has no backend for a GGUF file\nhint: run `llama-server -m ARTIFACT/engine/"),
        ({"onnxruntime": "1.31.0", "encoder": CLASSIFIER}, 6, "it gives 3 logits for a pair"),
        ({"onnxruntime": "1.31.0"}, 5, "the artifact has no triton/tiny\nhint: build it again"),
    ],
)
def test_what_no_triton_serves_moves_no_tag(
    out: Path, tmp_path: Path, changes: dict[str, Any], code: int, said: str
) -> None:
    version, models = put_runtime(out, **changes), tmp_path / "models"
    for command in (("promote", "tiny", version, "--to", "prod", "--triton"), ("triton", f"tiny/{version}", "-o")):
        done = invoke(*command, str(models))
        assert (done.exit_code, said in done.stderr) == (code, True), done.stderr
    assert tags.names(out / "tiny") == []
    assert not models.exists()


def test_a_repository_that_cannot_be_written(out: Path, tmp_path: Path) -> None:
    version, models = put_runtime(out, provider="compressed-tensors"), tmp_path / "models"
    models.write_text("a file")
    done = invoke("promote", "tiny", version, "--to", "prod", "--triton", str(models))
    assert done.exit_code == 8
    assert f"{models}: cannot be written: " in done.stderr
    assert done.stderr.endswith("hint: choose a folder that can be written\n")


def test_out_comes_before_the_environment(tmp_path: Path) -> None:
    version = put(tmp_path / "mine").path.name
    assert invoke("tag", f"tiny/{version}", "new", "--out", str(tmp_path / "mine")).exit_code == 0
    assert invoke("inspect", "tiny:new").exit_code == 5
    assert invoke("ls", "--out", str(tmp_path / "mine")).stdout.splitlines()[1].startswith(f"tiny/{version}")
