"""The model that Triton's python backend loads: requests in, the runtime's engine, responses out.

`execute` validates and hands over, and returns at once: the engine batches what runs, whatever Triton passes together.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from llmforge.base import admission
from llmforge.base.backends import PROVIDERS
from llmforge.base.errors import EnvironmentLacks, ForgeError, Unavailable
from llmforge.runtime.backends.config import FILE, RuntimeConfig
from llmforge.runtime.serving.engine import Engine
from llmforge.triton.backend import checks, inputs, settings, signature
from llmforge.triton.backend.chats import Chats
from llmforge.triton.backend.metrics import Metrics
from llmforge.triton.backend.responses import POLL_S, ResponseSender, fail

_ALLOW = "write the repository with `llmforge triton --allow fail`"
DRAIN_S = 5.0
WATCH_S = 1.0


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
        try:
            checks.numpy_fits(np.__version__)
            config = json.loads(args["model_config"])
            wanted = settings.read(config["parameters"])
            folder = Path(args["model_repository"], args["model_version"], wanted.artifact).resolve()
            admitted = admission.admit(folder, allow=wanted.allow, how_to_allow=_ALLOW)
            device = _device(RuntimeConfig.read(folder / "engine" / FILE), args)
            self._engine = Engine.load(folder, wanted.engine, wanted.threads, device=device)
        except ForgeError as error:
            raise pb_utils.TritonModelException(f"llmforge: {error}") from error
        for note in (*admitted.notes, *self._engine.stats().notes):
            pb_utils.Logger.log_warn(f"llmforge: {note}")
        names = {"model": "model_name", "version": "model_version", "instance": "model_instance_name"}
        labels = {label: args[name] for label, name in names.items()}
        self._metrics = Metrics(self._engine.stats, labels)
        self._sender = ResponseSender(self._engine, self._metrics, _end_server)
        options = self._engine.options
        self._chats = Chats(self._engine.runner.config.max_batch + options.max_queue, _end_server)
        threading.Thread(target=_end_with, args=[os.getppid()], name="llmforge-watch", daemon=True).start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take on requests; their responses come later, from the sender's thread."""
        for request in requests:
            arrived = time.perf_counter()
            sender = request.get_response_sender()
            # Copied: Triton takes the memory back when `execute` returns.
            tensors = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
            submit = partial(self._submit, tensors, request.parameters() or "{}", request.timeout(), sender, arrived)
            if signature.MESSAGES.name not in tensors:
                submit()
                continue
            try:
                self._chats.put(submit)
            except ForgeError as error:
                self._refuse(sender, error)

    def finalize(self) -> None:
        """Stop. Triton waits for running requests before it unloads a model; any that remain end as cancelled."""
        self._chats.close()
        self._sender.close(DRAIN_S)
        self._metrics.close()

    def _submit(
        self, tensors: Mapping[str, Any], parameters: str, timeout_us: int, sender: Any, arrived: float
    ) -> None:
        """Read a request and hand it to the engine, or answer why not."""
        try:
            if time.perf_counter() - arrived > POLL_S and sender.is_cancelled():  # while it waited for other chats
                raise Unavailable("the client has gone")
            read = inputs.read(
                tensors, json.loads(parameters), timeout_us / 1e6 if timeout_us else None, self._engine.runner
            )
            self._sender.submit(_without(read, time.perf_counter() - arrived), sender, arrived)
        except ForgeError as error:
            self._refuse(sender, error)

    def _refuse(self, sender: Any, error: ForgeError) -> None:
        self._metrics.refused()
        fail(sender, error)


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
    kind = PROVIDERS[config.provider].kind.upper()
    if args["model_instance_kind"] != kind:
        raise EnvironmentLacks(
            f"instance_group of config.pbtxt says KIND_{args['model_instance_kind']}, but the engine is for a {kind}",
            hint=f"kind: KIND_{kind}",
        )
    return int(args["model_instance_device_id"]) if kind == "GPU" else 0


def _end_with(server: int) -> None:
    """End this process when the server's ends without a word: its calls into the server would never return."""
    while os.getppid() == server:
        time.sleep(WATCH_S)
    os._exit(1)


def _end_server() -> None:
    """End the server's process, in an orderly way, after the engine died and every request has got its error.

    Without it the server would go on to call itself ready, and refuse everything; whoever watches it starts it anew.
    """
    pb_utils.Logger.log_error("llmforge: the engine failed; ending the server")
    os.kill(os.getppid(), signal.SIGTERM)
