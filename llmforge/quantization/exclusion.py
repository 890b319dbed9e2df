"""Which parameters an option `exclude` leaves alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence


def exclusion(names: Iterable[str], globs: Sequence[str]) -> str | None:
    """Say which of the parameters `names` is excluded by which of `globs`; None where none is.

    Upper and lower case differ, as in the checkpoint.
    """
    found = ((name, glob) for name in names for glob in globs if fnmatch.fnmatchcase(name, glob))
    return next((f"{name} is excluded by {glob!r}" for name, glob in found), None)
