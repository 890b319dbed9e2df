"""The target `sample-box`: the file of its name."""
