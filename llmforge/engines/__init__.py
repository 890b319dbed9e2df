"""Engine builders: what a backend loads, written from a lowered graph."""
