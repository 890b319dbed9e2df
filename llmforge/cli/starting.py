"""The commands `init` and `up`: from a checkpoint to a recipe, and to a server. They import late what they need."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llmforge.base import extras, process
from llmforge.base.errors import BudgetExceeded, DataError, GateFailed, GateInconclusive, UsageError
from llmforge.base.wording import shown
from llmforge.cli import building, output, serving
from llmforge.cli.hub import REVISION, on_hub
from llmforge.cli.parameters import BACKEND, PATH, TARGET, go_on, options_record, out_option, refuse_given

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from llmforge.checkpoint.encoding import Encoding
    from llmforge.planning.choice import Probed, Tried
    from llmforge.quantization.costs import ModelFormats
    from llmforge.recipe import Recipe

_GOALS = ("latency", "throughput", "size", "quality")
_TEXTS = ("calibration.jsonl", "evaluation.jsonl")
_CHATS = tuple(f"chat-{file}" for file in _TEXTS)  # besides, where there is a chat template
_NOTICE = "NOTICE"
_PLAIN = re.compile(r"[\w./~+-]+")  # needs no quotes in YAML

_INIT = """\b
Examples:
  llmforge init CHECKPOINT
  llmforge init CHECKPOINT --target l4 --goal throughput -o chat-l4.yaml
  llmforge init CHECKPOINT --calibration mine.jsonl --evaluation held-out.jsonl
  llmforge init ORG/NAME --revision v1.0    # a checkpoint of the Hub
  llmforge init CHECKPOINT --like chat-h100-fp8    # one of the recipes that ship with llmforge
"""


@dataclass(frozen=True)
class StartOptions:
    """Options of `init`: what a recipe is for, and which text and name it has."""

    target: str  # "": that of the recipe it is `like`
    goal: Any
    backend: Any = None
    path: Path | None = None  # None: as it is called
    name: str | None = None  # None: that of the checkpoint's folder
    calibration: Path | None = None  # None, and no evaluation: the text that ships with llmforge
    evaluation: Path | None = None
    revision: str | None = None
    like: str | None = None  # a recipe that ships with llmforge
    reranker: str | None = None  # as which a causal model scores pairs
    force: bool = False
    no_probe: bool = False


def _recipe_options(command: Any) -> Any:
    options = (
        click.option(
            "--target", type=TARGET, metavar="NAME|FILE.yaml", default="local",
            help="Target to deploy on, see `llmforge targets`; `local` is the CPU of this machine.",
        ),
        click.option(
            "--goal", type=click.Choice(_GOALS), default="latency",
            help="What to optimize for: time per token, tokens per second over all requests, small files, or quality.",
        ),
        REVISION,
        click.option(
            "--reranker", type=click.Choice(["qwen3"]),
            help="Score pairs with a causal model, by its yes and no: qwen3, with Qwen3-Reranker's prompt.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


class ShippedRecipe(click.ParamType[str]):
    """The name of a recipe that ships with llmforge."""

    name = "recipe"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take the name, with or without its suffix."""
        names, name = self._names(), str(value).removesuffix(".yaml")
        if name not in names:
            self.fail(f"{shown(name)} does not ship with llmforge; recipes that do: {', '.join(names)}", param, ctx)
        return name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer the names."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]

    @staticmethod
    def _names() -> list[str]:
        from llmforge import recipes

        found = sorted(path.stem for path in recipes.FOLDER.glob("*.yaml"))
        return [name for name in found if name not in recipes.OF_ENCODERS]  # whose recipe `init` writes itself


@click.command(epilog=_INIT)
@click.argument("checkpoint", type=PATH)
@_recipe_options
@click.option("--engine", "backend", type=BACKEND, help="Runtime. Defaults to the first of the target.")
@click.option("-o", "--output", "path", type=PATH, metavar="FILE.yaml", help="Recipe to write. Defaults to NAME.yaml.")
@click.option("--name", metavar="NAME", help="Name of the artifacts. Defaults to that of the checkpoint's folder.")
@click.option(
    "--calibration", type=PATH, metavar="FILE.jsonl",
    help="Calibration text, one {text} or {messages} per line. Defaults to text that ships with llmforge.",
)  # fmt: skip
@click.option("--evaluation", type=PATH, metavar="FILE.jsonl", help="Evaluation text; must not overlap --calibration.")
@click.option("--like", type=ShippedRecipe(), metavar="NAME", help="Copy a recipe that ships with llmforge instead.")
@click.option("--force", is_flag=True, help="Replace the recipe if it exists.")
@click.option("--no-probe", is_flag=True, help="Do not measure what formats cost this model, nor try the recipe.")
@click.option("--json", "as_json", is_flag=True, help="Print the path of the recipe as JSON.")
@options_record(StartOptions, "asked")
def init(checkpoint: Path, as_json: bool, asked: StartOptions) -> None:
    """Write a commented recipe for CHECKPOINT that builds.

    Chooses the passes that pay on the target, and a context and a batch that fit its memory. Of small models it
    measures on a few windows of text what formats cost: budgets and gates stand above that. Passes that would find
    nothing to change in the model are left out. The same checkpoint gives the same recipe again. The last line of
    standard output is the path of the recipe.
    """
    from llmforge.cli import console

    if asked.like is not None:
        refuse_given("--like", "goal", "backend", "no_probe")
        given = click.get_current_context().get_parameter_source("target") is ParameterSource.COMMANDLINE
        asked = asked if given else replace(asked, target="")
    path = write(checkpoint, asked)
    if as_json:
        output.write_json({"recipe": str(path)})
    else:
        output.write_lines(str(path))
    quoted = shlex.quote(str(path))
    console.say(f"next: llmforge plan {quoted}\n      llmforge build {quoted}")


_MIGRATE = """\b
Examples:
  llmforge migrate RECIPE | diff RECIPE -
  llmforge migrate RECIPE --write
"""


@click.command(epilog=_MIGRATE)
@click.argument("recipe", type=PATH)
@click.option("--write", "in_place", is_flag=True, help="Replace RECIPE instead of printing.")
def migrate(recipe: Path, in_place: bool) -> None:
    """Update a RECIPE of an earlier llmforge to today's names.

    Comments and layout stay. Artifacts are not migrated: build them again.
    """
    from llmforge.artifact.sealed import MANIFEST
    from llmforge.base import located_yaml
    from llmforge.cli import console
    from llmforge.recipe import migration

    if recipe.name == MANIFEST or (recipe / MANIFEST).exists():
        raise UsageError(
            f"{recipe}: only recipes are migrated; artifacts of schema 1 have no raw measurements to judge again",
            hint="build the artifact again",
        )
    source = located_yaml.read(recipe)
    _ = source.mapping  # it is one
    notes = migration.migrate(source)
    text = recipe.read_text(encoding="utf-8")
    rewritten = migration.rewrite(text)
    if notes and rewritten == text:
        raise UsageError(f"{recipe}: cannot be rewritten in this layout", hint=notes[0])
    for note in notes:
        console.say(f"note: {note}")
    if not in_place:
        output.write_script(rewritten)
        return
    if rewritten != text:
        with output.writing(recipe):
            recipe.write_text(rewritten, encoding="utf-8")
    output.write_lines(str(recipe))


_UP = """\b
Examples:
  llmforge up CHECKPOINT
  llmforge up CHECKPOINT --goal quality --port 9000
"""


@click.command(epilog=_UP)
@click.argument("checkpoint", type=PATH)
@_recipe_options
@out_option("Publish the artifact to DIR/NAME/VERSION.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT", default=8000, help="Port; 0 picks a free one.")
@click.pass_context
def up(
    context: click.Context,
    checkpoint: Path,
    target: str,
    goal: Any,
    revision: str | None,
    reranker: str | None,
    out: Path,
    host: str,
    port: int,
) -> None:
    """Write a recipe for CHECKPOINT, build it, and serve the artifact.

    `init`, `plan`, `build` and `serve` in one go. A recipe that `init` has written before is used unchanged. Does
    not serve an artifact whose gates failed or are undecided; of an embedder or a reranker it then writes its recipe
    again, in fp32.
    """
    extras.require("build", "serve")
    process.prepare()  # before the plan imports torch
    from llmforge.artifact import versions
    from llmforge.cli import console, planning
    from llmforge.recipe import Recipe

    path = Path(f"{name_of(checkpoint)}.yaml")
    asked = StartOptions(target, goal, path=path, revision=revision, reranker=reranker)
    written = not path.exists()
    if written:
        path = write(checkpoint, asked)
        console.say(f"wrote {path}")
    else:
        console.say(f"using the existing recipe {path}")
    encodes = _encodes(Recipe.load(path))
    _run(context, planning.plan, str(path))
    go_on()
    try:
        _run(context, building.build, str(path), "--out", str(out))
    except (GateFailed, GateInconclusive, BudgetExceeded) as error:
        if not (encodes and written and _written_in_fp32(checkpoint, asked)):
            raise
        console.say(f"{error.message}\nnot served; wrote {path} again, in fp32, and build it")
        _run(context, building.build, str(path), "--out", str(out))
    [newest, *_] = versions.listed(out, Recipe.load(path).name)  # which may have been changed
    _run(context, serving.serve, str(newest.path), "--host", host, "--port", str(port))


def _written_in_fp32(checkpoint: Path, asked: StartOptions) -> bool:
    """Write the recipe of an embedder or a reranker again, for quality; say whether it is another one then."""
    assert asked.path is not None
    before = asked.path.read_bytes()
    write(checkpoint, replace(asked, goal="quality", force=True))
    return asked.path.read_bytes() != before


def _encodes(recipe: Recipe) -> bool:
    """Say if it is of an embedder or a reranker."""
    from llmforge.checkpoint import folder_of, read_settings
    from llmforge.checkpoint.encoding import encoding_of

    folder = folder_of(recipe.checkpoint)
    return encoding_of(folder, read_settings(folder), recipe.reranker) is not None


def _run(context: click.Context, command: click.Command, *words: str) -> None:
    """Run another command as if these words had been typed."""
    with command.make_context(str(command.name), list(words), parent=context.parent) as made:
        command.invoke(made)


def name_of(checkpoint: Path) -> str:
    """Name artifacts by the folder of a checkpoint: what of it may stand in a name."""
    name = re.sub(r"[^a-z0-9._-]+", "-", checkpoint.absolute().name.lower()).strip("-._")[:64]
    return name or "model"


def write(checkpoint: Path, asked: StartOptions) -> Path:
    """Write a recipe, and beside it the text that ships with llmforge where no other is given; return its path.

    Raises:
        UsageError: the recipe is there, or other text where that which ships would be.
        DataError: a text that is given cannot be used; the message names file and line.
        UnsupportedError, CheckpointError: there is nothing to write.
    """
    from llmforge import recipes
    from llmforge.artifact.sealed import is_name
    from llmforge.checkpoint import find_chat_template, folder_of, read_settings
    from llmforge.checkpoint.encoding import encoding_of
    from llmforge.recipe import Recipe

    if asked.name is not None and not is_name(asked.name):
        raise UsageError(f"--name {asked.name!r}: a name has a–z, 0–9, '.', '_' and '-'")
    name = asked.name or name_of(checkpoint)
    path = asked.path or Path(f"{name}.yaml")
    output.check_file(path, ".yaml", ".yml")
    if path.exists() and not asked.force:
        raise UsageError(f"{path} already exists", hint="use --force to replace it, or -o for another name")
    if (asked.calibration is None) != (asked.evaluation is None):
        raise UsageError("--calibration and --evaluation require each other", hint="they must not overlap")
    snapshot = on_hub(checkpoint, asked.revision)
    given = {"checkpoint": _beside(checkpoint, path)}
    if snapshot is not None:
        checkpoint, pinned = snapshot.folder, "" if asked.revision is None else f"\nrevision: '{asked.revision}'"
        given["checkpoint"] = f"{snapshot.repository}{pinned}"
    if asked.target:
        given["target"] = _target(asked.target, path)
    settings = read_settings(checkpoint.absolute())  # refused before anything is written
    if asked.reranker is not None:
        given["checkpoint"] += f"\nreranker: {asked.reranker}"
    if (encoding := encoding_of(checkpoint.absolute(), settings, asked.reranker)) is not None:
        return _write_encoder(encoding, settings, asked, path, {"name": name, **given})
    has_template = find_chat_template(folder_of(checkpoint.absolute())) is not None
    chats = _CHATS if has_template and asked.like is None else ()
    given |= _texts(asked, path, chats, has_template=has_template)
    if asked.like is not None:
        shipped = (recipes.FOLDER / f"{asked.like}.yaml").read_text(encoding="utf-8")
        text = _adapted(shipped.replace(f"recipes/{asked.like}.yaml", path.name), {"name": name, **given})
    else:
        text = _chosen(checkpoint, asked, path, {"name": name, **given})
    with output.writing(path):
        if asked.calibration is None:
            _copy_texts(recipes.TEXT, path.parent / "text", chats)
        path.write_text(text, encoding="utf-8")
    Recipe.load(path)
    return path


def _write_encoder(
    encoding: Encoding, settings: Mapping[str, Any], asked: StartOptions, path: Path, given: Mapping[str, str]
) -> Path:
    """Write the recipe of an embedder or a reranker, which needs no texts; return its path."""
    from llmforge import targets
    from llmforge.planning import encoders
    from llmforge.recipe import Recipe

    if asked.like is not None or asked.calibration is not None or asked.backend not in (None, "onnxruntime"):
        raise UsageError(
            f"{given['name']} is {encoding.title}: --like, "
            "--calibration, --evaluation and other engines are for language models"
        )
    text = encoders.write(encoding, settings, targets.find(asked.target), given, asked.goal)
    with output.writing(path):
        path.write_text(text, encoding="utf-8")
    Recipe.load(path)
    return path


def _texts(asked: StartOptions, path: Path, chats: Sequence[str], *, has_template: bool) -> dict[str, str]:
    """Name the two texts as a recipe at `path` has them; of those that ship, `chats` come first.

    Raises:
        DataError: text that is given cannot be read, is in both, or has chats where no template writes them.
    """
    if asked.calibration is not None and asked.evaluation is not None:
        _check_texts(asked.calibration, asked.evaluation, has_template=has_template)
        return {"calibration": _beside(asked.calibration, path), "evaluation": _beside(asked.evaluation, path)}
    found = {}
    for number, file in enumerate(_TEXTS):
        files = [_beside(path.parent / "text" / each, path) for each in (*chats[number : number + 1], file)]
        found[Path(file).stem] = files[0] if len(files) == 1 else f"[{', '.join(files)}]"
    return {**found, "documents": _beside(path.parent / "text" / _TEXTS[0], path)}


def _check_texts(calibration: Path, evaluation: Path, *, has_template: bool) -> None:
    """Refuse text that a build would refuse."""
    from llmforge.checkpoint import documents, text

    seen, measured = documents.read_documents(calibration), documents.read_documents(evaluation)
    documents.refuse_overlap(seen, measured)
    first = next((each for each in (*seen, *measured) if each.is_chat), None)
    if first is not None and not has_template:
        raise DataError(f"{first.where}: a chat, and the checkpoint has no chat template", hint=text.NO_TEMPLATE)


def _target(target: str, path: Path) -> str:
    """Name a target as a recipe at `path` has it.

    Raises:
        UsageError: there is no such target.
    """
    from llmforge import targets

    targets.find(target)
    return _beside(Path(target), path) if targets.is_file(target) else target.lower()


def _chosen(checkpoint: Path, asked: StartOptions, path: Path, given: Mapping[str, str]) -> str:
    """Choose passes and write them as a recipe that will stand at `path`: without those that come to nothing there.

    A CPU has the figures of its kind, so that the recipe stays the same.

    Raises:
        UnsupportedError: no recipe builds for the checkpoint.
    """
    from llmforge import targets
    from llmforge.measure import gpus, machine
    from llmforge.planning import choice, starting, typical
    from llmforge.recipe import Recipe

    found = targets.find(asked.target)
    here = [] if found.kind == "cpu" else gpus.find()
    if found.kind == "cpu" and found.isa is targets.detect():
        found = typical.of_cpu(found, machine.describe())
    write = partial(
        starting.write,
        checkpoint,
        found,
        asked.goal,
        name=given["name"],
        given=given,
        backend=asked.backend,
        has_device=any(gpu.target == found.name for gpu in here),
        sample_text=asked.calibration is None,
        probe=None if asked.no_probe else once(partial(_probed, checkpoint, asked.calibration)),
    )
    made, tried = write().yaml, choice.UNTRIED
    while not asked.no_probe:
        before = tried
        tried |= _tried(Recipe.parse(made, path))
        if tried == before:
            break
        made = write(tried=tried).yaml
    return made


def _tried(recipe: Recipe) -> Tried:
    """Find what a recipe cannot do with its checkpoint, and tell where nobody can know."""
    from llmforge.base.errors import CheckpointError, EnvironmentLacks
    from llmforge.cache import Cache, default_folder, default_size
    from llmforge.cli import console
    from llmforge.planning import choice

    if extras.missing("build"):
        return choice.UNTRIED
    from llmforge.compile import trial

    with console.progress() as progress, Cache(default_folder(), default_size()) as cache:
        try:
            return trial.run(recipe, cache=cache, progress=progress)
        except (CheckpointError, EnvironmentLacks) as error:
            console.say(f"note: the recipe was not tried: {error.message.splitlines()[0]}")
            return choice.UNTRIED


def _probed(checkpoint: Path, own: Path | None, formats: Sequence[ModelFormats]) -> Probed:
    """Measure what formats cost a checkpoint, on its `own` calibration text or ours, and tell of it."""
    from llmforge import recipes
    from llmforge.cache import Cache, default_folder, default_size
    from llmforge.cli import console
    from llmforge.compile import probing

    with console.progress() as progress, Cache(default_folder(), default_size()) as cache:
        text = recipes.TEXT / _TEXTS[0] if own is None else own
        found = probing.probe(checkpoint, text, formats, cache=cache, progress=progress)
        found = replace(found, drafts=probing.drafts(checkpoint, text))
    if found.costs is None:
        console.say(f"note: what formats cost this model was not measured: {found.why}")
    return found


def _adapted(recipe: str, given: Mapping[str, str]) -> str:
    """Put what is `given` in the place of what a recipe that ships has: name, checkpoint, target and texts."""
    from llmforge import recipes

    for key in {"name", "checkpoint", "target"} & given.keys():
        written = f"{key}: {given[key]}".replace("\\", r"\\")
        recipe = re.sub(rf"^{key}: .*$", written, recipe, count=1, flags=re.MULTILINE)
    for key in {"calibration", "evaluation"} & given.keys():
        recipe = recipe.replace(f"text/{key}.jsonl", given[key])
    return recipe.replace(" ../", f" {recipes.FOLDER.parent}/").replace("[../", f"[{recipes.FOLDER.parent}/")


def _copy_texts(shipped: Path, folder: Path, chats: Sequence[str]) -> None:
    """Copy the text that ships with llmforge; what is there already must be the same."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*chats, *_TEXTS, _NOTICE):
        content, file = (shipped / name).read_bytes(), folder / name
        if not file.exists():
            file.write_bytes(content)
        elif file.read_bytes() != content:
            raise UsageError(
                f"{file} exists, and differs from the text that ships with llmforge",
                hint="run the command in another folder, or give your own text to `llmforge init`: --calibration and "
                "--evaluation",
            )


def _beside(file: Path, recipe: Path) -> str:
    """Write a path as a recipe has it: relative to itself, quoted where YAML needs it."""
    relative = os.path.relpath(file.absolute(), recipe.absolute().parent)
    text = relative if relative.count("..") <= 3 else str(file.absolute())
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "''") + "'"
