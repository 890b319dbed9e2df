"""The command line: see `benchmarks.verify_gpu`."""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
import time
from pathlib import Path

import benchmarks.verify_gpu as program
from llmforge.base.errors import ForgeError, UsageError
from llmforge.runtime.device.cuda import CudaDevice


def main() -> None:
    parser = argparse.ArgumentParser(description=program.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/verify-gpu"), help="folder for all that is made")
    parser.add_argument("--only", default="*", metavar="GLOB,…", help="steps to run: parity:*, speed:*")
    parser.add_argument("--target", help="name of the target; that of the device's compute capability if not")
    parser.add_argument("--minutes", type=float, default=240, help="no step is begun, or goes on, after that")
    parser.add_argument("--lease", type=_minutes, metavar="40m", help="what settles most in so much time, as 40m or 1h")
    parser.add_argument("--again", action="store_true", help="also run steps that failed before")
    parser.add_argument("--dry-run", action="store_true", help="the same steps on the CPU, with tiny shapes")
    parser.add_argument("--step", help=argparse.SUPPRESS)  # inside the process of one step
    arguments = parser.parse_args()
    try:
        if not arguments.dry_run:
            CudaDevice()
        _run(arguments)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def _minutes(text: str) -> float:
    """Read 40m, 1h or 90s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a time such as 40m, 1h or 90s")
    return float(found[1]) * {"s": 1 / 60, "m": 1, "h": 60}[found[2]]


def _run(arguments: argparse.Namespace) -> None:
    # A machine without a GPU is told so before anything else is imported.
    from benchmarks.verify_gpu import checks, evidence, runner, scale

    chosen = scale.DRY if arguments.dry_run else scale.GPU if arguments.lease is None else scale.LEASE
    run = checks.Run(chosen, arguments.work, arguments.target)
    steps = checks.plan(chosen)
    record = runner.Record(arguments.work / "steps")
    if arguments.step is not None:
        step = next(each for each in steps if each.name == arguments.step)
        record.path(step.name, "result.json").write_text(json.dumps(step.work(run)), encoding="utf-8")
        return
    patterns = arguments.only.split(",")
    wanted = [step for step in steps if any(fnmatch.fnmatch(step.name, pattern) for pattern in patterns)]
    if not wanted:
        raise UsageError(f"no step is {arguments.only}", hint=", ".join(step.name for step in steps))
    command = [sys.executable, "-m", "benchmarks.verify_gpu", "--work", str(arguments.work)]
    command += ["--dry-run"] if arguments.dry_run else []
    command += ["--target", arguments.target] if arguments.target else []
    command += [] if arguments.lease is None else ["--lease", f"{arguments.lease:g}m"]
    mark = arguments.work / "scale.json"
    _same_kind(mark, dry=chosen.dry)
    tell = evidence.writer(steps, record, chosen, arguments.work)
    runner.run(
        wanted,
        record,
        [*command, "--step"],
        deadline=time.monotonic() + 60 * (arguments.lease or arguments.minutes),
        again=arguments.again,
        after_each=tell,
    )
    print(tell())


def _same_kind(mark: Path, *, dry: bool) -> None:
    """Keep what a dry run leaves apart from what a GPU leaves."""
    if mark.exists() and json.loads(mark.read_text(encoding="utf-8"))["dry_run"] != dry:
        raise UsageError(f"{mark.parent} holds {'a GPU' if dry else 'a dry run'}'s results", hint="give another --work")
    mark.write_text(json.dumps({"dry_run": dry}), encoding="utf-8")


if __name__ == "__main__":
    main()
