"""One archive cut into uploads, each in a folder of its own, and put together again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

LISTED = "parts.json"


def cut(archive: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Cut `archive` into parts of at most `part_bytes`, in folders `upload-1` … of `folder`, and say what they are."""
    count = -(-archive.stat().st_size // part_bytes)
    names = [f"part-{number + 1}" for number in range(count)]
    with archive.open("rb") as stream:
        told = {"sha256": hashlib.file_digest(stream, "sha256").hexdigest(), "parts": names}
    uploads = []
    with archive.open("rb") as stream:
        for number, name in enumerate(names, 1):
            upload = folder / f"upload-{number}"
            shutil.rmtree(upload, ignore_errors=True)
            upload.mkdir(parents=True)
            (upload / name).write_bytes(stream.read(part_bytes))
            (upload / LISTED).write_text(json.dumps(told), encoding="utf-8")
            uploads.append(upload)
    return uploads


def receive(upload: Path, folder: Path, archive: Path) -> list[str]:
    """Take the part of one upload into `folder`; where it was the last, put `archive` together. Name what is missing.

    Raises:
        SystemExit: the archive is not what was cut.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in upload.iterdir():
        shutil.copyfile(file, folder / file.name)
    told = json.loads((folder / LISTED).read_text(encoding="utf-8"))
    missing = [name for name in told["parts"] if not (folder / name).is_file()]
    if missing:
        return missing
    whole = hashlib.sha256()
    with archive.open("wb") as stream:
        for name in told["parts"]:
            content = (folder / name).read_bytes()
            whole.update(content)
            stream.write(content)
    if whole.hexdigest() != told["sha256"]:
        archive.unlink()
        raise SystemExit("error: the parts are not those of one pack\nhint: send all uploads of one pack again")
    shutil.rmtree(folder)
    return []
