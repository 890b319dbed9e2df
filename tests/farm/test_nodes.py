"""Builds over three nodes with a store on S3: what is lost costs nothing, and the right one is blamed."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmforge.artifact import remote
from llmforge.artifact.remote import Url
from llmforge.base import extras
from llmforge.farm import running

from ..models import zoo
from ..samples import pages
from .nodes import (
    BUCKET,
    MATRIX,
    RECIPE,
    ROOT,
    S3,
    SLOW_TO_IMPORT,
    Done,
    Driver,
    Nodes,
    has_namespaces,
    paths,
    until,
)

pytest.importorskip("moto", reason="moto is not installed (extra `dev`)")
pytest.importorskip("s3fs", reason="s3fs is not installed (extra `dev`)")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(extras.trouble("ray") is not None, reason="ray is not installed (extra `farm`)"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]
needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="this user may make no mount namespaces")

GPU = """
  cpu-avx2:
  gpu:
    target: rtx-4090
    engine.backend: tensorrt-rtx
    engine.deferred: true
    validation.quality: {data: evaluation.jsonl, context: 32}
    passes: [pack-qkv, pack-gate-up, lower-precision: {dtype: fp16, budget: {kld_mean: 1}}]"""
MOST_KILLS = running.ATTEMPTS - 2  # of one build: the last attempts are for nodes whose builds end before they do
STORE = f"s3://{BUCKET}/store"


def write_matrix(folder: Path, count: int) -> Path:
    """Write a matrix of so many builds."""
    file = folder / f"matrix{count}.yaml"
    lines = "".join(f"  v{number}: {{engine.max_batch: {number + 1}}}\n" for number in range(count))
    file.write_text(MATRIX + lines, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("farm")
    zoo.write("llama", folder / "llama")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    server = S3(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def cluster(s3: S3) -> Iterator[Nodes]:
    """Three nodes that are whole."""
    nodes = Nodes(Path(tempfile.mkdtemp(prefix="farm-", dir="/tmp")))  # sockets have short paths
    try:
        for name in ("n0", "n1", "n2"):
            nodes.start(name, **s3.env)
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(nodes.folder, ignore_errors=True)


@pytest.fixture
def driver(tmp_path: Path, s3: S3) -> Driver:
    return Driver(tmp_path, s3.env)


def started(driver: Driver, cluster: Nodes, matrix: Path, *more: object, store: str = STORE) -> subprocess.Popen[str]:
    out = driver.folder / "out"
    return driver.begin(
        "build", "--matrix", matrix, "--out", out, "--address", cluster.address, "--jobs", 1, "--json", "--store",
        store, *more,
    )  # fmt: skip


def built(driver: Driver, cluster: Nodes, matrix: Path, *more: object, store: str = STORE) -> Done:
    return driver.end(started(driver, cluster, matrix, *more, store=store))


def test_a_matrix_over_three_nodes(place: Path, cluster: Nodes, s3: S3, driver: Driver) -> None:
    store = f"s3://{BUCKET}/three"
    done = built(driver, cluster, write_matrix(place, 6), store=store)
    assert done.code == 0, done.stderr
    rows = done.data["builds"]
    assert {row["node"] for row in rows} <= {"n0", "n1", "n2"}
    assert done.data["nodes"] == {"n0": "", "n1": "", "n2": ""}
    assert all(row["archive"].startswith(store) and row["waited_s"] >= 0 < row["seconds"] for row in rows)
    assert len(s3.archives("three")) == 6
    shown = pages.check(Path(done.data["page"]).read_text(encoding="utf-8"))
    assert "n1" in shown.text
    assert f"{store}/llama-cpu-avx2-v0/" in shown.text


@pytest.mark.parametrize("what", ["board", "node", "worker", "build"])
def test_what_is_lost_is_asked_again(place: Path, cluster: Nodes, s3: S3, driver: Driver, what: str) -> None:
    store = f"s3://{BUCKET}/lost-{what}"
    extra = f"x{what}"
    if what == "node":
        cluster.start(extra, **s3.env)
    try:
        command = started(driver, cluster, write_matrix(place, 4), store=store)
        until(cluster.builds)
        if what == "node":
            until(cluster.nodes[extra].builds)
            cluster.drop(extra)
        elif what == "board":
            [board] = cluster.processes("ray::_Board")
            board.kill()
        else:
            until(lambda: killed(cluster, what))
        done = driver.end(command)
    finally:
        if extra in cluster.nodes:
            cluster.drop(extra)
    assert done.code == 0, done.stderr
    assert [row["exit_code"] for row in done.data["builds"]] == [0] * 4  # and nothing else on standard output
    assert len(s3.archives(f"lost-{what}")) == 4
    notes = [
        note
        for row in done.data["builds"]
        for note in row["notes"]
        if note.endswith("; again from what the cache kept")
    ]
    assert bool(notes) == (what != "board")
    assert "memory" not in "".join(notes)
    assert what != "build" or notes[0].startswith("the build was killed on n")


def title_of(build: psutil.Process) -> str:
    """What a build is of, whoever started it."""
    command = build.cmdline()
    return " ".join(command[command.index("build") :])


def killed(cluster: Nodes, what: str, rng: random.Random | None = None, kills: Counter[str] | None = None) -> bool:
    """Whether a build, or the worker that waits for it, was there to be killed; each as often as it is begun again."""
    with contextlib.suppress(psutil.NoSuchProcess):
        builds = cluster.builds()
        for build in builds if rng is None else rng.sample(builds, len(builds)):
            victim, title = build if what == "build" else build.parent(), title_of(build)
            if victim is None or (kills is not None and kills[title] >= MOST_KILLS):
                continue
            victim.kill()
            if kills is not None:
                kills[title] += 1
            return True
    return False


def test_broken_nodes_are_named_and_get_nothing(place: Path, cluster: Nodes, s3: S3, driver: Driver) -> None:
    """Each lacks one thing; three others are whole."""
    other = driver.folder / "other"
    shutil.copytree(ROOT / "llmforge", other / "llmforge")
    with (other / "llmforge" / "__init__.py").open("a") as file:
        file.write("OTHER = True\n")
    (driver.folder / "out").mkdir()
    options = cache_options(place, "cache3")
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "bare": ("credentials", {}),
        "badkey": ("cannot be written", {**s3.env, "AWS_SECRET_ACCESS_KEY": "another"}),
        "other": ("another llmforge", {**s3.env, "PYTHONPATH": paths(other)}),
        "without": ("s3fs is not installed", {**s3.env, "ABSENT_MODULES": f"s3fs,{SLOW_TO_IMPORT}"}),
    }
    if has_namespaces():
        nodes |= {
            "blind": ("llama: is empty", {**s3.env, "hidden": (place / "llama",)}),
            "keyless": (".pem: cannot be read: No such file", {**s3.env, "hidden": (place / "keys",)}),
            "full": ("GB are free; a build needs", {**s3.env, "small": (driver.folder / "out",)}),
        }
    try:
        for name, (_, settings) in nodes.items():
            cluster.start(name, **settings)
        done = built(driver, cluster, write_matrix(place, 3), *options, store=f"s3://{BUCKET}/broken")
    finally:
        for name in nodes:
            if name in cluster.nodes:
                cluster.drop(name)
    assert done.code == 0, done.stderr
    assert {row["node"] for row in done.data["builds"]} <= {"n0", "n1", "n2"}
    assert {name for name, why in done.data["nodes"].items() if why} == set(nodes)
    shown = pages.check(Path(done.data["page"]).read_text(encoding="utf-8")).text
    for name, (why, _) in nodes.items():
        assert why in done.data["nodes"][name], done.data["nodes"]
        assert why in shown


def test_a_store_that_cannot_be_written_is_refused_before_anything_is_built(
    place: Path, cluster: Nodes, s3: S3, driver: Driver, tmp_path: Path
) -> None:
    matrix = write_matrix(place, 2)
    done = built(driver, cluster, matrix, store="s3://artefacts/store")
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert "s3://artefacts/store: cannot be written: no such file or bucket" in done.stderr
    assert not s3.system.exists("artefacts")
    bare = Driver(tmp_path / "bare", {})
    bare.folder.mkdir()
    done = built(bare, cluster, matrix)
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert "credentials" in done.stderr
    done = built(driver, cluster, matrix, store=(tmp_path / "nowhere").as_uri())
    assert (done.code, done.stdout) == (2, "")
    assert "there is no such folder" in done.stderr
    assert not (tmp_path / "nowhere").exists()


def test_two_hosts_publish_one_content(place: Path, cluster: Nodes, s3: S3, driver: Driver, tmp_path: Path) -> None:
    """Both at once, each with a folder and a cache of its own; then the first again."""
    store = f"s3://{BUCKET}/both"
    other = Driver(tmp_path / "other", s3.env)
    other.folder.mkdir()
    matrix = write_matrix(place, 1)
    commands = [(machine, started(machine, cluster, matrix, store=store)) for machine in (driver, other)]
    for count in (2, 3):
        for machine, command in commands:
            done = machine.end(command)
            assert (done.code, len(done.data["builds"])) == (0, 1), done.stderr
        [archive] = s3.archives("both")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in s3.env.items():
                patch.setenv(name, value)
            _, records = remote.evidence(Url(f"{store}/{archive}"))
        assert len(records) == count
        assert [each.previous for each in records[1:]] == [each.digest for each in records[:-1]]
        commands = [(driver, started(driver, cluster, matrix, store=store))] if count == 2 else []


def test_a_wheel_is_what_nodes_run(place: Path, cluster: Nodes, s3: S3, driver: Driver) -> None:
    """They have another llmforge; what the wheel requires, they have."""
    site = driver.folder / "site"
    shutil.copytree(ROOT / "llmforge", site / "llmforge", ignore=shutil.ignore_patterns("__pycache__"))
    with (site / "llmforge" / "__init__.py").open("a") as file:
        file.write("OTHER = True\n")
    about = site / "llmforge-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(str(metadata.metadata("llmforge")), encoding="utf-8")
    wheel = driver.folder / "llmforge-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in sorted(each for each in site.rglob("*") if each.is_file()):
            archive.write(file, file.relative_to(site))
    machine = Driver(driver.folder, {**s3.env, "PYTHONPATH": paths(site)})
    matrix, store = write_matrix(place, 2), f"s3://{BUCKET}/wheel"
    done = built(machine, cluster, matrix, store=store)
    assert (done.code, done.stdout) == (8, ""), done.stderr
    assert "another llmforge" in done.stderr
    done = built(machine, cluster, matrix, "--wheel", wheel, store=store)
    assert done.code == 0, done.stderr
    assert done.data["nodes"] == {"n0": "", "n1": "", "n2": ""}
    assert len(s3.archives("wheel")) == 2


def test_engines_without_their_device_wait(place: Path, cluster: Nodes, s3: S3, driver: Driver) -> None:
    """There are no gates: exit code 10 all the same."""
    matrix = place / "pending.yaml"
    text = "".join(json.dumps({"id": f"d{n}", "text": f"{n} quick brown foxes " * 4}) + "\n" for n in range(4))
    (place / "evaluation.jsonl").write_text(text, encoding="utf-8")
    matrix.write_text(MATRIX.replace("{cpu-avx2: }", GPU) + "  one: {engine.max_batch: 1}\n", encoding="utf-8")
    done = built(driver, cluster, matrix, store=f"s3://{BUCKET}/pending")
    assert done.code == 10, done.stderr
    rows = {row["target"]: row for row in done.data["builds"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {"cpu-avx2": "none", "gpu": "pending"}
    assert rows["gpu"]["waits_for"] == "a node with the device of its target, to finish the engine"
    assert len(s3.archives("pending")) == 2


def test_a_dead_address_is_refused_soon(place: Path, driver: Driver, cluster: Nodes) -> None:
    matrix = write_matrix(place, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        for port in (silent.getsockname()[1], 1):
            done = driver.run("build", "--matrix", matrix, "--address", f"127.0.0.1:{port}", "--json", seconds=300)
            assert (done.code, done.stdout) == (2, ""), done.stderr
            assert f"no Ray cluster at 127.0.0.1:{port}" in done.stderr


def test_a_lost_store_ends_with_a_page(place: Path, cluster: Nodes, tmp_path: Path, s3: S3, driver: Driver) -> None:
    """The store is away for longer than it is waited for; once it is back, the same command goes on."""
    matrix, store = write_matrix(place, 3), f"s3://{BUCKET}/away"
    command = started(driver, cluster, matrix, store=store)
    until(cluster.builds)
    with s3.away():
        done = driver.end(command)
    assert done.code == 8, done.stderr
    lost = [row for row in done.data["builds"] if row["exit_code"] == 8]
    assert lost
    assert "store" in lost[0]["error"]
    assert any("it waited for" in note for row in lost for note in row["notes"])
    assert Path(done.data["page"]).is_file()
    done = built(driver, cluster, matrix, store=store)
    assert done.code == 0, done.stderr
    assert len(s3.archives("away")) == 3


def test_a_lost_head_ends_with_a_page(place: Path, s3: S3, driver: Driver) -> None:
    nodes = Nodes(Path(tempfile.mkdtemp(prefix="farm-", dir="/tmp")))
    try:
        nodes.start("h0", cpus=0, **s3.env)
        nodes.start("h1", **s3.env)
        matrix, store = write_matrix(place, 3), f"s3://{BUCKET}/headless"
        command = started(driver, nodes, matrix, store=store)
        until(nodes.nodes["h1"].builds)
        nodes.drop("h0")
        done = driver.end(command)
        assert done.code == 8, done.stderr  # Ray itself ends the process after a minute: exit code 1, and no page
        assert any("the head of the Ray cluster" in str(row["error"]) for row in done.data["builds"])
        assert Path(done.data["page"]).is_file()
        nodes.drop("h1")
        nodes.start("h2", **s3.env)
        done = built(driver, nodes, matrix, store=store)
        assert done.code == 0, done.stderr
        assert len(s3.archives("headless")) == 3
    finally:
        nodes.close()
        shutil.rmtree(nodes.folder, ignore_errors=True)


def test_random_kills(place: Path, s3: S3, driver: Driver) -> None:
    """Twenty in twelve builds: workers, builds, nodes, the board, the store for ten seconds."""
    rng, kills = random.Random(35), Counter[str]()
    matrix, store = write_matrix(place, 12), f"s3://{BUCKET}/random"
    cache = cache_options(place, "cache")
    nodes = Nodes(Path(tempfile.mkdtemp(prefix="farm-", dir="/tmp")))
    kinds = ["worker", "build"] * 7 + ["node"] * 2 + ["board"] * 2 + ["store"] * 2
    rng.shuffle(kinds)
    try:
        for name in ("k0", "k1", "k2"):
            nodes.start(name, cpus=0 if name == "k0" else 1, **s3.env)
        command = started(driver, nodes, matrix, *cache, store=store)
        for number, kind in enumerate(kinds):
            until(lambda: command.poll() is not None or nodes.builds())
            time.sleep(rng.uniform(0, 4))
            assert command.poll() is None, (number, driver.end(command))
            if kind in ("worker", "build"):
                until(lambda kind=kind: command.poll() is not None or killed(nodes, kind, rng, kills))
            else:
                harm(nodes, s3, kind, f"k{number + 3}", rng)
        done = driver.end(command, 1800)
    finally:
        nodes.close()
        shutil.rmtree(nodes.folder, ignore_errors=True)
    assert done.code == 0, done.stderr
    found = s3.archives("random")
    assert len(found) == 12
    alone = built_alone(place, driver, matrix)
    assert {name.partition("/")[0]: name for name in found} == alone


def harm(nodes: Nodes, s3: S3, kind: str, spare: str, rng: random.Random) -> None:
    """Harm a node, which is replaced, the board or the store now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if kind == "store":
            with s3.away():
                time.sleep(10)
        elif kind == "node":
            nodes.drop(rng.choice([each for each in nodes.nodes if each != "k0"]))
            nodes.start(spare, **s3.env)
        else:
            for board in nodes.processes("ray::_Board"):
                board.kill()


def built_alone(place: Path, driver: Driver, matrix: Path) -> dict[str, str]:
    """Build all of a matrix on this machine; the archives that a store would have, by their names."""
    done = driver.run("build", "--matrix", matrix, "--out", driver.folder / "alone", "--jobs", 2, "--json")
    assert done.code == 0, done.stderr
    paths = [Path(row["artifact"]) for row in done.data["builds"]]
    return {path.parent.name: f"{path.parent.name}/{path.name}.tar" for path in paths}


def cache_options(place: Path, folder: str) -> list[object]:
    """Options of a remote cache in the bucket, with a pair of keys in a folder of their own."""
    pytest.importorskip("model_signing", reason="the extra `signing` is not installed")
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from ..cache.test_remote import pair

    if not (place / "keys").exists():
        (place / "keys").mkdir()
        pair(place / "keys", "farm", ed25519.Ed25519PrivateKey.generate())
    keys = ["--remote-cache-write", place / "keys" / "farm.pem", "--cache-key", place / "keys" / "farm.pub.pem"]
    return ["--remote-cache", f"s3://{BUCKET}/{folder}", *keys]


def test_a_search_leaves_nothing_on_its_nodes(place: Path, cluster: Nodes, s3: S3, driver: Driver) -> None:
    """The model is one that their caches do not know, so that they write to the remote one."""
    store = f"s3://{BUCKET}/search"
    zoo.write("qwen3", place / "qwen3")
    (place / "search.yaml").write_text(RECIPE.replace("checkpoint: llama", "checkpoint: qwen3"), encoding="utf-8")
    done = driver.run(
        "tune", place / "search.yaml", "--objective", "size", "--option", "engine.max_batch=[1,2]", "--trials", 2,
        "-o", driver.folder / "search", "--address", cluster.address, "--store", store, "--jobs", 1, "--json",
        *cache_options(place, "cache2"),
    )  # fmt: skip
    assert done.code == 0, done.stderr
    states = [trial["state"] for trial in done.data["trials"]]
    assert [state for state in states if state != "invalid"] == ["complete", "complete"]  # it may ask for one again
    assert s3.archives("search") == []
    assert s3.system.find(f"{BUCKET}/cache2/records")
    left = [each for each in (driver.folder / "search" / "artifacts").rglob("*") if each.is_file()]
    assert [each for each in left if each.name != ".lock"] == []
