"""What answers tasks: likelihoods against a plain sum, batches against single texts, servers against the engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmforge.base.errors import EnvironmentLacks, InputError, RunFailed, UnsupportedError, UsageError
from llmforge.base.http_server import HttpServer
from llmforge.checkpoint import Checkpoint
from llmforge.measure import scoring
from llmforge.measure.baseline import Baseline
from llmforge.measure.scoring import CheckpointSide, EngineSide, Pair, cut, likelihood
from llmforge.measure.served import ServedSide, connect
from llmforge.serving import Runner, load

from ..models import zoo, zoo_classic
from ..samples import small_artifact
from ..servers.keyed_server import KEY, keyed_server


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Path:
    return small_artifact.publish_small(tmp_path_factory.mktemp("small"), sample_checkpoint).path


@pytest.fixture(scope="module")
def runner(small: Path) -> Runner:
    return load(small)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Contexts and what follows them, of several lengths, two with the same context, one that fills the engine."""
    rng = np.random.default_rng(0)
    shapes = [(1, 1), (7, 3), (40, 12), (3, 30), (255, 2), (20, 1), (9, 9)]
    made: list[Pair] = [
        (ids[:a].tolist(), ids[a:].tolist()) for a, b in shapes for ids in [rng.integers(9, 8000, a + b)]
    ]
    return [*made, (made[1][0], made[6][1])]


def test_a_likelihood_is_the_sum_of_log_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 9, (3, 50)).astype(np.float32)
    tokens = [4, 49, 0]
    exact = sum(
        np.log(np.exp(row[t].astype(float)) / np.exp(row.astype(float)).sum())
        for row, t in zip(logits, tokens, strict=True)
    )
    assert likelihood(logits, tokens) == (pytest.approx(exact, abs=1e-9), False)
    best = logits.argmax(1).tolist()
    assert likelihood(logits, best)[1]
    assert not likelihood(logits, [*best[:2], tokens[2]])[1]
    logits[1, 3] = np.nan
    with pytest.raises(InputError, match="NaN"):
        likelihood(logits, tokens)


def test_text_ends_before_the_first_stop_that_is_reached_and_at_an_end() -> None:
    words = dict(enumerate(["a", "b.", "\n", "c", "<end>"]))

    def text(*tokens: int, until: tuple[str, ...] = ()) -> str:
        return cut(tokens, until, [4], lambda ids: "".join(words[i] for i in ids))

    assert text(0, 1, 2, 3) == "ab.\nc"
    assert text(0, 1, 2, 3, until=("\n", ".")) == "ab"
    assert text(0, 4, 3) == "a"
    assert text(4) == ""


def test_a_batch_gives_each_text_what_it_gets_alone(runner: Runner, pairs: list[Pair]) -> None:
    found = EngineSide(runner, "engine").score(pairs)
    for pair, (value, greedy) in zip(pairs, found, strict=True):
        whole = [*pair[0], *pair[1]]
        alone = likelihood(runner.logits(whole)[len(pair[0]) - 1 : -1], pair[1]) if len(whole) <= 256 else None
        if alone is not None:
            assert (value, greedy) == (pytest.approx(alone[0], abs=1e-3), alone[1])
    assert len({round(value, 2) for value, _ in found}) == len(pairs)


READ_ONCE = {"llama": True, "mistral-window": True, "gpt-oss": True, "qwen3-5": False, "phi3-longrope": False}


@pytest.mark.parametrize("name", READ_ONCE)
def test_a_context_is_read_once_where_what_follows_can_go_on_from_it(name: str, tmp_path: Path) -> None:
    (zoo if name in zoo.ZOO else zoo_classic).write(name, tmp_path)
    baseline = Baseline(Checkpoint.open(tmp_path), threads=1)
    side = CheckpointSide(lambda: baseline, "", 128, (), str)
    rng = np.random.default_rng(0)
    contexts = [rng.integers(9, 200, size).tolist() for size in (11, 3)]
    pairs: list[Pair] = [(contexts[i], rng.integers(9, 200, size).tolist()) for i, size in enumerate((5, 1))]
    pairs += [(contexts[0], rng.integers(9, 200, size).tolist()) for size in (9, 1)] + [(contexts[0], [])]
    expected = []
    for context, text in pairs:
        logits = baseline.logits(np.array([*context, *text]))[len(context) - 1 : -1]
        expected.append(likelihood(logits[: len(text)], text))
    read: list[int] = []
    baseline._model.register_forward_hook(
        lambda module, args, options, out: read.append(out.logits.shape[1]), with_kwargs=True
    )
    found = side.score(pairs)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert found[-1] == (0.0, True)
    # The context's last row, then all that follow at once, filled up to the longest; of the other its last row.
    assert read == ([1, 8, 1] if READ_ONCE[name] else [5, 9, 1, 1, 1])


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt-oss", "qwen3-5"])
def test_texts_that_begin_alike_are_read_and_answered_together_as_each_alone(name: str, tmp_path: Path) -> None:
    (zoo if name in zoo.ZOO else zoo_classic).write(name, tmp_path)
    baseline = Baseline(Checkpoint.open(tmp_path), threads=1)
    side = CheckpointSide(lambda: baseline, "", 128, (), str)
    rng = np.random.default_rng(1)
    begin = rng.integers(9, 200, 7).tolist()
    pairs: list[Pair] = [
        (begin + rng.integers(9, 200, size).tolist(), rng.integers(9, 200, after).tolist())
        for size, after in ((6, 4), (11, 1), (2, 8), (9, 0), (10, 2))
    ]
    alone = [baseline.logits(np.array([*context, *text]))[len(context) - 1 :][: len(text)] for context, text in pairs]
    for each, expected in zip(side.read(pairs, lambda logits, _: logits), alone, strict=True):
        np.testing.assert_allclose(each, expected, atol=2e-5)
    counts = [5, 3, 6, 1, 4]
    found = side.answers_read([context for context, _ in pairs], counts, lambda logits, tokens: logits.copy())
    for (context, _), count, (said, rows) in zip(pairs, counts, found, strict=True):
        whole = baseline.logits(np.array([*context, *said]))[len(context) - 1 : -1]
        assert said == whole.argmax(1).tolist()
        assert len(said) == count
        np.testing.assert_allclose(np.array(rows), whole, atol=2e-5)


def test_batches_hold_texts_of_up_to_twice_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, rows = [50, 10, 20, 21, 9], [1, 1, 3, 1, 1]
    assert list(scoring.alike(lengths, rows, None)) == [[4, 1], [2, 3], [0]]
    assert list(scoring.alike(lengths, rows, 5)) == [[4, 1], [2], [3], [0]]
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 30)
    assert list(scoring.alike([10] * 7, [1] * 7, None)) == [[0, 1, 2], [3, 4, 5], [6]]
    monkeypatch.setattr(scoring, "BATCH", 2)
    assert list(scoring.alike([10] * 3, [1] * 3, None)) == [[0, 1], [2]]
    assert not list(scoring.alike([], [], None))


def test_few_texts_follow_a_context_at_once_where_logits_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts:
        vocabulary = 10

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def following(self, context: tuple[int, ...], texts: list[list[int]]) -> list[np.ndarray]:
            self.sizes.append(len(texts))
            return [np.zeros((len(text), 10), np.float32) for text in texts]

    monkeypatch.setattr(scoring, "BATCH_BYTES", 4 * 10 * 3 * 2)  # two texts of three tokens
    counts = Counts()
    side = CheckpointSide(lambda: counts, "", 64, (), str)  # type: ignore[arg-type,return-value]
    found = side.score([([1], [1, 2, 3])] * 5)
    assert counts.sizes == [2, 2, 1]
    assert found == [(pytest.approx(3 * np.log(0.1)), False)] * 5


def test_logits_after_a_start_are_those_of_the_whole_text(runner: Runner) -> None:
    texts = [list(range(10, 30)), list(range(50, 57))]
    first, second = runner.logits_after(texts, [15, 2])
    np.testing.assert_allclose(first, runner.logits(texts[0])[15:], atol=1e-4)
    np.testing.assert_allclose(second, runner.logits(texts[1])[2:], atol=1e-4)


@contextmanager
def serve(artifact: Path, *options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "llmforge", "serve", str(artifact), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            told: list[str] = []
            while (match := re.search(r"(http://\S+/v1)", "".join(told[-1:]))) is None:
                told.append(server.stderr.readline())
                assert told[-1], "".join(told)  # it ended
            yield match[1]
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        finally:
            server.kill()


def test_a_served_artifact_answers_as_its_engine_does(small: Path, runner: Runner, pairs: list[Pair]) -> None:
    asked = [pair for pair in pairs if len(pair[0]) + len(pair[1]) <= 52]
    engine = EngineSide(runner, "engine")
    with serve(small) as url:
        side = ServedSide(connect(HttpServer(url), None), 256, runner.tokenizer.decode)
        for (value, greedy), (own, likeliest) in zip(side.score(asked), engine.score(asked), strict=True):
            assert (value, greedy) == (pytest.approx(own, abs=1e-3), likeliest)
        assert side.answer(asked[1][0], 12, ["qq"]) == engine.answer(asked[1][0], 12, ["qq"])
        with pytest.raises(RunFailed, match="HTTP 404"):
            ServedSide(connect(HttpServer(url), "another"), 256, runner.tokenizer.decode).score(asked)


class Fake:
    """A server that answers as a function of the path and the body says."""

    def __init__(self, answer: Any) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, found = answer(self.path, body)
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def model(ids: list[int]) -> np.ndarray:
    """Log-probabilities of ten tokens after `ids`."""
    logits = np.random.default_rng(sum(ids)).normal(0, 2, 10)
    return logits - np.log(np.exp(logits).sum())


def decode(ids: list[int]) -> str:
    return "".join("abcdefghij"[i] for i in ids)


def truth(pair: Pair) -> tuple[float, bool]:
    rows = [model([*pair[0], *pair[1][:i]]) for i in range(len(pair[1]))]
    values = [row[token] for row, token in zip(rows, pair[1], strict=True)]
    return float(sum(values)), all(v == row.max() for v, row in zip(values, rows, strict=True))


def completion(body: dict[str, Any], *, echo: bool, biased: bool = False) -> tuple[int, dict[str, Any]]:
    """Answer as an OpenAI endpoint with or without `echo` does; `biased`: its log-probabilities count the bias."""
    ids = body["prompt"]
    if body.get("echo") and not echo:
        return 400, {"error": {"message": "echo: unknown"}}
    rows = [model(ids[:i]) for i in range(1, len(ids))] if body.get("echo") else []
    own = [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)] if rows else []
    last = model(ids)
    raw = last.copy()
    for token, bias in body.get("logit_bias", {}).items():
        last[int(token)] += bias
    new = int(last.argmax())
    shown = last - np.log(np.exp(last - last.max()).sum()) - last.max() if biased else raw
    top = [{decode([int(row.argmax())]): float(row.max())} for row in [*rows, shown]]
    head: list[Any] = [None] if rows else []
    logprobs = {
        "tokens": [decode([i]) for i in (*(ids if rows else ()), new)],
        "token_logprobs": [*head, *own, float(shown[new])],
        "top_logprobs": [*head, *top],
    }
    return 200, {"choices": [{"text": decode([new]), "logprobs": logprobs}]}


PAIRS: list[Pair] = [([1, 2, 3], [4, 5]), ([7], [1, 1, 1]), ([2, 2], [int(model([2, 2]).argmax())])]


@pytest.mark.parametrize("echo", [True, False])
def test_a_server_is_asked_for_whole_prompts_or_token_by_token(echo: bool) -> None:
    asked: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(body)
        return completion(body, echo=echo)

    with Fake(answer) as url:
        found = ServedSide(connect(HttpServer(url), "m"), 64, decode).score(PAIRS)
    assert found == [(pytest.approx(value), greedy) for value, greedy in map(truth, PAIRS)]
    assert found[2][1]
    assert len(asked) == (4 if echo else 1 + 2 + 6)  # with one to try what the server can


def test_log_probabilities_are_read_in_the_shape_of_llama_cpps_server() -> None:
    """It names tokens by their ids, and tells nothing of prompts."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, said = completion(body, echo=False)
        if "error" in said:
            return status, said
        [choice] = said["choices"]
        (name,), (logprob,), (top,) = (choice["logprobs"][key] for key in ("tokens", "token_logprobs", "top_logprobs"))
        ids = {decode([token]): token for token in range(10)}
        told = [{"id": ids[each], "token": each, "logprob": value} for each, value in top.items()]
        content = {"id": ids[name], "token": name, "logprob": logprob, "top_logprobs": told}
        return status, {"choices": [{**choice, "logprobs": {"content": [content]}}]}

    with Fake(answer) as url:
        found = ServedSide(connect(HttpServer(url), "m"), 64, decode).score(PAIRS)
    assert found == [(pytest.approx(value), greedy) for value, greedy in map(truth, PAIRS)]


def test_a_server_whose_log_probabilities_count_the_bias_is_refused() -> None:
    with (
        Fake(lambda path, body: completion(body, echo=False, biased=True)) as url,
        pytest.raises(UnsupportedError, match="count `logit_bias`"),
    ):
        ServedSide(connect(HttpServer(url), "m"), 64, decode).score(PAIRS)


def test_a_server_of_another_model_is_refused() -> None:
    with Fake(lambda path, body: completion(body, echo=False)) as url:
        side = ServedSide(connect(HttpServer(url), "m"), 64, lambda ids: "xyzuvwrstq"[ids[0]])
        with pytest.raises(UnsupportedError, match="another model"):
            side.score(PAIRS)


def test_triton_is_asked_by_its_own_protocol() -> None:
    paths = set()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        paths.add(path)
        sampling = json.loads(body["sampling_parameters"])
        raw = model(body["input_ids"])
        last = raw.copy()
        for token, bias in sampling.get("logit_bias", {}).items():
            last[int(token)] += bias
        new, best = int(last.argmax()), int(raw.argmax())
        top = [{"token_id": best, "token": "?", "logprob": float(raw[best])}]
        entry = {"token_id": new, "token": "?", "logprob": float(raw[new]), "top": top}
        return 200, {"text_output": decode([new]), "logprobs": json.dumps([entry])}

    with Fake(answer) as url:
        side = ServedSide(connect(HttpServer(f"{url}/v2/models/docs"), None), 64, decode)
        assert side.score(PAIRS) == [(pytest.approx(value), greedy) for value, greedy in map(truth, PAIRS)]
        assert side.answer([1, 2], 1, []) == decode([int(model([1, 2]).argmax())])
        assert "docs of Triton" in side.description
    assert paths == {"/v2/models/docs/generate"}


@pytest.mark.parametrize(
    "found",
    [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{"logprobs": {"tokens": ["a", "b"]}}]}, {"choices": "a"},
     {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [{}]}}]}],
)  # fmt: skip
def test_an_answer_of_another_shape_is_an_error_and_no_traceback(found: dict[str, Any]) -> None:
    with Fake(lambda path, body: (400 if body.get("echo") else 200, found)) as url, pytest.raises(RunFailed):
        ServedSide(connect(HttpServer(url), "m"), 64, decode).score(PAIRS)


def test_no_server_and_no_address_are_told() -> None:
    with pytest.raises(EnvironmentLacks, match="no answer"):
        connect(HttpServer("http://127.0.0.1:9"), None)
    with pytest.raises(UsageError, match="is not an address"):
        HttpServer("localhost:80")


@pytest.mark.parametrize("path", ["", "/v2/models/docs"])
def test_servers_get_the_key_and_one_that_denies_access_is_no_server_without_echo(path: str) -> None:
    with keyed_server(open_models=True) as url:
        with pytest.raises(EnvironmentLacks, match="access denied: HTTP 401; it wants an API key"):
            ServedSide(connect(HttpServer(url + path), "m"), 64, decode).score(PAIRS)
        with pytest.raises(RunFailed, match="HTTP 200"):  # it streams, which nobody asked for
            connect(HttpServer(url + path, KEY), "m").text([1], 1, ())
