"""A plan of an embedder or a reranker: does it fit a CPU, and what bounds the time of a batch of texts there.

    operations = texts · tokens · (2 · parameters in products + layers · 4 · hidden · tokens)
    seconds    = max(bytes of all weights but tables / bandwidth, operations / rate)

Everything is in fp32, and texts stand side by side without padding (docs/retrieval.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmforge import targets
from llmforge.base.errors import CheckpointError, UnsupportedError, UsageError
from llmforge.checkpoint import CONFIG, Encoding, folder_of, hub, load_config, read_settings
from llmforge.checkpoint.encoding import encoding_of
from llmforge.metrics.units import count, significant, size, step_time
from llmforge.planning import scheme
from llmforge.planning.memory import RESERVE_BYTES
from llmforge.planning.roofline import RooflineCeilings
from llmforge.recipe import Recipe
from llmforge.rewrite.traits import Storage
from llmforge.targets import Target

LENGTHS, BATCHES = (16, 128, 512, 2048, 8192), (1, 8, 32)  # tokens of a text, and texts
FP32_BYTES = 4
BATCH_TOKENS = 4096  # that one run reads (llmforge.serving.encoder_runner)
# What a token has of the widest layer while it runs: a row that is read, and one that is made.
ROWS = 2


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder: parameters in all, of tables that are looked up, and of products."""

    name: str
    title: str  # an embedder, or a reranker
    architecture: str
    parameters: int
    tables: int
    products: int
    layers: int
    hidden: int
    widest: int  # elements of the widest row of activations
    context: int | None  # tokens of a text; None: not bounded

    @property
    def weight_bytes(self) -> int:
        """What weights take in fp32."""
        return self.parameters * FP32_BYTES

    @property
    def activation_bytes(self) -> int:
        """What the widest layer of a batch takes."""
        return BATCH_TOKENS * ROWS * self.widest * FP32_BYTES

    def operations(self, texts: int, tokens: int) -> float:
        """Count the operations of so many texts of so many tokens."""
        return float(texts * tokens * (2 * self.products + self.layers * 4 * self.hidden * tokens))


@dataclass(frozen=True)
class BatchTime:
    """The least that a batch takes, and what bounds it."""

    tokens: int  # of each text
    texts: int
    seconds: float
    bound: str  # memory or compute


@dataclass(frozen=True)
class EncoderPlan:
    """An encoder on a CPU; `times` are empty where the machine's figures are not known."""

    shape: EncoderShape
    target: Target
    reserve: int
    times: tuple[BatchTime, ...]

    @property
    def needed(self) -> int:
        """Memory in bytes."""
        return self.reserve + self.shape.weight_bytes + self.shape.activation_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the machine has it; None: nobody knows what it has."""
        return None if self.target.memory_gb is None else self.needed <= self.target.memory_gb.value * 1e9


def encoding_at(what: Path) -> tuple[Path, Recipe | None, Encoding | None]:
    """Find the checkpoint of a recipe, or that at `what`; and what it gives, if it embeds or scores.

    Raises:
        RecipeError, CheckpointError: they cannot be read.
    """
    recipe = Recipe.load(what) if targets.is_file(what.name) else None
    folder = what if recipe is None else recipe.checkpoint
    folder = folder_of((folder.parent if folder.name == CONFIG else folder).absolute())
    return folder, recipe, encoding_of(folder, read_settings(folder), None if recipe is None else recipe.reranker)


def answer(
    folder: Path,
    encoding: Encoding,
    recipe: Recipe | None,
    wanted: Sequence[str],
    measured: Callable[[Target], Target | None] = lambda target: None,
) -> EncoderPlan:
    """Plan the encoder in `folder` on the target that is `wanted`, or that of its recipe, or here.

    Raises:
        UsageError: several targets.
        UnsupportedError: no encoder runs on the target, or transformers cannot make the model.
        CheckpointError: the configuration is not usable.
    """
    names = wanted or ([recipe.target] if recipe is not None else [targets.LOCAL])
    if len(names) != 1:
        raise UsageError(f"{hub.title(folder)} is {encoding.title}; those are planned for one target")
    target = targets.find(names[0])
    if target.kind != "cpu":
        raise UnsupportedError(
            f"{hub.title(folder)} is {encoding.title}, and none runs on {target.name}",
            hint="embedders and rerankers are compiled for CPUs: --target local",
        )
    shape = read(folder, encoding)
    if target.bandwidth_gbs is None:
        target = measured(target) or target
    return EncoderPlan(shape, target, RESERVE_BYTES["cpu"], tuple(_times(shape, target)))


def read(folder: Path, encoding: Encoding) -> EncoderShape:
    """Make the model in `folder` without weights, and count it.

    Raises:
        UnsupportedError: transformers cannot make it.
        CheckpointError: the configuration is not usable.
    """
    from torch import nn

    from llmforge.trace.export import skeleton
    from llmforge.trace.hooks import internals

    config = load_config(folder, read_settings(folder))
    text = config.get_text_config()
    layers, hidden = (getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if type(layers) is not int or type(hidden) is not int:
        raise CheckpointError(f"{folder / CONFIG}: num_hidden_layers and hidden_size must be positive integers")
    with internals.third_party("making the model without weights"):
        model = skeleton.on_meta(config, None, encoding)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    own = set(model.parameters())
    products = [each for each in own - tables if each.dim() > 1]
    limit = getattr(text, "max_position_embeddings", None)
    return EncoderShape(
        hub.title(folder),
        encoding.title,
        str(config.model_type),
        sum(each.numel() for each in own),
        sum(each.numel() for each in tables),
        sum(each.numel() for each in products),
        layers,
        hidden,
        max((max(each.shape[:2]) for each in products), default=hidden),
        encoding.max_tokens or (limit if type(limit) is int and limit > 0 else None),
    )


def _times(shape: EncoderShape, target: Target) -> list[BatchTime]:
    if target.bandwidth_gbs is None:
        return []
    ceilings = RooflineCeilings.of(target, scheme.choose(target, "onnxruntime", "fp32", Storage(compute="fp32")))
    memory = (shape.parameters - shape.tables) * FP32_BYTES / (ceilings.bandwidth * ceilings.bandwidth_share)
    found = []
    for tokens in (each for each in LENGTHS if shape.context is None or each <= shape.context):
        for texts in BATCHES:
            compute = shape.operations(texts, tokens) / (ceilings.rate * ceilings.rate_share)
            found.append(BatchTime(tokens, texts, max(memory, compute), "memory" if memory > compute else "compute"))
    return found


def details(plan: EncoderPlan) -> RenderableType:
    """Show a plan."""
    shape = plan.shape
    table = Table(title="The least time of a batch", title_justify="left")
    for name in ("tokens of a text", "texts", "time", "texts/s", "bound by"):
        table.add_column(name, justify="left" if name == "bound by" else "right")
    for each in plan.times:
        table.add_row(
            count(each.tokens),
            count(each.texts),
            step_time(each.seconds),
            significant(each.texts / each.seconds),
            each.bound,
        )
    capacity = "unknown" if plan.target.memory_gb is None else size(plan.target.memory_gb.value * 1e9)
    fits = {True: "fits", False: "does not fit", None: ""}[plan.fits]
    lines = [
        f"{shape.architecture}, {shape.parameters:,} parameters, {shape.tables:,} of them in tables; "
        f"{shape.layers} layers, fp32",
        f"memory: {size(plan.needed)} of {capacity} {fits}".rstrip() + f"; weights {size(shape.weight_bytes)}, "
        f"activations of {BATCH_TOKENS:,} tokens {size(shape.activation_bytes)}, reserve {size(plan.reserve)}",
    ]
    head = Text.assemble((shape.name, "bold"), f", {shape.title}, on ", (plan.target.title, "bold"), ", onnxruntime")
    told = [Text(f"note: {each}", "dim") for each in notes(plan)]
    return Group(head, *map(Text, lines), *([table] if plan.times else []), *told)


def notes(plan: EncoderPlan) -> list[str]:
    """Say what the figures are, and what is not predicted."""
    said = "times are bounds by memory bandwidth and the rate of fp32 products of this machine; an engine takes longer"
    if not plan.times:
        said = f"no times: target {plan.target.name} has no figures (`llmforge doctor --measure --write machine.yaml`)"
    return [
        said,
        "not predicted: what passes change, the time of a build, and attention in a model's own code (DeBERTa, MPNet), "
        "which takes memory for every pair of tokens of a text",
    ]


def data(plan: EncoderPlan) -> dict[str, Any]:
    """Write a plan as plain data: bytes and seconds."""
    memory = {"weights": plan.shape.weight_bytes, "activations": plan.shape.activation_bytes, "reserve": plan.reserve}
    return {
        "model": asdict(plan.shape),
        "target": plan.target.name,
        "backend": "onnxruntime",
        "memory": {**memory, "needed": plan.needed, "fits": plan.fits},
        "times": [asdict(each) for each in plan.times],
        "notes": notes(plan),
    }
