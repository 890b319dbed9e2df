"""Run the checks of a pack on a machine that is lent for minutes: python -m benchmarks.verify_gpu.borrowed ACTION.

    receive UPLOAD    take one upload of a pack; the last one unpacks it
    start             begin the checks, in one process that outlives this command, and return
    poll              wait for it, at most --seconds; print what was found since, and copy the tables to --copy
    stop              end it

Exit codes of poll: 0 the checks have ended, 3 they go on. README.md beside this file lists the calls to make.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from benchmarks.verify_gpu import parts

TREE = Path(__file__).resolve().parents[2]
CONTENT, RUNNING = "content", 3
POLL_S = 0.2
TOLD = ("gpu-evidence.md", "gpu-evidence.json", "run.log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("receive", "start", "poll", "stop", "go", "step"))
    parser.add_argument("what", nargs="?", help="of receive: the folder of the upload")
    parser.add_argument("--work", type=Path, default=Path("/tmp/verify-gpu"), help="folder for all that is made")
    parser.add_argument("--minutes", type=float, default=25, help="of start: no check goes on after that")
    parser.add_argument("--seconds", type=float, default=500, help="of poll: how long it waits")
    parser.add_argument("--copy", type=Path, help="of poll: where tables and log are copied to")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    if arguments.action == "receive":
        print(receive(Path(arguments.what), work))
    elif arguments.action == "start":
        start(work, arguments.minutes)
    elif arguments.action == "poll":
        raise SystemExit(poll(work, arguments.seconds, arguments.copy))
    elif arguments.action == "stop":
        stop(work)
    else:
        from benchmarks.verify_gpu import carried_run  # what it imports, the pack brings

        carried_run.main(work / CONTENT, work, arguments.minutes, arguments.what)


def receive(upload: Path, work: Path) -> str:
    """Take an upload; where it is the last, unpack what was sent, and say so."""
    work.mkdir(parents=True, exist_ok=True)
    archive = work / "pack.tar.xz"
    if missing := parts.receive(upload, work / "parts", archive):
        return f"waiting for {', '.join(missing)}"
    shutil.rmtree(work / CONTENT, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    archive.unlink()
    for library in (work / CONTENT / "native").glob("*"):
        shutil.copy(library, TREE / "llmforge" / "native" / library.name)
    return "the pack is whole"


def start(work: Path, minutes: float) -> None:
    """Begin the checks in a session of their own, which the end of this command does not end.

    Raises:
        SystemExit: they run already, or nothing was received.
    """
    if not (work / CONTENT).is_dir():
        raise SystemExit(f"error: there is no pack in {work}\nhint: receive every upload first")
    if running(work):
        raise SystemExit("error: the checks are running\nhint: poll, or stop them")
    path = os.pathsep.join(filter(None, (str(work / CONTENT / "site"), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    variables |= dict.fromkeys(("LLMFORGE_CACHE", "XDG_CACHE_HOME"), str(work / "cache"))
    command = [sys.executable, "-m", "benchmarks.verify_gpu.borrowed", "go", "--work", str(work)]
    with (work / "run.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--minutes", str(minutes)],
            cwd=TREE,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (work / "pid").write_text(str(process.pid), encoding="utf-8")
    print(f"process {process.pid}")


def running(work: Path) -> int | None:
    """Give the process that runs the checks, if one does."""
    file = work / "pid"
    if not file.is_file():
        return None
    pid = int(file.read_text(encoding="utf-8"))
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return pid if str(work).encode() in command else None  # a number may come again; of one that ended it is empty


def poll(work: Path, seconds: float, copy: Path | None) -> int:
    """Wait until the checks have ended, or so long; print their log from where the last poll stopped."""
    until, seen, log = time.monotonic() + seconds, work / "seen", work / "run.log"
    at = int(seen.read_text(encoding="utf-8")) if seen.is_file() else 0
    while True:
        goes_on = running(work) is not None
        content = log.read_bytes()[at:] if log.is_file() else b""
        sys.stdout.write(content.decode(errors="replace"))
        sys.stdout.flush()
        at += len(content)
        seen.write_text(str(at), encoding="utf-8")
        for file in (work / name for name in TOLD if copy is not None):
            if file.is_file():
                shutil.copyfile(file, copy / file.name)  # type: ignore[operator]
        if not goes_on or time.monotonic() >= until:
            return RUNNING if goes_on else 0
        time.sleep(POLL_S)


def stop(work: Path) -> None:
    """End the checks; their step ends with them."""
    pid = running(work)
    if pid is None:
        print("nothing runs")
        return
    os.kill(pid, signal.SIGKILL)
    while running(work) is not None:
        time.sleep(POLL_S)
    print(f"process {pid} ended")


if __name__ == "__main__":
    main()
