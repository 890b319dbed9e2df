"""Measurements of an artifact beside the checkpoint it was made from: quality, latency, and the machine they ran on."""
