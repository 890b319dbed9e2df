"""Build a plan from an ONNX file, with either module: TensorRT-RTX ahead of time, TensorRT on the GPU that is here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir

from llmforge.backends.tensorrt import layers
from llmforge.backends.tensorrt.library import Library
from llmforge.backends.tensorrt.profiles import Profile
from llmforge.base.errors import UnsupportedError, VerificationError
from llmforge.ir import graph

# Warnings after which a plan computes something else than its graph says. "Unused Input": the parser knows no use for
# an input of a node and drops it, such as the lengths of padded keys (seen with TensorRT-RTX 1.7.1).
_FATAL = re.compile(r"Unused Input")

# Warnings that say what is so by design.
_NOISE = re.compile(r"Make sure (input|output) \S+ has Int64 binding")

_SEVERE = ("INTERNAL_ERROR", "ERROR")
_PREFIX = re.compile(r"^(?:\S+\.(?:cpp|h):\d+: |IBuilder::\w+: |Error Code \d+: )+")


@dataclass
class BuildLog:
    """Every line of a build, in order: severity as TensorRT names it, and text."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def logger(self, api: Any) -> Any:
        """Make the `ILogger` of the module `api` that writes here; keep a reference as long as it is in use."""
        lines = self.lines

        class Collector(api.ILogger):  # type: ignore[misc]  # the class is known when the module is
            def __init__(self) -> None:
                api.ILogger.__init__(self)  # pybind11 wants it called in this way

            def log(self, severity: Any, message: str) -> None:
                lines.append((severity.name, message))

        return Collector()

    @property
    def errors(self) -> list[str]:
        """What went wrong, without the places in TensorRT's own sources."""
        return [_PREFIX.sub("", text) for severity, text in self.lines if severity in _SEVERE]

    @property
    def fatal_warnings(self) -> list[str]:
        """Warnings that mean another result than the graph's."""
        return [text for text in self._warnings() if _FATAL.search(text)]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings that a reader may want to see, each once."""
        kept = (_PREFIX.sub("", text) for text in self._warnings() if not _NOISE.search(text))
        return tuple(dict.fromkeys(kept))

    def _warnings(self) -> list[str]:
        return [text for severity, text in self.lines if severity == "WARNING"]


# Builder flags that are set otherwise than the module does by default. TF32 is on by default, and would round the
# operands of fp32 products to 10 bits of mantissa: the engine computes what the graph says.
FLAGS = ("-TF32",)
VERBOSITY = "DETAILED"  # of what the builder says of its layers (`precisions`)

_NO_FUSED_KERNEL = "Attention operation was not supported by a dedicated kernel"
_OPERATION = re.compile(r"operation '([^']+)'")


@dataclass(frozen=True)
class CompiledPlan:
    """What a build found out."""

    layers: dict[str, int]  # by type, and products of codes by dtype
    warnings: tuple[str, ...]
    timings: bytes | None  # the timing cache after the build; None where the module keeps none


def build(
    library: Library,
    onnx_file: Path,
    model: ir.Model,
    plan: Path,
    *,
    sm: str,
    profiles: Sequence[Profile],
    timings: bytes | None = None,
) -> CompiledPlan:
    """Build the graph of `onnx_file`, which is `model` on disk, for compute capability `sm`, and write it to `plan`.

    Weights are mapped from the data file and the plan is streamed to disk, so that neither is held in memory twice.
    `timings` is the timing cache to begin with, where the module times kernels.

    Raises:
        UnsupportedError: the parser or the builder refuses the graph; names the node where it is told.
        VerificationError: the network is not what the graph says, or a warning means as much.
    """
    api, log = library.api, BuildLog()
    logger = log.logger(api)
    builder = api.Builder(logger)
    network = builder.create_network(0)
    parser = api.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_file)):
        raise _refused_by_parser(library, parser, log)
    _check_log(library, log)
    counted = layers.count(network)
    layers.check(counted, layers.decomposable(network, api), model)
    if measured := layers.set_lengths(network, api):
        counted[layers.WITH_LENGTHS] = measured
    config = _config(library, builder, sm, profiles, model)
    cache = _timing_cache(library, config, timings)
    with plan.open("wb") as file:
        done = builder.build_serialized_network_to_stream(network, config, _writer(api, file))
    if not done:
        raise _refused_by_builder(library, sm, log)
    _check_log(library, log)
    products = layers.of((text for _, text in log.lines), model, max(len(profiles), 1))
    warnings = log.warnings
    if added_flags(model):
        counted |= layers.sparse(model)
        warnings += _of_sparsity(library, log)
    if products is not None:
        counted, warnings = counted | products.layers, warnings + products.warnings
    return CompiledPlan(counted, warnings, None if cache is None else bytes(cache.serialize()))


def added_flags(model: ir.Model) -> tuple[str, ...]:
    """Name the builder flags that `model` asks for beside those of every engine."""
    return ("SPARSE_WEIGHTS",) if graph.SPARSITY in model.metadata_props else ()


def _config(library: Library, builder: Any, sm: str, profiles: Sequence[Profile], model: ir.Model) -> Any:
    api = library.api
    config = builder.create_builder_config()
    config.profiling_verbosity = getattr(api.ProfilingVerbosity, VERBOSITY)
    for flag in added_flags(model):
        config.set_flag(getattr(api.BuilderFlag, flag))
    for flag in FLAGS:
        config.clear_flag(getattr(api.BuilderFlag, flag.removeprefix("-")))
    if library.ahead_of_time:
        # Not set, fp8 and fp4 pass on every device without a word.
        config.num_compute_capabilities = 1
        config.set_compute_capability(library.compute_capability(sm), 0)
    for wanted in profiles:
        profile = builder.create_optimization_profile()
        for name, (low, best, high) in wanted.shapes.items():
            profile.set_shape(name, low, best, high)
        if config.add_optimization_profile(profile) < 0:
            raise VerificationError(
                f"{library.title} rejects the optimization profile {wanted.facts.name}: {wanted.shapes}"
            )
    return config


def _timing_cache(library: Library, config: Any, timings: bytes | None) -> Any:
    """Give the builder what was timed before. TensorRT-RTX times nothing: a GPU chooses as it loads a plan."""
    if library.ahead_of_time:
        return None
    for found in (timings, None):  # what another build of the module timed is refused: then it times anew
        cache = config.create_timing_cache(found or b"")
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return cache
    raise UnsupportedError(f"{library.title} {library.version} takes no timing cache, not even an empty one")


def _writer(api: Any, file: BinaryIO) -> Any:
    class Writer(api.IStreamWriter):  # type: ignore[misc]  # the class is known when the module is
        def __init__(self) -> None:
            api.IStreamWriter.__init__(self)  # pybind11 wants it called in this way

        def write(self, data: Any) -> int:
            return file.write(data)

    return Writer()


def _of_sparsity(library: Library, log: BuildLog) -> tuple[str, ...]:
    """Say what the builder makes of sparse weights, as far as it tells."""
    said = tuple(dict.fromkeys(text for _, text in log.lines if text.startswith("(Sparsity)")))
    return said or (
        f"{library.title} {library.version} keeps 2:4 weights dense in the plan, and does not say whether it "
        "multiplies them on sparse tensor cores: a GPU chooses as it loads the plan",
    )


def _check_log(library: Library, log: BuildLog) -> None:
    if log.fatal_warnings:
        raise VerificationError(
            f"{library.title} {library.version} would change the result of the graph: {'; '.join(log.fatal_warnings)}"
        )


def _refused_by_parser(library: Library, parser: Any, log: BuildLog) -> UnsupportedError:
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if not errors:
        return UnsupportedError(f"{library.title} {library.version} cannot parse the graph: {'; '.join(log.errors)}")
    first = errors[0]
    where = f"node {first.node_name()} ({first.node_operator()})" if first.node_name() else "the graph"
    return UnsupportedError(
        f"{library.title} {library.version} rejects {where}: {' '.join(first.desc().split())}",
        hint="remove the pass that writes it, or choose another engine",
    )


def _refused_by_builder(library: Library, sm: str, log: BuildLog) -> UnsupportedError:
    said = log.errors or ["it gives no reason"]
    what = "; ".join(dict.fromkeys(" ".join(line.split()) for line in said))
    named = _OPERATION.search(what)
    where = f", node {named[1]}" if named else ""
    if _NO_FUSED_KERNEL in what:
        what = "no fused kernel exists for an attention node of the graph"
    return UnsupportedError(
        f"{library.title} {library.version} cannot build an engine for SM{sm}{where}: {what}",
        hint="choose other passes, or another engine or target",
    )
