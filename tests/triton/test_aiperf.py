"""NVIDIA's load generator sees the times that the model's own metrics tell."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..servers import triton_env
from ..servers.triton_server import environment_or_skip, launched

REQUESTS, CONCURRENCY, OUTPUT_TOKENS = 40, 4, 48
# Long prompts: what HTTP and the client's process add to a first token, some milliseconds, is little beside them.
PROMPT_TOKENS = 384
PAYLOAD = f'{{"text_input": {{{{ text|tojson }}}}, "max_tokens": {OUTPUT_TOKENS}, "ignore_eos": true, "stream": true}}'
AGREES = 0.15  # relative

TTFT, ITL = "llmforge_time_to_first_token_seconds", "llmforge_inter_token_latency_seconds"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # aiperf is large, and installed once
@pytest.mark.xdist_group("triton")
def test_aiperf_and_the_metrics_agree(tmp_path: Path, sample_checkpoint: Path) -> None:
    env = environment_or_skip()
    aiperf = triton_env.prepare_aiperf(env)
    artifact = build(tmp_path, sample_checkpoint)
    tokenizer = shutil.copytree(
        sample_checkpoint, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors")
    )
    (tmp_path / "generate.jinja").write_text(PAYLOAD)
    with launched(env, artifact, tmp_path / "repository") as server:
        before = server.settled("sample")
        command = [
            str(aiperf), "profile", "-m", "sample", "--url", f"http://127.0.0.1:{server.http}", "--streaming",
            "--endpoint-type", "template", "--custom-endpoint", "/v2/models/sample/generate_stream",
            "--extra-inputs", f"payload_template:{tmp_path / 'generate.jinja'}",
            "--extra-inputs", "response_field:text_output", "--tokenizer", str(tokenizer),
            "--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS),
            "--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--num-dataset-entries", str(REQUESTS),
            "--ui-type", "none", "--artifact-dir", str(tmp_path / "aiperf"),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        after = server.settled("sample")
    theirs = json.loads((tmp_path / "aiperf" / "profile_export_aiperf.json").read_text())
    assert theirs["request_count"]["avg"] == REQUESTS
    assert after[f"{TTFT}_count"] - before[f"{TTFT}_count"] == REQUESTS
    assert after[f"{ITL}_count"] - before[f"{ITL}_count"] == REQUESTS * (OUTPUT_TOKENS - 1)
    for name, metric in (("time_to_first_token", TTFT), ("inter_token_latency", ITL)):
        sums, counts = (after[f"{metric}_{part}"] - before[f"{metric}_{part}"] for part in ("sum", "count"))
        assert theirs[name]["unit"] == "ms"
        assert sums / counts * 1e3 == pytest.approx(theirs[name]["avg"], rel=AGREES), name


def build(folder: Path, checkpoint: Path) -> Path:
    """Build the sample checkpoint in fp32, without evidence."""
    recipe = {
        "schema": 1,
        "name": "sample",
        "checkpoint": str(checkpoint),
        "target": "local",
        "engine": {"max_context": 1024, "max_batch": 8, "threads": 1},
        "passes": ["fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention"],
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    program = "from llmforge.cli import main; main()"
    command = [sys.executable, "-c", program, "build", str(folder / "recipe.yaml"), "--out", str(folder), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])
