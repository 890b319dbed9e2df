"""Values of KEDA's ScaledObject for a fleet, for the manifest `docs/deploy/kubernetes/autoscaling.yaml`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llmforge.planning.fleet.sizing import FleetGoal, FleetSize

JOB = "llmforge-serve"
PROMETHEUS = "http://prometheus.monitoring.svc:9090"
WAITING = 4  # of the manifest, where the goal does not bound TTFT


@dataclass(frozen=True)
class ScalingValues:
    """Between which numbers of replicas to scale, and on what; thresholds are of one replica.

    `waiting`: requests that may wait for a slot: as many as get one, at the planned rate, in the time that TTFT may
    take longer than alone. `running`: mean requests that have one at the planned rate, so that half of the rate keeps
    half of the replicas.
    """

    least: int
    most: int
    waiting: int
    running: float

    @classmethod
    def of(cls, size: FleetSize, goal: FleetGoal, rate: float) -> ScalingValues:
        """Choose values for a fleet that is planned for its highest `rate`, in requests per second."""
        waiting = WAITING
        if goal.objective.ttft_ms is not None:
            spare_s = max(0.0, goal.objective.ttft_ms - size.alone.get("TTFT", 0.0)) / 1e3
            waiting = max(1, math.floor(spare_s * rate / size.replicas))
        running = math.floor(size.running * 100) / 100
        return cls(1, size.replicas, min(waiting, max(1, size.slots)), max(0.01, running))

    def spec(self) -> dict[str, Any]:
        """Write what the manifest's `spec` has in these values' places."""
        asked = {"waiting": f"{self.waiting}", "running": f"{self.running:g}"}
        return {
            "minReplicaCount": self.least,
            "maxReplicaCount": self.most,
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": PROMETHEUS,
                        "query": f'sum(llmforge_requests_{what}{{job="{JOB}"}})',
                        "threshold": threshold,
                    },
                }
                for what, threshold in asked.items()
            ],
        }
