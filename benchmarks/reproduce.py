"""Build a recipe many times, each in another folder, with another hash seed, number of threads, time zone, language and
umask; compare all files.

    python -m benchmarks.reproduce                              # recipes/quickstart.yaml, 10 times
    python -m benchmarks.reproduce RECIPE -n 3 --set validation.latency=null
    python -m benchmarks.reproduce --without avx512             # the last build as on an AVX2-only processor

Exit code 1 where a file of the content differs, with the table of what does (`llmforge.diagnosis.comparison`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmforge.artifact import Artifact
from llmforge.diagnosis import comparison

ROOT = Path(__file__).resolve().parent.parent
RUN = "from llmforge.cli import main; main()"
BUILT = (0, 3, 4)  # exit codes of a build that published: gates passed, failed, undecided
# What the libraries that compute codes read at their start: to take a processor without AVX-512 for the one here.
WITHOUT_AVX512 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # numpy 2.4's groups of kernels
    "OPENBLAS_CORETYPE": "Haswell",
}
ZONES = ("UTC", "Asia/Kathmandu", "America/St_Johns")
LANGUAGES = ("C", "C.UTF-8", "de_DE.UTF-8", "tr_TR.UTF-8")
UMASKS = (0o022, 0o077, 0o002)


def build(recipe: Path, out: Path, options: list[str], settings: dict[str, str], umask: int) -> Artifact:
    """Build `recipe` in a process of its own, in the folder `out`, with the environment `settings`."""
    command = [sys.executable, "-c", RUN, "build", str(recipe), "--out", str(out), "--quiet"]
    command += [word for option in options for word in ("--set", option)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, umask=umask)
    if done.returncode not in BUILT:
        sys.exit(f"exit {done.returncode} with {settings}\n{done.stderr}")
    return Artifact.open(Path(done.stdout.splitlines()[-1]))


def _cpu_seconds() -> float:
    """Return what the builds that have ended took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("-n", type=int, default=10, help="builds; 10 by default")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="as of `llmforge build`")
    parser.add_argument("--without", choices=["avx512"], help="do the last build as if the processor lacked this")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifacts = []
        for index in range(chosen.n):
            # Other folders and a recipe elsewhere: its paths are those of the original.
            folder = Path(scratch) / f"{'sub/' * index}build-{index}"
            folder.mkdir(parents=True)
            count = str(1 + index % 5)
            settings = {
                "PYTHONHASHSEED": str(index * 7919),
                "OMP_NUM_THREADS": count,
                "OPENBLAS_NUM_THREADS": count,
                "MKL_NUM_THREADS": count,
                "TZ": ZONES[index % len(ZONES)],
                "LANG": LANGUAGES[index % len(LANGUAGES)],
                "LC_ALL": LANGUAGES[index % len(LANGUAGES)],
                "LLMFORGE_CACHE": str(folder / "cache"),  # its own: nothing is reused
            }
            umask = UMASKS[index % len(UMASKS)]
            if chosen.without and index == chosen.n - 1:
                settings |= WITHOUT_AVX512
            began, used = time.perf_counter(), _cpu_seconds()
            artifact = build(chosen.recipe.resolve(), folder, chosen.set, settings, umask)
            artifacts.append(artifact)
            facts = {name: settings[name] for name in ("PYTHONHASHSEED", "OMP_NUM_THREADS", "TZ", "LANG")}
            facts |= {"umask": f"{umask:03o}", "s": str(round(time.perf_counter() - began))}
            facts |= {"cpu_s": str(round(_cpu_seconds() - used, 1))}
            print(artifact.manifest.content_digest, json.dumps(facts), flush=True)

        differing = [other for other in artifacts[1:] if comparison.files(artifacts[0], other)]
        for other in differing:
            print("\n".join(comparison.compare(artifacts[0], other).lines()))
        for artifact in artifacts:
            shutil.rmtree(artifact.path)
    print(f"{len(artifacts)} builds, {len({a.manifest.content_digest for a in artifacts})} content digests")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
