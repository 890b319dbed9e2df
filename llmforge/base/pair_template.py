"""What a query and a text are written as for a language model that scores them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PairTemplate:
    """What stands before a query, between it and its text, and behind that; in all three control tokens are parsed."""

    before: str
    between: str
    behind: str

    def head(self, query: str) -> str:
        """Write what stands before the text."""
        return f"{self.before}{query}{self.between}"

    def pair(self, query: str, text: str) -> str:
        """Write a pair."""
        return f"{self.head(query)}{text}{self.behind}"
