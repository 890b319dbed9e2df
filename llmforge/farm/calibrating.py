"""Workers of calibration on Ray: actors that carry shares of the windows through layers, each on one CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llmforge.base.errors import ForgeError
from llmforge.calibration.carriers import Worker, WorkerLost
from llmforge.calibration.spread import WindowsWorker
from llmforge.farm import cluster, connection

# Of Ray's object store on this machine: hidden states and sums pass through it. Those of SmolLM2-135M at 8,192 tokens
# are 38 and 176 MB; what does not fit, Ray writes to files.
STORE_BYTES = 500_000_000


@contextmanager
def started(count: int, address: str | None = None) -> Iterator[Sequence[Worker]]:
    """Start `count` workers on the cluster at `address`, or on a Ray of this machine, and end them with the block.

    Raises:
        EnvironmentLacks, UsageError: see `connection.opened`.
    """
    with connection.opened(address, cpus=count, store_bytes=STORE_BYTES) as farm:
        actor = farm.ray.remote(WindowsWorker).options(num_cpus=1, max_restarts=0)
        yield [RayWorker(farm.ray, actor.remote()) for _ in range(count)]


@dataclass(frozen=True, eq=False)
class RayWorker:
    """An actor of Ray that is a `WindowsWorker`."""

    ray: Any
    actor: Any = field(repr=False)

    def ask(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """See `Worker`."""
        reference = getattr(self.actor, method).remote(*arguments)

        def answer() -> Any:
            errors = self.ray.exceptions
            try:
                return self.ray.get(reference)
            except errors.RayTaskError as error:
                if isinstance(error.cause, ForgeError):
                    raise error.cause from None
                raise
            except errors.RayError as error:
                raise WorkerLost(cluster.first_line(error)) from error

        return answer
