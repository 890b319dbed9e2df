"""From a recipe to an artifact: `pipeline` is the picture of the whole, and the only room that knows all the others.

The room has the name of the function that programs call. So that both work, whichever was imported first, calling the
room calls `llmforge.api.build`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("llmforge.api").build(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
