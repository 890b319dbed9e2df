"""An embedder and a reranker in a real Triton, asked by NVIDIA's gRPC client and over HTTP; and their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import llmforge
from llmforge.artifact import Artifact
from llmforge.base.errors import UsageError
from llmforge.cli import cli
from llmforge.triton.backend import encoder_requests

from ..fakes.fake_encoder import fake_embedder, fake_reranker
from ..servers.triton_env import TritonEnv
from ..servers.triton_server import Server, client, environment_or_skip, launched

DATA = Path(__file__).resolve().parents[1] / "data"
KINDS = ("embedder", "reranker")
RECIPE = """\
schema: 1
name: docs-{kind}
checkpoint: {checkpoint}
target: local
engine: {{backend: onnxruntime, max_context: 256, threads: 1}}
passes: []
serving: {{max_queue: 400, timeout_s: 60}}
"""
QUERY = "how to force a checkpoint by hand"
TEXTS = [
    "CHECKPOINT forces one.",
    "The list is a compound data type.",
    "You can force a checkpoint by the command CHECKPOINT; it needs a privilege, and is not needed normally.",
]


def tensors(**given: Any) -> dict[str, Any]:
    return {name: np.array(value, np.object_ if name != "input_ids" else np.int64) for name, value in given.items()}


class TestRequests:
    def test_rows_of_texts_and_of_ids_are_embedded(self) -> None:
        runner = fake_embedder()
        texts = ["the file", "a model runs"]
        read = encoder_requests.read(tensors(text=[[each.encode()] for each in texts]), "{}", runner)
        made = read.outputs(runner.run(read.inputs))["embedding"]
        np.testing.assert_array_equal(made, runner.embed(texts))
        ids = [each.ids.tolist() for each in runner.texts(texts)]
        longest = max(map(len, ids))
        padded = [own + [-1] * (longest - len(own)) for own in ids]
        assert len(set(map(len, ids))) == 2
        of_ids = encoder_requests.read(tensors(input_ids=padded), "", runner)
        np.testing.assert_array_equal(of_ids.outputs(runner.run(of_ids.inputs))["embedding"], made)
        cut = encoder_requests.read(tensors(text=[[b"the file"]]), '{"prompt_name": "query", "dimensions": 3}', runner)
        np.testing.assert_array_equal(
            cut.outputs(runner.run(cut.inputs))["embedding"], runner.embed(["the file"], "query", 3)
        )

    def test_rows_of_a_query_with_texts_are_scored(self) -> None:
        runner = fake_reranker()
        given = tensors(query=[["the file"], ["token"]], texts=[["the file", "a"], ["a", "token"]])
        read = encoder_requests.read(given, "{}", runner)
        made = read.outputs(runner.run(read.inputs))
        expected = [runner.score("the file", ["the file", "a"]), runner.score("token", ["a", "token"])]
        np.testing.assert_array_equal(made["scores"], expected)
        assert made["logits"].shape == (2, 2)
        assert made["scores"].dtype == np.float64

    @pytest.mark.parametrize(
        ("runner", "given", "parameters", "said"),
        [
            (fake_embedder, {}, "{}", "expected either text or input_ids"),
            (fake_embedder, {"text": [["a"]], "input_ids": [[3]]}, "{}", "expected either text or input_ids"),
            (fake_embedder, {"text": [[b"\xff"]]}, "{}", "text 0: not UTF-8"),
            (fake_embedder, {"text": [["file " * 40]]}, "{}", "text 0 has 42 tokens"),
            (fake_embedder, {"text": [["a"]]}, '{"dimensions": 9}', "dimensions 9: expected 1 to 8"),
            (fake_embedder, {"text": [["a"]]}, '{"dimensions": true}', "dimensions: expected a whole number"),
            (fake_embedder, {"text": [["a"]]}, '{"max_tokens": 3}', "unknown parameter max_tokens"),
            (fake_embedder, {"text": [["a"]]}, "[]", "parameters: expected a JSON object"),
            (fake_embedder, {"text": [["a"]]}, "{", "the parameters"),
            (fake_embedder, {"input_ids": [[3, -1, 4]]}, "{}", "input_ids 0: expected token ids below 21"),
            (fake_embedder, {"input_ids": [[-1, -1]]}, "{}", "input_ids 0: expected token ids below 21"),
            (fake_embedder, {"input_ids": [[3]]}, '{"prompt_name": "query"}', "prompt_name: token ids are read"),
            (fake_reranker, {"query": [["a"]], "texts": np.zeros((1, 0), object)}, "{}", "no texts"),
            (fake_reranker, {"query": [["a"]], "texts": [["a"]]}, '{"truncate": 1}', "truncate: expected true or"),
            (fake_reranker, {"query": [["a " * 40]], "texts": [["a"]]}, "{}", "the query has 40 tokens"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, runner: Any, given: dict[str, Any], parameters: str, said: str
    ) -> None:
        with pytest.raises(UsageError) as refused:
            encoder_requests.read(tensors(**given), parameters, runner())
        assert str(refused.value).startswith(said)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("encoders")
    made = {}
    for kind in KINDS:
        recipe = folder / f"{kind}.yaml"
        recipe.write_text(RECIPE.format(kind=kind, checkpoint=DATA / f"docs-{kind}-1m"))
        made[kind] = Artifact.open(llmforge.build(recipe, out=folder / "artifacts").path)
    return made


@pytest.fixture(scope="module")
def env() -> TritonEnv:
    return environment_or_skip()


@pytest.fixture(scope="module")
def server(
    env: TritonEnv, artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("triton") / "repository"
    exported = CliRunner().invoke(cli, ["triton", str(artifacts["reranker"].path), "-o", str(repository)])
    assert exported.exit_code == 0, exported.output
    with launched(env, artifacts["embedder"].path, repository) as running:
        yield running


@pytest.mark.thorough
@pytest.mark.xdist_group("triton")
class TestServer:
    def ask(self, server: Server, kind: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        return list(client(server.env, {"url": f"127.0.0.1:{server.grpc}", "model": f"docs-{kind}", "infer": requests}))

    def test_an_embedder_and_a_reranker_are_served(self, server: Server, artifacts: dict[str, Artifact]) -> None:
        embedder, reranker = (llmforge.load(artifacts[kind].path, threads=1) for kind in KINDS)
        ids = embedder.encoder.texts([TEXTS[0]])[0].ids.tolist()
        together, alone, of_ids, query, few, bad, none = self.ask(
            server,
            "embedder",
            {"inputs": {"text": ["BYTES", [[each] for each in TEXTS]]}},
            {"inputs": {"text": ["BYTES", [[TEXTS[1]]]]}},
            {"inputs": {"input_ids": ["INT64", [ids]]}},
            {"inputs": {"text": ["BYTES", [[QUERY]]]}, "parameters": {"prompt_name": "query"}},
            {"inputs": {"text": ["BYTES", [[QUERY]]]}, "parameters": {"dimensions": 32}},
            {"inputs": {"text": ["BYTES", [["word " * 4000]]]}},
            {"inputs": {}},
        )
        expected = embedder.embed(TEXTS)
        np.testing.assert_allclose(together["outputs"]["embedding"], expected, atol=2e-6)
        np.testing.assert_allclose(alone["outputs"]["embedding"], expected[1:2], atol=2e-6)
        np.testing.assert_allclose(of_ids["outputs"]["embedding"], expected[:1], atol=2e-6)
        assert "query" in embedder.encoder.config.prompts
        asked = embedder.embed([QUERY], prompt_name="query")
        np.testing.assert_allclose(query["outputs"]["embedding"], asked, atol=2e-6)
        np.testing.assert_allclose(few["outputs"]["embedding"], embedder.embed([QUERY], dimensions=32), atol=2e-6)
        assert "the model reads at most" in bad["error"]
        assert "error" in none
        ragged, one = self.ask(
            server,
            "reranker",
            {"inputs": {"query": ["BYTES", [[QUERY]]], "texts": ["BYTES", [TEXTS]]}},
            {"inputs": {"query": ["BYTES", [[QUERY], [TEXTS[0]]]], "texts": ["BYTES", [TEXTS[:1], TEXTS[1:2]]]}},
        )
        np.testing.assert_allclose(ragged["outputs"]["scores"], [reranker.score(QUERY, TEXTS)], atol=2e-6)
        pairs = [reranker.score(QUERY, TEXTS[:1]), reranker.score(TEXTS[0], TEXTS[1:2])]
        np.testing.assert_allclose(one["outputs"]["scores"], pairs, atol=2e-6)

    def test_requests_that_wait_run_together(self, server: Server, artifacts: dict[str, Artifact]) -> None:
        texts = [" ".join(["checkpoint"] * (1 + at % 40)) for at in range(200)]
        before = server.metrics("docs-embedder")
        answers = self.ask(server, "embedder", *({"inputs": {"text": ["BYTES", [[each]]]}} for each in texts))
        made = np.concatenate([each["outputs"]["embedding"] for each in answers])
        np.testing.assert_allclose(made, llmforge.load(artifacts["embedder"].path).embed(texts), atol=2e-6)
        after = server.settled("docs-embedder")
        ran = {name: after[name] - before.get(name, 0.0) for name in after if name.startswith(("nv_", "llmforge_"))}
        assert ran["llmforge_sequences_total"] == 200
        assert ran["nv_inference_count"] == 200
        assert ran["nv_inference_exec_count"] < 150  # Triton's batches

    def test_http_and_its_config(self, server: Server, artifacts: dict[str, Artifact]) -> None:
        body = {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [TEXTS[0]]}]}
        reply = server.request("/v2/models/docs-embedder/infer", body).json
        [output] = reply["outputs"]
        expected = llmforge.load(artifacts["embedder"].path).embed(TEXTS[:1])
        assert output["shape"] == list(expected.shape)
        np.testing.assert_allclose([output["data"]], expected, atol=2e-6)
        config = server.request("/v2/models/docs-embedder/config").json
        assert config["dynamic_batching"]["default_queue_policy"]["max_queue_size"] == 400
        assert config["dynamic_batching"]["default_queue_policy"]["default_timeout_microseconds"] == 60_000_000

    def test_files(self, artifacts: dict[str, Artifact], tmp_path: Path) -> None:
        opened = artifacts["embedder"]
        own = opened.path / "triton" / "docs-embedder"
        assert "encoder_model import" in (own / "1/model.py").read_text()
        assert (own / "1/llmforge/serving/encoder_runner.py").is_file()
        assert "/v2/models/docs-embedder/infer" in (own / "README.md").read_text()
        assert "triton/docs-embedder/1/model.py" in opened.manifest.files
        template = tmp_path / "template.jinja"
        template.write_text("{{ messages }}")
        for words, said in (
            (["--set", "speculation=prompt-lookup"], "serving.speculation is for language models"),
            (["--chat-template", str(template)], "is an embedder, which reads no chats"),
        ):
            refused = CliRunner().invoke(cli, ["triton", str(opened.path), "-o", str(tmp_path / "r"), *words])
            assert refused.exit_code == 2
            assert said in refused.output
