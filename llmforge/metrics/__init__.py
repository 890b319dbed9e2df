"""Metrics: one record a metric, its arithmetic and its interval. No torch, no files, no graph."""
