"""Import thousands of damaged and hostile archives, and find nothing outside, nothing half-visible, no traceback.

    python benchmarks/fuzz_archives.py [--cases 2000] [--seed 0]

Each case begins with the archive of an artifact of a few kilobytes: bytes are flipped, blocks cut, doubled and
swapped, fields of headers changed under a right checksum, hostile members put in (links, devices, absolute paths,
`..`, doubles, pax, GNU and sparse headers), the manifest rewritten and the archive made to agree with it, or another
program's tar stands in its place. Then: the import ends well or with a `ForgeError`; no file outside of the folder of
artifacts appears, changes or goes; and what has a visible name in that folder is an artifact whose files all match.

Exit code 0 and one JSON object where all holds; else the case that broke it, and a traceback.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmforge.artifact import Artifact, archive, publish, seal, staging
from llmforge.base.errors import ForgeError

BLOCK = 512
FILES = {
    "engine/model.onnx": b"graph" * 100,
    "engine/model.onnx.data": bytes(range(256)) * 9,
    "tokenizer/tokenizer.json": b"",
}
PATHS = (
    "../../outside", "/tmp/outside", "tiny/1/../../../outside", "tiny/1/engine/model.onnx", "tiny/1/engine", "..", "",
    "tiny/1/manifest.json", "tiny/1/manifest.json/x", ".building-1", "tiny/.lock", "x\0y", "a" * 90, "tiny/2/x",
    "\\..\\x", "tiny/1/model.sig",
)  # fmt: skip
TYPES = b"01234567gxKLSMVDAN\0\xff"
NUMBERS = (0, 1, -1, 511, 513, 2**31, 2**33, 2**63, 2**64, 10**30)


def sample(folder: Path) -> bytes:
    """Make the archive that cases begin with."""
    with staging(folder, "tiny") as staged:
        for path, content in FILES.items():
            (staged / path).parent.mkdir(exist_ok=True)
            (staged / path).write_bytes(content)
        (staged / "report").mkdir()
        (staged / "report" / "report.html").write_bytes(b"<p>report</p>")
        manifest = seal(staged, recipe={"schema": 1}, checkpoint="c" * 64, target="cpu", requires={})
        made = publish(staged, manifest, {"created": "2026-01-01T00:00:00+00:00", "verdict": "none"})
    (made.path / "model.sig").write_bytes(b"signature" * 60)
    stream = io.BytesIO()
    archive.save(made, stream)
    return stream.getvalue()


def headers(data: bytes) -> list[int]:
    """Find where members begin."""
    found, at = [], 0
    while at + BLOCK <= len(data) and data[at : at + BLOCK].strip(b"\0"):
        found.append(at)
        size = tarfile.TarInfo.frombuf(data[at : at + BLOCK], "utf-8", "strict").size
        at += BLOCK + size + -size % BLOCK
    return [*found, at]


def checked(header: bytearray) -> bytes:
    """Give a header the checksum that it should have."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 20))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(data: bytes, chance: random.Random) -> bytes:
    end = chance.choice((chance.randrange(len(data)), chance.randrange(len(data) // BLOCK) * BLOCK))
    return data[:end]


def grow(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice((b"\0", b"\0" * 9216, data, b"PK\5\6", chance.randbytes(BLOCK)))


def shuffle(data: bytes, chance: random.Random) -> bytes:
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    for _ in range(chance.choice((1, 1, 3))):
        one, other = chance.randrange(len(blocks)), chance.randrange(len(blocks))
        match chance.randrange(4):
            case 0:
                blocks[one], blocks[other] = blocks[other], blocks[one]
            case 1:
                blocks.insert(other, blocks[one])
            case 2:
                del blocks[one]
            case _:
                blocks[one] = chance.randbytes(BLOCK)
    return b"".join(blocks)


def edit_header(data: bytes, chance: random.Random) -> bytes:
    """Change fields of one header, with the checksum that then is right."""
    at = chance.choice(headers(data)[:-1])
    header = bytearray(data[at : at + BLOCK])
    for _ in range(chance.choice((1, 1, 2))):
        match chance.randrange(6):
            case 0:
                name = chance.choice(PATHS).encode()[:100]
                header[0:100] = name.ljust(100, b"\0")
            case 1:
                header[156] = chance.choice(TYPES)
            case 2:
                header[124:136] = number(chance.choice(NUMBERS), chance)
            case 3:
                header[157:257] = chance.choice(PATHS).encode()[:100].ljust(100, b"\0")
            case 4:
                header[257:265] = chance.choice((b"ustar  \0", b"\0" * 8, b"ustar\x0001"))
            case _:
                header[chance.randrange(BLOCK)] = chance.randrange(256)
    return data[:at] + checked(header) + data[at + BLOCK :]


def number(value: int, chance: random.Random) -> bytes:
    """Write a number as tar does, or as it must not."""
    if chance.random() < 0.5 and 0 <= value < 8**11:
        return b"%011o\0" % value
    mark = 0x80 if value >= 0 else 0xFF
    return bytes([mark]) + (value % 2**88).to_bytes(11, "big")


def insert_member(data: bytes, chance: random.Random) -> bytes:
    """Put a hostile member between others."""
    info = tarfile.TarInfo(chance.choice(PATHS).replace("\0", "") or "x")
    info.type = bytes([chance.choice(b"0123456LKxgS")])
    info.linkname = chance.choice(("/etc/passwd", "../../outside", "tiny/1/engine/model.onnx", "engine"))
    content = b""
    if info.type in (b"0", b"x", b"g", b"L", b"K"):
        content = chance.choice(
            (b"mine", b"26 path=../../../outside12\n", b"30 GNU.sparse.name=../outside\n", b"../x\0")
        )
    info.size = len(content)
    member = info.tobuf(tarfile.GNU_FORMAT) + content + b"\0" * (-len(content) % BLOCK)
    at = chance.choice(headers(data))
    return data[:at] + member + data[at:]


def rewrite_manifest(data: bytes, chance: random.Random) -> bytes:
    """Change manifest or record, and make headers, names and contents agree with it as far as tar can say it."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = {info.name.split("/", 2)[2]: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    first, second, *others = members
    plain: dict[str, Any] = json.loads(members[first])
    record: dict[str, Any] = json.loads(members[second])
    contents = {path: members[path] for path in others}
    path = chance.choice(PATHS)
    match chance.randrange(10):
        case 0:
            contents[path] = b"mine"
            plain["files"][path] = described(b"mine")
        case 1:
            plain["files"][chance.choice(list(FILES))]["size_bytes"] = chance.choice(NUMBERS)
        case 2:
            plain["name"] = chance.choice(PATHS)
        case 3:
            record[chance.choice(list(record))] = chance.choice((None, 1, [], {}, "x", True, "0" * 64))
        case 4:
            del plain["files"][chance.choice(list(FILES))]
        case 5:
            plain["recipe"] = {"x": chance.choice(([[]] * 1000, 1e308 * 10, 10**400, "\ud800", None))}
        case 6:
            plain["files"] = {f"f/{index}": described(b"") for index in range(3000)}
            contents = dict.fromkeys(plain["files"], b"")
        case 7:
            plain[chance.choice(list(plain))] = chance.choice((None, 1, [], {}, "x", True))
        case 8:
            record["files"][path] = described(b"mine")
            contents[path] = b"mine"
        case _:
            contents["engine/model.onnx/x"] = b""
            plain["files"]["engine/model.onnx/x"] = described(b"")
    raw = (json.dumps(plain, indent=1, sort_keys=True) + "\n").encode()
    if record.get("content") is not None:
        record["content"] = hashlib.sha256(raw).hexdigest()
    bound = (json.dumps(record, indent=1) + "\n").encode()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        evidence = f"evidence/{hashlib.sha256(bound).hexdigest()}.json"
        everything = {first: raw, evidence: bound, **dict(sorted(contents.items()))}
        for name, content in everything.items():
            info = tarfile.TarInfo(f"{plain.get('name')}/{hashlib.sha256(raw).hexdigest()[:12]}/{name}")
            info.size, info.mode = len(content), 0o444
            try:
                tar.addfile(info, io.BytesIO(content))
            except ValueError:  # tar cannot say it
                continue
    used = headers(stream.getvalue())[-1] if stream.getvalue() else 0
    return stream.getvalue()[:used] + b"\0" * (2 * BLOCK)


def described(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}


def other_program(data: bytes, chance: random.Random) -> bytes:
    """Pack the same members as another program would, some of them as something else."""
    stream = io.BytesIO()
    written = chance.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
    mode = chance.choice(("w", "w", "w:gz"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar, tarfile.open(fileobj=stream, mode=mode, format=written) as new:
        for info in tar:
            content = tar.extractfile(info)
            if chance.random() < 0.3:
                info.type, info.linkname, info.size = chance.choice((b"1", b"2", b"3", b"5", b"6")), "/etc/passwd", 0
            if written != tarfile.USTAR_FORMAT and chance.random() < 0.2:
                info.name += "x" * 200
            if written == tarfile.PAX_FORMAT and chance.random() < 0.5:
                info.pax_headers = {"path": chance.choice(PATHS).replace("\0", ""), "size": "1"}
            new.addfile(info, content if info.isfile() else None)
    return stream.getvalue()


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip, cut, grow, shuffle, edit_header, insert_member, rewrite_manifest, other_program,
)  # fmt: skip


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Say what is in a folder: names, modes and contents."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def judge(data: bytes, place: Path) -> str:
    """Import one archive into `place/a/b/out` and say how it ended.

    Raises:
        AssertionError: it left something that it must not.
    """
    inside = place / "a" / "b"
    out = inside / "out"
    inside.mkdir(parents=True)
    (inside / "archive.tar").write_bytes(data)
    (inside / "witness").write_bytes(b"witness")
    before = snapshot(place)
    try:
        made = archive.load_file(inside / "archive.tar", out)
    except ForgeError as error:
        ended = type(error).__name__
    else:
        ended = "imported"
        made.verify()
        assert made == Artifact.open(out / made.manifest.name / made.manifest.version)
    after = {
        path: what for path, what in snapshot(place).items() if path.partition("/out")[0] != "a/b" or path == "a/b"
    }
    assert after == before, f"changed outside: {sorted(after.items() ^ before.items())}"
    visible = list(out.glob("*/[!.]*")) if out.exists() else []
    assert len(visible) == (ended == "imported"), f"visible after {ended}: {visible}"
    hidden = [path.name for path in out.glob("*/.*") if path.name != ".lock"] if out.exists() else []
    assert hidden == [], f"left behind: {hidden}"
    assert not out.exists() or {path.name for path in out.iterdir()} <= {"tiny"} | {
        path.parent.name for path in visible
    }
    return ended


def run(cases: int, seed: int, place: Path) -> Counter[str]:
    """Judge `cases` archives, the mutations in turn; count how each ended."""
    good = sample(place / "sample")
    ends: Counter[str] = Counter()
    assert judge(good, place / "good") == "imported"
    for case in range(cases):
        mutate = MUTATIONS[case % len(MUTATIONS)]
        chance = random.Random(f"{seed} {case}")  # a case can be made again by itself
        folder = place / "case"
        try:
            ends[f"{mutate.__name__}: {judge(mutate(good, chance), folder)}"] += 1
        except BaseException as error:
            error.add_note(f"case {case} of seed {seed}, {mutate.__name__}")
            raise
        shutil.rmtree(folder)
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        ends = run(options.cases, options.seed, Path(place))
    json.dump({"cases": options.cases, "seed": options.seed, "ends": dict(sorted(ends.items()))}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
