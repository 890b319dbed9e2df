"""The model that Triton's python backend loads: requests in, the runtime's engine, responses out.

`execute` validates and hands over, and returns at once: the engine batches what runs, whatever Triton passes together.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from llmforge.artifact import admission
from llmforge.backends import PROVIDERS
from llmforge.base import process
from llmforge.base.errors import EnvironmentLacks, ForgeError, Unavailable
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.serving.chat import ChatTemplate, special_tokens
from llmforge.serving.engine_process import EngineProcess
from llmforge.serving.engine_worker import SMALL_CONSTRAINT
from llmforge.serving.protocol.client_json import JsonLimits
from llmforge.triton.backend import checks, inputs, settings, signature
from llmforge.triton.backend.metrics import Metrics
from llmforge.triton.backend.responses import POLL_S, ResponseSender, fail
from llmforge.triton.backend.worker_pool import QueueWorker

# What recomputes it (pydantic, the recipe, every metric) is in no environment that serves.
_UNVERIFIED = "is not verified here: `llmforge triton` did when it wrote the repository; `llmforge verify` does again"
_ALLOW = "write the repository with `llmforge triton --allow fail`"
DRAIN_S = 5.0
KINDS = ("text", "chat", "long", "constrained", "long constraint")  # the last two get what the others read
SHARED_MEMORY = Path("/dev/shm")
SMALL = 32 << 10  # bytes of a request; longer ones wait for each other only


@dataclass(frozen=True)
class _Arrival:
    """A request as it came."""

    tensors: inputs.Tensors
    parameters: str
    timeout_us: int
    sender: Any  # pb_utils.InferenceResponseSender
    arrived: float  # by `time.perf_counter`

    @property
    def waited_s(self) -> float:
        """How long ago it came."""
        return time.perf_counter() - self.arrived


class TritonPythonModel:
    """The interface that Triton asks for."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Hold config.pbtxt to the tensors and the transaction policy that this code has, and add what it lacks."""
        config.set_max_batch_size(1)
        config.set_model_transaction_policy({"decoupled": True})
        for spec in signature.INPUTS:
            config.add_input({"name": spec.name, "data_type": spec.data_type, "dims": [spec.length], "optional": True})
        for spec in signature.OUTPUTS:
            config.add_output({"name": spec.name, "data_type": spec.data_type, "dims": [spec.length]})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the artifact and start to serve; Triton takes requests when this returns."""
        pb_utils.Logger.log_info(f"llmforge: loading {args['model_instance_name']}")
        process.share_heaps()
        try:
            checks.numpy_fits(np.__version__)
            config = json.loads(args["model_config"])
            wanted = settings.read(config["parameters"])
            here = Path(args["model_repository"], args["model_version"])
            folder = (here / wanted.artifact).resolve()
            admitted = admission.admit(folder, allow=wanted.allow, how_to_allow=_ALLOW)
            device = _device(RuntimeConfig.read(folder / "engine" / FILE), args)
            template = None
            if wanted.chat_template is not None:
                template = ChatTemplate.of_file(here / wanted.chat_template, special_tokens(folder / "tokenizer"))
            self._engine = EngineProcess(
                folder, wanted.engine, wanted.threads, None, device, os.getppid(), _shared_memory(), template
            )
        except ForgeError as error:
            raise pb_utils.TritonModelException(f"llmforge: {error}") from error
        copies = _copies(config, device)
        manifest = admitted.manifest
        unverified = f"the verdict of {manifest.name} {manifest.version}, {admitted.verdict}, {_UNVERIFIED}"
        for note in (unverified, *admitted.notes, *([copies] if copies else []), *self._engine.stats().notes):
            pb_utils.Logger.log_warn(f"llmforge: {note}")
        names = {"model": "model_name", "version": "model_version", "instance": "model_instance_name"}
        labels = {label: args[name] for label, name in names.items()}
        artifact = {"artifact_version": manifest.version, "verdict": admitted.verdict, "verified": "false"}
        self._metrics = Metrics(self._engine.stats, labels, artifact)
        self._limits = JsonLimits.of(self._engine.encoder)
        self._sender = ResponseSender(self._engine, self._metrics, _end_server)
        most = self._engine.encoder.config.max_batch + self._engine.options.max_queue
        self._workers = {kind: QueueWorker(kind, most, _end_server) for kind in KINDS}

    def execute(self, requests: Sequence[Any]) -> None:
        """Take on requests; their responses come later, from the sender's thread."""
        for request in requests:
            arrived = time.perf_counter()
            sender = request.get_response_sender()
            # Copied: Triton takes the memory back when `execute` returns.
            tensors = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
            parameters = request.parameters() or "{}"
            arrival = _Arrival(tensors, parameters, request.timeout(), sender, arrived)
            size = len(parameters) + sum(map(_size, tensors.values()))
            kind = "long" if size > SMALL else "chat" if signature.MESSAGES.name in tensors else "text"
            self._put(kind, sender, partial(self._read, arrival))

    def finalize(self) -> None:
        """Stop. Triton waits for running requests before it unloads a model; any that remain end as cancelled."""
        for worker in self._workers.values():
            worker.close()
        self._sender.close(DRAIN_S)
        self._metrics.close()

    def _put(self, kind: str, sender: Any, do: Callable[[], None]) -> None:
        try:
            self._workers[kind].put(do)
        except ForgeError as error:
            self._refuse(sender, error)

    def _read(self, arrival: _Arrival) -> None:
        """Read a request and pass it on, or answer why not."""
        sender, timeout_us = arrival.sender, arrival.timeout_us
        try:
            if arrival.waited_s > POLL_S and sender.is_cancelled():  # while others were read
                raise Unavailable("the client has gone")
            read = inputs.read(
                arrival.tensors,
                arrival.parameters,
                timeout_us / 1e6 if timeout_us else None,
                self._engine.encoder,
                self._limits,
            )
        except ForgeError as error:
            self._refuse(sender, error)
            return
        constraint = read.request.sampling.constraint
        if constraint is None:
            self._submit(read, arrival)
        else:
            kind = "constrained" if len(constraint.text) <= SMALL_CONSTRAINT else "long constraint"
            self._put(kind, sender, partial(self._submit, read, arrival))

    def _submit(self, read: inputs.InferenceRequest, arrival: _Arrival) -> None:
        """Hand a request to the engine, or answer why it does not take it."""
        try:
            self._sender.submit(_without(read, arrival.waited_s), arrival.sender, arrival.arrived)
        except ForgeError as error:
            self._refuse(arrival.sender, error)

    def _refuse(self, sender: Any, error: ForgeError) -> None:
        self._metrics.refused(error)
        fail(sender, error)


def _size(tensor: NDArray[Any]) -> int:
    """Count the bytes of a tensor, whose elements may be bytes."""
    return tensor.nbytes + (sum(map(len, tensor.reshape(-1))) if tensor.dtype == np.object_ else 0)


def _without(read: inputs.InferenceRequest, waited_s: float) -> inputs.InferenceRequest:
    """Take the time that a request waited out of its deadline."""
    if read.request.timeout_s is None:
        return read
    left = max(read.request.timeout_s - waited_s, 1e-3)
    return dataclasses.replace(read, request=dataclasses.replace(read.request, timeout_s=left))


def _device(config: RuntimeConfig, args: Mapping[str, str]) -> int:
    """Say which GPU this instance gets: the one that its instance group names.

    Raises:
        EnvironmentLacks: the group is of another kind of device than the engine.
    """
    kind = (PROVIDERS[config.provider].kind or "cpu").upper()
    if args["model_instance_kind"] != kind:
        raise EnvironmentLacks(
            f"instance_group of config.pbtxt says KIND_{args['model_instance_kind']}, but the engine is for a {kind}",
            hint=f"kind: KIND_{kind}",
        )
    return int(args["model_instance_device_id"]) if kind == "GPU" else 0


def _copies(config: Mapping[str, Any], device: int) -> str | None:
    """Say on which GPUs Triton runs a copy of the model, if there are several; the instance on the first one says it.

    Triton puts all GPUs of the host into a group of KIND_GPU that names none.
    """
    gpus = sorted({gpu for group in config.get("instance_group", ()) for gpu in group.get("gpus", ())})
    if len(gpus) < 2 or device != gpus[0]:
        return None
    listed = ", ".join(map(str, gpus))
    return (
        f"a copy of the model, with weights and a KV cache of its own, runs on each of the GPUs {listed}; "
        "`gpus` of instance_group chooses (serving.triton.gpus in a recipe)"
    )


def _shared_memory() -> tuple[Path, ...]:
    """Find the files through which the server and this process talk: it names them in this process's command line.

    The server removes them when it ends in order; one that is killed would leave them in memory for good.
    """
    words = Path("/proc/self/cmdline").read_text().split("\0")
    return tuple(path for word in words if word and "/" not in word and (path := SHARED_MEMORY / word).is_file())


def _end_server() -> None:
    """End the server's process, in an orderly way, after the engine died and every request has got its error.

    Without it the server would go on to call itself ready, and refuse everything; whoever watches it starts it anew.
    """
    pb_utils.Logger.log_error("llmforge: the engine failed; ending the server")
    os.kill(os.getppid(), signal.SIGTERM)
