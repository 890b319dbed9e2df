"""What is in the words of a stranger's artifact: no command lets a terminal, a page or a pipeline obey it."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx_ir as ir
import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from llmforge.base import wording
from llmforge.cli import cli, output
from llmforge.gates.records import Report
from llmforge.report import render

from ..samples.stored import put

LONGEST = 5000
READ = ("verify", "inspect", "diff", "history", "gate", "ls")  # commands that show such an artifact
FORGED = "verified: everything"
ESCAPES = (
    "\x1b[31m\x1b]0;owned\x07\x1b]8;;http://evil\x07\x1b]52;c;ZXZpbA==\x07\x9b2J\x9d0;c1\x9c\x85\u2028\x7f\x00\r\x08"
)
TRICKS = f"\u202egate\u2066\u200f\n{FORGED}\n"
MARKUP = (
    "</td><script>alert(1)</script><img src=x onerror=alert(1)> | **b** ![x](http://evil) [y](javascript:1) @team ]]>"
)
HOSTILE = f"{ESCAPES}{TRICKS}{MARKUP}{'long ' * 2000}"


def paths(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List the places of all texts in a JSON value; of many alike, the first two."""
    if isinstance(value, str):
        yield place
    elif isinstance(value, dict | list):
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:2]
        for key, each in items:
            yield from paths(each, (*place, key))


def put_in(record: Any, place: tuple[Any, ...], text: str) -> None:
    for key in place[:-1]:
        record = record[key]
    record[place[-1]] = text


def graph(number: int) -> bytes:
    """Make an ONNX graph whose names are as bad."""
    value = ir.Value(name="x", shape=ir.Shape((1,)), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Relu" if number else "Neg", [value], name=f"{ESCAPES}{TRICKS}{number}", num_outputs=1)
    made = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 23}, name=ESCAPES)
    return ir.serde.serialize_model(ir.Model(made, ir_version=10)).SerializeToString()


def rename(value: Any, old: str, new: str) -> None:
    """Call a document otherwise, wherever it is named."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if each == old:
            value[key] = new
        elif isinstance(each, dict | list):
            rename(each, old, new)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    """Two versions, each with every text replaced that the form of a record leaves free, and where those stand."""
    out = tmp_path_factory.mktemp("out")
    free: list[tuple[Any, ...]] = []
    for days in (0, 1):
        made = put(out, days=days, files={"engine/model.onnx": graph(days)})
        (file,) = (made.path / "evidence").glob("*.json")
        record = json.loads(file.read_text())
        record["notes"] = ["a note", *["more"] * 200]
        free = []
        for place in paths(record):
            tried = json.loads(json.dumps(record))
            put_in(tried, place, HOSTILE)
            try:
                Report.model_validate_json(json.dumps(tried))
            except ValidationError:
                continue
            free.append(place)
        # What verdicts are made again from, and what is held against the manifest, must stay.
        held = ("gates", "files", "recipe", "content", "previous", "name", "quality", "latency", "created", "engine")
        free = [place for place in free if place[0] not in held and place != ("checkpoint", "digest")]
        for place in free:
            put_in(record, place, HOSTILE)
        rename(record["quality"], "guide-0", ESCAPES + TRICKS + MARKUP)
        raw = json.dumps(record, indent=1).encode()
        (made.path / "evidence").chmod(0o755)
        file.unlink()
        (made.path / "evidence" / f"{hashlib.sha256(raw).hexdigest()}.json").write_bytes(raw)
    return out, free


def check(text: str) -> None:
    """Return if a terminal shows `text` as it is."""
    for character in text:
        category = unicodedata.category(character)
        assert character in "\n\t" or category not in ("Cc", "Cs", "Zl", "Zp"), f"{character!a} in {text[:200]!a}"
        assert unicodedata.bidirectional(character) not in (
            "RLO",
            "LRO",
            "RLE",
            "LRE",
            "PDF",
            "RLI",
            "LRI",
            "FSI",
            "PDI",
        )
    lines = text.split("\n")
    assert FORGED not in [line.strip() for line in lines]
    assert max(map(len, lines)) <= LONGEST


def test_most_texts_of_a_record_are_free(hostile: tuple[Path, list[tuple[Any, ...]]]) -> None:
    _, free = hostile
    kinds = {".".join(str(key) for key in place if not isinstance(key, int)) for place in free}
    assert {"notes", "machine.cpu", "passes.name", "checkpoint.architecture", "target.title"} <= kinds, kinds


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "A"], ["inspect", "A"], ["inspect", "A", "--verify"], ["inspect", "A", "--json"],
        ["diff", "A", "B"], ["diff", "A", "B", "--json"], ["history", "tiny"], ["history", "tiny", "--json"],
        ["gate", "B"], ["gate", "B", "--against", "A"], ["gate", "B", "--against", "A", "--json"],
        ["ls"], ["ls", "--json"], ["run", "A", "hello"], ["bench", "A"], ["triton", "A", "-o", "MODELS"],
        ["tag", "A", "prod"], ["promote", "A", "prod", "--gates-passed"], ["gc", "--dry-run", "--keep", "1"],
        ["export", "A", "-o", "ARCHIVE"], ["sign", "A", "--key", "A"], ["bisect", "A", "--checkpoint", "MODELS"],
        ["reproduce", "A", "--checkpoint", "MODELS"],
    ],
    ids=lambda words: " ".join(words),
)  # fmt: skip
def test_no_command_lets_a_terminal_obey(
    words: list[str], hostile: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = hostile
    monkeypatch.chdir(tmp_path)
    first, second = sorted((out / "tiny").glob("[!.]*"), key=lambda path: path.stat().st_mtime)
    known = {
        "A": str(first), "B": str(second), "MODELS": str(tmp_path / "models"), "ARCHIVE": str(tmp_path / "a.tar"),
    }  # fmt: skip
    options = ["--out", str(out)] if words[0] in ("history", "ls", "gc") else []
    done = CliRunner().invoke(cli, [known.get(word, word) for word in words] + options)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.output
    assert words[0] not in READ or done.exit_code == 0, done.output
    check(done.stdout)
    check(done.stderr)
    if "--json" in words:
        json.loads(done.stdout)
    elif words == ["inspect", "A"]:
        assert "\\x1b" in done.stdout  # it was there, written out
        assert "more notes" in done.stdout


def test_files_for_pipelines_and_pages_escape_it_too(
    hostile: tuple[Path, list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    out, _ = hostile
    first, second = (out / "tiny").glob("[!.]*")
    files = tmp_path / "gates.xml", tmp_path / "gates.md"
    CliRunner().invoke(
        cli, ["gate", str(second), "--against", str(first), "--junit", str(files[0]), "--markdown", str(files[1])]
    )
    ElementTree.parse(files[0])
    (record,) = (first / "evidence").glob("*.json")
    report = Report.model_validate_json(record.read_text())
    page, document = render.to_html(report), render.to_markdown(report)
    for written in (*(file.read_text() for file in files), page, document):
        check_plain(written)
        assert "<script>alert" not in written
        assert not re.search(r"(?<!\\)<img", written)
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r"(?<!\\)\[[^\]\n]*(?<!\\)\]\((http://evil|javascript)", document)


def check_plain(text: str) -> None:
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"]
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", text)


def test_a_comment_of_a_pull_request_calls_nobody_and_leads_nowhere() -> None:
    from llmforge.report import release_text

    written = release_text._cell(HOSTILE)
    check_plain(written)
    assert "\n" not in written
    assert "@<!-- -->team" in written
    assert not re.search(r"(?<!\\)[\[|<`*](?!!-- -->)", written)
    ElementTree.fromstring(f"<a>{release_text._legal(ESCAPES + TRICKS)}</a>")


def test_json_is_the_same_value(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_json({HOSTILE: [HOSTILE, "日本語 😀", "\U000e0001"]})
    written = capsys.readouterr().out
    check_plain(written)
    assert json.loads(written) == {HOSTILE: [HOSTILE, "日本語 😀", "\U000e0001"]}
    assert "日本語 😀" in written


def test_a_generated_text_is_written_out_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "👩‍👩‍👧 日本語\n\tdef"
    output.write_generated(f"\x1b[2J\u202e{family}")
    assert capsys.readouterr().out == f"\x1b[2J\u202e{family}"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    output.write_generated(f"\x1b[2J\u202e{family}")
    assert capsys.readouterr().out == f"\\x1b[2J\\u202e{family}"


def test_nothing_is_printed_but_through_one_place() -> None:
    """`cli.output` and `cli.console` print; the root writes its own version alone."""
    folder = Path(output.__file__).parent
    for file in folder.glob("*.py"):
        if file.name in ("output.py", "console.py", "root.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "click.echo", "click.secho", "sys.stdout.write"), (
                    f"{file.name}: {called}"
                )


def test_a_line_is_bounded() -> None:
    assert len(wording.plain("x" * 10**6)) == LONGEST
    assert wording.plain("a\nb\x1b") == "a\\nb\\x1b"
