"""Adapters by the name of a model: `small:sql` is the model `small` with its adapter `sql`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from click.testing import CliRunner

import llmforge
from llmforge import serving as runtime
from llmforge.artifact import Artifact
from llmforge.base.errors import UsageError
from llmforge.cli import cli
from llmforge.serving import Engine, Runner, Sampling
from llmforge.serving.engine_process import EngineProcess
from llmforge.serving.protocol.client_json import JsonLimits
from llmforge.serving.request import Request
from llmforge.triton.backend import inputs

from ...samples.small_artifact import publish_small
from .test_serve import client_of, serving

NAMES = ("formal", "sql")
PROMPT = "If the file does not exist,"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Artifact:
    return publish_small(tmp_path_factory.mktemp("artifacts"), sample_checkpoint, adapters=NAMES)


@pytest.fixture(scope="module")
def runner(artifact: Artifact) -> Runner:
    return runtime.load(artifact.path)


@pytest.fixture(scope="module")
def client(runner: Runner) -> Iterator[openai.OpenAI]:
    with Engine(runner) as engine, serving(engine) as address, client_of(address) as client:
        yield client


def text(runner: Runner, adapter: str) -> str:
    return "".join(chunk.text for chunk in runner.generate(PROMPT, Sampling(max_tokens=12, ignore_eos=True), adapter))


def test_the_name_of_the_model_chooses(client: openai.OpenAI, runner: Runner) -> None:
    assert [model.id for model in client.models.list()] == ["small", "small:formal", "small:sql"]
    assert client.models.retrieve("small:sql").id == "small:sql"
    texts = set()
    for name, adapter in (("small", ""), ("small:formal", "formal"), ("small:sql", "sql")):
        answer = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.model == name
        assert answer.choices[0].text == text(runner, adapter)
        texts.add(answer.choices[0].text)
    assert len(texts) == 3


@pytest.mark.parametrize("name", ["small:poetry", "other:sql", "small:", "sql", "small:sql:sql"])
def test_an_unknown_adapter_is_no_model(client: openai.OpenAI, name: str) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model=name, messages=messages)
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
    assert "these are 'small', 'small:formal', 'small:sql'" in raised.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)


def test_the_engine_in_a_process_of_its_own_chooses_as_well(artifact: Artifact, runner: Runner) -> None:
    ids = tuple(runner.encode(PROMPT))
    with EngineProcess(artifact.path) as engine:
        for adapter in ("", *NAMES):
            request = Request(ids, Sampling(max_tokens=12, ignore_eos=True), adapter=adapter)
            assert "".join(chunk.text for chunk in engine.stream(request)) == text(runner, adapter)
        with pytest.raises(UsageError, match="no adapter 'poetry'"):
            engine.stream(Request(ids, adapter="poetry"))


def test_run_takes_an_adapter(artifact: Artifact, runner: Runner) -> None:
    words = ["run", str(artifact.path), PROMPT, "--max-tokens", "12"]
    result = CliRunner().invoke(cli, [*words, "--adapter", "sql", "--json"])
    assert result.exit_code == 0, result.output
    chunks = runner.generate(PROMPT, Sampling(max_tokens=12), "sql")
    assert json.loads(result.stdout)["text"] == "".join(chunk.text for chunk in chunks)
    refused = CliRunner().invoke(cli, [*words, "--adapter", "poetry"])
    assert refused.exit_code == 2
    assert "no adapter 'poetry': the adapters are formal, sql" in refused.stderr


def test_the_python_interface_takes_it(artifact: Artifact, runner: Runner) -> None:
    model = llmforge.load(artifact.path)
    answer = model.generate(PROMPT, adapter="sql", max_tokens=12, ignore_eos=True)
    assert answer.text == text(runner, "sql")
    assert "".join(model.stream(PROMPT, adapter="formal", max_tokens=12, ignore_eos=True)) == text(runner, "formal")
    assert (model.logits(PROMPT, adapter="sql") != model.logits(PROMPT)).any()


def test_triton_takes_it_as_a_parameter(runner: Runner) -> None:
    def ask(**parameters: object) -> Request:
        tensors = {"text_input": np.array([[PROMPT.encode()]], np.object_)}
        limits = JsonLimits.of(runner)
        return inputs.read(tensors, json.dumps(parameters), None, runner, limits).request

    assert ask().adapter == ""
    assert ask(adapter="sql").adapter == "sql"
    assert ask(lora_name="formal", adapter="formal").adapter == "formal"
    for wrong, words in (
        ({"adapter": "poetry"}, "no adapter 'poetry'"),
        ({"adapter": 3}, "expected the name of an adapter"),
        ({"adapter": "sql", "lora_name": "formal"}, "contradict each other"),
    ):
        with pytest.raises(UsageError, match=words):
            ask(**wrong)
