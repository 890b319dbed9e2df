"""A repository of an OCI registry: manifests by tag or digest, blobs by digest (OCI distribution specification 1.1).

The client is python-dxf: it holds nothing of a blob in memory, speaks Basic and Bearer authentication, and sends
credentials over TLS alone. Here it gets Docker's credentials, limits to what a registry may answer, downloads that go
on where they broke off, and errors in plain words; for some of it, attributes that begin with an underscore, which is
why its major version is fixed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Self

from llmforge.artifact import docker_config
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError

if TYPE_CHECKING:
    from requests import Response

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
DOCKER_TYPES = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
LARGEST_MANIFEST = 4 << 20  # bytes; what the specification asks registries to take, and most take no more
_LARGEST_MESSAGE = 64 << 10  # bytes of an answer that says what is wrong
_CHUNK = 1 << 20  # bytes
_ATTEMPTS = 3  # in a row that brought nothing
_CONNECTION = re.compile(r"^(<.*?>|HTTPS?Connection\w*\(.*?\)): ")  # how urllib3's messages begin
_TIMEOUT = (10.0, 60.0)  # seconds: to connect, and between two reads

# The grammar of the distribution specification; the registry is never left out.
_NAME = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    r"(?P<host>localhost(?::\d+)?|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+(?::\d+)?|[A-Za-z0-9-]+:\d+|\[[0-9a-fA-F:]+\](?::\d+)?)/"
    rf"(?P<repository>{_NAME}(?:/{_NAME})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
_DOCKER_HUB = {"docker.io": "registry-1.docker.io"}  # where its API is

Advance = Callable[[int], None]  # takes bytes


@dataclass(frozen=True)
class OciReference:
    """What a tag or digest of a repository is called."""

    host: str  # with its port
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str, *, digests: bool = True) -> OciReference:
        """Read `REGISTRY/REPOSITORY:TAG`, or `…@sha256:DIGEST` where digests are allowed.

        Raises:
            UsageError: it is none.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None or not (match["tag"] or (digests and match["digest"])):
            form = "REGISTRY/REPOSITORY:TAG" + (" or REGISTRY/REPOSITORY@sha256:DIGEST" if digests else "")
            raise UsageError(
                f"{text!r} is not {form}", hint="for example localhost:5000/models/tiny:1; repositories are lower-case"
            )
        return cls(match["host"], match["repository"], match["tag"], match["digest"])

    @property
    def is_local(self) -> bool:
        """Say if the registry is on this machine."""
        return _LOOPBACK.fullmatch(self.host) is not None

    def at(self, digest: str) -> str:
        """Name a manifest of the repository by its digest."""
        return f"{self.host}/{self.repository}@{digest}"

    def __str__(self) -> str:
        """Write it as it was given."""
        last = f":{self.tag}" if self.digest is None else f"@{self.digest}"
        return f"{self.host}/{self.repository}{last}"


class Repository:
    """An open connection to a repository; a context manager.

    Raises, each of its methods:
        EnvironmentLacks: the registry cannot be reached, or wants other credentials.
        InputError: what was asked for is not there, or the registry answers what it must not.
    """

    def __init__(self, reference: OciReference, *, insecure: bool = False) -> None:
        import dxf

        self.reference = reference
        self._plain = insecure or reference.is_local
        self._answers: list[Response] = []  # that may be open
        host = _DOCKER_HUB.get(reference.host, reference.host)
        self._dxf: Any = dxf.DXF(host, reference.repository, self._authenticate, self._plain, timeout=_TIMEOUT)

    def __enter__(self) -> Self:
        """Keep connections open."""
        self._dxf.__enter__()
        self._dxf._sessions[0].hooks["response"].append(lambda response, **rest: self._answers.append(response))
        return self

    def __exit__(self, *raised: object) -> None:
        """Close them."""
        self._dxf.__exit__(*raised)

    def upload(self, digest: str, source: IO[bytes], size_bytes: int, advance: Advance) -> bool:
        """Upload a blob unless it is there; say if it was uploaded. `source` is read from where it is."""
        body = _BlobBody(source, size_bytes, advance)
        with self._asking(f"blob {digest}"):
            self._dxf.push_blob(data=body if size_bytes else b"", digest=f"sha256:{digest}")
        if not body.was_read:
            advance(size_bytes)
        return body.was_read

    def put_manifest(self, tag: str, content: bytes) -> None:
        """Give `tag` to a manifest, whose blobs are there."""
        with self._asking("manifest"):
            self._dxf.set_manifest(tag, content.decode())

    def manifest(self) -> tuple[bytes, str]:
        """Read the manifest that the reference names, and its media type."""
        name = self.reference.digest or self.reference.tag
        accepted = ", ".join((MANIFEST_TYPE, INDEX_TYPE, *DOCKER_TYPES))
        with self._asking("manifest"):
            response = self._get(f"manifests/{name}", {"Accept": accepted})
            content = b"".join(_limited(response, LARGEST_MANIFEST))
            said, media_type = response.headers.get("Docker-Content-Digest"), response.headers.get("Content-Type", "")
        if len(content) > LARGEST_MANIFEST:
            raise self._refusal(f"its manifest has more than {LARGEST_MANIFEST:,} bytes")
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        for expected in (self.reference.digest, said):
            if expected not in (None, digest):
                raise self._refusal(f"the registry sent a manifest that is {digest}, not {expected}")
        return content, media_type.partition(";")[0].strip()

    def download(self, digest: str, size_bytes: int, target: IO[bytes], advance: Advance) -> None:
        """Write a blob to `target`, from its beginning; goes on where a connection broke.

        Raises:
            InputError: also, it is longer or shorter than `size_bytes`, or has another digest.
        """
        from requests import exceptions

        breaks = (exceptions.ChunkedEncodingError, exceptions.ConnectionError, exceptions.Timeout)
        hashed, have, idle, answered = hashlib.sha256(), 0, 0, False
        while have < size_bytes:
            before = have
            headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
            with self._asking(f"blob {digest}"):
                try:
                    response = self._get(f"blobs/sha256:{digest}", headers)
                    answered = True
                    if have and not _continues(response, have):
                        advance(-have)
                        target.seek(0)
                        target.truncate()
                        hashed, have = hashlib.sha256(), 0
                    for chunk in _limited(response, size_bytes - have):
                        hashed.update(chunk)
                        target.write(chunk)
                        have += len(chunk)
                        advance(len(chunk))
                except breaks:  # what came is kept; a registry that does not answer is another matter
                    if not answered and idle:  # the first time, it may have closed a connection that was kept open
                        raise
            idle = 0 if have > before else idle + 1
            if idle == _ATTEMPTS:
                raise self._refusal(f"blob sha256:{digest} breaks off after {have:,} of {size_bytes:,} bytes")
        if have > size_bytes:
            raise self._refusal(f"the registry sent more than {size_bytes:,} bytes for blob sha256:{digest}")
        if (found := hashed.hexdigest()) != digest:
            raise self._refusal(f"the registry sent a blob that is sha256:{found}, not sha256:{digest}")

    def _get(self, path: str, headers: dict[str, str]) -> Response:
        """Ask, and leave the body of the answer to be read."""
        response: Response = self._dxf._request("get", path, stream=True, headers=headers)
        return response

    def _authenticate(self, client: Any, response: Response) -> None:
        """Answer a challenge with what Docker's configuration has for this registry; anonymously where it has none."""
        found = docker_config.login(self.reference.host)
        if found is None and "bearer" not in response.headers.get("WWW-Authenticate", "").casefold():
            return  # there is nothing to answer with
        if self.reference.is_local:
            client._insecure = False  # what it says never leaves this machine
        try:
            username, password = found or (None, None)
            client.authenticate(username, password, response=response)
        except (LookupError, TypeError, ValueError) as error:  # what is not in the challenge, or in the token's answer
            raise self._refusal("the registry asks for credentials in a way that cannot be understood") from error
        finally:
            client._insecure = self._plain

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn what goes wrong between here and the registry into an error of ours."""
        import requests
        import urllib3
        from dxf import exceptions

        host = self.reference.host
        try:
            yield
        except exceptions.DXFUnauthorizedError as error:
            raise self._denied("401") from error
        except exceptions.DXFAuthInsecureError as error:
            raise EnvironmentLacks(
                f"{self.reference}: {host} asks for credentials, and they are not sent over plain HTTP",
                hint="use a registry with TLS, without --insecure",
            ) from error
        except requests.HTTPError as error:
            raise self._answered(error.response, what) from error
        except (requests.ConnectionError, requests.Timeout) as error:
            hint = "check the address and that the registry runs"
            if not self._plain and "SSL" in str(error):
                hint = "check its certificate; --insecure is for a registry without TLS"
            raise EnvironmentLacks(f"{self.reference}: {host} cannot be reached: {_root(error)}", hint=hint) from error
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            exceptions.DXFError,
            ValueError,  # of headers and JSON
            KeyError,  # what must be in them is not
        ) as error:
            raise self._refusal(f"the answer about {what} is not that of a registry: {_root(error)}") from error
        finally:
            while self._answers:
                self._answers.pop().close()

    def _answered(self, response: Response, what: str) -> EnvironmentLacks | InputError:
        """Say what an answer with an error means."""
        status, said, host = response.status_code, _message(response), self.reference.host
        if status == 403:
            return self._denied(f"403{said}")
        if status == 404 and what == "manifest":
            name = "tag" if self.reference.digest is None else "digest"
            return InputError(
                f"{self.reference}: there is no such {name} or repository{said}",
                hint="check the name; `llmforge push` prints what it pushed",
            )
        if status == 429 or status >= 500:
            return EnvironmentLacks(f"{self.reference}: {host} answered {status}{said}", hint="try later")
        return InputError(
            f"{self.reference}: {host} refused the {what}: {status}{said}",
            hint="check that it is an OCI registry that takes artifacts",
        )

    def _denied(self, why: str) -> EnvironmentLacks:
        return EnvironmentLacks(
            f"{self.reference}: access denied by {self.reference.host}: {why}",
            hint=f"docker login {self.reference.host}, or write its credentials to {docker_config.file()}",
        )

    def _refusal(self, why: str) -> InputError:
        return InputError(f"{self.reference}: {why}", hint="pull it from elsewhere, or push it again")


class _BlobBody:
    """A file as requests sends it: of known length, read in pieces, and again from its beginning after its end."""

    def __init__(self, source: IO[bytes], size_bytes: int, advance: Advance) -> None:
        self.was_read = False
        self._source, self._size, self._advance = source, size_bytes, advance
        self._sent, self._ended = 0, False

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        """Make requests take it for a stream; it calls `read`."""
        raise NotImplementedError

    def read(self, count: int = -1) -> bytes:
        """Read a piece; none of more bytes than were announced."""
        if self._ended:  # a second attempt, after the registry asked for credentials
            self._source.seek(0)
            self._advance(-self._sent)
            self._sent = 0
        piece = self._source.read(min(count if count >= 0 else _CHUNK, self._size - self._sent))
        self.was_read, self._ended = True, not piece
        self._sent += len(piece)
        self._advance(len(piece))
        return piece


def _continues(response: Response, have: int) -> bool:
    """Say if an answer is the part of a blob from `have` bytes on."""
    said = str(response.headers.get("Content-Range", ""))
    return bool(response.status_code == 206 and said.startswith(f"bytes {have}-"))


def _limited(response: Response, size_bytes: int) -> Iterator[bytes]:
    """Read an answer until it has more than `size_bytes`."""
    have = 0
    for chunk in response.iter_content(_CHUNK):
        have += len(chunk)
        yield chunk
        if have > size_bytes:
            return


def _message(response: Response) -> str:
    """Quote what a registry says is wrong, if it says it as the specification wants."""
    import requests

    try:
        content = b"".join(_limited(response, _LARGEST_MESSAGE))
        errors = json.loads(content[:_LARGEST_MESSAGE])["errors"]
        said = "; ".join(str(each.get("message") or each["code"]) for each in errors)
    except (ValueError, KeyError, TypeError, AttributeError, requests.RequestException):
        return ""
    printable = "".join(c if c.isprintable() else " " for c in said[:300])
    return f" ({printable})" if printable else ""


def _root(error: BaseException) -> str:
    """Say in a line why something failed: the last cause has the words."""
    while isinstance(inner := getattr(error, "reason", None) or (error.args[0] if error.args else None), BaseException):
        error = inner
    text = str(error) if not isinstance(error, OSError) else error.strerror or str(error)
    return " ".join(_CONNECTION.sub("", text).split())[:300] or type(error).__name__
