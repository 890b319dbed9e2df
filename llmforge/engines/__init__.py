"""Engine builders: what a backend loads."""
