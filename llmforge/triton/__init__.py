"""Triton Inference Server: the model repository of an artifact, and what runs inside the server."""
