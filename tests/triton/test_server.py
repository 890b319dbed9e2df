"""A model repository in a real Triton Inference Server, asked by curl-like HTTP and by NVIDIA's gRPC client."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from llmforge import native
from llmforge.artifact import Artifact
from llmforge.cli import cli
from llmforge.recipe import ServingSpec
from llmforge.serving import Runner, Sampling, load
from llmforge.triton import repository
from llmforge.triton.backend import signature

from ..compile.test_tasks import recipe as write_recipe
from ..models.tool_templates import HERMES
from ..samples import published, stored
from ..servers.otlp_collector import Collector, collecting
from ..servers.triton_env import TritonEnv
from ..servers.triton_server import Reply, Server, client, environment_or_skip, launched

pytestmark = pytest.mark.xdist_group("triton")  # one server for all of them

CONTEXT, SLOTS, QUEUE = 16384, 8, 24
LONG = CONTEXT - 100  # tokens; seconds of work
# Characters of two to four bytes, most of them several tokens each, and sequences of characters that belong together.
SCRIPT = "日本語を話す😀 héllo 👩‍👩‍👧 한국어 🏳️‍🌈 ok. "
BANNED = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "pydantic", "safetensors")
PROBE = '''\
import importlib.util, json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers a JSON list of modules with those that can be imported."""

    def execute(self, requests):
        out = []
        for request in requests:
            names = json.loads(pb_utils.get_input_tensor_by_name(request, "names").as_numpy()[0])
            found = [name for name in names if importlib.util.find_spec(name) is not None]
            tensor = pb_utils.Tensor("found", np.array([json.dumps(found)], np.object_))
            out.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return out
'''
PROBE_CONFIG = """\
name: "probe" backend: "python" instance_group [ { kind: KIND_CPU } ]
input [ { name: "names" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "found" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


@pytest.fixture(scope="session")
def env() -> TritonEnv:
    return environment_or_skip()


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> dict[str, Artifact]:
    """A decoder of random weights, and one that recites `SCRIPT`."""
    out = tmp_path_factory.mktemp("artifacts")
    serving = ServingSpec(max_queue=QUEUE)
    return {
        "random": published.random_decoder(
            out, sample_checkpoint, max_context=CONTEXT, max_batch=SLOTS, serving=serving, template=HERMES
        ),
        "scripted": published.scripted(out, sample_checkpoint, SCRIPT, max_context=1024, serving=serving),
    }


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def server(
    env: TritonEnv, artifacts: dict[str, Artifact], collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server with both models, and one that tells what its environment has."""
    repository = tmp_path_factory.mktemp("triton") / "repository"
    exported = CliRunner().invoke(cli, ["triton", str(artifacts["scripted"].path), "-o", str(repository)])
    assert exported.exit_code == 0, exported.output
    (repository / "probe" / "1").mkdir(parents=True)
    (repository / "probe" / "config.pbtxt").write_text(PROBE_CONFIG)
    (repository / "probe" / "1" / "model.py").write_text(PROBE)
    # Of requests that name a trace, and of no others.
    traces = ("mode=opentelemetry", "rate=0", "level=TIMESTAMPS", f"opentelemetry,url={collector.url}/v1/traces",
              "opentelemetry,bsp_schedule_delay=100")  # fmt: skip
    with launched(env, artifacts["random"].path, repository, *(f"--trace-config={each}" for each in traces)) as running:
        yield running


@pytest.fixture(scope="session")
def runners(artifacts: dict[str, Artifact]) -> dict[str, Runner]:
    return {name: load(artifact.path) for name, artifact in artifacts.items()}


def said(runner: Runner, prompt: str | list[int], **options: Any) -> str:
    return "".join(chunk.text for chunk in runner.generate(prompt, Sampling(**options)))


def text_of(responses: list[dict[str, Any]]) -> str:
    return "".join(response["text_output"] for response in responses)


def text(*values: str) -> list[Any]:
    return ["BYTES", list(values)]


class TestEnvironment:
    def test_the_models_process_has_no_build_tools(self, server: Server) -> None:
        names = [*BANNED, "llmforge", "numpy", "onnxruntime", "tokenizers", "jinja2"]
        body = {"inputs": [{"name": "names", "shape": [1], "datatype": "BYTES", "data": [json.dumps(names)]}]}
        reply = server.request("/v2/models/probe/infer", body)
        assert json.loads(reply.json["outputs"][0]["data"][0]) == ["numpy", "onnxruntime", "tokenizers", "jinja2"]

    def test_the_server_is_ready_and_the_model_is_what_its_config_says(self, server: Server) -> None:
        assert server.request("/v2/health/ready").status == 200
        assert server.request("/v2/models/random/versions/1/ready").status == 200
        config = server.request("/v2/models/random/config").json
        assert config["model_transaction_policy"] == {"decoupled": True}
        assert config["instance_group"][0]["kind"] == "KIND_CPU"
        assert config["parameters"]["max_queue"]["string_value"] == str(QUEUE)

    def test_it_knows_the_options_of_the_production_files(self, env: TritonEnv) -> None:
        texts = [path.read_text() for path in (Path(__file__).parents[2] / "docs/deploy").rglob("*triton*")]
        texts.append((Path(__file__).parents[2] / "docs/deploy/kubernetes/kserve.yaml").read_text())
        used = {word for text in texts for word in re.findall(r"[\"\s](--[a-z][a-z-]+)=?", text)}
        used -= {"--build-arg", "--gpus", "--init", "--read-only", "--tmpfs", "--shm-size", "--interval", "--timeout",
                 "--start-period", "--retries", "--no-cache-dir"}  # fmt: skip
        assert "--exit-timeout-secs" in used
        done = subprocess.run(
            [env.server, "--help"], capture_output=True, text=True, env=env.environment(), check=False
        )
        assert [option for option in used if option not in done.stdout + done.stderr] == []


class TestConfig:
    """config.pbtxt, read by Triton's own schema."""

    def test_tensors_are_those_of_the_code(self, env: TritonEnv, artifacts: dict[str, Artifact]) -> None:
        text = (artifacts["random"].path / "triton" / "random" / "config.pbtxt").read_text()
        config = client(env, {"config": text})
        assert (config["name"], config["backend"], config["max_batch_size"]) == ("random", "python", 1)
        assert config["model_transaction_policy"] == {"decoupled": True}
        assert config["parameters"]["artifact"] == {"string_value": "../../.."}
        assert config["model_warmup"][0]["batch_size"] == 1  # 0 would be skipped, silently
        for key, specs in (("input", signature.INPUTS), ("output", signature.OUTPUTS)):
            assert [(each["name"], each["data_type"], each["dims"]) for each in config[key]] == [
                (spec.name, spec.data_type, [str(spec.length)]) for spec in specs
            ]
        assert all(each["optional"] for each in config["input"])
        # Nothing waits in Triton's queue, so that neither its priorities nor its policies would decide anything.
        assert not config.keys() & {"dynamic_batching", "sequence_batching", "scheduling_choice"}

    def test_instances_and_versions_are_those_of_the_recipe(
        self, env: TritonEnv, artifacts: dict[str, Artifact]
    ) -> None:
        changes = ["triton.kind=gpu", "triton.gpus=[1, 3]", "triton.instances=2", "triton.versions="]
        model = repository.of_artifact(artifacts["random"], name='a"b', overrides=changes)
        config = client(env, {"config": repository.config(model, repository.ALONE)})
        assert config["name"] == 'a"b'
        assert config["instance_group"] == [{"kind": "KIND_GPU", "count": 2, "gpus": [1, 3]}]
        assert config["version_policy"] == {"all": {}}


class TestAnswers:
    def test_a_request_has_a_priority(self, server: Server) -> None:
        plain = server.generate("random", text_input="Tell me", max_tokens=4)
        for given in ({"priority": -3}, {"sampling_parameters": json.dumps({"priority": 2})}):
            reply = server.generate("random", text_input="Tell me", max_tokens=4, **given)
            assert (reply.status, reply.json["text_output"]) == (200, plain.json["text_output"])
        refused = server.generate("random", text_input="Tell me", max_tokens=4, priority="high")
        assert refused.status == 400
        assert "priority 'high': expected a whole number" in refused.text

    def test_generate_says_what_llmforge_run_says(self, server: Server, artifacts: dict[str, Artifact]) -> None:
        command = [sys.executable, "-c", "from llmforge.cli import main; main()", "run"]
        command += [str(artifacts["random"].path), "Tell me", "--max-tokens", "40", "--json"]
        ran = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        reply = server.generate("random", text_input="Tell me", max_tokens=40)
        assert reply.status == 200, reply.text
        answer = reply.json
        assert answer["text_output"] == ran["text"] != ""
        assert answer["finish_reason"] == ran["finish_reason"]
        assert answer["num_input_tokens"] == ran["usage"]["prompt_tokens"]
        assert answer["num_output_tokens"] == ran["usage"]["output_tokens"]
        usage = json.loads(answer["usage"])
        assert usage["output_tokens"] == ran["usage"]["output_tokens"]
        assert usage["ttft_ms"] > 0

    def test_a_stream_over_http_adds_up_to_the_answer(self, server: Server) -> None:
        whole = server.generate("random", text_input="Tell me", max_tokens=900, ignore_eos=True).json
        pieces = server.generate_stream("random", text_input="Tell me", max_tokens=900, ignore_eos=True)
        assert len(pieces) > 2
        assert text_of(pieces) == whole["text_output"]
        assert sum(piece["num_output_tokens"] for piece in pieces) == 900
        assert {piece["num_input_tokens"] for piece in pieces} == {whole["num_input_tokens"]}
        assert [piece["finish_reason"] for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]
        assert ["usage" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]

    def test_a_stream_over_grpc_is_the_same_and_ends_with_the_final_flag(self, server: Server) -> None:
        whole = server.generate("random", text_input="Tell me", max_tokens=900, ignore_eos=True).json
        inputs = {"text_input": text("Tell me"), "max_tokens": ["INT32", [900]], "stream": ["BOOL", [True]]}
        (answer,) = server.ask("random", {"inputs": inputs, "parameters": {"ignore_eos": True}})
        assert answer["error"] is None
        assert answer["final"]
        assert text_of(answer["responses"]) == whole["text_output"]
        assert len(answer["responses"]) > 2
        assert answer["responses"][-1]["finish_reason"] == "length"

    def test_32_streams_at_once_say_what_each_says_alone(self, server: Server, runners: dict[str, Runner]) -> None:
        random = np.random.default_rng(0)
        lengths = random.integers(3, 200, 32)
        prompts = [random.integers(10, published.VOCABULARY - 1, length).tolist() for length in lengths]
        limits = random.integers(20, 120, 32).tolist()
        requests = [
            {
                "inputs": {
                    "input_ids": ["INT64", prompt],
                    "max_tokens": ["INT32", [limit]],
                    "stream": ["BOOL", [i % 4 != 3]],
                }
            }
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        answers = server.ask("random", *requests)
        alone = [said(runners["random"], p, max_tokens=n) for p, n in zip(prompts, limits, strict=True)]
        assert [answer["error"] for answer in answers] == [None] * 32
        assert [text_of(answer["responses"]) for answer in answers] == alone
        sequential = [
            server.generate("random", input_ids=p, max_tokens=n).json["text_output"]
            for p, n in list(zip(prompts, limits, strict=True))[:8]
        ]
        assert sequential == alone[:8]

    def test_characters_are_never_broken_in_a_stream(self, server: Server, runners: dict[str, Runner]) -> None:
        expected = said(runners["scripted"], "x", max_tokens=900, ignore_eos=True)
        assert SCRIPT in expected
        for pieces in (
            server.generate_stream("scripted", text_input="x", max_tokens=900, ignore_eos=True),
            server.ask(
                "scripted",
                {
                    "inputs": {"text_input": text("x"), "stream": ["BOOL", [True]]},
                    "parameters": {"max_tokens": 900, "ignore_eos": True},
                },
            )[0]["responses"],
        ):
            assert len(pieces) > 2
            assert text_of(pieces) == expected
            assert all("\N{REPLACEMENT CHARACTER}" not in piece["text_output"] for piece in pieces[:-1])


class TestConventions:
    """Each client has its own names for the same thing."""

    def test_parameters_in_one_json_object_as_for_vllm(self, server: Server) -> None:
        sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": "30", "ignore_eos": True}
        vllm = server.generate("random", text_input="Tell me", sampling_parameters=json.dumps(sampling)).json
        tensors = server.generate(
            "random", text_input="Tell me", temperature=0.7, top_p=0.9, seed=3, max_tokens=30, ignore_eos=True
        ).json
        other = server.generate(
            "random", text_input="Tell me", temperature=0.7, top_p=0.9, seed=4, max_tokens=30, ignore_eos=True
        ).json
        assert vllm["text_output"] == tensors["text_output"] != other["text_output"]

    def test_the_openai_frontend_sends_these_tensors(self, server: Server, runners: dict[str, Runner]) -> None:
        whole = said(runners["scripted"], "x", max_tokens=60, ignore_eos=True)
        inputs = {
            "text_input": text("x"),
            "stream": ["BOOL", [False]],
            "max_tokens": ["INT32", [60]],
            "stop_words": text("héllo", "never seen"),
            "temperature": ["FP32", [0.0]],
            "top_p": ["FP32", [1.0]],
            "seed": ["UINT64", [7]],
            "return_num_input_tokens": ["BOOL", [True]],
            "return_num_output_tokens": ["BOOL", [True]],
        }
        (answer,) = server.ask("scripted", {"inputs": inputs})
        (response,) = answer["responses"]
        assert response["text_output"] == whole[: whole.index("héllo")]
        assert response["finish_reason"] == "stop"

    def test_a_conversation_goes_through_the_chat_template(self, server: Server, runners: dict[str, Runner]) -> None:
        messages = [{"role": "user", "content": "What is a symlink?"}]
        ids = runners["random"].encode_chat(messages)
        answer = server.generate("random", messages=json.dumps(messages), max_tokens=20).json
        assert answer["num_input_tokens"] == len(ids)
        assert answer["text_output"] == said(runners["random"], ids, max_tokens=20)

    def test_outputs_and_the_prompt_as_wanted(self, server: Server) -> None:
        plain = server.generate("random", text_input="Tell me", max_tokens=5).json
        fields = {"exclude_input_in_output": False, "return_num_input_tokens": False, "return_finish_reason": False}
        other = server.generate("random", text_input="Tell me", max_tokens=5, **fields).json
        assert other["text_output"] == "Tell me" + plain["text_output"]
        assert {"num_input_tokens", "finish_reason"} == plain.keys() - other.keys()

    def test_an_answer_of_a_given_form(self, server: Server) -> None:
        sampling = json.dumps({"guided_regex": "(yes|no), 日本 [0-9]{3}", "temperature": 1.0, "seed": 1})
        answer = server.generate("random", text_input="Tell me", sampling_parameters=sampling).json
        assert re.fullmatch("(yes|no), 日本 [0-9]{3}", answer["text_output"])
        assert answer["finish_reason"] == "stop"

    def test_tools_are_called_by_their_schemas(self, server: Server) -> None:
        schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
                  "additionalProperties": False}  # fmt: skip
        tools = json.dumps([{"type": "function", "function": {"name": "switch", "parameters": schema}}])
        asked = {"messages": json.dumps([{"role": "user", "content": "Light?"}]), "max_tokens": 200, "seed": 3}
        fields = {**asked, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
        reply = server.generate("random", **fields).json
        assert (reply["text_output"], reply["finish_reason"]) == ("", "tool_calls")
        (call,) = json.loads(reply["tool_calls"])
        assert (call["type"], call["function"]["name"], len(call["id"])) == ("function", "switch", 9)
        assert json.loads(call["function"]["arguments"])["on"] in (True, False)
        pieces = server.generate_stream("random", **fields)
        deltas = [each for piece in pieces for each in json.loads(piece.get("tool_calls", "[]"))]
        assert {each["index"] for each in deltas} == {0}
        assert sum("id" in each for each in deltas) == 1
        assert "".join(each["function"]["arguments"] for each in deltas) == call["function"]["arguments"]
        assert pieces[-1]["finish_reason"] == "tool_calls"
        assert sum(piece["num_output_tokens"] for piece in pieces) == reply["num_output_tokens"]
        named = {"sampling_parameters": json.dumps({"tools": json.loads(tools), "tool_choice": {
            "type": "function", "function": {"name": "switch"}}})}  # fmt: skip
        assert json.loads(server.generate("random", **asked, **named).json["tool_calls"])
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "on"}
        history = json.dumps([{"role": "user", "content": "Light?"}, message, result])
        going_on = server.generate("random", messages=history, tools=tools, max_tokens=2)
        assert going_on.json["finish_reason"] == "length"
        assert "tool_calls" not in going_on.json

    def test_log_probabilities_of_each_token(self, server: Server) -> None:
        pieces = server.generate_stream("random", text_input="Tell me", max_tokens=12, logprobs=2, ignore_eos=True)
        entries = [entry for piece in pieces for entry in json.loads(piece.get("logprobs", "[]"))]
        assert len(entries) == 12
        assert all(entry["token_id"] == entry["top"][0]["token_id"] and entry["logprob"] <= 0 for entry in entries)
        assert all(len(entry["top"]) == 2 for entry in entries)

    def test_the_documented_commands_run(self, server: Server, artifacts: dict[str, Artifact]) -> None:
        own = artifacts["random"].path / "triton" / "random" / "README.md"
        documents = [Path(__file__).parents[2] / "docs" / "triton.md", own]
        lines = [line for file in documents for line in file.read_text().splitlines() if line.startswith("curl ")]
        assert len(lines) == 8
        for line in lines:
            words = shlex.split(line)
            ports = {"127.0.0.1:8000": server.http, "127.0.0.1:8002": server.metrics_port}
            for documented, port in ports.items():
                words = [word.replace(documented, f"127.0.0.1:{port}") for word in words]
            words = [word.replace("docs-llama-int4", "random") for word in words]
            done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
            wanted = "llmforge_output_tokens_total" if "/metrics" in line else '"finish_reason":"'
            assert wanted in done.stdout, f"{line}: {done.stdout}"


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"stream": False}, "a request needs exactly one of text_input, messages, input_ids; this one has none"),
            ({"text_input": "a", "input_ids": [1]}, "this one has text_input, input_ids"),
            ({"text_input": "a", "max_tokens": 0}, "max_tokens 0: expected 1 or more"),
            ({"text_input": "a", "temperature": -1.0}, "temperature -1.0: expected"),
            ({"text_input": "a", "no_such_thing": 3}, "unknown parameter 'no_such_thing'"),
            ({"text_input": "a", "max_tokens": 3, "sampling_parameters": '{"max_tokens": 4}'}, "given twice"),
            ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters is not JSON"),
            ({"text_input": "a", "sampling_parameters": "[]"}, "expected a JSON object"),
            ({"text_input": "a", "sampling_parameters": "[" * 5000}, "sampling_parameters is not JSON"),
            ({"text_input": "a", "timeout_ms": -1}, "timeout_ms -1: expected a number of milliseconds"),
            ({"messages": "{}"}, 'messages: expected a list of {"role": …, "content": …}, not empty'),
            ({"messages": '[{"role": 1}]'}, 'messages[0]: expected an object {"role": …, "content": …}'),
            ({"messages": '[{"role": "user", "content": 1}]'}, "messages[0]: content is int; expected a string"),
            ({"input_ids": [published.VOCABULARY]}, "the vocabulary has 8192"),
            ({"text_input": "a", "tools": "[{}]"}, "tools: the model is shown them with messages alone"),
            ({"messages": '[{"role": "user", "content": "a"}]', "tools": "[{}]"}, "tools[0]: expected"),
            ({"messages": '[{"role": "user", "content": "a"}]', "tool_choice": "required"}, "has no `tools`"),
            ({"input_ids": [7] * CONTEXT}, f"allows at most {CONTEXT - 1}"),
            ({"input_ids": [7], "exclude_input_in_output": False}, "requires text_input"),
        ],
    )
    def test_bad_requests_get_an_error_that_says_why(
        self, server: Server, fields: dict[str, Any], message: str
    ) -> None:
        reply = server.generate("random", **fields)
        assert reply.status == 400, reply.text
        assert message in reply.json["error"]
        assert server.generate("random", text_input="a", max_tokens=1).status == 200

    def test_over_grpc_they_are_invalid_arguments(self, server: Server) -> None:
        inputs = {"text_input": text("a"), "max_tokens": ["INT32", [-1]], "stream": ["BOOL", [True]]}
        (answer,) = server.ask("random", {"inputs": inputs})
        assert answer["responses"] == []
        assert "max_tokens -1" in answer["error"]["message"]

    def test_a_full_queue_is_unavailable_and_cancelled_streams_free_their_slots(self, server: Server) -> None:
        before = server.settled("random")
        body = {"text_input": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        with contextlib.ExitStack() as held:
            for _ in range(SLOTS + QUEUE):
                held.enter_context(server.open("/v2/models/random/generate_stream", body, wait=False))
            server.wait_for("random", requests_running=SLOTS, requests_waiting=QUEUE)
            reply = server.generate("random", text_input="a", max_tokens=1)
            streamed = server.request("/v2/models/random/generate_stream", {"text_input": "a", "stream": True})
            (answer,) = server.ask("random", {"inputs": {"text_input": text("a")}})
        # This server's `generate` answers every error of a model with 400, so that the first word has to tell.
        assert (reply.status, streamed.status) == (400, 400)
        assert reply.json["error"].startswith("unavailable: the queue is full: ")
        assert streamed.text.startswith('data: {"error":"unavailable: the queue is full: ')
        assert answer["error"]["message"].startswith("unavailable: the queue is full: ")
        assert server.wait_for("random", requests_running=0, requests_waiting=0) < 2.0
        server.wait_for(
            "random",
            **{
                "answers_total:cancelled": before.get("llmforge_answers_total:cancelled", 0) + SLOTS + QUEUE,
                "answers_total:refused": before["llmforge_answers_total:refused"] + 3,
            },
        )


class TestCancelling:
    def test_by_grpc(self, server: Server) -> None:
        began = time.monotonic()
        inputs = {"text_input": text("a"), "max_tokens": ["INT32", [LONG]], "stream": ["BOOL", [True]]}
        (answer,) = server.ask("random", {"inputs": inputs, "parameters": {"ignore_eos": True}, "cancel_after": 5})
        assert 5 <= len(answer["responses"]) < LONG / 2
        server.wait_for("random", requests_running=0)
        assert time.monotonic() - began < 4.0

    def test_by_closing_the_connection(self, server: Server) -> None:
        """Of a stream: this server sees that nobody reads when it writes, and `generate` writes at the end alone."""
        before = server.settled("random").get("llmforge_answers_total:cancelled", 0)
        body = {"text_input": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        with server.open("/v2/models/random/generate_stream", body) as response:
            assert response is not None
            assert response.readline().startswith(b"data: ")
        taken = server.wait_for("random", requests_running=0, **{"answers_total:cancelled": before + 1})
        assert taken < 2.0

    @pytest.mark.thorough
    def test_500_streams_closed_at_random_moments_leave_the_server_as_it_was(self, server: Server) -> None:
        before = server.settled("random")
        random = np.random.default_rng(20261128)
        body = {"text_input": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}

        def close(lines: int) -> None:
            with server.open("/v2/models/random/generate_stream", body, wait=lines > 0) as response:
                for _ in range(lines):
                    assert response is not None
                    response.readline()

        inputs = {"text_input": text("a"), "max_tokens": ["INT32", [LONG]], "stream": ["BOOL", [True]]}
        for _ in range(10):
            with ThreadPoolExecutor(25) as pool:
                closed = [pool.submit(close, int(lines)) for lines in random.integers(0, 12, 25)]
                server.ask(
                    "random",
                    *({"inputs": inputs, "parameters": {"ignore_eos": True}, "cancel_after": int(after)}
                      for after in random.integers(1, 12, 25)),
                )  # fmt: skip
                for each in closed:
                    each.result()
        assert server.process.poll() is None
        server.wait_for("random", requests_running=0, requests_waiting=0)
        after = server.settled("random")
        ended = {
            name: after.get(f"llmforge_answers_total:{name}", 0) - before.get(f"llmforge_answers_total:{name}", 0)
            for name in ("cancelled", "refused")
        }
        assert ended["cancelled"] >= 250  # of 500; others found the queue full, or were closed before they were sent
        assert server.generate("random", text_input="a", max_tokens=1).status == 200

    def test_a_deadline_ends_an_answer(self, server: Server) -> None:
        inputs = {"text_input": text("a"), "max_tokens": ["INT32", [LONG]], "stream": ["BOOL", [True]]}
        (answer,) = server.ask("random", {"inputs": inputs, "parameters": {"ignore_eos": True}, "timeout_us": 300_000})
        assert answer["responses"][-1]["finish_reason"] == "timeout"
        assert answer["seconds"] < 3.0

    @pytest.mark.parametrize("parameter", [{"timeout_ms": 300}, {"timeout": 300_000}])
    def test_a_deadline_ends_an_answer_of_generate(self, server: Server, parameter: dict[str, Any]) -> None:
        began = time.monotonic()
        reply = server.generate("random", text_input="a", max_tokens=LONG, ignore_eos=True, **parameter)
        assert reply.status == 200, reply.text
        assert reply.json["finish_reason"] == "timeout"
        assert 0 < reply.json["num_output_tokens"] < LONG / 2
        assert 0.3 < time.monotonic() - began < 3.0


def test_a_client_that_does_not_read_holds_nobody_up(server: Server) -> None:
    body = {"text_input": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    alone = time.monotonic()
    server.generate_stream("random", text_input="b", max_tokens=100, ignore_eos=True)
    alone = time.monotonic() - alone
    with server.open("/v2/models/random/generate_stream", body) as response:
        response.readline()
        beside = time.monotonic()
        pieces = server.generate_stream("random", text_input="b", max_tokens=100, ignore_eos=True)
        beside = time.monotonic() - beside
        assert sum(piece["num_output_tokens"] for piece in pieces) == 100
        assert beside < 4 * alone + 1.0
        rest = [json.loads(line[6:]) for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert rest[-1]["finish_reason"] == "length"


def test_metrics_say_what_happened(server: Server) -> None:
    server.wait_for("random", requests_running=0)
    before = server.settled("random")
    for i in range(3):
        server.generate_stream("random", text_input=f"one two three {i}", max_tokens=50, ignore_eos=True)
    assert server.generate("random", text_input="a", max_tokens=0).status == 400
    server.wait_for("random", output_tokens_total=before["llmforge_output_tokens_total"] + 150)
    after = server.settled("random")
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["llmforge_answers_total:length"] == 3
    assert (grown["llmforge_answers_total:invalid"], grown["llmforge_answers_total:refused"]) == (1, 0)
    assert grown["llmforge_prompt_tokens_total"] > 9
    assert grown["llmforge_time_to_first_token_seconds_count"] == 3
    assert grown["llmforge_time_to_first_token_seconds_bucket:+Inf"] == 3
    assert grown["llmforge_inter_token_latency_seconds_count"] == 147
    assert 0 < grown["llmforge_inter_token_latency_seconds_sum"] < 30
    assert after["llmforge_kv_tokens_capacity"] == CONTEXT * SLOTS
    assert grown["nv_inference_request_success"] >= 3


HOSTILE = {
    "ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes more than"),
    "product": ("{{ 'x' * 10**9 }}", "more than 512 MB of memory"),
    "width": ("{{ '%0999999999d' | format(1) }}", "more than 512 MB of memory"),
    "output": ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 8388608 characters"),
}


@pytest.mark.thorough
def test_a_hostile_chat_template_stops_neither_other_requests_nor_the_server(
    env: TritonEnv, sample_checkpoint: Path, tmp_path: Path
) -> None:
    """One client sends chats that loop and swell, two at once; another's stream and small requests go on."""
    cases = "".join(
        f"{'el' if number else ''}{'if'} messages[0].content == '{name}' %}}{source}{{% "
        for number, (name, (source, _)) in enumerate(HOSTILE.items())
    )
    template = f"{{% {cases}else %}}{{{{ messages[0].content }}}}{{% endif %}}"
    serving = ServingSpec(max_queue=QUEUE)
    out = tmp_path / "artifacts"
    made = published.random_decoder(
        out, sample_checkpoint, max_context=CONTEXT, max_batch=SLOTS, serving=serving, template=template
    )

    def chat(content: str) -> Reply:
        messages = json.dumps([{"role": "user", "content": content}])
        return server.generate("random", messages=messages, max_tokens=2)

    def longest_pauses(ended: threading.Event) -> tuple[float, float, int]:
        """Read a stream of tokens, and ask for single ones meanwhile: the longest pause of each, and how many came."""
        body = {"text_input": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        between, answers = 0.0, []
        with server.open("/v2/models/random/generate_stream", body) as response:
            response.readline()
            last = time.monotonic()
            while not ended.is_set():
                if response.readline().startswith(b"data: "):
                    between, last = max(between, time.monotonic() - last), time.monotonic()
                if not answers or last - answers[-1][0] > 0.2:
                    began = time.monotonic()
                    assert server.generate("random", text_input="b", max_tokens=1).status == 200
                    last = time.monotonic()  # what came meanwhile lies in the connection
                    answers.append((last, last - began))
        return between, max(seconds for _, seconds in answers), len(answers)

    with launched(env, made.path, tmp_path / "repository") as server, ThreadPoolExecutor(3) as pool:
        assert chat("good").status == 200
        quiet = threading.Event()
        alone = pool.submit(longest_pauses, quiet)
        time.sleep(1)
        quiet.set()
        between_alone, answer_alone, _ = alone.result()
        ended = threading.Event()
        beside = pool.submit(longest_pauses, ended)
        began = time.monotonic()
        names = list(HOSTILE) * 2
        replies = list(ThreadPoolExecutor(2).map(chat, names))
        took = time.monotonic() - began
        ended.set()
        between, answer, count = beside.result()
        print(
            f"alone {between_alone:.3f} {answer_alone:.3f}; {took:.1f} s: {between:.3f} {answer:.3f}, {count} answers"
        )
        for name, reply in zip(names, replies, strict=True):
            assert reply.status == 400
            assert "the chat template cannot render these messages" in reply.json["error"]
            assert HOSTILE[name][1] in reply.json["error"]
        assert count > 10
        # A rendering takes up to 3 s; who waited for one would have a pause of that.
        assert between < between_alone + 1.0
        assert answer < answer_alone + 1.0
        assert chat("good").status == 200
        assert server.process.poll() is None
        assert server.request("/v2/health/ready").status == 200


class TestEnds:
    """Servers of their own, for they end."""

    @pytest.mark.thorough
    def test_sigterm_lets_a_running_stream_end(
        self, env: TritonEnv, artifacts: dict[str, Artifact], tmp_path: Path
    ) -> None:
        with launched(env, artifacts["random"].path, tmp_path / "repository") as server:
            warmed = server.settled("random")
            assert (warmed["llmforge_prompt_tokens_total"], warmed["llmforge_output_tokens_total"]) == (32, 2)
            body = {"text_input": "a", "max_tokens": 2500, "ignore_eos": True, "stream": True}
            with server.open("/v2/models/random/generate_stream", body) as response:
                response.readline()
                server.process.terminate()
                lines = [line for line in response if line.startswith(b"data: ")]
            last = json.loads(lines[-1][6:])
            assert last["finish_reason"] == "length"
            assert json.loads(last["usage"])["output_tokens"] == 2500
            assert server.process.wait(30) == 0

    @pytest.mark.thorough
    def test_a_full_queue_has_the_status_unavailable(
        self, env: TritonEnv, artifacts: dict[str, Artifact], tmp_path: Path
    ) -> None:
        """Triton 2.51 tells statuses where a header asks for them, and may crash when that stream is closed."""
        body = {"text_input": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        request = {"inputs": {"text_input": text("a")}, "headers": {"triton_grpc_error": "true"}}
        options = ("--set", "max_queue=0")
        with (
            launched(env, artifacts["random"].path, tmp_path / "repository", options=options) as server,
            contextlib.ExitStack() as held,
        ):
            for _ in range(SLOTS):
                held.enter_context(server.open("/v2/models/random/generate_stream", body, wait=False))
            server.wait_for("random", requests_running=SLOTS)
            (answer,) = server.ask("random", request)
        assert answer["error"]["status"] == "StatusCode.UNAVAILABLE"
        assert "the queue is full" in answer["error"]["message"]

    @pytest.mark.thorough
    def test_a_dead_engine_fails_every_request_and_ends_the_server(
        self, env: TritonEnv, artifacts: dict[str, Artifact], tmp_path: Path
    ) -> None:
        with launched(env, artifacts["scripted"].path, tmp_path / "repository") as server:
            running = {"inputs": {"text_input": text("x"), "stream": ["BOOL", [True]]}}
            deadly = {"inputs": {"input_ids": ["INT64", [7, published.DEADLY]]}}
            answers = server.ask("scripted", running, deadly, running)
            assert "the engine failed" in answers[1]["error"]["message"]
            assert all(answer["error"] or answer["responses"][-1]["finish_reason"] for answer in answers)
            assert server.process.wait(30) == 0
            assert "the engine failed; ending the server" in server.log.read_text()

    def test_a_killed_server_leaves_no_process_behind(
        self, env: TritonEnv, artifacts: dict[str, Artifact], tmp_path: Path
    ) -> None:
        with launched(env, artifacts["random"].path, tmp_path / "repository") as server:
            body = {"text_input": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
            with server.open("/v2/models/random/generate_stream", body) as response:
                response.readline()
                children = psutil.Process(server.process.pid).children(recursive=True)
                assert children
                assert server.shared_files()
                server.process.kill()
                _, alive = psutil.wait_procs(children, timeout=15)
            assert server.shared_files() == []
        assert alive == []

    @pytest.mark.parametrize("lack", ["onnxruntime", "numpy", "packages"])
    def test_what_does_not_fit_is_refused_in_plain_words(
        self, env: TritonEnv, artifacts: dict[str, Artifact], tmp_path: Path, lack: str
    ) -> None:
        path, serving = artifacts["scripted"].path, None
        if lack == "onnxruntime":
            message = "the artifact was built and validated with onnxruntime 1.2.3"
            path = other_onnxruntime(artifacts["scripted"], tmp_path)
        elif lack == "numpy":
            message = "the python backend of this Triton was built for numpy 1: every answer would be empty"
            serving = with_numpy_2(env, tmp_path / "numpy2")
        else:
            message = "has no jinja2, onnxruntime, tokenizers"
            serving = env.folder / "client"
        for attempt in range(3):
            with launched(env, path, tmp_path / f"repository{attempt}", serving=serving, ready=False) as server:
                status = server.process.wait(30)
            if status != -signal.SIGABRT:  # how Triton 2.51 itself now and then takes a failed load on busy cores
                break
        assert status == 1
        assert message in server.log.read_text()


def other_onnxruntime(artifact: Artifact, folder: Path) -> Path:
    """Publish the artifact again, as one that another ONNX Runtime was validated with."""
    from llmforge import artifact as artifacts

    with artifacts.staging(folder / "other", "scripted") as staging:
        shutil.copytree(artifact.path, staging, dirs_exist_ok=True, copy_function=shutil.copyfile)
        (staging / "manifest.json").unlink()
        shutil.rmtree(staging / "evidence")
        config = staging / "engine" / "runtime.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "onnxruntime": "1.2.3"}))
        manifest = artifact.manifest
        facts = {name: getattr(manifest, name) for name in ("recipe", "checkpoint", "target", "requires")}
        return stored.publish(staging, **facts).path


def with_numpy_2(env: TritonEnv, folder: Path) -> Path:
    """Make an environment that has the packages of serving, and numpy 2 in front of them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (theirs,) = (env.folder / "client").glob("lib/python*/site-packages")
    (usual,) = (env.folder / "serving").glob("lib/python*/site-packages")
    for source in theirs.glob("numpy*"):
        (packages / source.name).symlink_to(source)
    (packages / "usual.pth").write_text(f"{usual}\n")
    return folder


@pytest.mark.thorough
def test_what_a_build_publishes_serves_where_it_lies(
    env: TritonEnv, artifacts: dict[str, Artifact], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The repository inside an artifact, whose engine needs the operators of llmforge where they are compiled."""
    budget = {"kld_mean": 5.0}  # random weights
    kernels = [{"cpu-kernels": {"budget": budget}}] if native.library() is not None else []
    recipe = {
        "schema": 1,
        "name": "built",
        "checkpoint": str(tiny_checkpoint),
        "target": "local",
        "engine": {"max_context": 128, "max_batch": 2, "threads": 1},
        "calibration": {"data": "calibration.jsonl", "samples": 2, "length": 32},
        "passes": [
            "fuse-norms", "pack-qkv", "pack-gate-up", "flash-attention",
            {"quantize-weights": {"block_size": 32, "method": "rtn", "budget": budget}}, *kernels,
        ],
        "serving": {"max_queue": 5},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    (tmp_path / "calibration.jsonl").write_text(json.dumps({"id": "a", "text": "graph engine pass weight " * 20}))
    built = CliRunner().invoke(cli, ["build", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path), "--quiet"])
    assert built.exit_code == 0, built.output
    artifact = Artifact.open(Path(built.stdout.splitlines()[-1]))
    libraries = [path for path in artifact.manifest.files if path.endswith(".so")]
    assert len(libraries) == len(kernels)
    with launched(
        env, artifacts["random"].path, tmp_path / "repository", f"--model-repository={artifact.path / 'triton'}"
    ) as server:
        answer = server.generate("built", text_input="graph", max_tokens=30, ignore_eos=True).json
        config = server.request("/v2/models/built/config").json
    assert config["parameters"]["max_queue"] == {"string_value": "5"}
    assert answer["text_output"] == said(load(artifact.path), "graph", max_tokens=30, ignore_eos=True)
    artifact.verify()  # nothing was written into it


QUIZ = [
    {"question": f"The function returns the {thing}", "choices": [" of the", " is not", " qq"], "answer": 0}
    for thing in ("number", "value", "list")
]
TEXTS = [{"page": "The server sends a reply."}, {"page": "See also the next chapter."}]


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra `eval`")
def test_tasks_through_the_server_equal_those_of_the_engine_item_by_item(
    env: TritonEnv, sample_checkpoint: Path, tmp_path: Path
) -> None:
    file = write_recipe(tmp_path, sample_checkpoint)
    built = CliRunner().invoke(cli, ["build", str(file), "--out", str(tmp_path / "store"), "--quiet"])
    assert built.exit_code == 0, built.output
    path = built.stdout.splitlines()[-1]
    quiz = {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices",
        "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    texts = {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }  # fmt: skip
    files = ",".join(str(tmp_path / f"{name}.yaml") for name in ("quiz", "texts"))
    words = ["eval", path, "--recipe", str(file), "--tasks", files, "--json", "--quiet"]
    for name, task, items in (("quiz", quiz, QUIZ), ("texts", texts, TEXTS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **data, **task}))
    repository = tmp_path / "repository"
    repository.mkdir()
    with launched(env, Path(path), repository) as running:
        url = f"http://127.0.0.1:{running.http}/v2/models/plain"
        served = CliRunner().invoke(cli, [*words, "--url", url])
        assert served.exit_code == 0, served.output
    local = CliRunner().invoke(cli, words)
    assert local.exit_code == 0, local.output
    through, here = (json.loads(done.stdout)["tasks"] for done in (served, local))
    assert [task["name"] for task in through] == ["quiz", "texts"]
    assert "plain of Triton" in through[0]["engine"]
    assert "Triton" not in here[0]["engine"]
    for left, right in zip(through, here, strict=True):
        assert left["digest"] == right["digest"]  # the same requests
        for score in right["scores"]:
            ours, theirs = left["scores"][score], right["scores"][score]
            assert ours["artifact"] == pytest.approx(theirs["artifact"], abs=1e-3)
            assert ours["baseline"] == theirs["baseline"]
    accuracy, bits = here[0]["scores"]["accuracy"]["artifact"], through[1]["scores"]["bits_per_byte"]["artifact"]
    assert accuracy == through[0]["scores"]["accuracy"]["artifact"]
    assert len(accuracy) == 3
    assert max(bits) < 0  # nats of each text


def test_triton_itself_traces_requests_that_name_a_trace(server: Server, collector: Collector) -> None:
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "tracestate": "vendor=1"}
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60)
    with contextlib.closing(connection):
        body = json.dumps({"text_input": "If the file", "max_tokens": 3, "stream": True})
        connection.request("POST", "/v2/models/random/generate_stream", body, headers)
        assert connection.getresponse().read()
    assert server.generate("random", text_input="If the file", max_tokens=1).status == 200  # which names none
    end = time.monotonic() + 20
    while not collector.received and time.monotonic() < end:
        time.sleep(0.05)
    sent = [json.loads(body) for *_, body in collector.received]
    scopes = [scope for each in sent for resource in each["resourceSpans"] for scope in resource["scopeSpans"]]
    spans = {span["name"]: span for scope in scopes for span in scope["spans"]}
    assert spans.keys() == {"InferRequest", "random", "compute"}
    assert {(span["traceId"], span["traceState"]) for span in spans.values()} == {(trace, "vendor=1")}
    assert spans["InferRequest"]["parentSpanId"] == "b7ad6b7169203331"
