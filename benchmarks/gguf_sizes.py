"""GGUF files of ours beside llama.cpp's of one size: python -m benchmarks.gguf_sizes CHECKPOINT --tools T --work W.

    python -m benchmarks.gguf_sizes tests/data/docs-llama-7m --tools llama.cpp/build/bin --work W --chunks 32

T has llama-imatrix, llama-quantize and llama-perplexity. llama.cpp's files are quantized with an importance matrix of
the calibration text that ships; ours by `method: auto` on 8,192 tokens of that text, in as many bytes of tensors, which
leaves both files of one size. KLD is that of `llama-perplexity --kl-divergence` on evaluation text, against the
unquantized file: of each chunk of 512 tokens the second half, ± its standard error.

llama.cpp rounds to int8 what quantized weights are multiplied with. What that alone loses is measured without rounded
weights: the numbers of llama.cpp's Q8_0 file, as F32, against that file. It is the floor of types of blocks of 32; K
types, which round 256 activations by one scale, lose more by it. The ratio is of what both files lose beyond that
floor, so that where ours lose less it is at least what it would be with the floor of their own types. Files, prices
and what was measured are kept in W; a later call goes on there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir

from benchmarks.model_size import ROOT
from llmforge.backends.exported_parameters import Exported, KernelBlocks
from llmforge.backends.gguf import builder, packing
from llmforge.base.progress import Silent
from llmforge.cache import Cache
from llmforge.calibration import Store, calibrate
from llmforge.checkpoint import Checkpoint, text
from llmforge.checkpoint.documents import read_documents
from llmforge.compile import texts
from llmforge.quantization.grid import gguf_type
from llmforge.quantization.grids import QuantizedMatrix
from llmforge.quantization.methods.gptq import Gptq
from llmforge.quantization.statistics import WeightDemand
from llmforge.recipe import EngineSpec

TEXTS = ROOT / "recipes" / "text"
TYPES = ("Q3_K_M", "IQ4_XS", "Q4_K_M", "Q5_K_M", "Q6_K")
CONTEXT, IMATRIX_CHUNKS = 512, 40
_MEAN = re.compile(r"Mean +KLD: +(\S+) ± +(\S+)")
_SAME = re.compile(r"Same top p: +(\S+) ± +\S+ %")


@dataclass(frozen=True, eq=False)
class Chosen(KernelBlocks):
    """A matrix that calibration chose, as it is written."""

    matrix: QuantizedMatrix | None = None

    def read(self) -> QuantizedMatrix:
        """Return it."""
        assert self.matrix is not None
        return self.matrix


def file_of(checkpoint: Checkpoint, matrices: dict[str, QuantizedMatrix], file: Path) -> None:
    """Write a GGUF file of a checkpoint with `matrices` in place of weights."""
    nothing = ir.Value(name="groups")
    quantized = {
        name: Chosen(name, *each.shape, each.grid, nothing, name == builder.EMBEDDING, each)
        for name, each in matrices.items()
    }
    spec = EngineSpec(backend=builder.BACKEND, max_context=CONTEXT)
    builder.write(Exported(checkpoint, quantized, {}), spec, file, Silent())


def tensor_bytes(file: Path) -> int:
    """Count the bytes of all tensors of a file."""
    return sum(int(each.n_bytes) for each in gguf.GGUFReader(file).tensors)


def dequantized(source: Path, target: Path) -> None:
    """Write the numbers of a file as F32, with all else that it says."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind, *own = field.types
            writer.add_key_value(name, field.contents(), kind, own[0] if own else None)
    for each in reader.tensors:
        writer.add_tensor(each.name, np.float32(gguf.quants.dequantize(each.data, each.tensor_type)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Bench:
    """A checkpoint beside llama.cpp's tools, and a folder that keeps what was made."""

    def __init__(self, checkpoint: Path, tools: Path, work: Path, chunks: int, threads: int) -> None:
        self.checkpoint, self.tools, self.work = Checkpoint.open(checkpoint), tools, work
        self.chunks, self.threads = chunks, threads
        work.mkdir(parents=True, exist_ok=True)
        self.results = work / "results.json"
        self.kept: dict[str, Any] = json.loads(self.results.read_text()) if self.results.exists() else {}
        for name in ("calibration", "evaluation"):
            read = [json.loads(line)["text"] for line in (TEXTS / f"{name}.jsonl").read_text().splitlines()]
            (work / f"{name}.txt").write_text("\n\n".join(read))
        self.plain = work / "plain.gguf"
        if not self.plain.exists():
            file_of(self.checkpoint, {}, self.plain)

    def call(self, tool: str, *arguments: object) -> str:
        """Run a tool, and return what it prints."""
        command = [str(self.tools / f"llama-{tool}"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
        return done.stdout + done.stderr

    def theirs(self, kind: str) -> Path:
        """Quantize by llama.cpp, with an importance matrix."""
        matrix, file = self.work / "imatrix.gguf", self.work / f"{kind}.gguf"
        if not matrix.exists():
            made = ("-m", self.plain, "-f", self.work / "calibration.txt", "-o", matrix, "-c", CONTEXT)
            self.call("imatrix", *made, "--chunks", IMATRIX_CHUNKS, "-t", self.threads)
        if not file.exists():
            self.call("quantize", "--imatrix", matrix, self.plain, file, kind, self.threads)
        return file

    def ours(self, kind: str, tokens: int) -> Path:
        """Choose formats and codes in as many bytes as llama.cpp's file of a type has."""
        file = self.work / f"ours-{kind}.gguf"
        if file.exists():
            return file
        pool = texts.windows_of(self.checkpoint, read_documents(TEXTS / "calibration.jsonl"), CONTEXT)
        windows, began = text.sample_tokens(pool, tokens, 0), time.process_time()
        demand = WeightDemand(Gptq(), gguf_type(4), tables=gguf_type(8), weight_bytes=tensor_bytes(self.theirs(kind)))
        cache = Cache(self.work / "cache")
        try:
            found = calibrate(self.checkpoint, windows, [demand], threads=self.threads, store=Store(cache))
            matrices = dict(found.linears)
        finally:
            cache.close()
        file_of(self.checkpoint, matrices, file)
        kinds = Counter(str(packing.type_of(each.grid, each.shape[1])) for each in matrices.values())
        print(f"{kind}: {time.process_time() - began:.0f} CPU s; {dict(kinds)}; {'; '.join(found.notes)}", flush=True)
        return file

    def measured(self, file: Path, against: Path) -> dict[str, float]:
        """Measure the KLD of a file from that of an unquantized one, whose logits are written where they are not."""
        known = f"{file.name}, {self.chunks} chunks"
        if known not in self.kept:
            base, read = self.work / f"{against.stem}-{self.chunks}.logits", ("-c", CONTEXT, "-t", self.threads)
            if not base.exists():
                chosen = ("-f", self.work / "evaluation.txt", "--chunks", self.chunks)
                self.call("perplexity", "-m", against, *chosen, *read, "--kl-divergence-base", base)
            printed = self.call("perplexity", "-m", file, *read, "--kl-divergence-base", base, "--kl-divergence")
            mean, same = _MEAN.search(printed), _SAME.search(printed)
            assert mean is not None, printed[-4000:]
            assert same is not None, printed[-4000:]
            figures = {"kld": float(mean[1]), "error": float(mean[2]), "same": float(same[1])}
            self.kept[known] = {**figures, "bytes": file.stat().st_size}
            self.results.write_text(json.dumps(self.kept, indent=1))
        found: dict[str, float] = self.kept[known]
        return found

    def floor(self) -> float:
        """Measure what activations in int8 lose where weights are not rounded."""
        file, numbers = self.theirs("Q8_0"), self.work / "Q8_0-F32.gguf"
        if not numbers.exists():
            dequantized(file, numbers)
        return self.measured(file, numbers)["kld"]


def _row(found: dict[str, float]) -> str:
    return (
        f"{found['bytes'] / 1e6:.3f} | {found['kld'] * 1e3:.2f} ± {found['error'] * 1e3:.2f} | {found['same']:.1f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tools", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps what was made")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--chunks", type=int, default=12, help="of evaluation text, 512 tokens each")
    parser.add_argument("--tokens", type=int, default=8192, help="to calibrate on")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    bench = Bench(given.checkpoint, given.tools, given.work, given.chunks, given.threads)
    floor = bench.floor()
    print(f"activations in int8, blocks of 32, unrounded weights: KLD × 1000 {floor * 1e3:.3f}")
    print("| size of | llama.cpp, MB | KLD × 1000 | same token | ours, MB | KLD × 1000 | same token | ratio |")
    for kind in given.types:
        theirs = bench.measured(bench.theirs(kind), bench.plain)
        ours = bench.measured(bench.ours(kind, given.tokens), bench.plain)
        ratio = (ours["kld"] - floor) / (theirs["kld"] - floor)
        print(f"| {kind} | {_row(theirs)} {_row(ours)} {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
