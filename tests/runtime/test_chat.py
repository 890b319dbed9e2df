"""Chat templates: rendered as transformers renders them, and contained."""

from __future__ import annotations

import datetime
import json

import pytest

from llmforge.base.errors import InputError
from llmforge.runtime.serving.chat import ChatTemplate, special_tokens

MESSAGES = [{"role": "user", "content": "a < b & 'c' 你"}, {"role": "assistant", "content": "yes"}]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

FEATURES = """
{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {{- bos_token + message['role'] + ': ' }}
    {%- generation %}{{ message.content | tojson }}{% endgeneration %}
    {%- if not loop.last %}{{ eos_token }}{% endif %}
{% endfor %}
{{ {'b': 1, 'a': [1, 2]} | tojson(indent=2) }} {{ strftime_now('%Y') }}
{%- if tools is none and add_generation_prompt %} assistant:{% endif %}
"""


def test_rendering_agrees_with_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    got = ChatTemplate(FEATURES, SPECIALS, "here").render(MESSAGES)
    wanted, _ = render_jinja_template([MESSAGES], chat_template=FEATURES, add_generation_prompt=True, **SPECIALS)
    assert got == wanted[0]
    assert "\"a < b & 'c' 你\"" in got
    assert str(datetime.datetime.now().year) in got


def test_the_generation_prompt_may_be_left_out():
    template = ChatTemplate("x{% if add_generation_prompt %}y{% endif %}", {}, "here")
    assert (template.render([]), template.render([], add_generation_prompt=False)) == ("xy", "x")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "cannot render these messages: roles must alternate"),
        ("{{ messages[9].content }}", "has no element 9"),
        ("{{ messages[0]['content'] + 1 }}", "cannot render"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% include '/etc/passwd' %}", "cannot render"),
    ],
)
def test_templates_that_fail_or_reach_out_are_refused(source, message):
    with pytest.raises(InputError, match=message):
        ChatTemplate(source, {}, "here").render(MESSAGES)


def test_a_syntax_error_names_the_line():
    with pytest.raises(InputError, match=r"chat\.jinja:2: the chat template has an error: .*endfor"):
        ChatTemplate("\n{% for x in y %}{% endif %}", {}, "chat.jinja")


def test_a_folder_is_read(tmp_path):
    assert ChatTemplate.read(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": None, "x_token": 3}))
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "<end>"}
    assert ChatTemplate.read(tmp_path).render([]) == "<s><end>False"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: not a JSON file"):
        ChatTemplate.read(tmp_path)
