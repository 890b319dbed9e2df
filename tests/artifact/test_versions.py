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

from llmforge.artifact import Artifact, staging, tags, versions
from llmforge.artifact.references import resolve
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError

from ..samples.stored import put, several

ROOT = Path(__file__).parents[2]


def visible(out: Path, name: str = "tiny") -> list[str]:
    return sorted(path.name for path in (out / name).iterdir() if not path.name.startswith("."))


class TestTags:
    def test_a_tag_moves_and_remembers(self, tmp_path: Path) -> None:
        first, second = several(tmp_path, 2)
        home = tmp_path / "tiny"
        assert tags.current(home, "new") is None
        assert tags.history(home, "new") == ()
        tags.move(home, "new", first)
        tags.move(home, "new", second)
        assert tags.move(home, "new", second) is None
        assert tags.current(home, "new") == second
        assert [(move.how, move.before, move.after) for move in tags.history(home, "new")] == [
            ("tag", None, first),
            ("tag", first, second),
        ]
        tags.delete(home, "new", second)
        assert tags.current_of_all(home) == {}
        assert len(tags.history(home, "new")) == 3

    def test_the_file_is_lines_of_json(self, tmp_path: Path) -> None:
        version = put(tmp_path).path.name
        tags.move(tmp_path / "tiny", "new", version)
        (line,) = (tmp_path / "tiny" / ".tags" / "new").read_text().splitlines()
        plain = json.loads(line)
        assert plain.pop("when").endswith("Z")
        assert plain == {"how": "tag", "from": None, "to": version}

    def test_rollbacks_go_back_step_by_step(self, tmp_path: Path) -> None:
        home = tmp_path / "tiny"
        first, second, third = several(tmp_path, 3)
        for version in (first, second, third):
            tags.move(home, "prod", version, "promote")
        for version in (second, first):
            assert tags.previous(home, "prod") == version
            tags.rollback(home, "prod", version)
            assert tags.current(home, "prod") == version
        with pytest.raises(UsageError, match="tiny:prod has no version to return to"):
            tags.previous(home, "prod")
        tags.move(home, "prod", third, "promote")
        assert tags.previous(home, "prod") == first

    def test_rollback_refuses_what_moved_or_went(self, tmp_path: Path) -> None:
        home = tmp_path / "tiny"
        first, second = several(tmp_path, 2)
        for version in (first, second):
            tags.move(home, "prod", version, "promote")
        with pytest.raises(UsageError, match="was moved in the meantime"):
            tags.rollback(home, "prod", second)
        versions.remove([home / first])
        with pytest.raises(InputError, match=f"tiny/{first}: no such version"):
            tags.rollback(home, "prod", first)

    def test_what_promote_moved_is_moved_by_it_alone(self, tmp_path: Path) -> None:
        home = tmp_path / "tiny"
        first, second = several(tmp_path, 2)
        tags.move(home, "prod", first, "promote")
        with pytest.raises(UsageError, match=f"llmforge promote tiny {second} --to prod"):
            tags.move(home, "prod", second)
        tags.delete(home, "prod", first)
        with pytest.raises(UsageError, match="llmforge promote"):
            tags.move(home, "prod", second)

    @pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "A", "a:b"])
    def test_names(self, tmp_path: Path, name: str) -> None:
        version = put(tmp_path).path.name
        with pytest.raises(UsageError, match="artifact tag"):
            tags.move(tmp_path / "tiny", name, version)

    def test_a_version_that_is_not_there(self, tmp_path: Path) -> None:
        version = put(tmp_path).path.name
        with pytest.raises(InputError, match="tiny/2: no such version"):
            tags.move(tmp_path / "tiny", "new", "2")
        with pytest.raises(UsageError, match="tiny:new does not exist"):
            tags.delete(tmp_path / "tiny", "new", version)

    def test_a_version_under_another_name(self, tmp_path: Path) -> None:
        """A folder that is called by something else than it holds gets no tag, and is listed as damaged."""
        made, other = put(tmp_path), put(tmp_path, name="other")
        moved = made.path.rename(tmp_path / "other" / made.path.name)
        with pytest.raises(InputError, match=f"holds tiny/{moved.name}"):
            tags.move(tmp_path / "other", "new", moved.name)
        damaged = {each.path: each.damage for each in versions.listed(tmp_path)}
        assert damaged == {other.path: None, moved: f"{moved}: holds tiny/{moved.name}"}

    def test_a_damaged_history(self, tmp_path: Path) -> None:
        home = tmp_path / "tiny"
        tags.move(home, "new", put(tmp_path).path.name)
        (home / ".tags" / "new").write_bytes(b'{"when": \xff')
        with pytest.raises(InputError, match="not the history of a tag"):
            tags.current(home, "new")

    def test_killed_while_tags_move(self, tmp_path: Path) -> None:
        """The history stays whole, and every move links to the one before."""
        both = several(tmp_path, 2)
        code = (
            "import itertools, pathlib, sys; from llmforge.artifact import tags\n"
            "print('ready', flush=True)\n"
            "for n in itertools.count(): tags.move(pathlib.Path(sys.argv[1]), 'new', sys.argv[2 + n % 2])"
        )
        home, lengths = tmp_path / "tiny", []
        for number in range(6):
            command = [sys.executable, "-c", code, str(home), *both]
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
        first, second = several(tmp_path, 2)
        home = tmp_path / "tiny"
        tags.move(home, "new", second)
        with pytest.raises(UsageError, match=f"tiny/{second} is tagged new") as caught:
            versions.remove([home / first, home / second])
        assert f"llmforge tag tiny/{second} new --delete" in str(caught.value)
        assert visible(tmp_path) == sorted([first, second])
        tags.delete(home, "new", second)
        versions.remove([home / first, home / second])
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
        names = several(tmp_path, 6)
        home = tmp_path / "tiny"
        tags.move(home, "prod", names[0], "promote")
        tags.move(home, "prod", names[1], "promote")  # the first is where a rollback returns to
        tags.move(home, "old", names[2])
        would = versions.collect_garbage(tmp_path, keep=1, dry_run=True)
        assert [each.path.name for each in would] == [names[4], names[3]]
        assert visible(tmp_path) == sorted(names)
        assert versions.collect_garbage(tmp_path, keep=1) == would
        assert visible(tmp_path) == sorted([*names[:3], names[5]])

    def test_what_was_built_again_is_new(self, tmp_path: Path) -> None:
        first, second = several(tmp_path, 2)
        put(tmp_path, "graph 1", days=9)
        assert [each.path.name for each in versions.collect_garbage(tmp_path, keep=1)] == [second]
        assert visible(tmp_path) == [first]

    def test_what_cannot_be_read_stays(self, tmp_path: Path) -> None:
        made = put(tmp_path)
        (made.path / "manifest.json").chmod(0o644)
        (made.path / "manifest.json").write_text("{")
        assert versions.collect_garbage(tmp_path, keep=0) == []
        (found,) = versions.listed(tmp_path)
        assert found.artifact is None
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

    def test_what_is_not_there(self, tmp_path: Path) -> None:
        version = put(tmp_path).path.name
        with pytest.raises(InputError, match="tiny:new: no such tag") as caught:
            resolve("tiny:new", tmp_path)
        assert "llmforge tag tiny/VERSION new" in str(caught.value)
        with pytest.raises(InputError, match="tiny/x: tiny has no such version") as caught:
            resolve("tiny/x", tmp_path)
        assert f"known: {version}" in str(caught.value)
        with pytest.raises(InputError, match=f"hint: use one of its versions: {version}"):
            Artifact.open(resolve("tiny", tmp_path, newest=False))
        for text in ("nobody/1", "nobody:new", "1.0", "abcdefg", "a/b/c", "", "../x", "x" * 200):
            assert resolve(text, tmp_path) == Path(text)
        with pytest.raises(InputError, match="File name too long"):
            resolve("x" * 5000, tmp_path)

    def test_a_name_is_its_newest_version(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        older, newest = several(tmp_path, 2)
        newer = tmp_path / "tiny" / newest
        for text in ("tiny", "tiny:latest", str(tmp_path / "tiny")):
            assert resolve(text, tmp_path) == newer
        tags.move(tmp_path / "tiny", "latest", older)
        assert resolve("tiny:latest", tmp_path).name == older  # a tag that is called so
        (tmp_path / "here" / "tiny").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "here")  # a checkpoint's folder of the same name
        assert resolve("tiny", tmp_path) == newer
        assert resolve("tiny", tmp_path / "none") == Path("tiny")
        assert resolve("tiny", tmp_path, newest=False) == tmp_path / "tiny"

    def test_a_path_that_is_there_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        version = put(tmp_path / "artifacts").path.name
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tiny" / version).mkdir(parents=True)
        assert resolve(f"tiny/{version}", tmp_path / "artifacts") == Path(f"tiny/{version}")
