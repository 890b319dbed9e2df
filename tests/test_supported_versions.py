"""docs/supported-versions.md says what pyproject.toml, constraints.txt and the code say."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from ruamel.yaml import YAML

from release import supported_versions

ROOT = Path(__file__).parent.parent


def test_the_page_is_up_to_date() -> None:
    assert supported_versions.PAGE.read_text(encoding="utf-8") == supported_versions.page()


def test_what_is_tested_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    wanted = [Requirement(line) for line in lines]
    checked = [each for each in wanted if each.name.lower() in pins]
    assert len(checked) > 20
    assert [str(each) for each in checked if not each.specifier.contains(pins[each.name.lower()])] == []


def test_triton_is_the_one_that_its_model_names() -> None:
    readme = (ROOT / "llmforge" / "triton" / "README.md.jinja").read_text(encoding="utf-8")
    assert supported_versions.TRITON in " ".join(readme.split())


def test_the_hooks_are_local_and_run_what_ci_runs() -> None:
    found = YAML(typ="safe").load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [each["repo"] for each in found["repos"]] == ["local"]
    entries = {hook["entry"].removeprefix(".venv/bin/").split(" --")[0] for hook in found["repos"][0]["hooks"]}
    assert entries == {"ruff check", "ruff format", "mypy", "lint-imports"}
    assert {hook["language"] for hook in found["repos"][0]["hooks"]} == {"system"}
