"""Which parameters an option `exclude` leaves alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def exclusion(names: Iterable[str], globs: Iterable[str]) -> str | None:
    """Say which of the parameters `names` is excluded by which of `globs`; None where none is.

    Upper and lower case differ, as in the checkpoint.
    """
    globs = tuple(globs)
    for name in names:
        for glob in globs:
            if fnmatch.fnmatchcase(name, glob):
                return f"{name} is excluded by {glob!r}"
    return None
