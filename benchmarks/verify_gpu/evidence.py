"""Tables of what was measured."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.verify_gpu.runner import OK, Outcome, Record
from benchmarks.verify_gpu.scale import Scale
from benchmarks.verify_gpu.steps import Step

DRY_RUN = "**DRY RUN** on a CPU with tiny shapes: these figures say nothing of any GPU."
Outcomes = Mapping[str, Outcome]


def writer(steps: Sequence[Step], record: Record, scale: Scale, work: Path) -> Callable[[], Path]:
    """Make what writes all that is known up to now, as tables and as JSON: whoever is ended later has it."""
    page, whole = work / "gpu-evidence.md", work / "gpu-evidence.json"

    def write() -> Path:
        outcomes = {step.name: found for step in steps if (found := record.read(step.name)) is not None}
        facts = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
        told = {"dry_run": scale.dry, "scale": dataclasses.asdict(scale), "steps": facts}
        for path, text in ((whole, json.dumps(told, indent=1)), (page, render(outcomes, scale))):
            partial = path.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            partial.rename(path)
        return page

    return write


def render(outcomes: Outcomes, scale: Scale) -> str:
    """Write the evidence as Markdown."""
    parts = ["# Evidence from a GPU", DRY_RUN if scale.dry else "", _environment(outcomes), _attention(outcomes)]
    parts += [_parity(outcomes), _captures(outcomes), _heads(outcomes), _calibration(outcomes)]
    parts += [
        part for model in scale.models for part in (_speed(outcomes, scale, model), _served(outcomes, scale, model))
    ]
    parts += [_contexts(outcomes), _ranks(outcomes), _profile(outcomes), _troubles(outcomes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _environment(outcomes: Outcomes) -> str:
    found = _result(outcomes, "environment")
    if found is None:
        return ""
    rows = [
        ("device", f"{found['device']}, compute capability {found['sm']}"),
        ("memory", f"{found['memory_bytes'] / 1e9:.1f} GB"),
        ("copy bandwidth, read and written", f"{found['copy_gb_per_s']:.0f} GB/s"),
        ("bandwidth of its data sheet", _bandwidth(found["data_sheet_gb_per_s"])),
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
    for step in ("parity:", "tensorrt", "ranks"):
        for name, found in _results(outcomes, step):
            name = name if step == "parity:" else f"{name or step} (sample checkpoint)"
            choice = f"{found['same_first_choice']:.1%}"
            rows.append((name, f"{found['largest_difference']:.2g}", f"{found['kld_mean']:.2g}", choice))
    head = ("precision:model", "largest difference of logits", "mean KL divergence", "same first choice")
    return _table("## Parity with the CPU, which computes the same codes in fp32", head, rows)


def _captures(outcomes: Outcomes) -> str:
    rows = []
    for step in ("capture", "capture:slots", "tensorrt"):
        found = _result(outcomes, step)
        for each in found["recordings"] if found else []:
            replay = "–" if each["replay_ms"] is None else f"{each['replay_ms']:.2f}"
            what = (step, each["capture"]["batch"], each["capture"]["length"], each["reason"] or "captured")
            rows.append((*what, f"{each['eager_ms']:.2f}", replay, f"{each['memory_bytes'] / 1e6:.1f}"))
    head = ("engine", "rows", "tokens", "CUDA graph", "eager ms", "replayed ms", "MB")
    return _table("## Recorded decode steps", head, rows)


def _heads(outcomes: Outcomes) -> str:
    found = _result(outcomes, "heads")
    if found is None:
        return ""
    rows = [
        ("largest error of a mass, of the largest of its row", f"{found['masses_error']:.2g}"),
        ("tokens that the device guessed", f"{found['guessed']} of {found['tokens']}"),
        ("answers equal with guesses and without", f"{found['same_answers']} of {found['answers']}"),
    ]
    return _table("## Heads, masses and guesses; heads are the largest of their rows", ("", ""), rows)


def _contexts(outcomes: Outcomes) -> str:
    rows = [
        (name, length, f"{1e3 * step_s:.2f}")
        for name, found in _results(outcomes, "contexts:")
        for length, step_s in found["step_s"].items()
    ]
    return _table("## Decode steps of one row behind long contexts", ("", "tokens", "ms"), rows)


def _calibration(outcomes: Outcomes) -> str:
    found = _result(outcomes, "calibration")
    if found is None:
        return ""
    rows = [
        (where, f"{found['kld_mean'][where]:.4f}", f"{found['seconds'][where]:.1f}", memory)
        for where, memory in (("cpu", "–"), ("device", f"{found['taken_bytes'] / 1e6:.0f}"))
    ]
    said = f"## Calibration of the sample: {found['codes_equal']:.1%} of the codes are equal"
    return _table(f"{said}, {found['said_bytes'] / 1e6:.0f} MB are said", ("on", "KLD", "s", "MB taken"), rows)


def _bandwidth(gb_per_s: float | None) -> str:
    return "–" if gb_per_s is None else f"{gb_per_s:.0f} GB/s"


def _rounds(outcomes: Outcomes, scale: Scale, model: str, subject: str) -> list[Mapping[str, Any]]:
    names = (f"speed:{number}:{model}:{subject}" for number in range(1, scale.rounds + 1))
    return [found for name in names if (found := _result(outcomes, name)) is not None]


def _title(scale: Scale, model: str) -> str:
    shape = scale.models[model].config
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    return f"{model}: {layers} layers of hidden size {hidden}, random weights, context {scale.context}"


def _speed(outcomes: Outcomes, scale: Scale, model: str) -> str:
    """Tokens a second and MBU of steps alone: medians over the rounds, in which all take turns."""
    rows = []
    for subject in scale.subjects(model):
        rounds = [found for found in _rounds(outcomes, scale, model, subject) if "step_s" in found]
        for batch in scale.batches if rounds else ():
            step_s = statistics.median(found["step_s"][str(batch)] for found in rounds)
            used = _mbu(outcomes, scale, model, subject, batch, step_s)
            rows.append((subject, batch, f"{step_s * 1e3:.2f}", f"{batch / step_s:.0f}", *used, len(rounds)))
    head = ("", "rows", "ms a step", "tokens/s", "MBU of copy bandwidth", "MBU of data sheet", "rounds")
    return _table(f"## Decode steps alone, {_title(scale, model)}", head, rows)


def _served(outcomes: Outcomes, scale: Scale, model: str) -> str:
    """TTFT and TPOT through schedulers: medians over the rounds."""
    ttft, tpot = [], []
    for subject in scale.subjects(model):
        rounds = [found for found in _rounds(outcomes, scale, model, subject) if "tpot_s" in found]
        if not rounds:
            continue
        firsts = (statistics.median(found["ttft_s"][str(length)] for found in rounds) for length in scale.prompts)
        ttft.append((subject, *(f"{1e3 * first:.1f}" for first in firsts), len(rounds)))
        for batch in scale.batches:
            greedy, sampled = (
                statistics.median(found["tpot_s"][kind][str(batch)] for found in rounds)
                for kind in ("greedy", "sampled")
            )
            used = _mbu(outcomes, scale, model, subject, batch, greedy)
            told = (f"{1e3 * greedy:.2f}", f"{1e3 * sampled:.2f}", f"{batch / greedy:.0f}", f"{batch / sampled:.0f}")
            tpot.append((subject, batch, *told, *used, len(rounds)))
    title = _title(scale, model)
    head = ("", *(f"{length} tokens, ms" for length in scale.prompts), "rounds")
    first = _table(f"## TTFT through the scheduler, {title}", head, ttft)
    head = ("", "rows", "TPOT greedy, ms", "TPOT at T = 1, ms", "tokens/s greedy", "tokens/s at T = 1")
    head += ("MBU of copy bandwidth", "MBU of data sheet", "rounds")
    second = _table(f"## TPOT through the scheduler, {title}", head, tpot)
    return "\n\n".join(part for part in (first, second) if part)


def _mbu(outcomes: Outcomes, scale: Scale, model: str, subject: str, batch: int, step_s: float) -> tuple[str, str]:
    """Give the bytes that a step must read, a second, as parts of the copy bandwidth and of the data sheet's."""
    machine, precisions = _result(outcomes, "environment"), scale.models[model].precisions
    # torch's and vLLM's weights are those of bf16.
    precision = subject.removeprefix("llmforge-") if subject.startswith("llmforge") else precisions[0]
    built = _result(outcomes, f"build:{model}:{precision}")
    if machine is None or built is None:
        return "–", "–"
    read = built["weight_bytes_per_token"] + batch * (scale.context + scale.tokens / 2) * built["kv_bytes_per_token"]
    known = (machine["copy_gb_per_s"], machine["data_sheet_gb_per_s"])
    copied, sheet = ("–" if each is None else f"{read / step_s / each / 1e9:.0%}" for each in known)
    return copied, sheet


def _profile(outcomes: Outcomes) -> str:
    found = _result(outcomes, "profile")
    if found is None:
        return ""
    rows = [
        (name, part["calls"], f"{1e3 * part['median_s']:.3f}", f"{part['total_s'] / found['whole_s']:.0%}")
        for name, part in found["parts"].items()
    ]
    marked = "marked for a profiler" if found["nvtx"] else "not marked: the package nvtx is not installed"
    title = f"## Where the host's time goes, {found['rows']} rows; NVTX ranges {marked}"
    return _table(title, ("", "calls", "median ms", "of the whole"), rows)


def _ranks(outcomes: Outcomes) -> str:
    found = _result(outcomes, "ranks")
    if found is None:
        return ""
    killed = found["killed"]
    rows = [
        ("NCCL", found["nccl"] or "–"),
        ("decode step of 8 rows, ms", f"{found['decode_ms@8']:.2f}"),
        ("a rank that was killed", f"{killed['said']}; told after {killed['after_s']:.1f} s"),
    ]
    return _table("## Two ranks", ("", ""), rows)


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
