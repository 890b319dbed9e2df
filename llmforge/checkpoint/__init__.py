"""Checkpoints: a Hugging Face folder (`folder`), its tensors (`safetensors_file`, `shards`), and text to run it on."""

from llmforge.checkpoint.encoding import Dense, Encoding
from llmforge.checkpoint.folder import (
    CONFIG,
    CONTEXTS,
    SMALL_FILES,
    Checkpoint,
    Configuration,
    Geometry,
    find_chat_template,
    load_config,
    names_end,
    read_settings,
)
from llmforge.checkpoint.gguf import folder_of

__all__ = [
    "CONFIG",
    "CONTEXTS",
    "SMALL_FILES",
    "Checkpoint",
    "Configuration",
    "Dense",
    "Encoding",
    "Geometry",
    "find_chat_template",
    "folder_of",
    "load_config",
    "names_end",
    "read_settings",
]
