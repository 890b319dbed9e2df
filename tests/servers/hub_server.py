"""A small Hugging Face Hub: the routes that huggingface_hub asks for, over HTTP on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """What is on it, and what was asked."""

    url: str = ""
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # name, commit, file
    branches: dict[tuple[str, str], str] = field(default_factory=dict)  # of a repository, to a commit
    gated: set[str] = field(default_factory=set)
    token: str | None = None  # that opens what is gated
    damaged: set[str] = field(default_factory=set)  # files that come with other bytes than their hashes say
    cut: dict[str, int] = field(default_factory=dict)  # files whose first answer ends after so many bytes
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    def push(self, repository: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch; return it."""
        content = b"".join(name.encode() + hashlib.sha256(data).digest() for name, data in sorted(files.items()))
        commit = hashlib.sha1(content).hexdigest()
        self.repositories.setdefault(repository, {})[commit] = dict(files)
        self.branches[repository, branch] = commit
        return commit

    def downloads(self) -> list[str]:
        """Name the files that were sent, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


@contextmanager
def serve() -> Iterator[Hub]:
    """Run one."""
    hub = Hub()

    class Answers(_Answers):
        pass

    Answers.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/]+))?", path):
            self._describe(*match.groups())
        elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._refuse(404, "EntryNotFound")

    def _commit(self, repository: str, revision: str) -> str | None:
        """Find a commit that may be read; None: refused."""
        if repository not in self.hub.repositories:
            self._refuse(404, "RepoNotFound")
            return None
        if repository in self.hub.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(403, "GatedRepo")
            return None
        commit = self.hub.branches.get((repository, revision), revision)
        if commit not in self.hub.repositories[repository]:
            self._refuse(404, "RevisionNotFound")
            return None
        return commit

    def _describe(self, repository: str, what: str | None, revision: str | None) -> None:
        if (commit := self._commit(repository, revision or "main")) is None:
            return
        files = self.hub.repositories[repository][commit]
        if what == "tree":
            self._send(json.dumps([_entry(name, data) for name, data in files.items()]).encode())
            return
        siblings = [{"rfilename": name} for name in files]
        facts = {"_id": "1", "id": repository, "modelId": repository, "sha": commit, "siblings": siblings}
        self._send(json.dumps({**facts, "private": False, "tags": [], "downloads": 0, "likes": 0}).encode())

    def _resolve(self, repository: str, revision: str, name: str) -> None:
        if (commit := self._commit(repository, revision)) is None:
            return
        data = self.hub.repositories[repository][commit].get(name)
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        etag = _entry(name, data).get("lfs", {}).get("oid") or _blob(data)
        if name in self.hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = 0
        if (wanted := self.headers.get("Range")) is not None and self.command == "GET":
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(
            data[start:],
            206 if start else 200,
            headers,
            cut=self.hub.cut.pop(name, None) if self.command == "GET" else None,
        )

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", status, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                self.close_connection = True


def _blob(data: bytes) -> str:
    """Hash a file as git does."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": _blob(data)}
    if name.endswith((".safetensors", ".bin")):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
