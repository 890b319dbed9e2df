"""The default tool prompt: Jinja source that stands before a chat template which knows no tools.

It changes the messages that the template then renders: tools are described in the system message, calls are written
into the text of the assistant, and results of tools are said by the user. So every reader of the template has it (the
server, Triton, a build's texts, other runtimes), and `tool_format` finds its calls as it finds those of a template that
knows tools. A conversation without tools, calls and results is rendered as before.

Wording and markup are those of Qwen2.5 (`chat_template` of Qwen/Qwen2.5-7B-Instruct), which follow Hermes'
(NousResearch/Hermes-Function-Calling).
"""

from __future__ import annotations

from pathlib import Path

from llmforge.base.errors import UsageError
from llmforge.serving.chat import ChatTemplate, special_tokens
from llmforge.serving.protocol.tool_format import ToolFormat

_PLACES = ("system", "user")  # whose message describes the tools: where a template has no system message, the user's
_SOURCE = r"""
{%- set tool_prompt = namespace(text='', results='', place='PLACE', messages=[]) -%}
{%- if tools -%}
    {%- set tool_prompt.text = '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n'
        ~ 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -%}
    {%- for tool in tools -%}
        {%- set tool_prompt.text = tool_prompt.text ~ '\n' ~ (tool | tojson) -%}
    {%- endfor -%}
    {%- set tool_prompt.text = tool_prompt.text ~ '\n</tools>\n\nFor each function call, return a json object with '
        ~ 'function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n'
        ~ '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' -%}
    {%- if tool_prompt.place == 'system' and (not messages or messages[0].role != 'system') -%}
        {%- set tool_prompt.messages = [{'role': 'system', 'content': tool_prompt.text}] -%}
        {%- set tool_prompt.text = '' -%}
    {%- endif -%}
{%- endif -%}
{%- for message in messages -%}
    {%- set said = message.content or '' -%}
    {%- if tool_prompt.text and message.role == tool_prompt.place -%}
        {%- set said = said ~ '\n\n' ~ tool_prompt.text if tool_prompt.place == 'system'
            else tool_prompt.text ~ '\n\n' ~ said -%}
        {%- set tool_prompt.messages = tool_prompt.messages + [{'role': message.role, 'content': said}] -%}
        {%- set tool_prompt.text = '' -%}
    {%- elif message.role == 'tool' -%}
        {%- set tool_prompt.results = tool_prompt.results ~ ('\n' if tool_prompt.results else '')
            ~ '<tool_response>\n' ~ said ~ '\n</tool_response>' -%}
        {%- if loop.last or messages[loop.index].role != 'tool' -%}
            {%- set tool_prompt.messages = tool_prompt.messages + [{'role': 'user', 'content': tool_prompt.results}] -%}
            {%- set tool_prompt.results = '' -%}
        {%- endif -%}
    {%- elif message.tool_calls -%}
        {%- set written = namespace(text=said) -%}
        {%- for call in message.tool_calls -%}
            {%- set arguments = call.function.arguments -%}
            {%- set written.text = written.text ~ ('\n' if written.text else '') ~ '<tool_call>\n{"name": "'
                ~ call.function.name ~ '", "arguments": ' ~ (arguments if arguments is string else arguments | tojson)
                ~ '}\n</tool_call>' -%}
        {%- endfor -%}
        {%- set tool_prompt.messages = tool_prompt.messages + [{'role': message.role, 'content': written.text}] -%}
    {%- else -%}
        {%- set tool_prompt.messages = tool_prompt.messages + [message] -%}
    {%- endif -%}
{%- endfor -%}
{%- set tools = none -%}
{%- set messages = tool_prompt.messages %}
"""


def added(template: ChatTemplate) -> ChatTemplate:
    """Put the tool prompt before a template; one that describes tools and writes calls by itself is returned as it is.

    Raises:
        UsageError: the template shows neither what a system message says nor what the user does.
        EnvironmentLacks: no process can be started to render.
    """
    found = ToolFormat.find(template)
    if found is not None and found.shows_tools:
        return template
    for place in _PLACES:
        source = _SOURCE.lstrip("\n").replace("PLACE", place) + template.source
        made = ChatTemplate(source, template.special_tokens, template.where)
        found = ToolFormat.find(made)
        if found is not None and found.shows_tools:
            return made
    raise UsageError(
        f"{template.where}: the default tool prompt cannot be added: the chat template shows neither a system message "
        "nor calls in what the assistant said",
        hint="give a template that knows tools: --chat-template FILE, or `chat_template: FILE` in a recipe",
    )


def chosen(tokenizer: Path, file: Path | None, *, tool_prompt: bool) -> ChatTemplate | None:
    """Choose the template for an artifact's `tokenizer` folder: that in `file`, else its own, with the tool prompt.

    None where neither is there.

    Raises:
        InputError: a file cannot be read, or its template has a syntax error.
        UsageError: the tool prompt cannot be added: there is no template, or as `added`.
    """
    own = ChatTemplate.read(tokenizer) if file is None else ChatTemplate.of_file(file, special_tokens(tokenizer))
    if not tool_prompt:
        return own
    if own is None:
        raise UsageError("the artifact has no chat template to add a tool prompt to", hint="--chat-template FILE")
    return added(own)
