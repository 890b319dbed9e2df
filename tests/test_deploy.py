"""The files of docs/deploy say what the code has: command lines, ports, paths and names of metrics."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import jsonschema
import numpy as np
import pytest
from ruamel.yaml import YAML
from tokenizers import Tokenizer
from tokenizers.models import BPE

from llmforge.backends import PROVIDERS
from llmforge.cli import cli
from llmforge.serving.http import access, app, metrics
from llmforge.serving.http.limits import ApiKey, Client
from llmforge.serving.interface import EngineStats
from llmforge.serving.protocol.metrics import ANSWERS, COUNTERS, GAUGES, ITL, TTFT
from llmforge.triton import launch
from release import wheels

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "deploy"
MANIFESTS = sorted(FOLDER.glob("kubernetes/*.yaml"))
FILES = [path for path in sorted(FOLDER.rglob("*")) if path.is_file()]


def documents(path: Path) -> list[Any]:
    return [each for each in YAML(typ="safe", pure=True).load_all(path.read_text(encoding="utf-8")) if each]


def find(value: Any, key: str) -> Iterator[Any]:
    """Yield what stands under `key`, wherever it is."""
    if isinstance(value, dict):
        yield from ([value[key]] if key in value else [])
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from find(each, key)


def instruction(file: str, name: str) -> list[str]:
    """Give the words of a Dockerfile's last instruction of that name, in its form of JSON."""
    text = (FOLDER / file).read_text(encoding="utf-8").replace("\\\n", " ")
    line = [line for line in text.splitlines() if line.split(" ", 1)[0] == name][-1]
    words: list[str] = json.loads(line[line.index("[") :])
    return words


def parse(words: list[str]) -> click.Context:
    """Let click read a command line, `llmforge` left out."""
    command = cli.commands[words[0]]
    parent = click.Context(cli, **cli.context_settings)  # click keeps the help option that a command has first
    return command.make_context(words[0], list(words[1:]), parent=parent)


def every_container() -> list[dict[str, Any]]:
    kinds = ("containers", "initContainers")
    return [each for path in MANIFESTS for kind in kinds for part in find(documents(path), kind) for each in part]


def containers() -> list[dict[str, Any]]:
    """Those that serve."""
    return [each for each in every_container() if "ports" in each]


def serve_lines() -> list[list[str]]:
    """Every command line of `llmforge serve` that a file makes: the entry point, and what follows it."""
    entry = instruction("Dockerfile.serve", "ENTRYPOINT")
    compose = documents(FOLDER / "compose.yaml")[0]["services"]["serve"]["command"]
    own = [each["args"] for each in containers() if each["name"] == "serve"]
    return [entry[1:] + words for words in (instruction("Dockerfile.serve", "CMD"), compose, *own)]


def triton_lines() -> list[list[str]]:
    own = [each["args"] for each in containers() if each.get("command") == [launch.PROGRAM]]
    return [instruction("Dockerfile.triton", "CMD")[1:], *own]


def test_every_yaml_is_yaml() -> None:
    for path in FILES:
        if path.suffix == ".yaml":
            assert documents(path), path


def test_command_lines_of_serve_are_understood() -> None:
    assert instruction("Dockerfile.serve", "ENTRYPOINT")[:2] == ["llmforge", "serve"]
    lines = serve_lines()
    assert len(lines) == 5
    for words in lines:
        given = parse(words).params
        assert given["artifact"] == Path("/artifact")
        assert (given["host"], given["port"]) == ("0.0.0.0", 8000)
        assert given["key_file"] is not None


def test_command_lines_in_texts_are_understood() -> None:
    found = []
    for path in FILES:
        for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            if match := re.match(r"[#\s$]*llmforge (\w+ .*)", line):
                found.append(match[1])
                parse(shlex.split(match[1]))
    assert found


def test_the_servers_options_are_those_of_triton() -> None:
    """Those that `llmforge triton --launch` gives, less what a container has otherwise, and one for its end."""
    known = {
        word.partition("=")[0]
        for word in launch.command(launch.TritonServer(Path("/x"), {}), Path("/y"), launch.Ports())[1:]
    }
    assert len(triton_lines()) == 3
    for words in triton_lines():
        names = {word.partition("=")[0] for word in words}
        assert {"--model-repository", "--model-control-mode", "--disable-auto-complete-config"} <= names
        assert names - known <= {"--exit-timeout-secs", "--allow-grpc"}
        for option, port in {"--http-port": 8000, "--grpc-port": 8001, "--metrics-port": 8002}.items():
            assert not [word for word in words if word.startswith(option) and word != f"{option}={port}"]


def test_graces_fit_into_what_the_platform_waits() -> None:
    pairs = [pair for line in serve_lines() for pair in itertools.pairwise(line)]
    graces = [int(value) for name, value in pairs if name == "--grace"]
    graces += [int(word.partition("=")[2]) for line in triton_lines() for word in line if "exit-timeout" in word]
    assert max(graces) == 60
    for path in MANIFESTS:
        for seconds in find(documents(path), "terminationGracePeriodSeconds"):
            assert seconds > max(graces) + 5  # preStop
    for each in documents(FOLDER / "compose.yaml")[0]["services"].values():
        assert int(each.get("stop_grace_period", "70s").removesuffix("s")) > max(graces)


def test_probes_ask_for_what_is_served() -> None:
    served = {getattr(route, "path", None) for route in app.create_app(Idle(), "m").routes}
    for each in containers():
        paths = {name: each[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
        if each["name"] == "serve":
            assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
            assert set(paths.values()) <= served
            assert set(paths.values()) <= access.OPEN  # probes have no key
        else:
            ready = "/v2/health/ready"
            assert paths == {"startup": ready, "liveness": "/v2/health/live", "readiness": ready}
    assert "http://127.0.0.1:8000/ready" in (FOLDER / "Dockerfile.serve").read_text(encoding="utf-8")
    assert "http://127.0.0.1:8000/v2/health/ready" in (FOLDER / "Dockerfile.triton").read_text(encoding="utf-8")
    assert {each["metrics_path"] for each in documents(FOLDER / "prometheus.yaml")[0]["scrape_configs"]} <= served


def exported() -> dict[str, set[str]]:
    """Name what both servers tell: of `serve` what it writes, of Triton what its module says."""
    text = serve_metrics()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    series = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    source = (ROOT / "llmforge/triton/backend/metrics.py").read_text(encoding="utf-8")
    own = set(re.findall(r'"(llmforge_\w+)"', source)) | COUNTERS.keys() | GAUGES.keys()
    own |= {f"{ANSWERS[0]}_total", TTFT[0], ITL[0]}
    own |= {f"{name}_{part}" for name in own if name.endswith("_seconds") for part in ("bucket", "count", "sum")}
    return {"serve": names | series, "triton": own}


class Idle:
    """What the application asks of an engine before anybody asks anything."""

    alive = True
    encoder = SimpleNamespace(most_bytes=1, config=SimpleNamespace(max_context=8), tokenizer=Tokenizer(BPE()))

    def stats(self) -> EngineStats:
        figures = [name for name, each in EngineStats.__dataclass_fields__.items() if each.default is MISSING]
        return EngineStats(**{**dict.fromkeys(figures, 0), "steps": {}, "finished": {}, "notes": ()})  # type: ignore[arg-type]


def serve_metrics() -> str:
    clients = [Client(ApiKey("0123456789abcdef", "search"))]
    told = metrics.ServerMetrics(Idle(), access.ServerState(clients=clients))  # type: ignore[arg-type]
    told.failed()
    told.ended("timeout", 1.0)
    return told.exposition().decode()


@pytest.mark.parametrize("file", ["alerts.yaml", "alerts_test.yaml", "kubernetes/autoscaling.yaml"])
def test_metrics_are_those_of_both_servers(file: str) -> None:
    texts = " ".join(map(str, [*find(documents(FOLDER / file), "expr"), *find(documents(FOLDER / file), "query"),
                               *find(documents(FOLDER / file), "series")]))  # fmt: skip
    used = set(re.findall(r"\bllmforge_\w+", texts))
    assert used
    for server, names in exported().items():
        assert used - names == set(), server


def test_the_dashboard_shows_what_is_told() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    used = set(re.findall(r"\bllmforge_\w+", " ".join([*asked, str(dashboard["templating"])])))
    told = exported()
    assert used - told["serve"] == set()
    assert {name for name in used - told["triton"] if not name.startswith("llmforge_key_")} == set()
    assert COUNTERS.keys() | GAUGES.keys() <= used
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["title"] and panel["description"] for panel in panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_reads_what_the_dashboard_asks(tmp_path: Path) -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "5m")}
        for number, expr in enumerate(asked)
    ]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_threshold_is_a_bound_of_both_histograms() -> None:
    """So that the share above it is exact."""
    (rules,) = find(documents(FOLDER / "alerts.yaml"), "rules")
    (limit,) = [float(rule["expr"].rpartition(">")[2]) for rule in rules if "histogram_quantile" in rule["expr"]]
    source = (ROOT / "llmforge/triton/backend/metrics.py").read_text(encoding="utf-8")
    triton = json.loads(re.search(r"TTFT_BUCKETS = (\[.*?\])", source)[1])  # type: ignore[index]
    assert limit in metrics._TTFT_BUCKETS
    assert limit in triton
    named = re.search(r"bound of both histograms \((.*?) s\)", (FOLDER / "alerts.yaml").read_text())
    assert named is not None
    listed = [float(each) for each in re.findall(r"[\d.]+", named[1])]
    assert np.isin(listed, metrics._TTFT_BUCKETS).all()
    assert np.isin(listed, triton).all()


def test_jobs_of_alerts_and_autoscaling_are_scraped() -> None:
    jobs = {each["job_name"] for each in documents(FOLDER / "prometheus.yaml")[0]["scrape_configs"]}
    asked = re.findall(r'job="([^"]+)"', (FOLDER / "kubernetes/autoscaling.yaml").read_text())
    assert set(asked) == jobs
    assert all(re.fullmatch("llmforge-.+", job) for job in jobs)


def test_images_run_as_nobody_in_particular() -> None:
    for file, user in (("Dockerfile.serve", 10001), ("Dockerfile.triton", 1000)):
        text = (FOLDER / file).read_text()
        assert f"USER {user}:{user}" in text
        assert "HEALTHCHECK" in text
    for path in MANIFESTS:
        for context in find(documents(path), "readOnlyRootFilesystem"):
            assert context is True
    assert {each["securityContext"]["allowPrivilegeEscalation"] for each in every_container()} == {False}


CANARIES = [FOLDER / "kubernetes/canary-rollouts.yaml", FOLDER / "kubernetes/canary-kserve.yaml"]
# The fields of Argo Rollouts 1.8 and KServe 0.15 that the canaries have, from their documentation; pods are checked by
# kubernetes-validate (docs/deploy/README.md).
NAME = {"type": "string", "pattern": "^[a-z0-9-]+$"}
POD = {"type": "object", "required": ["containers", "securityContext"]}
ROLLOUT = {
    "type": "object", "required": ["replicas", "selector", "template", "strategy"], "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer"}, "revisionHistoryLimit": {"type": "integer"}, "selector": {"type": "object"},
        "template": {"type": "object", "required": ["metadata", "spec"], "properties": {"spec": POD}},
        "strategy": {
            "type": "object", "required": ["canary"], "additionalProperties": False,
            "properties": {"canary": {
                "type": "object", "required": ["steps"], "additionalProperties": False,
                "properties": {
                    "stableService": NAME, "canaryService": NAME,
                    "maxSurge": {"type": ["integer", "string"]}, "maxUnavailable": {"type": ["integer", "string"]},
                    "steps": {"type": "array", "minItems": 1, "items": {"oneOf": [
                        {"type": "object", "required": ["setWeight"], "additionalProperties": False,
                         "properties": {"setWeight": {"type": "integer", "minimum": 0, "maximum": 100}}},
                        {"type": "object", "required": ["analysis"], "additionalProperties": False,
                         "properties": {"analysis": {"type": "object", "required": ["templates"], "properties": {
                             "templates": {"type": "array", "items": {
                                 "type": "object", "required": ["templateName"], "additionalProperties": False,
                                 "properties": {"templateName": NAME}}}}}}},
                    ]}},
                },
            }},
        },
    },
}  # fmt: skip
JOB = {
    "type": "object", "required": ["backoffLimit", "template"], "additionalProperties": False,
    "properties": {
        "backoffLimit": {"const": 0}, "activeDeadlineSeconds": {"type": "integer"},
        "template": {"type": "object", "required": ["spec"], "properties": {
            "spec": {**POD, "properties": {"restartPolicy": {"const": "Never"}}}}},
    },
}  # fmt: skip
ANALYSIS = {
    "type": "object", "required": ["metrics"], "additionalProperties": False,
    "properties": {"metrics": {"type": "array", "minItems": 1, "items": {
        "type": "object", "required": ["name", "provider"], "additionalProperties": False,
        "properties": {
            "name": NAME, "count": {"type": "integer"}, "failureLimit": {"type": "integer"},
            "provider": {"type": "object", "required": ["job"], "additionalProperties": False, "properties": {
                "job": {"type": "object", "required": ["spec"], "properties": {"spec": JOB}}}},
        },
    }}},
}  # fmt: skip
INFERENCE = {
    "type": "object", "required": ["predictor"], "additionalProperties": False,
    "properties": {"predictor": {
        **POD, "properties": {"canaryTrafficPercent": {"type": "integer", "minimum": 0, "maximum": 100}},
        "required": ["canaryTrafficPercent", *POD["required"]],
    }},
}  # fmt: skip
SCHEMAS = {"Rollout": ROLLOUT, "AnalysisTemplate": ANALYSIS, "InferenceService": INFERENCE, "Job": JOB}


def test_canaries_have_the_fields_of_their_kinds() -> None:
    seen = set()
    for path in CANARIES:
        for each in documents(path):
            if each["kind"] in SCHEMAS:
                jsonschema.validate(each["spec"], SCHEMAS[each["kind"]])
                seen.add(each["kind"])
    assert seen == SCHEMAS.keys()


def test_a_canary_is_decided_by_the_exit_code_of_shadow() -> None:
    """The job of Rollouts is the command itself; that of KServe gives all traffic at 0, and none at any other code."""
    rollouts = documents(CANARIES[0])
    rollout, analysis = rollouts[0]["spec"]["strategy"]["canary"], rollouts[-1]
    (job,) = find(analysis, "job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = parse([*container["command"][1:], *container["args"]]).params
    services = {each["metadata"]["name"] for each in rollouts if each["kind"] == "Service"}
    assert services == {rollout["stableService"], rollout["canaryService"]}
    assert (given["a"], given["b"]) == (f"http://{rollout['stableService']}", f"http://{rollout['canaryService']}")
    assert {each["templateName"] for each in rollout["steps"][-1]["analysis"]["templates"]} == {
        analysis["metadata"]["name"]
    }
    assert given["seconds"] < job["spec"]["activeDeadlineSeconds"]
    (kserve_job,) = [each for each in documents(CANARIES[1]) if each["kind"] == "Job"]
    pod = kserve_job["spec"]["template"]["spec"]
    script = pod["initContainers"][0]["args"][0].replace("\\\n", " ")
    line = next(line for line in script.splitlines() if line.startswith("llmforge "))
    given = parse(shlex.split(line)[1:]).params
    assert (given["trace"], given["gates"]) == (Path("/shadow/trace.jsonl"), Path("/shadow/gates.yaml"))
    assert given["seconds"] < kserve_job["spec"]["activeDeadlineSeconds"]


@pytest.mark.parametrize(("code", "percent"), [(0, 100), (3, 0), (4, 0), (8, 0)])
def test_the_job_of_kserve_ends_its_canary(code: int, percent: int, tmp_path: Path) -> None:
    """Its script with a kubectl that writes down what it was told."""
    (job,) = [each for each in documents(CANARIES[1]) if each["kind"] == "Job"]
    script = job["spec"]["template"]["spec"]["containers"][0]["args"][0].replace("/tmp/", f"{tmp_path}/")
    (tmp_path / "code").write_text(f"{code}\n")
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/told\n')
    (tmp_path / "kubectl").chmod(0o755)
    done = subprocess.run(["sh", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    assert done.returncode == code
    told = (tmp_path / "told").read_text().splitlines()
    assert told[:3] == ["patch", "inferenceservice", "llmforge"]
    assert json.loads(told[-1]) == {"spec": {"predictor": {"canaryTrafficPercent": percent}}}


def test_what_the_dockerfile_copies_is_what_pip_builds_from() -> None:
    copied = re.findall(r"^COPY ([^-].*) \S+$", (FOLDER / "Dockerfile.serve").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert {"pyproject.toml", "constraints.txt", "llmforge", *wheels.MAPPED} <= set(names)
    assert [name for name in names if not (ROOT / name).exists()] == []
    extras = re.search(r"'\.\[(.*?)\]'", (FOLDER / "Dockerfile.serve").read_text())
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{name} = [" in project for name in extras[1].split(","))


def test_the_table_names_every_engine() -> None:
    text = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)) == set(PROVIDERS)
    assert set(re.findall(r"`((?:\w+/)?[\w.-]+\.(?:yaml|yml|json)|Dockerfile\.\w+)`", text)) == {
        path.relative_to(FOLDER).as_posix() for path in FILES if path.name != "README.md"
    }
