"""A cache that machines share, behind the one on disk, at any URL that fsspec has a file system for.

    URL/records/<digest of the key>.json    a DSSE envelope: the record of an entry, signed
    URL/blobs/<SHA-256>                     a file of an entry

An entry decides codes, or stands for a proof: it is taken only where its record is signed by the key that the user
trusts, names the very key that was asked for, and every file has the bytes that it names. The record is written last,
so that an upload that was cut off shows nothing. A remote that does not answer is given up once and for all: the build
computes what it lacks.

DSSE: https://github.com/secure-systems-lab/dsse/blob/v1.0.2/protocol.md. Keys are Ed25519 or of an elliptic curve, for
which the signature is ECDSA over SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import json
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from llmforge.base import extras, remote_files, small_file
from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.cache.entry import FORMAT, LOCAL_KINDS, RECORD, Key, RemoteRefused

ANSWER_SECONDS = 20.0  # without an answer, or the next bytes, in which a remote counts as unreachable
_TYPE = "application/vnd.llmforge.cache-entry+json"
_RECORD_BYTES = 4 << 20  # the most that a record is read of; large ones have 100 files
_KEY_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # names of files in an entry
_MAKE = "openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem; openssl ec -in KEY.pem -pubout -out PUB.pem"

Answer = TypeVar("Answer")
Files = Mapping[str, Mapping[str, Any]]  # of an entry, by name: "sha256" and "size_bytes"


@dataclass(eq=False)
class Remote:
    """The cache at `url`, in a file system of fsspec; `trusted` and `signer` are keys of `cryptography`.

    What is not signed by `trusted` is not used; None: nothing is. `signer` signs what is uploaded; None: nothing is.
    """

    url: str
    system: Any
    path: str
    trusted: Any = None
    signer: Any = None
    seconds: float = ANSWER_SECONDS
    unreachable: bool = False
    _absent: set[str] = field(default_factory=set, repr=False)
    _chunks: int = field(default=0, repr=False)  # that were moved, by which it is seen to be alive

    def find(self, key: Key) -> Files | None:
        """Return the files of the entry of `key`, as somebody trusted signed them; None where it has none.

        Raises:
            RemoteRefused: the entry is not to be used, or the remote does not answer.
        """
        if self.trusted is None or self.unreachable or key.kind in LOCAL_KINDS or key.digest in self._absent:
            return None
        self._absent.add(key.digest)  # also where it is refused: it is asked for once
        try:
            envelope = self._ask(lambda: self.system.cat_file(self._record(key.digest), start=0, end=_RECORD_BYTES))
        except FileNotFoundError:
            return None
        facts = self._verified(envelope)
        if (facts.get("format"), facts.get("kind"), facts.get("parts")) != (FORMAT, key.kind, dict(key.parts)):
            raise RemoteRefused(f"{self}: entries are of another key than they are stored under")
        files = facts["files"]
        if not all(_PLAIN.fullmatch(name) and name != RECORD for name in files):
            raise RemoteRefused(f"{self}: entries have files with names that no entry has")
        return cast(Files, files)

    def download(self, files: Files, folder: Path) -> None:
        """Write `files` into `folder`.

        Raises:
            RemoteRefused: one is missing or has other bytes than were signed, or the remote does not answer.
        """
        for name, recorded in files.items():
            try:
                found = self._ask(partial(self._load, recorded, folder / name))
            except FileNotFoundError:
                raise RemoteRefused(f"{self}: files of entries are missing") from None
            if found != recorded["sha256"]:
                raise RemoteRefused(f"{self}: files of entries have other bytes than were signed")

    def upload(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the entry in `folder`, whose record says `facts`; the record last.

        Raises:
            RemoteRefused: the remote does not answer, or cannot be written.
        """
        assert self.signer is not None
        try:
            self._upload(folder, facts)
        except FileNotFoundError as error:  # such as a bucket that is not there
            raise self._lost(str(error)) from error

    def _upload(self, folder: Path, facts: Mapping[str, Any]) -> None:
        for name, recorded in facts["files"].items():
            self._ask(partial(self._save, folder / name, recorded))
        payload = json.dumps({**facts, "parts": dict(facts["parts"])}, sort_keys=True).encode()
        signed = {"sig": base64.b64encode(_sign(self.signer, _authenticated(payload))).decode()}
        envelope = {"payloadType": _TYPE, "payload": base64.b64encode(payload).decode(), "signatures": [signed]}
        path = self._record(Key(facts["kind"], facts["parts"]).digest)
        self._ask(lambda: self._write(path, lambda stream: stream.write(json.dumps(envelope).encode())))

    def __str__(self) -> str:
        """Name it, without a password."""
        return f"remote cache {remote_files.without_login(self.url)}"

    def _record(self, digest: str) -> str:
        return f"{self.path}/records/{digest}.json"

    def _blob(self, recorded: Mapping[str, Any]) -> str:
        return f"{self.path}/blobs/{recorded['sha256']}"

    def _verified(self, envelope: bytes) -> dict[str, Any]:
        """Return what is signed in `envelope`; whoever wrote it may have written anything."""
        from cryptography.exceptions import InvalidSignature

        try:
            document = json.loads(envelope)
            payload = base64.b64decode(document["payload"], validate=True)
            signatures = [base64.b64decode(each["sig"], validate=True) for each in document["signatures"]]
            named = document["payloadType"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RemoteRefused(f"{self}: entries have damaged or unsigned records") from None
        for signature in signatures if named == _TYPE else ():
            try:
                _verify(self.trusted, signature, _authenticated(payload))
            except InvalidSignature:
                continue
            return cast(dict[str, Any], json.loads(payload))
        raise RemoteRefused(f"{self}: entries are not signed by the trusted key")

    def _load(self, recorded: Mapping[str, Any], file: Path) -> str:
        """Read a blob into `file`, no more than it should have, and return its SHA-256."""
        digest, left = hashlib.sha256(), int(recorded["size_bytes"]) + 1
        with self.system.open(self._blob(recorded), "rb") as source, file.open("wb") as stream:
            while not self.unreachable and (data := source.read(min(left, _CHUNK_BYTES))):
                digest.update(data)
                stream.write(data)
                left -= len(data)
                self._chunks += 1
        return digest.hexdigest()

    def _save(self, file: Path, recorded: Mapping[str, Any]) -> None:
        """Write a blob, unless one of its size is there."""
        path = self._blob(recorded)

        def write(stream: Any) -> None:
            with file.open("rb") as source:
                while not self.unreachable and (data := source.read(_CHUNK_BYTES)):
                    stream.write(data)
                    self._chunks += 1

        if not self.system.exists(path) or self.system.info(path)["size"] != recorded["size_bytes"]:
            self._write(path, write)

    def _write(self, path: str, write: Callable[[Any], object]) -> None:
        """Write a file that shows nothing until all of it is there, where the file system can."""
        remote_files.make_folder(self.system, path.rpartition("/")[0])
        with self.system.transaction, self.system.open(path, "wb") as stream:
            write(stream)

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        """Return what `call` does, which is given up where nothing moves: not every file system has a time limit."""
        answers: queue.SimpleQueue[tuple[Answer | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - raised again by who waits
                answers.put((None, error))

        threading.Thread(target=run, name="remote cache", daemon=True).start()
        while True:
            before = self._chunks
            try:
                answer, error = answers.get(timeout=self.seconds)
                break
            except queue.Empty:
                if self._chunks == before:
                    raise self._lost(f"no answer within {self.seconds:g} s") from None
        if error is None:
            return cast(Answer, answer)
        if isinstance(error, remote_files.errors()) and not isinstance(error, FileNotFoundError):
            raise self._lost(remote_files.reason(error)) from error
        raise error

    def _lost(self, why: str) -> RemoteRefused:
        self.unreachable = True
        return RemoteRefused(f"{self}: cannot be used from here on: {remote_files.without_login(why)}")


def connect(url: str, *, trusted: Path | None, signer: Path | None) -> Remote:
    """Open the remote cache at `url`, with the public key `trusted` and the private key `signer`, in PEM.

    Raises:
        EnvironmentLacks: fsspec, cryptography or the package for the protocol is not installed.
        UsageError: the URL or a key cannot be used.
    """
    for module in ("fsspec", "model_signing"):  # the latter brings cryptography
        if (lack := extras.trouble(module)) is not None:
            raise lack
    from fsspec.core import url_to_fs

    shown = remote_files.without_login(url)
    if "://" not in url:
        raise UsageError(f"remote cache {shown!r}: not a URL", hint="such as s3://bucket/folder or file:///srv/cache")
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise EnvironmentLacks(f"remote cache {shown}: {error}") from error
    except (ValueError, OSError) as error:
        raise UsageError(
            f"remote cache {shown}: {error}", hint="such as s3://bucket/folder or file:///srv/cache"
        ) from error
    return Remote(
        url,
        system,
        str(path).rstrip("/"),
        trusted=None if trusted is None else _key(trusted, private=False),
        signer=None if signer is None else _key(signer, private=True),
    )


def _key(file: Path, *, private: bool) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    kinds = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey
    if private:
        kinds = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
    raw = small_file.read(file, _KEY_BYTES, error=UsageError, hint=_MAKE)
    try:
        key = load_pem_private_key(raw, password=None) if private else load_pem_public_key(raw)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
        key = None
    if not isinstance(key, kinds):
        what = "private key without a password" if private else "public key"
        raise UsageError(f"{file}: not a {what}; expected Ed25519 or an elliptic curve, in PEM", hint=_MAKE)
    return key


def _authenticated(payload: bytes) -> bytes:
    """Write what is signed: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(_TYPE), _TYPE.encode(), len(payload), payload)


def _sign(key: Any, data: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256

    made = key.sign(data, ECDSA(SHA256())) if isinstance(key, EllipticCurvePrivateKey) else key.sign(data)
    return bytes(made)


def _verify(key: Any, signature: bytes, data: bytes) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import SHA256

    if isinstance(key, EllipticCurvePublicKey):
        key.verify(signature, data, ECDSA(SHA256()))
    else:
        key.verify(signature, data)
