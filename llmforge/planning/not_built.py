"""What ways of serving that llmforge does not have would bring on a target, by the roofline and the target's links.

- Pipeline parallelism: n devices hold n parts of the layers; a token passes all of them in turn, and sequences in n
  groups keep all of them busy (Huang et al. 2019, "GPipe").
- Caches of idle sequences in host memory: they come back over the link to the host, and are not computed again.
- Disaggregated prefill: one device reads prompts, another generates, and caches pass between them (Zhong et al. 2024,
  "DistServe").
"""

from __future__ import annotations

from collections.abc import Iterator

from llmforge.metrics.units import significant, step_time
from llmforge.planning.roofline import Placement, Workload

STAGES = 2
# PCI Express 5.0 with 16 lanes, one direction, where the target's own link is NVLink (PCI-SIG: 32 GT/s a lane).
HOST_GBS = 63.0


def notes(placed: Placement, workload: Workload) -> Iterator[str]:
    """Say what each would bring to `workload`; nothing of devices that have no link."""
    link, target = placed.target.interconnect, placed.target
    if link is None or placed.ranks > 1:
        return
    reached = placed.ceilings.link
    reading, writing = placed.request_seconds(workload)
    half = max(1, workload.batch // STAGES)
    one, each = placed.decode(workload.batch, workload.mean_context), placed.decode(half, workload.mean_context)
    cache = workload.prompt * placed.scheme.kv_bytes_per_token(placed.shape, 1)
    if workload.batch > 1:
        gained = significant(one.seconds / each.seconds * half * STAGES / workload.batch)
        brings = f"{gained} times the tokens per second of decode on {STAGES} devices, and no shorter TPOT"
    else:
        brings = f"no speed to a single sequence, and half of the weights on each of {STAGES} devices"
    yield f"pipeline parallelism is not supported; it would bring {brings}"
    host = reached if link.kind == "pcie" else HOST_GBS * 1e9 * target.share("link").value
    back, again = cache / host, placed.prefill(workload.prompt).seconds
    assumed = "" if link.kind == "pcie" else f", with {HOST_GBS:g} GB/s assumed"
    yield (
        f"offload of idle caches to host memory is not supported; {workload.prompt} tokens would come back in "
        f"{step_time(back)}{assumed}, and are read again in {step_time(again)}"
    )
    gained = significant((reading + writing) / max(reading, writing) / 2)
    yield (
        f"disaggregated prefill is not supported; two devices would serve {gained} times the tokens of two that "
        f"do both, "
        f"decode would not wait {step_time(again)} for a prompt, and a cache would pass in {step_time(cache / reached)}"
    )
