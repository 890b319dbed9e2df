"""Print greedy answers of OpenVINO to prompts, lists of token ids as JSON; FOLDER has its model.onnx."""

import json
import sys

import numpy as np
import openvino

TOKENS = 64


def answer(request: openvino.InferRequest, ids: list[int]) -> list[int]:
    """Continue `ids` by `TOKENS` tokens over keys and values that go back in as they came out."""
    model = request.model_inputs
    shapes = {each.any_name: each.partial_shape for each in model if each.any_name.startswith("past_key_values.")}
    past = {
        name: np.zeros([1, shape[1].get_length(), 0, shape[3].get_length()], np.float32)
        for name, shape in shapes.items()
    }
    made: list[int] = []
    read = ids
    for _ in range(TOKENS):
        before = len(ids) + len(made) - len(read)
        inputs = {
            "input_ids": np.array([read], np.int64),
            "attention_mask": np.ones((1, before + len(read)), np.int64),
            "position_ids": np.arange(before, before + len(read))[None],
        }
        result = request.infer({**inputs, **past})
        past = {name: result[name.replace("past_key_values", "present")].copy() for name in past}
        made.append(int(result["logits"][0, -1].argmax()))
        read = made[-1:]
    return made


def main() -> None:
    """Write the version, and an answer to each prompt."""
    folder, prompts = sys.argv[1], json.loads(sys.stdin.read())
    core = openvino.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    request = core.compile_model(core.read_model(f"{folder}/model.onnx"), "CPU", exact).create_infer_request()
    answers = [answer(request, ids) for ids in prompts]
    json.dump({"version": openvino.__version__, "answers": answers}, sys.stdout)


main()
