"""A conversation of each client with a server, run in its environment: `client_conversation.py NAME URL MODEL`.

NAME is openai, langchain or litellm. The answers are those of random weights: what is checked is their shape, what is
held to a schema, and that nothing is refused. Prints the names of what was done, one a line.
"""

# mypy: ignore-errors
# ruff: noqa: PT017 (there is no pytest here)
from __future__ import annotations

import json
import sys
from typing import Literal

PROMPT = "If the file does not exist,"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Oslo"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def done(what: str) -> None:
    print(what, flush=True)


def check_arguments(arguments: dict) -> None:
    assert arguments.keys() == {"city", "unit"}, arguments
    assert arguments["city"] in {"Köln", "Oslo"}
    assert arguments["unit"] in {"C", "F"}


def talk_openai(url: str, model: str) -> None:
    import openai
    import pydantic

    class Step(pydantic.BaseModel):
        rule: Literal["add", "subtract"]
        left: int = pydantic.Field(ge=0, le=99)

    class Answer(pydantic.BaseModel):
        steps: list[Step] = pydantic.Field(min_length=1, max_length=2)
        unit: Literal["m", "s"] | None

    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    done("models")

    chat = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True)
    assert chat.usage.completion_tokens <= 12
    assert chat.choices[0].logprobs.content
    text = client.completions.create(model=model, prompt=[PROMPT, "Another"], max_tokens=6, n=2, best_of=1)
    assert [each.index for each in text.choices] == [0, 1, 2, 3]
    done("whole answers")

    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == chat.choices[0].message.content
    assert chunks[-1].usage.total_tokens == chat.usage.total_tokens
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=12, temperature=0) as events:
        assert [each.content for each in events if each.type == "content.done"] == [chat.choices[0].message.content]
    pieces = [each.choices[0].text for each in client.completions.create(
        model=model, prompt=PROMPT, max_tokens=6, temperature=0, stream=True)]  # fmt: skip
    assert "".join(pieces)
    done("streams")

    endless = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(endless))
    endless.close()
    done("cancel")

    for strict in (True, False):
        called = client.chat.completions.create(
            model=model, messages=MESSAGES, tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": strict}}],
            tool_choice="required", parallel_tool_calls=False, max_tokens=200,
        ).choices[0]  # fmt: skip
        assert called.finish_reason == "tool_calls"
        (call,) = called.message.tool_calls
        check_arguments(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*MESSAGES, called.message, result]
    assert client.chat.completions.create(model=model, messages=history, tools=[WEATHER], max_tokens=8).choices
    dumped = [*MESSAGES, called.message.model_dump(), result]
    assert client.chat.completions.create(model=model, messages=dumped, tools=[WEATHER], max_tokens=8).choices
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ) as events:
        kinds = {each.type for each in events}
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds, kinds
    check_arguments(json.loads(call.function.arguments))
    done("tools")

    parsed = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Answer, max_completion_tokens=300, temperature=1, seed=3
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    plain = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=300, seed=4,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": Answer.model_json_schema()}},
    )  # fmt: skip
    Answer.model_validate_json(plain.choices[0].message.content)
    done("structured outputs")

    try:
        client.models.retrieve("gpt")
    except openai.NotFoundError as error:
        assert (error.code, error.param) == ("model_not_found", "model")
    else:
        raise AssertionError("not refused")
    try:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("not refused")
    try:
        client.with_options(timeout=0.001).completions.create(model=model, prompt=PROMPT)
    except openai.APITimeoutError:
        pass
    else:
        raise AssertionError("no timeout")
    try:
        client.embeddings.create(model=model, input="a")
    except openai.NotFoundError as error:
        assert "/v1/embeddings" in error.message
    else:
        raise AssertionError("not refused")
    done("errors")


def talk_langchain(url: str, model: str) -> None:
    import pydantic
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    class Place(pydantic.BaseModel):
        """A place."""

        city: Literal["Köln", "Oslo"]
        floor: int = pydantic.Field(ge=-3, le=40)

    @tool
    def get_weather(city: Literal["Köln", "Oslo"], unit: Literal["C", "F"]) -> str:
        """The weather in a city."""
        return f"rain in {city}, 4 {unit}"

    chat = ChatOpenAI(base_url=url, api_key="any", model=model, max_tokens=12, temperature=0, max_retries=0)
    messages = [SystemMessage("Be brief."), HumanMessage(PROMPT)]
    answer = chat.invoke(messages)
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}
    assert answer.usage_metadata["output_tokens"] <= 12
    done("invoke")
    assert "".join(each.content for each in chat.stream(messages)) == answer.content
    assert [each.content for each in chat.batch([messages, messages])] == [answer.content] * 2
    done("stream")
    assert OpenAI(base_url=url, api_key="any", model=model, max_tokens=4, temperature=0).invoke(PROMPT)
    done("completions")

    caller = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    called = caller.invoke(messages, max_tokens=200)
    (call,) = called.tool_calls
    assert call["name"] == "get_weather"
    check_arguments(call["args"])
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    after = chat.bind_tools([get_weather]).invoke([*messages, called, result])
    assert after.response_metadata["finish_reason"] in {"stop", "length", "tool_calls"}
    gathered = None
    for chunk in caller.stream(messages, max_tokens=200):
        gathered = chunk if gathered is None else gathered + chunk
    check_arguments(gathered.tool_calls[0]["args"])
    done("tools")

    for method in ("json_schema", "function_calling"):
        place = chat.with_structured_output(Place, method=method).invoke(messages, max_tokens=200)
        assert isinstance(place, Place), method
    done("structured outputs")


def talk_litellm(url: str, model: str) -> None:
    import litellm
    import pydantic

    class Place(pydantic.BaseModel):
        city: Literal["Köln", "Oslo"]
        floor: int = pydantic.Field(ge=-3, le=40)

    litellm.suppress_debug_info = True
    given = {"model": f"openai/{model}", "api_base": url, "api_key": "any", "messages": MESSAGES, "num_retries": 0}
    answer = litellm.completion(**given, max_tokens=12, temperature=0)
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.completion_tokens <= 12
    done("completion")
    stream = litellm.completion(
        **given, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(each.choices[0].delta.content or "" for each in stream) == answer.choices[0].message.content
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", api_base=url, api_key="any", prompt=PROMPT, max_tokens=4, temperature=0
    )
    assert text.choices[0].text
    done("stream")

    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    message = litellm.completion(**given, **options).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    check_arguments(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "rain"}
    after = litellm.completion(**{**given, "messages": [*MESSAGES, message, result]}, tools=[WEATHER], max_tokens=8)
    assert after.choices
    chunks = list(litellm.completion(**given, **options, stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    check_arguments(json.loads(whole.choices[0].message.tool_calls[0].function.arguments))
    done("tools")

    place = litellm.completion(**given, response_format=Place, max_tokens=200)
    Place.model_validate_json(place.choices[0].message.content)
    done("structured outputs")
    try:
        litellm.completion(**given, temperature=-1)
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("not refused")
    try:
        litellm.completion(**{**given, "model": "openai/gpt"})
    except litellm.NotFoundError:
        done("errors")
    else:
        raise AssertionError("not refused")


if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    {"openai": talk_openai, "langchain": talk_langchain, "litellm": talk_litellm}[name](url, model)
