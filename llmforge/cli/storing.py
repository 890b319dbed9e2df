"""The commands that keep artifacts: list, tag, promote, remove, export, import. They import late what they need."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmforge.base import folders
from llmforge.base.errors import ForgedVerdict, GateFailed, GateInconclusive, UsageError
from llmforge.cli import output
from llmforge.cli.parameters import ARTIFACT, LOCATION, NATURAL, PATH, VERSION, out_option, refuse_given
from llmforge.cli.provenance import arrival_check, signature_options

if TYPE_CHECKING:
    from llmforge.artifact import Artifact
    from llmforge.artifact.remote import Url
    from llmforge.artifact.tags import Move
    from llmforge.artifact.versions import Version
    from llmforge.gates.decision import Verdict
    from llmforge.triton.repository import TritonModel
    from llmforge.triton.vllm import Exporter

_OUT = "Folder of the artifacts."
_JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON.")

_LS = """\b
Examples:
  llmforge ls
  llmforge ls NAME --history    # where its tags were
"""


@click.command(epilog=_LS)
@click.argument("name", required=False)
@click.option("--history", is_flag=True, help="Show every move of the tags instead of the versions.")
@out_option(_OUT)
@_JSON
def ls(name: str | None, history: bool, out: Path, as_json: bool) -> None:
    """List artifacts, the newest version of each name first.

    Shows how the gates ended, size, date, target and tags. `forged` gates do not follow from what was measured.
    """
    from llmforge.artifact import versions

    found = versions.listed(out, name)
    if history:
        _show_history(dict.fromkeys(each.path.parent for each in found), as_json)
    elif as_json:
        output.write_json([_facts(each, _damage(each)) for each in found])
    elif found:
        rows = map(_row, found, map(_damage, found))
        output.write_columns([("ARTIFACT", "GATES", "SIZE", "CREATED (UTC)", "TARGET", "TAGS"), *rows])
    else:
        from llmforge.cli import console

        console.say(f"no artifacts in {out}")


_RM = """\b
Examples:
  llmforge rm NAME/VERSION
  llmforge rm 3451 3f9a    # the beginnings of two versions
"""


@click.command(epilog=_RM)
@click.argument("artifacts", nargs=-1, required=True, type=VERSION, metavar="ARTIFACT...")
@out_option(_OUT)
@_JSON
def rm(artifacts: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Remove versions of artifacts.

    Refuses versions that have a tag. A process that serves a removed version keeps running.
    """
    from llmforge.artifact import versions

    home, paths = folders.followed(out), [folders.followed(each) for each in artifacts]
    for given, path in zip(artifacts, paths, strict=True):
        if path.parent.parent != home or path.name not in versions.version_names(path.parent):
            raise UsageError(f"{given}: not a version of an artifact in {out}", hint="see `llmforge ls`")
    chosen = list(dict.fromkeys(paths))
    versions.remove(chosen)
    removed = [f"{path.parent.name}/{path.name}" for path in chosen]
    if as_json:
        output.write_json({"removed": removed})
    else:
        for reference in removed:
            output.write_lines(f"removed {reference}")


_GC = """\b
Examples:
  llmforge gc --dry-run
  llmforge gc NAME --keep 1
"""


@click.command(epilog=_GC)
@click.argument("name", required=False)
@click.option("--keep", type=NATURAL, metavar="N", default=3, help="Versions of each name to keep, the newest.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@out_option(_OUT)
@_JSON
def gc(name: str | None, keep: int, dry_run: bool, out: Path, as_json: bool) -> None:
    """Remove old versions, and what killed builds left behind.

    Versions with a tag, and those that a rollback would return to, stay and do not count.
    """
    from llmforge.artifact import versions
    from llmforge.metrics.units import size

    removed = versions.collect_garbage(out, name, keep=keep, dry_run=dry_run)
    freed = sum(each.size_bytes or 0 for each in removed)
    if as_json:
        facts = {"removed": [each.reference for each in removed], "size_bytes": freed, "dry_run": dry_run}
        output.write_json(facts)
        return
    for each in removed:
        output.write_lines(f"{'would remove' if dry_run else 'removed'} {each.reference}")
    count = f"{len(removed)} {'version' if len(removed) == 1 else 'versions'}"
    output.write_lines(f"{count}, {size(freed)} {'to be removed' if dry_run else 'removed'}")


_TAG = """\b
Examples:
  llmforge tag NAME/VERSION candidate
  llmforge run NAME:candidate "Once upon a time"
  llmforge tag NAME:candidate candidate --delete
"""


@click.command(epilog=_TAG)
@click.argument("artifact", type=ARTIFACT)
@click.argument("tag")
@click.option("--delete", is_flag=True, help="Take TAG off ARTIFACT.")
@click.option("--force", is_flag=True, help="Put TAG on ARTIFACT even if its gates failed.")
@out_option(_OUT)
@_JSON
def tag(artifact: Path, tag: str, delete: bool, force: bool, out: Path, as_json: bool) -> None:
    """Put TAG on a version of an artifact, or move it there.

    A version whose gates failed takes a tag only with --force; one whose gates are undecided, or that has none, takes
    it. A tag keeps its history (`llmforge ls --history`). Once `llmforge promote` has moved it, nothing else can.
    """
    from llmforge.artifact import Artifact, tags
    from llmforge.gates import confirmed

    opened = (Artifact.open if delete else confirmed.open_artifact)(artifact)
    path, parent = opened.path, _home(opened.path, out)
    if delete:
        refuse_given("--delete", "force")
    elif not force:
        _require_not_failed(opened)
    moved = tags.delete(parent, tag, path.name) if delete else tags.move(parent, tag, path.name)
    _say(f"{parent.name}:{tag}", path.name, moved, as_json)


_PROMOTE = """\b
Examples:
  llmforge promote NAME VERSION --to prod
  llmforge serve NAME:prod
  llmforge promote NAME --to prod --rollback
  llmforge promote NAME VERSION --to prod --triton models    # which a Triton watches
"""


@click.command(epilog=_PROMOTE)
@click.argument("name")
@click.argument("version", required=False)
@click.option("--to", "tag", metavar="TAG", required=True, help="Tag to move.")
@click.option("--rollback", is_flag=True, help="Return TAG to the version that it was on before.")
@click.option(
    "--triton", "models", type=PATH, metavar="REPO",
    help="Add it to this model repository, too, as the next version of NAME: a Triton that polls it loads it.",
)  # fmt: skip
@out_option(_OUT)
@_JSON
def promote(
    name: str, version: str | None, tag: str, rollback: bool, models: Path | None, out: Path, as_json: bool
) -> None:
    """Move TAG to VERSION of the artifact NAME if its gates passed.

    Does what `llmforge verify` does first: every file is hashed, and the gates are judged again.
    """
    from llmforge.artifact import Artifact, check_name, tags
    from llmforge.artifact.references import resolve

    parent = out / check_name(name)
    if rollback == (version is not None):
        raise UsageError("expected either VERSION or --rollback", hint="see `llmforge promote --help`")
    chosen = tags.previous(parent, tag) if version is None else version
    opened = Artifact.open(out / name / chosen if rollback else resolve(f"{name}/{chosen}", out))
    parent = _home(opened.path, out)
    opened.verify()
    _require_passed(opened)
    add = None if models is None else _addition_to_triton(opened, models)  # refused before the tag moves
    version = opened.path.name
    moved = tags.rollback(parent, tag, version) if rollback else tags.move(parent, tag, version, "promote")
    if add is not None:
        add()
    _say(f"{name}:{tag}", version, moved, as_json)


def _addition_to_triton(opened: Artifact, models: Path) -> Callable[[], None]:
    """Choose how an artifact is added to a repository; refuse one that no Triton serves."""
    from llmforge.triton import repository, vllm

    model = repository.of_artifact(opened)
    return partial(_add_to_triton, opened, model, models, vllm.exporter(opened, model))


def _add_to_triton(opened: Artifact, model: TritonModel, models: Path, export: Exporter) -> None:
    """Make an artifact the newest version of its model in a repository, unless it is."""
    from llmforge.cli import console
    from llmforge.triton import repository

    newest = repository.newest(models, model.name)
    if newest and repository.is_of(models / model.name / str(newest), opened):
        return
    export(opened, model, models, version=newest + 1)
    console.say(f"note: it is version {newest + 1} of {models / model.name}")


_EXPORT = """\b
Examples:
  llmforge export NAME/VERSION -o artifact.tar
  llmforge export NAME:prod -o s3://bucket/artifact.tar
"""


@click.command(epilog=_EXPORT)
@click.argument("artifact", type=ARTIFACT)
@click.option("-o", "--output", "path", type=LOCATION, required=True, metavar="FILE.tar|URL", help="Archive to write.")
@_JSON
def export(artifact: Path, path: Path | Url, as_json: bool) -> None:
    """Write ARTIFACT to one uncompressed tar.

    The same artifact gives the same bytes. Every file is checked against its hash.
    """
    from llmforge.artifact import archive, remote
    from llmforge.gates import confirmed

    if isinstance(path, Path):
        output.check_file(path, ".tar")
    opened = confirmed.open_artifact(artifact)
    if isinstance(path, Path):
        with output.writing(path):
            size_bytes = archive.save_file(opened, path)
    else:
        size_bytes = remote.save(opened, path)
    if as_json:
        output.write_json({"archive": str(path), "size_bytes": size_bytes})
    else:
        output.write_lines(str(path))


_IMPORT = """\b
Examples:
  llmforge import artifact.tar
  llmforge import https://example.com/artifact.tar --require-signature --key PUB.pem
"""


@click.command("import", epilog=_IMPORT)
@click.argument("archive", type=LOCATION, metavar="FILE.tar|URL")
@out_option("Publish the artifact to DIR/NAME/VERSION.")
@signature_options
@_JSON
def import_(archive: Path | Url, out: Path, require_signature: bool, key: Path | None, as_json: bool) -> None:
    """Publish the artifact in an archive that `llmforge export` wrote.

    Nothing is visible before every byte was checked. The last line of standard output is the path of the artifact.
    """
    from llmforge.artifact import archive as archives
    from llmforge.artifact import remote

    check = arrival_check(require_signature, key)
    made = archives.load_file(archive, out, check) if isinstance(archive, Path) else remote.load(archive, out, check)
    path = out / made.manifest.name / made.manifest.version
    if as_json:
        output.write_json({"artifact": str(path)})
    else:
        output.write_lines(str(path))


def _require_passed(artifact: Artifact) -> None:
    """Raise what `build` would if the gates of an artifact did not pass."""
    from llmforge.gates.decision import Verdict

    name, (found, reasons) = _named(artifact), _judged(artifact)
    match found:
        case Verdict.FAIL:
            raise GateFailed("\n".join([f"{name} cannot be promoted: a gate failed", *reasons]))
        case Verdict.INCONCLUSIVE:
            raise GateInconclusive("\n".join([f"{name} cannot be promoted: a gate is inconclusive", *reasons]))
        case Verdict.NONE:
            raise GateInconclusive(
                f"{name} cannot be promoted: its recipe has no gates", hint="add `gates` to the recipe, and build again"
            )


def _require_not_failed(artifact: Artifact) -> None:
    """Raise what `build` would if a gate of an artifact failed; say it where a gate is inconclusive."""
    from llmforge.cli import console
    from llmforge.gates.decision import Verdict

    if artifact.verdict == Verdict.FAIL.value:
        _, reasons = _judged(artifact)
        raise GateFailed(
            "\n".join([f"{_named(artifact)} cannot be tagged: a gate failed", *reasons]),
            hint="use --force to tag it all the same",
        )
    if artifact.verdict == Verdict.INCONCLUSIVE.value:
        console.say(f"note: a gate of {_named(artifact)} is inconclusive; `llmforge promote` would not take it")


def _judged(artifact: Artifact) -> tuple[Verdict, list[str]]:
    """Judge an artifact again; give the verdict, and what budgets and gates say that it comes from."""
    from llmforge.gates import records, verdict

    results, passes = verdict.recompute(artifact), records.read(artifact).passes
    found = records.overall(results, passes)
    return found, [*records.excesses(passes), *(each.explanation for each in results if each.verdict is found)]


def _named(artifact: Artifact) -> str:
    return f"{artifact.path.parent.name}/{artifact.path.name}"


def _home(path: Path, out: Path) -> Path:
    """Return the folder of a version's name; refuse one that is not among the artifacts."""
    if path.parent.parent != folders.followed(out):
        raise UsageError(f"{path}: not a version of an artifact in {out}", hint="see `llmforge ls`")
    return path.parent


def _say(tag: str, version: str, moved: Move | None, as_json: bool) -> None:
    if as_json:
        output.write_json({"tag": tag, "moved": None if moved is None else json.loads(moved.model_dump_json())})
    elif moved is None:
        output.write_lines(f"{tag} is on {version} already")
    elif moved.after is None:
        output.write_lines(f"{tag} deleted; it was on {moved.before}")
    else:
        output.write_lines(f"{tag} is now on {moved.after}{f'; it was on {moved.before}' if moved.before else ''}")


def _damage(version: Version) -> tuple[str, str] | None:
    """Say in a word, and in all words, why the verdict of a version counts for nothing; None: it counts."""
    from llmforge.gates import confirmed

    if (found := confirmed.damage(version)) is None:
        return None
    return "forged" if isinstance(found, ForgedVerdict) else "damaged", found.message


def _facts(version: Version, damage: tuple[str, str] | None) -> dict[str, Any]:
    artifact, created = version.artifact, version.created
    verdict = None if artifact is None else artifact.verdict if damage is None else damage[0]
    return {
        "artifact": version.reference,
        "path": str(version.path),
        "tags": list(version.tags),
        "verdict": verdict,
        "size_bytes": version.size_bytes,
        "created": None if created is None else created.isoformat(),
        "target": None if artifact is None else artifact.manifest.target,
        "content_digest": None if artifact is None else artifact.manifest.content_digest,
        "evidence": None if artifact is None else len(artifact.evidence),
        "damage": None if damage is None else damage[1],
    }


def _row(version: Version, damage: tuple[str, str] | None) -> tuple[str, ...]:
    from llmforge.metrics.units import size

    tags, artifact = ", ".join(version.tags), version.artifact
    if artifact is None:
        return (version.reference, "damaged", "", "", "", tags)
    created = f"{version.created:%Y-%m-%d %H:%M}"
    target = artifact.manifest.target
    verdict = artifact.verdict if damage is None else damage[0]
    return (version.reference, verdict, size(version.size_bytes or 0), created, target, tags)


def _show_history(parents: dict[Path, None], as_json: bool) -> None:
    from llmforge.artifact import tags

    found = [
        (f"{parent.name}:{name}", move)
        for parent in parents
        for name in tags.names(parent)
        for move in tags.history(parent, name)
    ]
    if as_json:
        output.write_json([{"tag": tag, **json.loads(move.model_dump_json())} for tag, move in found])
    elif found:
        rows = [
            (f"{move.when:%Y-%m-%d %H:%M:%S}", tag, move.how, move.before or "–", move.after or "–")
            for tag, move in found
        ]
        output.write_columns([("WHEN (UTC)", "TAG", "HOW", "FROM", "TO"), *rows])
