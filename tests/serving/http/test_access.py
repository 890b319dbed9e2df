"""Who may come in: API keys, Host and Origin headers, request ids, TLS, and the end of a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from starlette.testclient import TestClient

from llmforge.artifact import Artifact
from llmforge.base.errors import InputError
from llmforge.serving import Engine, load
from llmforge.serving import http as serve
from llmforge.serving.http.app import create_app
from llmforge.serving.http.server import Address, make_server

from ...samples.small_artifact import publish_small

KEYS = ("0123456789abcdef", "fedcba9876543210")
API_KEYS = tuple(serve.ApiKey(key, f"key-{number}") for number, key in enumerate(KEYS, 1))
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("policy"), sample_checkpoint)


@pytest.fixture(scope="module")
def engine(small: Artifact) -> Iterator[Engine]:
    with Engine(load(small.path)) as engine:
        yield engine


def client(
    engine: Engine,
    policy: serve.AccessPolicy,
    state: serve.ServerState | None = None,
    log: list[serve.AccessRecord] | None = None,
) -> TestClient:
    state = state or serve.ServerState()
    app = serve.AuthMiddleware(create_app(engine, "small", state), policy, state, None if log is None else log.append)
    return TestClient(app, base_url="http://127.0.0.1:8000")


def test_one_of_the_keys_is_wanted_everywhere_but_by_probes(engine: Engine) -> None:
    asking = client(engine, serve.AccessPolicy(keys=API_KEYS))
    for path in ("/v1/models", "/metrics", "/nothing"):
        cases: list[dict[str, str | bytes]] = [
            {},
            {"Authorization": "Bearer"},
            {"Authorization": f"Bearer {KEYS[0]}x"},
            {"Authorization": f"Basic {KEYS[0]}"},
            {"Authorization": b"Bearer \xff"},
        ]
        for headers in cases:
            refused = asking.get(path, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
    for key in KEYS:
        assert asking.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert asking.get("/health").status_code == asking.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("listens_on", "allowed", "host", "status"),
    [
        ("127.0.0.1", (), "localhost:8000", 200),
        ("127.0.0.1", (), "[::1]:8000", 200),
        ("::1", (), "evil.example:8000", 421),
        ("localhost", (), "127.0.0.1.evil.example", 421),
        ("127.0.0.1", ("models.example",), "models.example", 200),
        ("0.0.0.0", (), "anything.example", 200),
        ("0.0.0.0", ("models.example",), "evil.example", 421),
    ],
)
def test_names_that_rebind_are_refused(
    engine: Engine, listens_on: str, allowed: tuple[str, ...], host: str, status: int
) -> None:
    asking = client(engine, serve.AccessPolicy.of(listens_on, (), allowed, ()))
    assert asking.get("/v1/models", headers={"Host": host}).status_code == status


def test_pages_of_other_sites_are_refused_unless_they_are_allowed(engine: Engine) -> None:
    page = {"Origin": "https://page.example"}
    assert client(engine, serve.AccessPolicy()).get("/v1/models", headers=page).status_code == 403
    own = {"Origin": "http://127.0.0.1:8000"}
    assert client(engine, serve.AccessPolicy()).get("/v1/models", headers=own).status_code == 200
    asking = client(engine, serve.AccessPolicy(keys=API_KEYS, origins=("https://page.example",)))
    asked = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = asking.options("/v1/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    answer = asking.get("/v1/models", headers={**page, "Authorization": f"Bearer {KEYS[0]}"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://page.example")
    assert asking.get("/v1/models", headers={"Origin": "https://other.example"}).status_code == 403


def test_requests_have_ids_and_are_told_of(engine: Engine) -> None:
    log: list[serve.AccessRecord] = []
    asking = client(engine, serve.AccessPolicy(), log=log)
    assert asking.get("/v1/models", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = asking.get("/nothing", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
    assert re.fullmatch("req-[0-9a-f]{24}", made)
    assert [(each.request_id, each.method, each.path, each.status) for each in log] == [
        ("abc-1", "GET", "/v1/models", 200),
        (made, "GET", "/nothing", 404),
    ]


def test_a_server_that_drains_is_not_ready_and_refuses(engine: Engine) -> None:
    state = serve.ServerState()
    asking = client(engine, serve.AccessPolicy(), state)
    assert asking.get("/ready").status_code == 200
    state.draining = True
    assert asking.get("/health").status_code == 200
    for answer in (asking.get("/ready"), asking.post("/v1/completions", json={"prompt": "a"})):
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 and its key."""
    import datetime
    import ipaddress

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(secret)
    return folder / "cert.pem", folder / "key.pem"


def test_the_command_with_tls_keys_and_an_access_log(small: Artifact, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    command = [
        sys.executable, "-m", "llmforge", "serve", str(small.path), "--port", "0", "--tls-cert", str(cert),
        "--tls-key", str(key), "--access-log", "--log-format", "json",
    ]  # fmt: skip
    environment = {**os.environ, "LLMFORGE_API_KEYS": ",".join(KEYS)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"https://127\.0\.0\.1:(\d+)/v1", line):
                break
        assert found, lines
        trusted = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", int(found[1]), timeout=60, context=trusted)
        with contextlib.closing(connection):
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEYS[1]}"})
            assert connection.getresponse().status == 200
        access = json.loads(server.stderr.readline())
        assert (access["event"], access["path"], access["status"]) == ("access", "/v1/models", 200)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_a_certificate_that_cannot_be_used_is_told(engine: Engine, tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path)
    (tmp_path / "other.pem").write_text("none")
    os.mkfifo(tmp_path / "fifo.pem")  # would be waited for
    told = {
        "other.pem": "no certificate with its private key",
        "missing.pem": "missing.pem: cannot be read: No such file",
        "fifo.pem": "fifo.pem: cannot be read: not a regular file",
    }
    for name, message in told.items():
        with pytest.raises(InputError, match=message):
            make_server(create_app(engine, "small"), Address(certificate=cert, private_key=tmp_path / name))
        with pytest.raises(InputError, match=message):
            make_server(create_app(engine, "small"), Address(certificate=tmp_path / name, private_key=cert))
