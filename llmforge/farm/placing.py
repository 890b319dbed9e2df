"""Placement of builds on a cluster: CPUs, memory, and the node that has the device.

A node has a device if it has one of two resources: `llmforge:TARGET`, which whoever starts the node gives it, or
`accelerator_type:NAME`, which Ray finds, where the target's YAML has that name as its `accelerator`. Nodes for CPU
targets need neither: a build for a CPU goes anywhere, unless some node says which CPU targets it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmforge.base.errors import EnvironmentLacks
from llmforge.recipe import Recipe
from llmforge.targets import Isa, Target

PREFIX = "llmforge:"  # of a resource that says which target a node is
_ACCELERATOR = "accelerator_type:"  # as Ray writes it
_SHARE = 0.001  # of such a resource, which is a mark and not a quantity
UNKNOWN_BYTES = 2 * 10**9  # asked for where nothing is predicted

Resources = Mapping[str, float]  # of a node, by name: "CPU", "GPU", "memory" in bytes, and marks


@dataclass(frozen=True)
class NodePlacement:
    """What a task asks for."""

    cpus: float
    memory_bytes: int
    gpus: int = 0
    marks: Mapping[str, float] = field(default_factory=dict)
    avoided: frozenset[str] = frozenset()  # identities of nodes that it failed on

    def grown(self, nodes: Sequence[Resources]) -> NodePlacement | None:
        """Ask for twice the memory, at most for all of the largest node that suits; None: it had that already."""
        most = int(max((node.get("memory", 0) for node in nodes if self.suits(node)), default=0))
        return replace(self, memory_bytes=min(2 * self.memory_bytes, most)) if self.memory_bytes < most else None

    def suits(self, node: Resources) -> bool:
        """Say if a node has the device, with enough GPUs."""
        return node.get("GPU", 0) >= self.gpus and all(mark in node for mark in self.marks)

    def fits(self, node: Resources) -> bool:
        """Say if a node that nothing else runs on could run it."""
        enough = node.get("CPU", 0) >= self.cpus and node.get("memory", 0) >= self.memory_bytes
        return enough and self.suits(node)

    def __str__(self) -> str:
        """Say what it waits for."""
        named = [f"{self.cpus:g} CPUs", f"{self.memory_bytes / 1e9:.1f} GB", *([f"{self.gpus} GPUs"] * bool(self.gpus))]
        return f"a node with {', '.join([*named, *self.marks])}"


def here(isa: Isa, gpus: Sequence[str]) -> dict[str, float]:
    """Give the marks of a machine with that instruction set and the GPUs of those targets."""
    cpus = [f"cpu-{each.value}" for each in Isa if isa.includes(each)]
    return {f"{PREFIX}{name}": 1.0 for name in (*cpus, *dict.fromkeys(gpus))}


def mark(target: Target, nodes: Sequence[Resources]) -> dict[str, float] | None:
    """Give the resource by which nodes with the device of `target` are found; None: no node has it."""
    own, found = f"{PREFIX}{target.catalog_name}", f"{_ACCELERATOR}{target.accelerator}"
    for name in (own, found):
        if any(name in node for node in nodes):
            return {name: _SHARE}
    told = any(name.startswith(f"{PREFIX}cpu-") for node in nodes for name in node)
    return {} if target.kind == "cpu" and not told else None


def place(
    recipe: Recipe,
    target: Target,
    nodes: Sequence[Resources],
    *,
    jobs: int | None = None,
    memory_bytes: int | None = None,
    on_device: bool = True,
) -> NodePlacement:
    """Say what a build of `recipe` asks for, or with `on_device` false what it does where any node will do.

    `jobs` builds share a node; by default a build that measures latency has one to itself, and others take two CPUs.
    `memory_bytes` is what the build is predicted to take; never more than the largest node has is asked for.

    Raises:
        EnvironmentLacks: no node has what it needs.
    """
    marks, gpus = {}, 0
    if on_device:
        found = mark(target, nodes)
        if found is None:
            raise EnvironmentLacks(
                f"no node has the device of target {target.name}",
                hint=f"""start its node with `ray start … --resources '{{"{PREFIX}{target.catalog_name}": 1}}'`""",
            )
        marks = found
        if target.kind == "gpu":
            gpus = recipe.engine.tensor_parallel
            if not any(node.get("GPU", 0) >= gpus for node in nodes if all(name in node for name in marks)):
                gpus = 0  # a node that names its device and hides it from Ray
    wanted = NodePlacement(1, 0, gpus, marks)
    suitable = [node for node in nodes if wanted.suits(node) and node.get("CPU", 0) >= 1]
    if not suitable:
        raise EnvironmentLacks(f"no node has {', '.join(marks) or 'a CPU'} and a CPU to build with")
    cpus = int(max(node["CPU"] for node in suitable))
    alone = recipe.validation.latency is not None
    share = cpus if jobs is None and alone else min(2, cpus) if jobs is None else max(1, cpus // jobs)
    most = int(max(node.get("memory", 0) for node in suitable))
    return replace(wanted, cpus=share, memory_bytes=min(memory_bytes or UNKNOWN_BYTES, most))
