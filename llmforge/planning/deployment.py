"""A plan: does a decoder fit a device, how fast and how dear is it there, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmforge.backends import BACKENDS, BackendName
from llmforge.backends.record import NO_BLOCKS, Provider
from llmforge.base.errors import UnsupportedError, UsageError
from llmforge.planning import memory, not_built, roofline
from llmforge.planning.memory import DeviceMemory
from llmforge.planning.roofline import Placement, RooflineCeilings, StepCost, Workload
from llmforge.planning.scheme import BITS, DtypeScheme
from llmforge.planning.shape import Shape
from llmforge.targets import Target

CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SEVERAL = 1e6  # tokens that a price is for


@dataclass(frozen=True)
class DecodeRate:
    """Decoding at one batch: a step, and what is served when prompts are read in between."""

    batch: int
    fits: bool
    step: StepCost
    tokens_per_second: float  # of all sequences, prompts in between counted


@dataclass(frozen=True)
class Degree:
    """The model split over `ranks` devices, heads and matrices evenly (tensor parallelism)."""

    ranks: int
    memory: DeviceMemory
    largest_batch: int  # at the workload's context
    prefill: StepCost
    decode: DecodeRate  # at the workload's batch
    sent_per_token: int  # bytes that a device sends for each token of a decode step


@dataclass(frozen=True)
class Cost:
    """What a million tokens cost at the batch of the workload, in US dollars."""

    usd_per_hour: float  # of all devices
    source: str
    per_million_in: float
    per_million_out: float


@dataclass(frozen=True)
class DeploymentPlan:
    """A decoder on a device."""

    shape: Shape
    target: Target
    backend: BackendName
    scheme: DtypeScheme
    workload: Workload
    asked: Degree  # at the number of devices that is asked for
    largest: tuple[tuple[int, int], ...]  # (context, largest batch)
    decodes: tuple[DecodeRate, ...]
    turning_batch: int | None
    degrees: tuple[Degree, ...]
    cost: Cost | None
    notes: tuple[str, ...]
    block_tokens: int | None = None  # of the KV cache's blocks; None: it lies in slots

    @property
    def ceilings(self) -> RooflineCeilings:
        """The ceilings of the device."""
        return self.asked.prefill.ceilings


def make(
    shape: Shape,
    target: Target,
    backend: BackendName,
    scheme: DtypeScheme,
    workload: Workload,
    *,
    ranks: int = 1,
    usd_per_hour: float | None = None,
    slots: str | None = None,
) -> DeploymentPlan:
    """Plan `shape` on `ranks` devices of `target`; `usd_per_hour` replaces the target's price of one.

    `slots`: why a recipe has a slot for each sequence, where an engine could have blocks.

    Raises:
        UsageError: the target's file lacks a figure, or the workload is longer than the model's context.
        UnsupportedError: the model cannot be split so, or the engine has no kernel for its attention.
    """
    if shape.context is not None and workload.context > shape.context:
        raise UsageError(
            f"{workload.prompt} prompt tokens and {workload.output} output tokens exceed the context of "
            f"{shape.name}, {shape.context}",
            hint="reduce --prompt or --output",
        )
    _refuse_heads(shape, backend)
    splits = {each: Placement(shape, target, scheme, each) for each in roofline.degrees(shape, target, ranks)}
    degrees = {each: degree(split, workload) for each, split in splits.items()}
    if ranks not in splits:
        raise UnsupportedError(
            f"{shape.name} cannot be split over {ranks} × {target.name}: its heads and the interconnect "
            f"allow {', '.join(map(str, splits))}",
            hint=f"set --tp {max(splits)} or less",
        )
    placed = splits[ranks]
    batches = sorted({*BATCHES, workload.batch})
    contexts = [each for each in CONTEXTS if shape.context is None or each <= shape.context]
    return DeploymentPlan(
        shape=shape,
        target=target,
        backend=backend,
        scheme=scheme,
        workload=workload,
        asked=degrees[ranks],
        largest=tuple((each, memory.largest_batch(placed, each)) for each in contexts),
        decodes=tuple(_decode(placed, replace(workload, batch=each)) for each in batches),
        turning_batch=placed.turning_batch(workload.mean_context),
        degrees=tuple(degrees.values()),
        cost=_cost(placed, workload, usd_per_hour),
        block_tokens=_block_tokens(placed, backend, slots),
        notes=(
            *_notes(placed, backend),
            *_kv_cache(placed, backend, workload, slots),
            *not_built.notes(placed, workload, degrees[ranks].memory),
        ),
    )


def _refuse_heads(shape: Shape, backend: BackendName) -> None:
    """Refuse heads for which the backend has no kernel of attention."""
    head_dims = BACKENDS[backend].head_dims
    if head_dims is None:
        return
    for _, attention in shape.attentions():
        keys, values = attention.key_dim, attention.value_dim
        if keys == values and keys in head_dims:
            continue
        from llmforge.backends.tensorrt.refusals import Feature  # brings onnx-ir, which plans do not need

        rule = (Feature.HEAD_DIM if keys == values else Feature.HEAD_DIMS_DIFFER).value
        raise UnsupportedError(
            f"{backend} cannot build {shape.name}, with {keys} channels per key head and {values} per value head: "
            f"{rule.reason}",
            hint=rule.hint,
        )


def degree(placed: Placement, workload: Workload) -> Degree:
    """Plan `workload` on the devices of `placed`.

    Raises:
        UsageError: the target's file lacks a figure.
    """
    return Degree(
        ranks=placed.ranks,
        prefill=placed.prefill(workload.prompt),
        decode=_decode(placed, workload),
        memory=memory.of(placed, workload),
        largest_batch=memory.largest_batch(placed, workload.context),
        sent_per_token=placed.sent_per_token,
    )


def _decode(placed: Placement, workload: Workload) -> DecodeRate:
    return DecodeRate(
        batch=workload.batch,
        step=placed.decode(workload.batch, workload.mean_context),
        fits=memory.of(placed, workload).fits,
        tokens_per_second=workload.output / sum(placed.request_seconds(workload)),
    )


def _cost(placed: Placement, workload: Workload, given: float | None) -> Cost | None:
    """Price the devices' time: that of reading a prompt by its tokens, that of decode steps by theirs."""
    price = placed.target.usd_per_hour
    if given is not None:
        hourly, source = placed.ranks * given, "given"
    elif price is not None:
        hourly, source = placed.ranks * price.value, f"{price.source}, {price.date}"
    else:
        return None
    reading, writing = placed.request_seconds(workload)
    per_second = hourly / 3600
    return Cost(
        usd_per_hour=hourly,
        source=source,
        per_million_in=per_second * reading / workload.prompt * SEVERAL,
        per_million_out=per_second * writing / workload.output * SEVERAL,
    )


def _kv_cache(placed: Placement, backend: BackendName, workload: Workload, slots: str | None) -> list[str]:
    """Say for a GPU how many blocks of a pool its memory holds, or why sequences have slots (docs/paged.md)."""
    if placed.target.kind != "gpu" or backend not in placed.target.engines:
        return []
    provider = BACKENDS[backend].on(placed.target.kind)
    tokens = _block_tokens(placed, backend, slots)
    if tokens is None:
        return [f"KV cache in slots of max_context tokens: {slots or _slots_reason(placed, provider)}"]
    found = memory.of(placed, workload)
    block_bytes = tokens * found.kv_per_token
    blocks = max(0, found.capacity - found.needed + found.cache) // block_bytes
    return [
        f"KV cache in blocks of {tokens} tokens (unverified), {block_bytes / 1e6:.1f} MB each, of which {blocks} fit: "
        f"{blocks * tokens} tokens of any sequences"
    ]


def _block_tokens(placed: Placement, backend: BackendName, slots: str | None) -> int | None:
    """Give the tokens of a block of the KV cache; None: sequences have slots, because of `slots` or the engine."""
    if placed.target.kind != "gpu" or backend not in placed.target.engines:
        return None
    provider = BACKENDS[backend].on(placed.target.kind)
    if slots or _slots_reason(placed, provider) is not None or provider is None or provider.paged is None:
        return None
    return provider.paged.block_tokens(next(each.key_dim for _, each in placed.shape.attentions()))


def _slots_reason(placed: Placement, provider: Provider | None) -> str | None:
    """Say why an engine of `provider` has slots, as far as the shape tells; None: it has blocks."""
    shape, scheme, target = placed.shape, placed.scheme, placed.target
    attentions = [each for _, each in shape.attentions()]
    dims = {dim for each in attentions for dim in (each.key_dim, each.value_dim)}
    if provider is None or provider.paged is None:
        return NO_BLOCKS
    if reason := provider.slots_reason(target.sm, placed.ranks):
        return reason
    if any(each.latent is not None for each in attentions):
        return "latents are cached, not keys and values"
    if shape.state_elements():
        return "layers keep a state"
    if len(dims) != 1 or max(dims) > provider.paged.most_channels:
        widths = ", ".join(map(str, sorted(dims)))
        return f"heads have {widths} channels; blocks are of one width up to {provider.paged.most_channels}"
    if scheme.kv == "int8":
        return provider.paged.int8_slots
    return f"blocks of {scheme.kv} are not written" if BITS[scheme.kv] <= 8 else None


def _notes(placed: Placement, backend: BackendName) -> list[str]:
    shape, target, scheme = placed.shape, placed.target, placed.scheme
    notes = []
    if any(each.latent is not None for _, each in shape.attentions()):
        stay = f", in {scheme.compute}: quantize-kv-cache leaves them alone" if BITS[scheme.kv] <= 8 else ""
        notes.append(f"latent attention: its latents are cached, not keys and values{stay}")
    if any(each.window is not None for _, each in shape.attentions()):
        notes.append("sliding-window layers read only their window, but reserve memory for the whole context")
    unverified: list[str] = [each for each in {scheme.product, scheme.compute} if not target.rates[each].verified]
    if target.bandwidth_gbs is not None and not target.bandwidth_gbs.verified:
        unverified.append("bandwidth")
    if unverified:
        notes.append(f"unverified figures of {target.name}: {', '.join(sorted(unverified))}")
    slower = target.require_engine(backend).slower_products.get(target.sm or "")
    if slower is not None and scheme.instructions < 1:
        notes.append(f"{slower.reason}: at {slower.share:.0%} of its rate, so that many rows are faster in 16 bits")
    if not target.support(backend).verified:
        notes.append(f"{backend} support on {target.name} is untested")
    return notes
