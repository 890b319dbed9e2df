"""The command line: `main` is its entry."""

from llmforge.cli.root import cli, main

__all__ = ["cli", "main"]
