"""The commands about where an artifact comes from. Like all commands they import what they need when they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base import extras, process, small_file
from llmforge.base.errors import UsageError, VerificationError
from llmforge.cli import output
from llmforge.cli.parameters import ARTIFACT, PATH

if TYPE_CHECKING:
    from llmforge.artifact import Artifact

_REPRODUCE = """\b
Examples:
  llmforge reproduce artifacts/NAME/VERSION --recipe recipes/quickstart.yaml
  llmforge reproduce artifacts/NAME/VERSION --checkpoint CHECKPOINT --text calibration.jsonl
"""


@click.command(epilog=_REPRODUCE)
@click.argument("artifact", type=ARTIFACT)
@click.option("--recipe", type=PATH, help="The recipe that the artifact was built from.")
@click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="With --recipe: as for the build. Repeatable."
)
@click.option("--checkpoint", type=PATH, help="Without --recipe: the checkpoint's folder.")
@click.option("--text", "texts", type=PATH, multiple=True, help="Without --recipe: a text of the recipe. Repeatable.")
@click.option("--out", type=PATH, help="Keep what is built in this folder; by default it is deleted.")
@click.option("--json", "as_json", is_flag=True, help="Write the comparison as JSON.")
@click.option("--quiet", is_flag=True, help="Hide progress.")
def reproduce(
    artifact: Path,
    recipe: Path | None,
    overrides: tuple[str, ...],
    checkpoint: Path | None,
    texts: tuple[Path, ...],
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
    if (recipe is None) == (checkpoint is None):
        raise UsageError("give either --recipe or --checkpoint with the texts")
    if recipe is None and overrides:
        raise UsageError("--set requires --recipe")
    if recipe is not None and texts:
        raise UsageError("--text cannot be used with --recipe")
    from tempfile import TemporaryDirectory

    from llmforge.build import reproducing
    from llmforge.cli import console
    from llmforge.recipe import Recipe

    with console.progress(quiet=quiet) as progress, TemporaryDirectory() as scratch:
        if recipe is not None:
            loaded = Recipe.load(recipe, overrides)
        else:
            assert checkpoint is not None
            loaded = reproducing.recorded(artifact, checkpoint, texts, Path(scratch))
        found = reproducing.reproduce(artifact, loaded, out, progress)
    if as_json:
        output.write_json({**found.model_dump(mode="json"), "equal": found.equal})
    else:
        click.echo("\n".join(found.lines()))
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
def sign(artifact: Path, key: Path, certificate: Path | None, chain: tuple[Path, ...]) -> None:
    """Sign every file of ARTIFACT.

    The signature is ARTIFACT/model.sig, a Sigstore bundle as `model_signing verify` reads it.
    """
    from llmforge.artifact import Artifact, signing

    if chain and certificate is None:
        raise UsageError("--chain requires --certificate")
    encrypted = certificate is None and b"ENCRYPTED" in small_file.read(key, signing.KEY_BYTES, error=UsageError)
    password = click.prompt(f"Password of {key}", hide_input=True, err=True) if encrypted else None
    click.echo(str(signing.sign(Artifact.open(artifact), signing.Signer(key, certificate, chain, password))))


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
def verify(artifact: Path, key: Path | None, authority: tuple[Path, ...]) -> None:
    """Check every byte of ARTIFACT against its manifest, and its signature.

    Without --key or --authority only the manifest is checked, which anyone could have written.
    """
    from llmforge.artifact import Artifact

    opened = Artifact.open(artifact)
    if key is None and not authority:
        opened.verify()
        click.echo(f"verified: {len(opened.manifest.files)} files match the manifest; no signature was asked for")
        return
    check(opened, key, authority)
    click.echo(f"verified: {len(opened.manifest.files)} files and the manifest, signed by {key or authority[0]}")


def check(opened: Artifact, key: Path | None, authority: tuple[Path, ...]) -> None:
    """Check an artifact and its signature."""
    from llmforge.artifact import signing

    if key is not None and authority:
        raise UsageError("--key cannot be used with --authority", hint="remove one of them")
    signing.verify(opened, signing.Trust(key, authority))


def signature_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a command that runs only what is signed."""
    options = (
        click.option("--require-signature", is_flag=True, help="Refuse ARTIFACT unless it is signed by --key."),
        click.option("--key", type=PATH, help="With --require-signature: the public key, PEM."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def required(opened: Artifact, require_signature: bool, key: Path | None) -> None:
    """Refuse an artifact that is not signed by `key`, where a signature is required."""
    if require_signature != (key is not None):
        raise UsageError("--require-signature and --key go together", hint="give both or neither")
    if require_signature:
        check(opened, key, ())
