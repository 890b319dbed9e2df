"""Signatures of artifacts, in the format of OpenSSF model signing: `model.sig`, a Sigstore bundle over every file.

The bundle holds an in-toto statement of all files and their SHA-256, manifest and evidence included, so that any tool
for that format checks it. Evidence that comes later is not signed, and does not break what is.
"""

from __future__ import annotations

import base64
import json
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge.artifact import sealed
from llmforge.artifact.sealed import MANIFEST, SIGNATURE, EvidenceRecord
from llmforge.artifact.store import Artifact
from llmforge.base import small_file
from llmforge.base.errors import InputError, UsageError

KEY_BYTES = 1 << 20
_CURVES = "an elliptic curve key (P-256, P-384 or P-521) in PEM"
_MAKE = "openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem; openssl ec -in KEY.pem -pubout -out PUB.pem"


@dataclass(frozen=True)
class Signer:
    """A private key, and, where it is certified, its certificate and those between that and a trusted one."""

    key: Path
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()
    password: str | None = None  # of an encrypted key; with a certificate the key is not encrypted


@dataclass(frozen=True)
class Trust:
    """Whose signatures count: those of a public key, or those with a certificate that one of `authorities` issued."""

    key: Path | None = None
    authorities: tuple[Path, ...] = ()


def sign(opened: Artifact, signer: Signer) -> Path:
    """Sign every file of an artifact, which must be as it was published; an earlier signature is replaced.

    Raises:
        InputError: files of the artifact were changed.
        UsageError: the key or a certificate cannot be used, or the folder cannot be written.
    """
    from model_signing import signing

    opened.verify()
    config = signing.Config().set_hashing_config(_hashing())
    for file in filter(None, (signer.key, signer.certificate, *signer.chain)):
        _present(file)
    try:
        if signer.certificate is None:
            password = None if signer.password is None else signer.password.encode()
            config.use_elliptic_key_signer(private_key=signer.key, password=password)
        else:
            config.use_certificate_signer(
                private_key=signer.key, signing_certificate=signer.certificate, certificate_chain=signer.chain
            )
    except (ValueError, TypeError, AttributeError) as error:  # AttributeError: a key that is no elliptic curve's
        raise UsageError(f"{signer.key}: cannot sign: {error}; expected {_CURVES}", hint=_MAKE) from error
    final = opened.path / SIGNATURE
    made = opened.path.parent / f".{SIGNATURE}-{secrets.token_hex(4)}"
    try:
        with _writable(opened.path):
            config.sign(opened.path, made)
            made.chmod(0o444)
            made.replace(final)
    except OSError as error:
        raise UsageError(f"{final}: cannot be written: {error.strerror}", hint="check the permissions") from error
    finally:
        made.unlink(missing_ok=True)
    return final


def verify(opened: Artifact, trust: Trust, source: str | None = None) -> tuple[EvidenceRecord, ...]:
    """Check every byte of an artifact, and that someone trusted signed it; return the records that were signed.

    Messages call it `source`, else by its path.

    Raises:
        InputError: files were changed, the artifact is not signed, or its signature is another's, of other files, or
            of no evidence.
        UsageError: the key or a certificate cannot be used.
    """
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from model_signing import verifying
    from OpenSSL.crypto import Error, X509StoreContextError

    name = source or str(opened.path)
    # Evidence may have come since; that nothing else did, the artifact tells.
    config = verifying.Config().set_hashing_config(_hashing()).set_ignore_unsigned_files(True)
    for file in filter(None, (trust.key, *trust.authorities)):
        _present(file)
    given = trust.key or trust.authorities[0]
    try:
        if trust.key is not None:
            config.use_elliptic_key_verifier(public_key=trust.key)
        else:
            config.use_certificate_verifier(certificate_chain=trust.authorities)
    except (ValueError, AttributeError, UnsupportedAlgorithm) as error:
        what = f"the public half of {_CURVES}" if trust.key is not None else "certificates in PEM"
        raise UsageError(f"{given}: cannot be used to verify; expected {what}", hint=_MAKE) from error
    file = opened.path / SIGNATURE
    if file.is_symlink() or not file.is_file():
        raise InputError(
            f"{name}: is not signed: it has no {SIGNATURE}", hint="sign it: llmforge sign ARTIFACT --key KEY"
        )
    raw = sealed.read_file(file, sealed.LARGEST_SIGNATURE)
    opened.verify()
    # What a bundle holds comes from whoever made it: besides the library's own refusals, parts of it may be missing
    # or of another type.
    hostile = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, InvalidSignature)
    try:
        config.verify(opened.path, file)
        signed = _signed(raw)
    except (*hostile, Error, X509StoreContextError) as error:
        reason = " ".join(str(error).split()) or "it was not made with this key"
        raise InputError(
            f"{name}: the signature does not verify with {given}: {reason}",
            hint="do not use the artifact unless you know who changed it; fetch it again",
        ) from error
    records = tuple(record for record in opened.evidence if record.path in signed)
    if not records:
        raise InputError(f"{name}: the signature covers no evidence", hint="sign the whole artifact")
    of_records = {path for record in records for path in record.placed_files}
    if ignored := sorted({MANIFEST, *opened.manifest.files, *of_records} - signed):
        raise InputError(
            f"{name}: the signature leaves files out: {', '.join(ignored[:5])}", hint="sign the whole artifact"
        )
    return records


def _hashing() -> Any:
    """Hash every file but the signature; the library's defaults leave out what git keeps."""
    from model_signing import hashing

    config = hashing.Config().use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False)
    return config.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _signed(raw: bytes) -> set[str]:
    """Name the files that the statement in a verified bundle covers."""
    payload = json.loads(raw)["dsseEnvelope"]["payload"]
    resources = json.loads(base64.b64decode(payload))["predicate"]["resources"]
    return {resource["name"] for resource in resources}


def _present(file: Path) -> None:
    small_file.read(file, KEY_BYTES, error=UsageError, hint=f"give {_CURVES}")


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Let the owner add a file to a folder that may be read-only."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    folder.chmod(mode | stat.S_IWUSR)
    try:
        yield
    finally:
        folder.chmod(mode)
