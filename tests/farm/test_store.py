"""The store of a farm, and what nodes are asked for before they build."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmforge.artifact import Artifact, archive, remote
from llmforge.artifact import store as artifacts
from llmforge.artifact.remote import Url
from llmforge.base import remote_files
from llmforge.base.errors import CheckpointError, EnvironmentLacks, ForgeError, InputError, UsageError, VersionMismatch
from llmforge.farm import preflight, store
from llmforge.farm.matrix import Build

from ..samples.stored import put
from .fakes import NEEDS
from .nodes import BUCKET, S3

fsspec = pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
pytestmark = pytest.mark.usefixtures("memory")
# s3fs leaves connections to the garbage collector
unclosed = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def records(made: Artifact, url: str) -> list[str]:
    return [each.digest for each in remote.evidence(Url(store.archive_of(made.path, url)))[1]]


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return "memory://store" if request.param == "memory" else (tmp_path / "store").as_uri()


def test_evidence_of_one_content_becomes_one_line(tmp_path: Path, url: str) -> None:
    """Two hosts publish the same content, each for itself, and the first goes on."""
    first, second = put(tmp_path / "a"), put(tmp_path / "b", days=1)
    store.share(first.path, url)
    store.share(first.path, url)
    assert records(first, url) == [first.evidence[0].digest]
    longer = put(tmp_path / "a", days=2)
    assert len(longer.evidence) == 2
    store.share(longer.path, url)
    assert records(first, url) == [each.digest for each in longer.evidence]
    store.share(first.path, url)
    store.share(second.path, url)
    made = remote.load(Url(store.archive_of(first.path, url)), tmp_path / "c")
    made.verify()
    assert [each.digest for each in made.evidence[:2]] == [each.digest for each in longer.evidence]
    assert len(made.evidence) == 3
    assert made.evidence[2].previous == made.evidence[1].digest
    assert [each.name for each in (tmp_path / "b").iterdir()] == [second.manifest.name]  # and nothing hidden is left


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    for package in ("moto", "s3fs"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra `dev`)")
    server = S3(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """This process may use it."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


@unclosed
@pytest.mark.parametrize("kind", [pytest.param("s3", marks=pytest.mark.thorough), "file"])
def test_hosts_that_publish_at_once_lose_nothing(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All look at the same time and see nothing, so that all but one must look again."""
    url, hosts = f"{tmp_path.as_uri()}/store", [put(tmp_path / f"h{days}", days=days) for days in range(5)]
    (tmp_path / "store").mkdir()
    if kind == "s3":
        system = request.getfixturevalue("s3").system
        url, meeting, looked = f"s3://{BUCKET}/once", threading.Barrier(len(hosts)), set[int]()
        real = remote.revision

        def revision(of: Url) -> str | None:
            found = real(of)
            if threading.get_ident() not in looked:
                looked.add(threading.get_ident())
                meeting.wait(60)
            return found

        monkeypatch.setattr(remote, "revision", revision)
    with ThreadPoolExecutor(len(hosts)) as pool:
        for each in [pool.submit(store.share, host.path, url) for host in hosts]:
            each.result()
    found = remote.load(Url(store.archive_of(hosts[0].path, url)), tmp_path / "there")
    found.verify()
    assert len(found.evidence) == len(hosts)
    assert [each.previous for each in found.evidence[1:]] == [each.digest for each in found.evidence[:-1]]
    if kind == "s3":  # nor does it keep parts of what was refused
        assert not system.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads")


@pytest.mark.thorough
@unclosed
def test_an_upload_may_take_longer_than_an_answer(tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it goes on, small files are written to the same bucket."""
    monkeypatch.setattr(store, "ANSWER_S", 0.5)
    probes, enough, save = list[str](), threading.Event(), archive.save

    def counted(url: str) -> None:
        store.probe(url)
        probes.append(url)
        if len(probes) == 2:
            enough.set()

    def slow(artifact: Artifact, stream: Any) -> int:
        enough.wait(60)
        return save(artifact, stream)

    monkeypatch.setattr(store, "require_answer", counted)
    monkeypatch.setattr(archive, "save", slow)
    made = put(tmp_path / "a")
    store.share(made.path, f"s3://{BUCKET}/slow")
    assert s3.archives("slow") == [f"tiny/{made.path.name}.tar"]
    assert len(probes) >= 2


def test_a_store_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such folder"):
        store.probe((tmp_path / "none").as_uri())
    assert not (tmp_path / "none").exists()
    store.probe("memory://bucket")
    assert fsspec.filesystem("memory").find("/") == []


def test_without_a_store_what_another_node_made_is_looked_for_in_a_folder_of_all(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="is not on this node") as lacking:
        store.fetch(tmp_path / "small" / "1", None)
    assert lacking.value.hint == "let the folder of artifacts be one that all nodes have, or give --store URL"


def test_a_bucket_is_not_made() -> None:
    class Bucket:
        protocol = ("s3", "s3a")

        def makedirs(self, *_: object, **__: object) -> None:
            raise AssertionError

    remote_files.make_folder(Bucket(), "bucket/x")


@pytest.mark.parametrize(
    ("cause", "lost"),
    [
        (ConnectionRefusedError("refused"), True),
        (TimeoutError(), True),
        (FileNotFoundError("no bucket"), False),
        (PermissionError("denied"), False),
        (OSError(28, "no space left on device"), False),
        (ValueError("bad URL"), False),
        (None, False),
    ],
)
def test_what_may_pass_by_itself(cause: Exception | None, lost: bool) -> None:
    error = UsageError("cannot be written")
    error.__cause__ = cause
    assert store.is_lost(error) is lost


def test_a_store_that_does_not_answer_is_asked_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    monkeypatch.setattr(store, "_PAUSE_S", 0.01)
    monkeypatch.setattr(store, "PATIENCE_S", 0.2)
    left, real = [3], remote.opened

    def opened(url: Url) -> tuple[Any, str]:
        left[0] -= 1
        with remote.asking(url, writes=True):
            if left[0] > 0:
                raise ConnectionRefusedError("refused")
        return real(url)

    monkeypatch.setattr(remote, "opened", opened)
    made = put(tmp_path / "a")
    store.share(made.path, "memory://store")
    assert memory.exists(f"/store/tiny/{made.path.name}.tar")
    left[0] = 10**6
    with pytest.raises(store.StoreLost, match="does not answer"):
        store.share(made.path, "memory://store")


def test_a_store_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
    """What takes long may, while a small file gets there."""
    monkeypatch.setattr(store, "ANSWER_S", 0.2)
    never, made = threading.Event(), put(tmp_path / "a")
    monkeypatch.setattr(remote, "save_over", lambda *_: time.sleep(1))
    store.share(made.path, "memory://store")
    monkeypatch.setattr(store, "probe", lambda _: never.wait(30))
    began = time.monotonic()
    with pytest.raises(store.StoreLost, match=r"does not answer: no answer within 0\.2 s"):
        store.share(made.path, "memory://store")
    with pytest.raises(store.StoreLost):
        store.require_answer("memory://store")
    assert time.monotonic() - began < 10
    never.set()


# what nodes are asked for

RECIPE = """\
schema: 1
name: base
checkpoint: llama
target: cpu-avx2
engine: {max_context: 64}
passes: []
"""
SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m"


@pytest.fixture
def needed(tmp_path: Path) -> preflight.NodeNeeds:
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "key.pem").write_text("key", encoding="utf-8")
    shutil.copytree(SAMPLE, tmp_path / "llama")
    build = Build("a", "b", "c", tmp_path / "recipe.yaml", ())
    lost = replace(build, overrides=("checkpoint=nowhere",))
    found = preflight.needs(
        [build, lost], tmp_path / "out", store_url=None, remote_cache=None, keys=[tmp_path / "key.pem"]
    )
    return replace(found, extras=())


def test_this_machine_has_what_it_says(needed: preflight.NodeNeeds, tmp_path: Path) -> None:
    assert set(needed.files) == {tmp_path / "recipe.yaml", tmp_path / "key.pem"}
    assert set(needed.checkpoints) == {tmp_path / "llama"}
    assert preflight.lack(needed, writes=True) is None
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda at: (at / "key.pem").unlink(), UsageError, "key.pem: cannot be read: No such file"),
        (lambda at: (at / "key.pem").write_text("other"), UsageError, "key.pem: has another content"),
        (lambda at: (at / "recipe.yaml").write_text("other"), UsageError, "recipe.yaml: has another content"),
        (lambda at: (at / "llama" / "model.safetensors").unlink(), CheckpointError, "llama: has other files"),
        (lambda at: shutil.rmtree(at / "llama"), CheckpointError, "llama: cannot be read"),
    ],
)
def test_what_a_node_lacks(
    needed: preflight.NodeNeeds, tmp_path: Path, change: Any, kind: type[ForgeError], says: str
) -> None:
    change(tmp_path)
    found = preflight.lack(needed, writes=True)
    assert found is not None
    assert says in found.message
    assert found.exit_code == kind.exit_code
    assert "all nodes" in str(found.hint)


def test_what_a_machine_lacks(tmp_path: Path) -> None:
    with pytest.raises(VersionMismatch, match="another llmforge"):
        preflight.require(replace(NEEDS, code="0" * 64), writes=False)
    with pytest.raises(EnvironmentLacks, match=r"GB are free; a build needs 1000000000"):
        preflight.require(replace(NEEDS, extras=(), free_bytes=10**18), writes=False)
    with pytest.raises(UsageError, match="there is no such folder"):
        preflight.require(replace(NEEDS, extras=(), store=(tmp_path / "none").as_uri()), writes=True)
    (tmp_path / "file").write_text("")
    with pytest.raises((InputError, UsageError)):
        preflight.require(replace(NEEDS, extras=(), store=(tmp_path / "file").as_uri()), writes=True)


def test_a_record_is_published_again_behind_others(tmp_path: Path) -> None:
    first, second = put(tmp_path / "a"), put(tmp_path / "b", days=1)
    both = artifacts.publish_again(second, tmp_path / "a")
    both.verify()
    assert [each.previous for each in both.evidence] == [None, first.evidence[0].digest]
    assert both.manifest == first.manifest
