"""What a caller may choose: defaults that change nothing, values that are refused, seeds of several answers."""

from __future__ import annotations

import math
import pickle

import pytest

from llmforge.base.errors import UsageError
from llmforge.runtime.sampling.constraints import Constraint
from llmforge.serving import Request, Sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1: expected a finite number"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"top_p": 0.0}, "top_p 0.0: expected more than 0, at most 1"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"min_p": -0.1}, "min_p -0.1: expected 0"),
        ({"min_p": 1.1}, "min_p 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0: expected 0.01 to 100"),
        ({"repetition_penalty": math.inf}, "repetition_penalty inf"),
        ({"presence_penalty": 2.1}, "presence_penalty 2.1: expected -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty nan: expected -2 to 2"),
        ({"logit_bias": ((-1, 0.0),)}, "logit_bias: token id -1"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias of token 5: 101.0: expected -100 to 100"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias: duplicate token id"),
        ({"seed": -1}, "seed -1"),
        ({"max_tokens": 0}, "max_tokens 0: expected 1 or more"),
        ({"min_tokens": -1}, "min_tokens -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5: expected at most max_tokens, which is 4"),
        ({"stop": ("a", "")}, "strings must not be empty"),
        ({"stop": ("a",) * 65}, "stop: expected at most 64 strings of at most 1024 characters"),
        ({"stop": ("a" * 1025,)}, "stop: expected at most 64 strings"),
        ({"stop_token_ids": (3, -3)}, "stop_token_ids: -3"),
        ({"logprobs": -1}, "logprobs -1: expected 0 to 20"),
        ({"logprobs": 21}, "logprobs 21"),
        ({"constraint": Constraint("regex", "a"), "ignore_eos": True}, "ignore_eos cannot be used with a constraint"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Sampling(**options)


def test_a_sampling_is_a_value():
    sampling = Sampling(logit_bias=((1, 2.0),), stop=("a",), constraint=Constraint.json_object())
    assert pickle.loads(pickle.dumps(sampling)) == sampling
    assert hash(sampling) == hash(pickle.loads(pickle.dumps(sampling)))


def test_answers_to_one_prompt_have_seeds_of_their_own():
    sampling = Sampling(temperature=1.0, seed=3, top_k=5)
    first, second, third = sampling.repeated(3)
    assert first == sampling
    assert len({first.seed, second.seed, third.seed}) == 3
    assert second.top_k == third.top_k == 5
    assert sampling.repeated(2) == (first, second)
    assert not {each.seed for each in Sampling(seed=4).repeated(20)} & {each.seed for each in sampling.repeated(20)}
    for n in (0, 129):
        with pytest.raises(UsageError, match=f"n {n}: expected 1 to 128"):
            sampling.repeated(n)


def test_a_request_is_repeated_with_its_prompt():
    request = Request((1, 2, 3), Sampling(temperature=1.0), timeout_s=5.0)
    requests = request.repeated(3)
    assert requests[0] == request
    assert {(each.prompt, each.timeout_s) for each in requests} == {((1, 2, 3), 5.0)}
    assert len({each.sampling.seed for each in requests}) == 3
