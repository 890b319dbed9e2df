"""Chat templates of models that think before they answer, as short as they can be."""

_TURNS = (
    "{% for m in messages %}{{ m.role }}\n"
    "{% if m.reasoning_content is string %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}"
)
# Thinks unless it is told not to; then the thoughts are there, and empty.
SWITCHED = (
    _TURNS + "{% if add_generation_prompt %}assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Always thinks: the prompt ends with the tag.
ALWAYS = _TURNS + "{% if add_generation_prompt %}assistant\n<think>\n{% endif %}"
# Is told how much to think.
EFFORT = (
    "{% if reasoning_effort is defined %}Reasoning: {{ reasoning_effort }}\n{% endif %}"
    + _TURNS
    + "{% if add_generation_prompt %}assistant\n{% endif %}"
)
