"""How many rows of logits the wheel's TopK takes at once, and in which slices of rows the largest are taken of more.

Its fast kernels (`hybrid_topk`, of 64 to 256 of at least 8,192) sort partitions of a row, and merge them in one
cooperative kernel whose blocks must all be on the device at once: for 256 of 128,256 ids 7 blocks a row, so 113 rows on
an H100 SXM and 17 on a T4. Of more rows one block a row does it all (`RadixTopK`), in seven passes over the row.

Sources: onnxruntime 1.31, core/providers/cuda/math/topk_hybrid.cuh; registers and shared memory of its kernels, as
`cuobjdump -res-usage` reads them out of the wheel onnxruntime-gpu 1.31.1 (benchmarks/cuda_launches.py, by which a test
holds these rules against the wheel).
"""

from __future__ import annotations

from typing import NamedTuple

LEAST_IDS = 8192  # of a row: the wheel takes the largest of shorter ones by one block a row
FEWEST = 40  # multiprocessors of a device that does not say: a T4's, the fewest of all targets
PARTITIONS = (1792, 2304, 2816, 3328)  # ids that one block sorts
_TARGETS = (2, 4, 8, 16, 32, 64, 128, 256)  # numbers of partitions that nothing is wasted of
_THREADS = 256  # of a block that merges


class Merge(NamedTuple):
    """A cooperative kernel: partitions that one of its blocks merges first, and what a block takes of a multiprocessor.

    Registers of a thread are those of the wheel's code for SM 75, 80, 86, 89, 90 and 120.
    """

    partitions: int
    registers: tuple[int, int, int, int, int, int]
    shared_bytes: int


_THREE_STEPS = Merge(8, (40, 40, 40, 40, 40, 40), 16512)
# By the largest number of partitions that the kernel is for.
_MERGES = {
    4: Merge(4, (31, 30, 33, 33, 31, 32), 8320),
    8: Merge(8, (39, 32, 40, 40, 32, 40), 16512),
    16: Merge(16, (54, 48, 48, 48, 48, 56), 32896),
    32: Merge(8, (40, 32, 38, 38, 36, 40), 16512),
    64: _THREE_STEPS,
    128: _THREE_STEPS,
    256: _THREE_STEPS,
}


class Multiprocessor(NamedTuple):
    """What a multiprocessor has: threads, KiB of shared memory, and what each block takes of that besides its own."""

    threads: int
    shared_kib: int
    taken_bytes: int


# CUDA C++ Programming Guide 13.0, technical specifications per compute capability.
_MULTIPROCESSORS = {
    75: Multiprocessor(1024, 64, 0),
    80: Multiprocessor(2048, 164, 1024),
    86: Multiprocessor(1536, 100, 1024),
    89: Multiprocessor(1536, 100, 1024),
    90: Multiprocessor(2048, 228, 1024),
    120: Multiprocessor(1536, 100, 1024),
}
_REGISTERS = 65536  # of a multiprocessor; a warp takes a multiple of 256


def resident_blocks(sm: int, threads: int, registers: int, shared_bytes: int) -> int:
    """Count the blocks of a kernel that a multiprocessor of capability `sm`, 89, holds at once.

    Raises:
        KeyError: the wheel has no code for `sm`.
    """
    has, warps = _MULTIPROCESSORS[sm], threads // 32
    of_warp = -(-registers * 32 // 256) * 256
    shared = has.shared_kib * 1024 // max(1, shared_bytes + has.taken_bytes)
    return min(has.threads // threads, _REGISTERS // (of_warp * warps), shared)


def partitions(width: int) -> int:
    """Count the partitions of a row of `width`, of which the wheel chooses the size that wastes least."""
    waste: dict[int, float] = {}
    for size in PARTITIONS:
        count = -(-width // size)
        if count <= _TARGETS[-1]:
            target = next(each for each in _TARGETS if each >= count)
            waste[count] = min(waste.get(count, 1.0), (target - count) / target)
    return min(waste, key=lambda count: waste[count]) if waste else -(-width // PARTITIONS[0])


def rows_at_once(width: int, sm: int, multiprocessors: int) -> int:
    """Count the rows of `width` each of which the wheel takes the largest at once by its fast kernels."""
    count = partitions(width)
    merge = next((merge for most, merge in _MERGES.items() if count <= most), None)
    if merge is None:
        return 0
    registers = merge.registers[list(_MULTIPROCESSORS).index(sm)]
    held = resident_blocks(sm, _THREADS, registers, merge.shared_bytes) * multiprocessors
    return held // -(-count // merge.partitions)


def slices(rows: int, vocabulary: int, sm: int, multiprocessors: int) -> tuple[int, ...]:
    """Say with which rows, besides the first, slices of up to `rows` begin, so that each has the fast kernels.

    None where all are taken at once, or none are by those kernels. `multiprocessors`: 0: not known.
    """
    if vocabulary < LEAST_IDS:
        return ()
    at_once = rows_at_once(vocabulary, sm, multiprocessors or FEWEST)
    return tuple(range(at_once, rows, at_once)) if at_once else ()
