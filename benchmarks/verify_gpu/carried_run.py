"""The process that runs the checks of a pack, and the process of each of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.verify_gpu import carried, evidence, runner
from benchmarks.verify_gpu.scale import CARRIED, CARRIED_DRY
from benchmarks.verify_gpu.steps import Run
from llmforge.base.errors import ForgeError
from llmforge.runtime.config import DATA_FILE


def main(content: Path, work: Path, minutes: float, step: str | None) -> None:
    """Run all checks of `content` for so long; `step`: that one alone, in this process."""
    dry = bool(json.loads((content / carried.PACK).read_text(encoding="utf-8"))["dry_run"])
    scale = CARRIED_DRY if dry else CARRIED
    steps, record = carried.plan(scale), runner.Record(work / "steps")
    try:
        if step is not None:
            found = next(each for each in steps if each.name == step).work(Run(scale, content, None))
            record.path(step, "result.json").write_text(json.dumps(found), encoding="utf-8")
            return
        command = [sys.executable, "-m", "benchmarks.verify_gpu.borrowed", "--work", str(work), "step"]
        deadline = time.monotonic() + 60 * minutes
        tell = evidence.writer(steps, record, scale, work)
        try:
            runner.run(steps, record, command, deadline=deadline, after_each=tell)
        finally:
            for drawn in content.glob(f"engines/*/engine/{carried.WEIGHTS}"):
                drawn.with_name(DATA_FILE).unlink(missing_ok=True)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
