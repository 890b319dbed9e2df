"""A search over a farm that builds nothing: what is asked for, dropped, resumed, and written."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmforge import passes
from llmforge.base import extras
from llmforge.base.errors import UsageError
from llmforge.farm import searching, space, tuned
from llmforge.farm import store as stores
from llmforge.farm.placing import NodePlacement
from llmforge.farm.running import FarmSettings
from llmforge.farm.searching import Search, SearchTrial
from llmforge.farm.worker import BuildOutcome, Figure, Job
from llmforge.recipe import Recipe

from ..samples import pages
from .fakes import NEEDS, FakeFarm, built

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
needs_optuna = pytest.mark.skipif(extras.trouble("optuna") is not None, reason="optuna is not installed (extra `farm`)")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

GIVEN = (
    "passes.quantize-weights.block_size=[32, 64, 128]",
    "passes.quantize-weights.scales=[fp32, fp16]",
    "passes.quantize-weights.embedding_bits=[4, 8]",
    "passes.quantize-weights.bits=[4]",
    "passes.quantize-weights.symmetric=[false]",
    "passes.quantize-weights.codes=[uniform]",
    "passes.quantize-weights.method=[gptq]",
    "passes.quantize-kv-cache.bits=[8]",
    "passes.quantize-kv-cache.granularity=[per_channel]",
    "passes.quantize-kv-cache.rotation=[none]",
)


def search(
    folder: Path, *limits: str, objectives: tuple[str, ...] = ("size_bytes", "kld_mean"), seed: int = 0
) -> Search:
    found, written = space.of_recipe(RECIPE, (), GIVEN)
    return Search(RECIPE, (), objectives, tuple(map(space.limit_of, limits)), found, written, folder, seed=seed)


def measured(job: Job) -> dict[str, float]:
    """Figures that depend on the options alone: smaller blocks and scales cost quality or bytes."""
    said = dict(word.split("=", 1) for word in job.arguments if word.startswith("passes."))
    block = int(said["passes.quantize-weights.block_size"])
    half = said["passes.quantize-weights.scales"] == '"fp16"'
    table = int(said["passes.quantize-weights.embedding_bits"])
    return {
        "size_bytes": 1e6 + 32e6 / block / (2 if half else 1) + 1e5 * table,
        "kld_mean": 0.005 + block / 32e3 + (0.05 if table == 4 else 0) + (1e-6 if half else 0),
    }


def answer(name: str, job: Job, place: NodePlacement) -> BuildOutcome:
    return built("nowhere", **measured(job))


def run(of: Search, farm: FakeFarm, trials: int, slots: int = 1) -> list[SearchTrial]:
    return searching.run(
        of, farm.as_farm, FarmSettings(replace(NEEDS, out=of.folder / "artifacts")), trials=trials, slots=slots
    )


def test_the_space_is_what_the_recipe_can_have() -> None:
    found, written = space.of_recipe(RECIPE, (), ())
    assert set(found["passes.quantize-weights.bits"]) >= {"4", "8"}
    assert written["passes.quantize-weights.bits"] == "4"
    assert "passes.quantize-weights.routers" not in found
    assert not {'"auto"', '"stored"'} & set(found["passes.quantize-weights.method"])
    for key, values in found.items():
        for value in values:
            Recipe.load(RECIPE, space.words({key: value})).instantiate(passes.ALL)
    more, own = space.of_recipe(RECIPE, (), ("engine.threads=[1, 2]", "passes.quantize-weights.bits=[4]"))
    assert more["engine.threads"] == ("1", "2")
    assert "passes.quantize-weights.bits" not in more
    assert set(own) == set(more)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("engine.threads", r"expected KEY=\[VALUE, VALUE\]"),
        ("engine.threads=2", r"expected KEY=\[VALUE, VALUE\]"),
        ("engine.thraeds=[1,2]", r"no key 'engine.thraeds'"),
        ("passes.quantize-weights.bits=[4,7]", r"bits"),
    ],
)
def test_options_that_cannot_be(given: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        space.of_recipe(RECIPE, (), (given,))


def test_metrics_and_limits() -> None:
    short = {
        "tpot": "tpot_p50_ms",
        "ttft": "ttft_p50_ms",
        "size": "size_bytes",
        "kld": "kld_mean",
        "kld_p99": "kld_p99",
    }
    assert {name: space.metric_of(name) for name in short} == short
    assert str(space.limit_of(" kld_mean <= 0.02")) == "kld_mean<=0.02"
    assert space.limit_of("top1_agreement>=0.9").excess(0.95) < 0
    for wrong in ("kld_mean<0.02", "kld_mean<=x", "kld_mean<=nan", "kld_mean"):
        with pytest.raises(UsageError, match=r"expected METRIC<=NUMBER"):
            space.limit_of(wrong)
    with pytest.raises(UsageError, match="no metric is called 'speed'"):
        space.metric_of("speed")
    assert space.objective_of("kld") == "kld_mean"
    with pytest.raises(UsageError, match="--objective greedy_length_ratio: best is 1, neither less nor more"):
        space.objective_of("greedy_length_ratio")


def test_the_recipe_must_measure_what_is_asked_for(tmp_path: Path) -> None:
    of = search(tmp_path, objectives=("goodput_share",))
    searching.check(of)
    with pytest.raises(UsageError, match="does not measure tpot_p50_ms"):
        searching.check(replace(of, overrides=("validation.latency=null",), objectives=("tpot_p50_ms",)))


@pytest.mark.thorough
@needs_optuna
def test_a_search_finds_the_front_and_writes_its_recipe(tmp_path: Path) -> None:
    of = search(tmp_path)
    trials = run(of, farm := FakeFarm(answer), 12, slots=3)
    counted = [each for each in trials if each.state != "invalid"]
    assert len(counted) == 12  # all of 3 × 2 × 2
    assert counted[0].choice == of.written
    assert len({tuple(sorted(each.choice.items())) for each in counted}) == 12  # none twice
    [_, *singles] = counted[:5]
    assert all(len(tuned.changed(of, each)) == 1 for each in singles)
    front = searching.best(of, trials)
    assert [each.figures["size_bytes"].value for each in front] == sorted(
        each.figures["size_bytes"].value for each in front
    )
    found = {(each.figures["size_bytes"].value, each.figures["kld_mean"].value) for each in counted}
    for each in front:
        size, kld = (each.figures[name].value for name in of.objectives)
        assert not [other for other in found if other != (size, kld) and other[0] <= size and other[1] <= kld]
    assert len(farm.submitted) == 12  # without limits on quality, each is built once
    assert all("gates={}" in job.arguments for _, job, _ in farm.submitted)
    path = tmp_path / "best.yaml"
    chosen = tuned.write_recipe(of, trials, path)
    assert chosen == front[0]
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Written by `llmforge tune quickstart.yaml`")
    assert f"trial {front[1].number}" in text
    made = Recipe.load(path)
    assert made.checkpoint == Recipe.load(RECIPE).checkpoint
    assert made.resolved(made.instantiate(passes.ALL))["passes"][4]["quantize-weights"]["embedding_bits"] == 4
    shown = pages.check(tuned.html(of, trials))
    assert "on the front" in shown.text
    assert json.loads(json.dumps(tuned.data(of, trials)))["front"] == [each.number for each in front]


@needs_optuna
@pytest.mark.thorough
def test_what_costs_nothing_alone_is_tried_together(tmp_path: Path) -> None:
    def free(name: str, job: Job, place: NodePlacement) -> BuildOutcome:
        figures = measured(job)
        return built("nowhere", size_bytes=figures["size_bytes"], kld_mean=0.01)

    trials = run(of := search(tmp_path), FakeFarm(free), 6)
    together = trials[len([each for each in trials if len(tuned.changed(of, each)) < 2])]
    assert len(tuned.changed(of, together)) >= 2


@needs_optuna
def test_limits_are_judged_on_few_documents_first(tmp_path: Path) -> None:
    of = search(tmp_path, "kld_mean<=0.02", objectives=("size_bytes",))
    trials = run(of, farm := FakeFarm(answer), 8)
    names = [name for name, *_ in farm.submitted]
    dropped = [each for each in trials if "on few documents: kld_mean is" in each.why]
    assert dropped  # tables of 4 bits
    for each in dropped:
        assert json.loads(each.choice["passes.quantize-weights.embedding_bits"]) == 4
        assert f"trial/{each.number}/all" not in names
    done = [each for each in trials if each.state == "complete"]
    assert all(f"trial/{each.number}/few" in names for each in done)
    few = next(job for name, job, _ in farm.submitted if name.endswith("/few"))
    assert {"validation.quality.max_documents=4", "validation.latency=null"} <= set(few.arguments)
    assert all(each.feasible for each in searching.best(of, trials))


@needs_optuna
def test_the_plan_drops_what_breaks_a_limit(tmp_path: Path) -> None:
    of = search(tmp_path, "size_bytes<=1000", objectives=("kld_mean",))
    trials = run(of, farm := FakeFarm(answer), 3)
    assert not farm.submitted
    assert [each.state for each in trials] == ["pruned"] * 3
    assert "predicted size_bytes" in trials[0].why
    assert tuned.write_recipe(of, trials, tmp_path / "none.yaml") is None


@needs_optuna
@pytest.mark.thorough
def test_failed_builds_and_budgets(tmp_path: Path) -> None:
    def fails(name: str, job: Job, place: NodePlacement) -> BuildOutcome:
        four = "passes.quantize-weights.embedding_bits=4" in job.arguments
        return BuildOutcome(7, "node", 1.0, message="mean KLD is 1, its budget 0.03" if four else "it does not run")

    trials = run(search(tmp_path), FakeFarm(fails), 6)
    for each in trials:
        if each.state != "invalid":
            four = each.choice["passes.quantize-weights.embedding_bits"] == "4"
            assert each.state == ("pruned" if four else "failed")
    assert not searching.best(search(tmp_path), trials)


@pytest.mark.thorough
@needs_optuna
def test_another_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    run(search(tmp_path), FakeFarm(answer), 1)
    with pytest.raises(UsageError, match="holds a search of another recipe"):
        run(search(tmp_path, seed=1), FakeFarm(answer), 2)


def _killed(folder: Path, after: int) -> None:
    """Search, and die when so many trials have ended."""
    ended = 0

    def dies(name: str, job: Job, place: NodePlacement) -> BuildOutcome:
        nonlocal ended
        ended += 1
        if ended > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer(name, job, place)

    run(search(folder), FakeFarm(dies), 10, slots=2)


@pytest.mark.thorough
@needs_optuna
def test_a_killed_search_goes_on(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_killed, args=(tmp_path, 4))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    of = search(tmp_path)
    before = searching.read(of)
    running = [each for each in before if each.state == "running"]
    assert len([each for each in before if each.state == "complete"]) == 4
    assert len(running) == 2
    after = run(of, farm := FakeFarm(answer), 10)
    counted = [each for each in after if each.state in ("complete", "pruned", "failed")]
    assert len(counted) == 10
    assert len(farm.submitted) == 6  # what had ended is not built again
    asked = [each.choice for each in counted]
    assert all(each.choice in asked for each in running)  # and what was lost is
    assert [each.why for each in after if each.number == running[0].number] == ["the search that ran it ended"]


def test_leases_of_processes() -> None:
    assert searching._is_dead(f"{platform.node()}:{2**22 - 1}:0")
    assert not searching._is_dead("another-host:1:0")
    assert not searching._is_dead(_own())


def _own() -> str:
    import psutil

    return f"{platform.node()}:{os.getpid()}:{psutil.Process().create_time():.0f}"


@needs_optuna
def test_a_trial_of_a_search_that_lives_is_left_alone(tmp_path: Path) -> None:
    of = search(tmp_path)
    study = searching._open(of)
    from optuna.distributions import CategoricalDistribution

    other = study.ask({key: CategoricalDistribution(values) for key, values in of.space.items()})
    other.set_user_attr("lease", {"owner": "another-host:1:0", "until": time.time() + 60})
    trials = run(of, FakeFarm(answer), 3)
    assert next(each for each in trials if each.number == other.number).state == "running"
    other.set_user_attr("lease", {"owner": "another-host:1:0", "until": time.time() - 1})
    trials = run(of, FakeFarm(answer), 3)
    assert next(each for each in trials if each.number == other.number).why == "the search that ran it ended"


def test_figures_that_are_missing_are_dashes() -> None:
    figures: Mapping[str, Figure] = {"kld_mean": Figure(0.5, None, None)}
    trial = SearchTrial(0, {}, "complete", figures, True)
    assert (tuned.figure(trial, "kld_mean"), tuned.figure(trial, "size_bytes")) == ("0.500", "–")
    assert re.fullmatch(r"0\.\d+", tuned.figure(trial, "kld_mean"))


@needs_optuna
def test_what_trials_published_is_removed_from_nodes_and_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, tuple[object, ...], object]] = []
    gone: list[tuple[Path, str]] = []

    class Watched(FakeFarm):
        def ask(self, function: Any, *arguments: Any, nodes: Any = None, **options: Any) -> dict[str, Any]:
            asked.append((function, arguments, nodes))
            return {}

    monkeypatch.setattr(stores, "remove", lambda path, store: gone.append((path, store)))
    of = search(tmp_path)
    needs = replace(NEEDS, out=of.folder / "artifacts", store="s3://bucket/x")
    farm = Watched(answer, address="10.0.0.1:6379")
    searching.run(of, farm.as_farm, FarmSettings(needs), trials=1, slots=1)
    path = Path("nowhere")
    assert asked
    assert {(function, arguments[0][0], nodes[0]) for function, arguments, nodes in asked} == {  # type: ignore[index]
        (searching.remove, path, "n0")
    }
    assert set(gone) == {(path, "s3://bucket/x")}
