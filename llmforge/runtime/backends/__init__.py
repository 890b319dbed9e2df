"""What runs a graph: ONNX Runtime on a CPU or a GPU, TensorRT; and the memory of devices."""
