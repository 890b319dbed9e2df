"""Embedders and rerankers over HTTP: OpenAI's own client, Jina's, Cohere's and vLLM's forms, keys, metrics, errors."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route
from starlette.testclient import TestClient

from llmforge.serving import http as serve
from llmforge.serving.encoder_engine import EncoderEngine, EncoderOptions
from llmforge.serving.encoder_runner import EncoderRunner
from llmforge.serving.http.server import make_server

from ...fakes.fake_encoder import FakeEncoder, fake_embedder, fake_reranker, word_tokenizer

TEXTS = ["the file", "a model runs in the server", "token"]
DOCUMENTS = ["token", "the file", "the file lies in the cache"]
QUERY = "the file lies"


@contextlib.contextmanager
def serving(engine: EncoderEngine) -> Iterator[str]:
    """Serve an engine from a thread; yield HOST:PORT."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = make_server(serve.create_encoder_app(engine, "small"), serve.Address(grace_s=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def embedder() -> Iterator[TestClient]:
    with EncoderEngine(fake_embedder()) as engine, TestClient(serve.create_encoder_app(engine, "small")) as client:
        yield client


@pytest.fixture(scope="module")
def reranker() -> Iterator[TestClient]:
    with EncoderEngine(fake_reranker()) as engine, TestClient(serve.create_encoder_app(engine, "small")) as client:
        yield client


def message(client: TestClient, path: str, body: Any, status: int = 400) -> tuple[str, str | None]:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()["error"]["message"], response.json()["error"]["param"]


# Embeddings


def test_openais_client_embeds() -> None:
    runner = fake_embedder()
    with (
        EncoderEngine(runner) as engine,
        serving(engine) as address,
        openai.OpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as client,
    ):
        assert client.models.retrieve("small").model_dump()["dimensions"] == 8
        made = client.embeddings.create(model="small", input=TEXTS)  # which asks for base64
        plain = client.embeddings.create(model="small", input=TEXTS[0], encoding_format="float")
        cut = client.embeddings.create(model="small", input=TEXTS, dimensions=3, extra_body={"prompt_name": "query"})
        with pytest.raises(openai.NotFoundError, match="model 'other' is not served here"):
            client.embeddings.create(model="other", input="file")
        with pytest.raises(openai.BadRequestError, match="text 0 has 42 tokens"):
            client.embeddings.create(model="small", input="file " * 40)
    np.testing.assert_array_equal(np.float32([each.embedding for each in made.data]), fake_embedder().embed(TEXTS))
    np.testing.assert_array_equal(np.float32(plain.data[0].embedding), np.float32(made.data[0].embedding))
    expected = fake_embedder().embed(TEXTS, "query", 3)
    np.testing.assert_array_equal(np.float32([each.embedding for each in cut.data]), expected)
    tokens = sum(map(len, runner.texts(TEXTS)))
    assert (made.usage.prompt_tokens, made.usage.total_tokens, made.model) == (tokens, tokens, "small")


def test_base64_is_little_endian_fp32(embedder: TestClient) -> None:
    asked = {"input": TEXTS[0]}
    plain = embedder.post("/v1/embeddings", json=asked).json()["data"][0]
    packed = embedder.post("/v1/embeddings", json=asked | {"encoding_format": "base64", "user": "me"}).json()["data"][0]
    assert (packed["index"], packed["object"]) == (0, "embedding")
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed["embedding"]), "<f4"), plain["embedding"])


def test_token_ids_embed_as_their_text_does(embedder: TestClient) -> None:
    """As LangChain's client sends long texts."""
    ids = [embedder.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    of_ids = embedder.post("/v1/embeddings", json={"input": ids}).json()
    of_texts = embedder.post("/v1/embeddings", json={"input": TEXTS}).json()
    assert of_ids == of_texts
    alone = embedder.post("/v1/embeddings", json={"input": ids[1]}).json()
    assert alone["data"][0]["embedding"] == of_texts["data"][1]["embedding"]


@pytest.mark.parametrize(
    ("body", "said", "parameter"),
    [
        ([], "the body is not a JSON object", None),
        ({}, "input: expected a string, a list of strings", "input"),
        ({"input": []}, "input: expected a string", "input"),
        ({"input": ["a", [1]]}, "input: expected strings alone, or lists of token ids alone", "input"),
        ({"input": ["a"] * 2049}, "input: 2,049 texts; expected at most 2,048 per call", "input"),
        ({"input": [7, 99]}, "input 0: expected token ids below 21", "input"),
        ({"input": [7], "prompt_name": "query"}, "prompt_name: token ids are read as they are", "prompt_name"),
        ({"input": "a", "prompt_name": 3}, "prompt_name: expected a string", "prompt_name"),
        ({"input": "a", "prompt_name": "x"}, "prompt_name 'x': the model has no such prompt", "prompt_name"),
        ({"input": "a", "dimensions": 9}, "dimensions 9: expected 1 to 8", "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions: expected a whole number, 1 or more", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format 'int8': expected float or base64", None),
        ({"input": "a", "truncate": 1}, "truncate: expected true or false", "truncate"),
        ({"input": "a", "texts": 1}, "texts: this server does not know it", None),
        ({"input": "a", "model": 1}, "model: expected a string", "model"),
        ({"input": ["the " * 14] * 2000 + ["a"], "dimensions": 8}, "", None),
    ],
)
def test_embeddings_refuse_what_makes_no_sense(
    embedder: TestClient, body: Any, said: str, parameter: str | None
) -> None:
    if not said:  # within all limits
        assert len(embedder.post("/v1/embeddings", json=body).json()["data"]) == 2001
        return
    found, named = message(embedder, "/v1/embeddings", body)
    assert found.startswith(said)
    if parameter is not None:
        assert named == parameter


def test_texts_are_cut_where_the_call_says_so(embedder: TestClient) -> None:
    cut = embedder.post("/v1/embeddings", json={"input": "file " * 40, "truncate": True}).json()
    assert cut["usage"]["prompt_tokens"] == 16


def test_each_kind_has_its_own_paths(embedder: TestClient, reranker: TestClient) -> None:
    assert message(embedder, "/v1/rerank", {}, 404)[0] == "there is no /v1/rerank here"
    assert message(reranker, "/v1/embeddings", {}, 404)[0] == "there is no /v1/embeddings here"


# Reranking


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_come_by_relevance(reranker: TestClient, path: str) -> None:
    asked: dict[str, Any] = {"model": "small", "query": QUERY, "documents": DOCUMENTS}
    made = reranker.post(path, json=asked).json()
    assert [each["index"] for each in made["results"]] == [2, 1, 0]
    scores = [each["relevance_score"] for each in made["results"]]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp([-1.5, -0.5, 1.5])))
    assert made["usage"] == {"prompt_tokens": 27, "total_tokens": 27}
    assert made["id"].startswith("rerank-")
    assert "meta" not in made
    first = reranker.post(path, json=asked | {"top_n": 1}).json()["results"]
    assert first == made["results"][:1]


def test_documents_may_be_objects_and_come_back(reranker: TestClient) -> None:
    documents = [{"text": DOCUMENTS[0], "page": 7}, DOCUMENTS[2]]
    asked = {"query": QUERY, "documents": documents, "return_documents": True}
    made = reranker.post("/v1/rerank", json=asked).json()["results"]
    assert [each["document"] for each in made] == [{"text": DOCUMENTS[2]}, documents[0]]


def test_documents_are_cut_and_the_answer_says_so(reranker: TestClient) -> None:
    asked: dict[str, Any] = {"query": QUERY, "documents": ["token " * 40, "file"]}
    made = reranker.post("/v1/rerank", json=asked).json()
    assert made["meta"]["warnings"][0].startswith("1 of 2 texts were cut")
    assert made["usage"]["prompt_tokens"] == 16 + 7
    short = reranker.post("/v1/rerank", json=asked | {"max_tokens_per_doc": 2}).json()
    assert short["usage"]["prompt_tokens"] == 8 + 7
    found, _ = message(reranker, "/v1/rerank", asked | {"truncate": False})
    assert found.startswith("text 0 with its query has 46 tokens; the model reads at most 16")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"documents": ["a"]}, "query: expected a string"),
        ({"query": "a"}, "documents: expected a list of strings, or of objects with text, not empty"),
        ({"query": "a", "documents": [{"title": "a"}]}, "documents: expected strings, or objects with text"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n: expected a whole number, 1 or more"),
        ({"query": "a", "documents": ["a"], "return_documents": "x"}, "return_documents: expected true or false"),
        ({"query": "the " * 20, "documents": ["a"]}, "the query has 20 tokens, and leaves none of 16 for texts"),
    ],
)
def test_reranking_refuses_what_makes_no_sense(reranker: TestClient, body: Any, said: str) -> None:
    assert message(reranker, "/v1/rerank", body)[0].startswith(said)


def test_pairs_are_scored(reranker: TestClient) -> None:
    one = reranker.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
    pairs = reranker.post("/v1/score", json={"text_1": [QUERY] * 3, "text_2": DOCUMENTS}).json()
    assert one["data"] == pairs["data"]
    scores = [each["score"] for each in one["data"]]
    np.testing.assert_allclose(scores, fake_reranker().score(QUERY, DOCUMENTS))
    found, _ = message(reranker, "/v1/score", {"text_1": ["a", "b"], "text_2": DOCUMENTS})
    assert found == "text_1 has 2 texts, text_2 3: expected one, or as many"
    assert message(reranker, "/v1/score", {"text_1": "a"}) == (
        "text_2: expected a string or a list of strings, not empty", "text_2",
    )  # fmt: skip


# The server


def test_calls_at_once_run_together() -> None:
    session = FakeEncoder()
    session.delay_s = 0.05
    with (
        EncoderEngine(EncoderRunner(session, word_tokenizer())) as engine,
        serving(engine) as address,
        openai.OpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0) as client,
    ):
        asked = {"model": "small", "input": "file"}
        threads = [threading.Thread(target=client.embeddings.create, kwargs=asked) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(map(len, session.batches)) == 12
    assert max(map(len, session.batches)) >= 3


def test_keys_have_their_tokens_counted() -> None:
    state = serve.ServerState()
    policy = serve.AccessPolicy(keys=(serve.ApiKey("a-key-of-some-length", "team", {"tokens": 8}),))
    with EncoderEngine(fake_embedder()) as engine:
        app = serve.AuthMiddleware(serve.create_encoder_app(engine, "small", state), policy, state)
        with TestClient(app) as client:
            assert client.post("/v1/embeddings", json={"input": "file"}).status_code == 401
            client.headers["Authorization"] = "Bearer a-key-of-some-length"
            assert client.post("/v1/embeddings", json={"input": ["file"] * 3}).status_code == 200
            limited = client.post("/v1/embeddings", json={"input": "file"})
            assert (limited.status_code, limited.json()["error"]["type"]) == (429, "tokens")
            text = client.get("/metrics").text
    samples = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["llmforge_key_tokens_total", "team", "prompt"] == 9
    assert samples["llmforge_prompt_tokens_total",] == 9
    assert samples["llmforge_sequences_total",] == 3
    assert samples["llmforge_batches_total", "3"] == 1
    assert samples["llmforge_answers_total", "stop"] == 1
    assert samples["llmforge_answers_total", "refused"] == 1
    assert samples["llmforge_request_seconds_count",] == 1
    assert state.active == 0
    assert state.clients[0].active == 0


def test_what_takes_too_long_ends_and_leaves_nothing() -> None:
    session = FakeEncoder()
    session.delay_s = 0.3
    options = EncoderOptions(timeout_s=0.05, max_queue=1)
    with EncoderEngine(EncoderRunner(session, word_tokenizer()), options) as engine:
        with TestClient(serve.create_encoder_app(engine, "small")) as client:
            response = client.post("/v1/embeddings", json={"input": "file"})
            assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout")
            assert client.get("/ready").status_code == 200
        assert engine.stats().running == engine.stats().waiting == 0


def test_a_client_that_leaves_is_forgotten() -> None:
    session = FakeEncoder()
    session.delay_s = 0.2
    runner = EncoderRunner(session, word_tokenizer())
    with EncoderEngine(runner, EncoderOptions(batch_tokens=3)) as engine, serving(engine) as address:
        host, port = address.split(":")
        body = json.dumps({"input": ["file"] * 100}).encode()
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not engine.stats().running:
                time.sleep(0.005)
        end = time.monotonic() + 5
        while engine.stats().running:
            assert time.monotonic() < end
            time.sleep(0.005)
    assert len(session.batches) < 10


def test_an_engine_that_ended_is_not_healthy() -> None:
    engine = EncoderEngine(fake_embedder())
    state = serve.ServerState()
    with TestClient(serve.create_encoder_app(engine, "small", state)) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").status_code == 200
        state.draining = True
        assert client.get("/ready").status_code == 503
        refused = client.post("/v1/embeddings", json={"input": "a"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the server is shutting down")
        engine.close()
        assert client.get("/health").status_code == 503


# The document


@pytest.mark.parametrize("kind", ["embedder", "reranker"])
def test_the_document_is_true_of_calls_and_answers(kind: str, embedder: TestClient, reranker: TestClient) -> None:
    jsonschema: Any = pytest.importorskip("jsonschema", reason="the extra dev")
    validator: Any = pytest.importorskip("openapi_spec_validator", reason="the extra dev")
    client = embedder if kind == "embedder" else reranker
    document = client.get("/openapi.json").json()
    validator.validate(document)
    app: Any = client.app
    assert set(document["paths"]) == {route.path_format for route in app.routes if isinstance(route, Route)}

    def check(schema: Any, value: Any) -> None:
        jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(value)

    bodies: dict[str, list[Any]] = {
        "/v1/embeddings": [
            {"input": "file", "dimensions": 3, "prompt_name": "query", "truncate": True, "user": "me", "model": None},
            {"input": ["file"], "encoding_format": "base64"},
            {"input": [2, 3]},
            {"input": [[2, 3]]},
        ],
        "/v1/rerank": [
            {"query": QUERY, "documents": ["token " * 40, {"text": "file"}], "top_n": 2, "return_documents": True},
            {"query": QUERY, "documents": ["file"], "max_tokens_per_doc": 4, "truncate": True, "model": "small"},
        ],
        "/v1/score": [{"text_1": QUERY, "text_2": ["file"], "truncate": True}, {"text_1": ["a"], "text_2": ["b"]}],
    }
    for path in bodies.keys() & document["paths"].keys():
        operation = document["paths"][path]["post"]
        for body in bodies[path]:
            check(operation["requestBody"]["content"]["application/json"]["schema"], body)
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
            check(operation["responses"]["200"]["content"]["application/json"]["schema"], response.json())
    check({"$ref": "#/components/schemas/Models"}, client.get("/v1/models").json())
