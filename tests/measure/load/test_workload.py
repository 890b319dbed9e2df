"""Loads: equal seeds give equal ones, arrivals are a Poisson process, traces are read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmforge.base.errors import DataError, UsageError
from llmforge.measure.load.workload import (
    LoadRequest,
    RandomPrompts,
    TextPrompts,
    longest,
    make_load,
    poisson,
    read_trace,
)

PROMPTS = RandomPrompts(1000)


def test_equal_seeds_give_equal_loads_and_others_others() -> None:
    def made(seed: int, rate: float | None = 5.0) -> list[LoadRequest]:
        return make_load(PROMPTS, 20, prompt_tokens=12, output_tokens=7, rate=rate, seed=(seed, 1))

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert [request.prompt for request in made(1)] == [request.prompt for request in made(1, rate=None)]
    assert {(len(request.prompt), request.output_tokens) for request in made(1)} == {(12, 7)}
    assert len({request.prompt for request in made(1)}) == 20
    assert all(request.at_s is None for request in made(1, rate=None))


def test_a_prefix_is_shared_and_what_follows_is_not() -> None:
    load = make_load(PROMPTS, 10, prompt_tokens=12, output_tokens=1, prefix_tokens=8)
    assert len({request.prompt[:8] for request in load}) == 1
    assert len({request.prompt[8:] for request in load}) == 10
    assert {len(request.prompt) for request in load} == {12}


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson(8.0, 20_000, np.random.default_rng(3))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # of an exponential distribution
    assert next(request.at_s for request in make_load(PROMPTS, 3, prompt_tokens=1, output_tokens=1, rate=2.0)) == 0


def test_text_is_cut_into_windows() -> None:
    text = TextPrompts(tuple(range(100)), "file")
    windows = [text.take(30, np.random.default_rng(seed)) for seed in range(20)]
    assert all(window == tuple(range(window[0], window[0] + 30)) for window in windows)
    assert len(set(windows)) > 10
    assert text.take(100, np.random.default_rng(0)) == tuple(range(100))
    with pytest.raises(DataError, match="file: 100 tokens; the prompt needs 101"):
        text.take(101, np.random.default_rng(0))


@pytest.mark.parametrize(
    "wrong", [{"count": 0}, {"prompt_tokens": 0}, {"output_tokens": 0}, {"prefix_tokens": 6}, {"rate": 0.0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="expected"):
        make_load(PROMPTS, **{"count": 2, "prompt_tokens": 5, "output_tokens": 1, **wrong})  # type: ignore[arg-type]


def write(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_a_trace_is_replayed_as_it_stands(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trace.jsonl",
        {"at_s": 0, "prompt": "hé", "output_tokens": 3},
        {"at_s": 0.25, "prompt_tokens": 7, "output_tokens": 5},
        {"at_s": 0.25, "prompt_tokens": 7, "output_tokens": 5},
    )
    load = read_trace(file, encode, PROMPTS)
    assert load[0] == LoadRequest((ord("h"), ord("é")), 3, 0.0)
    assert [(len(request.prompt), request.output_tokens, request.at_s) for request in load[1:]] == [(7, 5, 0.25)] * 2
    assert load[1].prompt != load[2].prompt
    assert load == read_trace(file, encode, PROMPTS)
    assert load != read_trace(file, encode, PROMPTS, seed=1)
    assert longest(load) == 12


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ([1], "list; expected"),
        ({}, "has nothing; expected"),
        ({"at_s": 1, "output_tokens": 1}, "has at_s, output_tokens; expected"),
        ({"at_s": 1, "prompt": "a", "prompt_tokens": 1, "output_tokens": 1}, "has at_s, output_tokens, prompt"),
        ({"at_s": -1, "prompt": "a", "output_tokens": 1}, "at_s is -1; expected"),
        ({"at_s": True, "prompt": "a", "output_tokens": 1}, "at_s is true; expected"),
        ({"at_s": 1, "prompt": "", "output_tokens": 1}, 'prompt is ""; expected'),
        ({"at_s": 1, "prompt": "a", "output_tokens": 0}, "output_tokens is 0; expected"),
        ({"at_s": 1, "prompt_tokens": 1.5, "output_tokens": 1}, "prompt_tokens is 1.5; expected"),
        ({"at_s": 0.5, "prompt": "a", "output_tokens": 1}, "at_s 0.5 comes after 0.75"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, entry: object, says: str) -> None:
    file = write(tmp_path / "trace.jsonl", {"at_s": 0.75, "prompt": "a", "output_tokens": 1}, entry)
    with pytest.raises(DataError, match=says) as caught:
        read_trace(file, encode, PROMPTS)
    assert f"{file}:2" in caught.value.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"timestamp": -1}, "timestamp is -1; expected milliseconds"),
        ({"output_length": 0}, "output_length is 0; expected"),
        ({"input_length": None}, "input_length is null; expected"),
        ({"block_size": 0}, "block_size is 0; expected"),
        ({"hash_ids": [1, -2]}, "hash_ids is .*; expected"),
        ({"hash_ids": [1, 2, 3]}, "3 hash_ids of 512 tokens; input_length is 900"),
    ],
)
def test_a_line_that_is_none_of_mooncakes_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    right = {"timestamp": 27482, "input_length": 900, "output_length": 52, "hash_ids": [46, 47]}
    assert len(read_trace(write(tmp_path / "trace.jsonl", right), encode, PROMPTS)[0].prompt) == 900
    file = write(tmp_path / "trace.jsonl", right, {**right, **change})
    with pytest.raises(DataError, match=says) as caught:
        read_trace(file, encode, PROMPTS)
    assert f"{file}:2" in caught.value.message


def test_two_forms_in_one_trace_are_refused(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trace.jsonl",
        {"at_s": 0, "prompt": "a", "output_tokens": 1},
        {"timestamp": 1, "input_length": 3, "output_length": 1},
    )
    with pytest.raises(DataError, match="another form than the lines before it"):
        read_trace(file, encode, PROMPTS)


def test_files_that_hold_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl", encode, PROMPTS)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="contains no requests"):
        read_trace(tmp_path / "empty.jsonl", encode, PROMPTS)
    (tmp_path / "latin.jsonl").write_bytes(b"\xff")
    with pytest.raises(DataError, match="byte 0 is not UTF-8"):
        read_trace(tmp_path / "latin.jsonl", encode, PROMPTS)
    (tmp_path / "half.jsonl").write_text('{"at_s": ')
    with pytest.raises(DataError, match=r"half\.jsonl:1: not valid JSON"):
        read_trace(tmp_path / "half.jsonl", encode, PROMPTS)
