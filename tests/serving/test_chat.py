"""Chat templates: rendered as transformers renders them, and contained."""

from __future__ import annotations

import datetime
import gc
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmforge.base.errors import InputError
from llmforge.serving.chat import ChatTemplate, special_tokens

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
    with pytest.raises(InputError, match=r"tokenizer_config\.json: not valid JSON"):
        ChatTemplate.read(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'x' * 10**9 }}", "more than 512 MB of memory"),
        ("{{ '%0999999999d' | format(1) }}", "more than 512 MB of memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes more than"),
        (
            "{% for i in range(99999) %}{% for j in range(999) %}x{% endfor %}{% endfor %}",
            "more than 8388608 characters",
        ),
        ("{{ messages | nope }}", "No filter named 'nope'"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    ],
)
def test_time_and_memory_are_bounded(source, message):
    template = ChatTemplate(source, {}, "here")
    began = time.monotonic()
    with pytest.raises(InputError, match=f"here: the chat template cannot render these messages: .*{message}"):
        template.render(MESSAGES)
    assert time.monotonic() - began < 30  # on a machine that does something else, too


def test_one_failure_does_not_end_the_next_rendering():
    source = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    template = ChatTemplate(source + "{% endfor %}{% endif %}{{ messages[0].content }}", {}, "here")
    assert template.render([{"role": "user", "content": "one"}]) == "one"
    with pytest.raises(InputError, match="it takes more than"):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render([{"role": "user", "content": "two"}]) == "two"


def test_many_threads_render_long_messages():
    template = ChatTemplate("{{ messages[0].content }}", {}, "here")
    texts = [chr(65 + number) * 300_000 for number in range(8)]  # more than a pipe holds
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: template.render([{"role": "user", "content": text}]), texts)) == texts


def test_the_process_ends_with_its_template():
    template = ChatTemplate("x", {}, "here")
    template.render([])
    process = template._renderers[0]._process._process
    assert process.poll() is None
    del template
    gc.collect()
    assert process.returncode is not None


def test_neither_folder_nor_environment_of_the_caller_is_imported_from(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    assert ChatTemplate("{{ strftime_now('%Z') }}", {}, "here").render([]) == ""
    assert ChatTemplate("{{ eos_token }}", {"eos_token": "</s>"}, "here").render([]) == "</s>"


@pytest.mark.parametrize("source", ["x" * 300_000, "é" * 150_000, "{{ " + "(" * 5000])
def test_templates_that_are_too_large_or_deep(source):
    with pytest.raises(InputError, match="the chat template has"):
        ChatTemplate(source, {}, "here")


def test_messages_that_are_no_json_are_refused():
    with pytest.raises(InputError, match="they are not JSON"):
        ChatTemplate("x", {}, "here").render([{"role": object()}])


def test_a_template_of_a_file_says_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "mine.jinja"
    with pytest.raises(InputError, match=r"mine\.jinja: cannot be read: No such file") as missing:
        ChatTemplate.of_file(path, {})
    assert missing.value.hint == "give a Jinja template, a text file"
    path.write_bytes(b"ab\xff")
    with pytest.raises(InputError, match=r"mine\.jinja: byte 2 is not UTF-8"):
        ChatTemplate.of_file(path, {})
    path.write_text("\n\n{{ x ")
    with pytest.raises(InputError, match=r"mine\.jinja:3: the chat template has an error") as wrong:
        ChatTemplate.of_file(path, {})
    assert "--chat-template FILE" in str(wrong.value.hint)
    path.write_text("{{ bos_token }}!")
    assert ChatTemplate.of_file(path, {"bos_token": "<s>"}).render([]) == "<s>!"
