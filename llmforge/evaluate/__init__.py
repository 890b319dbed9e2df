"""Quality and latency of a shipped engine beside its checkpoint."""
