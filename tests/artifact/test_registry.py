"""Push and pull: same artifact, same manifest; nothing uploaded twice, nothing visible that was not checked."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmforge.artifact import Artifact, docker_config, modelpack, signing, transfer, versions
from llmforge.artifact.oci import OciReference
from llmforge.base.errors import EnvironmentLacks, InputError, UsageError
from llmforge.base.progress import Silent
from llmforge.cli import cli

from ..samples.stored import EVIDENCE, forged, put
from ..servers import oci_registry
from ..servers.oci_registry import Registry, digest

pytest.importorskip("dxf", reason="the extra `registry` is not installed")

FILES = {
    "engine/big": random.Random(0).randbytes(3_000_000),
    "engine/empty": b"",
    "engine/twin": b"graph",
    "triton/model.py": b"pass",
}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with oci_registry.running() as made:
        yield made


@pytest.fixture
def made(tmp_path: Path) -> Artifact:
    return put(tmp_path / "here", files=FILES)


def invoke(*words: str | Path) -> Result:
    done = CliRunner().invoke(cli, list(map(str, words)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def pushed(made: Artifact, registry: Registry, tag: str = "1") -> modelpack.Pushed:
    return modelpack.push(made, OciReference.parse(f"{registry.host}/models/tiny:{tag}"), Silent())


def refused(registry: Registry, out: Path, *words: str | Path, code: int = 5, tag: str = ":1") -> str:
    """Pull, and see that it ends with `code` and leaves nothing; the message."""
    done = invoke("pull", f"{registry.host}/models/tiny{tag}", "--out", out, "--quiet", *words)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {registry.host}/models/tiny{tag}: ")
    assert "\nhint: " in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert not out.exists() or versions.names(out) == []
    assert list(out.glob("*/.building-*")) == []
    return done.stderr


# there and back


def test_there_and_back(made: Artifact, registry: Registry, tmp_path: Path) -> None:
    done = invoke("push", made.path, f"{registry.host}/models/tiny:1", "--json", "--quiet")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    raw = registry.manifests["1"]
    assert facts["digest"] == digest(raw)
    assert facts["files"] == len(made.listed) + 2
    assert facts["uploaded"] == facts["files"] - 2  # the empty one is no bytes, the twin is there already
    pinned = f"{registry.host}/models/tiny@{facts['digest']}"
    done = invoke("pull", pinned, "--out", tmp_path / "there")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'there' / 'tiny' / made.path.name}\n"), done.output
    again = Artifact.open(tmp_path / "there" / "tiny" / made.path.name)
    again.verify()
    assert (again.path / "manifest.json").read_bytes() == (made.path / "manifest.json").read_bytes()
    assert all(path.stat().st_mode & 0o777 == 0o444 for path in again.path.rglob("*") if path.is_file())
    done = invoke("pull", pinned, "--out", tmp_path / "there", "--json", "--quiet")
    assert json.loads(done.stdout)["digest"] == facts["digest"]


def test_it_is_what_modelpack_says(made: Artifact, registry: Registry) -> None:
    pushed(made, registry)
    manifest = json.loads(registry.manifests["1"])
    assert manifest["schemaVersion"] == 2
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    kinds = {layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"] for layer in manifest["layers"]}
    assert kinds == {
        "manifest.json": "application/vnd.cncf.model.weight.config.v1.raw",
        "engine/big": "application/vnd.cncf.model.weight.v1.raw",
        "engine/empty": "application/vnd.cncf.model.weight.v1.raw",
        "engine/model.onnx": "application/vnd.cncf.model.weight.v1.raw",
        "engine/model.onnx.data": "application/vnd.cncf.model.weight.v1.raw",
        "engine/twin": "application/vnd.cncf.model.weight.v1.raw",
        made.evidence[0].path: "application/vnd.cncf.model.doc.v1.raw",
        **dict.fromkeys(EVIDENCE, "application/vnd.cncf.model.doc.v1.raw"),
        "tokenizer/tokenizer.json": "application/vnd.cncf.model.weight.config.v1.raw",
        "triton/model.py": "application/vnd.cncf.model.code.v1.raw",
    }
    for layer in manifest["layers"]:
        content = (made.path / layer["annotations"]["org.cncf.model.filepath"]).read_bytes()
        assert (digest(content), len(content)) == (layer["digest"], layer["size"])
    config = registry.blobs[manifest["config"]["digest"]]
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    assert manifest["config"]["size"] == len(config)
    described = json.loads(config)
    assert set(described) == {"descriptor", "config", "modelfs"}  # the schema allows no more
    assert described["descriptor"]["name"] == "tiny"
    assert described["config"]["format"] == "onnx"
    assert described["modelfs"] == {"type": "layers", "diffIds": [layer["digest"] for layer in manifest["layers"]]}


def test_the_same_artifact_gives_the_same_manifest_and_uploads_nothing(
    made: Artifact, registry: Registry, tmp_path: Path
) -> None:
    first = pushed(made, registry)
    export_format = tmp_path / "elsewhere"
    shutil.copytree(made.path, export_format)
    for path in export_format.rglob("*"):
        path.chmod(0o700)
    again = pushed(Artifact.open(export_format), registry, "2")
    assert again.digest == first.digest
    assert registry.manifests["1"] == registry.manifests["2"]
    assert (again.uploaded, again.uploaded_bytes) == (0, 0)
    other = put(tmp_path / "other", "graph 2", files=FILES)
    changed = {"manifest.json", other.evidence[0].path, "engine/model.onnx"}
    assert pushed(other, registry, "3").uploaded_bytes == sum((other.path / name).stat().st_size for name in changed)


@pytest.mark.filterwarnings("ignore")  # of the libraries that model-signing brings
def test_a_signature_travels_and_can_be_required(made: Artifact, registry: Registry, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="the extra `signing` is not installed")
    from .test_signing import key_pair

    private, public = key_pair(tmp_path, "mine")
    _, other = key_pair(tmp_path, "other")
    out = tmp_path / "there"
    pushed(made, registry)
    said = refused(registry, out, "--require-signature", "--key", public)
    assert "is not signed" in said
    assert ".building" not in said
    signing.sign(made, signing.Signer(private))
    pushed(made, registry)
    assert "does not verify" in refused(registry, out, "--require-signature", "--key", other)
    done = invoke("pull", f"{registry.host}/models/tiny:1", "--out", out, "--require-signature", "--key", public)
    assert done.exit_code == 0, done.output
    assert (out / "tiny" / made.path.name / "model.sig").read_bytes() == (made.path / "model.sig").read_bytes()
    assert "go together" in invoke("pull", f"{registry.host}/models/tiny:1", "--require-signature").stderr


def test_an_artifact_that_was_changed_is_not_pushed(made: Artifact, registry: Registry) -> None:
    file = made.path / "engine/model.onnx"
    for content in (b"grapf", b"graph and more"):
        file.chmod(0o644)
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"was changed after it was published: engine/model\.onnx"):
            pushed(made, registry)
    (made.path / "stray").touch()
    with pytest.raises(InputError, match="not in the manifest or in evidence: stray"):
        pushed(made, registry)
    assert registry.manifests == {}


# connections


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_broke_off(
    made: Artifact, registry: Registry, tmp_path: Path, ranges: bool
) -> None:
    pushed(made, registry)
    registry.cuts, registry.ranges = [1 << 20, 2_000_000, 1 << 20, 1 << 20, 1 << 20], ranges
    registry.cuts = [100, 10_000_000, *registry.cuts] if ranges else [100]
    modelpack.pull(OciReference.parse(f"{registry.host}/models/tiny:1"), tmp_path / "there", Silent())[0].verify()
    assert registry.asked["GET blobs"] > len(made.manifest.files)


def test_a_download_that_never_ends_well_ends(made: Artifact, registry: Registry, tmp_path: Path) -> None:
    pushed(made, registry)
    registry.cuts = [0] * 10
    assert "breaks off after 0 of" in refused(registry, tmp_path / "there")
    assert len(registry.cuts) == 7


def test_nobody_there(tmp_path: Path, registry: Registry, made: Artifact) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        registry.host = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    said = refused(registry, tmp_path / "there", code=8)
    assert f"{registry.host} cannot be reached: Failed to establish a new connection" in said
    done = invoke("push", made.path, f"{registry.host}/models/tiny:1", "--quiet")
    assert done.exit_code == 8
    assert "cannot be reached" in done.stderr
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, 8, "access denied by {host}: 403 (said so)"),
        (429, 8, "{host} answered 429 (said so)"),
        (503, 8, "{host} answered 503 (said so)"),
        (404, 5, "there is no such tag or repository (said so)"),
        (418, 5, "{host} refused the manifest: 418 (said so)"),
    ],
)
def test_errors_of_registries(registry: Registry, tmp_path: Path, status: int, code: int, said: str) -> None:
    registry.forbids = status
    assert said.format(host=registry.host) in refused(registry, tmp_path / "there", code=code)


def test_unknown(made: Artifact, registry: Registry, tmp_path: Path) -> None:
    pushed(made, registry)
    out = tmp_path / "there"
    assert "there is no such tag or repository (MANIFEST_UNKNOWN)" in refused(registry, out, tag=":2")
    assert "there is no such digest or repository" in refused(registry, out, tag=f"@sha256:{'0' * 64}")


# credentials


def log_in(registry: Registry, login: str = "user:pass:word") -> None:
    docker_config.file().parent.mkdir(exist_ok=True)
    auths = {registry.host: {"auth": base64.b64encode(login.encode()).decode()}}
    docker_config.file().write_text(json.dumps({"auths": auths}))


def test_credentials_of_docker(made: Artifact, registry: Registry, tmp_path: Path) -> None:
    registry.login = "user:pass:word"
    said = refused(registry, tmp_path / "there", code=8)
    assert f"access denied by {registry.host}: 401\nhint: docker login {registry.host}" in said
    log_in(registry, "user:wrong")
    assert "access denied" in refused(registry, tmp_path / "there", code=8)
    log_in(registry)
    pushed(made, registry)
    modelpack.pull(OciReference.parse(f"{registry.host}/models/tiny:1"), tmp_path / "there", Silent())[0].verify()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('test "$(cat)" = {host} && echo \'{{"Username": "user", "Secret": "pass:word"}}\'', None),
        ("exit 1", "access denied"),
        ("echo x", "gave no credentials for {host}"),
        ('echo \'{{"Username": "<token>", "Secret": "x"}}\'', "an identity token for {host}, which is not supported"),
        (None, "names the credential helper docker-credential-mine, which is not in PATH"),
    ],
)
def test_credential_helpers(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str | None
) -> None:
    registry.login = "user:pass:word"
    docker_config.file().parent.mkdir()
    docker_config.file().write_text(json.dumps({"credHelpers": {registry.host: "mine"}}))
    if script is not None:
        helper = tmp_path / "docker-credential-mine"
        helper.write_text(f"#!/bin/sh\n{script.format(host=registry.host)}\n")
        helper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = invoke("pull", f"{registry.host}/models/tiny:1", "--out", tmp_path / "there")
    assert done.exit_code == (5 if said is None else 8)
    assert (said or "no such tag").format(host=registry.host) in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "is not a configuration of Docker"),
        ('{"auths": []}', "is not a configuration of Docker"),
        ('{"auths": {"HOST": {"auth": "%"}}}', "the credentials for HOST cannot be read"),
        ('{"auths": {"HOST": {"identitytoken": "x"}}}', "an identity token for HOST, which is not supported"),
        ('{"auths": {"HOST": {}}}', "access denied"),
    ],
)
def test_damaged_credentials(registry: Registry, tmp_path: Path, content: str, said: str) -> None:
    registry.login = "user:word"
    docker_config.file().parent.mkdir()
    docker_config.file().write_text(content.replace("HOST", registry.host))
    done = invoke("pull", f"{registry.host}/models/tiny:1", "--out", tmp_path / "there")
    assert done.exit_code == 8
    assert said.replace("HOST", registry.host) in done.stderr


def test_credentials_go_over_tls_or_nowhere(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a registry that is not on this machine, as far as its name says."""
    registry.login = "user:word"
    log_in(registry, "user:word")
    monkeypatch.setattr(OciReference, "is_local", False)
    done = invoke("pull", f"{registry.host}/models/tiny:1", "--insecure")
    assert done.exit_code == 8
    assert "asks for credentials, and they are not sent over plain HTTP" in done.stderr
    done = invoke("pull", f"{registry.host}/models/tiny:1")
    assert done.exit_code == 8
    assert "cannot be reached" in done.stderr
    assert "hint: check its certificate; --insecure is for a registry without TLS" in done.stderr


@pytest.mark.parametrize("challenge", ["", "Bearer", "Bearer realm=", "Basic realm=\u00e9", 'Bearer realm="ftp://x"'])
def test_challenges_that_mean_nothing(registry: Registry, tmp_path: Path, challenge: str) -> None:
    registry.login, registry.challenge = "user:word", challenge
    log_in(registry, "user:wrong")
    done = invoke("pull", f"{registry.host}/models/tiny:1", "--out", tmp_path / "there")
    assert done.exit_code in (5, 8)
    assert done.stderr.startswith("error: ")


# hostile answers


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Registry], object]:
    def apply(registry: Registry) -> None:
        manifest = json.loads(registry.manifests["1"])
        change(manifest)
        registry.tag("1", manifest)

    return apply


def layer(number: int, **changes: Any) -> Callable[[Registry], object]:
    return edited(lambda manifest: manifest["layers"][number].update(changes))


def path(number: int, value: Any) -> Callable[[Registry], object]:
    return layer(number, annotations={"org.cncf.model.filepath": value})


def ours(**changes: object) -> Callable[[Registry], object]:
    """Put another manifest.json in, with the layer that goes with it."""

    def apply(registry: Registry) -> None:
        manifest = json.loads(registry.manifests["1"])
        old = [registry.blobs[layer["digest"]] for layer in manifest["layers"][:2]]
        for layer, raw in zip(manifest["layers"], forged(*old, **changes), strict=False):
            registry.blobs[digest(raw)] = raw
            layer.update(digest=digest(raw), size=len(raw))
        bound = manifest["layers"][1]
        bound["annotations"]["org.cncf.model.filepath"] = f"evidence/{bound['digest'].removeprefix('sha256:')}.json"
        registry.tag("1", manifest)

    return apply


def blob(number: int, change: Callable[[bytes], bytes]) -> Callable[[Registry], object]:
    def apply(registry: Registry) -> None:
        name = json.loads(registry.manifests["1"])["layers"][number]["digest"]
        registry.blobs[name] = change(registry.blobs[name])

    return apply


RECORD = {"sha256": "0" * 64, "size_bytes": 0}
IMAGE = {"schemaVersion": 2, "config": {"mediaType": "application/vnd.oci.image.config.v1+json"}, "layers": []}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (blob(0, lambda data: data.replace(b"tiny", b"tinx")), "the registry sent a blob that is sha256:"),
        (blob(3, lambda data: data[:-1] + b"!"), "the registry sent a blob that is sha256:"),
        (blob(3, lambda data: data + b"!"), "the registry sent more than 3,000,000 bytes"),
        (blob(3, lambda data: data[:-1]), "breaks off after 2,999,999 of 3,000,000 bytes"),
        (blob(0, lambda data: b""), "breaks off after 0 of"),
        (lambda registry: registry.blobs.pop(digest(FILES["engine/big"])), "refused the blob"),
        (lambda registry: registry.headers.update({"Docker-Content-Digest": "sha256:0"}), ", not sha256:0"),
        (lambda registry: registry.tag("1", b" " * (4 << 20) + b"{}"), "its manifest has more than 4,194,304 bytes"),
        (lambda registry: registry.tag("1", b"{"), "its OCI manifest is not JSON"),
        (lambda registry: registry.tag("1", b"[]"), "its OCI manifest is not JSON"),
        (lambda registry: registry.tag("1", b"[" * 100_000), "its OCI manifest is not JSON"),
        (lambda registry: registry.tag("1", b"\xff"), "its OCI manifest is not JSON"),
        (lambda registry: registry.tag("1", IMAGE), "it is of type 'application/vnd.oci.image.config.v1+json'"),
        (lambda registry: registry.tag("1", {"mediaType": oci_registry.MANIFEST}), "it is of type 'appl"),
        (lambda registry: registry.tag("1", {"mediaType": "application/vnd.oci.image.index.v1+json"}), "an image in"),
        (edited(lambda manifest: manifest.update(artifactType="application/vnd.x")), "of type 'application/vnd.x'"),
        (edited(lambda manifest: manifest.update(mediaType="application/x")), "not an artifact of llmforge"),
        (edited(lambda manifest: manifest.update(config=[], artifactType="")), "its OCI manifest is not JSON"),
        (edited(lambda manifest: manifest.pop("layers")), "layer 0 has no path, type, size or digest"),
        (edited(lambda manifest: manifest.update(layers=[])), "of ModelPack, but it has no layers"),
        (edited(lambda manifest: manifest["layers"].pop(0)), "it begins with 'evidence/"),
        (edited(lambda manifest: manifest["layers"].pop(1)), "there is no evidence about it"),
        (edited(lambda manifest: manifest["layers"].pop()), "it has 11 layers; manifest.json makes 12"),
        (edited(lambda manifest: manifest["layers"].append(manifest["layers"][1])), "it has 13 layers"),
        (edited(lambda manifest: manifest["layers"].insert(1, manifest["layers"][0])), "a layer for 'manifest.json'"),
        (edited(lambda manifest: manifest["layers"].reverse()), "it begins with 'triton/model.py'"),
        (layer(3, size=17), "the layer of engine/big is sha256:"),
        (layer(3, digest=f"sha256:{'0' * 64}"), "the layer of engine/big is sha256:000"),
        (layer(3, digest="sha512:0"), "layer 3 ('engine/big') is not one raw file"),
        (layer(3, digest="sha256:../../x"), "layer 3 ('engine/big') is not one raw file"),
        (layer(3, digest=7), "layer 3 has no path"),
        (layer(3, size=-1), "layer 3 ('engine/big') is not one raw file"),
        (layer(3, size="1"), "layer 3 ('engine/big') is not one raw file"),
        (layer(3, mediaType="application/vnd.cncf.model.weight.v1.tar"), "is not one raw file"),
        (layer(3, annotations=None), "layer 3 has no path"),
        (path(3, "../x"), "a layer for '../x' where 'engine/big' must be"),
        (path(3, "/etc/passwd"), "a layer for '/etc/passwd' where 'engine/big' must be"),
        (path(3, ["x"]), "where 'engine/big' must be"),
        (path(3, "model.sig"), "a layer for 'model.sig' where 'engine/big' must be"),
        (layer(0, size=17 << 20), "at most 16,777,216 are allowed"),
        (ours(files={"../x": RECORD}), "is not a plain path inside the artifact"),
        (ours(files={"/x": RECORD}), "is not a plain path inside the artifact"),
        (ours(files={"a": RECORD, "a/b": RECORD}), "'a/b' lies in a file"),
        (ours(name="../x"), "name '../x' cannot be that of an artifact"),
        (ours(schema=1), "schema 1 is not supported"),
    ],
)  # fmt: skip
def test_hostile_registries(
    made: Artifact, registry: Registry, tmp_path: Path, change: Callable[[Registry], object], said: str
) -> None:
    pushed(made, registry)
    change(registry)
    assert said in refused(registry, tmp_path / "there")
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "there") == ["here"]


def test_hostile_registries_of_many_files(
    made: Artifact, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MOST_FILES", 1000)
    many = ours(files={f"f{n}": RECORD for n in range(1001)})
    test_hostile_registries(made, registry, tmp_path, many, "files; at most 1,000 are allowed")


def test_another_manifest_than_the_digest_says(made: Artifact, registry: Registry, tmp_path: Path) -> None:
    wanted = pushed(made, registry).digest
    edited(lambda manifest: manifest.update(annotations={"a": "b"}))(registry)
    registry.manifests[wanted] = registry.manifests["1"]
    assert f", not {wanted}" in refused(registry, tmp_path / "there", tag=f"@{wanted}")


@pytest.mark.parametrize("location", ["", "http://[", "/nowhere"])
def test_uploads_that_go_nowhere(made: Artifact, registry: Registry, location: str) -> None:
    registry.location = location or " "
    with pytest.raises((InputError, EnvironmentLacks)):
        pushed(made, registry)
    assert registry.manifests == {}


def test_fuzzed_manifests(registry: Registry, tmp_path: Path) -> None:
    """Bytes of the OCI manifest flipped, cut and doubled: the artifact, or an error of ours, and nothing else."""
    made = put(tmp_path / "here")
    pushed(made, registry)
    raw, chance, reference = (
        registry.manifests["1"],
        random.Random(0),
        OciReference.parse(f"{registry.host}/models/tiny:1"),
    )
    ends = {"pulled": 0, "refused": 0}
    for _ in range(80):
        at, count = chance.randrange(len(raw)), chance.randrange(1, 40)
        middle = chance.choice([chance.randbytes(1), b"", raw[at : at + count] * 2, b"-1", b"null", b"[]"])
        registry.tag("1", raw[:at] + middle + raw[at + count :])
        try:
            again = modelpack.pull(reference, tmp_path / "there", Silent())[0]
        except (InputError, UsageError):
            ends["refused"] += 1
        else:
            again.verify()
            assert again.manifest == made.manifest
            ends["pulled"] += 1
        assert list((tmp_path / "there").glob("*/.building-*")) == []
    assert ends["refused"] > 50
    assert sorted(each.name for each in tmp_path.iterdir()) <= ["here", "there"]


def test_killed_at_random_moments(made: Artifact, registry: Registry, tmp_path: Path) -> None:
    pushed(made, registry)
    code = (
        "import pathlib; from llmforge.artifact import modelpack, oci, versions\n"
        "from llmforge.base.progress import Silent\n"
        f"reference = oci.OciReference.parse('{registry.host}/models/tiny:1')\n"
        "import dxf; print('ready', flush=True)\n"
        "while True:\n"
        "    versions.remove([modelpack.pull(reference, pathlib.Path('there'), Silent())[0].path])"
    )
    moments = random.Random(0)
    for _ in range(4):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0, 0.3))
            process.kill()
        for version in versions.listed(tmp_path / "there"):
            Artifact.open(version.path).verify()
    modelpack.pull(OciReference.parse(f"{registry.host}/models/tiny:1"), tmp_path / "there", Silent())[0].verify()
    assert [path.name for path in (tmp_path / "there" / "tiny").glob(".*")] == [".lock"]


# references


def test_references() -> None:
    parse = OciReference.parse
    assert str(parse("localhost/tiny:1")) == "localhost/tiny:1"
    assert parse("localhost:5000/a/b-c__d.e:v1_2.3-x").repository == "a/b-c__d.e"
    assert parse(f"r.example.com/a@sha256:{'a' * 64}").digest == f"sha256:{'a' * 64}"
    assert [parse(f"{host}/a:1").is_local for host in ("127.0.0.1:5", "localhost", "[::1]:80")] == [True] * 3
    assert [parse(f"{host}/a:1").is_local for host in ("127.0.0.1.x.com", "localhost.com:5", "10.0.0.1")] == [False] * 3
    for text in ("tiny:1", "tiny", "a/b:1", "localhost/a", "localhost/A:1", "localhost/a:1/b", "http://localhost/a:1",
                 "localhost/../a:1", "localhost/a:" + "x" * 129, "localhost/a@sha256:0", "localhost/a:1 ",
                 "user@h.de/a:1", "localhost/a:é", "localhost:x/a:1"):  # fmt: skip
        with pytest.raises(UsageError, match="is not REGISTRY/REPOSITORY:TAG or"):
            parse(text)
    with pytest.raises(UsageError, match="is not REGISTRY/REPOSITORY:TAG"):
        parse(f"localhost/a@sha256:{'a' * 64}", digests=False)


# a real one

BINARY = shutil.which("docker-registry") or shutil.which("registry")


@pytest.fixture
def real(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": host},
    }
    (tmp_path / "config.yml").write_text(json.dumps(config))
    assert BINARY is not None
    with subprocess.Popen([BINARY, "serve", str(tmp_path / "config.yml")], stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", int(host.rpartition(":")[2]))) == 0:
                        break
                time.sleep(0.05)
            yield host
        finally:
            process.terminate()


@pytest.mark.skipif(BINARY is None, reason="there is no registry: apt-get install docker-registry")
def test_a_real_registry(real: str, made: Artifact, tmp_path: Path) -> None:
    reference = OciReference.parse(f"{real}/models/tiny:1")
    first = modelpack.push(made, reference, Silent())
    assert first.uploaded_bytes > len(FILES["engine/big"])
    again = modelpack.push(made, OciReference.parse(f"{real}/models/tiny:2"), Silent())
    assert (again.digest, again.uploaded) == (first.digest, 0)
    pulled, pulled_digest = modelpack.pull(reference, tmp_path / "there", Silent())
    assert pulled_digest == first.digest
    assert pulled.manifest == made.manifest
    # … and a client that knows nothing of llmforge
    asked = urllib.request.Request(
        f"http://{real}/v2/models/tiny/manifests/{first.digest}", headers={"Accept": oci_registry.MANIFEST}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        layers = json.load(answer)["layers"]
    for each in layers:
        with urllib.request.urlopen(f"http://{real}/v2/models/tiny/blobs/{each['digest']}", timeout=10) as answer:
            assert answer.read() == (made.path / each["annotations"]["org.cncf.model.filepath"]).read_bytes()
    with pytest.raises(InputError, match="there is no such tag or repository"):
        modelpack.pull(OciReference.parse(f"{real}/models/other:1"), tmp_path / "there", Silent())
