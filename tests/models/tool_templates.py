"""Chat templates that write calls of tools as families of checkpoints do, as short as they can be."""

from __future__ import annotations

_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
_CHATML = (
    _TOOLS + "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}CALLS<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def _chatml(calls: str) -> str:
    return _CHATML.replace("CALLS", f"{{% if m.tool_calls %}}{calls}{{% endif %}}")


_EACH = "{% for call in m.tool_calls %}{% set f = call.function %}"

HERMES = _chatml(
    _EACH + '{% if m.content or not loop.first %}{{ "\n" }}{% endif %}<tool_call>\n{"name": "{{ f.name }}", '
    '"arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
# Wants the JSON of the arguments, as OpenAI has it.
HERMES_TEXT = HERMES.replace("f.arguments | tojson", "'' + f.arguments")
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last or tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_ARGS = MISTRAL.replace(
    MISTRAL[MISTRAL.index("[TOOL_CALLS] ["): MISTRAL.index("</s>{% else %}")],
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}",
)  # fmt: skip
# Writes calls only where there is no content, and takes the JSON of their arguments.
DEEPSEEK = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>"
    "{% elif m.content is none %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "{% if not loop.first %}{{ '\n' }}{% endif %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}\n"
    "```json\n{{ '' + call.function.arguments }}\n```<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{% else %}{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
)
HARMONY = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
LLAMA = _chatml(
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
)
# Nobody knows this one.
UNKNOWN = _chatml(_EACH + "CALL {{ f.name }} WITH {{ f.arguments | tojson }}{% endfor %}")
# Writes calls, and shows no tools.
HIDDEN = HERMES.replace(_TOOLS, "")
SILENT = _chatml("")

TEMPLATES = {
    "Hermes": HERMES, "Mistral": MISTRAL, "DeepSeek": DEEPSEEK, "Harmony": HARMONY, "Llama 3": LLAMA,
}  # fmt: skip
