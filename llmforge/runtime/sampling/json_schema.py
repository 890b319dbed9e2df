"""JSON schemas as llguidance is given them: what it would let through though it is not valid is ruled out or refused.

llguidance refuses the keywords that it does not know how to apply. What it applies loosely was found by sampling:
dates and times that do not exist, and names that come twice and are counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmforge.base.errors import UsageError

# Keywords whose value is a schema, a list of them, or an object of them (JSON Schema, draft 4 to 2020-12).
_SCHEMA = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})

# RFC 3339 as every reader takes it: years from 1 on, 29 February in leap years, no leap seconds, upper-case T and Z.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def exact(schema: Any, what: str) -> Any:
    """Write a schema so that what llguidance lets through is valid under it; `what` names it in errors.

    Raises:
        UsageError: that cannot be done.
        RecursionError: it is nested too deeply.
    """
    if not isinstance(schema, Mapping):
        return schema
    if "x-guidance" in schema:  # llguidance's own keyword, which can switch checks off
        raise UsageError(f"{what}: x-guidance is not supported")
    made = {name: _inner(name, value, what) for name, value in schema.items()}
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    fewest, required = made.get("minProperties"), made.get("required", ())
    if isinstance(fewest, int) and isinstance(required, list | tuple) and fewest > len(set(map(str, required))) + 1:
        raise UsageError(
            f"{what}: minProperties {fewest} is not supported: names that come twice would be counted twice",
            hint="require the properties by name",
        )
    form = made.get("format")
    if isinstance(form, str) and form in _FORMATS:
        del made["format"]
        others = made.get("allOf", [])
        made["allOf"] = [*others, {"pattern": _FORMATS[form]}] if isinstance(others, list) else others
    return made


def _inner(name: str, value: Any, what: str) -> Any:
    if name in _NAMED and isinstance(value, Mapping):
        return {key: exact(each, what) for key, each in value.items()}
    if name in _SCHEMAS and isinstance(value, list):
        return [exact(each, what) for each in value]
    return exact(value, what) if name in _SCHEMA else value
