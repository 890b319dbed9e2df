"""GGUF files, llama.cpp's checkpoints: the header, what it calls things, and the folder that stands for a file."""

from llmforge.checkpoint.gguf.header import SUFFIX, Header, read
from llmforge.checkpoint.gguf.view import WEIGHTS, file_of, folder_of

__all__ = ["SUFFIX", "WEIGHTS", "Header", "file_of", "folder_of", "read"]
