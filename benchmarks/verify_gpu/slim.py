"""The wheel of onnxruntime-gpu with device code for one compute capability: the rest is zeros, which pack to nothing.

The library stays as long as it is, so that nothing in it moves: the headers of all entries stay, by which the driver
finds the one that fits the device, and the code of the others goes.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path

# A fatbin: its magic number, version and the size of its header (16), then the size of all entries. An entry begins
# with its kind (1: PTX, 2: code of one device), the size of its header at byte 4 and of what follows at byte 8, and has
# its compute capability at byte 28.
MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
HEADER_BYTES = 16
# What the CUDA provider never loads.
LEFT_OUT = ("onnxruntime/transformers/", "onnxruntime/capi/libonnxruntime_providers_tensorrt.so", "onnxruntime/tools/")


def slim(content: bytearray, sm: int) -> tuple[int, int]:
    """Put zeros for the device code of all entries that are not for `sm`; return the bytes kept and dropped."""
    kept = dropped = 0
    start = content.find(MAGIC)
    while start >= 0:
        entry = start + HEADER_BYTES
        end = entry + int(struct.unpack_from("<Q", content, start + 8)[0])
        while entry < end:
            _, _, header, size = struct.unpack_from("<HHIQ", content, entry)
            if int(struct.unpack_from("<I", content, entry + 28)[0]) == sm:
                kept += size
            else:
                content[entry + header : entry + header + size] = bytes(size)
                dropped += size
            entry += header + size
        start = content.find(MAGIC, end)
    return kept, dropped


def download(requirements: list[str], folder: Path, python: str) -> list[Path]:
    """Let pip bring the wheels of `requirements`, and nothing that they depend on, for a Python version (3.12)."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", platform]
    subprocess.run([*command, "--python-version", python, "-d", str(folder), *requirements], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, site: Path, sm: int | None) -> None:
    """Unpack a wheel into a folder for the path of Python; `sm`: libraries with device code for that alone."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.startswith(LEFT_OUT):
                archive.extract(name, site)
    for library in site.rglob("*.so*") if sm is not None else ():
        content = bytearray(library.read_bytes())
        if slim(content, sm)[1]:
            library.write_bytes(content)
