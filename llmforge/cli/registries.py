"""The commands that bring artifacts to an OCI registry, or to the Hub, and back. They import late what they need."""

from __future__ import annotations

from pathlib import Path

import click

from llmforge.base import extras
from llmforge.cli import output
from llmforge.cli.parameters import ARTIFACT, keep_quiet, out_option, refuse_given, require_given
from llmforge.cli.provenance import arrival_check, signature_options

_INSECURE = click.option("--insecure", is_flag=True, help="Use plain HTTP. Registries on this machine get it anyway.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
_QUIET = click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")

_PUSH = """\b
Examples:
  llmforge push NAME/VERSION registry.example.com/models/NAME:VERSION
  llmforge push NAME:prod localhost:5000/NAME:prod
  llmforge push NAME:prod hf://ORG/NAME
"""


@click.command(epilog=_PUSH)
@click.argument("artifact", type=ARTIFACT)
@click.argument("reference", metavar="REGISTRY/REPOSITORY:TAG|hf://ORG/NAME")
@_INSECURE
@click.option("--private", is_flag=True, help="Of hf://: make the repository private, where it is not there yet.")
@_JSON
@_QUIET
def push(artifact: Path, reference: str, insecure: bool, private: bool, as_json: bool, quiet: bool) -> None:
    """Push ARTIFACT to an OCI registry, or to the Hugging Face Hub.

    To a registry, the format is CNCF ModelPack. Files that the registry has are not uploaded again, and the same
    artifact gives the same digest. Log in with `docker login`. The last line of standard output is the reference by
    digest; of the Hub, by commit.
    """
    if reference.startswith("hf://"):
        refuse_given("hf://", "insecure")
        _push_to_hub(artifact, reference, private=private, as_json=as_json, quiet=quiet)
        return
    require_given("hf://ORG/NAME", "private")
    if (lack := extras.trouble("dxf")) is not None:
        raise lack
    from llmforge.artifact import modelpack
    from llmforge.artifact.oci import OciReference
    from llmforge.cli import console
    from llmforge.gates import confirmed
    from llmforge.metrics.units import size

    to = OciReference.parse(reference, digests=False)
    opened = confirmed.open_artifact(artifact)
    with console.progress(quiet=quiet) as progress:
        pushed = modelpack.push(opened, to, progress, insecure=insecure)
    if as_json:
        facts = {"reference": str(to), "digest": pushed.digest, "files": pushed.files, "size_bytes": pushed.size_bytes}
        output.write_json({**facts, "uploaded": pushed.uploaded, "uploaded_bytes": pushed.uploaded_bytes})
        return
    if not quiet:
        console.say(f"uploaded {pushed.uploaded} of {pushed.files} files, {size(pushed.uploaded_bytes)}")
    output.write_lines(to.at(pushed.digest))


def _push_to_hub(artifact: Path, reference: str, *, private: bool, as_json: bool, quiet: bool) -> None:
    if (lack := extras.trouble("huggingface_hub")) is not None:
        raise lack
    from llmforge.artifact import hub_push
    from llmforge.cli import console
    from llmforge.gates import confirmed
    from llmforge.metrics.units import size

    name = hub_push.repository(reference)
    opened = confirmed.open_artifact(artifact)
    with console.progress(quiet=quiet) as progress:
        pushed = hub_push.push(opened, name, progress, private=private)
    at = f"{hub_push.SCHEME}{name}@{pushed.commit}"
    if as_json:
        facts = {"reference": at, "commit": pushed.commit, "files": pushed.files, "size_bytes": pushed.size_bytes}
        output.write_json({**facts, "removed": pushed.removed})
        return
    if not quiet:
        console.say(f"{pushed.files} files, {size(pushed.size_bytes)}; {pushed.removed} removed that were there before")
    output.write_lines(at)


_PULL = """\b
Examples:
  llmforge pull registry.example.com/models/NAME:VERSION
  llmforge pull localhost:5000/NAME@sha256:DIGEST --require-signature --key PUB.pem
"""


@click.command(epilog=_PULL)
@click.argument("reference", metavar="REGISTRY/REPOSITORY:TAG|@DIGEST")
@out_option("Publish the artifact to DIR/NAME/VERSION.")
@_INSECURE
@signature_options
@_JSON
@_QUIET
def pull(
    reference: str, out: Path, insecure: bool, require_signature: bool, key: Path | None, as_json: bool, quiet: bool
) -> None:
    """Pull an artifact from an OCI registry.

    Nothing is visible before every byte was checked. The last line of standard output is the path of the artifact.
    """
    if (lack := extras.trouble("dxf")) is not None:
        raise lack
    from llmforge.artifact import modelpack
    from llmforge.artifact.oci import OciReference
    from llmforge.cli import console

    at = OciReference.parse(reference)
    check = arrival_check(require_signature, key)
    with console.progress(quiet=quiet) as progress:
        made, digest = modelpack.pull(at, out, progress, insecure=insecure, check=check)
    path = out / made.manifest.name / made.manifest.version
    if as_json:
        output.write_json({"artifact": str(path), "digest": digest})
    else:
        output.write_lines(str(path))
