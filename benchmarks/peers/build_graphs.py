"""Build ONNX graphs with peers: python build_graphs.py WORK NAME…, in an environment of benchmarks/peers/nodes.txt.

Builds each checkpoint WORK/NAME/checkpoint into WORK/NAME/<builder>/ with every builder, and leaves a line of JSON for
each on standard output: name, builder, and the error where there was one.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def genai(precision: str) -> Callable[[Path, Path], None]:
    def build(checkpoint: Path, out: Path) -> None:
        from onnxruntime_genai.models import builder

        where = ("model", str(checkpoint), str(out), precision, "cpu", str(out / "cache"))
        options = builder.parse_extra_options(*where, ["hf_token=false"])
        builder.create_model(*where, **options)

    return build


def mobius(provider: str) -> Callable[[Path, Path], None]:
    def build(checkpoint: Path, out: Path) -> None:
        from mobius.__main__ import main

        main(["build", "--config", str(checkpoint), str(out), "--ep", provider, "--dtype", "f32"])

    return build


BUILDERS: Mapping[str, Callable[[Path, Path], None]] = {
    "genai": genai("fp32"),
    "genai-int4": genai("int4"),
    "mobius-cpu": mobius("cpu"),
    "mobius-default": mobius("default"),
}


def main() -> None:
    work = Path(sys.argv[1])
    for name in sys.argv[2:]:
        for builder, build in BUILDERS.items():
            outcome = {"name": name, "builder": builder, "error": None}
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    build(work / name / "checkpoint", work / name / builder)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a peer raises is a result
                lines = str(error).strip().splitlines() or ["no message"]
                outcome["error"] = f"{type(error).__name__}: {lines[0][:200]}"
            print(json.dumps(outcome), flush=True)


main()
