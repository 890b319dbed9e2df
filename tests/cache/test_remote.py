"""A cache that machines share: what was signed comes back, and nothing else is used."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from llmforge.base.errors import UsageError
from llmforge.cache import Cache, CacheEntry, Key
from llmforge.cache.remote import Remote, connect

KEY, OTHER = (Key("proof", {"graph": name, "code": "c"}) for name in "ab")
CONTENT = bytes(range(256)) * 40


def pair(folder: Path, name: str, private: Any) -> tuple[Path, Path]:
    """Write a private key and its public half, PEM."""
    files = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    files[0].write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    files[1].write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return files


@pytest.fixture(params=["ed25519", "P-256"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    is_ed = request.param == "ed25519"
    return pair(
        tmp_path, "own", ed25519.Ed25519PrivateKey.generate() if is_ed else ec.generate_private_key(ec.SECP256R1())
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


def write(folder: Path) -> None:
    (folder / "tensors").write_bytes(CONTENT)
    (folder / "index.json").write_text("{}")


def fill(folder: Path, remote: Remote | None) -> None:
    """Make two entries, and upload them."""
    with Cache(folder, remote=remote) as cache:
        for key in (KEY, OTHER):
            cache.put(key, write)
        assert cache.upload() == (0 if remote is None else 2)


def taken(folder: Path, remote: Remote | None, key: Key = KEY) -> tuple[bool, list[str]]:
    """Look for an entry in an empty cache before the remote one; return if it was there and what there was to say."""
    with Cache(folder, remote=remote) as cache:
        entry = cache.find(key)
        if entry is not None:
            assert entry.read("tensors") == CONTENT
            assert entry.json("index.json") == {}
            assert cache.upload() == 0  # it was not made here
        assert (entry is None) == (cache.find(key) is None)
        return entry is not None, cache.notes


def test_entries_are_uploaded_as_they_are_made(keys: tuple[Path, Path], tmp_path: Path, url: str) -> None:
    """A build that is lost leaves to other machines what it had computed."""
    private, public = keys
    cache = Cache(tmp_path / "lost", remote=connect(url, trusted=None, signer=private))
    cache.put(KEY, write)
    until = time.monotonic() + 30
    while not taken(tmp_path / "other", connect(url, trusted=public, signer=None))[0]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert cache.upload() == 1
    cache.close()


def test_what_one_machine_computed_another_one_takes(keys: tuple[Path, Path], tmp_path: Path, url: str) -> None:
    private, public = keys
    for place in (url, f"memory://{tmp_path.name}"):
        fill(tmp_path / f"one{len(place)}", connect(place, trusted=None, signer=private))
        reader = connect(place, trusted=public, signer=None)
        there = tmp_path / f"two{len(place)}"
        assert taken(there, reader) == (True, [])
        assert taken(there, None) == (True, [])  # it is kept
        assert taken(tmp_path / f"three{len(place)}", reader, Key("proof", {"graph": "z"})) == (False, [])


def test_a_build_that_waits_for_no_key_trusts_nothing(keys: tuple[Path, Path], tmp_path: Path, url: str) -> None:
    fill(tmp_path / "one", writer := connect(url, trusted=None, signer=keys[0]))
    assert taken(tmp_path / "two", writer) == (False, [])


Damage = Callable[[Path, Path, Path], object]  # a record, that of the other entry, a blob


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def unsigned(record: Path) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), "signatures": []}))


def reworded(record: Path, **changes: Any) -> None:
    """Say something else under the same signature."""
    document = json.loads(record.read_text())
    facts = {**json.loads(base64.b64decode(document["payload"])), **changes}
    record.write_text(json.dumps({**document, "payload": base64.b64encode(json.dumps(facts).encode()).decode()}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda record, other, blob: flip(blob), "other bytes than were signed"),
        (lambda record, other, blob: blob.write_bytes(blob.read_bytes()[:-1]), "other bytes than were signed"),
        (lambda record, other, blob: blob.write_bytes(blob.read_bytes() + b"0"), "other bytes than were signed"),
        (lambda record, other, blob: blob.unlink(), "files of entries are missing"),
        (lambda record, other, blob: record.write_bytes(other.read_bytes()), "another key than they are stored under"),
        (lambda record, other, blob: record.write_bytes(record.read_bytes()[:-9]), "damaged or unsigned"),
        (lambda record, other, blob: record.write_bytes(b"[" * 100_000), "damaged or unsigned"),
        (lambda record, other, blob: record.write_bytes(b"\xff\x00"), "damaged or unsigned"),
        (lambda record, other, blob: record.write_text("[]"), "damaged or unsigned"),
        (lambda record, other, blob: flip(record), ""),
        (lambda record, other, blob: unsigned(record), "not signed by the trusted key"),
        (lambda record, other, blob: reworded(record, files={}), "not signed by the trusted key"),
    ],
)  # fmt: skip
def test_what_was_changed_is_refused_once(damage: Damage, says: str, tmp_path: Path, url: str) -> None:
    private, public = pair(tmp_path, "own", ed25519.Ed25519PrivateKey.generate())
    fill(tmp_path / "one", connect(url, trusted=None, signer=private))
    record, other = (tmp_path / "remote" / "records" / f"{key.digest}.json" for key in (KEY, OTHER))
    blob = max((tmp_path / "remote" / "blobs").iterdir(), key=lambda file: file.stat().st_size)
    damage(record, other, blob)
    found, notes = taken(tmp_path / "two", connect(url, trusted=public, signer=None))
    assert not found
    assert len(notes) == 1
    assert says in notes[0]
    with Cache(tmp_path / "two") as cache:  # nothing of it is left
        assert cache.entries() == []


def test_names_that_lead_out_of_an_entry_are_refused_even_if_signed(tmp_path: Path, url: str) -> None:
    private, public = pair(tmp_path, "own", ed25519.Ed25519PrivateKey.generate())
    for name in ("../x", "/tmp/x", "record.json", ".hidden", "a/b"):
        writer = connect(url, trusted=None, signer=private)
        writer.upload(tmp_path, {"format": 1, "kind": KEY.kind, "parts": KEY.parts, "files": {}})
        remote = connect(url, trusted=public, signer=None)
        files = {name: {"sha256": "0" * 64, "size_bytes": 1}}
        writer._save = lambda file, recorded: None  # type: ignore[method-assign]
        writer.upload(tmp_path, {"format": 1, "kind": KEY.kind, "parts": KEY.parts, "files": files})
        found, [note] = taken(tmp_path / "two", remote)
        assert not found
        assert "names that no entry has" in note


def test_entries_of_another_signer_are_refused_with_one_note(tmp_path: Path, url: str) -> None:
    private, _ = pair(tmp_path, "own", ed25519.Ed25519PrivateKey.generate())
    _, stranger = pair(tmp_path, "other", ec.generate_private_key(ec.SECP384R1()))
    fill(tmp_path / "one", connect(url, trusted=None, signer=private))
    with Cache(tmp_path / "two", remote=connect(url, trusted=stranger, signer=None)) as cache:
        assert [cache.find(key) for key in (KEY, OTHER)] == [None, None]
        assert len(cache.notes) == 1
        assert "not signed by the trusted key" in cache.notes[0]


def test_an_upload_that_was_cut_off_is_made_whole_by_the_next(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = pair(tmp_path, "own", ed25519.Ed25519PrivateKey.generate())
    blobs = tmp_path / "remote" / "blobs"
    with Cache(tmp_path / "one") as cache:
        entry = cache.put(KEY, write)
        assert entry is not None
        cache.remote = connect(url, trusted=None, signer=private)
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "_record", lambda self, digest: 1 / 0)  # killed before the record
            with pytest.raises(ZeroDivisionError):
                cache.upload()
        assert taken(tmp_path / "two", connect(url, trusted=public, signer=None)) == (False, [])
        blob = max(blobs.iterdir(), key=lambda file: file.stat().st_size)
        blob.write_bytes(blob.read_bytes()[:100])
        assert cache.upload() == 1
    assert taken(tmp_path / "two", connect(url, trusted=public, signer=None)) == (True, [])


class Stuck:
    """A file system that never answers, or refuses everything."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked = 0
        self.never = threading.Event()

    def cat_file(self, *_: Any, **__: Any) -> bytes:
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.never.wait(30)
        return b""

    exists = makedirs = cat_file


def test_an_upload_that_is_not_taken_is_noted_once(tmp_path: Path) -> None:
    signer = ed25519.Ed25519PrivateKey.generate()
    for error in (FileNotFoundError("no such bucket"), PermissionError("denied")):
        remote = Remote("s3://bucket", Stuck(error), "bucket", signer=signer)
        with Cache(tmp_path / type(error).__name__, remote=remote) as cache:
            for key in (KEY, OTHER):
                cache.put(key, write)
            assert cache.upload() == 0
            assert len(cache.notes) == 1
            assert str(error) in cache.notes[0]


@pytest.mark.parametrize("error", [None, ConnectionRefusedError("refused by user:pw@host"), TimeoutError()])
def test_a_remote_that_does_not_answer_is_asked_once_and_noted_once(tmp_path: Path, error: Exception | None) -> None:
    stuck, signer = Stuck(error), ed25519.Ed25519PrivateKey.generate()
    remote = Remote("s3://me:pw@bucket", stuck, "bucket", trusted=signer.public_key(), signer=signer, seconds=0.2)
    began = time.monotonic()
    with Cache(tmp_path, remote=remote) as cache:
        assert [cache.find(key) for key in (KEY, OTHER)] == [None, None]
        assert isinstance(cache.put(KEY, write), CacheEntry)
        assert len(cache.notes) == 1
        assert "remote cache s3://bucket: cannot be used from here on" in cache.notes[0]
        assert "me:pw" not in cache.notes[0]
    assert stuck.asked == 1
    assert time.monotonic() - began < 5
    stuck.never.set()


def test_a_key_or_a_url_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    private, public = pair(tmp_path, "own", ed25519.Ed25519PrivateKey.generate())
    here, none = f"file://{tmp_path}", tmp_path / "none"
    wrong = (("nowhere", public, None), ("nosuch://x", public, None), (here, private, None), (here, None, public))
    for url, trusted, signer in (*wrong, (here, none, None)):
        with pytest.raises(UsageError) as caught:
            connect(url, trusted=trusted, signer=signer)
        assert caught.value.hint
