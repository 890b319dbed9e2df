"""`llmforge.plan`: memory, speed and cost, predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypedDict, Unpack

from llmforge.backends.record import Dtype
from llmforge.checkpoint import hub
from llmforge.doctor import kept
from llmforge.measure import machine
from llmforge.planning import render, request
from llmforge.planning.render import Planned, Refused
from llmforge.rewrite.traits import Storage
from llmforge.targets import Target

_WIDTH = 120  # columns


@dataclass(frozen=True, repr=False)
class Plans:
    """A plan for each target that was asked for, in that order; those that are refused say why.

    A shell shows it as text, a notebook as HTML.
    """

    planned: tuple[Planned | Refused, ...]

    @property
    def data(self) -> list[dict[str, Any]]:
        """As plain data: bytes, seconds, shares between 0 and 1, US dollars."""
        return [render.data(each) for each in self.planned]

    def __str__(self) -> str:
        return str(self._drawn().export_text())

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def _repr_html_(self) -> str:
        return str(self._drawn().export_html(inline_styles=True, code_format="<pre>{code}</pre>"))

    def _drawn(self) -> Any:
        from rich.console import Console

        # In a notebook rich would display what is printed, and the notebook the value once more.
        console = Console(record=True, width=_WIDTH, file=StringIO(), highlight=False, force_jupyter=False)
        [*others, last] = self.planned
        console.print(
            render.comparison(self.planned) if others or not isinstance(last, Planned) else render.details(last)
        )
        return console


class Asked(TypedDict, total=False):
    """What a plan may be asked for; what is left out is the recipe's, or a default."""

    batch: int | None
    prompt: int | None  # tokens
    output: int | None  # tokens
    context: int | None  # tokens of both
    price: float | None  # of a device, in US dollars an hour
    ranks: int | None
    compute: Dtype | None
    weights: Dtype | None
    kv: Dtype | None
    product: Dtype | None


def plan(
    what: str | Path,
    target: str | Sequence[str] | None = None,
    *,
    revision: str | None = None,
    **asked: Unpack[Asked],
) -> Plans:
    """Plan a recipe or a checkpoint for one or several targets, as `llmforge plan` does; no weights are read.

    A checkpoint is a folder, or ORG/NAME on the Hub at `revision`: a branch, tag or commit, by default main. Without a
    target it is the recipe's, or of a checkpoint `local`. `asked`: batch, prompt, output, context, ranks; `price`, in
    US dollars an hour; the dtypes compute, weights, kv, product. Figures of this machine's CPU are those that
    `llmforge plan` or `llmforge doctor --measure` kept; a CPU without figures is refused.

    Raises:
        UsageError, CheckpointError, UnsupportedError: nothing can be planned.
        EnvironmentLacks: the Hub cannot be reached.
    """
    names = () if target is None else (target,) if isinstance(target, str) else tuple(target)
    given: dict[str, Any] = {**asked}
    price = given.pop("price", None)
    workload = {name: given.pop(name, None) for name in ("batch", "prompt", "output", "context", "ranks")}
    wanted = request.PlanRequest(targets=names, usd_per_hour=price, wanted=Storage(**given), **workload)
    found = hub.find(Path(what), revision)
    return Plans(tuple(request.answer(Path(what) if found is None else found.folder, wanted, _kept)))


def _kept(target: Target) -> Target | None:
    return kept.of_target(target, machine.describe())
