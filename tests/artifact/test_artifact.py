"""Publishing an artifact: what the manifest says, what verify finds, and what a kill leaves behind."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmforge.artifact import Artifact, check_name, publish, seal, staging, tool_versions
from llmforge.artifact.sealed import walk
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError

ROOT = Path(__file__).parents[2]
RECIPE = {"schema": 1, "name": "tiny", "passes": [{"fuse-norms": {}}]}
FACTS: dict[str, Any] = {
    "recipe": RECIPE,
    "checkpoint": "c" * 64,
    "target": "cpu-avx2",
    "requires": {"onnxruntime": "1.31.1"},
}
FILES = {
    "engine/model.onnx": b"graph",
    "engine/model.onnx.data": bytes(range(256)) * 32,
    "tokenizer/tokenizer.json": b"{}",
    "report/report.html": b"<p>1 s</p>",
}
EVIDENCE = {"created": "2026-11-21T10:42:00+00:00", "verdict": "pass"}


def write(folder: Path, **changes: bytes) -> None:
    for path, content in {**FILES, **{key.replace("__", "/"): value for key, value in changes.items()}}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def build(
    out: Path, *, files: dict[str, bytes] | None = None, evidence: dict[str, Any] | None = None, **facts: Any
) -> Artifact:
    with staging(out, "tiny") as folder:
        write(folder)
        for path, content in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return publish(folder, seal(folder, **{**FACTS, **facts}), {**EVIDENCE, **(evidence or {})})


def rewrite(file: Path, **changes: Any) -> None:
    """Edit JSON as a stranger would who knows its form."""
    plain = {**json.loads(file.read_text()), **changes}
    file.chmod(0o644)
    file.write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        Artifact.open(path).verify()
    assert type(caught.value) is InputError
    assert caught.value.exit_code == 5
    return str(caught.value)


class TestPublish:
    def test_folder_and_manifest(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        manifest = made.manifest
        assert made.path == tmp_path / "tiny" / manifest.content_digest[:12]
        assert names(tmp_path / "tiny") == [".lock", manifest.version]
        assert manifest.content_digest == hashlib.sha256((made.path / "manifest.json").read_bytes()).hexdigest()
        assert sorted(manifest.files) == ["engine/model.onnx", "engine/model.onnx.data", "tokenizer/tokenizer.json"]
        assert manifest.files["engine/model.onnx.data"].size_bytes == 8192
        made.verify()
        assert Artifact.open(made.path) == made

    def test_manifest_and_record_are_plain_json(self, tmp_path: Path) -> None:
        """What a runtime without pydantic reads; no time, tool or measurement is content."""
        made = build(tmp_path, evidence={"verdict": "fail", "more": [1]})
        plain = json.loads((made.path / "manifest.json").read_text())
        assert sorted(plain) == ["checkpoint", "files", "name", "recipe", "requires", "schema", "target"]
        assert plain["schema"] == 2
        assert plain["recipe"] == RECIPE
        assert plain["requires"] == {"onnxruntime": "1.31.1"}
        assert set(plain["files"]["engine/model.onnx"]) == {"sha256", "size_bytes"}
        (file,) = (made.path / "evidence").iterdir()
        assert file.stem == hashlib.sha256(file.read_bytes()).hexdigest()
        record = json.loads(file.read_text())
        assert record["content"] == made.manifest.content_digest
        assert (record["verdict"], record["previous"], record["more"]) == ("fail", None, [1])
        assert list(record["files"]) == ["report/report.html"]
        assert made.verdict == "fail"

    def test_files_are_read_only(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        for path in ["manifest.json", made.evidence[0].path, *made.listed]:
            assert stat.S_IMODE((made.path / path).stat().st_mode) == 0o444

    @pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "A", "-x", "a b", "ä", "a" * 129, "a\n"])
    def test_names(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UsageError, match=r"artifact name .*: allowed are a-z, 0-9"):
            check_name(name)
        with pytest.raises(UsageError, match=r"artifact name .*: allowed are"), staging(tmp_path, name):
            pass
        assert names(tmp_path) == []

    def test_out_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(EnvironmentLacks, match="cannot be written") as caught, staging(tmp_path / "file", "tiny"):
            pass
        assert "hint: choose another folder with --out" in str(caught.value)

    def test_tool_versions(self) -> None:
        assert tool_versions()["python"] == ".".join(map(str, sys.version_info[:3]))


class TestContentDigest:
    def test_report_date_and_verdict_lie_outside(self, tmp_path: Path) -> None:
        first = build(tmp_path / "a")
        later = {"verdict": "inconclusive", "created": "2027-01-01T00:00:00+00:00"}
        second = build(tmp_path / "b", files={"report/report.html": b"other"}, evidence=later)
        assert first.manifest.content_digest == second.manifest.content_digest
        assert (first.verdict, second.verdict) == ("pass", "inconclusive")

    @pytest.mark.parametrize(
        "change",
        [
            {"files": {"engine/model.onnx": b"Graph"}},
            {"files": {"tokenizer/tokenizer.json": b"[]"}},
            {"files": {"engine/more": b""}},
            {"recipe": {**RECIPE, "name": "other"}},
            {"target": "cpu-avx512-vnni"},
            {"checkpoint": "d" * 64},
            {"requires": {}},
        ],
        ids=["engine", "tokenizer", "file", "recipe", "target", "checkpoint", "requires"],
    )
    def test_engine_tokenizer_and_what_they_are_of_lie_inside(self, tmp_path: Path, change: dict[str, Any]) -> None:
        first, second = build(tmp_path), build(tmp_path, **change)
        assert first.manifest.content_digest != second.manifest.content_digest
        assert names(tmp_path / "tiny") == sorted([".lock", first.manifest.version, second.manifest.version])

    def test_recipe_order_does_not_count(self, tmp_path: Path) -> None:
        backwards = dict(reversed(RECIPE.items()))
        assert build(tmp_path / "a").path.name == build(tmp_path / "b", recipe=backwards).path.name


class TestSameVersion:
    def test_same_content_adds_a_record(self, tmp_path: Path) -> None:
        """Nothing that was there moves or changes, so that a signature of it holds."""
        first = build(tmp_path)
        before = {path: (first.path / path).read_bytes() for path in walk(first.path)}
        (first.path / "model.sig").write_bytes(b"signed")
        second = build(tmp_path, files={"report/report.html": b"second"}, evidence={"verdict": "fail"})
        assert second.path == first.path
        assert names(tmp_path / "tiny") == [".lock", second.manifest.version]
        assert before.items() <= {path: (second.path / path).read_bytes() for path in walk(second.path)}.items()
        assert (second.path / "model.sig").read_bytes() == b"signed"
        older, newer = second.evidence
        assert older == first.evidence[0]
        assert newer.previous == older.digest
        assert (second.path / newer.home / "report/report.html").read_bytes() == b"second"
        assert sorted(path.name for path in (second.path / "evidence").iterdir()) == sorted(
            [f"{older.digest}.json", f"{newer.digest}.json", newer.digest]
        )
        second.verify()

    @pytest.mark.parametrize(
        ("verdicts", "found"),
        [
            (["pass", "fail"], "fail"),
            (["fail", "pass"], "pass"),
            (["fail", "inconclusive"], "fail"),
            (["pass", "inconclusive"], "pass"),
            (["inconclusive", "inconclusive"], "inconclusive"),
            (["none", "none"], "none"),
        ],
    )
    def test_the_newest_that_decided_counts(self, tmp_path: Path, verdicts: list[str], found: str) -> None:
        """By the line that the records form: clocks may go back."""
        for day, verdict in enumerate(verdicts):
            made = build(tmp_path, evidence={"verdict": verdict, "created": f"2026-11-{20 - day}T00:00:00+00:00"})
        assert [record.verdict for record in made.evidence] == verdicts
        assert made.verdict == found

    def test_damaged_content_is_healed(self, tmp_path: Path) -> None:
        first = build(tmp_path)
        (first.path / "engine/model.onnx").unlink()
        build(tmp_path)
        Artifact.open(first.path).verify()

    def test_damaged_evidence_is_not_replaced(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        (made.path / "report/report.html").unlink()
        with pytest.raises(UsageError, match=r"is not a usable artifact: .*report\.html: missing or changed") as caught:
            build(tmp_path)
        assert f"hint: remove it (llmforge rm tiny/{made.path.name})" in str(caught.value)

    def test_folder_that_is_no_artifact_is_not_deleted(self, tmp_path: Path) -> None:
        mine = build(tmp_path).path
        shutil.rmtree(mine)
        mine.mkdir()
        (mine / "notes.txt").write_text("mine")
        with pytest.raises(UsageError, match=r"exists and is not a usable artifact: .*it has no manifest\.json"):
            build(tmp_path)
        assert (mine / "notes.txt").read_text() == "mine"


class TestStaging:
    def test_hidden_without_manifest_and_gone_after_a_failure(self, tmp_path: Path) -> None:
        def fail() -> None:
            with staging(tmp_path, "tiny") as folder:
                assert folder.parent == tmp_path / "tiny"
                assert folder.name.startswith(f".building-{os.getpid()}-")
                assert list(folder.iterdir()) == []
                raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            fail()
        assert names(tmp_path / "tiny") == [".lock"]

    def test_leftovers_of_dead_builds_are_removed_and_live_ones_kept(self, tmp_path: Path) -> None:
        code = (
            "import os, pathlib, sys; from llmforge.artifact import staging\n"
            "with staging(pathlib.Path(sys.argv[1]), 'tiny') as folder:\n"
            "    (folder / 'engine').mkdir(); (folder / 'engine/model.onnx').touch(); os._exit(9)"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
        left = {name for name in names(tmp_path / "tiny") if name.startswith(".building-")}
        assert len(left) == 2  # the folder and its lock
        with staging(tmp_path, "tiny") as first:
            assert not left & set(names(tmp_path / "tiny"))
            with staging(tmp_path, "tiny") as second:
                assert first.is_dir()
                assert first != second
        assert names(tmp_path / "tiny") == [".lock"]

    def test_old_version_returns_if_killed_between_the_renames(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        made.path.rename(made.path.with_name(f".replaced-0a1b2c3d-{made.path.name}"))
        with staging(tmp_path, "tiny"):
            Artifact.open(made.path).verify()

    def test_old_version_goes_if_killed_after_the_renames(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        shutil.copytree(made.path, made.path.with_name(f".replaced-0a1b2c3d-{made.path.name}"))
        with staging(tmp_path, "tiny") as folder:
            assert names(tmp_path / "tiny") == sorted([".lock", folder.name, f"{folder.name}.lock", made.path.name])


class TestOpen:
    def test_nothing_there(self, tmp_path: Path) -> None:
        assert "nowhere: no such artifact or folder" in refusal(tmp_path / "nowhere")

    def test_file(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        assert "is a file, an artifact is a folder" in refusal(made.path / "manifest.json")

    def test_unfinished(self, tmp_path: Path) -> None:
        with staging(tmp_path, "tiny") as folder:
            write(folder)
            message = refusal(folder)
        assert "not an artifact, but the folder of an unfinished build" in message
        assert "hint: build again" in message

    def test_unfinished_with_a_manifest(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        hidden = made.path.rename(made.path.with_name(".building-1-0a1b2c3d"))
        assert "the folder of an unfinished build" in refusal(hidden)

    def test_no_manifest(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        message = refusal(made.path.parent)
        assert "not an artifact: it has no manifest.json" in message
        assert f"hint: use one of its versions: {made.manifest.version}" in message

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "not valid JSON"),
            (b"{", "not valid JSON"),
            (b"[" * 100_000, "JSON nested too deeply"),
            (b"\xff", "not valid JSON"),
            (b"[]", "list; expected an object"),
            (b"{}", "schema None is not supported"),
            (b'{"schema": 1}', "schema 1 is not supported; this llmforge reads schema 2"),
            (b'{"schema": 2}', "checkpoint, files, name, recipe, requires, target missing"),
        ],
    )
    def test_broken_manifest(self, tmp_path: Path, content: bytes, said: str) -> None:
        made = build(tmp_path)
        (made.path / "manifest.json").chmod(0o644)
        (made.path / "manifest.json").write_bytes(content)
        assert f"manifest.json: {said}" in refusal(made.path)

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../b", "", ".", "a//b", "./a", "manifest.json"])
    def test_paths_that_lead_elsewhere(self, tmp_path: Path, path: str) -> None:
        made = build(tmp_path)
        plain = json.loads((made.path / "manifest.json").read_text())
        rewrite(made.path / "manifest.json", files={path: plain["files"]["engine/model.onnx"]})
        message = refusal(made.path)
        assert "is not a plain path inside the artifact" in message or "cannot be content" in message

    @pytest.mark.parametrize("path", ["evidence/x.json", "README.md", "report/x", "provenance/x", "model.sig"])
    def test_evidence_is_no_content(self, tmp_path: Path, path: str) -> None:
        made = build(tmp_path)
        plain = json.loads((made.path / "manifest.json").read_text())
        rewrite(made.path / "manifest.json", files={path: plain["files"]["engine/model.onnx"]})
        assert f"{path!r} cannot be content" in refusal(made.path)

    @pytest.mark.parametrize("name", ["../triton/kill", "../../evil", "", ".hidden", "a/b", "x" * 200])
    def test_names_that_lead_elsewhere(self, tmp_path: Path, name: str) -> None:
        made = build(tmp_path)
        rewrite(made.path / "manifest.json", name=name)
        assert "cannot be that of an artifact" in refusal(made.path)

    def test_a_manifest_in_another_form(self, tmp_path: Path) -> None:
        """Of one content there is one manifest: no second spelling, no key twice, no number that is not finite."""
        file = build(tmp_path).path / "manifest.json"
        good = file.read_text()
        file.chmod(0o644)
        for other in (
            good.replace("\n", "\r\n"),
            good + " ",
            good.replace(' "name"', ' "name": "other",\n "name"'),
            json.dumps(json.loads(good)),
            good.replace('"name": "tiny"', '"name": "\\u0074iny"'),
        ):
            assert other != good
            file.write_text(other, newline="")
            assert "not in the form that llmforge writes" in refusal(file.parent)
        file.write_text(good.replace('"schema": 1', '"schema": Infinity'))
        assert "not JSON compliant" in refusal(file.parent)

    def test_another_version_than_the_folder_says(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        rewrite(made.path / "manifest.json", target="another")
        assert "called by another version than its content is: tiny " in refusal(made.path)

    def test_through_a_link(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        (tmp_path / "current").symlink_to(made.path)
        Artifact.open(tmp_path / "current").verify()


class TestVerify:
    def test_names_what_is_wrong(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        (made.path / "engine/model.onnx").unlink()
        data = made.path / "engine/model.onnx.data"
        data.chmod(0o644)
        data.write_bytes(b"\1" + data.read_bytes()[1:])
        (made.path / "tokenizer/.hidden").touch()
        message = refusal(made.path)
        assert "missing: engine/model.onnx; changed: engine/model.onnx.data; not in the manifest or in " in message
        assert "evidence: tokenizer/.hidden" in message
        assert "fetch or build the artifact again" in message

    def test_report_counts_too(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        (made.path / "report/report.html").chmod(0o644)
        (made.path / "report/report.html").write_text("better")
        assert "changed: report/report.html" in refusal(made.path)

    def test_edited_evidence(self, tmp_path: Path) -> None:
        made = build(tmp_path, evidence={"verdict": "fail"})
        rewrite(made.path / made.evidence[0].path, verdict="pass")
        assert "was changed: its name is not the SHA-256 of its bytes" in refusal(made.path)

    def test_evidence_that_is_not_one_line(self, tmp_path: Path) -> None:
        """One in the middle is missing, all are, or one is about something else."""
        for _ in range(3):
            made = build(tmp_path)
        other = build(tmp_path, target="other")
        _, second, _ = made.evidence
        kept = (made.path / second.path).rename(tmp_path / "kept")
        assert "a record of evidence is missing, or two follow one: 1 of 2" in refusal(made.path)
        kept.rename(made.path / second.path)
        shutil.copy(other.path / other.evidence[0].path, made.path / "evidence")
        assert f"is about the content {other.path.name}" in refusal(made.path)
        for file in (made.path / "evidence").glob("*.json"):
            file.unlink()
        assert "there is no evidence about it" in refusal(made.path)

    @pytest.mark.parametrize(
        "changes",
        [
            {"created": "yesterday"}, {"created": "2026-01-01T00:00:00"}, {"verdict": "great"}, {"content": "x"},
            {"previous": 1}, {"files": []}, {"files": {"engine/x": {"sha256": "0" * 64, "size_bytes": 1}}},
            {"files": {"report/../x": {"sha256": "0" * 64, "size_bytes": 1}}}, {"files": {"report/x": 1}},
            {"files": {"report/x": {"sha256": "0" * 64, "size_bytes": -1}}}, {"schema": 1}, {"verdict": {}},
        ],
        ids=str,
    )  # fmt: skip
    def test_a_hostile_record(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        made = build(tmp_path)
        file = made.path / made.evidence[0].path
        rewrite(file, **changes)
        file.rename(file.with_name(f"{hashlib.sha256(file.read_bytes()).hexdigest()}.json"))
        refusal(made.path)

    def test_every_byte_of_every_file_counts(self, tmp_path: Path) -> None:
        """Flip one bit of each byte of a small artifact with two records, one after the other."""
        build(tmp_path, files={"engine/model.onnx.data": b"weights"})
        made = build(tmp_path, files={"engine/model.onnx.data": b"weights"}, evidence={"verdict": "fail"})
        flipped = 0
        for path in walk(made.path):
            file = made.path / path
            good = file.read_bytes()
            file.chmod(0o644)
            for index in range(len(good)):
                with file.open("r+b", buffering=0) as stream:
                    stream.seek(index)
                    stream.write(bytes([good[index] ^ (1 << index % 8)]))
                with pytest.raises(InputError):
                    Artifact.open(made.path).verify()
                flipped += 1
            file.write_bytes(good)
        made.verify()
        assert flipped > 1400

    def test_link_to_the_same_bytes(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        moved = (made.path / "engine/model.onnx").rename(tmp_path / "elsewhere")
        (made.path / "engine/model.onnx").symlink_to(moved)
        assert "changed: engine/model.onnx" in refusal(made.path)

    def test_linked_folder(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        moved = (made.path / "engine").rename(tmp_path / "elsewhere")
        (made.path / "engine").symlink_to(moved)
        assert (
            "missing: engine/model.onnx, engine/model.onnx.data; not in the manifest or in evidence: engine"
            in refusal(made.path)
        )

    def test_many_are_counted(self, tmp_path: Path) -> None:
        made = build(tmp_path)
        for number in range(9):
            (made.path / f"extra-{number}").touch()
        assert "extra-0, extra-1, extra-2, extra-3, extra-4 and 4 more" in refusal(made.path)


# Publishes the same version again and again, with another report each time; the parent kills it.
PUBLISHER = """
import itertools, pathlib, sys
from llmforge.artifact import publish, seal, staging
out = pathlib.Path(sys.argv[1])
print("ready", flush=True)
for number in itertools.count():
    with staging(out, "tiny") as folder:
        for path, content in {"engine/model.onnx": b"g" * 300_000, "report/report.html": str(number).encode()}.items():
            (folder / path).parent.mkdir()
            (folder / path).write_bytes(content)
        manifest = seal(folder, recipe={}, checkpoint="c" * 64, target="cpu", requires={})
        publish(folder, manifest, {"created": "2026-11-21T10:42:00+00:00", "verdict": "none"})
"""


def finished(out: Path) -> list[Path]:
    return [path for path in (out / "tiny").glob("*") if not path.name.startswith(".")]


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Whatever has a visible name is whole, and the next build cleans up."""
    moments = random.Random(0)
    published = 0
    for _ in range(15):
        process = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(tmp_path)], stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0, 0.08))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        for path in finished(tmp_path):
            Artifact.open(path).verify()
        published += len(finished(tmp_path))
    assert published > 0
    with staging(tmp_path, "tiny") as folder:
        assert {name for name in names(tmp_path / "tiny") if name.startswith(".")} == {
            ".lock", folder.name, f"{folder.name}.lock"
        }  # fmt: skip


class Builders:
    """Makes processes that build and die early, as forks of one without threads: a fork of this one could hang."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def until(self, step: int) -> int:
        """Build until just before the `step`-th change of the file system; return the exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def fork_builders(out: Path) -> None:
    """Build in a fork of this process for every number that comes in, and say how it ended."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                _die_before(int(line))
                build(out, files={"report/report.html": b"new"})
                os._exit(0)
            finally:  # an exception must not leave a second one that forks
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


@pytest.fixture
def builders(tmp_path: Path) -> Iterator[Builders]:
    code = (
        "import pathlib, sys; from tests.artifact.test_artifact import fork_builders; "
        "fork_builders(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Builders(process)


@pytest.mark.thorough
def test_killed_at_every_step(tmp_path: Path, builders: Builders) -> None:
    """Die just before the n-th change of the file system, for every n: the version is whole or hidden, never lost."""
    first = build(tmp_path / "first", files={"report/report.html": b"old"}).path
    version = tmp_path / "tiny" / first.name
    step, status = 0, 9
    while status:
        shutil.rmtree(tmp_path / "tiny", ignore_errors=True)
        shutil.copytree(first.parent, tmp_path / "tiny")
        status = builders.until(step)
        assert status in (0, 9)
        for path in finished(tmp_path):
            Artifact.open(path).verify()
        copy = tmp_path / f"copy-{step}"  # where somebody deletes the version before the next build
        shutil.copytree(tmp_path / "tiny", copy / "tiny")
        shutil.rmtree(copy / "tiny" / version.name, ignore_errors=True)
        with staging(copy, "tiny"):
            for path in finished(copy):
                Artifact.open(path).verify()
        with staging(tmp_path, "tiny"):
            Artifact.open(version).verify()
        shutil.rmtree(copy)
        step += 1
    assert step > 25  # every file is written, made read-only, and put on disk
    evidence = Artifact.open(version).evidence
    assert [(version / each.home / "report/report.html").read_bytes() for each in evidence] == [b"old", b"new"]
    assert names(tmp_path / "tiny") == [".lock", version.name]


def _die_before(step: int) -> None:
    """Make the n-th call that changes the file system the last one of this process."""
    calls = iter(range(step + 1))

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) == step:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for name in ("mkdir", "rename", "chmod", "unlink", "rmdir", "fsync", "open"):
        setattr(os, name, counted(getattr(os, name)))
    Path.write_text = counted(Path.write_text)  # type: ignore[method-assign]
    Path.write_bytes = counted(Path.write_bytes)  # type: ignore[method-assign]


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="the disk is full"), staging(tmp_path, "tiny") as folder:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "engine"))
    assert not folder.exists()
