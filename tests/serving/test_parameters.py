"""Parameters of requests, as clients send them."""

from __future__ import annotations

import json

import pytest

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import Constraint
from llmforge.runtime.sampling.parameters import sampling_of, samplings_of
from llmforge.serving import Sampling

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ({}, Sampling()),
        (
            {"max_tokens": 16, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7},
            Sampling(max_tokens=16, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=7),
        ),
        (
            {
                "max_tokens": "16",
                "temperature": "0.7",
                "top_k": "40",
                "seed": "7",
                "ignore_eos": "true",
                "min_tokens": "2",
            },
            Sampling(max_tokens=16, temperature=0.7, top_k=40, seed=7, ignore_eos=True, min_tokens=2),
        ),
        ({"max_tokens": 16.0, "temperature": 0}, Sampling(max_tokens=16)),
        ({"max_completion_tokens": 9, "max_tokens": None, "stop": None}, Sampling(max_tokens=9)),
        ({"max_completion_tokens": 9, "max_tokens": "9"}, Sampling(max_tokens=9)),
        ({"top_k": -1}, Sampling(top_k=0)),
        ({"temperature": 1, "random_seed": -1}, Sampling(temperature=1.0, seed=2**64 - 1)),
        (
            {"repetition_penalty": 1.2, "presence_penalty": "-1", "frequency_penalty": 2},
            Sampling(repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=2.0),
        ),
        ({"logit_bias": {"5": -100, "7": "1.5"}}, Sampling(logit_bias=((5, -100.0), (7, 1.5)))),
        ({"logit_bias": '{"5": -100}'}, Sampling(logit_bias=((5, -100.0),))),
        ({"stop": "\n"}, Sampling(stop=("\n",))),
        ({"stop_words": ["a", "b"], "include_stop_str_in_output": True}, Sampling(stop=("a", "b"), include_stop=True)),
        ({"stop_token_ids": [1, 2]}, Sampling(stop_token_ids=(1, 2))),
        ({"stop_token_ids": "[1, 2]"}, Sampling(stop_token_ids=(1, 2))),
        ({"logprobs": 3}, Sampling(logprobs=3)),
        ({"logprobs": "0"}, Sampling(logprobs=0)),
        ({"logprobs": True}, Sampling(logprobs=0)),
        ({"logprobs": "True", "top_logprobs": "5"}, Sampling(logprobs=5)),
        ({"logprobs": False, "top_logprobs": 0}, Sampling()),
        ({"response_format": {"type": "text"}}, Sampling()),
        ({"response_format": {"type": "json_object"}}, Sampling(constraint=Constraint.json_object())),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Sampling(constraint=Constraint.json_schema(SCHEMA)),
        ),
        ({"guided_json": SCHEMA}, Sampling(constraint=Constraint.json_schema(SCHEMA))),
        ({"guided_json": json.dumps(SCHEMA)}, Sampling(constraint=Constraint.json_schema(SCHEMA))),
        ({"guided_json_object": "false"}, Sampling()),
        ({"guided_regex": "[ab]+"}, Sampling(constraint=Constraint("regex", "[ab]+"))),
        ({"guided_grammar": 'start: "a"'}, Sampling(constraint=Constraint("grammar", 'start: "a"'))),
        ({"guided_choice": ["yes", "no"]}, Sampling(constraint=Constraint.choice(["yes", "no"]))),
        ({"structured_outputs": {"regex": "a", "json": None}}, Sampling(constraint=Constraint("regex", "a"))),
        ({"structured_outputs": '{"choice": ["a"]}'}, Sampling(constraint=Constraint.choice(["a"]))),
        ({"n": "1"}, Sampling()),
    ],
)
def test_what_clients_send(parameters, wanted):
    assert sampling_of(parameters) == wanted


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temprature": 1}, "unknown parameter 'temprature'\nhint: did you mean 'temperature'"),
        ({"zzz": 1}, "unknown parameter 'zzz'\nhint: known: max_tokens, max_completion_tokens, .*guided_regex"),
        ({"max_tokens": "many"}, "max_tokens 'many': expected an integer"),
        ({"max_tokens": 1.5}, "max_tokens 1.5: expected an integer"),
        ({"max_tokens": True}, "max_tokens True: expected an integer"),
        ({"max_tokens": [3]}, r"max_tokens \[3\]: expected an integer"),
        ({"max_tokens": 0}, "max_tokens 0: expected 1 or more"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens contradict each other"),
        ({"temperature": "warm"}, "temperature 'warm': expected a number"),
        ({"temperature": True}, "temperature True: expected a number"),
        ({"temperature": "nan"}, "temperature nan: expected a finite number"),
        ({"temperature": 10**400}, "temperature 1000.*…: expected a number of 64 bits"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias: duplicate token id"),
        ({"guided_json": "[" * 100_000}, "guided_json '.*…: expected JSON"),
        ({"top_k": -2}, "top_k -2: expected 0"),
        ({"ignore_eos": 1}, "ignore_eos 1: expected true or false"),
        ({"stop": 5}, "stop 5: expected a string or a list of strings"),
        ({"stop": ["a", 5]}, "expected a string or a list of strings"),
        ({"stop": ""}, "strings must not be empty"),
        ({"stop_token_ids": {"a": 1}}, "expected a list of token ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids 'x': expected an integer"),
        ({"logit_bias": [1]}, "expected an object of token ids and numbers"),
        ({"logit_bias": "{"}, "logit_bias '{': expected JSON"),
        ({"logit_bias": {"x": 1}}, "logit_bias 'x': expected an integer"),
        ({"logit_bias": {"1": 200}}, "logit_bias of token 1: 200.0: expected -100 to 100"),
        ({"logprobs": "some"}, "logprobs 'some': expected an integer"),
        ({"logprobs": 21}, "logprobs 21: expected 0 to 20"),
        ({"logprobs": 2, "top_logprobs": 2}, "top_logprobs cannot be used with a numeric logprobs"),
        ({"top_logprobs": 2}, "top_logprobs requires logprobs"),
        ({"response_format": "json"}, "response_format 'json': expected JSON"),
        ({"response_format": {"type": "xml"}}, 'expected an object whose "type" is "text"'),
        (
            {"response_format": {"type": "json_schema", "schema": {}}},
            'response_format: expected {"type": "json_schema"',
        ),
        ({"guided_json": [1]}, "expected a JSON schema"),
        ({"guided_regex": 5}, "guided_regex 5: expected a regular expression"),
        ({"guided_choice": []}, "a choice needs at least one string"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex and guided_json contradict each other"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "expected an object with one of json, json_object, regex"),
        ({"structured_outputs": {"xml": "a"}}, "expected an object with one of json"),
        ({"n": 3}, "n 3: only one answer per request is supported here"),
        ({"n": 0}, "n 0: expected 1 to 128"),
        ({"n": 10**12}, "n 1000000000000: expected 1 to 128"),
    ],
)
def test_what_is_refused(parameters, message):
    with pytest.raises(UsageError) as raised:
        sampling_of(parameters)
    raised.match(message)


def test_a_wrong_value_is_shown_in_part():
    with pytest.raises(UsageError) as raised:
        sampling_of({"max_tokens": "9" * 100_000})
    assert len(str(raised.value)) < 120


def test_an_answer_that_samples_gets_a_seed():
    seeds = {sampling_of({"temperature": 1.0}).seed for _ in range(5)}
    assert len(seeds) == 5
    assert sampling_of({"temperature": 1.0, "seed": 0}).seed == 0


def test_n_answers_differ_by_their_seeds_alone():
    several = samplings_of({"n": 3, "temperature": 1, "seed": 4, "top_k": 5})
    assert several == Sampling(temperature=1.0, seed=4, top_k=5).repeated(3)
