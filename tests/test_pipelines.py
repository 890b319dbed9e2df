"""The GitHub Action and the GitLab template of docs/deploy: what they run, how they end, what they comment."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from ruamel.yaml import YAML

from llmforge.cli import cli

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "deploy"
ACTION = FOLDER / "github" / "action.yml"
WORKFLOW = FOLDER / "github" / "workflow.yml"
GITLAB = FOLDER / "gitlab" / "llmforge.gitlab-ci.yml"
# Programs that write down what they are asked, and answer as llmforge does. A file `gate` has the exit code of gates.
FAKES = {
    "llmforge": """\
        echo "llmforge $*" >> "$TOLD"
        case "$1" in
          pull) echo artifacts/sample/old ;;
          build) if [ -e broken ]; then exit 7; fi; echo progress >&2; echo artifacts/sample/new; exit "$(cat gate)" ;;
          gate) echo "### verdict" > gates.md; exit "$(cat gate)" ;;
          diff) echo "bits: 8 -> 4" ;;
        esac
    """,
    "pip": 'echo "pip $*" >> "$TOLD"',
    "gh": 'echo "gh $*" >> "$TOLD"; cp gates.md said.md',
    "curl": 'echo "curl $*" >> "$TOLD"; cp gates.md said.md',
}


def load(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def scripts() -> list[str]:
    return [*(step["run"] for step in load(ACTION)["runs"]["steps"] if "run" in step),
            *load(GITLAB)[".llmforge"]["script"]]  # fmt: skip


@pytest.fixture
def workplace(tmp_path: Path) -> dict[str, str]:
    """The environment of a pipeline whose programs write down what they are asked."""
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/bash\n" + text)
        program.chmod(0o755)
    (tmp_path / "gate").write_text("0")
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "TOLD": str(tmp_path / "told"), "PWD": str(tmp_path)}


def told(workplace: dict[str, str]) -> list[str]:
    return Path(workplace["TOLD"]).read_text().splitlines()


def test_every_command_line_is_one_that_llmforge_takes() -> None:
    found = [line for script in scripts() for line in re.findall(r"llmforge (?:pull|build|gate|diff) [^|)\n]*", script)]
    assert len(found) == 8
    for line in found:
        words = [word for word in shlex.split(line)[1:] if word != "code=$?"]
        command = cli.commands[words[0]]
        command.make_parser(click.Context(command, parent=click.Context(cli))).parse_args(words[1:])


def run_action(workplace: dict[str, str], **inputs: str) -> tuple[list[int], dict[str, str]]:
    """Run the steps of the action as GitHub does: a step after one that failed runs if it says `always()`."""
    action = load(ACTION)
    values = {f"inputs.{name}": str(each.get("default", "")) for name, each in action["inputs"].items()}
    values |= {f"inputs.{name}": value for name, value in inputs.items()}
    values |= {"github.event.pull_request.number": "38", "inputs.token": "t"}
    codes: list[int] = []
    for step in action["runs"]["steps"]:
        if "run" not in step:
            continue
        condition = step.get("if", "")
        if any(codes) and "always()" not in condition:
            continue
        skips = {
            "inputs.pull != ''": not values["inputs.pull"],
            "artifact != ''": not values.get("steps.build.outputs.artifact"),
        }
        if any(skip for text, skip in skips.items() if text in condition):
            continue
        named = {name: re.sub(r"\$\{\{ (\S+) \}\}", lambda m: values.get(m[1], ""), value)
                 for name, value in step.get("env", {}).items()}  # fmt: skip
        out = Path(workplace["PWD"], "output")
        out.write_text("")
        environment = {**workplace, **named, "GITHUB_OUTPUT": str(out), "GITHUB_STEP_SUMMARY": "summary.md",
                       "GITHUB_REPOSITORY": "org/repo"}  # fmt: skip
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env=environment, cwd=workplace["PWD"], check=False,
        )  # fmt: skip
        codes.append(done.returncode)
        for line in out.read_text().splitlines():
            name, _, value = line.partition("=")
            values[f"steps.{step['id']}.outputs.{name}"] = value
    return codes, values


def test_the_action_builds_gates_and_comments_what_changed(workplace: dict[str, str]) -> None:
    codes, _ = run_action(workplace, recipe="r.yaml", pull="registry/x:prod")
    assert not any(codes)
    assert told(workplace) == [
        "pip install llmforge[build,cpu,registry]",
        "llmforge pull registry/x:prod --quiet",
        "llmforge build r.yaml --quiet",
        "llmforge gate artifacts/sample/new --against latest-passed --junit gates.xml --markdown gates.md",
        "llmforge diff artifacts/sample/old artifacts/sample/new",
        "gh pr comment 38 --repo org/repo --body-file gates.md --edit-last --create-if-none",
    ]
    said = Path(workplace["PWD"], "said.md").read_text()
    assert said.startswith("### verdict")
    assert "bits: 8 -> 4" in said
    assert Path(workplace["PWD"], "summary.md").read_text() == said


def test_the_action_fails_with_a_gate_and_still_comments(workplace: dict[str, str]) -> None:
    Path(workplace["PWD"], "gate").write_text("3")
    codes, _ = run_action(workplace, recipe="r.yaml")
    assert [code for code in codes if code] == [3]  # of `gate`: `build` ended so, too
    assert told(workplace)[2].startswith("llmforge gate artifacts/sample/new --against none ")  # nothing was pulled
    assert told(workplace)[-1].startswith("gh pr comment 38")
    assert not any(line.startswith(("llmforge pull", "llmforge diff")) for line in told(workplace))


def test_the_action_ends_with_a_build_that_fails(workplace: dict[str, str]) -> None:
    Path(workplace["PWD"], "broken").touch()
    codes, _ = run_action(workplace, recipe="r.yaml")
    assert codes == [0, 7]
    assert told(workplace)[-1] == "llmforge build r.yaml --quiet"


def test_no_input_is_put_into_a_script(workplace: dict[str, str]) -> None:
    """Whoever names a recipe would run commands by it."""
    for script in scripts():
        assert "${{" not in script
    run_action(workplace, recipe='$(touch "$PWD/owned")"; touch owned; "')
    assert not Path(workplace["PWD"], "owned").exists()


@pytest.mark.parametrize(("gate", "pull"), [(0, "registry/x:prod"), (3, ""), (4, "")])
def test_the_template_of_gitlab_ends_as_gates_do_and_comments(workplace: dict[str, str], gate: int, pull: str) -> None:
    job = load(GITLAB)[".llmforge"]
    Path(workplace["PWD"], "gate").write_text(str(gate))
    variables = {**job["variables"], "PULL": pull, "LLMFORGE_COMMENT_TOKEN": "t", "CI_API_V4_URL": "https://gitlab/api",
                 "CI_PROJECT_ID": "7", "CI_MERGE_REQUEST_IID": "38"}  # fmt: skip
    script = "\n".join(job["script"])
    command = ["bash", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, env={**workplace, **variables}, cwd=workplace["PWD"], check=False)
    assert done.returncode == gate
    against = "latest-passed" if pull else "none"
    assert f"llmforge gate artifacts/sample/new --against {against} " in "\n".join(told(workplace))
    assert ("llmforge diff artifacts/sample/old artifacts/sample/new" in told(workplace)) is bool(pull)
    assert told(workplace)[-1].endswith("https://gitlab/api/projects/7/merge_requests/38/notes")
    assert ("bits: 8 -> 4" in Path(workplace["PWD"], "said.md").read_text()) is bool(pull)
    assert job["allow_failure"] == {"exit_codes": [4]}


def test_the_template_of_gitlab_ends_with_a_build_that_fails(workplace: dict[str, str]) -> None:
    job = load(GITLAB)[".llmforge"]
    Path(workplace["PWD"], "broken").touch()
    command = ["bash", "-eo", "pipefail", "-c", "\n".join(job["script"])]
    done = subprocess.run(command, env={**workplace, **job["variables"]}, cwd=workplace["PWD"], check=False)
    assert done.returncode == 7


def test_the_workflow_names_inputs_that_the_action_has() -> None:
    steps = load(WORKFLOW)["jobs"]["release"]["steps"]
    (given,) = [step["with"] for step in steps if "llmforge" in step["uses"]]
    inputs = load(ACTION)["inputs"]
    assert given.keys() <= inputs.keys()
    assert {name for name, each in inputs.items() if each.get("required")} <= given.keys()


LINTERS = {
    "github-actions": ["vendor.github-actions", str(ACTION)],
    "github-workflows": ["vendor.github-workflows", str(WORKFLOW)],
    "gitlab-ci": ["vendor.gitlab-ci", "--data-transform", "gitlab-ci", str(GITLAB)],
}


@pytest.mark.skipif(shutil.which("check-jsonschema") is None, reason="check-jsonschema of PyPI is not installed")
@pytest.mark.parametrize("kind", LINTERS)
def test_the_published_schemas_take_them(kind: str) -> None:
    words = ["check-jsonschema", "--builtin-schema", *LINTERS[kind]]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, json.dumps(done.stdout + done.stderr)
