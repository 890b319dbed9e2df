"""docs/farm.md: its ten hosts from nothing, command by command, on hosts in namespaces of this machine (slow)."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmforge.base import extras

from ..models import zoo
from ..samples import pages
from . import hosts as namespaces
from .hosts import SWITCH, Host, Hosts
from .nodes import KEYS, MATRIX, RECIPE, ROOT, TRIALS, until

COUNT = 10
PORT = 9000  # of the store, on the switch
DRIVER = "host-3"  # any of them
STARTS = 3  # of Ray at once
SECTION = (
    (ROOT / "docs" / "farm.md").read_text(encoding="utf-8").split("## Ten hosts from nothing\n")[1].split("\n## ")[0]
)
VARIANTS = "  one: {engine.max_batch: 1}\n  two:\n  three: {engine.max_batch: 3}\n"


def steps() -> list[str]:
    """List the shell's blocks of the page, in their order."""
    return [textwrap.dedent(block) for block in re.findall(r" *```sh\n(.*?)```", SECTION, re.DOTALL)]


def test_the_page_shows_the_way() -> None:
    shown = [[line.split()[0] for line in step.replace("\\\n", "").splitlines()] for step in steps()]
    assert shown == [
        ["pip"], ["openssl", "openssl"], ["export"], ["ray", "chmod", "ray", "ssh", "scp"], ["RAY_AUTH_MODE=token"],
        ["cd", "llmforge", "llmforge"],
    ]  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
    made = Hosts(folder, COUNT, {"AWS_ENDPOINT_URL": f"http://{SWITCH}:{PORT}"})
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def make_bucket(host: Host, credentials: str) -> bool:
    """Whether it could be made: the server may not have begun."""
    code = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    with contextlib.suppress(AssertionError):
        host.run(f'{credentials}{sys.executable} -c "{code}"')
        return True
    return False


def start_ray(host: Host, script: str) -> None:
    """Start Ray; on a busy machine its own processes wait too short a time for one another, now and then."""
    for _ in range(TRIALS - 1):
        with contextlib.suppress(AssertionError):
            host.run(script)
            return
        host.run("ray stop --force")
    host.run(script)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(extras.trouble("ray") is not None, reason="ray is not installed (extra `farm`)")
@pytest.mark.skipif(not namespaces.can_be_made(), reason="this user may make no network namespaces")
def test_the_walk_ends_with_artifacts_in_the_store(hosts: Hosts, tmp_path: Path) -> None:
    """The last host has no keys, which no command shows how to copy: it is named, and gets no builds."""
    for package in ("moto", "s3fs", "model_signing"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    install, keys, credentials, head, other, build = steps()
    first, names = hosts["host-1"], [f"host-{number}" for number in range(2, COUNT + 1)]
    first.run(install)  # all hosts of this machine have one environment
    (first.srv / "farm").mkdir()
    zoo.write("llama", first.srv / "farm" / "llama")
    (first.srv / "farm" / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (first.srv / "farm" / "release.yaml").write_text(MATRIX + VARIANTS, encoding="utf-8")
    for name in names[-1:]:
        shutil.copytree(first.srv / "farm", hosts[name].srv / "farm")
    first.run(keys)
    for name in names[:-1]:
        shutil.copytree(first.srv / "farm", hosts[name].srv / "farm")
    hosts.switch.serve(tmp_path / "moto.log", "tests.farm.s3_server", "-H", "0.0.0.0", "-p", str(PORT))
    for name, value in KEYS.items():
        credentials = re.sub(rf"\b{name}=…", f"{name}={value}", credentials)
    until(lambda: make_bucket(first, credentials))
    generate, protect, start, *copy = head.splitlines()
    driver = hosts[DRIVER]
    first.run(f"{generate}\n{protect}")
    start_ray(first, credentials + start)
    for name in names:
        first.run("\n".join(copy).replace("host-2", name))
        assert (hosts[name].home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    with ThreadPoolExecutor(STARTS) as pool:
        scripts = {name: credentials + other.replace("host-2", name) for name in names}
        for started in [pool.submit(start_ray, hosts[name], script) for name, script in scripts.items()]:
            started.result()
    command, imports = build.rsplit("llmforge import", 1)
    printed = driver.run(f"{credentials}{command.rstrip()} --json")
    done = json.loads(printed)
    assert [row["verdict"] for row in done["builds"]] == ["none"] * 3
    assert set(done["nodes"]) == {"host-1", *names}
    [(keyless, why)] = [(name, why) for name, why in done["nodes"].items() if why]
    assert keyless == names[-1]
    assert ".pem: cannot be read: No such file" in why
    assert {row["node"] for row in done["builds"]} <= {"host-1", *names[:-1]}
    for row in done["builds"]:
        found = row["archive"].removeprefix("s3://bucket/artifacts/").removesuffix(".tar")
        first.run(f"{credentials}cd /srv/farm\nllmforge import{imports.replace('NAME/VERSION', found)}")
        assert (first.srv / "farm" / "artifacts" / found / "manifest.json").is_file()
    assert why in pages.check((driver.srv / "farm" / done["page"]).read_text(encoding="utf-8")).text
