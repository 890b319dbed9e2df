"""Let modules be absent from a process that has this folder on its path: those that $ABSENT_MODULES names."""

import os
import sys


class Absent:
    """Finds none of some modules."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: object) -> None:
        """Refuse a module that is to be absent."""
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent(os.environ.get("ABSENT_MODULES", "").split(",")))  # type: ignore[arg-type]
