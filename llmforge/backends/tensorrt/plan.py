"""The facts of a plan, held against what the artifact says of it, before anything of it runs."""

from __future__ import annotations

import importlib
import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmforge import backends
from llmforge.base.errors import EnvironmentLacks, InputError, UnsupportedError, VersionMismatch
from llmforge.ir import interface
from llmforge.runtime.config import PlanFacts, RuntimeConfig
from llmforge.runtime.prefill_shapes import together
from llmforge.runtime.signature import Argument

# DataType of TensorRT → as ONNX Runtime spells it, which `Signature` reads.
TYPES = {
    "FLOAT": "tensor(float)",
    "HALF": "tensor(float16)",
    "BF16": "tensor(bfloat16)",
    "INT8": "tensor(int8)",
    "UINT8": "tensor(uint8)",
    "FP8": "tensor(float8e4m3fn)",
    "INT32": "tensor(int32)",
    "INT64": "tensor(int64)",
}
_REPEATED = 4  # messages of the library that an error repeats


@dataclass(frozen=True)
class LoadedPlan:
    """A deserialized plan: the library's module, its engine and what it says; `runtime` lives as long as the engine."""

    api: Any
    engine: Any
    runtime: Any
    said: deque[str]
    where: str
    facts: PlanFacts  # what the artifact says of it

    @property
    def title(self) -> str:
        """The library's name."""
        return backends.of_module(self.api.__name__).title

    @property
    def complaint(self) -> str:
        """What the library said last."""
        return "; ".join(self.said) or "it gives no reason"


def require(facts: PlanFacts) -> Any:
    """Import the library of a plan, in the very version that built it.

    Raises:
        EnvironmentLacks: it is not installed.
        VersionMismatch: another version is.
    """
    backend = backends.of_module(facts.module)
    title, (provider,) = backend.title, backend.providers
    try:
        api = importlib.import_module(facts.module)
    except ImportError as error:
        raise EnvironmentLacks(
            f"the engine needs {title} {facts.version}, which cannot be imported: {error}",
            hint=f"{provider.install} '{provider.package}=={facts.version}'",
        ) from error
    if api.__version__ != facts.version:
        raise VersionMismatch(
            f"the engine was built with {title} {facts.version}, but {api.__version__} is installed, which only loads "
            "plans of its own version",
            hint=f"pip install '{provider.package}=={facts.version}', or build the artifact again",
        )
    return api


def open_plan(path: Path, facts: PlanFacts) -> LoadedPlan:
    """Deserialize a plan. There must be a device: without one, the library may crash instead of refusing.

    Raises:
        EnvironmentLacks: the library is not installed.
        VersionMismatch: another version of it is, or it refuses the plan.
    """
    api = require(facts)
    said: deque[str] = deque(maxlen=_REPEATED)
    runtime = api.Runtime(_logger(api, said))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        engine = runtime.deserialize_cuda_engine(content)
    plan = LoadedPlan(api, engine, runtime, said, str(path), facts)
    if engine is None:
        raise VersionMismatch(
            f"{path}: {plan.title} {facts.version} cannot load it on this device: {plan.complaint}",
            hint="build the artifact again for this device",
        )
    return plan


def _logger(api: Any, said: deque[str]) -> Any:
    """Make a logger of the library that keeps its errors and warnings in `said`."""

    class Logger(api.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            api.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (api.ILogger.ERROR, api.ILogger.INTERNAL_ERROR, api.ILogger.WARNING):
                said.append(message)

    return Logger()


def read_tensors(plan: LoadedPlan) -> tuple[list[Argument], list[Argument]]:
    """List the inputs and the outputs of a plan; None stands for an open dimension.

    Raises:
        UnsupportedError: one has a type that nothing here knows.
    """
    inputs: list[Argument] = []
    outputs: list[Argument] = []
    for i in range(plan.engine.num_io_tensors):
        name = plan.engine.get_tensor_name(i)
        kind = plan.engine.get_tensor_dtype(name).name
        if kind not in TYPES:
            raise UnsupportedError(f"{plan.where}: {name} is {kind}; one of {', '.join(TYPES)}")
        shape = tuple(None if size < 0 else int(size) for size in plan.engine.get_tensor_shape(name))
        is_input = plan.engine.get_tensor_mode(name) == plan.api.TensorIOMode.INPUT
        (inputs if is_input else outputs).append(Argument(name, TYPES[kind], shape))
    return inputs, outputs


def check_profiles(plan: LoadedPlan, config: RuntimeConfig) -> dict[str, int]:
    """Give the places of the profiles among the plan's, by name: prefill, decode and, if it has one, prompts.

    Raises:
        InputError: it has others than the artifact says, or they are too small for what the artifact promises.
    """
    profiles = plan.facts.profiles
    names = [profile.name for profile in profiles]
    known = sorted(names) in (["decode", "prefill"], ["decode", "prefill", "prompts"])
    if not known or plan.engine.num_optimization_profiles != len(names):
        raise InputError(
            f"{plan.where} has {plan.engine.num_optimization_profiles} profiles, its artifact lists {names}; "
            "expected one for prefill, one for decode and perhaps one for prompts"
        )
    places: dict[str, int] = {name: at for at, name in enumerate(names)}
    for at, profile in enumerate(profiles):
        _, _, largest = plan.engine.get_tensor_profile_shape(interface.INPUT_IDS, at)
        if tuple(largest) != (profile.max_batch, profile.max_sequence):
            raise InputError(
                f"{plan.where}: profile {profile.name} takes ids of up to {tuple(largest)}, and its artifact says "
                f"{(profile.max_batch, profile.max_sequence)}"
            )
    if profiles[places["decode"]].max_batch < config.max_batch:
        raise InputError(
            f"{plan.where} decodes {profiles[places['decode']].max_batch} rows at once, and its artifact promises "
            f"{config.max_batch}"
        )
    return places


def prompt_shapes(facts: PlanFacts) -> tuple[tuple[int, int], ...]:
    """List rows and tokens of the steps of several prompts that a plan has a profile for."""
    profiles = [each for each in facts.profiles if each.name == "prompts"]
    return tuple(
        (rows, tokens)
        for profile in profiles
        for rows, tokens in together()
        if rows <= profile.max_batch and tokens <= profile.max_sequence
    )


def check_caches(plan: LoadedPlan, inputs: Sequence[Argument], capacity: int) -> None:
    """Return if every cache has `capacity` slots and is written in place.

    Raises:
        InputError: a cache has another capacity.
        UnsupportedError: the plan copies a cache instead of writing it in place.
    """
    for tensor in inputs:
        present = interface.present_of(tensor.name)
        if present == tensor.name:
            continue
        if not interface.is_state(tensor.name) and tensor.shape[2] != capacity:
            raise InputError(
                f"{plan.where}: {tensor.name} has {tensor.shape[2]} slots, and its artifact says {capacity}"
            )
        if plan.engine.get_aliased_input_tensor(present) != tensor.name:
            raise UnsupportedError(
                f"{plan.where}: {present} is not {tensor.name} in place: a step would copy the whole cache",
                hint="a cache in fp16 or bf16 is updated in place",
            )


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Choose numbers of rows that decode steps are padded to: powers of two, and the most."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*powers, most)
