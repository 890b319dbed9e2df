"""Decides: limits, intervals, looks at more documents, the verdict, comparison with an earlier artifact."""
