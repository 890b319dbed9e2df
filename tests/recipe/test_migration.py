"""Recipes of earlier versions: tests/recipe/old has them as they were written."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmforge import passes
from llmforge.artifact import sealed
from llmforge.base.errors import InputError, RecipeError
from llmforge.cli import cli
from llmforge.recipe import Recipe, migration

OLD = Path(__file__).parent / "old"


def test_an_old_recipe_is_read_by_todays_names() -> None:
    recipe = Recipe.load(OLD / "sparse.yaml", ["passes.sparsify-weights.budget.kld_mean=0.5"])
    assert [step.name for step in recipe.instantiate(passes.ALL)] == ["pack-qkv", "sparsify-weights"]
    assert recipe.passes[1].options == {"budget": {"kld_mean": 0.5}}
    assert recipe.migrated == (f"{OLD / 'sparse.yaml'}:10:5: the pass sparsify is called sparsify-weights now",)


def test_what_is_wrong_in_an_old_recipe_has_its_place(tmp_path: Path) -> None:
    text = (OLD / "sparse.yaml").read_text().replace("../../data", str(OLD.parents[1] / "data"))
    (tmp_path / "old.yaml").write_text(text.replace("kld_mean: 1.0", "kld_mean: -1"))
    with pytest.raises(RecipeError, match=r"old\.yaml:10:\d\d: passes\.sparsify-weights\.budget\.kld_mean"):
        Recipe.load(tmp_path / "old.yaml").instantiate(passes.ALL)


def test_a_recipe_is_rewritten_with_its_comments(tmp_path: Path) -> None:
    text = (OLD / "sparse.yaml").read_text()
    file = tmp_path / "sparse.yaml"
    file.write_text(text)
    printed = CliRunner().invoke(cli, ["migrate", str(file)])
    assert printed.stdout == text.replace("- sparsify:", "- sparsify-weights:")
    assert "is called sparsify-weights now" in printed.stderr
    assert file.read_text() == text
    assert CliRunner().invoke(cli, ["migrate", str(file), "--write"]).stdout == f"{file}\n"
    assert file.read_text() == printed.stdout
    again = CliRunner().invoke(cli, ["migrate", str(file)])
    assert (again.stdout, again.stderr) == (printed.stdout, "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- sparsify\n", "- sparsify-weights\n"),
        ("- {sparsify: {}}\n", "- {sparsify-weights: {}}\n"),
        ("passes: [fuse-norms, sparsify]\n", "passes: [fuse-norms, sparsify-weights]\n"),
        ("name: sparsify\n", "name: sparsify\n"),
        ("- sparsify-weights\n", "- sparsify-weights\n"),
        ("passes: [sparsify-weights]\n", "passes: [sparsify-weights]\n"),
    ],
)
def test_entries_alone_are_renamed(old: str, new: str) -> None:
    assert migration.rewrite(old) == new


def test_a_newer_schema_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text("schema: 2\nname: new\nwhatever: 1\n")
    for words in (["build", str(file)], ["migrate", str(file)]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 2
        assert f"{file}:1:1: schema 2 is newer than this llmforge, which reads schema 1" in done.stderr
        assert "hint: update llmforge" in done.stderr


@pytest.mark.parametrize("given", ["", "manifest.json"])
def test_artifacts_are_not_migrated(tmp_path: Path, given: str) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": 1}')
    done = CliRunner().invoke(cli, ["migrate", str(tmp_path / given)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "only recipes are migrated" in done.stderr
    assert "hint: build the artifact again" in done.stderr


def test_every_new_name_is_a_pass() -> None:
    names = {each.name for each in passes.ALL}
    assert set(migration.PASSES.values()) <= names
    assert not set(migration.PASSES) & names


def test_a_newer_artifact_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="schema 3 is newer than this llmforge, which reads schema 2") as caught:
        sealed.parse_manifest(b'{"schema": 3}', "manifest.json")
    assert "update llmforge" in str(caught.value.hint)
    with pytest.raises(InputError, match="schema 1 is not supported") as caught:
        sealed.parse_manifest(b'{"schema": 1}', "manifest.json")
    assert "artifacts are not migrated: build it again" in str(caught.value.hint)
