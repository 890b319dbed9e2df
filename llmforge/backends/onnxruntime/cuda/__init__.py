"""ONNX Runtime's CUDA provider: lowering, sessions over slots and blocks, captured steps."""
