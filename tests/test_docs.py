"""The documentation: its links lead somewhere, its pages are in the site, its commands parse and are run by tests."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from llmforge.cli import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EVERY = [ROOT / "README.md", *PAGES]
FENCE = re.compile(r"^( *)(`{3,})(\w*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)

# A block that no test can run says so in front of it: <!-- needs a GPU -->, <!-- illustrative -->.
MARK = re.compile(r"<!-- (needs a GPU|illustrative) -->\s*$")

# Pages whose commands a test runs unchanged.
AS_SHOWN = {
    "docs/tutorial.md": "tests/test_tutorial.py",
    "docs/planning.md": "tests/cli/test_planning.py",
}
# Options that no test gives to the command: the test that runs what they set.
BELOW = {
    "tune --subject-to": "tests/farm/test_searching.py",
}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Return the text of a page without blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "code", FENCE.sub("", page.read_text(encoding="utf-8")))


# Links


@cache
def anchors(page: Path) -> list[str]:
    """List the anchors of a page, as GitHub and the site make them of headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = []
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        kept = re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", plain)).strip().lower()
        found.append(kept.replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


@pytest.mark.parametrize("page", EVERY, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    wrong = []
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
        elif page != ROOT / "README.md" and DOCS not in target.parents:
            wrong.append(f"{link}: outside of the site")
    assert wrong == []


@pytest.mark.parametrize("page", EVERY, ids=name)
def test_headings_have_anchors_of_their_own(page: Path) -> None:
    assert len(set(anchors(page))) == len(anchors(page))


def test_the_pages_of_the_site_are_those_that_exist() -> None:
    shown = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.MULTILINE)
    assert sorted(shown) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_pages_load_nothing_from_other_hosts() -> None:
    for page in EVERY:
        assert re.findall(r"!\[[^\]]*\]\((https?:[^)]*)\)|<(?:script|link|iframe|img)\b", prose(page)) == [], page


def test_files_named_in_code_exist() -> None:
    """Paths in spans of code, as `benchmarks/quality.py` or `tests/data`, that begin at the top of the repository."""
    missing = []
    for page in EVERY:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for path in re.findall(r"`((?:docs|benchmarks|recipes|tests|passes|targets|llmforge)/[\w./-]+)`", text):
            if not (ROOT / path).exists() and "NAME" not in path:
                missing.append(f"{name(page)}: {path}")
    assert missing == []


# Commands


class Shown(NamedTuple):
    page: str
    words: tuple[str, ...]  # behind `llmforge`
    marked: bool


def commands(page: Path) -> Iterator[Shown]:
    """Yield the commands of llmforge in the blocks of a page: of shells, and `run:` and `script:` of pipelines."""
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        kind, code = block[3], block[4].replace("\\\n", " ")
        marked = MARK.search(text[: block.start()]) is not None
        for line in code.splitlines():
            if kind == "console":
                typed = line.strip().partition("$ ")[2] if line.strip().startswith("$ ") else ""
            elif kind in ("sh", "bash", ""):
                typed = line.strip()
            elif kind == "yaml":
                typed = match[1] if (match := re.match(r"\s*- (?:run: )?(llmforge .*)", line)) else ""
            else:
                continue
            words = shlex.split(typed.replace("…", ""), comments=True) if "llmforge" in typed else []
            while words and "=" in words[0] and words[0].split("=")[0].isupper():
                words.pop(0)  # a variable of the environment
            if words[:1] == ["llmforge"]:
                end = next((at for at, word in enumerate(words) if word in ("|", ">", ">>", "&&", ";")), len(words))
                yield Shown(name(page), tuple(words[1:end]), marked)


ALL = [shown for page in EVERY for shown in commands(page)]


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that `words` call, and its arguments."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        assert words, "no command"
        called = command.commands.get(words[0])
        assert called is not None, f"no command {words[0]!r}"
        command, words = called, words[1:]
    return command, words


def is_unset(value: object) -> bool:
    return value in (None, ()) or repr(value) == "Sentinel.UNSET"  # as click 8.3 says it


def parse(words: tuple[str, ...]) -> tuple[click.Command, dict[str, object]]:
    """Parse a command line as click does, without running it and without looking for files."""
    command, rest = resolve(list(words))
    # A command keeps its help option for later tests: its names come from the group.
    parent = click.Context(cli, **cli.context_settings)
    context = click.Context(command, info_name=command.name, parent=parent)
    values, extra, _ = command.make_parser(context).parse_args(list(rest))
    assert not extra, f"too many arguments: {extra}"
    for parameter in command.params:
        value = values.get(parameter.name or "")
        given = not is_unset(value)
        assert given or not parameter.required or not is_unset(parameter.default), f"{parameter.name} is missing"
        if not given:
            continue
        for each in value if isinstance(value, list | tuple) else (value,):
            placeholder = isinstance(each, str) and each.isupper()
            if isinstance(parameter.type, click.Choice | click.types.IntParamType | click.types.FloatParamType):
                assert placeholder or parameter.type.convert(each, parameter, context) is not None
    return command, values


@pytest.mark.parametrize("shown", ALL, ids=lambda shown: f"{shown.page}: {' '.join(shown.words)}"[:100])
def test_a_command_is_one_that_llmforge_takes(shown: Shown) -> None:
    parse(shown.words)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("bild x", "no command"),
        ("build x --no-such", "no-such"),
        ("gate", "missing"),
        ("plan x --kv int5", "int5"),
        ("cache list", "no command"),
        ("plan x --batch many", "many"),
        ("plan x y", "too many"),
    ],
)
def test_a_command_that_it_does_not_take_is_noticed(line: str, says: str) -> None:
    with pytest.raises((click.UsageError, AssertionError), match=says):
        parse(tuple(line.split()))


@cache
def sources() -> str:
    """The text of all tests that run commands."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_every_command_shown_is_run_by_a_test() -> None:
    """Each unchanged, or each of its options in some test; else its block says why none can."""
    assert all((ROOT / test).exists() for test in (*AS_SHOWN.values(), *BELOW.values()))
    lacking = set()
    for shown in ALL:
        if shown.page in AS_SHOWN or shown.marked:
            continue
        command, _ = resolve(list(shown.words))
        by_name = {opt: parameter.opts for parameter in command.params for opt in parameter.opts}
        for word in shown.words:
            option = word.partition("=")[0]
            if option.startswith("-") and option in by_name:
                alike = [re.escape(each) for each in by_name[option]]
                if not re.search(rf"[\"' ](?:{'|'.join(alike)})[\"' =]", sources()):
                    lacking.add(f"{command.name} {option}")
        if not re.search(rf"[\"' ]{command.name}[\"' ]", sources()):
            lacking.add(str(command.name))
    assert lacking == set(BELOW)
