"""The chat template of a recipe: it stands in the checkpoint's place in all that is built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmforge.artifact import Artifact
from llmforge.base.errors import CheckpointError
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.compile import chat_template
from llmforge.recipe import Recipe
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.protocol.tool_format import ToolFormat

from ..models.tool_templates import HERMES, SILENT

Write = Callable[..., Path]


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_checkpoint: Path) -> Write:
    def write(**sections: Any) -> Path:
        recipe = {
            "schema": 1, "name": "tiny", "checkpoint": str(tiny_checkpoint), "target": "local",
            "engine": {"max_context": 128, "max_batch": 2, "threads": 1}, "passes": [], **sections,
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(recipe))
        return path

    (tmp_path / "silent.jinja").write_text(SILENT)
    (tmp_path / "hermes.jinja").write_text(HERMES)
    return write


def chosen(recipe: Path) -> tuple[str | None, list[str]]:
    loaded = Recipe.load(recipe)
    checkpoint = Checkpoint.located(loaded.checkpoint)
    notes = chat_template.choose(loaded, checkpoint)
    return checkpoint.chat_template, notes


def test_a_template_takes_the_checkpoints_place(recipe_file: Write) -> None:
    assert chosen(recipe_file(chat_template="silent.jinja")) == (
        SILENT, ["chat template: silent.jinja, in place of the checkpoint's"],
    )  # fmt: skip


def test_a_tool_prompt_is_added_where_none_is_known(recipe_file: Write, tiny_checkpoint: Path) -> None:
    (tiny_checkpoint / "chat_template.jinja").write_text(SILENT)
    made, notes = chosen(recipe_file(tool_prompt="default"))
    assert made is not None
    found = ToolFormat.find(ChatTemplate(made, {}, "made"))
    assert (found is not None and found.shows_tools, notes) == (True, ["tool prompt: added to the chat template"])
    made, notes = chosen(recipe_file(tool_prompt="default", chat_template="hermes.jinja"))
    assert (made, notes[1:]) == (HERMES, ["tool prompt: the chat template describes tools by itself"])


def test_a_tool_prompt_needs_a_template(recipe_file: Write) -> None:
    with pytest.raises(CheckpointError, match=r"has no chat template, and .*recipe\.yaml:1:.* asks for") as raised:
        chosen(recipe_file(tool_prompt="default"))
    assert raised.value.hint == "give one: `chat_template: FILE`"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "mine.jinja: cannot be read: No such file"),
        ("\n{% if %}", "mine.jinja:2: the chat template has an error"),
    ],
)
def test_a_template_is_read_before_anything_is_built(recipe_file: Write, source: str | None, message: str) -> None:
    recipe = recipe_file(chat_template="mine.jinja")
    if source is not None:
        (recipe.parent / "mine.jinja").write_text(source)
    done = CliRunner().invoke(cli, ["build", str(recipe), "--out", str(recipe.parent / "out"), "--no-cache"])
    assert (done.exit_code, message in done.stderr, "hint: " in done.stderr) == (5, True, True), done.stderr
    assert "Trace" not in done.stderr


def test_it_is_part_of_what_the_version_names(recipe_file: Write, tmp_path: Path) -> None:
    plain = Recipe.load(recipe_file()).resolved()
    assert not {"chat_template", "tool_prompt"} & plain.keys()  # versions of older recipes stay
    told = Recipe.load(recipe_file(chat_template="silent.jinja", tool_prompt="default")).resolved()
    assert (told["chat_template"]["name"], told["tool_prompt"]) == ("silent.jinja", "default")
    shutil.copy(tmp_path / "hermes.jinja", tmp_path / "silent.jinja")
    assert Recipe.load(tmp_path / "recipe.yaml").resolved()["chat_template"] != told["chat_template"]


@pytest.mark.slow
def test_an_artifact_has_it(recipe_file: Write, tmp_path: Path) -> None:
    recipe = recipe_file(chat_template="silent.jinja", tool_prompt="default")
    done = CliRunner().invoke(cli, ["build", str(recipe), "--out", str(tmp_path / "out"), "--quiet"])
    assert done.exit_code == 0, done.stderr
    opened = Artifact.open(Path(done.stdout.splitlines()[-1]))
    written = (opened.path / "tokenizer" / "chat_template.jinja").read_text()
    assert written.endswith(SILENT)
    assert "<tool_call>" in written
    assert opened.manifest.recipe["tool_prompt"] == "default"
