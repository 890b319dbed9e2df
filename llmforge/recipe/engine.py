"""The section `engine` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmforge.backends import BackendName
from llmforge.recipe.section import Section


class EngineSpec(Section):
    """The engine to build and the largest request it serves."""

    backend: BackendName = Field(default="onnxruntime", description="runtime that loads the engine")
    max_context: int = Field(
        ge=2, le=2**24, description="maximum tokens of prompt and answer together; the capacity of the KV cache"
    )
    max_batch: int = Field(default=1, ge=1, le=4096, description="maximum number of concurrent sequences")
    threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads; default: one per physical core")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="number of GPUs, or of processes on a CPU, that each layer is split over"
    )
    decode_batches: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(),
        max_length=4096,
        description="batch sizes that decode steps on a GPU are padded to; default: powers of two up to max_batch",
    )
    cuda_graphs: Literal["require", "allow", "off"] = Field(
        default="require",
        description="run decode steps on a GPU as CUDA graphs; require: all, or fail the build; allow: where possible",
    )
    kv_cache: Literal["slots", "paged"] | None = Field(
        default=None,
        description="memory of the KV cache on a GPU; slots: max_context tokens for each sequence; paged: blocks of "
        "one pool, as many as a text fills (onnxruntime only); default: paged where the engine can, else slots",
    )
    tensorrt: bool = Field(
        default=False,
        description="let TensorRT compile what it takes of a graph for ONNX Runtime on a GPU, and the CUDA provider "
        "run the rest; with cuda_graphs: off",
    )
    quant_method: Literal["compressed-tensors", "modelopt"] = Field(
        default="compressed-tensors",
        description="of a checkpoint for vLLM and others, in its config.json; modelopt: by ModelOpt's names, with "
        "hf_quant_config.json, which TensorRT-LLM loads, too",
    )
    deferred: bool = Field(
        default=False,
        description="publish without an engine, to build it later on the target GPU with `llmforge build --finish`",
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        batches = self.decode_batches
        if batches and (list(batches) != sorted(set(batches)) or batches[-1] != self.max_batch):
            raise ValueError(
                f"decode_batches is {list(batches)}; expected ascending numbers up to max_batch, {self.max_batch}"
            )
        if self.quant_method == "modelopt" and self.backend != "compressed-tensors":
            raise ValueError("quant_method: modelopt goes with backend: compressed-tensors")
        if self.tensorrt and (self.backend != "onnxruntime" or self.cuda_graphs != "off" or self.tensor_parallel > 1):
            raise ValueError("tensorrt goes with backend: onnxruntime, cuda_graphs: off and tensor_parallel: 1")
        return self
