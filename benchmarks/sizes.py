"""What formats of a size lose on documentation and answers of chats: python -m benchmarks.sizes CHECKPOINT [options].

    python -m benchmarks.sizes FOLDER --auto 5 5.4 6 --work W  # formats chosen per weight, and the uniform ones beside
    python -m benchmarks.sizes FOLDER --uniform trellis5-block32-int8:int6-block32-int8 --work W  # linears : tables

Calibrated on 8,192 tokens of the texts that ship, as a recipe of `init` has it: half documentation, half chats that the
checkpoint answers, where it has a chat template. KLD is that of dequantized weights in fp32 arithmetic, on evaluation
text: the second halves of windows of 512 tokens, and the checkpoint's answers in the 241 chats of evaluation and of
behaviour, 48 tokens at most. Gradients, prices, answers and rows are kept in W, and taken from there by a later call;
CPU seconds of a row are those of what comes after gradients and prices. Beside each size stands the uniform format that
is predicted to lose least in as many bytes; intervals, 95 %, are by a bootstrap over windows, and that of a ratio is
paired.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.model_size import ROOT
from llmforge.base.progress import Silent
from llmforge.calibration import calibrate, driver, mixed
from llmforge.calibration.pricing import Losses
from llmforge.calibration.skeleton import Skeleton
from llmforge.calibration.store import Store
from llmforge.calibration.threads import fixed
from llmforge.checkpoint import Checkpoint, text
from llmforge.checkpoint.documents import read_documents
from llmforge.checkpoint.text import TokenWindow
from llmforge.compile import texts
from llmforge.measure import chat_answers
from llmforge.quantization import allocation
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import WeightDemand

TEXTS = ROOT / "recipes" / "text"
LENGTH = 512
DRAWS = 4000  # of the bootstrap


@dataclass(frozen=True, eq=False)
class Domain:
    """Windows of one kind of text, and which of their tokens count."""

    windows: Sequence[TokenWindow]
    counted: Sequence[NDArray[np.bool_]]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens that count, of each window."""
        return np.array([int(each.sum()) for each in self.counted])


class Bench:
    """A checkpoint, text to calibrate on, and text to measure on, by domain; what is costly is kept in a folder."""

    def __init__(self, path: Path, work: Path, threads: int, tokens: int, windows: int) -> None:
        self.checkpoint, self.work, self.threads = Checkpoint.open(path), work, threads
        work.mkdir(parents=True, exist_ok=True)
        pools = [self._pool("calibration"), self._pool("chat-calibration")]
        shares = text.shares(tokens, [sum(len(window.ids) for window in pool) for pool in pools])
        drawn = [text.sample_tokens(pool, share, 0) for pool, share in zip(pools, shares, strict=True)]
        self.windows = [window for pool in drawn for window in pool]
        whole = [window for window in self._pool("evaluation") if len(window.ids) == LENGTH]
        some = [whole[place] for place in np.linspace(0, len(whole) - 1, windows).round().astype(int)]
        self.domains = {"documentation": Domain(some, [np.arange(LENGTH) >= LENGTH // 2 for _ in some])}
        held = [window for name in ("chat-evaluation", "behaviour") for window in self._pool(name)]
        if chats := [each for each in held if each.answers is not None and each.answers.any()]:
            self.domains["answers of chats"] = Domain(chats, [_says(each.answers) for each in chats])
        self.losses = self._priced()

    def _pool(self, name: str) -> list[TokenWindow]:
        """Read a text; chats are answered, where there is a template."""
        read = read_documents(TEXTS / f"{name}.jsonl")
        if not any(each.is_chat for each in read):
            return texts.windows_of(self.checkpoint, read, LENGTH)
        if self.checkpoint.chat_template is None:
            return []
        encoder, kept = texts.encoder_of(self.checkpoint), self.work / f"{name}.json"
        ends = self.checkpoint.eos_token_ids
        if not kept.exists():
            prompts = {each.id: each.ids.tolist() for each in text.ids_of(read, encoder, ends)}
            said = chat_answers.answer(self.checkpoint, prompts, sorted(ends), threads=self.threads)
            kept.write_text(json.dumps(said))
        return text.windows(text.ids_of(read, encoder, ends, json.loads(kept.read_text())), LENGTH)

    def _priced(self) -> Losses:
        """Take gradients and prices, or read them."""
        losses = Losses(allocation.LINEARS["int8"], allocation.TABLES["int8"])
        kept = self.work / "losses.json"
        if not kept.exists():
            folder = self.work / "gradients"
            folder.mkdir(exist_ok=True)
            cpu = time.process_time()
            run = driver._Calibration(
                self.checkpoint, self.windows, [self.demand], None, self.threads, Store(), Silent()
            )
            with torch.no_grad(), fixed(self.threads):
                driver._price(run, Skeleton.build(self.checkpoint), self.demand, folder, losses)
            print(f"gradients and prices: {time.process_time() - cpu:.0f} CPU s", flush=True)
            kept.write_text(json.dumps(losses.to_json()))
        losses.choices.clear()
        losses.of_tables.clear()
        losses.read(json.loads(kept.read_text()))
        return losses

    @property
    def demand(self) -> WeightDemand:
        """What is asked for where formats are chosen."""
        return WeightDemand(Gptq(), Grid(4, 32, False, "int8"), tables=Grid(6, 64, True, "int8"), weight_bits=8.0)

    def candidates(self, bits: float) -> tuple[Any, Any]:
        """Choose formats of so many bits of each weight, mixed and uniform."""
        others = mixed._others(Skeleton.build(self.checkpoint), self.demand, self.losses)
        return mixed._candidates(self.losses, self.demand, int(bits * self.checkpoint.parameters / 8), others)

    def uniform(self, linears: str, tables: str) -> Any:
        """Choose one format, by its name, for all linears, and one for embedding and head."""
        kept = Losses(
            *[named_grids(of, name) for of, name in ((self.losses.linears, linears), (self.losses.tables, tables))]
        )
        for grids, own, all_ in (
            (kept.linears, kept.choices, self.losses.choices), (kept.tables, kept.of_tables, self.losses.of_tables),
        ):  # fmt: skip
            own.update({names: {grid: formats[grid] for grid in grids} for names, formats in all_.items()})
        kept.kept.update(self.losses.kept)
        others = mixed._others(Skeleton.build(self.checkpoint), self.demand, self.losses)
        return mixed._candidates(kept, self.demand, 4 * self.checkpoint.parameters, others)[0]

    def measure(self, demand: WeightDemand) -> dict[str, Any]:
        """Calibrate, and measure what is lost in each window of each domain."""

        def taken(*args: Any, **_: Any) -> None:
            shutil.copytree(self.work / "gradients", args[4], dirs_exist_ok=True)

        wall, cpu = time.perf_counter(), time.process_time()
        with mock.patch.object(driver, "take", taken):
            found = calibrate(self.checkpoint, self.windows, [demand], threads=self.threads)
        row: dict[str, Any] = {"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        matrices = found.linears
        size = sum(allocation.size_bytes(*matrix.shape, matrix.grid) for matrix in matrices.values())
        size += 4 * (self.checkpoint.parameters - sum(matrix.codes.size for matrix in matrices.values()))
        row["bits"] = 8 * size / self.checkpoint.parameters
        with torch.no_grad(), fixed(self.threads):
            row["lost"] = self._lost(matrices)
        return row

    def _lost(self, matrices: Any) -> dict[str, list[float]]:
        """Return the KLD summed over the tokens that count, of each window of each domain."""
        windows = [window for domain in self.domains.values() for window in domain.windows]
        counted = [each for domain in self.domains.values() for each in domain.counted]
        ids, skeleton = [window.ids for window in windows], Skeleton.build(self.checkpoint)
        embedding, head = skeleton.tables()
        tables = {name: dequantize(matrices[name]) for name in (embedding, head) if name in matrices}
        calls, entered = skeleton.enter(ids)
        after = skeleton.enter(ids, tables[embedding])[1] if embedding in tables else list(entered)
        kept = self.work / "states.npy"
        before = entered
        known = kept.exists()
        for index in range(len(skeleton.layers)):
            layer = skeleton.load(index, calls[index])
            if not known:
                before = [layer.run(window, state) for window, state in enumerate(before)]
            for name in [name for name in matrices if name.startswith(f"{skeleton.prefixes[index]}.")]:
                layer.set_weight(name, dequantize(matrices[name]))
            after = [layer.run(window, state) for window, state in enumerate(after)]
        if not known:
            np.save(kept, torch.cat(before, 1).numpy())
        ends = np.cumsum([len(each) for each in ids])[:-1]
        before = [torch.from_numpy(each) for each in np.split(np.load(kept), ends, 1)]
        plain, rounded = skeleton.leaving(ids), skeleton.leaving(ids, tables.get(head))
        totals = []
        for window, which in enumerate(counted):
            # what is behind the layers sees one token at a time
            chosen = torch.from_numpy(which)
            p, q = (
                leave(window, state[:, chosen])[0][0].float().log_softmax(-1)
                for leave, state in ((plain, before[window]), (rounded, after[window]))
            )
            totals.append(float(torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)))
        bounds = np.cumsum([len(domain.windows) for domain in self.domains.values()])[:-1]
        parts = np.split(np.array(totals), bounds)
        return {name: part.tolist() for name, part in zip(self.domains, parts, strict=True)}

    def told(self, name: str, row: dict[str, Any], beside: dict[str, Any] | None) -> str:
        """Write a row of the table: KLD × 1000 by domain, and as a share of that `beside`."""
        cells = [name, f"{row['bits']:.3f}", f"{1e3 * row['predicted']:.2f}"]
        for domain, of in self.domains.items():
            again = np.random.default_rng(0).integers(0, len(of.windows), (DRAWS, len(of.windows)))
            lost, tokens = np.array(row["lost"][domain]), of.tokens
            drawn = lost[again].sum(1) / tokens[again].sum(1)
            low, high = np.quantile(drawn, (0.025, 0.975))
            cells.append(f"{1e3 * lost.sum() / tokens.sum():.2f} ({1e3 * low:.2f} – {1e3 * high:.2f})")
            share = ""
            if beside is not None:
                other = np.array(beside["lost"][domain])
                low, high = np.quantile(lost[again].sum(1) / other[again].sum(1), (0.025, 0.975))
                share = f"{lost.sum() / other.sum():.2f} ({low:.2f} – {high:.2f})"
            cells.append(share)
        cells.append(f"{row['cpu_s']:.0f}")
        return f"|{'|'.join(cells)}|"


def _says(answers: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Mark the tokens behind which an answer's token comes, [S]."""
    assert answers is not None
    return np.append(answers[1:], False)


def named_grids(grids: Sequence[Grid], name: str) -> tuple[Grid, ...]:
    """Return the one of `grids` whose format has that name."""
    found = tuple(grid for grid in grids if grid.format.name == name)
    assert len(found) == 1, f"{name} is none of {', '.join(grid.format.name for grid in grids)}"
    return found


def named(formats: Any) -> str:
    """Name a uniform choice of formats."""
    tables = "" if formats.tables is None else f", embedding and head {formats.tables.format.name}"
    return f"{formats.mixed[0][1].format.name}{tables}"


def main() -> None:
    """Measure the rows that are asked for, and print them as a table of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--auto", type=float, nargs="*", default=[5.0, 6.0], metavar="BITS")
    parser.add_argument("--uniform", nargs="+", default=[], metavar="LINEARS:TABLES", help="names of formats")
    parser.add_argument("--work", type=Path, required=True, help="a folder for gradients, prices, answers and rows")
    parser.add_argument("--tokens", type=int, default=8192, help="to calibrate on (default: %(default)s)")
    parser.add_argument(
        "--windows", type=int, default=30, help="of documentation, to measure on (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    bench = Bench(options.checkpoint, options.work, options.threads, options.tokens, options.windows)
    kept = options.work / "rows.json"
    rows: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}

    def row(name: str, formats: Any) -> dict[str, Any]:
        if name not in rows:
            rows[name] = {**bench.measure(formats.of(bench.demand)), "predicted": formats.loss}
            kept.write_text(json.dumps(rows))
        found: dict[str, Any] = rows[name]
        return found

    domains = "".join(f"{domain}|as a share|" for domain in bench.domains)
    print(f"|what|bits|predicted|{domains}CPU s|\n|---|{'--:|' * (3 + 2 * len(bench.domains))}", flush=True)
    for each in options.uniform:
        chosen = bench.uniform(*each.split(":"))
        print(bench.told(named(chosen), row(named(chosen), chosen), None), flush=True)
    for bits in options.auto:
        own, uniform = bench.candidates(bits)
        beside = None
        if uniform is not None:
            beside = row(named(uniform), uniform)
            print(bench.told(named(uniform), beside, None), flush=True)
        print(bench.told(f"auto {bits:g}", row(f"auto {bits:g}", own), beside), flush=True)


if __name__ == "__main__":
    main()
