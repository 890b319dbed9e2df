"""How transformers is imported by a process that does nothing but trace."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def without_unused_imports() -> Iterator[None]:
    """Import transformers without what it imports for others, in a process that does nothing but trace.

    That is scipy, of which it wants a function for losses of object detection: 0.2 s. Nor does it read its folder of
    models again: of that it remembers 128 subfolders, of 500, and the whole under another spelling of its path. Nor
    does torch look for the text of the line, in the files of all modules, where it wants the number of it, or import
    bindings of CUDA, which no trace runs on.
    """
    import transformers

    tools: Any = transformers.utils
    has_scipy, read = tools.is_scipy_available, tools.import_utils.create_import_structure_from_path
    framed, no_bindings = inspect.getframeinfo, "cuda" not in sys.modules
    models = Path(transformers.__file__).parent / "models"

    def read_once(path: Path | str) -> object:
        return read(models if Path(path) == models / "__init__.py" else path)

    def frame_alone(frame: Any, context: int = 1) -> inspect.Traceback:
        return framed(frame, context=0)

    inspect.getframeinfo = frame_alone
    if no_bindings:
        sys.modules["cuda"] = None  # type: ignore[assignment]  # which is how Python is told that it is not there
    tools.is_scipy_available = lambda: False
    tools.import_utils.create_import_structure_from_path = read_once
    try:
        yield
    finally:
        inspect.getframeinfo = framed
        if no_bindings:
            del sys.modules["cuda"]
        tools.is_scipy_available = has_scipy
        tools.import_utils.create_import_structure_from_path = read
