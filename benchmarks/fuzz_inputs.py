"""Read thousands of damaged and hostile inputs, and find no traceback, nothing outside, no hang, no long message.

    python benchmarks/fuzz_inputs.py [--cases 10000] [--templates 200] [--seed 0] [--atheris SECONDS]

Each case begins with a file that is well: a recipe, a target, values of --set, the header of safetensors, a
configuration, an adapter, a tokenizer, a manifest, a record of evidence, runtime.json, texts, arrivals, a graph, a
chat template.
Bytes are flipped, cut and doubled, values replaced by hostile ones, keys repeated; every file in tests/attacks/finds is
among the beginnings.
Then: it is read, or refused with a `ForgeError` of a documented exit code and at most 1 kB of message, within 5 s, with
at most 1 GB of memory; and nothing appears outside of the folder that is written to.

Exit code 0 and one JSON object where all holds; else the case that broke it, and a traceback. --atheris runs libFuzzer
over the same readers with bytes of its own for so long, where the package is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if "--atheris" in sys.argv:  # what is imported in this block tells libFuzzer which of its branches are taken
    import atheris

    with atheris.instrument_imports(include=["llmforge"]):
        import llmforge.gates.verdict
        import llmforge.measure.load
        import llmforge.planning.request
        import llmforge.serving.runner
        import llmforge.triton.repository  # noqa: F401

import numpy as np
import onnx_ir as ir
from click.testing import CliRunner
from safetensors.numpy import save

from llmforge import passes, targets
from llmforge.artifact import Artifact, admission, sealed, staging
from llmforge.backends.onnxruntime.session import Session
from llmforge.base.errors import ForgeError
from llmforge.checkpoint import documents, load_config, read_settings
from llmforge.checkpoint.adapters import AdapterSource, Merge
from llmforge.checkpoint.safetensors_file import TensorEntry, read_header
from llmforge.cli import cli
from llmforge.gates import verdict
from llmforge.ir import onnx_file
from llmforge.measure.load import workload
from llmforge.planning import request
from llmforge.recipe import Recipe
from llmforge.runtime.config import RuntimeConfig, SessionConfig
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.prompts import read_tokenizer
from llmforge.triton import repository

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "tests" / "data" / "docs-llama-7m"
FINDS = ROOT / "tests" / "attacks" / "finds"
LONGEST_S = 5.0  # of CPU time; of wall clock thrice as much, for a machine that does something else, too
MOST_MEMORY = 1_000_000_000
MOST_MESSAGE = 1000
CODES = {2, 5, 6, 8}

# What stands in for a value: numbers at borders, texts that are too long, unprintable, or mean something elsewhere.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**40, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, 1e308, -0.0, math.inf,
    math.nan,
    "", "x", "../../evil", "/etc/passwd", "..", "a/b", "\0", "\x1b[2J", "\ud800", "\u202e", "x" * 5000, "9" * 5000,
    "é" * 300, "%s%n", "{{ 7 * 7 }}", "!!int x", "2020-99-99", "*a", "<<", [], {}, [[]] * 100, {"x": {"x": {}}}, [1,
    "a", None],
    "/dev/zero", "local", "h200", "llama",
)  # fmt: skip
SNIPPETS = (
    b"!!int x", b"!!float y", b"!!bool z", b"2020-99-99", b"9" * 5000, b"[" * 2000, b"{a: " * 2000, b"*a", b"&a [*a]",
    b"<<: {a: b}", b"\0", b"\xff", b"\t", b"- " * 500, b"!!python/object/apply:os.system [ls]", b".inf",
    b"0x" + b"f" * 99, b'"\\ud800"', b"1e999", b"NaN", b"--- a\n", b"? ", b"'", b"#", b"a, " * 3000, b"\xe2\x80\xae",
)  # fmt: skip
TEMPLATES = (
    "{{ 'x' * 10**9 }}", "{{ [1] * 10**9 }}", "{{ 10 ** 10 ** 9 }}", "{{ '%0999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}", "{{ 'x' | center(10**9) }}", "{{ lipsum(n=10**6) }}",
    "{{ messages[0].content * 99 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('x') }}", "{{ strftime_now('%Y' * 10**8) }}",
    "{{ messages | tojson(indent=10**8) }}", "{{ ''.join(['x'] * 10**8) }}", "{{ 'x'.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ (((((1)))))) }}",
    "{{ " + "(" * 4000, "{% if 1 %}" * 90, "{{ x | nope }}", "{{ 'a' | replace('', 'b' * 10**8) }}",
    "{{ range(10**9) | list }}",
)  # fmt: skip


class Hang(BaseException):
    """A case took longer than any may."""


@dataclass(frozen=True)
class Kind:
    """A kind of input: what is well, by bytes, and what reads it from a file."""

    name: str
    good: tuple[bytes, ...]
    suffix: str
    read: Callable[[Path, bytes], object]


def kinds(place: Path) -> list[Kind]:
    """Make everything that cases begin with, in `place`."""
    (place / "shared").mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")  # hashes of files are remembered in
    artifact = make_artifact(place / "shared")
    manifest = (artifact.path / "manifest.json").read_bytes()
    record = (artifact.path / artifact.evidence[0].path).read_bytes()
    header = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]} for i in range(3)}
    ).encode()
    recipes = tuple(path.read_bytes() for path in sorted((ROOT / "recipes").glob("*.yaml")))
    graph = make_graph()

    def recipe(file: Path, data: bytes) -> None:
        found = Recipe.load(file)
        found.instantiate(passes.ALL)
        if found.checkpoint.is_dir():
            request.build_of(found)

    def setting(file: Path, data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        Recipe.load(ROOT / "recipes" / "quickstart.yaml", text.split("\n")).instantiate(passes.ALL)

    def manifest_of(file: Path, data: bytes) -> None:
        # As a forger would who knows the form, and the record that is bound to it: else all would end at its form.
        try:
            sealed.parse_manifest(data, str(file))
        except ForgeError:
            if (formed := in_form(data)) is None:
                raise
            data = formed
        bound = json.dumps({**json.loads(record), "content": hashlib.sha256(data).hexdigest()}).encode()
        used(file, data, bound)

    def evidence(file: Path, data: bytes) -> None:
        digest = artifact.manifest.content_digest.encode()  # finds are bound to the artifact of their time
        used(file, manifest, re.sub(rb'(?<="content": ")[0-9a-f]{64}(?=")', digest, data, count=1))

    def used(file: Path, manifest: bytes, record: bytes) -> None:
        folder = file.parent / "deep" / "artifact"
        shutil.copytree(artifact.path, folder, copy_function=shutil.copyfile)
        (folder / "manifest.json").write_bytes(manifest)
        shutil.rmtree(folder / sealed.EVIDENCE)
        (folder / sealed.EVIDENCE).mkdir()
        (folder / sealed.EVIDENCE / f"{hashlib.sha256(record).hexdigest()}.json").write_bytes(record)
        opened = Artifact.open(folder)
        opened.verify()
        admission.admit(folder, allow="fail")
        repository.export(opened, repository.of_artifact(opened), file.parent / "deep" / "repository")
        done = CliRunner().invoke(cli, ["inspect", str(folder)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        verdict.recompute(opened)

    def configuration(file: Path, data: bytes) -> None:
        load_config(file.parent, read_settings(file.parent))

    def planned(file: Path, data: bytes) -> None:
        request.answer(file.parent, request.PlanRequest(targets=("h200",)))

    def session(file: Path, data: bytes) -> None:
        onnx_file.load(file)
        Session(file, SessionConfig(1))

    def template(file: Path, data: bytes) -> None:
        made = ChatTemplate.read(file.parent)
        assert made is not None
        made.render([{"role": "user", "content": "hi"}])

    def arrivals(file: Path, data: bytes) -> None:
        workload.read_trace(file, lambda text: list(text.encode()), workload.RandomPrompts(100))

    def adapter(name: str, other: str, good: bytes) -> Callable[[Path, bytes], None]:
        """Return what reads an adapter, of whose two files the one `other` is well."""

        def read(file: Path, data: bytes) -> None:
            folder = file.parent / "deep" / "artifact"
            folder.mkdir(parents=True)
            (folder / name).write_bytes(data)
            (folder / other).write_bytes(good)
            base = {
                key: TensorEntry(key, ir.DataType.FLOAT, shape, file, 0, 0)
                for key, shape in (("model.a.weight", (4, 6)), ("model.b.weight", (6, 4)), ("model.c.bias", (4,)))
            }
            merged = Merge.of([AdapterSource("a", folder)], base, SAMPLE)
            merged.digest("0")
            for key, entry in base.items():
                held = np.zeros(entry.shape, np.float32)
                merged.apply(
                    ir.LazyTensor(lambda held=held: ir.Tensor(held), entry.dtype, ir.Shape(entry.shape), name=key)
                ).numpy()

        return read

    adapter_config, adapter_weights = make_adapter()
    load_config(SAMPLE, read_settings(SAMPLE))  # imports torch, which is no part of any case
    lines = b'{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n'
    load = b'{"at_s": 0, "prompt_tokens": 3, "output_tokens": 5}\n{"at_s": 1, "prompt": "x", "output_tokens": 1}\n'
    settings = b"engine.max_context=1024\npasses.quantize-weights.bits=8\ngates.kld_mean.max=0.1\nserving.max_queue=3"
    config = (SAMPLE / "config.json").read_bytes()
    target = (ROOT / "targets" / "h200.yaml").read_bytes()
    runtime = (artifact.path / "engine" / "runtime.json").read_bytes()
    return [
        Kind("recipe", recipes, "recipe.yaml", recipe),
        Kind("set", (settings,), "values", setting),
        Kind("target", (target,), "target.yaml", lambda file, data: targets.read(file)),
        Kind("header", (header,), "model.safetensors", lambda file, data: read_header(file)),
        Kind("config", (config,), "config.json", configuration),
        Kind("plan", (config,), "config.json", planned),
        Kind("manifest", (manifest,), "manifest.json", manifest_of),
        Kind("evidence", (record,), "record.json", evidence),
        Kind("runtime", (runtime,), "runtime.json", lambda file, data: RuntimeConfig.read(file)),
        Kind("texts", (lines,), "texts.jsonl", lambda file, data: documents.read_documents(file)),
        Kind("arrivals", (load,), "load.jsonl", arrivals),
        Kind(
            "adapter config",
            (adapter_config,),
            "adapter.json",
            adapter("adapter_config.json", "adapter_model.safetensors", adapter_weights),
        ),
        Kind(
            "adapter",
            (adapter_weights,),
            "adapter.safetensors",
            adapter("adapter_model.safetensors", "adapter_config.json", adapter_config),
        ),
        Kind("tokenizer", (TOKENIZER,), "tokenizer.json", tokenized),
        Kind("graph", (graph,), "model.onnx", session),
        Kind("template", tuple(text.encode() for text in TEMPLATES), "chat_template.jinja", template),
    ]


TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
    }
).encode()  # fmt: skip


def tokenized(file: Path, data: bytes) -> None:
    """Read a tokenizer, and encode a prompt that is hostile itself."""
    read_tokenizer(file).encode("ab\0\x1b\u202e" + "x" * 1000)


def make_artifact(folder: Path) -> Artifact:
    """Publish a small artifact whose manifest and repository are as a build writes them; its record is made up."""
    sys.path.insert(0, str(ROOT))
    from tests.samples import stored

    runtime = {
        "format": 3, "onnxruntime": "1.31.1", "kernels": None, "max_context": 64, "max_batch": 2, "vocabulary": 100,
        "eos_token_ids": [1], "bos_token_id": None, "caches": [], "provider": "cpu", "provider_options": {},
        "buckets": [], "session": {"threads": None, "optimize": True, "entries": {}}, "device": None, "graphs": None,
        "plan": None,
    }  # fmt: skip
    with staging(folder, "tiny") as staged:
        files = {
            "engine/runtime.json": json.dumps(runtime), "tokenizer/tokenizer.json": TOKENIZER.decode(),
            "engine/model.onnx": "", "triton/tiny/1/model.py": "", "report/report.html": "<p>report</p>",
        }  # fmt: skip
        for path, content in files.items():
            (staged / path).parent.mkdir(parents=True, exist_ok=True)
            (staged / path).write_text(content)
        recipe = {"schema": 1, "gates": stored.PASSES, "serving": {"triton": {}}}
        return stored.publish(staged, recipe=recipe, requires={"onnxruntime": "1.31.1"})


def make_adapter() -> tuple[bytes, bytes]:
    """Make the two files of an adapter with DoRA: a configuration, and its weights."""
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True, "use_rslora": False, "bias": "none",
        "alpha_pattern": {"b": 3, r"model\\.a": 2.5}, "rank_pattern": {"b": 1}, "fan_in_fan_out": False,
        "target_modules": ["a", "b"], "init_lora_weights": True, "base_model_name_or_path": "ORG/NAME",
        "modules_to_save": None,
    }  # fmt: skip
    rng, prefix = np.random.default_rng(0), "base_model.model.model"
    weights = {f"{prefix}.c.bias": rng.standard_normal(4).astype(np.float32)}
    for name, n, k, r in (("a", 4, 6, 2), ("b", 6, 4, 1)):
        weights[f"{prefix}.{name}.lora_A.weight"] = rng.standard_normal((r, k)).astype(np.float32)
        weights[f"{prefix}.{name}.lora_B.weight"] = rng.standard_normal((n, r)).astype(np.float32)
        weights[f"{prefix}.{name}.lora_magnitude_vector"] = rng.uniform(0.5, 1, n).astype(np.float32)
    return json.dumps(config).encode(), save(weights)


def in_form(data: bytes) -> bytes | None:
    """Write JSON in the one form that a manifest has; None: it is none."""
    try:
        return (json.dumps(json.loads(data), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
    except (ValueError, RecursionError):
        return None


def make_graph() -> bytes:
    """Make a graph of two nodes."""
    import onnx

    given, made = (
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 1, 4]) for n in ("input_ids", "logits")
    )
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [4, 4], bytes(64), raw=True)
    nodes = [
        onnx.helper.make_node("MatMul", ["input_ids", "w"], ["x"]), onnx.helper.make_node("Relu", ["x"], ["logits"]),
    ]  # fmt: skip
    graph = onnx.helper.make_graph(nodes, "g", [given], [made], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


def mutate(kind: Kind, chance: random.Random) -> bytes:
    """Make one hostile input."""
    finds = [path.read_bytes() for path in sorted(FINDS.glob(f"{kind.name}-*"))]
    data = chance.choice([*kind.good, *finds] if chance.random() < 0.3 else kind.good)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        data = chance.choice((flip, cut, insert, double, change_value, change_value, change_value))(kind, data, chance)
    return data


def flip(kind: Kind, data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data or b"x")
    for _ in range(chance.choice((1, 1, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(kind: Kind, data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def insert(kind: Kind, data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(SNIPPETS) + data[at:]


def double(kind: Kind, data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data) + 1)
    part = data[begin : begin + chance.choice((1, 20, 500))]
    return data[:begin] + part * chance.choice((2, 3, 200)) + data[begin:]


def change_value(kind: Kind, data: bytes, chance: random.Random) -> bytes:
    """Put a hostile value in the place of one of the document's."""
    value = chance.choice(VALUES)
    if kind.name == "template":
        return data.replace(b"10**9", repr(value).encode("utf-8", "backslashreplace"))
    if kind.name == "set":
        lines = data.split(b"\n")
        line = chance.randrange(len(lines))
        lines[line] = lines[line].split(b"=")[0] + b"=" + json.dumps(value).encode()
        return b"\n".join(lines)
    if kind.suffix.endswith(".yaml"):
        lines = data.split(b"\n")
        line = chance.randrange(len(lines))
        key, colon, _ = lines[line].partition(b":")
        lines[line] = key + colon + b" " + json.dumps(value).encode()
        return b"\n".join(lines)
    text, _, rest = data.partition(b"\n") if kind.suffix.endswith(".jsonl") else (data, b"", b"")
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return flip(kind, data, chance)
    holders = list(containers(plain))
    if not holders:
        return json.dumps(value).encode()
    holder = chance.choice(holders)
    if isinstance(holder, dict) and chance.random() < 0.2:
        holder[str(chance.choice(VALUES))[:100]] = value
    elif holder:
        holder[chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))] = value
    return json.dumps(plain).encode() + (b"\n" + rest if rest else b"")


def containers(plain: Any) -> Iterator[Any]:
    """Yield every list and object of a JSON value."""
    waiting = [plain]
    while waiting:
        at = waiting.pop()
        if isinstance(at, dict | list):
            yield at
            waiting += at.values() if isinstance(at, dict) else at


@contextmanager
def watched() -> Iterator[None]:
    """Raise `Hang` in the block where it takes too long."""

    def ring(number: int, frame: object) -> None:
        raise Hang(f"more than {LONGEST_S} s")

    timers = (
        (signal.SIGALRM, signal.ITIMER_REAL, 3 * LONGEST_S),
        (signal.SIGPROF, signal.ITIMER_PROF, LONGEST_S),
    )
    previous = [signal.signal(number, ring) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, previous, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def snapshot(place: Path) -> set[str]:
    """Name everything in a folder."""
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def judge(kind: Kind, data: bytes, place: Path) -> str:
    """Read one input in a folder of its own below `place`, and say how it ended.

    Raises:
        AssertionError, Hang, or whatever else it raised that is no `ForgeError`.
    """
    case = place / "a" / "b"
    case.mkdir(parents=True)
    file = case / kind.suffix
    framed = struct.pack("<Q", len(data)) + data + bytes(48) if kind.name == "header" else data
    file.write_bytes(framed)
    before = snapshot(place)
    try:
        with watched():
            kind.read(file, data)
        ended = "read"
    except ForgeError as error:
        ended = f"refused with {error.exit_code}"
        code, said = error.exit_code, f"error: {error.message}\nhint: {error.hint}\n"
        assert code in CODES, said
        assert len(said.encode("utf-8", "surrogatepass")) <= MOST_MESSAGE, said
        assert all(character.isprintable() or character == "\n" for character in said), repr(said)
    appeared = {path for path in snapshot(place) - before if not path.startswith("a/b/deep")}
    assert not appeared, f"appeared outside: {sorted(appeared)}"
    assert {path.name for path in (case / "deep").glob("*")} <= {"artifact", "repository"}
    return ended


def run(cases: int, templates: int, seed: int, place: Path) -> dict[str, Any]:
    """Judge `cases` inputs, of all kinds in turn, and `templates` besides; count how they ended."""
    every = kinds(place / "kinds")
    for kind in every:
        if kind.name != "template":
            ended = judge(kind, kind.good[0], place / "good")
            assert ended == "read", f"{kind.name}: what is well was {ended}"
            shutil.rmtree(place / "good")
    plain = [kind for kind in every if kind.name != "template"]
    order = [plain[number % len(plain)] for number in range(cases)] + [every[-1]] * templates
    ends: Counter[str] = Counter()
    longest, longest_cpu, at_first = 0.0, 0.0, peak_bytes()
    for number, kind in enumerate(order):
        chance = random.Random(f"{seed} {number}")  # a case can be made again by itself
        data = mutate(kind, chance)
        began, began_cpu = time.perf_counter(), time.process_time()
        try:
            ends[f"{kind.name}: {judge(kind, data, place / 'case')}"] += 1
            assert peak_bytes() - at_first < MOST_MEMORY, "more than 1 GB of memory"
        except BaseException as error:
            (Path(tempfile.gettempdir()) / f"fuzz-{kind.name}-{number}").write_bytes(data)
            error.add_note(f"case {number} of seed {seed}, {kind.name}; its bytes are in {tempfile.gettempdir()}")
            raise
        longest = max(longest, time.perf_counter() - began)
        longest_cpu = max(longest_cpu, time.process_time() - began_cpu)
        shutil.rmtree(place / "case")
    return {
        "cases": len(order), "seed": seed, "longest_s": round(longest, 2), "longest_cpu_s": round(longest_cpu, 2),
        "memory_mb": (peak_bytes() - at_first) // 10**6, "ends": dict(sorted(ends.items())),
    }  # fmt: skip


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_atheris(seconds: int, place: Path) -> None:
    """Let libFuzzer choose the bytes, the first of which chooses the kind; it does not return."""
    import atheris

    def parsed(file: Path, data: bytes) -> None:  # to render takes a process, whose branches are not seen
        ChatTemplate(data.decode("utf-8", "replace"), {}, str(file))

    every = [replace(kind, read=parsed) if kind.name == "template" else kind for kind in kinds(place / "kinds")]
    corpus = place / "corpus"
    corpus.mkdir()
    for number, kind in enumerate(every):
        for index, good in enumerate(kind.good):
            (corpus / f"{kind.name}-{index}").write_bytes(bytes([number]) + good)

    def one(data: bytes) -> None:
        if not data:
            return
        kind = every[data[0] % len(every)]
        try:
            judge(kind, data[1:], place / "case")
        except Hang:  # once: another process may have stopped this one
            shutil.rmtree(place / "case")
            judge(kind, data[1:], place / "case")
        shutil.rmtree(place / "case")

    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=65536", str(corpus)], one)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--templates", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", type=int, metavar="SECONDS", default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.atheris:
            run_atheris(options.atheris, Path(place))
        found = run(options.cases, options.templates, options.seed, Path(place))
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
