"""Proofs: that a pass did what it declares (`verifier`), and that a trace computes what the checkpoint does.

Small models run whole (`probe`); of larger ones the `changed_subgraphs` run (`streamed_verifier`), or the whole graph,
streamed (`streamed_execution`).
"""
