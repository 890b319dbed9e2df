"""Signatures: what is whole and signed is taken; a file, manifest, key or signature that was swapped is not."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("model_signing", reason="the extra `signing` is not installed")
pytest.importorskip("OpenSSL", reason="the extra `signing` is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llmforge.artifact import Artifact, signing
from llmforge.base.errors import InputError
from llmforge.cli import cli
from llmforge.recipe import ServingSpec

from ..samples import published, stored

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries that model-signing brings


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments])


def key_pair(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Write a private key and its public half."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(_pem(key, password))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def _pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    encryption = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("made")
    artifact = published.random_decoder(folder, sample_checkpoint, max_context=64, max_batch=2, serving=ServingSpec())
    return artifact.path


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "artifact")
    return tmp_path / "artifact"


def rewrite(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def one_message(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    text = " ".join(result.stderr.split())
    assert text.startswith("error: ")
    assert text.count("error: ") == 1
    assert "Traceback" not in text
    for word in words:
        assert word in text


def test_what_is_signed_verifies_and_still_matches_its_manifest(artifact: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "key")
    assert call("sign", artifact, "--key", private).exit_code == 0
    assert call("sign", artifact, "--key", private).exit_code == 0  # again: the signature is replaced
    done = call("verify", artifact, "--key", public)
    assert done.exit_code == 0, done.output
    assert f"signed by {public}" in done.stdout
    assert call("verify", artifact).exit_code == 0
    assert call("inspect", artifact, "--verify").exit_code == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_tool_of_the_format_takes_it(artifact: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "key")
    call("sign", artifact, "--key", private)
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(artifact)]
    options = ["--signature", str(artifact / "model.sig"), "--public_key", str(public)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_swapped_file_is_refused(artifact: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "key")
    call("sign", artifact, "--key", private)
    rewrite(artifact / "tokenizer/tokenizer.json", b"{}")
    one_message(call("verify", artifact, "--key", public), 5, "changed: tokenizer/tokenizer.json")


def forge(artifact: Path) -> None:
    """Change content and evidence, and compute all digests anew, as whoever knows the format would."""
    (record,) = (artifact / "evidence").glob("*.json")
    raw, bound = stored.forged((artifact / "manifest.json").read_bytes(), record.read_bytes(), target="cpu-avx2")
    rewrite(artifact / "manifest.json", raw)
    record.unlink()
    (artifact / "evidence" / f"{hashlib.sha256(bound).hexdigest()}.json").write_bytes(bound)


def test_who_computes_every_digest_anew_is_stopped_by_a_signature_alone(artifact: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "key")
    call("sign", artifact, "--key", private)
    forge(artifact)
    done = call("verify", artifact)
    assert done.exit_code == 0, done.output  # it contradicts nothing
    assert "signature not checked: give --key or --authority" in done.stdout
    one_message(call("verify", artifact, "--key", public), 5, "does not verify")
    (artifact / "model.sig").unlink()
    assert "unsigned: digests show damage, not who built it" in call("verify", artifact).stdout


def test_evidence_that_comes_later_is_told_as_unsigned(tmp_path: Path) -> None:
    """It neither breaks a signature nor counts where one is required."""
    private, public = key_pair(tmp_path, "key")
    gates = {"tpot_p50_ms": {"max": 5}}
    slow = stored.latency(tpot_ms=7.0)
    made = stored.put(tmp_path / "out", gates=gates, latency=slow).path
    call("sign", made, "--key", private)
    stored.put(tmp_path / "out", gates=gates, days=1)
    done = call("verify", made, "--key", public)
    assert done.exit_code == 0, done.output
    assert "gates: fail" in done.stdout
    assert f"signed by {public}; 1 record of evidence came later, unsigned" in done.stdout
    assert "gates: pass" in call("verify", made).stdout
    one_message(call("run", made, "a", "--require-signature", "--key", public), 3, "the verdict of tiny", "FAIL")
    call("sign", made, "--key", private)
    assert "came later" not in call("verify", made, "--key", public).stdout


def test_a_swapped_key_is_refused(artifact: Path, tmp_path: Path) -> None:
    _, public = key_pair(tmp_path, "key")
    other, _ = key_pair(tmp_path, "other")
    call("sign", artifact, "--key", other)
    one_message(call("verify", artifact, "--key", public), 5, "does not verify", public.name)


def test_an_added_file_is_refused_even_one_of_git(artifact: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "key")
    call("sign", artifact, "--key", private)
    (artifact / ".gitattributes").write_text("* text")
    one_message(call("verify", artifact, "--key", public), 5, "not in the manifest or in evidence: .gitattributes")


@pytest.mark.parametrize("kind", ["missing", "link", "empty", "list", "text", "other bundle"])
def test_what_is_no_signature_is_refused(kind: str, artifact: Path, tmp_path: Path) -> None:
    _, public = key_pair(tmp_path, "key")
    signature = artifact / "model.sig"
    if kind == "link":
        (tmp_path / "elsewhere").write_text("{}")
        signature.symlink_to(tmp_path / "elsewhere")
    elif kind != "missing":
        contents = {"empty": b"", "list": b"[]", "text": b"\xff\xfe", "other bundle": b'{"verificationMaterial": {}}'}
        signature.write_bytes(contents[kind])
    one_message(call("verify", artifact, "--key", public), 5, "sign")


def test_a_damaged_signature_never_verifies_as_something_else(artifact: Path, tmp_path: Path) -> None:
    """Bits of the bundle flip; where it still verifies, only white space or what is not signed changed."""
    private, public = key_pair(tmp_path, "key")
    call("sign", artifact, "--key", private)
    whole = (artifact / "model.sig").read_bytes()
    payload = json.loads(whole)["dsseEnvelope"]["payload"]
    rng = random.Random(0)
    opened, refused = Artifact.open(artifact), 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        rewrite(artifact / "model.sig", bytes(damaged))
        try:
            signing.verify(opened, signing.Trust(key=public))
        except InputError:
            refused += 1
        else:
            assert json.loads(bytes(damaged))["dsseEnvelope"]["payload"].rstrip("=") == payload.rstrip("=")
    assert refused > 50


def test_a_signature_that_leaves_files_out_is_refused(artifact: Path, tmp_path: Path) -> None:
    from model_signing import hashing
    from model_signing import signing as library

    private, public = key_pair(tmp_path, "key")
    partial = hashing.Config().use_file_serialization(hashing_algorithm="sha256")
    partial.set_ignored_paths(paths=["model.sig", "engine"], ignore_git_paths=False)
    config = library.Config().set_hashing_config(partial).use_elliptic_key_signer(private_key=private)
    config.sign(artifact, artifact / "model.sig")
    one_message(call("verify", artifact, "--key", public), 5)


def test_keys_that_cannot_be_used_are_named(artifact: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "key")
    junk = tmp_path / "junk.pem"
    junk.write_text("no key")
    one_message(call("sign", artifact, "--key", junk), 2, "junk.pem", "elliptic curve", "hint:")
    one_message(call("sign", artifact, "--key", tmp_path / "absent.pem"), 2, "absent.pem", "hint:")
    call("sign", artifact, "--key", private)
    one_message(call("verify", artifact, "--key", junk), 2, "junk.pem", "hint:")
    one_message(call("verify", artifact, "--key", public, "--authority", junk), 2, "--authority")


def test_an_encrypted_key_asks_for_its_password(artifact: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "key", b"secret")
    done = CliRunner().invoke(cli, ["sign", str(artifact), "--key", str(private)], input="secret\n")
    assert done.exit_code == 0, done.output
    assert call("verify", artifact, "--key", public).exit_code == 0
    wrong = CliRunner().invoke(cli, ["sign", str(artifact), "--key", str(private)], input="wrong\n")
    assert wrong.exit_code == 2


def test_what_was_changed_is_not_signed(artifact: Path, tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path, "key")
    rewrite(artifact / "tokenizer/tokenizer.json", b"{}")
    one_message(call("sign", artifact, "--key", private), 5, "changed: tokenizer/tokenizer.json")
    assert not (artifact / "model.sig").exists()


def authority(folder: Path, name: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate, Path]:
    """Make a certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = issue(key, name, key, name, ca=True)
    file = folder / f"{name}.crt"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate, file


def issue(
    own: ec.EllipticCurvePrivateKey, name: str, issuer: ec.EllipticCurvePrivateKey, by: str, *, ca: bool
) -> x509.Certificate:
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=ca, crl_sign=ca, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]))
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(issuer, hashes.SHA256())
    )


def test_certificates_verify_by_their_authority_alone(artifact: Path, tmp_path: Path) -> None:
    ca_key, _, ca_file = authority(tmp_path, "ours")
    _, _, foreign = authority(tmp_path, "theirs")
    own = ec.generate_private_key(ec.SECP256R1())
    key, certificate = tmp_path / "signer.pem", tmp_path / "signer.crt"
    key.write_bytes(_pem(own))
    issued = issue(own, "signer", ca_key, "ours", ca=False)
    certificate.write_bytes(issued.public_bytes(serialization.Encoding.PEM))
    done = call("sign", artifact, "--key", key, "--certificate", certificate, "--chain", ca_file)
    assert done.exit_code == 0, done.output
    good = call("verify", artifact, "--authority", ca_file)
    assert good.exit_code == 0, good.output
    one_message(call("verify", artifact, "--authority", foreign), 5, "does not verify")


@pytest.mark.parametrize("command", [["serve"], ["run"]])
def test_what_is_not_signed_is_not_run(command: list[str], artifact: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "key")
    prompt = ["a", "--max-tokens", "2"] if command == ["run"] else []
    required = ["--require-signature", "--key", public]
    one_message(call(*command, artifact, *prompt, *required), 5, "is not signed", "hint:")
    one_message(call(*command, artifact, *prompt, "--require-signature"), 2, "go together")
    call("sign", artifact, "--key", private)
    if command == ["run"]:
        assert call("run", artifact, *prompt, *required).exit_code == 0
    rewrite(artifact / "tokenizer/tokenizer.json", b"{}")
    one_message(call(*command, artifact, *prompt, *required), 5, "changed")
