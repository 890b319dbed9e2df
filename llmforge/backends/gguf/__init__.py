"""GGUF files, which llama.cpp loads."""
