"""Cache of what builds compute: stages and passes, by the content that they depend on, on disk."""

from llmforge.cache import installed
from llmforge.cache.code import Code
from llmforge.cache.entry import LOCAL_KINDS, CacheEntry, Key, Summary
from llmforge.cache.host import processor, settings
from llmforge.cache.store import Cache, default_folder, default_size, is_empty

__all__ = [
    "LOCAL_KINDS",
    "Cache",
    "CacheEntry",
    "Code",
    "Key",
    "Summary",
    "default_folder",
    "default_size",
    "installed",
    "is_empty",
    "processor",
    "settings",
]
