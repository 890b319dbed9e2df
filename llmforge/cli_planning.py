"""The commands `plan` and `doctor`. Like all commands they import what they need when they run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

_PLAIN_WIDTH = 200  # columns of a table where there is no terminal
_DTYPES = ("fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4")


@click.command()
@click.argument("what", metavar="RECIPE|CHECKPOINT", type=click.Path(path_type=Path))
@click.option(
    "--target", "names", multiple=True, metavar="NAME|FILE.yaml",
    help="Device to plan for, in whatever case; may be given again. The recipe's own if left out.",
)  # fmt: skip
@click.option("--engine", type=click.Choice(["onnxruntime", "tensorrt", "tensorrt-rtx"]), help="What runs it.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences at once; the recipe's max_batch, else 1.")
@click.option("--prompt", type=click.IntRange(min=1), help="Tokens of a prompt; 1024, or what the context allows.")
@click.option("--output", type=click.IntRange(min=1), help="Tokens of an answer; 256, or what the context allows.")
@click.option("--context", type=click.IntRange(min=2), help="Prompt and answer together, in place of --prompt.")
@click.option("--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Of activations; the checkpoint's own.")
@click.option("--weights", type=click.Choice(_DTYPES), help="Of matrices; that of activations if left out.")
@click.option("--kv", type=click.Choice(_DTYPES), help="Of the cache; that of activations if left out.")
@click.option("--tp", "ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Devices that share it.")
@click.option("--price", type=click.FloatRange(min=0, min_open=True), help="US dollars an hour, of one device.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg|html", help="Draw the roofline there.")
@click.option("--json", "as_json", is_flag=True, help="Write all of it as JSON.")
def plan(
    what: Path,
    names: tuple[str, ...],
    engine: str | None,
    batch: int | None,
    prompt: int | None,
    output: int | None,
    context: int | None,
    dtype: str | None,
    weights: str | None,
    kv: str | None,
    ranks: int,
    price: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Predict memory, speed and cost of RECIPE or CHECKPOINT on a device.

    Nothing is built and no weight is read: a folder with config.json is enough. With several targets, one line each.
    """
    from llmforge.planning import plot as plots
    from llmforge.planning import render, request

    asked = request.Request(
        targets=names,
        backend=engine,
        batch=batch,
        prompt=prompt,
        output=output,
        context=context,
        compute=dtype,
        weights=weights,
        kv=kv,
        ranks=ranks,
        usd_per_hour=price,
    )
    planned = request.answer(what, asked)
    if plot is not None:
        plots.write([each.plan for each in planned], plot)
    if as_json:
        facts = [render.data(each) for each in planned]
        click.echo(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1, ensure_ascii=False))
    else:
        _show(render.details(planned[0]) if len(planned) == 1 else render.comparison(planned))


def _show(content: RenderableType) -> None:
    from rich.console import Console

    # Where there is no terminal, rich would break lines at 80 columns.
    Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH).print(content)
