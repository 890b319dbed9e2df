"""A sample plug-in of llmforge: a pass, a quantization method, a metric, a target and a backend."""
