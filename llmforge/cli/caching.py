"""The command `cache`: what builds keep for later ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base.errors import EnvironmentLacks, UsageError
from llmforge.cli import output
from llmforge.cli.parameters import NATURAL, PATH, Command, grouped, refuse_given

if TYPE_CHECKING:
    from llmforge.cache import Cache, Summary
    from llmforge.cache.remote import Remote

REMOTE = "remote_cache", "cache_key", "remote_cache_write"  # options of the cache that machines share
_DIGITS = 12  # of a digest, as `rm` takes it

_EXAMPLES = """\b
Examples:
  llmforge cache stats
  llmforge cache ls
  llmforge cache rm trace           # all entries of a kind
  llmforge cache rm 4f2a6f0c1b9d    # one entry
  llmforge cache rm --all
  llmforge cache push trace --remote-cache s3://bucket/cache --sign KEY.pem
"""


def remote_option(command: Command) -> Command:
    """Add the option --remote-cache."""
    return click.option(
        "--remote-cache", metavar="URL", envvar="LLMFORGE_REMOTE_CACHE", show_envvar=True,
        help="Cache that several machines share, such as s3://bucket/folder.",
    )(command)  # fmt: skip


def connect(url: str | None, trusted: Path | None, signer: Path | None) -> Remote | None:
    """Open the remote cache at `url`; None where no URL is given.

    Raises:
        UsageError: a key without a URL, or a URL without a key.
    """
    if url is None and (trusted or signer):
        raise UsageError("the key of a remote cache was given, but no --remote-cache", hint="add --remote-cache URL")
    if url is None:
        return None
    if not (trusted or signer):
        raise UsageError(
            "--remote-cache requires the key whose signatures are trusted",
            hint="add --cache-key PUB.pem to read from it, or --remote-cache-write KEY.pem to write to it",
        )
    from llmforge.cache import remote

    return remote.connect(url, trusted=trusted, signer=signer)


cache_options = grouped(  # what a build keeps and reuses
    click.option("--no-cache", is_flag=True, help="Reuse nothing of earlier builds, and keep nothing for later ones."),
    click.option(
        "--cache-size", type=NATURAL, metavar="BYTES",
        help="Limit of the build cache (see `llmforge cache`); default: $LLMFORGE_CACHE_BYTES, else 20 GB.",
    ),
    remote_option,
    click.option(
        "--cache-key", type=PATH, metavar="PUB.pem", envvar="LLMFORGE_CACHE_KEY", show_envvar=True,
        help="Public key; entries of the remote cache that it signed are reused, and no others.",
    ),
    click.option(
        "--remote-cache-write", type=PATH, metavar="KEY.pem", envvar="LLMFORGE_REMOTE_CACHE_WRITE", show_envvar=True,
        help="Sign what the build computes with this private key, and write it to the remote cache.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class CacheOptions:
    """Options of the build cache."""

    no_cache: bool
    cache_size: int | None  # bytes
    remote_cache: str | None
    cache_key: Path | None
    remote_cache_write: Path | None

    def check(self) -> None:
        """Refuse options of a cache that is not used."""
        if self.no_cache:
            refuse_given("--no-cache", "cache_size", *REMOTE)

    def connected(self) -> Remote | None:
        """Connect to the remote cache, where one is named."""
        return connect(self.remote_cache, self.cache_key, self.remote_cache_write)

    @property
    def keys(self) -> list[Path]:
        """List the files of keys."""
        return [key.absolute() for key in (self.cache_key, self.remote_cache_write) if key is not None]

    def arguments(self) -> list[str]:
        """Write them for the builds of a matrix; paths are those of this machine."""
        self.check()
        if self.no_cache:
            return ["--no-cache"]
        self.connected()  # refuses now what every build would refuse
        given = {
            "--cache-size": self.cache_size,
            "--remote-cache": self.remote_cache,
            "--cache-key": self.cache_key and self.cache_key.absolute(),
            "--remote-cache-write": self.remote_cache_write and self.remote_cache_write.absolute(),
        }
        return [word for name, value in given.items() if value is not None for word in (name, str(value))]


@click.group(epilog=_EXAMPLES)
def cache() -> None:
    """Show and remove what builds keep for later builds.

    Builds keep traces, proofs, calibrated layers and quantized weights, keyed by the content they depend on. The folder
    is $LLMFORGE_CACHE, or llmforge/builds in your cache folder; $LLMFORGE_CACHE_BYTES limits its size (default: 20 GB).
    """


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(as_json: bool) -> None:
    """List the entries, the last used first."""
    entries = _opened().entries()
    if as_json:
        output.write_json([dataclasses.asdict(entry) for entry in entries])
        return
    rows = [(e.digest[:_DIGITS], e.kind, _size(e), _date(e.used), "in use" if e.in_use else _of(e)) for e in entries]
    output.write_columns([("entry", "kind", "size", "last used (UTC)", "of"), *rows])


@cache.command()
@click.argument("entries", nargs=-1, metavar="[ENTRY|KIND]...")
@click.option("--all", "everything", is_flag=True, help="Remove all entries.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def rm(entries: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Remove entries by kind or digest.

    Those that a running build uses stay.
    """
    if everything == bool(entries):
        raise UsageError("name entries or kinds, or use --all", hint="llmforge cache ls")
    store = _opened()
    chosen = store.entries() if everything else store.named(entries)
    removed = [entry for entry in chosen if store.remove(entry)]
    size_bytes = sum(entry.size_bytes for entry in removed)
    kept = len(chosen) - len(removed)
    if as_json:
        output.write_json({"removed": len(removed), "size_bytes": size_bytes, "in_use": kept})
        return
    from llmforge.metrics import units

    still = f"; {kept} in use by running builds" if kept else ""
    output.write_lines(f"removed {len(removed)} entries, {units.size(size_bytes)}{still}")


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(as_json: bool) -> None:
    """Show where the cache is, its size and its limit."""
    from llmforge.metrics import units

    store = _opened()
    kinds: dict[str, list[Summary]] = {}
    for entry in store.entries():
        kinds.setdefault(entry.kind, []).append(entry)
    sizes = {kind: sum(entry.size_bytes for entry in of) for kind, of in sorted(kinds.items())}
    total = sum(sizes.values())
    limit = store.limit_bytes or 0
    if as_json:
        by_kind = {kind: {"entries": len(kinds[kind]), "size_bytes": size} for kind, size in sizes.items()}
        output.write_json({"folder": str(store.folder), "size_bytes": total, "limit_bytes": limit, "kinds": by_kind})
        return
    output.write_lines(f"{store.folder}: {units.size(total)} of {units.size(limit)}")
    rows = [(kind, str(len(kinds[kind])), units.size(size)) for kind, size in sizes.items()]
    output.write_columns([("kind", "entries", "size"), *rows])


@cache.command()
@click.argument("entries", nargs=-1, metavar="[ENTRY|KIND]...")
@remote_option
@click.option("--sign", "signer", type=PATH, required=True, metavar="KEY.pem", help="Private key to sign with.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def push(entries: tuple[str, ...], remote_cache: str | None, signer: Path, as_json: bool) -> None:
    """Write entries to the remote cache.

    Entries are named by kind or digest; without a name, all are written.
    """
    from llmforge.cache import LOCAL_KINDS, Key

    if remote_cache is None:
        raise UsageError("no remote cache was given", hint="add --remote-cache URL")
    remote = connect(remote_cache, None, signer)
    with _opened() as store:
        chosen = store.named(entries) if entries else store.entries()
        pushed = [entry for entry in chosen if entry.kind not in LOCAL_KINDS]
        found = [kept for entry in pushed if (kept := store.find(Key(entry.kind, entry.parts))) is not None]
        store.remote = remote
        done = store.upload(found)
        notes = list(store.notes)
    if done < len(found):
        raise EnvironmentLacks(notes[-1], hint=f"{done} of {len(found)} entries were written; run it again")
    if as_json:
        output.write_json({"pushed": done, "notes": notes})
        return
    for note in notes:
        output.write_lines(f"note: {note}", err=True)
    output.write_lines(f"pushed {done} entries")


def _opened() -> Cache:
    from llmforge.cache import Cache, default_folder, default_size

    return Cache(default_folder(), default_size())


def _of(entry: Summary) -> str:
    """Say what an entry is of, as far as its key tells it in words."""
    names = ("pass", "layer")
    return ", ".join(f"{name} {entry.parts[name]}" for name in names if name in entry.parts)


def _size(entry: Summary) -> str:
    from llmforge.metrics import units

    return units.size(entry.size_bytes)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
