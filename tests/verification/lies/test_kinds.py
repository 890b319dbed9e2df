"""How many kinds of faults are planted besides those that proofs at fixed places, of short texts, let through."""

from __future__ import annotations

from ..test_chosen_tokens import FAULTS as OF_CHOICE
from . import places
from .test_kernel_faults import FAULTS
from .test_long_traces import LIES

# Of these, faults went through before there were liars for them: other faults of their kind are not new.
KNOWN_TRACES = ("one row of the embedding", "learned positions 1000 to 1399")
KNOWN_FAULTS = ("decode over int8 caches", "prompts behind", "the sixth row")
KNOWN_LOSSY = ("lossy: positions", "lossy: attention", "lossy: batches", "lossy: steps")


def new() -> list[str]:
    """Name the kinds that are new."""
    found = [lie.name for lie in places.MORE if not lie.name.startswith(KNOWN_LOSSY)]
    found += [name for name in LIES if not name.startswith(KNOWN_TRACES)]
    found += [fault.name for fault in FAULTS if not fault.name.startswith(KNOWN_FAULTS)]
    return found + [name for name, _ in OF_CHOICE if name != "largest"]  # which a kernel's fault is


def test_new_kinds_are_many() -> None:
    assert len(set(new())) >= 60
