"""Checkpoints in the format of compressed-tensors, which vLLM and SGLang load."""
