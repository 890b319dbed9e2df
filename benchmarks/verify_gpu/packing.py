"""Pack what a machine without torch, transformers and a network needs: python -m benchmarks.verify_gpu.packing FOLDER.

Engines of the checks are lowered here, for the target; those of small models go with their weights and the logits that
this machine's CPU computes, those of large shapes as graphs alone, whose weights are drawn where they run. With them go
the runtime's wheel, with device code for the target alone, and the compiled kernels. FOLDER gets `upload-1` … of which
each, with this repository's tree, stays below `--upload-mib`. README.md beside this file lists the calls to make.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from benchmarks.verify_gpu import opening, parts, slim, subjects
from benchmarks.verify_gpu.carried import CONTENT, EXPECTED, PACK, WEIGHTS, engine_name, parity_cases
from benchmarks.verify_gpu.scale import CARRIED, CARRIED_DRY, Scale
from llmforge import native, targets
from llmforge.backends import engines, onnx_file, signatures
from llmforge.backends.onnxruntime.builder import session_options, write_tokenizer
from llmforge.backends.onnxruntime.cuda import builder as cuda
from llmforge.rewrite import next_ids, topk_outputs
from llmforge.runtime.config import DATA_FILE, FILE, MODEL_FILE, RuntimeConfig
from llmforge.targets import Target
from tests.models import zoo

TREE = Path(__file__).resolve().parents[2]
DRAWN_FROM_BYTES = 1 << 16  # initializers of floats and codes that are drawn where they run, in a pack without weights
DRAWN = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.UINT8, ir.DataType.INT8})
PAGE_BYTES = 4096
SLACK_BYTES = 1 << 20  # of an upload, for what archives of trees add
# Heads as XQA and FlashAttention take them, products as fpA_intB takes them; a vocabulary with blocks behind the head.
SMALL = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
HEADS = {**SMALL, "vocab_size": 8192}
SIZES = {"max_batch": 8, "max_context": 1024}


def pack(content: Path, scale: Scale, chosen: Target) -> None:
    """Write the engines of all checks, and what is known of the target, into `content`."""
    content.mkdir(parents=True)
    sheet = None if chosen.bandwidth_gbs is None else chosen.bandwidth_gbs.value
    told = {"dry_run": scale.dry, "target": chosen.name, "data_sheet_gb_per_s": sheet}
    (content / PACK).write_text(json.dumps(told), encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        for precision, model, kv_cache in parity_cases(scale):
            checkpoint = _checkpoint(Path(scratch, model), model, SMALL)
            folder = content / "engines" / engine_name(precision, model, kv_cache)
            _write(checkpoint, folder, precision, chosen, kv_cache=kv_cache, **SIZES)
            wanted = subjects.reference(checkpoint, Path(scratch, f"{folder.name}-cpu"), precision)
            ids = opening.text(wanted.vocabulary)
            np.savez(folder / EXPECTED, ids=ids, logits=opening.all_logits(wanted, ids, 128))
        checkpoint = _checkpoint(Path(scratch, "heads"), "llama", HEADS)
        _write(checkpoint, content / "engines" / "heads", scale.plain, chosen, kv_cache="slots", heads=True, **SIZES)
        for name, shape in scale.models.items():
            checkpoint = Path(scratch, name)
            empty_checkpoint(shape.config, checkpoint)
            sizes = {"max_batch": max(scale.batches), "max_context": scale.max_context}
            for precision in shape.precisions:
                folder = content / "engines" / f"{name}-{precision}"
                _write(checkpoint, folder, precision, chosen, weights=False, **sizes)
    library = native.library()
    if library is not None:
        (content / "native").mkdir()
        shutil.copy(library, content / "native" / library.name)


def _checkpoint(folder: Path, model: str, changes: dict[str, Any]) -> Path:
    if not folder.exists():
        zoo.write(model, folder, **(changes if model == "llama" else {}))
    return folder


def empty_checkpoint(shape: Any, folder: Path) -> None:
    """Write a checkpoint of a shape whose weights are a hole in a file: nothing reads them."""
    import torch
    import transformers

    config = transformers.LlamaConfig(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    for path in subjects.SAMPLE.glob("*token*.json"):
        shutil.copy(path, folder / path.name)
    header, at = {}, 0
    for name, each in model.named_parameters():
        header[name] = {"dtype": "BF16", "shape": list(each.shape), "data_offsets": [at, at + 2 * each.numel()]}
        at += 2 * each.numel()
    plain = json.dumps(header).encode()
    plain += b" " * (-len(plain) % 8)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(plain).to_bytes(8, "little") + plain)
        stream.truncate(8 + len(plain) + at)


def _write(
    checkpoint: Path,
    folder: Path,
    precision: str,
    chosen: Target,
    *,
    weights: bool = True,
    heads: bool = False,
    **options: Any,
) -> None:
    """Write an engine that nothing has loaded; `heads`: with those of steps, which graphs for a CPU have not."""
    made = subjects.lowered(checkpoint, folder, precision, chosen, **options)
    request, on_gpu = made.request, chosen.kind == "gpu"
    if heads and not on_gpu:
        topk_outputs.add_topk_outputs(request.model)
        next_ids.feed_back(request.model)
    request.folder.mkdir(parents=True)
    if weights:
        onnx_file.write(request.model, request.folder, request.progress)
    else:
        _write_graph(request.model, request.folder)
    (request.folder / FILE).write_text(_config(request, on_gpu).to_json(), encoding="utf-8")
    write_tokenizer(made.opened, folder / "tokenizer")
    (folder / subjects.FACTS).write_text(json.dumps(made.facts), encoding="utf-8")


def _config(request: engines.BuildRequest, on_gpu: bool) -> RuntimeConfig:
    if on_gpu:
        return cuda.configure(request)
    common = signatures.config(request, session_options(threads=None))
    return replace(common, onnxruntime=onnxruntime.__version__, kernels=native.VERSION)


def _write_graph(model: ir.Model, folder: Path) -> None:
    """Write the graph, whose larger weights are in a file that is not there, and which bytes of it are of which type.

    Nothing reads those weights: neither what the checkpoint has nor what quantization would make of it.
    """
    clone, at, told = model.clone(), 0, []
    for name, value in sorted(clone.graph.initializers.items()):
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes < DRAWN_FROM_BYTES or tensor.dtype not in DRAWN:
            value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
            continue
        at = -(-at // PAGE_BYTES) * PAGE_BYTES
        shape = ir.Shape(tensor.shape.numpy())
        value.const_value = ir.ExternalTensor(DATA_FILE, at, tensor.nbytes, tensor.dtype, shape=shape, name=name)
        told.append([at, tensor.nbytes, tensor.dtype.name])
        at += tensor.nbytes
    (folder / MODEL_FILE).write_bytes(ir.to_proto(clone).SerializeToString(deterministic=True))
    (folder / WEIGHTS).write_text(json.dumps(told), encoding="utf-8")


def tree_bytes() -> int:
    """Count what travels with every upload: the files of this tree that git does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=TREE, check=True, capture_output=True, text=True).stdout.split("\0")
    return sum((TREE / each).lstat().st_size for each in listed if each and (TREE / each).is_file())


def compress(content: Path, archive: Path) -> None:
    """Write the folder `content` as one file; zeros of a library and the sameness of layers pack well."""
    with lzma.open(archive, "wb", preset=4) as stream, tarfile.open(fileobj=stream, mode="w") as packed:
        packed.add(content, CONTENT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="h100-sxm", help="whose engines are lowered")
    parser.add_argument("--upload-mib", type=float, default=64, help="what one upload may be, this tree included")
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--wheel", action="append", default=[], help="another requirement that its image lacks")
    parser.add_argument("--no-runtime", action="store_true", help="no wheel of onnxruntime-gpu: there is one")
    parser.add_argument("--dry-run", action="store_true", help="engines for this CPU, with tiny shapes")
    arguments = parser.parse_args()
    scale = CARRIED_DRY if arguments.dry_run else CARRIED
    chosen = targets.local() if scale.dry else targets.load(arguments.target)
    part_bytes = int(arguments.upload_mib * 2**20) - tree_bytes() - SLACK_BYTES
    if part_bytes <= 0:
        raise SystemExit(f"error: the tree alone takes {tree_bytes():,} bytes\nhint: a larger --upload-mib")
    with tempfile.TemporaryDirectory() as scratch:
        content = Path(scratch, CONTENT)
        pack(content, scale, chosen)
        wanted = [] if arguments.no_runtime else [f"onnxruntime-gpu=={cuda.VERSION}"]
        sm = None if scale.dry else int(chosen.require_gpu().sm)
        wanted += arguments.wheel
        for wheel in slim.download(wanted, Path(scratch, "wheels"), arguments.python) if wanted else ():
            slim.unpack(wheel, content / "site", sm)
        archive = Path(scratch, "pack.tar.xz")
        compress(content, archive)
        uploads = parts.cut(archive, arguments.folder, part_bytes)
        print(f"{len(uploads)} uploads, {archive.stat().st_size / 2**20:.1f} MiB in all, of at most", file=sys.stderr)
        print(f"{part_bytes / 2**20:.1f} MiB beside a tree of {tree_bytes() / 2**20:.1f}", file=sys.stderr)
    print(*uploads, sep="\n")


if __name__ == "__main__":
    main()
