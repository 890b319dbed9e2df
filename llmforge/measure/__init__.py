"""Produces figures: quality, latency, tasks, load, start, energy."""
