"""ONNX Runtime: graphs on CPUs, and on GPUs through its CUDA provider."""
