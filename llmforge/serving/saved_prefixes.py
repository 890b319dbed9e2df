"""Prefixes that outlast a process: their keys and values are computed once, kept in files, and there from the start.

A file is named by a digest of what decides about its bits: the engine, the tokens, and how this machine computes. It
begins with the digest of the rest, without which it is not used. Files lie in a folder of whoever serves, or in the
artifact (`ShippedPrefixes`), which then says which tokens they are of.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmforge import native
from llmforge.base import hashed_files, strict_json, whole_file
from llmforge.base.errors import ForgeError, InputError, UsageError
from llmforge.base.small_file import decode, read, read_json
from llmforge.runtime.sampling.options import Sampling
from llmforge.serving.prefix_cache import BLOCK, Prefix, PrefixCache
from llmforge.serving.prompts import PromptEncoder
from llmforge.serving.protocol import tools
from llmforge.serving.protocol.messages import encode_messages
from llmforge.serving.request import Chunk, Request
from llmforge.serving.scheduler import Scheduler

PREFIXES_BYTES = 16 << 20  # of a file of prefixes
MOST = 64  # as in a recipe (llmforge.recipe.serving)
FOLDER = "prefixes"  # in that of the engine: the files that an artifact ships
INDEX = "prefixes.json"  # there: names and tokens
_MAGIC = b"llmforge prefix 1\n"
_OTHERWISE = "the artifact has none of this engine for machines that compute as this one does"
# Users' messages that differ in their first character: what two prompts with them begin with alike is the prefix.
_USERS = ("A", "z")


def read_prefixes(file: Path, encoder: PromptEncoder) -> tuple[Prefix, ...]:
    """Read prefixes, one JSON object a line: `{"prompt": TEXT}`, or `{"messages": […], "tools": […]}`; `name` if given.

    Of messages it is what the chat template writes before the first character of the user's next message.

    Raises:
        InputError: the file cannot be read; a line is no such object, or holds nothing that prompts begin with.
        EnvironmentLacks: no process can be started to render the template.
    """
    found = list[Prefix]()
    lines = [line for line in decode(read(file, PREFIXES_BYTES), file).splitlines() if line.strip()]
    if not 1 <= len(lines) <= MOST:
        raise InputError(f"{file}: {len(lines)} prefixes; expected 1 to {MOST}, a JSON object a line")
    for number, line in enumerate(lines, 1):
        try:
            given = json.loads(line)
            if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
                raise UsageError("expected an object with either prompt or messages")
            ids = prefix_ids(given, encoder)
        except (ValueError, RecursionError, UsageError) as error:
            message = error.message if isinstance(error, ForgeError) else f"no JSON: {error}"
            raise InputError(f"{file}, line {number}: {message}") from error
        found.append(Prefix(str(given.get("name", f"line {number}")), tuple(ids)))
    return tuple(found)


def prefix_ids(given: Mapping[str, Any], encoder: PromptEncoder) -> Sequence[int]:
    """Give the tokens of one prefix, with the keys of a line of `read_prefixes`.

    Raises:
        UsageError, InputError: it holds nothing that prompts begin with, or the chat template refuses it.
        EnvironmentLacks: no process can be started to render the template.
    """
    if "prompt" in given:
        if not isinstance(given["prompt"], str) or not given["prompt"]:
            raise UsageError("prompt: expected a text, not empty")
        return encoder.encode(given["prompt"])[:-1]  # the last token may be another one where text follows
    use = tools.read({"tools": given.get("tools")}, encoder)
    messages = given["messages"]
    if not isinstance(messages, list):
        raise UsageError("messages: expected a list")
    first, second = (
        encode_messages([*messages, {"role": "user", "content": each}], encoder, () if use is None else use.tools)
        for each in _USERS
    )
    alike = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    if not alike:
        raise UsageError("messages: the chat template writes the user's next message first")
    return first[:alike]


class PrefixStore:
    """Files of keys and values in a folder, for one engine on machines that compute alike."""

    def __init__(self, folder: Path, artifact: Path) -> None:
        self.folder, self._artifact = folder, artifact

    @cached_property
    def _of(self) -> Any:
        """The digest of all but the tokens; it reads the engine, which is not done for prompts that have no prefix."""
        found = hashlib.sha256()
        for part in (
            _engine_digest(self._artifact / "engine"), str(native.VERSION).encode(),
            native.instruction_set().encode(), version("onnxruntime").encode(),
        ):  # fmt: skip
            found.update(hashlib.sha256(part).digest())
        return found

    def file(self, ids: Sequence[int]) -> Path:
        """Name the file of a prefix."""
        digest = self._of.copy()
        digest.update(np.array(ids, np.int64).tobytes())
        return self.folder / f"{digest.hexdigest()}.prefix"

    def load(self, ids: Sequence[int]) -> dict[str, NDArray[Any]] | None:
        """Read the arrays of a prefix; None: there are none, or they are damaged."""
        try:
            data = self.file(ids).read_bytes()
            magic, digest, payload = data[: len(_MAGIC)], data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
            if magic != _MAGIC or hashlib.sha256(payload).digest() != digest:
                return None
            with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None

    def save(self, ids: Sequence[int], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the arrays of a prefix.

        Raises:
            OSError: it cannot be written; nothing is left.
        """
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **dict(arrays))
        payload = buffer.getvalue()
        data = _MAGIC + hashlib.sha256(payload).digest() + payload
        whole_file.write(self.file(ids), lambda partial: partial.write_bytes(data))


def _engine_digest(engine: Path) -> bytes:
    """Hash the files of an engine, but for those in folders of it: what drafts, and prefixes."""
    files = sorted(file for file in engine.iterdir() if file.is_file())
    digests, _ = hashed_files.all_sha256(files)
    return json.dumps([(file.name, digests[file]) for file in files]).encode()


@dataclass(frozen=True)
class _Entry:
    """One prefix of an index."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class _Index:
    """What `INDEX` holds."""

    prefixes: tuple[_Entry, ...]


@dataclass(frozen=True)
class ShippedPrefixes:
    """What an artifact was built with: its prefixes, and the files of their keys and values, where there are any."""

    prefixes: tuple[Prefix, ...]
    store: PrefixStore | None = None  # None: there are no prefixes

    @classmethod
    def read(cls, artifact: Path) -> ShippedPrefixes:
        """Read which prefixes an artifact has; none, if it was built without.

        Raises:
            InputError: its index is damaged.
        """
        folder = artifact / "engine" / FOLDER
        if not folder.exists():
            return cls(())
        file = folder / INDEX
        index = strict_json.read(_Index, read_json(file, PREFIXES_BYTES), str(file))
        return cls(tuple(Prefix(each.name, each.ids) for each in index.prefixes), PrefixStore(folder, artifact))

    def of(self, ids: Sequence[int]) -> ShippedPrefixes:
        """Give those that a prompt begins with."""
        found = tuple(each for each in self.prefixes if tuple(ids[: len(each.ids)]) == each.ids)
        return ShippedPrefixes(found, self.store if found else None)


def write_index(artifact: Path, prefixes: Sequence[Prefix]) -> ShippedPrefixes:
    """Write down which prefixes an artifact has, whose engine is whole; `fill` writes their files into `store`."""
    folder = artifact / "engine" / FOLDER
    folder.mkdir()
    listed = {"prefixes": [{"name": each.name, "ids": each.ids} for each in prefixes]}
    (folder / INDEX).write_text(json.dumps(listed) + "\n", encoding="utf-8")
    return ShippedPrefixes.read(artifact)


def fill(
    scheduler: Scheduler[Any],
    prefixes: Sequence[Prefix],
    store: PrefixStore | None,
    shipped: PrefixStore | None = None,
) -> None:
    """Have `prefixes` in the cache before the first request: from their files, else computed, and written there.

    `shipped` has the files of an artifact, which are read alone; what they lack is looked for in `store`. Notes of the
    scheduler say which, and what there is no room for. Nothing may run.

    Raises:
        UsageError: a prefix is too long for the context, or has unknown tokens.
        OSError: a file cannot be written.
    """
    cache = scheduler.prefix_cache
    for prefix in prefixes:
        ids = prefix.ids[: len(prefix.ids) // BLOCK * BLOCK]
        if not scheduler.keeps_prefixes:
            scheduler.note(f"prefix {prefix.name}: not kept, there is no prefix cache")
            continue
        if not ids:
            scheduler.note(f"prefix {prefix.name}: not kept, it has {len(prefix.ids)} tokens, and a block {BLOCK}")
            continue
        if cache is not None and (place := _read(cache, ids, [each for each in (shipped, store) if each is not None])):
            scheduler.note(f"prefix {prefix.name}: {len(ids)} tokens from {place}")
            continue
        _run(scheduler, ids)
        why = "" if shipped is None or cache is None else f" ({_OTHERWISE})"
        if cache is None:
            scheduler.note(
                f"prefix {prefix.name}: {len(ids)} tokens computed, and not written: the cache has none apart"
            )
        elif (found := cache.find(ids)) < len(ids):
            scheduler.note(f"prefix {prefix.name}: {found} of {len(ids)} tokens fit into the prefix cache; enlarge it")
        elif store is None or (made := cache.read(ids)) is None:
            scheduler.note(f"prefix {prefix.name}: {len(ids)} tokens computed{why}")
        else:
            store.save(ids, made)
            scheduler.note(f"prefix {prefix.name}: {len(ids)} tokens computed, and written to {store.file(ids)}{why}")


def _read(cache: PrefixCache[Any], ids: Sequence[int], stores: Sequence[PrefixStore]) -> Path | None:
    """Read a prefix into the cache from the first of `stores` that has it; return its file."""
    for store in stores:
        arrays = store.load(ids)
        if arrays is not None and cache.write(ids, arrays):
            return store.file(ids)
    return None


def _run(scheduler: Scheduler[Any], ids: Sequence[int]) -> None:
    """Compute keys and values of a prompt, as any request's are."""
    received = list[Chunk | ForgeError]()
    scheduler.add(Request(tuple(ids), Sampling(max_tokens=1), detokenize=False), received.append)
    while scheduler.busy:
        scheduler.step()
    for each in received:
        if isinstance(each, ForgeError):
            raise each
