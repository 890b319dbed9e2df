"""Proofs: that a pass did what it declares (`verifier`), and that a trace computes what the checkpoint does.

A pass is exact, or exact but for rounding, on each of the `changed_subgraphs` (`subgraph_proof`), at every place that
configuration and recipe promise (`promises`); its loss is measured on text (`text_loss`), of a
large model layer by layer, and held to be the same everywhere (`lossy_places`). `reports` holds what a pass says of
itself.
"""
