"""Deployment devices: one YAML file each, and their loader."""
