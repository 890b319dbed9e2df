"""`llmforge serve` through OpenAI's own client and plain sockets, on a free port of loopback."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from llmforge import serving as runtime
from llmforge.artifact import Artifact
from llmforge.base.errors import EnvironmentLacks, InputError, Unavailable
from llmforge.cli import cli
from llmforge.measure.load import BenchReport
from llmforge.serving import Chunk, Engine, EngineOptions, Receiver, Request, Runner, Sampling
from llmforge.serving import http as serve
from llmforge.serving.http.server import make_server

from ...samples.small_artifact import CONTEXT, SLOTS, publish_small

PROMPT = "If the file does not exist,"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("artifacts"), sample_checkpoint)


@pytest.fixture(scope="module")
def runner(small: Artifact) -> Runner:
    return runtime.load(small.path)


@contextlib.contextmanager
def serving(engine: Any) -> Iterator[str]:
    """Serve an engine from a thread; yield HOST:PORT."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = make_server(serve.create_app(engine, "small"), serve.Address(grace_s=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def engine(runner: Runner) -> Iterator[Engine]:
    with Engine(runner) as running:
        yield running


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


@contextlib.contextmanager
def client_of(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address) as client:
        yield client


@pytest.fixture
def slow(small: Artifact) -> Iterator[Engine]:
    """An engine of its own, whose steps take 10 ms, with one place in its queue."""
    runner = runtime.load(small.path)
    step = runner.session.step

    def slowed(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return step(*arguments, **options)

    runner.session.step = slowed  # type: ignore[method-assign]
    with Engine(runner, EngineOptions(max_queue=1)) as running:
        yield running


def alone(runner: Runner, prompt: str | list[int], **sampling: Any) -> tuple[str, str | None]:
    chunks = list(runner.generate(prompt, Sampling(**sampling)))
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


def post(address: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, content


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, content


def wait_until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


# What is answered


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("small", "llmforge")
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="model 'gpt' is not served here; this is 'small'"):
        client.models.retrieve("gpt")


def test_a_text_is_completed_as_the_runner_does(client: openai.OpenAI, runner: Runner) -> None:
    made = client.completions.create(model="small", prompt=PROMPT, max_tokens=12, temperature=0)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason) == alone(runner, PROMPT, max_tokens=12)
    assert choice.text
    assert made.usage is not None
    prompt = len(runner.encode(PROMPT))
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (
        prompt,
        12,
        prompt + 12,
    )
    assert (made.object, made.model) == ("text_completion", "small")


def test_without_a_limit_a_completion_has_16_tokens_and_a_chat_what_fits(client: openai.OpenAI, runner: Runner) -> None:
    endless: Any = {"ignore_eos": True}
    text = client.completions.create(model="small", prompt=PROMPT, extra_body=endless)
    chat = client.chat.completions.create(model="small", messages=MESSAGES, extra_body=endless)
    assert text.usage is not None
    assert chat.usage is not None
    assert text.usage.completion_tokens == 16
    assert chat.usage.total_tokens == CONTEXT
    assert chat.choices[0].finish_reason == "length"


def test_prompts_are_texts_or_token_ids_one_or_several(client: openai.OpenAI, runner: Runner) -> None:
    ids = runner.encode(PROMPT)
    greedy: Any = {"model": "small", "max_tokens": 6, "temperature": 0}
    expected = alone(runner, PROMPT, max_tokens=6)[0]
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        assert [choice.text for choice in client.completions.create(prompt=prompt, **greedy).choices] == [expected]
    several = client.completions.create(prompt=[PROMPT, "Another"], **greedy)
    assert [choice.text for choice in several.choices] == [expected, alone(runner, "Another", max_tokens=6)[0]]
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.usage is not None
    assert several.usage.prompt_tokens == len(ids) + len(runner.encode("Another"))


def test_a_conversation_goes_through_the_template(client: openai.OpenAI, runner: Runner) -> None:
    made = client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=12, temperature=0)
    expected = alone(runner, runner.encode_chat(MESSAGES), max_tokens=12)
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", *expected)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    again = client.chat.completions.create(model="small", messages=parts, max_completion_tokens=12, temperature=0)
    assert again.choices[0].message.content == expected[0]


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI, runner: Runner) -> None:
    stream = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *events, last = list(stream)
    expected = alone(runner, runner.encode_chat(MESSAGES), max_tokens=12)
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected[0]
    assert len(events) > 6
    assert [event.choices[0].delta.role for event in events] == ["assistant"] + [None] * (len(events) - 1)
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len({event.id for event in (*events, last)}) == 1
    assert (last.choices, all(event.usage is None for event in events)) == ([], True)
    assert last.usage is not None
    assert last.usage.completion_tokens == 12


def test_a_stream_on_the_wire_is_events_that_end_with_done(address: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
    status, headers, content = post(address, "/v1/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])
    assert "usage" not in events[0]


def test_16_streams_at_once_are_what_each_is_alone(address: str, runner: Runner, engine: Engine) -> None:
    prompts = [f"{PROMPT} {i} " + "more " * i for i in range(16)]
    before = engine.stats()
    ready = threading.Barrier(len(prompts), timeout=60)  # a client takes longer to make than a short answer

    def ask(prompt: str) -> str:
        with client_of(address) as client:
            ready.wait()
            stream = client.completions.create(model="small", prompt=prompt, max_tokens=40, temperature=0, stream=True)
            return "".join(event.choices[0].text for event in stream)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, prompts))
    assert together == [alone(runner, prompt, max_tokens=40)[0] for prompt in prompts]
    steps = {rows: count - before.steps.get(rows, 0) for rows, count in engine.stats().steps.items()}
    assert steps.get(SLOTS, 0) > 0, "they did run together"


def test_characters_of_several_tokens_are_never_broken(client: openai.OpenAI, runner: Runner) -> None:
    pytest.importorskip("llguidance")
    pattern = "[🦙日本語👩‍💻é]{12}"
    assert len(runner.encode("🦙")) > 1
    form: Any = {"guided_regex": pattern}
    stream = client.completions.create(
        model="small", prompt="Emoji:", max_tokens=200, seed=3, stream=True, extra_body=form
    )
    pieces = [event.choices[0].text for event in stream]
    text = "".join(pieces)
    assert re.fullmatch(pattern, text)
    assert "\N{REPLACEMENT CHARACTER}" not in text
    assert len({*text}) > 3
    assert len([piece for piece in pieces if piece]) > 3
    whole = client.completions.create(model="small", prompt="Emoji:", max_tokens=200, seed=3, extra_body=form)
    assert whole.choices[0].text == text


def test_several_answers_to_one_prompt_are_of_several_minds(client: openai.OpenAI, runner: Runner) -> None:
    asked: Any = {"model": "small", "messages": MESSAGES, "n": 3, "max_tokens": 8, "seed": 5}
    made = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in made.choices]
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(runner.encode_chat(MESSAGES))  # once
    streamed = ["", "", ""]
    for event in client.chat.completions.create(stream=True, **asked):
        streamed[event.choices[0].index] += event.choices[0].delta.content or ""
    assert streamed == texts  # equal seeds
    other = client.chat.completions.create(**{**asked, "seed": 6})
    assert [choice.message.content for choice in other.choices] != texts


def test_answers_without_a_seed_differ_and_greedy_ones_do_not(client: openai.OpenAI) -> None:
    def ask(**sampling: Any) -> str:
        return client.completions.create(model="small", prompt=PROMPT, max_tokens=8, **sampling).choices[0].text

    assert len({ask() for _ in range(3)}) > 1
    assert len({ask(temperature=0) for _ in range(3)}) == 1


def test_stop_strings_end_an_answer_before_them(client: openai.OpenAI, runner: Runner) -> None:
    whole, _ = alone(runner, PROMPT, max_tokens=12)
    stop = whole[8:11]
    made = client.completions.create(model="small", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop])
    assert (made.choices[0].text, made.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_an_answer_can_be_held_to_a_schema(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema: Any = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=150, seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )  # fmt: skip
    assert isinstance(json.loads(made.choices[0].message.content or "")["ok"], bool)


# Log probabilities


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_log_probabilities_of_a_chat_are_the_models(client: openai.OpenAI, runner: Runner) -> None:
    asked: Any = {"model": "small", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    assert plain.choices[0].logprobs is None
    made = client.chat.completions.create(logprobs=True, top_logprobs=3, **asked)
    assert made.choices[0].logprobs is not None
    content = made.choices[0].logprobs.content
    assert content is not None
    assert "".join(token.token for token in content) == made.choices[0].message.content
    assert [bytes(token.bytes or ()).decode() for token in content] == [token.token for token in content]
    expected = np.sort(log_softmax(runner.logits(runner.encode_chat(MESSAGES))[-1]))[::-1]
    assert [top.logprob for top in content[0].top_logprobs] == pytest.approx(expected[:3].tolist(), abs=1e-4)
    assert content[0].logprob == content[0].top_logprobs[0].logprob  # greedy
    streamed = client.chat.completions.create(logprobs=True, top_logprobs=3, stream=True, **asked)
    pieces = [event.choices[0].logprobs for event in streamed]
    assert [token for piece in pieces if piece is not None for token in piece.content or ()] == content


def test_log_probabilities_of_a_text_have_its_own_shape(client: openai.OpenAI) -> None:
    made = client.completions.create(model="small", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2)
    (choice,) = made.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert "".join(tokens) == choice.text
    assert offsets == [len("".join(tokens[:i])) for i in range(4)]
    for token, value, top in zip(
        tokens, choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
    ):
        assert len(top) == 2
        assert top[token] == value == max(top.values())


def test_the_example_of_the_documents_runs(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    example, _ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example.replace("127.0.0.1:8000", address), names)
    names["client"].close()
    assert "32" in capsys.readouterr().out


# What is refused


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", [], "the body is not a JSON object"),
        ("completions", {}, "prompt: expected a string"),
        ("completions", {"prompt": []}, "prompt: expected a string"),
        ("completions", {"prompt": [1, "a"]}, "prompt: expected a string"),
        ("completions", {"prompt": ""}, "the prompt is empty"),
        ("completions", {"prompt": [99999]}, "token id 99999; the vocabulary has 8192"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature -1"),
        ("completions", {"prompt": "a", "tools": [{}]}, "tools: this server does not support it"),
        ("completions", {"prompt": "a", "n": 0}, "n 0"),
        ("completions", {"prompt": ["a", "b"], "n": 65}, "at most 128 answers"),
        ("completions", {"prompt": "a", "stream": "yes"}, "stream 'yes': expected true or false"),
        ("completions", {"prompt": "a", "stream_options": {}}, "stream_options requires stream"),
        ("completions", {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "an object with include_usage"),
        ("completions", {"prompt": "word " * CONTEXT}, f"this artifact allows at most {CONTEXT - 1}"),
        ("chat/completions", {}, "messages: expected a list"),
        ("chat/completions", {"messages": ["hello"]}, "messages[0]: expected an object"),
        ("chat/completions", {"messages": [{"role": "user", "content": 1}]}, "messages[0]: content is int"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content parts must be text",
        ),
        ("chat/completions", {"messages": MESSAGES, "model": 7}, "model 7 is not served here"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(address: str, engine: Engine, path: str, body: Any, says: str) -> None:
    if isinstance(body, dict) and "stream_options" in body and not body["stream_options"]:
        body = {**body, "stream_options": {"include_usage": True}}
    status, _, content = post(address, f"/v1/{path}", body)
    error = json.loads(content)["error"]
    assert status == (404 if "model" in says and "served" in says else 400)
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert engine.alive


def test_what_clients_send_along_and_asks_for_nothing_is_accepted(address: str) -> None:
    harmless = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": False, "modalities": ["text"], "best_of": 1,
        "echo": False, "suffix": None, "stream_options": None, "user": "somebody",
    }  # fmt: skip
    for path, asked in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
        assert post(address, f"/v1/{path}", {**asked, **harmless, "max_tokens": 1})[0] == 200
    for name, value in (("echo", True), ("best_of", True), ("tool_choice", "required"), ("modalities", ["audio"])):
        status, _, content = post(address, "/v1/completions", {"prompt": "a", name: value})
        assert status == 400
        assert json.loads(content)["error"]["param"] == name


def test_a_history_may_hold_calls_of_tools(address: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    assert post(address, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})[0] == 200
    for wrong in ("x", [{}], [{"function": {}}], []):
        body = {"messages": [{"role": "assistant", "content": None, "tool_calls": wrong}]}
        status, _, content = post(address, "/v1/chat/completions", body)
        assert status == 400
        assert "messages[0]" in json.loads(content)["error"]["message"]


def test_bodies_that_are_no_json_are_refused(address: str) -> None:
    assert post(address, "/v1/completions", b"{")[0] == 400
    assert post(address, "/v1/completions", b"\xff")[0] == 400
    assert post(address, "/v1/completions", b"[" * 9_000)[0] == 400
    assert post(address, "/v1/completions", b"[" * 100_000)[0] == 413
    status, _, content = post(address, "/v1/completions", {"prompt": "a"}, **{"Content-Type": "text/plain"})
    assert status == 415
    assert "application/json" in json.loads(content)["error"]["message"]
    status, _, content = post(address, "/v1/completions", b" " * (16 * 2**20 + 1))
    assert status == 413
    status, _, content = post(address, "/v1/completions", gzip.compress(b"{}"), **{"Content-Encoding": "gzip"})
    assert status == 415
    assert "'gzip' is not supported" in json.loads(content)["error"]["message"]
    for path, status, says in (
        ("/v1/completions", 405, "/v1/completions does not take GET"),
        ("/v1/nothing", 404, "there is no /v1/nothing here"),
        ("/v1/models/x", 404, "model 'x' is not served here"),
    ):
        got, content = get(address, path)
        assert got == status
        assert says in json.loads(content)["error"]["message"]
    assert json.loads(content)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("body", ['{"prompt": "\\ud800"}', '{"prompt": "a", "stop": "\\udc00"}', '{"\\ud800": 1}'])
def test_halves_of_characters_are_refused(address: str, body: str) -> None:
    status, _, content = post(address, "/v1/completions", body.encode())
    assert status == 400
    assert "unpaired surrogate" in json.loads(content)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": 3}, "prompt"),
        ("completions", {"prompt": "a", "model": "other"}, "model"),
        ("chat/completions", {"messages": []}, "messages"),
        ("completions", [], None),
    ],
)
def test_errors_name_their_parameter(address: str, path: str, body: Any, parameter: str | None) -> None:
    status, _, content = post(address, f"/v1/{path}", body)
    assert status in {400, 404}
    assert json.loads(content)["error"]["param"] == parameter


def test_tokens_are_made_text_again(address: str) -> None:
    tokens = json.loads(post(address, "/tokenize", {"prompt": PROMPT})[2])["tokens"]
    assert json.loads(post(address, "/detokenize", {"tokens": tokens})[2]) == {"prompt": PROMPT}
    for wrong in ({}, {"tokens": "a"}, {"tokens": [-1]}, {"tokens": [10**9]}, {"tokens": [True]}):
        assert post(address, "/detokenize", wrong)[0] == 400


def test_a_full_queue_is_429_and_leaves_nothing_behind(slow: Engine) -> None:
    with serving(slow) as address, client_of(address) as client:
        asked: Any = {"model": "small", "prompt": PROMPT, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(n=SLOTS, max_tokens=200, stream=True, **asked)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
            client.completions.create(n=2, max_tokens=2, **asked)  # one has a place, one has none
        assert caught.value.status_code == 429
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.body is not None
        assert caught.value.body["code"] == "queue_full"  # type: ignore[index]
        wait_until(lambda: slow.stats().waiting == 0)
        stream.close()
        assert client.completions.create(max_tokens=2, **asked).usage.completion_tokens == 2  # type: ignore[union-attr]


# Clients that leave


def test_a_stream_that_is_closed_frees_its_slots(slow: Engine) -> None:
    with serving(slow) as address, client_of(address) as client:
        stream = client.completions.create(
            model="small", prompt=PROMPT, max_tokens=240, n=2, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        wait_until(lambda: slow.stats().running == 2)
        stream.close()
        wait_until(lambda: slow.stats().running == 0)
        assert slow.stats().finished == {"cancelled": 2}
        assert 'llmforge_answers_total{finish_reason="cancelled"} 2.0' in get(address, "/metrics")[1]
        assert slow.stats().output_tokens < 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_answer_frees_its_slot(slow: Engine, stream: bool) -> None:
    with serving(slow) as address:
        connection = http.client.HTTPConnection(address, timeout=60)
        body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: slow.stats().running == 1)
        connection.close()
        wait_until(lambda: slow.stats().running == 0)
        assert slow.stats().finished == {"cancelled": 1}


def test_a_reader_that_is_slow_holds_nobody_up(address: str, runner: Runner) -> None:
    connection = http.client.HTTPConnection(address, timeout=60)
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text, pauses = "", 10
    for line in response:
        if line.startswith(b"data: {"):
            text += json.loads(line[6:])["choices"][0]["text"]
            if pauses:
                pauses -= 1
                time.sleep(0.02)
    connection.close()
    assert text == alone(runner, PROMPT, max_tokens=60, ignore_eos=True)[0]


# When things go wrong


def test_an_answer_past_its_deadline_is_504_and_in_a_stream_an_error(small: Artifact) -> None:
    with Engine(runtime.load(small.path), EngineOptions(timeout_s=0.01)) as engine, serving(engine) as address:
        body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "n": SLOTS}
        status, _, content = post(address, "/v1/completions", body)
        assert (status, json.loads(content)["error"]["type"]) == (504, "timeout")
        status, _, content = post(address, "/v1/completions", {**body, "stream": True})
        *_, error, done, end = content.decode().split("\n\n")
        assert (status, done, end) == (200, "data: [DONE]", "")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
        assert 'llmforge_answers_total{finish_reason="timeout"}' in get(address, "/metrics")[1]


class FailingEngine:
    """Gives one token and then an error."""

    def __init__(self, runner: Runner, error: Exception) -> None:
        self.encoder, self.options = runner, EngineOptions()
        self.alive = True
        self.error: Any = error

    def submit(self, request: Request, receive: Receiver) -> object:
        receive(Chunk("Well", 7))
        receive(self.error)
        return object()

    def cancel(self, ticket: object) -> None:
        """Nothing is left to cancel."""

    def stats(self) -> Any:
        return SimpleNamespace(waiting=0)


@pytest.mark.parametrize(
    ("error", "status"), [(Unavailable("the engine failed"), 503), (InputError("NaN or infinite logits"), 500)]
)
def test_an_error_of_the_engine_reaches_the_client(runner: Runner, error: Exception, status: int) -> None:
    failing = FailingEngine(runner, error)
    with serving(failing) as address, client_of(address) as client:
        with pytest.raises(openai.InternalServerError, match=str(error)) as caught:
            client.completions.create(model="small", prompt=PROMPT)
        assert caught.value.status_code == status
        texts = []
        with pytest.raises(openai.APIError, match=str(error)):
            texts += [e.choices[0].text for e in client.completions.create(model="small", prompt=PROMPT, stream=True)]
        assert get(address, "/health")[0] == get(address, "/ready")[0] == 200
        failing.alive = False
        assert get(address, "/health")[0] == get(address, "/ready")[0] == 503


# Figures and tools


def test_metrics_count_what_was_done(runner: Runner) -> None:
    with Engine(runner) as engine, serving(engine) as address:
        body = {"prompt": PROMPT, "max_tokens": 5, "n": 2, "ignore_eos": True}
        assert post(address, "/v1/completions", body)[0] == 200
        assert post(address, "/v1/completions", {"prompt": ""})[0] == 400
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(get(address, "/metrics")[1])
            for sample in family.samples
        }
    assert samples["llmforge_answers_total", "length"] == 2
    assert samples["llmforge_answers_total", "invalid"] == 1
    assert samples[("llmforge_time_to_first_token_seconds_count",)] == 2
    assert samples[("llmforge_inter_token_latency_seconds_count",)] == 8
    assert samples[("llmforge_request_seconds_count",)] == 2
    assert 0 < samples[("llmforge_time_to_first_token_seconds_sum",)] <= samples[("llmforge_request_seconds_sum",)] < 60
    assert samples[("llmforge_output_tokens_total",)] == 10
    assert samples[("llmforge_prompt_tokens_total",)] == 2 * len(runner.encode(PROMPT))
    assert samples[("llmforge_requests_running",)] == samples[("llmforge_kv_tokens_used",)] == 0
    assert samples[("llmforge_slots",)] == SLOTS
    assert samples[("llmforge_kv_tokens_capacity",)] == SLOTS * CONTEXT
    assert sum(value for name, value in samples.items() if name[0] == "llmforge_decode_steps_total") >= 4


def test_texts_and_conversations_are_tokenized(address: str, runner: Runner) -> None:
    _, _, content = post(address, "/tokenize", {"prompt": PROMPT})
    ids = runner.encode(PROMPT)
    assert json.loads(content) == {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}
    _, _, content = post(address, "/tokenize", {"messages": MESSAGES})
    assert json.loads(content)["tokens"] == runner.encode_chat(MESSAGES)
    for wrong in ({}, {"prompt": 1}, {"prompt": "a", "messages": MESSAGES}, {"messages": []}, []):
        assert post(address, "/tokenize", wrong)[0] == 400


def test_bench_measures_an_endpoint(address: str, small: Artifact) -> None:
    result = CliRunner().invoke(
        cli, ["bench", str(small.path), "--url", f"http://{address}", "--concurrency", "2", "--requests", "4",
              "--prompt-tokens", "8", "--output-tokens", "6", "--json", "--quiet"],
    )  # fmt: skip
    report = BenchReport.model_validate_json(result.stdout)
    (point,) = report.points
    assert (point.figures.completed, point.figures.errors, point.figures.output_tokens) == (4, {}, 24)
    assert report.subject == f"small at http://{address}"
    assert report.engine is None


def test_every_metric_is_documented(address: str) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    families = text_string_to_metric_families(get(address, "/metrics")[1])
    served = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    served = {name for name in served if not name.endswith("_created")}  # when each of them began to count
    known = set(re.findall(r"`(llmforge_\w+)", text))
    elsewhere = {name for name in known if name.startswith("llmforge_key_")}  # where there are keys: test_limits.py
    elsewhere |= {"llmforge_recorded_answers_total", "llmforge_sequences_total", "llmforge_batches_total"} & known
    assert served == known - elsewhere


# The process


def start(artifact: Artifact, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `llmforge serve` on a free port; return it and HOST:PORT from its banner."""
    code = "from llmforge.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(artifact.path), "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    banner = process.stderr.readline()
    match = re.search(r"serves (\S+) \(\w+\) at http://(\S+)/v1: ", banner)
    assert match, banner + process.stderr.read()
    return process, match[2]


def test_the_server_needs_no_build_tools() -> None:
    code = "import sys, llmforge.serving.http; print({'torch', 'transformers', 'onnx', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_sigterm_lets_answers_finish_and_ends_the_process(small: Artifact, runner: Runner) -> None:
    process, address = start(small, "--name", "mine")
    with process, client_of(address) as client:
        assert client.models.list().data[0].id == "mine"
        stream = client.completions.create(  # three times what runs at once: most of it waits
            model="mine", prompt=PROMPT, max_tokens=230, temperature=0, n=3 * SLOTS, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        events = iter(stream)
        texts, reasons = [""] * 3 * SLOTS, []
        for count, event in enumerate(events):
            if count == 0:
                process.send_signal(signal.SIGTERM)
            texts[event.choices[0].index] += event.choices[0].text
            reasons.append(event.choices[0].finish_reason)
        expected, reason = alone(runner, PROMPT, max_tokens=230, ignore_eos=True)
        assert texts == [expected] * 3 * SLOTS
        assert reasons.count(reason) == 3 * SLOTS
        assert process.wait(timeout=20) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


def test_what_is_not_complete_after_the_grace_period_ends_with_an_error(
    tmp_path: Path, sample_checkpoint: Path
) -> None:
    endless = publish_small(tmp_path, sample_checkpoint, context=16_384)
    process, address = start(endless, "--grace", "1")
    with process, client_of(address) as client:
        body: Any = {"ignore_eos": True, "max_tokens": 16_000}
        stream = iter(client.completions.create(model="small", prompt=PROMPT, stream=True, extra_body=body))
        assert next(stream).choices
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        wait_until(lambda: get(address, "/ready")[0] == 503)
        status, headers, _ = post(address, "/v1/completions", {"prompt": PROMPT})  # new calls are refused meanwhile
        assert (status, headers["retry-after"]) == (503, "1")
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        assert process.wait(timeout=20) == 0
        assert 1 <= time.monotonic() - began < 10  # 1.3 s where nothing else runs
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_chat_template_and_a_tool_prompt_are_served(small: Artifact, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "ping"}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "tools": [tool]}
    process, address = start(small)
    with process:
        status, _, answer = post(address, "/v1/chat/completions", body)
        process.terminate()
    assert (
        status,
        b"leave tools out, or let the server add the default tool prompt: `llmforge serve --tool-prompt`" in answer,
    ) == (400, True), answer
    other = tmp_path / "other.jinja"
    other.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    process, address = start(small, "--chat-template", str(other), "--tool-prompt")
    with process:
        _, _, tokens = post(address, "/tokenize", {"messages": body["messages"]})
        status, _, answer = post(address, "/v1/chat/completions", body)
        process.terminate()
    assert runtime.load(small.path).tokenizer.decode(json.loads(tokens)["tokens"]) == "[user]Hi\n"
    assert status == 200, answer


@pytest.mark.parametrize("command", [("serve",), ("triton", "-o", "models"), ("run", "Hi", "--chat")])
def test_a_chat_template_with_an_error_is_refused(
    small: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text("{% for m in messages %}\n{% endif %}")
    name, *words = command
    result = CliRunner().invoke(cli, [name, str(small.path), *words, "--chat-template", "mine.jinja"])
    assert result.exit_code == 5, result.output
    assert "error: mine.jinja:2: the chat template has an error: " in result.stderr
    assert "hint: correct the template, or give another one: --chat-template FILE" in result.stderr
    assert not Path("models").exists()


def test_a_port_that_is_taken_is_said_so(small: Artifact) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli, ["serve", str(small.path), "--port", port])
    assert result.exit_code == EnvironmentLacks.exit_code
    assert f"cannot listen on 127.0.0.1 port {port}" in result.stderr
    assert "hint: use --port 0 to pick a free port" in result.stderr


def test_the_server_ends_with_its_engine(small: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runtime.load(small.path)
    engine = Engine(runner)
    statuses: list[int] = []

    def kill(url: str) -> None:
        def broken(*arguments: Any, **options: Any) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(runner.session, "step", broken)
        address = url.removeprefix("http://")
        asker = threading.Thread(target=lambda: statuses.append(post(address, "/v1/completions", {"prompt": "a"})[0]))
        asker.start()
        askers.append(asker)

    askers: list[threading.Thread] = []
    with pytest.raises(Unavailable, match="the engine failed and the server stopped"):
        serve.run(engine, "small", serve.Address(port=0), kill)
    askers[0].join()
    assert statuses == [503]


def test_an_artifact_that_is_none_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", str(tmp_path)])
    assert result.exit_code == 5
