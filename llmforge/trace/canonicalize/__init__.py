"""From a raw graph to the canonical dialect: rules that change how a graph is written, and none of its numbers."""
