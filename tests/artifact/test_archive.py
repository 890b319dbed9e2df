"""Export and import: the same bytes for the same artifact, and nothing visible that was not checked."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmforge.artifact import Artifact, archive, transfer, versions
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError
from llmforge.cli import cli

from ..samples.stored import forged, put

ROOT = Path(__file__).parents[2]


def packed(artifact: Artifact) -> bytes:
    stream = io.BytesIO()
    assert archive.save(artifact, stream) == len(stream.getvalue())
    return stream.getvalue()


@pytest.fixture
def made(tmp_path: Path) -> Artifact:
    return put(tmp_path / "here")


def test_same_artifact_same_bytes(made: Artifact, tmp_path: Path) -> None:
    data = packed(made)
    export_format = tmp_path / "elsewhere"
    shutil.copytree(made.path, export_format)
    for path in export_format.rglob("*"):
        path.chmod(0o700)
    assert packed(Artifact.open(export_format)) == data
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
    names = [member.name.removeprefix(f"tiny/{made.path.name}/") for member in members]
    assert names == ["manifest.json", made.evidence[0].path, *sorted(names[2:])]
    facts = {(m.mode, m.uid, m.gid, m.uname, m.gname, m.mtime, m.type, m.linkname) for m in members}
    assert facts == {(0o444, 0, 0, "", "", 0, tarfile.REGTYPE, "")}


def test_there_and_back(made: Artifact, tmp_path: Path) -> None:
    file = tmp_path / "artifact.tar"
    archive.save_file(made, file)
    again = archive.load_file(file, tmp_path / "there")
    assert again.path == tmp_path / "there" / "tiny" / made.path.name
    assert again.manifest == made.manifest
    assert (again.path / "manifest.json").read_bytes() == (made.path / "manifest.json").read_bytes()
    assert packed(again) == file.read_bytes()
    assert all(path.stat().st_mode & 0o777 == 0o444 for path in again.path.rglob("*") if path.is_file())
    again.verify()
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar")
def test_other_programs_read_it(made: Artifact, tmp_path: Path) -> None:
    archive.save_file(made, tmp_path / "artifact.tar")
    subprocess.run(["tar", "xf", "artifact.tar"], cwd=tmp_path, check=True)
    Artifact.open(tmp_path / "tiny" / made.path.name).verify()


def test_a_signature_travels(made: Artifact, tmp_path: Path) -> None:
    unsigned = packed(made)
    (made.path / "model.sig").write_bytes(b"signed")
    signed = packed(made)
    again = archive.load(io.BytesIO(signed), tmp_path / "there", "x.tar")
    assert (again.path / "model.sig").read_bytes() == b"signed"
    assert packed(again) == signed
    archive.load(io.BytesIO(unsigned), tmp_path / "there", "x.tar")
    assert (again.path / "model.sig").read_bytes() == b"signed"  # it is not lost
    with pytest.raises(UsageError, match="with the same content and another signature"):
        archive.load(io.BytesIO(signed.replace(b"signed", b"Signed")), tmp_path / "there", "x.tar")
    archive.load(io.BytesIO(unsigned), tmp_path / "other", "x.tar")
    archive.load(io.BytesIO(signed), tmp_path / "other", "x.tar")  # nothing is lost
    with pytest.raises(InputError, match=r"model\.sig is damaged"):
        archive.load(io.BytesIO(signed.replace(b"/model.sig", b"x/model.sig")), tmp_path / "third", "x.tar")


def test_sizes_that_octal_digits_cannot_say() -> None:
    for size in (8 << 30, 5 << 40):
        info = tarfile.TarInfo.frombuf(archive._named_header("tiny/1/x", size), "utf-8", "strict")
        assert info.size == size


def test_an_artifact_that_was_changed_is_not_exported(made: Artifact, tmp_path: Path) -> None:
    file = made.path / "engine/model.onnx"
    file.chmod(0o644)
    file.write_bytes(b"grapf")
    with pytest.raises(InputError, match=r"was changed after it was published: engine/model\.onnx"):
        archive.save_file(made, tmp_path / "artifact.tar")
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(InputError, match=r"model\.onnx: cannot be read"):
        archive.save_file(made, tmp_path / "artifact.tar")
    (made.path / "stray").touch()
    with pytest.raises(InputError, match="not in the manifest or in evidence: stray"):
        archive.save_file(made, tmp_path / "artifact.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("what", ["fifo", "folder", "link", "nothing", "socket"])
def test_what_is_no_file_is_not_imported(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is waited for."""
    monkeypatch.chdir(tmp_path)
    file, why = Path("x.tar"), "not a regular file"
    if what == "fifo":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
        why = "Is a directory"
    elif what == "link":
        file.symlink_to(file)
        why = "Too many levels of symbolic links"
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(file))
    else:
        why = "No such file or directory"
    with pytest.raises(InputError, match=rf"x\.tar: cannot be read: {why}"):
        archive.load_file(file, tmp_path / "out")


def test_what_is_there_already(made: Artifact, tmp_path: Path) -> None:
    """The same artifact heals, of evidence nothing is lost, and what is not one line of records is refused."""
    data, out = packed(made), tmp_path / "here"
    (made.path / "engine/model.onnx").unlink()
    archive.load(io.BytesIO(data), out, "x.tar").verify()
    longer = put(out, days=1)
    longer_data = packed(longer)
    again = archive.load(io.BytesIO(data), out, "x.tar")  # an older copy
    again.verify()
    assert [record.digest for record in again.evidence] == [record.digest for record in longer.evidence]
    assert packed(again) == longer_data
    grown = archive.load(io.BytesIO(data), tmp_path / "there", "x.tar")
    archive.load(io.BytesIO(longer_data), tmp_path / "there", "x.tar")  # a newer copy
    assert len(Artifact.open(grown.path).evidence) == 2
    put(tmp_path / "other", days=2)
    with pytest.raises(UsageError, match="exists with the same content and other evidence"):
        archive.load(io.BytesIO(data), tmp_path / "other", "x.tar")


def test_every_cut_is_noticed(made: Artifact, tmp_path: Path) -> None:
    """Also where the size is not known before, as of a stream."""
    data = packed(made)
    ends = [*range(0, len(data), 512), *(random.Random(0).randrange(len(data)) for _ in range(20))]
    for end in ends:
        with pytest.raises(InputError, match="cut off in"):
            archive.load(io.BytesIO(data[:end]), tmp_path / "there", "x.tar")
    assert versions.names(tmp_path / "there") == []


def test_no_room(made: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 100))  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentLacks, match=r"needs [\d,]+ bytes in .*, where 100 are free"):
        archive.load(io.BytesIO(packed(made)), tmp_path / "there", "x.tar")
    assert versions.names(tmp_path / "there") == []


def test_killed_at_random_moments(tmp_path: Path) -> None:
    made = put(tmp_path / "here", files={"engine/big": b"x" * 3_000_000})
    archive.save_file(made, tmp_path / "x.tar")
    code = (
        "import pathlib, sys; from llmforge.artifact import archive, versions\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    versions.remove([archive.load_file(pathlib.Path('x.tar'), pathlib.Path('there')).path])"
    )
    moments = random.Random(0)
    for _ in range(8):
        command = [sys.executable, "-c", code]
        environment = {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0, 0.1))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        for version in versions.listed(tmp_path / "there"):
            Artifact.open(version.path).verify()
    archive.load_file(tmp_path / "x.tar", tmp_path / "there").verify()
    assert [path.name for path in (tmp_path / "there" / "tiny").glob(".*")] == [".lock"]


def edited(change: Callable[[tarfile.TarInfo], object]) -> Callable[[bytes], bytes]:
    """Rewrite the third member's header, README.md's, under a right checksum."""

    def apply(data: bytes) -> bytes:
        at = 0
        for _ in range(2):
            info = tarfile.TarInfo.frombuf(data[at : at + 512], "utf-8", "strict")
            at += 512 + info.size + -info.size % 512
        info = tarfile.TarInfo.frombuf(data[at : at + 512], "utf-8", "strict")
        change(info)
        return data[:at] + info.tobuf(tarfile.USTAR_FORMAT) + data[at + 512 :]

    return apply


def manifest(root: str | None = None, **changes: object) -> Callable[[bytes], bytes]:
    """Rewrite the manifest, the record with it, and all headers."""

    def apply(data: bytes) -> bytes:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = {info.name.split("/", 2)[2]: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
        first, second, *others = members
        raw, record = forged(members[first], members[second], **changes)
        folder = root or f"tiny/{hashlib.sha256(raw).hexdigest()[:12]}"
        everything = {first: raw, f"evidence/{hashlib.sha256(record).hexdigest()}.json": record}
        everything |= {path: members[path] for path in others}
        parts = [
            archive._named_header(f"{folder}/{path}", len(content)) + content + b"\0" * (-len(content) % 512)
            for path, content in everything.items()
        ]
        return b"".join(parts) + b"\0" * 1024

    return apply


RECORD = {"sha256": "0" * 64, "size_bytes": 0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited(lambda info: (setattr(info, "type", b"2"), setattr(info, "linkname", "/etc"))), "a symbolic link"),
        (edited(lambda info: setattr(info, "type", b"1")), "a hard link named"),
        (edited(lambda info: setattr(info, "type", b"3")), "a character device named"),
        (edited(lambda info: setattr(info, "type", b"x")), "a pax header named"),
        (edited(lambda info: setattr(info, "type", b"S")), "a sparse file named"),
        (edited(lambda info: setattr(info, "name", "/etc/passwd")), "a file named '/etc/passwd' where the header of"),
        (edited(lambda info: setattr(info, "name", "tiny/1/../../x")), "a file named 'tiny/1/../../x' where the"),
        (edited(lambda info: setattr(info, "name", "tiny/1/manifest.json")), "named 'tiny/1/manifest.json' where the"),
        (edited(lambda info: setattr(info, "size", 1 << 30)), "where the header of README.md must be"),
        (edited(lambda info: setattr(info, "mode", 0o4777)), "where the header of README.md must be"),
        (lambda data: data[:-512], "cut off"),
        (lambda data: data + data, "too long"),
        (lambda data: b"", "cut off in the first header"),
        (lambda data: b"\x1f\x8b" + data, "it does not begin with a header of tar"),
        (manifest(name="other", root="tiny/1"), "it holds 'tiny/1', its manifest says 'other' '"),
        (manifest(name="../../x"), "name '../../x' cannot be that of an artifact"),
        (manifest(root="tiny/.hidden"), "it holds 'tiny/.hidden', its manifest says 'tiny' '"),
        (manifest(schema=1), "schema 1 is not supported"),
        (lambda data: data.replace(b'"verdict": "pass"', b'"verdict": "fail"', 1), "is not called by its SHA-256"),
        (manifest(files={"../x": RECORD}), "is not a plain path inside the artifact"),
        (manifest(files={"/x": RECORD}), "is not a plain path inside the artifact"),
        (manifest(files={"a": RECORD, "a/b": RECORD}), "'a/b' lies in a file"),
        (manifest(files={"manifest.json/b": RECORD}), "'manifest.json/b' lies in a file"),
        (manifest(files={"evidence/x": RECORD}), "'evidence/x' cannot be content"),
        (manifest(files={"a\nb": RECORD}), "is too long, or not text"),
        (manifest(files={"a" * 120: RECORD}), "the path or the size is too large for a tar"),
        (manifest(files={"a": {**RECORD, "size_bytes": 1 << 90}}), "the path or the size is too large for a tar"),
        (manifest(recipe={"x": float("inf")}), "Out of range float"),
        (lambda data: archive._named_header("tiny/1/manifest.json", 17 << 20) + data, "at most 16,777,216 are allowed"),
        (lambda data: archive._named_header("tiny/1/engine/x", 0) + data, "manifest.json comes first"),
    ],
)  # fmt: skip
def test_hostile_archives(made: Artifact, tmp_path: Path, change: Callable[[bytes], bytes], said: str) -> None:
    file, out = tmp_path / "x.tar", tmp_path / "there"
    file.write_bytes(change(packed(made)))
    done = CliRunner().invoke(cli, ["import", str(file), "--out", str(out)])
    assert done.exit_code == 5, done.output
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {file}: ")
    assert said in done.stderr
    assert "\nhint: " in done.stderr
    assert versions.names(out) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "there") == ["here", "x.tar"]


@pytest.mark.parametrize("most", [1000, pytest.param(transfer.MOST_FILES, marks=pytest.mark.thorough)])
def test_hostile_archives_of_many_files(
    made: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The largest number that is allowed stands in a manifest that is not too large itself."""
    monkeypatch.setattr(transfer, "MOST_FILES", most)
    many = manifest(files={f"f{n}": RECORD for n in range(most + 1)})
    test_hostile_archives(made, tmp_path, many, f"files; at most {most:,} are allowed")


@pytest.mark.thorough
def test_fuzzed_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 of what benchmarks/fuzz_archives.py makes 2,000 of: nothing outside, nothing half-visible, no traceback."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fuzz_archives

    ends = fuzz_archives.run(200, 1, tmp_path)
    assert ends.total() == 200
    refused = sum(count for end, count in ends.items() if not end.endswith("imported"))
    assert refused > 180
    assert {end.partition(":")[0] for end in ends} == {mutate.__name__ for mutate in fuzz_archives.MUTATIONS}


def test_commands(made: Artifact, tmp_path: Path) -> None:
    def invoke(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli, list(words), env={"LLMFORGE_ARTIFACTS": str(tmp_path / "here")})
        assert done.exit_code == code, done.output
        return done.stdout or done.stderr

    tar, there = tmp_path / "x.tar", tmp_path / "there"
    assert invoke("export", f"tiny/{made.path.name}", "-o", str(tar)) == f"{tar}\n"
    assert invoke("import", str(tar), "--out", str(there)) == f"{there / 'tiny' / made.path.name}\n"
    assert (
        json.loads(invoke("export", f"tiny/{made.path.name}", "-o", str(tar), "--json"))["size_bytes"]
        == tar.stat().st_size
    )
    assert json.loads(invoke("import", str(tar), "--json"))["artifact"] == str(made.path)
    assert "must end in .tar" in invoke("export", f"tiny/{made.path.name}", "-o", str(tmp_path / "x.zip"), code=2)
    assert "cannot be read: No such file" in invoke("import", str(tmp_path / "none.tar"), code=5)
    assert "cannot be read: Is a directory" in invoke("import", str(tmp_path), code=5)
