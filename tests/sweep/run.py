"""Run the sweep: `python -m tests.sweep.run --out sweep.json [--larger] [--only a,b] [--jobs N] [--table FILE]`.

With `--larger`, types that are right run in two larger shapes, too (`shapes`), as `type@wide` and `type@deep`.

Every type runs in a process of its own with a time limit, so that a crash or a hang is an outcome like others. Results
are added to the file one by one; types that are in it already are skipped, unless `--only` names them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT_S = 300.0
FOLDER = re.compile(r"[^\s'\"]*/sweep-[^/\s]+/")  # of a tiny checkpoint
GRACE_S = 5.0  # for a process that has sent its record to end
Record = dict[str, Any]
Job = Callable[[str], Record]


def job(name: str) -> Record:
    """Shrink, write, trace and compare one type, or `type@shape` (in a process of its own)."""
    quiet()
    from . import shrink
    from .compare import Outcome, compare
    from .shapes import TINY, Shape

    model_type, _, shape = name.partition("@")
    with tempfile.TemporaryDirectory(prefix=f"sweep-{model_type}-") as folder:
        try:
            shrink.write(model_type, Path(folder), Shape(shape or TINY))
        except Exception as error:  # noqa: BLE001  # whatever a configuration or model of transformers raises
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            return dataclasses.asdict(Outcome(name, "transformers-fails", "unknown", reason, where=ends(error)))
        return dataclasses.asdict(compare(name, Path(folder)))


def quiet() -> None:
    """Silence transformers, and compute with one thread."""
    import logging
    import warnings

    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def run_one(model_type: str, work: Job = job, limit_s: float = LIMIT_S) -> Record:
    """Run `work` on one type in a process of its own and return its record, whatever happens to the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sweep.compare"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, model_type, work))
    started = time.monotonic()
    process.start()
    sender.close()
    try:
        if receiver.poll(limit_s):
            record: Record = receiver.recv()
        else:
            record = {"outcome": "timeout", "reason": f"no result after {limit_s:.0f} s"}
    except EOFError:
        process.join()
        record = {"outcome": "crash", "reason": f"the process ended with code {process.exitcode}"}
    finally:
        receiver.close()
        process.join(GRACE_S)
        process.kill()
        process.join()
    record["reason"] = FOLDER.sub("", record.get("reason", ""))  # a path that no other run has
    return {**record, "model_type": model_type, "seconds": round(time.monotonic() - started, 1)}


def _child(sender: Connection, model_type: str, work: Job) -> None:
    try:
        record = work(model_type)
    except Exception as error:  # noqa: BLE001  # the outcome that the sweep looks for: a bug of ours
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')[:300]}"
        record = {"outcome": "traceback", "reason": reason, "where": ends(error)}
    sender.send(record)
    sender.close()


def ends(error: BaseException) -> str:
    """Say where a traceback ends: the last three frames, `file:line function`."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in reversed(frames))


def _short(path: str) -> str:
    for root in ("site-packages/", "/llmforge/", "/tests/"):
        if root in path:
            return path.partition(root)[2] if root == "site-packages/" else root[1:] + path.partition(root)[2]
    return Path(path).name


def sweep(types: Sequence[str], jobs: int, work: Job = job) -> Iterator[Record]:
    """Run `work` on every type, `jobs` at a time; records come as they are done."""
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_one, model_type, work) for model_type in types]):
            yield future.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with the records; made or added to")
    parser.add_argument("--only", help="types to run (again), with commas between")
    parser.add_argument("--larger", action="store_true", help="run types that are right in two larger shapes, too")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", type=Path, help="write the table of all records here")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from . import render, shapes, shrink

    records: dict[str, Record] = json.loads(options.out.read_text()) if options.out.exists() else {}
    chosen = options.only.split(",") if options.only else [t for t in shrink.types() if t not in records]

    def run(names: Sequence[str]) -> None:
        for record in sweep(names, options.jobs):
            records[record["model_type"]] = record
            print(f"{record['model_type']:28} {record['outcome']:20} {record['reason'][:140]}", file=sys.stderr)
            write(options.out, json.dumps(dict(sorted(records.items())), indent=1))

    run(chosen)
    if options.larger:
        tiny = chosen if options.only else shrink.types()
        names = [f"{name}@{shape}" for name in tiny if "@" not in name for shape in shapes.FACTORS]
        right = {name for name, record in records.items() if record["outcome"] == "right"}
        wanted = [name for name in names if name.partition("@")[0] in right]
        run([name for name in wanted if options.only or name not in records])
    if options.table is not None:
        before = options.table.read_text() if options.table.exists() else ""
        write(options.table, render.table(records) + render.encoders_of(before))
        if options.table.resolve() == render.DOCUMENT:
            render.write_packaged(render.table(records))
    print(json.dumps(Counter(record["outcome"] for name, record in records.items() if "@" not in name)))
    return 0


def write(path: Path, text: str) -> None:
    """Write a file, all at once."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text)
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
