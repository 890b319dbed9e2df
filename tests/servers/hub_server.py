"""A small Hugging Face Hub: the routes that huggingface_hub asks for, over HTTP on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
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
    writer: str | None = None  # token that may write
    messages: list[str] = field(default_factory=list)  # of commits that came over HTTP
    large: dict[str, bytes] = field(default_factory=dict)  # what was uploaded as large files, by SHA-256

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

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(("POST", path, None))
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {self.hub.writer}":
            self._refuse(401, "Unauthorized")
        elif path == "/api/validate-yaml":  # of the card
            self._send(json.dumps({"errors": [], "warnings": []}).encode())
        elif path == "/api/repos/create":
            self._create(json.loads(data))
        elif match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/preupload/main", path):
            files = [each["path"] for each in json.loads(data)["files"]]
            modes = {name: "lfs" if _is_large(name) else "regular" for name in files}
            said = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._send(json.dumps({"files": said}).encode())
        elif re.fullmatch(r"/[\w.-]+/[\w.-]+\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(data))
        elif match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commit/main", path):
            self._commit_files(match[1], [json.loads(line) for line in data.splitlines()])
        else:
            self._refuse(404, "EntryNotFound")

    def do_PUT(self) -> None:
        data = b""
        if (length := self.headers["Content-Length"]) is not None:
            data = self.rfile.read(int(length))
        while length is None and (size := int(self.rfile.readline(), 16)):  # chunks
            data += self.rfile.read(size)
            self.rfile.readline()
        if length is None:
            self.rfile.readline()
        self.hub.large[hashlib.sha256(data).hexdigest()] = data
        self._send(b"{}")

    def _create(self, asked: dict[str, str]) -> None:
        name = f"{asked.get('organization')}/{asked['name']}"
        if name in self.hub.repositories:
            self._send(json.dumps({"url": f"{self.hub.url}/{name}"}).encode(), 409)
            return
        self.hub.push(name, {".gitattributes": b"* lfs"})
        self._send(json.dumps({"url": f"{self.hub.url}/{name}"}).encode())

    def _batch(self, asked: dict[str, Any]) -> None:
        objects: list[dict[str, Any]] = []
        for each in asked["objects"]:
            missing = {"actions": {"upload": {"href": f"{self.hub.url}/upload/{each['oid']}"}}}
            objects.append({**each, **({} if each["oid"] in self.hub.large else missing)})
        self._send(json.dumps({"transfer": "basic", "objects": objects}).encode())

    def _commit_files(self, repository: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.repositories[repository][self.hub.branches[repository, "main"]])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                del files[value["path"]]
        commit = self.hub.push(repository, files)
        url = f"{self.hub.url}/{repository}/commit/{commit}"
        self._send(json.dumps({"success": True, "commitOid": commit, "commitUrl": url}).encode())

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
    if _is_large(name):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".onnx", ".onnx.data"))
