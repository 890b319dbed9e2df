"""Tags, removal and names of published versions."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmforge.artifact import Artifact, resolve, staging, tags, versions
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError

from ..stored import put

ROOT = Path(__file__).parents[2]


def visible(out: Path, name: str = "tiny") -> list[str]:
    return sorted(path.name for path in (out / name).iterdir() if not path.name.startswith("."))


def age(out: Path, *names: str) -> None:
    """Give versions other dates, the first the oldest; `put` may make several in one second."""
    for day, name in enumerate(names, 1):
        file = out / "tiny" / name / "manifest.json"
        file.chmod(0o644)
        plain = json.loads(file.read_text())
        file.write_text(json.dumps({**plain, "created": f"2026-01-{day:02}T00:00:00Z"}))


class TestTags:
    def test_a_tag_moves_and_remembers(self, tmp_path: Path) -> None:
        for version in ("1", "2"):
            put(tmp_path, version, version=version)
        home = tmp_path / "tiny"
        assert tags.current(home, "new") is None
        assert tags.history(home, "new") == ()
        tags.move(home, "new", "1")
        tags.move(home, "new", "2")
        assert tags.move(home, "new", "2") is None
        assert tags.current(home, "new") == "2"
        assert [(move.how, move.before, move.after) for move in tags.history(home, "new")] == [
            ("tag", None, "1"),
            ("tag", "1", "2"),
        ]
        tags.delete(home, "new", "2")
        assert tags.current_of_all(home) == {}
        assert len(tags.history(home, "new")) == 3

    def test_the_file_is_lines_of_json(self, tmp_path: Path) -> None:
        put(tmp_path, version="1")
        tags.move(tmp_path / "tiny", "new", "1")
        (line,) = (tmp_path / "tiny" / ".tags" / "new").read_text().splitlines()
        plain = json.loads(line)
        assert plain.pop("when").endswith("Z")
        assert plain == {"how": "tag", "from": None, "to": "1"}

    def test_rollbacks_go_back_step_by_step(self, tmp_path: Path) -> None:
        home = tmp_path / "tiny"
        for version in ("1", "2", "3"):
            put(tmp_path, version, version=version)
            tags.move(home, "prod", version, "promote")
        for version in ("2", "1"):
            assert tags.previous(home, "prod") == version
            tags.rollback(home, "prod", version)
            assert tags.current(home, "prod") == version
        with pytest.raises(UsageError, match="tiny:prod has no version to return to"):
            tags.previous(home, "prod")
        tags.move(home, "prod", "3", "promote")
        assert tags.previous(home, "prod") == "1"

    def test_rollback_refuses_what_moved_or_went(self, tmp_path: Path) -> None:
        home = tmp_path / "tiny"
        for version in ("1", "2"):
            put(tmp_path, version, version=version)
            tags.move(home, "prod", version, "promote")
        with pytest.raises(UsageError, match="was moved in the meantime"):
            tags.rollback(home, "prod", "2")
        versions.remove([home / "1"])
        with pytest.raises(InputError, match="tiny/1: no such version"):
            tags.rollback(home, "prod", "1")

    def test_what_promote_moved_is_moved_by_it_alone(self, tmp_path: Path) -> None:
        home = tmp_path / "tiny"
        for version in ("1", "2"):
            put(tmp_path, version, version=version)
        tags.move(home, "prod", "1", "promote")
        with pytest.raises(UsageError, match="llmforge promote tiny 2 --to prod"):
            tags.move(home, "prod", "2")
        tags.delete(home, "prod", "1")
        with pytest.raises(UsageError, match="llmforge promote"):
            tags.move(home, "prod", "2")

    @pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "A", "a:b"])
    def test_names(self, tmp_path: Path, name: str) -> None:
        put(tmp_path, version="1")
        with pytest.raises(UsageError, match="artifact tag"):
            tags.move(tmp_path / "tiny", name, "1")

    def test_a_version_that_is_not_there(self, tmp_path: Path) -> None:
        put(tmp_path, version="1")
        with pytest.raises(InputError, match="tiny/2: no such version"):
            tags.move(tmp_path / "tiny", "new", "2")
        with pytest.raises(UsageError, match="tiny:new does not exist"):
            tags.delete(tmp_path / "tiny", "new", "1")

    def test_a_damaged_history(self, tmp_path: Path) -> None:
        put(tmp_path, version="1")
        home = tmp_path / "tiny"
        tags.move(home, "new", "1")
        (home / ".tags" / "new").write_bytes(b'{"when": \xff')
        with pytest.raises(InputError, match="not the history of a tag"):
            tags.current(home, "new")

    def test_killed_while_tags_move(self, tmp_path: Path) -> None:
        """The history stays whole, and every move links to the one before."""
        for version in ("1", "2"):
            put(tmp_path, version, version=version)
        code = (
            "import itertools, pathlib, sys; from llmforge.artifact import tags\n"
            "print('ready', flush=True)\n"
            "for n in itertools.count(): tags.move(pathlib.Path(sys.argv[1]), 'new', '12'[n % 2])"
        )
        home, lengths = tmp_path / "tiny", []
        for number in range(6):
            command = [sys.executable, "-c", code, str(home)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(0.01 * (number + 1))
                process.kill()
            moves = tags.history(home, "new")
            assert all(later.before == earlier.after for earlier, later in itertools.pairwise(moves))
            lengths.append(len(moves))
        assert lengths == sorted(lengths)
        assert lengths[-1] > 6


class TestRemove:
    def test_a_version_goes_and_others_stay(self, tmp_path: Path) -> None:
        first, second = put(tmp_path, "1"), put(tmp_path, "2")
        versions.remove([first.path])
        assert visible(tmp_path) == [second.path.name]
        assert [path.name for path in (tmp_path / "tiny").glob(".building*")] == []
        second.verify()

    def test_a_tag_keeps_all(self, tmp_path: Path) -> None:
        for version in ("1", "2"):
            put(tmp_path, version, version=version)
        home = tmp_path / "tiny"
        tags.move(home, "new", "2")
        with pytest.raises(UsageError, match="tiny/2 is tagged new") as caught:
            versions.remove([home / "1", home / "2"])
        assert "llmforge tag tiny/2 new --delete" in str(caught.value)
        assert visible(tmp_path) == ["1", "2"]
        tags.delete(home, "new", "2")
        versions.remove([home / "1", home / "2"])
        assert visible(tmp_path) == []

    def test_who_reads_it_goes_on(self, tmp_path: Path) -> None:
        """What a server has mapped stays, and a build of the same name is not disturbed."""
        made = put(tmp_path)
        with (made.path / "engine/model.onnx.data").open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        with staging(tmp_path, "tiny") as building:
            (building / "file").write_text("mine")
            versions.remove([made.path])
            versions.collect_garbage(tmp_path, keep=0)
            assert (building / "file").read_text() == "mine"
        assert mapped[:256] == bytes(range(256))
        assert visible(tmp_path) == []

    def test_two_at_once(self, tmp_path: Path) -> None:
        made = put(tmp_path)
        versions.remove([made.path, made.path])
        assert visible(tmp_path) == []

    def test_killed_between_hiding_and_deleting(self, tmp_path: Path) -> None:
        """The version is gone at once, and what is left of it goes with the next build."""
        made = put(tmp_path)
        code = (
            "import os, pathlib, shutil, sys; from llmforge.artifact import versions\n"
            "shutil.rmtree = lambda path: os.kill(os.getpid(), 9)\n"
            "versions.remove([pathlib.Path(sys.argv[1])])"
        )
        done = subprocess.run([sys.executable, "-c", code, str(made.path)], cwd=ROOT)
        assert done.returncode == -signal.SIGKILL
        assert visible(tmp_path) == []
        assert list((tmp_path / "tiny").glob(".building-*"))
        other = put(tmp_path, "other")
        assert not list((tmp_path / "tiny").glob(".building-*"))
        other.verify()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may delete everything")
    def test_a_folder_that_may_not_be_written(self, tmp_path: Path) -> None:
        made = put(tmp_path)
        (tmp_path / "tiny").chmod(0o555)
        try:
            with pytest.raises(EnvironmentLacks, match="cannot be removed"):
                versions.remove([made.path])
        finally:
            (tmp_path / "tiny").chmod(0o755)


class TestGarbage:
    def test_the_newest_stay_and_what_has_a_tag(self, tmp_path: Path) -> None:
        names = ["1", "2", "3", "4", "5", "6"]
        for version in names:
            put(tmp_path, version, version=version)
        age(tmp_path, *names)
        home = tmp_path / "tiny"
        tags.move(home, "prod", "1", "promote")
        tags.move(home, "prod", "2", "promote")  # 1 is where a rollback returns to
        tags.move(home, "old", "3")
        would = versions.collect_garbage(tmp_path, keep=1, dry_run=True)
        assert [each.path.name for each in would] == ["5", "4"]
        assert visible(tmp_path) == names
        assert versions.collect_garbage(tmp_path, keep=1) == would
        assert visible(tmp_path) == ["1", "2", "3", "6"]

    def test_what_cannot_be_read_stays(self, tmp_path: Path) -> None:
        made = put(tmp_path, version="1")
        (made.path / "manifest.json").chmod(0o644)
        (made.path / "manifest.json").write_text("{")
        assert versions.collect_garbage(tmp_path, keep=0) == []
        (found,) = versions.listed(tmp_path)
        assert found.manifest is None
        assert "not valid JSON" in str(found.damage)

    def test_one_name_alone(self, tmp_path: Path) -> None:
        put(tmp_path)
        put(tmp_path, name="other")
        versions.collect_garbage(tmp_path, "other", keep=0)
        assert versions.names(tmp_path) == ["tiny"]


class TestResolve:
    def test_all_ways(self, tmp_path: Path) -> None:
        made = put(tmp_path)
        put(tmp_path, name="other", content="other")
        version = made.path.name
        tags.move(tmp_path / "tiny", "new", version)
        for text in (str(made.path), f"tiny/{version}", "tiny:new", f"tiny/{version[:1]}", version[:4], version):
            assert resolve(text, tmp_path).resolve() == made.path
        assert Artifact.open(resolve("tiny:new", tmp_path)) == made

    def test_a_whole_version_comes_before_the_beginning_of_another(self, tmp_path: Path) -> None:
        for version in ("1.0", "1.0.1"):
            put(tmp_path, version, version=version)
        assert resolve("tiny/1.0", tmp_path).name == "1.0"
        with pytest.raises(UsageError, match=r"several versions begin so: tiny/1\.0, tiny/1\.0\.1"):
            resolve("tiny/1", tmp_path)

    def test_what_is_not_there(self, tmp_path: Path) -> None:
        put(tmp_path, version="1.0")
        with pytest.raises(InputError, match="tiny:new: no such tag") as caught:
            resolve("tiny:new", tmp_path)
        assert "llmforge tag tiny/VERSION new" in str(caught.value)
        with pytest.raises(InputError, match="tiny/2: tiny has no such version") as caught:
            resolve("tiny/2", tmp_path)
        assert "known: 1.0" in str(caught.value)
        with pytest.raises(InputError, match=r"hint: use one of its versions: 1\.0"):
            Artifact.open(resolve("tiny", tmp_path))
        for text in ("nobody/1", "nobody:new", "1.0", "abcdef", "a/b/c", "", "../x", "x" * 200):
            assert resolve(text, tmp_path) == Path(text)
        with pytest.raises(InputError, match="File name too long"):
            resolve("x" * 5000, tmp_path)

    def test_a_path_that_is_there_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put(tmp_path / "artifacts", version="1")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tiny" / "1").mkdir(parents=True)
        assert resolve("tiny/1", tmp_path / "artifacts") == Path("tiny/1")
