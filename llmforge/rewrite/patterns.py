"""The driver that passes share: each place that may match is checked, and skipped with a reason or rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from llmforge.rewrite.pass_base import Changes, Rewritten, Skipped


class NotApplicable(Exception):
    """Why a pass leaves a place as it is; raised before anything is changed."""


def skip_if(reason: str | None) -> None:
    """Raise NotApplicable if there is a reason to."""
    if reason is not None:
        raise NotApplicable(reason)


class NamedNode(Protocol):
    """A node, or a view of one."""

    @property
    def name(self) -> str | None:
        """The name of the node."""


P = TypeVar("P", bound=NamedNode)


def rewrite_each(
    places: Iterable[P], rewrite: Callable[[P], str | Rewritten | list[Rewritten] | None], changes: Changes
) -> Changes:
    """Let `rewrite` change each of `places`, and note in `changes` what it says that it did.

    What it did is of the place, or of other nodes where it gives a `Rewritten` or several; None: the place is no match.
    Where it raises NotApplicable the place is skipped. Returns `changes`.
    """
    for place in places:
        name = str(place.name)
        try:
            done = rewrite(place)
        except NotApplicable as reason:
            changes.skipped.append(Skipped(name, str(reason)))
            continue
        done = Rewritten(name, done) if isinstance(done, str) else done
        changes.rewritten += [] if done is None else done if isinstance(done, list) else [done]
    return changes
