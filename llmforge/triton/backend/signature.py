"""The tensors of the model, by the names that LLM clients of Triton use; stated once for config and code.

Triton's OpenAI frontend sends a python model the names of its TensorRT-LLM models: `text_input`, `stream`,
`max_tokens`, `stop_words`, `temperature`, …; clients of its vLLM backend put them into `sampling_parameters`. A client
may send either, and anything else that the runtime knows as a parameter of the request.
Shapes are [1, n]: a request holds one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model: name, Triton's data type, and its length (-1: any)."""

    name: str
    data_type: str
    length: int = 1


TEXT_INPUT = TensorSpec("text_input", "TYPE_STRING")  # the prompt, plain text
MESSAGES = TensorSpec("messages", "TYPE_STRING")  # or a conversation: JSON list of {role, content}
INPUT_IDS = TensorSpec("input_ids", "TYPE_INT64", -1)  # or token ids
STREAM = TensorSpec("stream", "TYPE_BOOL")  # a response for each piece of text; else one for all
SAMPLING_PARAMETERS = TensorSpec("sampling_parameters", "TYPE_STRING")  # JSON object
EXCLUDE_INPUT = TensorSpec("exclude_input_in_output", "TYPE_BOOL")  # false: `text_input` stands before the output
RETURN_INPUT_TOKENS = TensorSpec("return_num_input_tokens", "TYPE_BOOL")  # false leaves the output out
RETURN_OUTPUT_TOKENS = TensorSpec("return_num_output_tokens", "TYPE_BOOL")
RETURN_FINISH_REASON = TensorSpec("return_finish_reason", "TYPE_BOOL")

# Parameters of sampling that have tensors of their own.
SAMPLING = (
    TensorSpec("max_tokens", "TYPE_INT32"),
    TensorSpec("temperature", "TYPE_FP32"),
    TensorSpec("top_p", "TYPE_FP32"),
    TensorSpec("top_k", "TYPE_INT32"),
    TensorSpec("seed", "TYPE_UINT64"),
    TensorSpec("stop_words", "TYPE_STRING", -1),
    TensorSpec("presence_penalty", "TYPE_FP32"),
    TensorSpec("frequency_penalty", "TYPE_FP32"),
    TensorSpec("repetition_penalty", "TYPE_FP32"),
)
INPUTS = (
    TEXT_INPUT, MESSAGES, INPUT_IDS, STREAM, SAMPLING_PARAMETERS, EXCLUDE_INPUT, RETURN_INPUT_TOKENS,
    RETURN_OUTPUT_TOKENS, RETURN_FINISH_REASON, *SAMPLING,
)  # fmt: skip

TEXT_OUTPUT = TensorSpec("text_output", "TYPE_STRING")  # what is new since the response before
FINISH_REASON = TensorSpec("finish_reason", "TYPE_STRING")  # "" until the last response
NUM_INPUT_TOKENS = TensorSpec("num_input_tokens", "TYPE_UINT32")  # of the prompt
NUM_OUTPUT_TOKENS = TensorSpec("num_output_tokens", "TYPE_UINT32")  # of this response: those of all responses add up
USAGE = TensorSpec("usage", "TYPE_STRING")  # last response: JSON of `llmforge.serving.Usage`
LOGPROBS = TensorSpec("logprobs", "TYPE_STRING")  # where asked for: JSON list, one entry a token of this response
# Where there are any: JSON list of calls in OpenAI's shape; in a stream, of what is new of them, with `index`.
TOOL_CALLS = TensorSpec("tool_calls", "TYPE_STRING")
OUTPUTS = (TEXT_OUTPUT, FINISH_REASON, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, USAGE, LOGPROBS, TOOL_CALLS)
