"""A machine that is lent for minutes, rehearsed in a folder: what it refuses and ends is refused and ended here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
MARK = "BORROWED_MACHINE"  # in the environment of every process of it
# What its image has of its own, in versions that llmforge does not take; importing one of them ends the process.
IMAGE = {"torch": "2.11.0", "transformers": "5.17.0", "onnx_ir": "1.0.0", "onnx": "1.23.1", "onnxscript": "0.7.2"}
LACKS = ("pydantic", "ruamel")


class Refused(Exception):
    """A call that the machine does not take."""


class BorrowedMachine:
    """Runs commands in a copy of this tree, without a network, each for so long and all for so long.

    Args:
        folder: where it lies.
        upload_bytes: what a call may bring, the tree included.
        command_s: a command that goes on is killed then, with its process group; what began a session of its own lives.
        total_s: after that no call is taken.
    """

    def __init__(self, folder: Path, upload_bytes: int, command_s: float, total_s: float) -> None:
        self.tree, self.out = folder / "tree", folder / "out"
        self._site, self._home, self._mark = folder / "image", folder / "home", uuid.uuid4().hex
        self._upload_bytes, self._command_s, self._left_s = upload_bytes, command_s, total_s
        self.killed = False  # whether the last command was
        for each in (self.tree, self.out, self._site, self._home):
            each.mkdir(parents=True)
        for name, version in IMAGE.items():
            (self._site / f"{name}-{version}.dist-info").mkdir()
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (self._site / f"{name}-{version}.dist-info" / "METADATA").write_text(about)
        for name in (*IMAGE, *LACKS):
            (self._site / name).mkdir()
            (self._site / name / "__init__.py").write_text(f"raise SystemExit('{name} of the image was imported')\n")

    def run(self, *arguments: str, carry: Path | None = None, limit_s: float | None = None) -> tuple[int, str]:
        """Send the tree and `carry`, to a folder of its name, and run Python there; give exit code and output.

        Raises:
            Refused: they are larger than a call may be, or the time is used up.
        """
        if self._left_s <= 0:
            raise Refused("the time is used up")
        began = time.monotonic()
        self._send(carry)
        shutil.rmtree(self.out)
        self.out.mkdir()
        log = self.out.with_name("log")
        variables = {"PATH": os.environ["PATH"], "HOME": str(self._home), "OUT": str(self.out), MARK: self._mark}
        variables["PYTHONPATH"] = str(self._site)
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["unshare", "-rn", sys.executable, *arguments],
                cwd=self.tree,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(min(limit_s or self._command_s, self._left_s))
                self.killed = False
            except subprocess.TimeoutExpired:
                self.killed = True
            os.killpg(process.pid, signal.SIGKILL) if self.processes(process.pid) else None
            process.wait()
        self._left_s -= time.monotonic() - began
        return process.returncode, log.read_text(errors="replace")

    def processes(self, group: int | None = None) -> list[int]:
        """Name its processes; those of one `group` alone."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self._mark}".encode() in (each / "environ").read_bytes()
                if marked and (group is None or os.getpgid(int(each.name)) == group):
                    found.append(int(each.name))
            except OSError:  # it ended, or is not ours
                continue
        return found

    def home(self) -> list[str]:
        """Name what lies in the home folder."""
        return [str(each.relative_to(self._home)) for each in self._home.rglob("*")]

    def _send(self, carry: Path | None) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=TREE, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        files = {TREE / name: self.tree / name for name in listed if name and (TREE / name).is_file()}
        if carry is not None:
            files |= {
                each: self.tree / carry.name / each.relative_to(carry) for each in carry.rglob("*") if each.is_file()
            }
        size = sum(each.stat().st_size for each in files)
        if size > self._upload_bytes:
            raise Refused(f"{size} bytes; a call takes {self._upload_bytes}")
        for source, target in files.items():
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
