"""`python -m llmforge` is the command `llmforge`: its name, its output, its exit codes."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--help",), 0, "Usage: llmforge [OPTIONS] COMMAND"),
        (("--version",), 0, "llmforge, version "),
        (("plan", "--help"), 0, "Usage: llmforge plan "),
        ((), 2, "Usage: llmforge [OPTIONS] COMMAND"),
        (("passes", "absent"), 2, "no pass is named 'absent'"),
        (("inspect", "absent"), 5, "absent"),
    ],
)
def test_the_module_is_the_command(arguments: tuple[str, ...], code: int, says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "llmforge", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert says in (done.stderr if code else done.stdout)
    assert (done.stdout if code else done.stderr) == ""
