"""The seam for metrics of plug-ins: what a plug-in gives is checked, and what goes wrong in it is blamed on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llmforge.base.plugins import Plugin, Seam, blamed, refusal
from llmforge.metrics.quality import ByPosition, Form, Histogram, OfAnswers, OfSums, OfTokens, Quality, Quantile, Summed
from llmforge.metrics.quality_metrics import QUALITY, QualityMetric
from llmforge.metrics.tokens import TokenBlock, TokenValue
from llmforge.metrics.units import Unit


def _check(plugin: Plugin, given: Any) -> QualityMetric:
    """Return the metric that a plug-in gives, whose functions are blamed on it, if it leaves ours alone."""
    if type(given) is not QualityMetric:
        raise ValueError(f"it is a {type(given).__name__}, not an instance of llmforge.metrics.catalog.QualityMetric")
    if given.name != plugin.name:
        raise ValueError(f"its record calls itself {given.name!r}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", given.name):
        raise ValueError("its name must be lower-case letters, digits and `_`, at most 64")
    if given.name in Quality.model_fields:
        raise ValueError("a report has a field of this name")
    if not isinstance(given.unit, Unit) or given.better not in ("lower", "higher", "neither"):
        raise ValueError("its unit is no Unit of llmforge.metrics.units, or `better` is none of lower, higher, neither")
    if given.key is not None or given.note is not None:
        raise ValueError("key figures are llmforge's own: leave `key` and `note` out")
    if not isinstance(given.form, OfSums | OfTokens | Quantile | Histogram | ByPosition | OfAnswers):
        raise ValueError(f"its form is a {type(given.form).__name__}")
    if given.source == "decode_tokens":
        raise ValueError("decode steps are measured for llmforge's own figures alone")
    ours = {value.name: value for metric in QUALITY for value in _values(metric.form)}
    for value in _values(given.form):
        if ours.get(value.name) is not value and value.name.partition(".")[0] != given.name:
            raise ValueError(f"its value {value.name!r} must be called {given.name!r}, or {given.name}.SOMETHING")
    return replace(given, form=_blamed(plugin, given.form, tuple(ours.values())))


SEAM = Seam("metrics", _check)


def _values(form: Form) -> tuple[TokenValue | Summed, ...]:
    return form.values if isinstance(form, OfSums) else () if isinstance(form, OfAnswers) else (form.value,)


def _blamed(plugin: Plugin, form: Form, ours: tuple[TokenValue | Summed, ...]) -> Form:
    """Let what the functions of a form raise, or give that no figure is made of, be an error of their plug-in."""

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with blamed(plugin):
                return function(*given)

        return call

    def value(each: Any) -> Any:
        if each in ours:
            return each

        def of(block: TokenBlock) -> Any:
            with blamed(plugin):
                found = np.asarray(each.of(block))
            if found.shape != block.targets.shape or found.dtype.kind not in "fbiu" or not np.isfinite(found).all():
                what = f"{each.name} is {found.dtype} {list(found.shape)} of {len(block.targets)} tokens"
                raise refusal(plugin, f"{what}; expected a finite number, or a truth, of each")
            return found

        return replace(each, of=of)

    changes: dict[str, Any] = {name: guard(getattr(form, name)) for name in ("figure", "finish") if hasattr(form, name)}
    if isinstance(form, OfSums):
        changes["values"] = tuple(map(value, form.values))
    elif not isinstance(form, OfAnswers):
        changes["value"] = value(form.value)
    return replace(form, **changes)
