"""Carry an environment to a machine without a network: python -m benchmarks.verify_gpu.wheels pack|install FOLDER.

`pack` downloads the wheels of `.[cuda,tensorrt-rtx,tensorrt,dev]` and of torch for the Python that runs it, and cuts
them into parts of at most `--part-mib`, with their SHA-256 in parts.json; a part that is there and whole is not made
again. `install` joins them, checks every one, and installs with `pip install --no-index` into the environment that runs
it; `--join` names where wheels are put.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

LISTED = "parts.json"
PART_MIB = 36  # an upload that takes 64 MiB takes this tree besides, of 25
PACKAGES = (".[cuda,tensorrt-rtx,tensorrt,dev]", "torch")


def cut(wheels: Path, folder: Path, part_bytes: int) -> dict[str, dict[str, object]]:
    """Cut the files of `wheels` into parts in `folder`, and write what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, dict[str, object]] = {}
    for file in sorted(wheels.glob("*.whl")):
        content = file.read_bytes()
        names = [f"{file.name}.{at // part_bytes:03d}" for at in range(0, len(content), part_bytes)]
        for number, name in enumerate(names):
            piece, part = content[number * part_bytes : (number + 1) * part_bytes], folder / name
            if not part.exists() or part.read_bytes() != piece:
                part.write_bytes(piece)
        told[file.name] = {"sha256": hashlib.sha256(content).hexdigest(), "parts": names}
    (folder / LISTED).write_text(json.dumps(told, indent=1), encoding="utf-8")
    return told


def join(folder: Path, wheels: Path) -> list[Path]:
    """Put the wheels of `folder` together in `wheels`.

    Raises:
        SystemExit: a part is missing, or a wheel is not what it was.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    told = json.loads((folder / LISTED).read_text(encoding="utf-8"))
    made = []
    for name, about in told.items():
        missing = [part for part in about["parts"] if not (folder / part).is_file()]
        if missing:
            raise SystemExit(f"error: {name}: {', '.join(missing)} is missing in {folder}\nhint: carry it over as well")
        content = b"".join((folder / part).read_bytes() for part in about["parts"])
        if hashlib.sha256(content).hexdigest() != about["sha256"]:
            raise SystemExit(f"error: {name}: not the wheel that was packed\nhint: carry its parts over again")
        file = wheels / Path(name).name
        file.write_bytes(content)
        made.append(file)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pack", "install"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part-mib", type=int, default=PART_MIB)
    parser.add_argument("--join", type=Path, default=Path("build/wheels"), help="where whole wheels are")
    arguments = parser.parse_args()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if arguments.action == "pack":
        subprocess.run([*pip, "wheel", "-c", "constraints.txt", "-w", arguments.join, *PACKAGES], check=True)
        told = cut(arguments.join, arguments.folder, arguments.part_mib << 20)
        print(f"{len(told)} wheels in {sum(len(each['parts']) for each in told.values())} parts")  # type: ignore[arg-type]
        return
    made = join(arguments.folder, arguments.join)
    subprocess.run([*pip, "install", "--no-index", "--no-deps", *map(str, made)], check=True)


if __name__ == "__main__":
    main()
