"""The methods of quantization, one file each, and the explicit tuple of all of them.

Nothing else knows a method by its name: passes ask here for what a recipe names, calibration for what it demands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from llmforge.quantization.methods.base import Method
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.methods.rtn import Rtn

# In the order in which a schema lists them.
METHODS: tuple[type[Method], ...] = (Rtn, Gptq)
DEFAULT = Gptq
PLAIN = Rtn  # needs no calibration: for what calibration does not see, and in its place where it fails

AUTO = "auto"  # the default method, with formats that calibration chooses for each weight
_AUTO_SUMMARY = (
    f"{DEFAULT.name} in formats that calibration chooses for each weight, within weight_bits or weight_bytes"
)

STORED = "stored"  # none: the codes that the checkpoint has
_STORED_SUMMARY = "the codes of a checkpoint that is quantized already, as they are; other weights stay as they are"

_Pass = TypeVar("_Pass")


class Named:
    """Annotates a string that names a method: only names of `METHODS`, `AUTO` and `STORED` are valid."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema([*(method.name for method in METHODS), AUTO, STORED])


def summaries() -> str:
    """Describe all methods in a line."""
    named = [(method.name, method.summary) for method in METHODS]
    return "; ".join(f"{name}: {said}" for name, said in (*named, (AUTO, _AUTO_SUMMARY), (STORED, _STORED_SUMMARY)))


def with_options(*, before: str) -> Callable[[type[_Pass]], type[_Pass]]:
    """Declare the options of all methods as fields of a pass, in front of its field `before`.

    For a class that is not a dataclass yet. Each description begins with "of", and the method's name.

    Raises:
        TypeError: the pass, or another method, has an option of this name.
    """

    def declare(cls: type[_Pass]) -> type[_Pass]:
        own = list(cls.__annotations__.items())
        at = [name for name, _ in own].index(before)
        fields: dict[str, Any] = dict(own[:at])
        for method in METHODS:
            for name, option in _options(method).items():
                if name in cls.__annotations__ or name in fields:
                    raise TypeError(f"{cls.__name__} has an option {name} besides that of {method.name}")
                described = Field(description=f"for {method.name}: {option.description}")
                fields[name] = Annotated[option.annotation, *option.metadata, described]
                setattr(cls, name, option.default)
        cls.__annotations__ = fields | dict(own[at:])
        return cls

    return declare


def make(name: str, options: object) -> Method:
    """Make the method called `name`; its options are attributes of `options`, a pass with those of all methods.

    That of `STORED` is for what is not stored as codes.
    """
    others: dict[str, type[Method]] = {AUTO: DEFAULT, STORED: PLAIN}
    cls = others[name] if name in others else next(method for method in METHODS if method.name == name)
    return cls(**{option: getattr(options, option) for option in _options(cls)})


def _options(method: type[Method]) -> dict[str, Any]:
    return dict(method.__pydantic_fields__)  # type: ignore[attr-defined]  # each subclass is a pydantic dataclass
