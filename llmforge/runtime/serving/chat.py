"""Chat templates of checkpoints, rendered in a sandbox: they are code that came with the weights."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from llmforge.base.errors import InputError

TEMPLATE_FILE = "chat_template.jinja"
# Files that tell what `bos_token`, `eos_token`, … of a template stand for; the later one wins.
SPECIAL_TOKEN_FILES = ("special_tokens_map.json", "tokenizer_config.json")

# What expressions of a template raise on messages that they do not expect, besides jinja2's own errors.
_EXPRESSION_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks what the assistant said, for training; here its body alone."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares an instance variable)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template; `where` names its file in errors.

    Environment, filters and globals are those that checkpoints are written for (transformers' `apply_chat_template`):
    trimmed blocks, `loop` controls, `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML.

    Raises:
        InputError: the template has a syntax error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self._where = where
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"{where}:{error.lineno}: the chat template has an error: {error.message}") from error

    @classmethod
    def read(cls, tokenizer: Path) -> ChatTemplate | None:
        """Read the template of a tokenizer folder; None where it has none."""
        path = tokenizer / TEMPLATE_FILE
        if not path.exists():
            return None
        return cls(path.read_text(encoding="utf-8"), special_tokens(tokenizer), str(path))

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Write `messages` (objects with `role` and `content`) as the model was trained to read them.

        Raises:
            InputError: the template refuses the messages or fails on them.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, *_EXPRESSION_ERRORS) as error:
            raise InputError(f"{self._where}: the chat template cannot render these messages: {error}") from error


def special_tokens(tokenizer: Path) -> dict[str, str]:
    """Read the special tokens by their names (`bos_token`, …) from a tokenizer folder."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_FILES:
        path = tokenizer / name
        if not path.exists():
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path}: not a JSON file: {error}") from error
        for key, value in data.items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                tokens[key] = content
    return tokens


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
