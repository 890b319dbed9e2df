"""Tables of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.verify_gpu.runner import OK, Outcome
from benchmarks.verify_gpu.scale import Scale

DRY_RUN = "**DRY RUN** on a CPU with tiny shapes: these figures say nothing of any GPU."
Outcomes = Mapping[str, Outcome]


def render(outcomes: Outcomes, scale: Scale) -> str:
    """Write the evidence as Markdown."""
    parts = ["# Evidence from a GPU", DRY_RUN if scale.dry else "", _environment(outcomes), _attention(outcomes)]
    parts += [_parity(outcomes), _captures(outcomes), _speed(outcomes, scale), _troubles(outcomes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _environment(outcomes: Outcomes) -> str:
    found = _result(outcomes, "environment")
    if found is None:
        return ""
    rows = [
        ("device", f"{found['device']}, compute capability {found['sm']}"),
        ("memory", f"{found['memory_bytes'] / 1e9:.1f} GB"),
        ("copy bandwidth, read and written", f"{found['copy_gb_per_s']:.0f} GB/s"),
        ("driver, power limit", found["driver"]),
        ("target", found["target"]),
        ("Python", found["python"]),
        *sorted(found["packages"].items()),
    ]
    return _table("## Machine", ("", ""), rows)


def _attention(outcomes: Outcomes) -> str:
    rows = []
    for name, found in _results(outcomes, "attention:"):
        told = {kind: ", ".join(found["found"][kind]) or "nothing" for kind in ("prefill", "decode")}
        wanted = {kind: " or ".join(found["expected"][kind]) or "–" for kind in ("prefill", "decode")}
        cells = [f"{told[kind]} ({wanted[kind]})" for kind in ("prefill", "decode")]
        rows.append((name, *cells, {True: "yes", False: "**no**", None: "–"}[found["as_expected"]]))
    return _table("## Kernels of attention (expected)", ("shape", "prefill", "decode", "as expected"), rows)


def _parity(outcomes: Outcomes) -> str:
    rows = []
    for step in ("parity:", "tensorrt"):
        for name, found in _results(outcomes, step):
            name = f"{name or step} (sample checkpoint)" if step == "tensorrt" else name
            choice = f"{found['same_first_choice']:.1%}"
            rows.append((name, f"{found['largest_difference']:.2g}", f"{found['kld_mean']:.2g}", choice))
    head = ("model", "largest difference of logits", "mean KL divergence", "same first choice")
    return _table("## Parity with fp32 on the CPU", head, rows)


def _captures(outcomes: Outcomes) -> str:
    rows = []
    for step in ("capture", "tensorrt"):
        found = _result(outcomes, step)
        for each in found["recordings"] if found else []:
            replay = "–" if each["replay_ms"] is None else f"{each['replay_ms']:.2f}"
            what = (step, each["capture"]["batch"], each["capture"]["length"], each["reason"] or "captured")
            rows.append((*what, f"{each['eager_ms']:.2f}", replay, f"{each['memory_bytes'] / 1e6:.1f}"))
    head = ("engine", "rows", "tokens", "CUDA graph", "eager ms", "replayed ms", "MB")
    return _table("## Recorded decode steps", head, rows)


def _speed(outcomes: Outcomes, scale: Scale) -> str:
    """Tokens a second and MBU: medians over the rounds, in which all take turns."""
    rows = []
    machine = _result(outcomes, "environment")
    for subject in scale.subjects:
        rounds = [
            found
            for number in range(1, scale.rounds + 1)
            if (found := _result(outcomes, f"speed:{number}:{subject}")) is not None
        ]
        read = _read(outcomes, subject, scale)
        for batch in scale.batches if rounds else ():
            step_s = statistics.median(found["step_s"][str(batch)] for found in rounds)
            mbu = "–"
            if read is not None and machine is not None:
                weights, kv = read
                held = scale.context + scale.tokens / 2
                mbu = f"{(weights + batch * held * kv) / step_s / machine['copy_gb_per_s'] / 1e9:.0%}"
            rows.append((subject, batch, f"{step_s * 1e3:.2f}", f"{batch / step_s:.0f}", mbu, len(rounds)))
    layers, hidden = scale.shape["num_hidden_layers"], scale.shape["hidden_size"]
    title = f"## Decoding, {layers} layers of hidden size {hidden}, random weights, context {scale.context}"
    return _table(title, ("", "batch", "ms a step", "tokens/s", "MBU of copy bandwidth", "rounds"), rows)


def _read(outcomes: Outcomes, subject: str, scale: Scale) -> tuple[int, int] | None:
    """Give the bytes of weights, and of cache for a token of context, that a step reads; torch's are those of bf16."""
    precision = subject.removeprefix("llmforge-") if subject.startswith("llmforge") else scale.precisions[0]
    found = _result(outcomes, f"build:{precision}")
    return None if found is None else (found["weight_bytes_per_token"], found["kv_bytes_per_token"])


def _troubles(outcomes: Outcomes) -> str:
    rows = [
        (name, outcome.status, " ".join((outcome.reason or "").split()).replace("|", "\\|"))
        for name, outcome in outcomes.items()
        if outcome.status != OK
    ]
    return _table("## What did not go well", ("step", "", "reason"), rows)


def _result(outcomes: Outcomes, step: str) -> Mapping[str, Any] | None:
    outcome = outcomes.get(step)
    return None if outcome is None or outcome.status != OK else outcome.result


def _results(outcomes: Outcomes, prefix: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for step, outcome in outcomes.items():
        if step.startswith(prefix) and outcome.status == OK and outcome.result is not None:
            yield step if prefix == "tensorrt" else step.removeprefix(prefix), outcome.result


def _table(title: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
