"""How a matrix is followed: builds that are lost, that lack memory, and that wait for a device; and its page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmforge.base.errors import EnvironmentLacks, ForgeError
from llmforge.farm import page, pareto, running, worker
from llmforge.farm.cluster import ClusterLost, Lost
from llmforge.farm.matrix import Build
from llmforge.farm.pareto import ParetoPoint
from llmforge.farm.placing import NodePlacement, Resources
from llmforge.farm.preflight import NodeLack
from llmforge.farm.rows import WORST_FIRST, Row, worst
from llmforge.farm.running import FarmSettings
from llmforge.farm.store import StoreLost
from llmforge.farm.worker import BuildOutcome, Figure, Job

from ..samples import pages
from .fakes import NEEDS, NODE, FakeFarm, built

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m"
RECIPE = """\
schema: 1
name: base
checkpoint: SAMPLE
target: cpu-avx2
engine: {max_context: 64, max_batch: 2}
passes: [pack-qkv]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("SAMPLE", str(SAMPLE)), encoding="utf-8")
    return tmp_path / "recipe.yaml"


def one(recipe: Path, *overrides: str) -> list[Build]:
    return [Build("tiny", "here", "plain", recipe, overrides)]


def run(farm: FakeFarm, builds: list[Build], tmp_path: Path) -> list[Row]:
    return running.run(
        builds, farm.as_farm, FarmSettings(replace(NEEDS, out=tmp_path / "out"), arguments=("--no-cache",))
    )


def answers(*results: BuildOutcome | Lost) -> Iterator[BuildOutcome | Lost]:
    yield from results


def test_a_build_gets_its_arguments_and_tells_how_far_it_is(recipe: Path, tmp_path: Path) -> None:
    said: list[tuple[str, str, int]] = []
    farm = FakeFarm(lambda name, job, place: built(size_bytes=1e6))
    settings = FarmSettings(replace(NEEDS, out=tmp_path / "out", store="file:///store"), 2, ("--no-cache",))
    [row] = running.run(
        one(recipe, "engine.max_batch=4"), farm.as_farm, settings,
        lambda row: said.append((row.state, row.stage, row.done)),
    )  # fmt: skip
    [(name, job, place)] = farm.submitted
    assert name == "tiny/here/plain"
    assert job.arguments == (str(recipe), "--set", "engine.max_batch=4", "--out", str(tmp_path / "out"), "--no-cache")
    assert job.needs.store == "file:///store"
    assert place.cpus == 4
    assert 100e6 < place.memory_bytes < 2e9  # as predicted, and not the default
    assert said == [
        ("waiting", "", 0), ("building", "", 0), ("building", "Trace", 0), ("building", "Trace", 1), ("done", "", 0),
    ]  # fmt: skip
    assert (row.verdict, row.exit_code) == ("none", 0)


def test_a_lost_worker_is_replaced_and_not_for_ever(recipe: Path, tmp_path: Path) -> None:
    results = answers(Lost("worker", "the node died"), built())
    [row] = run(FakeFarm(lambda *job: next(results)), one(recipe), tmp_path)
    assert (row.verdict, row.attempts) == ("none", 2)
    assert row.notes == ["the node died; again from what the cache kept"]
    farm = FakeFarm(lambda *job: Lost("worker", "the node died"))
    [row] = run(farm, one(recipe), tmp_path)
    assert (row.verdict, row.exit_code, len(farm.submitted)) == ("error", 8, running.ATTEMPTS)


@pytest.mark.parametrize(
    "lack",
    [
        Lost("memory", "killed by the memory monitor"),
        BuildOutcome(8, "node", 1.0, message="out of memory"),
        BuildOutcome(-9, "node", 1.0, message="out of memory: the kernel killed the build"),
    ],
)
def test_memory_grows_after_it_ran_out(recipe: Path, tmp_path: Path, lack: BuildOutcome | Lost) -> None:
    results = answers(lack, lack, built())
    farm = FakeFarm(lambda *job: next(results))
    [row] = run(farm, one(recipe), tmp_path)
    first, second, third = (place.memory_bytes for _, _, place in farm.submitted)
    assert (second, third) == (2 * first, 4 * first)
    assert row.verdict == "none"


def test_memory_grows_no_further_than_the_largest_node(recipe: Path, tmp_path: Path) -> None:
    farm = FakeFarm(lambda *job: BuildOutcome(8, "node", 1.0, message="out of memory"), [{**NODE, "memory": 1e9}])
    [row] = run(farm, one(recipe), tmp_path)
    assert farm.submitted[-1][2].memory_bytes == 1e9
    assert (row.verdict, row.exit_code) == ("error", 8)


def test_a_bug_is_not_tried_again(recipe: Path, tmp_path: Path) -> None:
    farm = FakeFarm(lambda *job: Lost("bug", "KeyError: 'x'"))
    [row] = run(farm, one(recipe), tmp_path)
    assert (row.exit_code, len(farm.submitted)) == (1, 1)


def test_a_killed_build_is_not_called_out_of_memory(recipe: Path, tmp_path: Path) -> None:
    results = answers(BuildOutcome(-9, "node", 1.0, message="the build was killed: exit code -9"), built())
    farm = FakeFarm(lambda *job: next(results))
    [row] = run(farm, one(recipe), tmp_path)
    first, second = (place.memory_bytes for _, _, place in farm.submitted)
    assert first == second
    assert row.notes == ["the build was killed on node n0; again from what the cache kept"]
    assert row.verdict == "none"


LACK = NodeLack(8, "the disk is full", "free some space")


@pytest.mark.parametrize(("code", "lack"), [(5, LACK), (2, LACK), (8, LACK), (8, None), (2, Lost("worker", "it died"))])
def test_what_a_node_lacks_is_built_elsewhere(
    recipe: Path, tmp_path: Path, code: int, lack: NodeLack | Lost | None
) -> None:
    """The first node lacks something, or says after the failure that it lacks nothing: the build goes to another."""
    results = answers(BuildOutcome(code, "node", 0.1, message="no such file"), built())
    farm = FakeFarm(lambda *job: next(results), [NODE, NODE], lacks={"n0": lack})
    [row] = run(farm, one(recipe), tmp_path)
    (_, _, first), (_, _, second) = farm.submitted
    assert (first.avoided, second.avoided) == (frozenset(), {"n0"})
    assert row.notes == ["no such file, on node n0; again on another node"]
    assert row.verdict == "none"
    assert set(farm.out) == (set() if lack is None else {"n0"})


@pytest.mark.parametrize(("code", "nodes"), [(5, [NODE, NODE]), (6, [NODE, NODE]), (8, [NODE])])
def test_a_build_that_fails_by_itself_is_not_tried_elsewhere(
    recipe: Path, tmp_path: Path, code: int, nodes: list[Resources]
) -> None:
    farm = FakeFarm(lambda *job: BuildOutcome(code, "node", 0.1, message="no"), nodes)
    [row] = run(farm, one(recipe), tmp_path)
    assert (row.exit_code, len(farm.submitted)) == (code, 1)


def test_nodes_that_die_do_not_use_up_the_attempts_of_a_build(recipe: Path, tmp_path: Path) -> None:
    farm = FakeFarm(lambda *job: Lost("worker", "the node died"), dead={"n0"})
    [row] = run(farm, one(recipe), tmp_path)
    assert len(farm.submitted) == running.MOST_HANDED_IN
    assert row.exit_code == 8


def test_nodes_that_lack_something_are_out_from_the_beginning(tmp_path: Path) -> None:
    farm = FakeFarm(lambda *job: built(), [NODE, NODE], lacks={"n1": LACK})
    running.admit(farm.as_farm, NEEDS)
    assert farm.out == {"n1": "the disk is full"}
    farm = FakeFarm(lambda *job: built(), [NODE, NODE], lacks={"n0": LACK, "n1": Lost("worker", "no answer")})
    with pytest.raises(EnvironmentLacks, match="no node can build: node n0: the disk is full") as caught:
        running.admit(farm.as_farm, NEEDS)
    assert caught.value.hint == "free some space"


@pytest.mark.parametrize("lost", [ClusterLost("the head is gone"), StoreLost("the store is gone")])
def test_what_all_builds_need_was_lost(recipe: Path, tmp_path: Path, lost: ForgeError) -> None:
    """What has ended stays, and what has not says what it waited for."""

    def answer(name: str, *job: object) -> BuildOutcome:
        if name == "second/here/plain":
            raise lost
        return built()

    builds = [Build(model, "here", "plain", recipe, ()) for model in ("first", "second", "third")]
    rows = run(FakeFarm(answer), builds, tmp_path)
    assert [row.exit_code for row in rows] == [0, 8, 8]
    assert rows[1].outcome is not None
    assert rows[1].outcome.message == lost.message
    assert "it waited for a node with" in rows[2].notes[0]
    shown = pages.check(page.of_matrix(page.MatrixPage("release", rows, {}, 1.0, None)))
    assert "waits for a node with 2 CPUs" in shown.text


def test_a_store_that_is_lost_from_here_too_ends_the_matrix(recipe: Path, tmp_path: Path) -> None:
    settings = FarmSettings(replace(NEEDS, store=(tmp_path / "gone").as_uri()))
    farm = FakeFarm(lambda *job: BuildOutcome(8, "node", 0.1, message="the store does not answer"), [NODE, NODE])
    [row] = running.run(one(recipe), farm.as_farm, settings)
    assert row.exit_code == 8
    assert row.outcome is not None
    assert "the store was lost" in str(row.outcome.message)


TENSORRT = "target=l4", "engine.backend=tensorrt", "passes=[]"


def test_an_engine_without_its_device_is_deferred(recipe: Path, tmp_path: Path) -> None:
    waiting = BuildOutcome(0, "node", 1.0, tmp_path / "out" / "a" / "0", pending=True)
    farm = FakeFarm(lambda *job: waiting)
    [row] = run(farm, one(recipe, *TENSORRT), tmp_path)
    [(_, job, place)] = farm.submitted
    assert "engine.deferred=true" in job.arguments
    assert place.marks == {}
    assert (row.verdict, row.exit_code) == ("pending", 10)
    assert row.waits_for == "a node with the device of its target, to finish the engine"
    assert "no node has the device" in row.notes[0]
    assert "when a node with the device has joined" in row.notes[1]


def test_the_node_with_the_device_finishes(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "a" / "0"
    results = answers(BuildOutcome(0, "cpu", 1.0, path, pending=True, reused=("trace",)), built(path.with_name("1")))
    farm = FakeFarm(
        lambda *job: next(results), [NODE, {"CPU": 4.0, "memory": 8e9, "GPU": 1.0, "accelerator_type:L4": 1}]
    )
    [row] = run(farm, one(recipe, *TENSORRT, "engine.deferred=true"), tmp_path)
    (_, build, anywhere), (_, finish, there) = farm.submitted
    assert anywhere.marks == {}
    assert there.marks == {"accelerator_type:L4": 0.001}
    assert there.gpus == 1
    assert finish.arguments[-2:] == ("--finish", str(path))
    assert finish.finishes == path
    assert set(build.arguments) - {"--out", str(tmp_path / "out"), "--no-cache"} <= set(finish.arguments)
    assert (row.verdict, row.reused) == ("none", ("trace",))


def test_a_device_that_nothing_else_replaces_is_a_row(recipe: Path, tmp_path: Path) -> None:
    farm = FakeFarm(lambda *job: built(), [{**NODE, "llmforge:cpu-avx2": 1.0}])
    rows = run(farm, [*one(recipe), Build("tiny", "amx", "plain", recipe, ("target=cpu-amx",))], tmp_path)
    assert [row.verdict for row in rows] == ["none", "error"]
    assert rows[1].outcome is not None
    assert "no node has the device of target cpu-amx" in str(rows[1].outcome.message)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([0, 10], 10), ([10, 4, 0], 4), ([4, 3], 3), ([3, 5], 5), ([8, 6], 6), ([8, 77], 1), ([], 0)],
)
def test_the_worst_exit_code(codes: list[int], expected: int) -> None:
    assert worst(codes) == expected


def test_every_exit_code_has_its_place() -> None:
    kinds = [ForgeError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.exit_code for kind in kinds} | {0} == set(WORST_FIRST)


# what a worker makes of a build


def job(*arguments: str, **more: object) -> Job:
    finishes = more.pop("finishes", None)
    return Job(arguments, replace(NEEDS, **more), finishes=finishes)  # type: ignore[arg-type]


def test_errors_of_a_build_come_back(tmp_path: Path) -> None:
    told: list[dict[str, object]] = []
    ended = worker.run(job(str(tmp_path / "none.yaml")), told.append)
    assert ended.exit_code == 2
    assert "none.yaml" in str(ended.message)
    assert ended.artifact is None


def test_another_version_is_refused() -> None:
    ended = worker.run(job(code="0" * 64), lambda event: None)
    assert ended.exit_code == 8
    assert "another llmforge" in str(ended.message)


def test_an_artifact_that_no_store_has_is_missed(tmp_path: Path) -> None:
    ended = worker.run(job(finishes=tmp_path / "a" / "0"), lambda event: None)
    assert ended.exit_code == 8
    assert "--store" in str(ended.hint)
    ended = worker.run(job(finishes=tmp_path / "a" / "0", store=tmp_path.as_uri()), lambda event: None)
    assert ended.exit_code == 5


def test_the_command_dies_with_its_worker() -> None:
    """A process that is not the parent is named: the command does not begin."""
    import subprocess

    command = [sys.executable, "-m", "llmforge.farm.attached", "1", "targets"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 137


# the front and the page


def test_the_front() -> None:
    assert pareto.front([(1, 3), (2, 2), (3, 1), (3, 3), (2, 2)]) == [0, 1, 2, 4]
    assert pareto.front([]) == []


def figures(**values: float) -> dict[str, Figure]:
    return {name: Figure(value, None, None) for name, value in values.items()}


def test_more_is_better_where_the_metric_says_so() -> None:
    points = [
        ParetoPoint("1", "a", 0, figures(top1_agreement=0.9, size_bytes=10)),
        ParetoPoint("2", "b", 0, figures(top1_agreement=0.8, size_bytes=20)),
        ParetoPoint("3", "c", 0, figures(size_bytes=5)),
    ]
    drawn = pareto.plot(points, "size_bytes", "top1_agreement")
    assert drawn is not None
    assert [(dot.label, dot.best) for dot in drawn.dots] == [("1", True), ("2", False)]
    assert pareto.plot(points[1:], "size_bytes", "top1_agreement") is None


def rows() -> list[Row]:
    made = []
    for number, (target, model) in enumerate([("cpu", "a"), ("cpu", "<b>"), ("l4", "a"), ("l4", "<b>")]):
        row = Row(Build(model, target, "int4", Path("r.yaml"), ()), "done", seconds=12.0)
        row.outcome = built(f"out/n{number}/0123", kld_mean=0.01 * (number + 1), tpot_p50_ms=5.0 - number,
                            size_bytes=1e6 * (number + 1))  # fmt: skip
        made.append(row)
    extra = Row(Build("a", "t4", "int4", Path("r.yaml"), ()), "failed", notes=["the node died; again"])
    extra.outcome = BuildOutcome(6, "n", 1.0, message="no int4 <here>", hint="another")
    return [*made, extra]


def test_the_page_and_the_data() -> None:
    shown = pages.check(page.of_matrix(page.MatrixPage("release", rows(), {"a": "", "b": "the disk is full"}, 30.0, 2)))
    assert "<b>" in shown.text  # as text
    assert "no int4 <here>" in shown.text
    assert "latency was measured beside others" in shown.text
    assert len(shown.all("svg")) == 4  # two models, speed and size; no price
    assert page.verdict(rows()) == "error"
    assert page.verdict(rows()[:2]) == "none"
    data = page.data(rows())
    assert json.loads(json.dumps(data))[-1]["error"] == "no int4 <here>"
    assert data[0]["figures"]["kld_mean"]["value"] == 0.01


def test_a_page_without_figures() -> None:
    shown = pages.check(page.of_matrix(page.MatrixPage("release", rows()[-1:], {}, 1.0, None)))
    assert "Nothing to draw" in shown.text


def test_the_page_says_where_builds_were_and_which_nodes_are_out(recipe: Path, tmp_path: Path) -> None:
    settings = FarmSettings(replace(NEEDS, store="s3://me:secret@bucket/x"))
    [row] = running.run(one(recipe), FakeFarm(lambda *job: built()).as_farm, settings)
    shown = pages.check(
        page.of_matrix(page.MatrixPage("r", [row], {"node n0": "", "b": "the disk is full"}, 1.0, None))
    )
    assert "out: the disk is full" in shown.text
    assert "s3://bucket/x/a/0.tar" in shown.text
    assert "secret" not in shown.text
    [data] = page.data([row])
    assert (data["node"], data["archive"]) == ("node n0", "s3://bucket/x/a/0.tar")
    assert (data["seconds"], data["waits_for"]) == (1.0, None)
    assert data["waited_s"] >= 0


def test_places_are_compared() -> None:
    assert NodePlacement(1, 10).suits(NODE)
