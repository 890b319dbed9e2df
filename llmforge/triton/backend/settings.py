"""The `parameters` of config.pbtxt that this model reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmforge.base.errors import UsageError
from llmforge.serving.interface import EngineOptions

# Read by Triton's python backend itself.
_TRITONS_OWN = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")


@dataclass(frozen=True)
class ModelSettings:
    """How the model serves.

    `artifact` is the folder that holds engine/ and tokenizer/, relative to that of model.py. `allow` is a verdict of
    its gates that is taken as it is. `chat_template` is a file beside model.py, in place of the artifact's template.
    `threads` overrides those of the engine. `engine` options that are not given are the runtime's own.
    """

    artifact: str
    allow: str | None = None
    chat_template: str | None = None
    threads: int | None = None
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)


@dataclass(frozen=True)
class EncoderSettings:
    """How a model that embeds or scores is loaded; the fields are those of `ModelSettings`."""

    artifact: str
    allow: str | None = None
    threads: int | None = None


def read(parameters: Mapping[str, Mapping[str, str]]) -> ModelSettings:
    """Read settings from the model's configuration: `{name: {"string_value": text}}`.

    Raises:
        UsageError: a parameter is unknown, missing, or not what it has to be.
    """
    own = {f.name: str(f.type) for f in dataclasses.fields(ModelSettings) if f.name != "engine"}
    options = {f.name: str(f.type) for f in dataclasses.fields(EngineOptions)}
    given = _read(parameters, own | options)
    engine = EngineOptions(**{name: value for name, value in given.items() if name in options})
    return ModelSettings(**{name: value for name, value in given.items() if name in own}, engine=engine)


def read_encoder(parameters: Mapping[str, Mapping[str, str]]) -> EncoderSettings:
    """Read the settings of a model that embeds or scores.

    Raises:
        UsageError: as `read`.
    """
    return EncoderSettings(**_read(parameters, {f.name: str(f.type) for f in dataclasses.fields(EncoderSettings)}))


def _read(parameters: Mapping[str, Mapping[str, str]], known: Mapping[str, str]) -> dict[str, Any]:
    """Read parameters whose names and annotations are `known`; `artifact` is one of them."""
    texts = {name: value["string_value"] for name, value in parameters.items() if name not in _TRITONS_OWN}
    if unknown := sorted(texts.keys() - known.keys()):
        raise UsageError(
            f"config.pbtxt: unknown parameters {', '.join(unknown)}; known: {', '.join(known)}",
            hint="write the model repository again with the llmforge that built the artifact",
        )
    if "artifact" not in texts:
        raise UsageError("config.pbtxt: the parameter artifact is missing")
    return {name: _value(name, texts[name], kind) for name, kind in known.items() if name in texts}


def _value(name: str, text: str, annotation: str) -> Any:
    """Read `text` as what a field's annotation, as written above, stands for."""
    kind = annotation.removesuffix(" | None")
    try:
        return {"int": int, "float": float}.get(kind, str)(text)
    except ValueError as error:
        raise UsageError(f"config.pbtxt: parameter {name} is {text!r}; expected {kind}") from error
