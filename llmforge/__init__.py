"""llmforge: a compiler for LLM deployment.

The commands as functions, which a program or a notebook calls:

    import llmforge

    built = llmforge.build("recipe.yaml")                  # Built: path, report, verdict
    model = llmforge.load(built.path)
    print(model.generate("If the file", max_tokens=32))    # Answer: text, token_ids, usage
    for piece in model.stream("If the file", max_tokens=32):
        print(piece, end="")
    logits = model.logits("If the file")                   # fp32 [tokens, vocabulary]
    llmforge.plan("recipe.yaml", target=["l4", "h200"])    # Plans: data
    llmforge.gate(built.path, against="NAME:prod")         # Judged: verdict
    llmforge.evaluate(built.path, ["arc_easy"], recipe="recipe.yaml")

Errors are `llmforge.base.errors.ForgeError`, with a message, a hint and the exit code of the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmforge.api import Answer, Built, Judged, Model, Plans, build, evaluate, gate, load, plan
    from llmforge.base.errors import ForgeError
    from llmforge.recipe import Recipe

__version__: str
__all__ = [
    "Answer",
    "Built",
    "ForgeError",
    "Judged",
    "Model",
    "Plans",
    "Recipe",
    "build",
    "evaluate",
    "gate",
    "load",
    "plan",
]
_ELSEWHERE = {"ForgeError": "llmforge.base.errors", "Recipe": "llmforge.recipe"}


def __getattr__(name: str) -> Any:
    """Import what is asked for; the version, too: what reads it takes a fifth of the time of `llmforge --help`."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("llmforge")
        except PackageNotFoundError:  # a source tree on the path, not installed
            return "0+source"
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "llmforge.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what is public, imported already or not."""
    return sorted([*__all__, "__version__"])
