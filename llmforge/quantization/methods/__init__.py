"""The methods of quantization, one file each, and the explicit tuple of all of them.

Nothing else knows a method by its name: passes ask here for what a recipe names, calibration for what it demands. One
of a plug-in (llmforge.base.plugins) is found by its name; the class of a pass is then `extended` by its options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetCoreSchemaHandler
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema, core_schema

from llmforge.base import plugins
from llmforge.base.errors import ForgeError
from llmforge.base.plugins import Plugin, Seam
from llmforge.quantization.formats import Format
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import QuantizedMatrix
from llmforge.quantization.methods.base import NO_INPUTS, InputStatistic, LayerInputs, Method
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.methods.importance import Importance
from llmforge.quantization.methods.rtn import Rtn

# In the order in which a schema lists them.
METHODS: tuple[type[Method], ...] = (Rtn, Importance, Gptq)
DEFAULT = Gptq
PLAIN = Rtn  # needs no calibration: for what calibration does not see, and in its place where it fails

AUTO = "auto"  # the default method, with formats that calibration chooses for each weight
_AUTO_SUMMARY = (
    f"{DEFAULT.name} in formats that calibration chooses for each weight, within weight_bits or weight_bytes, "
    "or the smallest that keep the budget"
)

STORED = "stored"  # none: the codes that the checkpoint has
_STORED_SUMMARY = "the codes of a checkpoint that is quantized already, as they are; other weights stay as they are"

_Pass = TypeVar("_Pass")


class Named:
    """Annotates a string that names a method: names of `METHODS`, `AUTO`, `STORED`, and `more` alone are valid."""

    def __init__(self, *more: str) -> None:
        self._more = more

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema([*built_in(), *self._more])


def built_in() -> list[str]:
    """List the names that a recipe can give of what is no plug-in's."""
    return [*(method.name for method in METHODS), AUTO, STORED]


def plugin_of(name: str) -> Plugin | None:
    """Find the plug-in that brings the method `name`; None: it is one of `METHODS`, or there is none.

    Raises:
        PluginError: several bring it, or it is written for another interface.
    """
    return SEAM.plugin(name, built_in())


def _check(plugin: Plugin, given: Any) -> type[Method]:
    """Return the class that a plug-in gives, if it is a method."""
    cls: type[Method] = plugins.step_class(plugin, given, Method)
    if not isinstance(getattr(cls, "summary", None), str):
        raise ValueError(f"{cls.__name__}.summary is no text")
    formats = getattr(cls, "formats", ())
    if not formats or not all(isinstance(each, Format) for each in formats):
        raise ValueError(f"{cls.__name__}.formats lists no formats of llmforge.quantization.formats")
    if not all(isinstance(each, InputStatistic) for each in cls.demands):
        raise ValueError(f"{cls.__name__}.demands lists something else than InputStatistic")
    for option in dataclasses.fields(cast(Any, cls)):
        if option.default is dataclasses.MISSING:
            raise ValueError(f"its option {option.name} has no default")
    return _guarded(plugin, cls)


def _guarded(plugin: Plugin, given: type[Method]) -> type[Method]:
    """Let what a method raises besides ValueError, or gives that is no matrix of codes, be an error of its plug-in."""

    def quantize(self: Method, weight: NDArray[Any], grid: Grid, inputs: LayerInputs = NO_INPUTS) -> QuantizedMatrix:
        try:
            found = given.quantize(self, weight, grid, inputs)
        except ValueError:  # what it may say of a weight, or of its inputs
            raise
        except ForgeError:
            raise
        except Exception as error:
            raise plugins.failure(plugin, error) from error
        if (wrong := _wrong(found, weight.shape, grid)) is not None:
            raise plugins.refusal(plugin, f"of a weight {list(weight.shape)} in {grid.format.name} {wrong}")
        return found

    own = {"__module__": given.__module__, "__qualname__": given.__qualname__, "__doc__": given.__doc__}
    made: type[Method] = type(given.__name__, (given,), {**own, "quantize": quantize})
    return made


def _wrong(found: Any, shape: tuple[int, ...], grid: Grid) -> str | None:
    """Say why `found` holds no codes of `grid` for a weight [N, K]; None: it does."""
    if not isinstance(found, QuantizedMatrix) or found.grid != grid:
        return f"it gave a {type(found).__name__}, not a QuantizedMatrix on that grid"
    n, k = shape
    codes, scales, zeros = found.codes, found.scales, found.zero_points
    if codes.shape != shape or codes.dtype != np.uint8 or codes.max(initial=0) > grid.top:
        return f"its codes are {codes.dtype} {list(codes.shape)}; expected uint8 {list(shape)}, at most {grid.top}"
    blocks = (n, grid.blocks(k))
    shaped = scales.shape == blocks and scales.dtype == np.float32
    if not shaped or not np.isfinite(scales).all() or not scales.all():
        return (
            f"its scales are {scales.dtype} {list(scales.shape)}; expected finite fp32 {list(blocks)}, none of them 0"
        )
    if (zeros is None) != grid.symmetric or (zeros is not None and (zeros.shape != blocks or zeros.dtype != np.uint8)):
        return f"its zero points do not go with a grid that is {'' if grid.symmetric else 'not '}symmetric"
    return None


SEAM = Seam("methods", _check)


def extended(cls: type[_Pass], name: str) -> type[_Pass]:
    """Give the class of a pass that takes the method `name` of a plug-in and its options; other names change nothing.

    Raises:
        PluginError: the plug-in fails, or has an option that the pass has already.
    """
    plugin = plugin_of(name)
    return cls if plugin is None else cast("type[_Pass]", _extended(cast(Any, cls), plugin))


@cache
def _extended(cls: Any, plugin: Plugin) -> Any:
    method = SEAM.load(plugin)
    own = {each.name for each in dataclasses.fields(cls)}
    fields: dict[str, Any] = {"method": Annotated[str, Named(plugin.name), Field(description=summaries(method))]}
    space: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__, "method": getattr(cls, "method", "")}
    for option, annotation, default in _declared(method):
        if option in own:
            raise plugins.refusal(plugin, f"its option {option} is one of the pass {cls.name}")
        fields[option], space[option] = annotation, default
    made = type(cls.__name__, (cls,), {**space, "__annotations__": fields, "__qualname__": cls.__qualname__})
    return dataclass(frozen=True)(made)


def summaries(*more: type[Method]) -> str:
    """Describe all methods in a line, and `more` of plug-ins."""
    named = [(method.name, method.summary) for method in (*METHODS, *more)]
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
            for name, annotation, default in _declared(method):
                if name in cls.__annotations__ or name in fields:
                    raise TypeError(f"{cls.__name__} has an option {name} besides that of {method.name}")
                fields[name] = annotation
                setattr(cls, name, default)
        cls.__annotations__ = fields | dict(own[at:])
        return cls

    return declare


def make(name: str, options: object) -> Method:
    """Make the method called `name`; its options are attributes of `options`, a pass with those of all methods.

    That of `STORED` is for what is not stored as codes.
    """
    cls = named(name)
    return cls(**{option: getattr(options, option) for option in _options(cls)})


def named(name: str) -> type[Method]:
    """Give the method that a recipe means by `name`, which is valid; that of `STORED` is for what has no codes."""
    known: dict[str, type[Method]] = {AUTO: DEFAULT, STORED: PLAIN, **{method.name: method for method in METHODS}}
    if (found := known.get(name)) is None:
        found = SEAM.find(name, built_in())
    assert found is not None, f"no method is called {name}"
    return found


def _declared(method: type[Method]) -> list[tuple[str, Any, Any]]:
    """List the options of a method as a pass declares them: name, annotation and default."""
    found = []
    for name, option in _options(method).items():
        described = Field(description=f"for {method.name}: {option.description}")
        found.append((name, Annotated[option.annotation, *option.metadata, described], option.default))
    return found


def _options(method: type[Method]) -> dict[str, Any]:
    return dict(method.__pydantic_fields__)  # type: ignore[attr-defined]  # each subclass is a pydantic dataclass
