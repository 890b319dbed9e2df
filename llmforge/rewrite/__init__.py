"""What passes and engines share: the interface of a pass, linear layers, kernels' operators, plans of precision."""
