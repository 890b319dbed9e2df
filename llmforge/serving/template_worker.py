"""The process that renders a chat template: `chat.py` starts this file as a program and talks to it in lines of JSON.

A template is code that came with the weights. jinja2's sandbox keeps it from files and from Python; time and memory it
does not bound (`{{ 'x' * 10**9 }}`, loops in loops, `'%999999999d' | format(1)`), and no list of what to forbid would
be complete. So it runs where the system bounds both, and where its end is nobody else's.

The first line that comes in is `{"source": …, "special_tokens": {…}}`; each later one is what a rendering gets, and is
answered by `{"text": …}` or `{"error": …}`.
"""

from __future__ import annotations

import datetime
import json
import math
import resource
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 512 << 20  # of address space, in which Python itself takes 40 MB
CPU_S = 2  # of one rendering, which takes milliseconds
MOST_CHARACTERS = 8 << 20  # of a text: more than the longest context

MARKS = ("generation_begins", "generation_ends")  # variables; what is not given is nothing

# What expressions of a template raise on messages that they do not expect, besides jinja2's own errors; Python's
# compiler refuses blocks that are nested too deeply.
_FAILURES = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: what the assistant said, between two marks where a rendering has them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares an instance variable)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")]) for name in MARKS)
        return [begin, *body, end]


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Make the environment that checkpoints are written for (transformers' `apply_chat_template`).

    Trimmed blocks, `loop` controls, `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _render(template: jinja2.Template, values: Mapping[str, Any]) -> dict[str, str]:
    pieces, left = [], MOST_CHARACTERS
    for piece in template.generate(**values):
        left -= len(piece)
        if left < 0:
            return {"error": f"the text has more than {MOST_CHARACTERS} characters"}
        pieces.append(piece)
    return {"text": "".join(pieces)}


def _bound_time() -> None:
    """Let the system end this process once the next rendering has had its time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def main() -> None:
    """Answer line by line, until there are no more."""
    for limit, value in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))
    begin = json.loads(sys.stdin.buffer.readline())
    template: jinja2.Template | None = None
    _answer({"ready": True})
    for line in sys.stdin.buffer:
        _bound_time()
        try:
            if template is None:
                template = make_environment().from_string(begin["source"])
            answer: dict[str, Any] = _render(template, {**begin["special_tokens"], **json.loads(line)})
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY_BYTES >> 20} MB of memory"}
        except _FAILURES as error:
            answer = {"error": str(error)[:1000]}
        _answer(answer)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
