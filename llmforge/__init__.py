"""llmforge: a compiler for LLM deployment."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("llmforge")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+source"
