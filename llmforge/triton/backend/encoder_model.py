"""The model that Triton's python backend loads for embedders and rerankers: texts in, embeddings or scores out.

Triton's dynamic batching hands over requests that came while the model ran; their rows run together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from llmforge.artifact import admission
from llmforge.base import process
from llmforge.base.errors import EnvironmentLacks, ForgeError
from llmforge.serving.encoder_runner import load_encoder
from llmforge.serving.protocol.metrics import ARTIFACT, COUNTERS, SEQUENCES
from llmforge.triton.backend import checks, encoder_requests, settings
from llmforge.triton.backend.encoder_requests import EncoderRequest
from llmforge.triton.backend.failures import failed

# What recomputes it (pydantic, the recipe, every metric) is in no environment that serves.
_UNVERIFIED = "is not verified here: `llmforge triton` did when it wrote the repository; `llmforge verify` does again"
_ALLOW = "write the repository with `llmforge triton --allow fail`"
_TOKENS = "llmforge_prompt_tokens_total"


class TritonEncoderModel:
    """The interface that Triton asks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the artifact; Triton takes requests when this returns."""
        pb_utils.Logger.log_info(f"llmforge: loading {args['model_instance_name']}")
        process.share_heaps()
        try:
            checks.numpy_fits(np.__version__)
            wanted = settings.read_encoder(json.loads(args["model_config"])["parameters"])
            if args["model_instance_kind"] != "CPU":
                raise EnvironmentLacks(
                    f"instance_group of config.pbtxt says KIND_{args['model_instance_kind']}, but the engine is for a "
                    "CPU",
                    hint="kind: KIND_CPU",
                )
            folder = Path(args["model_repository"], args["model_version"], wanted.artifact).resolve()
            admitted = admission.admit(folder, allow=wanted.allow, how_to_allow=_ALLOW)
            self._runner = load_encoder(folder, wanted.threads)
        except ForgeError as error:
            raise pb_utils.TritonModelException(f"llmforge: {error}") from error
        manifest = admitted.manifest
        unverified = f"the verdict of {manifest.name} {manifest.version}, {admitted.verdict}, {_UNVERIFIED}"
        for note in (unverified, *admitted.notes):
            pb_utils.Logger.log_warn(f"llmforge: {note}")
        names = {"model": "model_name", "version": "model_version", "instance": "model_instance_name"}
        labels = {label: args[name] for label, name in names.items()}
        artifact = {"artifact_version": manifest.version, "verdict": admitted.verdict, "verified": "false"}
        self._metrics = _EncoderCounters(labels, artifact)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests that Triton batched; each has an answer or an error of its own."""
        read: list[EncoderRequest | ForgeError] = [self._read(request) for request in requests]
        good = [each for each in read if isinstance(each, EncoderRequest)]
        inputs = [sequence for each in good for sequence in each.inputs]
        try:
            rows = iter(self._runner.run(inputs) if inputs else ())
        except ForgeError as error:
            return [failed(each if isinstance(each, ForgeError) else error) for each in read]
        self._metrics.ran(len(inputs), sum(map(len, inputs)))
        return [
            failed(each)
            if isinstance(each, ForgeError)
            else _response(each, np.stack([next(rows) for _ in each.inputs]))
            for each in read
        ]

    def _read(self, request: Any) -> EncoderRequest | ForgeError:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            return encoder_requests.read(tensors, request.parameters(), self._runner)
        except ForgeError as error:
            return error


def _response(asked: EncoderRequest, made: Any) -> Any:
    outputs = asked.outputs(made).items()
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, value) for name, value in outputs])


class _EncoderCounters:
    """Counts for Triton's metrics endpoint; `labels` tell instances apart, and `artifact` says what they serve."""

    def __init__(self, labels: Mapping[str, str], artifact: Mapping[str, str]) -> None:
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        described = {
            _TOKENS: (COUNTERS[_TOKENS][0], counter, {}),
            f"{SEQUENCES[0]}_total": (SEQUENCES[1], counter, {}),
            ARTIFACT[0]: (ARTIFACT[1], gauge, artifact),
        }
        # Triton drops a family that nobody holds.
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=text, kind=kind)
            for name, (text, kind, _) in described.items()
        }
        metrics = [self._families[name].Metric(labels={**labels, **own}) for name, (_, _, own) in described.items()]
        self._tokens, self._sequences, self._artifact = metrics
        self._artifact.set(1)

    def ran(self, sequences: int, tokens: int) -> None:
        """Count sequences that ran, and their tokens."""
        self._tokens.increment(tokens)
        self._sequences.increment(sequences)
