"""Tensor parallelism: what can be cut (`shard_plan`), and the graphs of all ranks (`split`)."""
