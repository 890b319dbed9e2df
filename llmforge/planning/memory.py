"""Memory of a device: weights, caches and activations of a decoder, and the sequences that there is room for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from llmforge.base.errors import UsageError
from llmforge.planning.roofline import Placement, Workload
from llmforge.planning.scheme import BITS, DtypeScheme
from llmforge.planning.shape import Shape
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK

# What neither weights nor caches take: CUDA context, kernels, libraries and their workspaces lie between the 0.55 and
# the 3.5 GB that NVIDIA AIConfigurator has assumed in turn; a CPU artifact of 321 MB took 419 (docs/performance.md).
RESERVE_BYTES = {"gpu": 1_500_000_000, "cpu": 100_000_000}


@dataclass(frozen=True)
class DeviceMemory:
    """What one device holds at the workload's batch and context, in bytes."""

    capacity: int
    reserve: int
    weights: int
    kv_per_token: int
    cache: int  # of all sequences, whole contexts
    activations: int

    @property
    def needed(self) -> int:
        """All of it."""
        return self.reserve + self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.needed <= self.capacity


def of(placed: Placement, workload: Workload) -> DeviceMemory:
    """Count what one of the devices holds; caches have room for whole contexts, windows or not.

    Raises:
        UsageError: the target's file has no memory size.
    """
    shape, target, scheme, ranks = placed.shape, placed.target, placed.scheme, placed.ranks
    if target.memory_gb is None:
        raise UsageError(
            f"target {target.name} has no memory size",
            hint="run `llmforge doctor --measure --write machine.yaml`, then use --target machine.yaml",
        )
    per_token = scheme.kv_bytes_per_token(shape, ranks)
    per_sequence = workload.context * per_token + scheme.state_bytes(shape, ranks)
    return DeviceMemory(
        capacity=int(target.memory_gb.value * 1e9),
        reserve=RESERVE_BYTES[target.kind],
        weights=scheme.weight_bytes(shape, ranks),
        kv_per_token=per_token,
        cache=workload.batch * per_sequence,
        activations=_activations(shape, scheme, min(workload.prompt, PREFILL_CHUNK), workload.batch),
    )


def largest_batch(placed: Placement, context: int) -> int:
    """Find the largest number of sequences of `context` tokens that fit; 0 where not one does."""

    def lacks_room(batch: int) -> bool:
        return not of(placed, Workload(context, 0, batch)).fits

    one = of(placed, Workload(context, 0, 1))
    most = 1 + (one.capacity - one.needed) // max(one.cache, 1)  # activations leave no more
    return bisect_left(range(1, most + 1), True, key=lacks_room)


def _activations(shape: Shape, scheme: DtypeScheme, tokens: int, batch: int) -> int:
    """Estimate what lives at the widest point of a layer, and the logits.

    Residual, its norm, and what goes in and out of the widest product; fp32 logits [batch, vocabulary].
    """
    width = max(layer.width for _, layer in shape.layers)
    rows = max(tokens, batch)
    return rows * (3 * shape.hidden + 2 * width) * BITS[scheme.compute] // 8 + 4 * batch * shape.vocabulary
