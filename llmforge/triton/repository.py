"""Writes a Triton model repository: into an artifact as it is built, or out of one to where a server reads it.

::

    <name>/config.pbtxt        tensors, instances, versions, how the engine serves
           README.md           launch line, versions, clients
           warmup/             the request that runs before the model is ready
           1/model.py          five lines over the package beside it
             llmforge/         the runtime, as it was when the artifact was measured
             requirements.txt  what the serving environment needs
             chat_template.jinja    where another than the artifact's was asked for
             __pycache__       an empty file: no bytecode stands beside the sources that the manifest vouches for
             engine/ tokenizer/    not inside an artifact, which has them already
             manifest.json evidence/    nor these: they say what the model loads, and how its gates ended

A server can read the repository inside an artifact where it lies: its model.py finds the engine there. `export` makes
one that stands alone.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np

from llmforge import targets
from llmforge.artifact import Artifact
from llmforge.artifact.sealed import MANIFEST
from llmforge.backends import PROVIDERS, of_provider
from llmforge.base.errors import EnvironmentLacks, InputError, UnsupportedError, UsageError
from llmforge.recipe import ServingSpec
from llmforge.runtime.artifact_files import TEMPLATE_FILE
from llmforge.runtime.config import FILE, RuntimeConfig
from llmforge.runtime.encoder import EncoderConfig
from llmforge.serving.encoder_engine import EncoderOptions
from llmforge.triton import sources
from llmforge.triton.backend import checks, encoder_signature, signature

FOLDER = "triton"  # in an artifact
CONFIG = "config.pbtxt"
README = "README.md"
REQUIREMENTS = "requirements.txt"
WARMUP = "warmup"
IN_ARTIFACT = "../../.."  # from the model's version to the folder with engine/ and tokenizer/
ALONE = "."
CARRIED = ("engine", "tokenizer")
WARMUP_TOKENS = 32
WARMUP_TEXT = b"a text"  # of an encoder
NCCL = "nvidia-nccl-cu13"  # what ranks on GPUs meet through; any version does
PARTIAL = ".partial-"

_MODEL = '''\
"""What Triton loads: llmforge's model, from the package beside this file."""

import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from llmforge.triton.backend import checks  # noqa: E402

checks.environment()  # before anything is imported that this environment may lack

from llmforge.triton.backend.{model}  # noqa: E402

__all__ = ["TritonPythonModel"]
'''

_CLASS = "model import TritonPythonModel"
_ENCODER_CLASS = "encoder_model import TritonEncoderModel as TritonPythonModel"


@dataclass(frozen=True)
class TritonModel:
    """What a repository says about its model; `kind` is the device of the target, where `serving` names none."""

    name: str
    kind: str  # cpu or gpu
    serving: ServingSpec
    runtime: RuntimeConfig
    made_of: Mapping[str, str]  # for the README: what, and which
    allow: str | None = None  # a verdict of the artifact's gates that is taken as it is
    chat_template: str | None = None  # in place of the artifact's


def write(model: TritonModel, folder: Path) -> None:
    """Write the model's folder inside an artifact.

    Raises:
        EnvironmentLacks: the engine needs llmforge's own operators, and they are not compiled here.
    """
    _write(files(model), folder)


def files(model: TritonModel) -> dict[str, bytes]:
    """Make all files of `model` inside an artifact, by their paths in its folder.

    Raises:
        EnvironmentLacks: the engine needs llmforge's own operators, and they are not compiled here.
    """
    return {**_shared(model, IN_ARTIFACT), **own_files(model)}


def own_files(model: TritonModel) -> dict[str, bytes]:
    """Make the files of the first version of `model`, by their paths in its folder.

    Raises:
        EnvironmentLacks: the engine needs llmforge's own operators, and they are not compiled here.
    """
    # Beside a GPU they draw the tokens, and numpy does where they do not run.
    kernels = model.runtime.kernels is not None or (None if model.runtime.device is not None else False)
    encodes = model.runtime.encoder is not None
    shipped = sources.shipped(sources.ENCODER_ROOTS if encodes else sources.ROOTS, kernels=kernels)
    made = {f"1/{path}": source.read_bytes() for path, source in shipped.items()}
    made["1/model.py"] = _MODEL.format(model=_ENCODER_CLASS if encodes else _CLASS).encode()
    made["1/__pycache__"] = b""  # a file, so that Python neither writes bytecode into an artifact nor reads any there
    made[f"1/{REQUIREMENTS}"] = requirements(model.runtime).encode()
    return made


def config(model: TritonModel, artifact: str) -> str:
    """Render config.pbtxt.

    Raises:
        UsageError: `serving.triton.gpus` gives a GPU to ranks of two instances, or `serving` sets for an encoder what
            it does not have.
    """
    if model.runtime.encoder is not None:
        return _encoder_config(model, model.runtime.encoder, artifact)
    serving, triton = model.serving, model.serving.triton
    options = serving.model_dump(exclude={"triton", "prefixes"}, exclude_none=True)
    if serving.draft is not None:
        options["speculation"] = serving.draft.method
    given = {"artifact": artifact, "allow": model.allow}
    if model.chat_template is not None:
        given["chat_template"] = TEMPLATE_FILE
    return _render(
        "config.pbtxt.jinja",
        name=model.name,
        inputs=signature.INPUTS,
        outputs=signature.OUTPUTS,
        kind=f"KIND_{triton.kind or model.kind}".upper(),
        instances=triton.instances,
        gpus=_gpus(model),
        versions=triton.versions,
        parameters={key: str(value) for key, value in {**given, **options}.items() if value is not None},
        warmup_tokens=_warmup_tokens(model.runtime),
    )


def _encoder_config(model: TritonModel, encoder: EncoderConfig, artifact: str) -> str:
    """Render config.pbtxt of an embedder or a reranker.

    Raises:
        UsageError: `serving` sets what language models alone have.
    """
    serving, triton = model.serving, model.serving.triton
    if given := serving.of_language_models():
        raise UsageError(f"serving.{given[0]} is for language models; {model.name} is {encoder.title}")
    wait_us = 0 if serving.timeout_s is None else max(1, round(serving.timeout_s * 1e6))
    return _render(
        "encoder.pbtxt.jinja",
        name=model.name,
        title=encoder.title,
        signature=encoder_signature.of(encoder),
        most_rows=encoder_signature.MOST_ROWS,
        max_queue=max(1, EncoderOptions().max_queue if serving.max_queue is None else serving.max_queue),
        wait_us=wait_us,
        kind=f"KIND_{triton.kind or model.kind}".upper(),
        instances=triton.instances,
        versions=triton.versions,
        parameters={"artifact": artifact} | ({} if model.allow is None else {"allow": model.allow}),
        warmup={spec.name: spec for spec in encoder_signature.of(encoder).inputs if spec.data_type == "TYPE_STRING"},
    )


def _gpus(model: TritonModel) -> Sequence[int]:
    """Name the GPUs that instances are made on; one of several ranks has those after its own, too."""
    gpus, ranks = model.serving.triton.gpus, model.runtime.ranks
    if model.runtime.device is None or ranks == 1:
        return gpus
    if any(after - before < ranks for before, after in itertools.pairwise(sorted(gpus))):
        raise UsageError(
            f"serving.triton.gpus is {list(gpus)}: an instance has {ranks} ranks, on the GPU named and those after it",
            hint=f"name GPUs that are {ranks} apart: [0, {ranks}]",
        )
    return gpus or (0,)


def requirements(runtime: RuntimeConfig) -> str:
    """List what the serving environment needs, as pip reads it."""
    provider = PROVIDERS[runtime.provider]
    version = runtime.requires.get(provider.package, "")
    engine = [requirement.format(version=version) for requirement in provider.requirements]
    if runtime.ranks > 1 and runtime.device is not None:
        engine.append(NCCL)
    if runtime.plugin is not None:  # beside the copy of llmforge, so without its own requirement of it
        engine.append(f"{runtime.plugin.package}=={runtime.plugin.version}  # with pip install --no-deps")
    lines = [f"{name}>={oldest}" for name, oldest in checks.NEEDED.items() if oldest is not None] + engine
    constraints = ["# For answers of a given form: JSON schemas, regular expressions, grammars.", *checks.OPTIONAL]
    return "\n".join(["# A Triton older than 24.11 needs numpy<2 as well.", *lines, *constraints]) + "\n"


def of_artifact(
    artifact: Artifact,
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    allow: str | None = None,
    chat_template: str | None = None,
) -> TritonModel:
    """Describe the model of a published artifact, under its own name or `name`; `overrides` change `serving`.

    `chat_template` is the source of one that stands in place of the artifact's.

    Raises:
        InputError: the artifact carries no model repository.
        EnvironmentLacks: its engine is not built yet.
        UsageError: an override names nothing that could be set, or a value that is not allowed; or an encoder gets a
            chat template.
        UnsupportedError: it classifies texts.
    """
    manifest = artifact.manifest
    runtime = RuntimeConfig.read(artifact.path / "engine" / FILE)
    if runtime.encoder is not None and runtime.encoder.classifies:
        raise UnsupportedError(
            f"{artifact.path}: it gives {runtime.encoder.labels} logits for a pair; Triton's model scores with one"
        )
    if runtime.encoder is not None and chat_template is not None:
        raise UsageError(f"{artifact.path} is {runtime.encoder.title}, which reads no chats")
    ours = of_provider(runtime.provider).export_format is None
    if ours and not (artifact.path / FOLDER / manifest.name).is_dir():
        raise InputError(
            f"{artifact.path}: the artifact has no {FOLDER}/{manifest.name}", hint="build it again with this llmforge"
        )
    built = ServingSpec.published(manifest.recipe, str(artifact.path))
    serving = built.changed(overrides)
    if serving.prefixes != built.prefixes:
        raise UsageError(
            "prefixes: the artifact was built with its own",
            hint="change `serving.prefixes` in the recipe, and build it again",
        )
    return TritonModel(
        name=name or manifest.name,
        kind=PROVIDERS[runtime.provider].kind or targets.load(manifest.target).kind,
        serving=serving,
        runtime=runtime,
        made_of={"artifact": f"{manifest.name} {manifest.version}", "content": manifest.content_digest},
        allow=allow,
        chat_template=chat_template,
    )


def export(artifact: Artifact, model: TritonModel, repository: Path, *, version: int = 1, copy: bool = False) -> Path:
    """Write `model` into `repository`, standing alone, as version `version`; return the model's folder.

    The runtime is the artifact's own copy, not that of the llmforge which exports. Engine and tokenizer are hard links
    where the file system allows them, unless `copy`. A server that watches the repository sees a version all at once.

    Raises:
        UsageError: the model has that version already.
        EnvironmentLacks: the repository cannot be written.
    """
    with published(repository, model.name, version) as partial:
        _write(_shared(model, ALONE), partial)
        own = partial / str(version)
        shutil.copytree(artifact.path / FOLDER / artifact.manifest.name / "1", own)
        for name in CARRIED:
            shutil.copytree(artifact.path / name, own / name, copy_function=shutil.copy2 if copy else link)
        if model.chat_template is not None:
            (own / TEMPLATE_FILE).write_text(model.chat_template, encoding="utf-8")
        for path in (MANIFEST, *(record.path for record in artifact.evidence)):  # what it is held to when it loads
            (own / path).parent.mkdir(exist_ok=True)
            shutil.copy2(artifact.path / path, own / path)
    return repository / model.name


def newest(repository: Path, name: str) -> int:
    """Give the highest version of a model in a repository; 0: there is none."""
    folder = repository / name
    found = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return max((int(each) for each in found if each.isdecimal()), default=0)


def is_of(version: Path, artifact: Artifact) -> bool:
    """Say whether a version of a model was exported from an artifact."""
    manifest = version / MANIFEST
    return manifest.is_file() and manifest.read_bytes() == (artifact.path / MANIFEST).read_bytes()


@contextmanager
def published(repository: Path, name: str, version: int) -> Iterator[Path]:
    """Give a folder that does not exist yet, to write a model with one version in; it gets its name afterwards.

    Raises:
        UsageError: the model has that version already.
        EnvironmentLacks: the repository cannot be written.
    """
    final = repository / name
    partial = repository / f"{PARTIAL}{secrets.token_hex(4)}"
    try:
        if (final / str(version)).exists():
            raise UsageError(
                f"{final / str(version)} already exists; published versions never change",
                hint="use another --model-version or --name",
            )
        repository.mkdir(parents=True, exist_ok=True)
        yield partial
        _move(partial, final, version)
    except OSError as error:
        raise EnvironmentLacks(
            f"{repository}: cannot be written: {error}", hint="choose a folder that can be written"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, final: Path, version: int) -> None:
    """Give a finished model its name; where the model exists, its new version, then what all versions share."""
    if not final.exists():
        partial.rename(final)
        return
    (partial / str(version)).rename(final / str(version))
    shutil.rmtree(final / WARMUP, ignore_errors=True)
    for name in (WARMUP, README, CONFIG):
        if (partial / name).exists():
            (partial / name).rename(final / name)


def link(source: str, target: str) -> str:
    """Make `target` another name of the file `source`, where the file system can, else a copy."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
    return target


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files, by their paths in `folder`."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def _shared(model: TritonModel, artifact: str) -> dict[str, bytes]:
    """Make what all versions of a model share; `artifact` leads from a version to engine/ and tokenizer/."""
    encoder = model.runtime.encoder
    readme = _render(
        "README.md.jinja" if encoder is None else "encoder.md.jinja",
        name=model.name,
        made_of=model.made_of,
        python=".".join(map(str, checks.PYTHON)),
        runtime=model.runtime,
        requirements=requirements(model.runtime),
        inputs=signature.INPUTS,
        signature=None if encoder is None else encoder_signature.of(encoder),
    )
    return {CONFIG: config(model, artifact).encode(), README: readme.encode(), **_warmup(model.runtime)}


def _warmup(runtime: RuntimeConfig) -> dict[str, bytes]:
    """Make the request that runs before the model is ready."""
    if runtime.encoder is not None:
        texts = [spec for spec in encoder_signature.of(runtime.encoder).inputs if spec.data_type == "TYPE_STRING"]
        return {f"{WARMUP}/{spec.name}": struct.pack("<I", len(WARMUP_TEXT)) + WARMUP_TEXT for spec in texts}
    ids = np.arange(_warmup_tokens(runtime), dtype="<i8") % runtime.vocabulary
    sampling = json.dumps({"max_tokens": 2, "ignore_eos": True}).encode()
    return {
        f"{WARMUP}/prompt": ids.tobytes(),
        f"{WARMUP}/sampling_parameters": struct.pack("<I", len(sampling)) + sampling,
    }


def _warmup_tokens(runtime: RuntimeConfig) -> int:
    return min(WARMUP_TOKENS, runtime.max_context - 2) or 1


def _render(template: str, **values: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("llmforge.triton", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = json.dumps
    return environment.get_template(template).render(**values)
