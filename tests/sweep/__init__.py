"""The architecture sweep: every causal language model that transformers knows, shrunk, compiled and compared."""
