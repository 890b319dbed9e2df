"""What every room stands on: errors, progress, versions, YAML that knows its places. It knows nothing of models."""
