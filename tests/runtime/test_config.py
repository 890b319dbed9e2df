"""`runtime.json`: written, read back, and every way in which it can be wrong."""

from __future__ import annotations

import dataclasses
import json
import os

import onnxruntime
import pytest

from llmforge import native
from llmforge.base.cores import _quota
from llmforge.base.errors import EnvironmentLacks, InputError, VersionMismatch
from llmforge.runtime.config import (
    Capture,
    DeviceFacts,
    GraphPlan,
    PlanFacts,
    ProfileFacts,
    RuntimeConfig,
    SessionConfig,
    SessionOptions,
    physical_cores,
)
from llmforge.runtime.signature import CacheInput

CONFIG = RuntimeConfig(
    format=3,
    onnxruntime=onnxruntime.__version__,
    kernels=None,
    max_context=128,
    max_batch=4,
    vocabulary=100,
    eos_token_ids=(1, 2),
    bos_token_id=None,
    caches=(CacheInput("past_key_values.0.key", "int8", 2, 16),),
    session=SessionOptions(threads=None, optimize=True, entries={"session.x": "1"}),
)
CUDA = dataclasses.replace(
    CONFIG,
    provider="cuda",
    provider_options={"arena_extend_strategy": "kSameAsRequested"},
    buckets=(1, 2, 4),
    device=DeviceFacts(sm=89, memory_bytes=1 << 30),
    graphs=GraphPlan("require", (Capture(1, 4, 128), Capture(2, 2, 128))),
)
PLAN = dataclasses.replace(
    CONFIG,
    onnxruntime=None,
    provider="tensorrt-rtx",
    device=DeviceFacts(sm=120, memory_bytes=1 << 30),
    plan=PlanFacts("tensorrt_rtx", "1.7.1.116", "model.plan", (ProfileFacts("prefill", 1, 512),)),
)


@pytest.mark.parametrize("config", [CONFIG, CUDA, PLAN], ids=lambda config: config.provider)
def test_what_is_written_is_read(tmp_path, config):
    path = tmp_path / "runtime.json"
    path.write_text(config.to_json())
    assert RuntimeConfig.read(path) == config
    config.check_versions()


def test_what_runs_an_engine_is_named_as_pip_knows_it():
    assert CONFIG.requires == {"onnxruntime": onnxruntime.__version__}
    assert CUDA.requires == {"onnxruntime-gpu": onnxruntime.__version__}
    assert PLAN.requires == {"tensorrt-rtx": "1.7.1.116"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_context": "128"}, 'max_context is "128"; expected int'),
        ({"max_batch": True}, "max_batch is true; expected int"),
        ({"bos_token_id": 1.0}, r"bos_token_id is 1\.0; expected int \| None"),
        ({"eos_token_ids": [1, "2"]}, "eos_token_ids is"),
        ({"eos_token_ids": 1}, "eos_token_ids is 1"),
        ({"caches": {}}, "caches is {}"),
        ({"caches": [3]}, r"caches\[0\]: int; expected an object"),
        ({"caches": [{"name": "k", "dtype": "int8", "kv_heads": 2}]}, r"caches\[0\]: head_dim missing"),
        ({"session": {"threads": None, "optimize": 1, "entries": {}}}, "session: optimize is 1; expected bool"),
        ({"session": {"threads": None, "optimize": True, "entries": {"a": 1}}}, "session: entries is"),
        ({"session": []}, r"session is \[\]"),
        ({"drafts": 3}, "unknown drafts; known: format, onnxruntime, kernels, max_context"),
        ({"format": 2}, "format 2; this llmforge reads format 3"),
        ({"provider": "gpu"}, 'provider is "gpu"; expected one of cpu, cuda, tensorrt, tensorrt-rtx'),
        (
            {"provider_options": {"device_id": 0}},
            r"provider_options is {\"device_id\": 0}; expected Mapping\[str, str\]",
        ),
        ({"plan": {}}, "plan: file, module, profiles, version missing"),
        ({"device": {"sm": 89, "memory_bytes": 1}}, "device makes no sense where provider is cpu"),
        ({"provider": "cuda"}, "device is missing where provider is cuda"),
        ({"buckets": [4, 2]}, r"buckets is \[4, 2\]; expected numbers of rows, ascending"),
        ({"graphs": {"mode": "must", "captures": []}}, 'graphs: mode is "must"; expected one of require, allow, off'),
        (
            {"graphs": {"mode": "off", "captures": [{"id": 1, "batch": 1}]}},
            r"graphs\.captures\[0\]: length missing",
        ),
        (
            {"graphs": {"mode": "off", "captures": [{"id": 1, "batch": b, "length": 8} for b in (1, 2)]}},
            "expected captures with unique ids",
        ),
    ],
)
def test_wrong_entries_are_refused(tmp_path, change, message):
    path = tmp_path / "runtime.json"
    path.write_text(json.dumps({**json.loads(CONFIG.to_json()), **change}))
    with pytest.raises(InputError, match=message):
        RuntimeConfig.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"\xff\xff", "not valid JSON"), (b"[]", "list; expected an object")],
)
def test_what_is_no_object_is_refused(tmp_path, content, message):
    path = tmp_path / "runtime.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        RuntimeConfig.read(path)


def test_a_missing_entry_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "engine" / "runtime.json"
    with pytest.raises(InputError, match=f"{tmp_path} is not an artifact"):
        RuntimeConfig.read(path)
    data = json.loads(CONFIG.to_json())
    del data["max_batch"], data["caches"]
    path.parent.mkdir()
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match="caches, max_batch missing"):
        RuntimeConfig.read(path)


def test_patch_releases_are_accepted_and_minor_ones_are_not():
    major, minor, patch = onnxruntime.__version__.split(".")[:3]
    dataclasses.replace(CONFIG, onnxruntime=f"{major}.{minor}.{int(patch) + 5}").check_versions()
    with pytest.raises(VersionMismatch, match=rf"onnxruntime {major}\.{int(minor) + 1}\.0"):
        dataclasses.replace(CONFIG, onnxruntime=f"{major}.{int(minor) + 1}.0").check_versions()


def test_threads_come_from_the_caller_then_the_engine_then_the_machine():
    fixed = SessionOptions(threads=5, optimize=False, entries={})
    assert fixed.resolve() == SessionConfig(5, False, {})
    assert fixed.resolve(2).threads == 2
    assert CONFIG.session.resolve().threads == physical_cores() <= len(os.sched_getaffinity(0))
    assert physical_cores() >= 1


@pytest.mark.parametrize(
    ("content", "cpus"), [("max 100000\n", 16), ("250000 100000\n", 2), ("50000 100000\n", 1), (None, 16)]
)
def test_a_quota_limits_the_cores(tmp_path, content, cpus):
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert _quota(tmp_path / "cpu.max", 16) == cpus


def test_kernels_of_another_version_and_missing_ones_are_refused(monkeypatch):
    dataclasses.replace(CONFIG, kernels=native.VERSION).check_versions()
    with pytest.raises(VersionMismatch, match=f"version {native.VERSION + 1} of the CPU kernels"):
        dataclasses.replace(CONFIG, kernels=native.VERSION + 1).check_versions()
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(EnvironmentLacks, match="not compiled"):
        dataclasses.replace(CONFIG, kernels=native.VERSION).check_versions()
    CONFIG.check_versions()  # which needs none
