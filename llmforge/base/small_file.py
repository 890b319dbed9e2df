"""Reads small files that may come from anyone: regular files only, of bounded size, JSON of bounded depth.

Everything but weights and logs is read here: a recipe, a configuration, a manifest, a text. `error` is the class that
tells what is wrong, so that the exit code is that of what the file is for.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from llmforge.base.errors import ForgeError, InputError
from llmforge.base.wording import shown

DEEPEST = 100  # levels of JSON; configurations have ten
SETTINGS_BYTES = 16 << 20  # runtime.json, a manifest, a configuration: kilobytes in fact
LONG_PATH = 4095  # bytes, of Linux (PATH_MAX with its final zero)
LONG_NAME = 255  # bytes of a part of a path (NAME_MAX)
_NOT_REGULAR = {errno.ENXIO, errno.ENODEV}  # of a socket, of a device that is not there


def read(
    path: Path,
    limit_bytes: int,
    *,
    error: type[ForgeError] = InputError,
    hint: str | None = None,
    smaller: str | None = None,
    links: bool = True,
) -> bytes:
    """Read a regular file of at most `limit_bytes`; with `links`, a link may lead to it.

    `smaller` is the hint where the file is too large, `hint` by default.

    Raises:
        ForgeError: as `error`: it is not there, not regular, not readable, or too large.
    """
    with open_regular(path, error=error, hint=hint, links=links) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes > limit_bytes:
            raise error(f"{path}: {size_bytes} bytes; at most {limit_bytes} are allowed", hint=smaller or hint)
        try:
            data = stream.read(limit_bytes + 1)
        except OSError as found:
            raise error(f"{path}: cannot be read: {found.strerror or found}", hint=hint) from found
    if len(data) > limit_bytes:  # it grew, or does not tell its size, as files of /proc
        raise error(f"{path}: more than the {limit_bytes} bytes that are allowed", hint=smaller or hint)
    return data


def open_regular(
    path: Path, *, error: type[ForgeError] = InputError, hint: str | None = None, links: bool = True
) -> BinaryIO:
    """Open a regular file to read its bytes; with `links`, a link may lead to it.

    A FIFO, which process substitution gives, would wait for a writer, and a device never end: neither is waited for.

    Raises:
        ForgeError: as `error`: it is not there, not regular, or not readable.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    except OSError as found:
        if found.errno in _NOT_REGULAR or (found.errno == errno.ELOOP and not links):
            raise error(f"{path}: cannot be read: not a regular file", hint=hint) from found
        raise error(f"{path}: cannot be read: {found.strerror or found}", hint=hint) from found
    except ValueError as found:  # a path that holds a zero byte
        raise error(f"{shown(str(path))}: cannot be read: {found}", hint=hint) from found
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        why = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "not a regular file"
        raise error(f"{path}: cannot be read: {why}", hint=hint)
    return os.fdopen(descriptor, "rb")


def decode(data: bytes, where: Path | str, *, error: type[ForgeError] = InputError, hint: str | None = None) -> str:
    """Read bytes as UTF-8.

    Raises:
        ForgeError: as `error`: they are not.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as found:
        raise error(f"{where}: byte {found.start} is not UTF-8", hint=hint) from found


def parse_json(
    data: bytes | str,
    where: Path | str,
    *,
    error: type[ForgeError] = InputError,
    hint: str | None = None,
    unique_keys: bool = False,
    most_values: int | None = None,
) -> Any:
    """Parse JSON; `where` names it in the message.

    `most_values` is held against the commas and brackets, before anything is made of them.

    Raises:
        ForgeError: as `error`: not UTF-8, not JSON, nested deeper than `DEEPEST`, of too many values, or, with
            `unique_keys`, a key twice.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        if most_values is not None and sum(map(text.count, ",[{")) > most_values:
            raise error(f"{where}: JSON of more than the {most_values:,} values that are allowed", hint=hint)
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
        too_deep = deeper(value, DEEPEST)
    except RecursionError:
        too_deep = True
    except ValueError as found:  # JSONDecodeError, UnicodeDecodeError, an integer of thousands of digits
        raise error(f"{where}: not valid JSON: {found}", hint=hint) from found
    if too_deep:
        raise error(f"{where}: JSON nested too deeply: at most {DEEPEST} levels are allowed", hint=hint)
    return value


def read_json(
    path: Path, limit_bytes: int = SETTINGS_BYTES, *, error: type[ForgeError] = InputError, hint: str | None = None
) -> Any:
    """Read a file of JSON; raises what `read` and `parse_json` raise."""
    return parse_json(read(path, limit_bytes, error=error, hint=hint), path, error=error, hint=hint)


def deeper(value: Any, levels: int) -> bool:
    """Say if a JSON value has more than `levels` levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        inside = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in inside if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def why_no_path(path: Path | str) -> str | None:
    """Say why the system cannot have a file of this path; None where it can."""
    data = os.fsencode(path)
    if b"\0" in data:
        return "a path cannot hold a zero byte"
    if len(data) > LONG_PATH or any(len(part) > LONG_NAME for part in data.split(b"/")):
        return f"too long for a path: at most {LONG_PATH} bytes, and {LONG_NAME} a name, are possible"
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} appears more than once")
    return result
