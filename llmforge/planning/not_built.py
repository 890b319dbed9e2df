"""Ways of serving that llmforge does not have: what they would bring on a target, by the roofline and its links.

- Pipeline parallelism: n devices hold n parts of the layers; a token passes all of them in turn, and sequences in n
  groups keep all of them busy (Huang et al. 2019, "GPipe"; Yu et al. 2022, "Orca", section 4).
- Caches of idle sequences in host memory: they come back over the link to the host, and are not computed again.
- Disaggregated prefill: one device reads prompts, another generates, and caches pass between them (Zhong et al. 2024,
  "DistServe").

The notes of a plan say it; a recipe has no keys for them (`llmforge.recipe.errors.meant` says where to look).

    pipeline       round = decode of batch/n rows + n · (bytes of their hidden states / link + latency); a token a round
                   sequences = (n · (memory - reserve - activations) - weights) / cache of one
    offload        cache of a prompt / host link, against prefill of the prompt
    disaggregated  of one device for each, requests/s = 1 / max(r, w), r and w a request's time of reading and writing;
                   two that do both: 2 / (r + w)
"""

from __future__ import annotations

from llmforge.metrics.units import significant, step_time
from llmforge.planning import roofline
from llmforge.planning.memory import DeviceMemory
from llmforge.planning.roofline import Placement, Workload
from llmforge.planning.scheme import BITS
from llmforge.runtime.prefill_shapes import PREFILL_CHUNK

STAGES = 2  # of a pipeline


def notes(placed: Placement, workload: Workload, memory: DeviceMemory) -> tuple[str, ...]:
    """Say what each would bring to `workload`, of which `memory` is what one device holds; nothing without a link."""
    if placed.target.interconnect is None:
        return ()
    brings = {
        "pipeline parallelism": _pipeline(placed, workload, memory),
        "offload of idle caches to host memory": _offload(placed, workload),
        "disaggregated prefill": _disaggregated(placed, workload),
    }
    return tuple(f"{name} is not supported; {what}" for name, what in brings.items())


def _pipeline(placed: Placement, workload: Workload, memory: DeviceMemory) -> str:
    ceilings, batch, ranks = placed.ceilings, workload.batch, placed.ranks
    stages, other = STAGES, ""
    group = -(-batch // stages)
    states = group * placed.shape.hidden * BITS[placed.scheme.compute] / 8
    one = placed.decode(batch, workload.mean_context).seconds
    each = placed.decode(group, workload.mean_context).seconds
    each += stages * (states / ceilings.link + ceilings.collective_s)
    gained = significant(one / each)
    if stages * ranks in roofline.degrees(placed.shape, placed.target):
        divided = Placement(placed.shape, placed.target, placed.scheme, stages * ranks)
        tpot = step_time(divided.decode(batch, workload.mean_context).seconds)
        other = f" (tensor_parallel: {stages * ranks}: {tpot})"
    return (
        f"{stages * ranks} devices would decode {gained} times the tokens per second of {ranks}, with a TPOT of "
        f"{step_time(each)} instead of {step_time(one)}{other}, and hold {_sequences(memory, batch, stages)} sequences "
        f"of {workload.context} tokens instead of {_sequences(memory, batch, 1)}"
    )


def _sequences(memory: DeviceMemory, batch: int, stages: int) -> int:
    """Count the sequences whose caches fit on `stages` devices, each with a part of the layers and all activations."""
    room = stages * (memory.capacity - memory.reserve - memory.activations) - memory.weights
    return max(0, int(room * batch / memory.cache)) if memory.cache else 0


def _offload(placed: Placement, workload: Workload) -> str:
    target = placed.target
    link = target.host_gbs or (target.interconnect.gbs if target.interconnect else None)
    assert link is not None
    reached = link.value * 1e9 * target.share("link").value
    cache = workload.prompt * placed.scheme.kv_bytes_per_token(placed.shape, placed.ranks)
    again = placed.prefill(workload.prompt).seconds
    return (
        f"{workload.prompt} tokens, {cache / 1e6:.1f} MB, would come back in {step_time(cache / reached)}, at "
        f"{significant(reached / 1e9)} GB/s, and are read again in {step_time(again)}"
    )


def _disaggregated(placed: Placement, workload: Workload) -> str:
    reading, writing = placed.request_seconds(workload)
    cache = workload.prompt * placed.scheme.kv_bytes_per_token(placed.shape, placed.ranks)
    piece = min(workload.prompt, PREFILL_CHUNK)
    gained = significant((reading + writing) / max(reading, writing) / 2)
    ratio = significant(max(reading, writing) / min(reading, writing))
    many, few = ("generate", "reads prompts") if writing > reading else ("read prompts", "generates")
    return (
        f"two devices would serve {gained} times the tokens of two that do both, and as many where {ratio} {many} for "
        f"each that {few}; decode would not wait {step_time(placed.prefill(piece).seconds)} for a piece of {piece} "
        f"tokens of a prompt, and a cache would pass in {step_time(cache / placed.ceilings.link)}"
    )
