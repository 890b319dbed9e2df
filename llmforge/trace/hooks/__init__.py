"""What transformers calls during a trace, and what takes the place of its modules, each recognized by computing."""
