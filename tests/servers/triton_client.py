"""NVIDIA's gRPC client, run in its own environment: JSON in on standard input, JSON out.

In: `{"url", "model", "requests": [{"inputs": {name: [datatype, values]}, "parameters", "timeout_us", "headers",
"cancel_after"}]}`; each request goes out at once, over a stream of its own, and is cancelled after `cancel_after`
responses.
Out, for each: `{"responses": [{output: value}], "final": bool, "error": {"status", "message"}, "seconds": float}`.

Or `{"url", "model", "infer": [{"inputs": {name: [datatype, rows]}, "parameters"}]}`, all sent at once to a model that
answers each request once; out, for each: `{"outputs": {name: rows}}` or `{"error"}`.

Or `{"config": text}`: parse config.pbtxt by Triton's own schema; out: what it says, as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

WAIT_S = 60


def tensors(inputs: dict[str, Any]) -> list[Any]:
    made = []
    for name, (datatype, values) in inputs.items():
        values = [value.encode() for value in values] if datatype == "BYTES" else values
        array = np.array([values], triton_to_np_dtype(datatype))
        tensor = grpc.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value.item()


def ask(url: str, model: str, request: dict[str, Any], out: dict[str, Any]) -> None:
    began, done = time.perf_counter(), threading.Event()
    out.update(responses=[], final=False, error=None)
    cancel_after = request.get("cancel_after")

    def receive(result: Any, error: InferenceServerException | None) -> None:
        if error is not None:
            out["error"] = {"status": error.status(), "message": error.message()}
            done.set()
            return
        response = result.get_response()
        if response.outputs:
            names = [output.name for output in response.outputs]
            out["responses"].append({name: plain(result.as_numpy(name).reshape(-1)[0]) for name in names})
        out["final"] = response.parameters["triton_final_response"].bool_param
        if out["final"] or len(out["responses"]) == cancel_after:
            done.set()

    with grpc.InferenceServerClient(url) as client:
        client.start_stream(callback=receive, headers=request.get("headers"))
        client.async_stream_infer(
            model,
            tensors(request["inputs"]),
            enable_empty_final_response=True,
            parameters=request.get("parameters"),
            timeout=request.get("timeout_us"),
        )
        assert done.wait(WAIT_S), "no final response"
        client.stop_stream(cancel_requests=cancel_after is not None)
    out["seconds"] = time.perf_counter() - began


def infer(url: str, model: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with grpc.InferenceServerClient(url) as client:
        done = [(threading.Event(), {}) for _ in requests]

        def receive(event: Any, out: dict[str, Any], result: Any, error: InferenceServerException | None) -> None:
            if error is None:
                names = [output.name for output in result.get_response().outputs]
                out["outputs"] = {name: result.as_numpy(name).tolist() for name in names}
            else:
                out["error"] = error.message()
            event.set()

        for (event, out), request in zip(done, requests, strict=True):
            made = []
            for name, (datatype, rows) in request["inputs"].items():
                encoded = [[each.encode() for each in row] for row in rows] if datatype == "BYTES" else rows
                array = np.array(encoded, np.object_ if datatype == "BYTES" else triton_to_np_dtype(datatype))
                made.append(grpc.InferInput(name, list(array.shape), datatype))
                made[-1].set_data_from_numpy(array)
            client.async_infer(model, made, partial(receive, event, out), parameters=request.get("parameters"))
        for event, _ in done:
            assert event.wait(WAIT_S), "no response"
    return [out for _, out in done]


def main(job: dict[str, Any]) -> Any:
    if "config" in job:
        parsed = text_format.Parse(job["config"], model_config_pb2.ModelConfig())
        return json_format.MessageToDict(parsed, preserving_proto_field_name=True)
    if "infer" in job:
        return infer(job["url"], job["model"], job["infer"])
    answers: list[dict[str, Any]] = [{} for _ in job["requests"]]
    threads = [
        threading.Thread(target=ask, args=(job["url"], job["model"], request, answer))
        for request, answer in zip(job["requests"], answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
