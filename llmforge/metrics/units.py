"""How figures are written for people: a few significant digits, units, thousands, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmforge.metrics.intervals import Estimate

_PREFIXES = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def significant(value: float, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, in scientific notation only below 0.0001."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 becomes 10.0 and needs a decimal less
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def size(size_bytes: float) -> str:
    """Write a number of bytes in decimal units, "3.81 MB"."""
    for unit, name in _PREFIXES:
        if abs(size_bytes) >= unit:
            return f"{significant(size_bytes / unit)} {name}"
    return f"{size_bytes:.0f} B"


def count(number: int) -> str:
    """Write an integer with thousands separated, "65,893"."""
    return f"{number:,}"


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending integers, "0–5, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def percent(share: float) -> str:
    """Write a share with one decimal, "89.9 %"."""
    return f"{100 * share:.1f} %"


def ms(milliseconds: float) -> str:
    """Write a latency, "12.3 ms"."""
    return f"{significant(milliseconds)} ms"


def duration(seconds: float) -> str:
    """Write what a person waits, "4.2 s", "3 min 05 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def times(ratio: float) -> str:
    """Write a ratio, "3.1×"."""
    return f"{significant(ratio, 2)}×"


def signed(value: float, write: Callable[[float], str]) -> str:
    """Write a change with its sign, "+1.2 %"."""
    written = write(value)
    return written if value <= 0 or math.isnan(value) or written.startswith("+") else f"+{written}"


@dataclass(frozen=True)
class Unit:
    """What a figure is counted in, as in a gate's limit, and how it is written."""

    name: str
    write: Callable[[float], str]
    highest: float = math.inf  # that such a figure can be
    lowest: float = 0.0


TOKENS = Unit("tokens to choose from", lambda value: f"{value:.3f}")
RATIO = Unit("ratio", lambda value: f"{value:.4f}")
SPEEDUP = Unit("ratio", times)
SHARE = Unit("share, 0 to 1", percent, highest=1.0)
SCORE = Unit("score, 0 to 1", lambda value: f"{value:.4f}", highest=1.0)
CORRELATION = Unit("-1 to 1", lambda value: f"{value:.5f}", highest=1.0, lowest=-1.0)
SHIFT = Unit("share, -1 to 1", lambda value: f"{100 * value:+.3f} %", highest=1.0, lowest=-1.0)
TEXT = Unit("tokens", lambda value: f"{value:.0f}")
TOKENS_A_STEP = Unit("tokens a step", lambda value: f"{value:.3f}")
BITS_A_BYTE = Unit("bits per byte", significant)
NATS = Unit("nats", significant)
NATS_MOVED = Unit("nats, either way", lambda value: f"{value:+.3f}", lowest=-math.inf)
NATS_A_TOKEN = Unit("nats per token", significant)
MILLISECONDS = Unit("ms", ms)
PER_SECOND = Unit("per second", significant)
BYTES = Unit("bytes", size)
BITS = Unit("bits", lambda value: f"{value:.2f}")
JOULES = Unit("J", lambda value: f"{significant(value)} J")
USD = Unit("USD", lambda value: f"${significant(value)}")


def interval(estimate: Estimate, write: Callable[[float], str]) -> str:
    """Write the bounds of an estimate; "exact", or "no interval" where the sample is too small."""
    if estimate.is_exact:
        return "exact"
    if estimate.low is None or estimate.high is None:
        return f"no interval: only {estimate.samples} {estimate.of}"
    return f"{write(estimate.low)} – {write(estimate.high)}"


def step_time(seconds: float) -> str:
    """Write a time of a step, "12.3 ms", "1.91 s", "2 min 09 s"."""
    if seconds < 1:
        return ms(seconds * 1e3)
    return f"{significant(seconds)} s" if seconds < 60 else duration(seconds)
