"""The commands about where an artifact comes from. Like all commands they import what they need when they run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras, process, small_file
from llmforge.base.errors import UsageError, VerificationError
from llmforge.cli import output
from llmforge.cli.parameters import ARTIFACT, PATH, grouped, keep_quiet
from llmforge.cli.recorded import Inputs, inputs_options

if TYPE_CHECKING:
    from llmforge.artifact import Artifact, EvidenceRecord
    from llmforge.artifact.transfer import Check

_REPRODUCE = """\b
Examples:
  llmforge reproduce NAME/VERSION
  llmforge reproduce artifacts/NAME/VERSION --checkpoint CHECKPOINT --text calibration.jsonl
"""


@click.command(epilog=_REPRODUCE)
@click.argument("artifact", type=ARTIFACT)
@inputs_options
@click.option("--out", type=PATH, help="Keep what is built in this folder; by default it is deleted.")
@click.option("--json", "as_json", is_flag=True, help="Write the comparison as JSON.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
def reproduce(
    artifact: Path,
    inputs: Inputs,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Build ARTIFACT again and compare the two file by file.

    The artifact records its recipe and the digests of its checkpoint and texts, but does not hold them. Nothing is
    measured. If the contents differ, the command says which stage differs first and by how much, and ends with 7.
    """
    process.prepare()
    extras.require("build")
    inputs.check()
    from tempfile import TemporaryDirectory

    from llmforge.cli import console
    from llmforge.diagnosis import reproducing

    with console.progress(quiet=quiet) as progress, TemporaryDirectory() as scratch:
        loaded = inputs.load(artifact, Path(scratch))
        found = reproducing.reproduce(artifact, loaded, out, progress)
    if as_json:
        output.write_json({**found.model_dump(mode="json"), "equal": found.equal})
    else:
        output.write_lines(*found.lines())
    if not found.equal:
        raise VerificationError(
            f"{artifact}: was not reproduced: {len(found.files)} files differ",
            hint="the comparison lists what differs in code, packages and machine",
        )


_SIGN = """\b
Examples:
  llmforge sign artifacts/NAME/VERSION --key KEY.pem
  llmforge sign artifacts/NAME/VERSION --key KEY.pem --certificate CERT.pem --chain INTERMEDIATE.pem
"""


@click.command(epilog=_SIGN)
@click.argument("artifact", type=ARTIFACT)
@click.option("--key", type=PATH, required=True, help="Private key, PEM: P-256, P-384 or P-521.")
@click.option("--certificate", type=PATH, help="Certificate of the key, PEM.")
@click.option("--chain", type=PATH, multiple=True, help="Certificate between it and the authority. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the path of the signature as JSON.")
def sign(artifact: Path, key: Path, certificate: Path | None, chain: tuple[Path, ...], as_json: bool) -> None:
    """Sign every file of ARTIFACT.

    The signature is ARTIFACT/model.sig, a Sigstore bundle as `model_signing verify` reads it.
    """
    from llmforge.artifact import signing
    from llmforge.gates import confirmed

    if chain and certificate is None:
        raise UsageError("--chain requires --certificate")
    encrypted = certificate is None and b"ENCRYPTED" in small_file.read(key, signing.KEY_BYTES, error=UsageError)
    password = click.prompt(f"Password of {key}", hide_input=True, err=True) if encrypted else None
    signature = str(signing.sign(confirmed.open_artifact(artifact), signing.Signer(key, certificate, chain, password)))
    if as_json:
        output.write_json({"signature": signature})
    else:
        output.write_lines(signature)


_VERIFY = """\b
Examples:
  llmforge verify artifacts/NAME/VERSION
  llmforge verify artifacts/NAME/VERSION --key PUB.pem
"""


@click.command(epilog=_VERIFY)
@click.argument("artifact", type=ARTIFACT)
@click.option("--key", type=PATH, help="Public key that must have signed it, PEM.")
@click.option(
    "--authority", type=PATH, multiple=True, help="Certificate that must have issued the signer's. Repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print what holds as JSON.")
def verify(artifact: Path, key: Path | None, authority: tuple[Path, ...], as_json: bool) -> None:
    """Check every byte of ARTIFACT, and recompute its verdict from the measurements.

    Without a signature, digests show that nothing was damaged, but not who built it: only --key or --authority stop
    someone who recomputes all of them.
    """
    from llmforge.artifact import Artifact

    opened = Artifact.open(artifact)
    lines = verified(opened, key, authority)
    if not as_json:
        output.write_lines(*lines)
        return
    output.write_json(
        {
            "artifact": str(opened.path),
            "content_digest": opened.manifest.content_digest,
            "verdict": opened.verdict,
            "signature_checked": key is not None or bool(authority),
            "holds": lines,
        }
    )


def verified(opened: Artifact, key: Path | None = None, authority: tuple[Path, ...] = ()) -> list[str]:
    """Check an artifact, its verdicts, and its signature where `key` or `authority` is given; say what holds."""
    from llmforge.artifact.sealed import SIGNATURE, effective
    from llmforge.gates import verdict

    signed = None if key is None and not authority else verify_signature(opened, key, authority)
    if signed is None:
        opened.verify()
    verdict.recompute(opened)
    of_evidence = len(opened.listed) - len(opened.manifest.files) + len(opened.evidence)
    found = effective(opened.evidence if signed is None else signed)
    lines = [f"verified: {len(opened.manifest.files)} files of content, {of_evidence} of evidence; gates: {found}"]
    if signed is not None:
        later = len(opened.evidence) - len(signed)
        what = "record of evidence" if later == 1 else "records of evidence"
        lines.append(f"signed by {key or authority[0]}{f'; {later} {what} came later, unsigned' if later else ''}")
    elif (opened.path / SIGNATURE).exists():
        lines.append("signature not checked: give --key or --authority")
    else:
        lines.append("unsigned: digests show damage, not who built it")
    return lines


def verify_signature(
    opened: Artifact, key: Path | None, authority: tuple[Path, ...], source: str | None = None
) -> tuple[EvidenceRecord, ...]:
    """Check an artifact, which messages call `source`, and its signature; return the records that it covers."""
    from llmforge.artifact import signing

    if key is not None and authority:
        raise UsageError("--key cannot be used with --authority", hint="remove one of them")
    return signing.verify(opened, signing.Trust(key, authority), source)


loading_options = grouped(  # of a command that loads an artifact
    click.option(
        "--allow", type=click.Choice(["fail", "inconclusive"]), metavar="VERDICT",
        help="Load ARTIFACT even if its gates ended with this verdict: fail or inconclusive.",
    ),
    click.option("--verify", "rehash", is_flag=True, help="Hash every file, even if it was hashed before."),
)  # fmt: skip


def admit(
    opened: Artifact,
    allow: str | None,
    rehash: bool,
    *,
    besides: Collection[str] = (),
    require_signature: bool = False,
    key: Path | None = None,
) -> None:
    """Refuse what is damaged, forged, not signed where it must be, or failed its gates; warn where none decided.

    Of its files those are hashed that the runtime reads, and those whose paths begin with one of `besides`.
    """
    from llmforge.artifact import admission
    from llmforge.cli import console
    from llmforge.gates import confirmed

    confirmed.confirm(opened)
    signed = required(opened, require_signature, key)
    parts = (*admission.LOADED, *besides)
    counting = None if signed is None else [record.digest for record in signed]
    for note in admission.admit(opened.path, allow=allow, rehash=rehash, parts=parts, signed=counting).notes:
        console.say(f"warning: {note}", always=True)


signature_options = grouped(  # of a command that runs only what is signed
    click.option("--require-signature", is_flag=True, help="Refuse an artifact that --key did not sign."),
    click.option("--key", type=PATH, help="With --require-signature: the public key, PEM."),
)


def required(opened: Artifact, require_signature: bool, key: Path | None) -> tuple[EvidenceRecord, ...] | None:
    """Refuse an artifact that is not signed by `key`, where a signature is required; return the signed records."""
    _check_pair(require_signature, key)
    return verify_signature(opened, key, ()) if require_signature else None


def arrival_check(require_signature: bool, key: Path | None) -> Check:
    """Make what refuses an artifact from elsewhere that is forged, or not signed by `key` where it must be."""
    from llmforge.gates import confirmed

    _check_pair(require_signature, key)
    if require_signature and (lack := extras.trouble("model_signing")) is not None:  # before anything is fetched
        raise lack

    def check(opened: Artifact, source: str) -> None:
        confirmed.confirm(opened, source)
        if require_signature:
            verify_signature(opened, key, (), source)

    return check


def _check_pair(require_signature: bool, key: Path | None) -> None:
    if require_signature != (key is not None):
        raise UsageError("--require-signature and --key go together", hint="give both or neither")
