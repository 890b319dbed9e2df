"""What people expect of any command line: examples, JSON, quiet and verbose runs, completion."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from llmforge.base.errors import UsageError
from llmforge.cli import cli, running

ROOT = Path(__file__).parents[2]
# Servers, text, and what is data already.
WITHOUT_JSON = {"serve", "up", "completion", "docs", "help", "migrate", "schema"}


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, args)])


def leaves() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, command in cli.commands.items():
        inner = command.commands if isinstance(command, click.Group) else {}
        found |= {f"{name} {each}": inner[each] for each in inner} if inner else {name: command}
    return found


@pytest.mark.parametrize("name", sorted(leaves()))
def test_help_has_examples_and_json_is_everywhere(name: str) -> None:
    words = name.split()
    help_ = invoke(*words, "-h").output
    outer = invoke(words[0], "-h").output
    assert "Example" in (help_ if len(words) == 1 else outer)
    assert f"llmforge {words[0]}" in outer.split("Example")[-1]
    assert ("--json" in help_) == (name not in WITHOUT_JSON)


@pytest.mark.thorough
def test_quiet_and_verbose(tmp_path: Path, tiny_checkpoint: Path) -> None:
    recipe = tmp_path / "r.yaml"
    sections = f"checkpoint: '{tiny_checkpoint}', target: local, engine: {{max_context: 64}}, passes: []"
    recipe.write_text(f"{{schema: 1, name: tiny, {sections}}}")
    quiet = invoke("-q", "build", recipe, "--out", tmp_path / "a")
    assert (quiet.exit_code, quiet.stderr) == (0, "")
    loud = invoke("build", recipe, "-v", "--out", tmp_path / "b")
    assert loud.exit_code == 0
    assert " s  build\n" in loud.stderr
    assert " s    Build engine\n" in loud.stderr  # a stage in it
    assert loud.stdout.splitlines()[-1].startswith(str(tmp_path / "b"))


def test_verbose_errors_say_where_they_came_from(tmp_path: Path) -> None:
    plain = invoke("verify", tmp_path)
    verbose = invoke("-v", "verify", tmp_path)
    assert plain.exit_code == verbose.exit_code == 5
    assert "Traceback" not in plain.stderr
    assert verbose.stderr.startswith("Traceback")
    assert verbose.stderr.endswith(plain.stderr)
    assert "error: " in invoke("-q", "verify", tmp_path).stderr


def completed(*words: str, cwd: Path) -> list[str]:
    env = {**os.environ, "_LLMFORGE_COMPLETE": "bash_complete", "PYTHONPATH": str(ROOT)}
    env |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "llmforge"], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_names_are_completed(tmp_path: Path) -> None:
    version = tmp_path / "artifacts" / "mine" / "0123456789ab"
    version.mkdir(parents=True)
    (version / "manifest.json").write_text("{}")
    assert completed("llmforge", "pl", cwd=tmp_path) == ["plan"]
    assert completed("llmforge", "plan", "x", "--target", "h1", cwd=tmp_path) == ["h100-pcie", "h100-sxm"]
    assert completed("llmforge", "run", "mi", cwd=tmp_path) == ["mine"]
    assert completed("llmforge", "run", "mine/01", cwd=tmp_path) == ["mine/0123456789ab"]
    assert "--json" in completed("llmforge", "plan", "--js", cwd=tmp_path)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = invoke("completion", shell)
    assert result.exit_code == 0
    assert "_LLMFORGE_COMPLETE" in result.stdout
    assert "llmforge" in result.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)


def test_json_of_small_commands(tmp_path: Path) -> None:
    given = ("init", ROOT / "tests" / "data" / "docs-llama-7m", "--like", "fp32", "-o", tmp_path / "r.yaml", "--json")
    assert json.loads(invoke(*given).stdout) == {"recipe": str(tmp_path / "r.yaml")}


def test_the_documentation_is_at_hand() -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = invoke("docs")
    assert {line.split()[0] for line in listed.stdout.splitlines()} == pages
    text = (ROOT / "docs" / "gates.md").read_text(encoding="utf-8")
    for name in ("gates", "gates.md", "docs/gates.md"):
        assert invoke("docs", name).stdout == text
    unknown = invoke("docs", "gatse")
    assert unknown.exit_code == 2
    assert "did you mean `llmforge docs gates`?" in unknown.stderr
    for path in ("../README", "/etc/passwd"):
        assert invoke("docs", path).exit_code == 2


def test_tested_versions_are_printed() -> None:
    assert invoke("doctor", "--constraints").stdout == (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert invoke("doctor", "--constraints", "--measure").exit_code == 2


def listed(*args: str) -> list[str]:
    """The commands that a help text lists, each with one line of its own or more."""
    result = invoke(*args)
    assert result.exit_code == 0
    sections = result.stdout.partition("Options:")[2].partition("\n\n")[2].partition("Examples:")[0]
    return [line.split()[0] for line in sections.splitlines() if line.startswith("  ") and line[2:3].strip()]


def test_the_help_lists_what_people_use_and_where_the_rest_is() -> None:
    assert listed("--help") == [
        "init", "plan", "build", "run", "serve", "bench", "eval", "gate", "diff", "ls", "push", "pull"
    ]  # fmt: skip
    text = invoke("--help").stdout  # of 80 columns
    for command in map(cli.commands.__getitem__, listed("--help")):
        assert command.help is not None
        [line] = [line for line in text.splitlines() if line.split()[:1] == [command.name]]
        assert line.endswith(f"  {' '.join(command.help.split(chr(10) * 2)[0].split())}")
    assert text.splitlines()[-1].startswith(f"These are 12 of {len(cli.commands)} commands: `llmforge --help all`")
    assert invoke("help").stdout == text


def test_help_of_all_lists_every_command_once_and_whole() -> None:
    assert sorted(listed("--help", "all")) == sorted(cli.commands)
    text = invoke("--help", "all").stdout
    for way in (("help", "all"), ("-h", "all"), ("--log-format", "text", "--help", "all")):
        assert invoke(*way).stdout == text
    assert "lists the others" not in text
    text = " ".join(text.split())
    for command in cli.commands.values():
        assert command.help is not None
        assert " ".join(command.help.split("\n\n")[0].split()).rstrip(".") in text
    assert "..." not in text.partition("[ARGS]...")[2]


@pytest.mark.parametrize(
    ("closed", "words", "code"),
    [
        (">&-", "targets h200", 8),
        (">&-", "--help", 8),
        ("<&- >&- 2>&-", "--version", 8),
        ("2>&-", "targets no-such-target", 2),
        ("<&- 2>&-", "--version", 0),
    ],
)
def test_standard_streams_that_are_closed(closed: str, words: str, code: int) -> None:
    """Data that cannot be written is an error, as with other tools; what nobody wants to be told is none."""
    done = subprocess.run(
        ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m llmforge {words} {closed}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    told = "error: standard output cannot be written: it is closed\nhint: send it to a file, a pipe or /dev/null\n"
    assert done.stderr == (told if closed == ">&-" else "")
    assert (done.stdout != "") == (code == 0)


def test_help_that_a_full_disk_does_not_take() -> None:
    command = [sys.executable, "-m", "llmforge", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 8
    assert done.stderr.startswith("error: standard output cannot be written: No space left on device\n")


def test_a_prompt_from_a_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input cannot be read: it is closed"):
        running._stdin()


def test_files_do_not_get_the_numbers_of_closed_streams() -> None:
    code = (
        "import os\n"
        "from llmforge.cli import streams\n"
        "streams.replace_closed()\n"
        "raise SystemExit(os.open(os.devnull, os.O_RDONLY))"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == 3


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_ends_a_command_unless_nohup_does_not_let_it(ignored: bool) -> None:
    code = (
        "import os, signal\n"
        f"signal.signal(signal.SIGHUP, {'signal.SIG_IGN' if ignored else 'signal.SIG_DFL'})\n"
        "from llmforge import cli, targets\n"
        "def names():\n    os.kill(os.getpid(), signal.SIGHUP)\n    return []\n"
        "targets.names = names\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "targets", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    expected = (0, "[]\n", "") if ignored else (129, "", "interrupted by SIGHUP\n")
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_help_of_a_command() -> None:
    assert invoke("help", "gate").stdout == invoke("gate", "--help").stdout
    unknown = invoke("help", "gaet")
    assert unknown.exit_code == 2
    assert "there is no command gaet" in unknown.stderr
    assert "did you mean `llmforge help gate`?" in unknown.stderr


def test_completion_offers_all_commands() -> None:
    for words, cword in (("llmforge ", "1"), ("llmforge help ", "2")):
        environ = {"_LLMFORGE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": cword}
        done = CliRunner().invoke(cli, [], env=environ, prog_name="llmforge")
        assert {line.removeprefix("plain,") for line in done.stdout.splitlines()} >= {*cli.commands}
