"""From a configuration to a raw graph and its tensors: skeleton, capture, layers, weights, and the reference."""
