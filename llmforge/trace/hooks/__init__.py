"""Functions that transformers calls during a trace, and replacements of its modules, each recognized by computing."""
