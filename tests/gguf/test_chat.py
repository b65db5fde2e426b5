"""Chat templates: what Jinja renders, one sentence for the rest, and no template that takes long or much memory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf_samples import byte_level_vocabulary, small_decoder, write_llama

from tilewise.errors import ConfigurationError
from tilewise.gguf import load_gguf
from tilewise.gguf.chat import ChatTemplate

TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi 'you' \"there\"\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"},
    {"role": "user", "content": "Why?"},
]
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Shapes that templates of the supported families have: filters, namespaces, slices, macros, white space control.
TEMPLATES = {
    "chatml": CHATML,
    "alternating": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] | trim + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix, turns = "", messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '
' + (prefix if loop.first else "") }}
    {{- message['content'] | trim }}<end_of_turn>
{% endfor %}
""".replace('{%- set prefix, turns = "", messages -%}', '{%- set prefix = "" -%}{%- set turns = messages -%}'),
    "thinking": """{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" and not (message.content.startswith('<tool>')) %}
        {%- set ns.found = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|' ~ message.role ~ '|>' ~ content }}{{ '!' if loop.index0 == ns.last }}
    {%- if message.tool_calls is defined and message.tool_calls is not none %}tools{% endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}off{% endif %}
""",
    "macros": """{% macro turn(role, text, end='<e>') %}[{{ role | upper }}]{{ text | trim }}{{ end }}
{% endmacro %}
{% for m in messages if m.role != 'system' %}
  {% if loop.first %}first {% endif %}
  {{ turn(m.role, m['content']) }}{{ turn('x', 'y', end='z') }}
{% else %}nothing{% endfor %}
{% set block %}{{ messages | length }} of them{% endset %}
{{ block ~ 1 }} {{ messages | map(attribute='role') | join(', ') }} {{ no | default('d') }} {{ [1, 2][1:] | last }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ {'a': [1, none, 'é']} | tojson }} {{ 7 // 2 }}
{%+ if true %} x {%+ endif +%}
   {# a note #}
end
""",
}


def test_templates_render_as_written() -> None:
    assert ChatTemplate(CHATML).render(TALK[1:2]) == (
        "<|im_start|>user\nHi 'you' \"there\"\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(TEMPLATES["alternating"]).render(TALK, bos_token="<s>") == (
        "<s><start_of_turn>user\nBe brief.\n\nHi 'you' \"there\"<end_of_turn>\n<start_of_turn>model\n"
        "<think>\nhm\n</think>\n\nYes<end_of_turn>\n<start_of_turn>user\nWhy?<end_of_turn>\n"
    )
    assert ChatTemplate(TEMPLATES["thinking"]).render(TALK, enable_thinking=False) == (
        "<|system|> Be brief. <|user|>Hi 'you' \"there\"\n<|assistant|>Yes<|user|>Why?!off"
    )
    with pytest.raises(ConfigurationError, match="roles must alternate"):
        ChatTemplate(TEMPLATES["alternating"]).render(TALK[2:])


@pytest.mark.parametrize("name", TEMPLATES)
def test_jinja_renders_the_same_where_it_is_installed(name: str) -> None:
    sandbox = pytest.importorskip("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = lambda text: 1 / 0
    for end, prompted in itertools.product((2, 4), (True, False)):
        names: dict[str, Any] = {"bos_token": "<s>", "add_generation_prompt": prompted}
        expected = environment.from_string(TEMPLATES[name]).render(messages=TALK[:end], tools=None, **names)
        assert ChatTemplate(TEMPLATES[name]).render(TALK[:end], **names) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace.__call__() }}",
        "{{ (1).__class__('x') }}",
        "{{ 'x'.format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 2 ** 100000 }}",
        "{{ lambda: 1 }}",
        "{{ [x for x in messages] }}",
        "{{ f'{messages}' }}",
        "{{ messages }}",
        "{% import 'os' as os %}",
        "{% for x in messages %}",
        "{% endif %}",
        "{{ 'open",
        "{{ 1 +",
        "{{ undefined.attribute }}",
        "{{ 'a' | nothing }}",
        "{{ nothing() }}",
        "{{ 1 is nothing }}",
        "{{ 1 / 0 }}",
        "{{ 1 | items }}",
        "{{ strftime_now('%1000000000d') }}",
        "{% set messages.x = 1 %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 8000 + "1 }}",
        "{% if 1 %}" * 20000,
    ],
)
def test_what_is_not_supported_is_one_sentence(template: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^the chat template of this model cannot be used: [^\n]{3,250}$"):
        ChatTemplate(template).render([])


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
        "{% for a in range(1000000000) %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson }}",
        "{% set n = namespace(x=7) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x | join(n.x) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x.replace('', n.x, 999) %}{% endfor %}",
        "{% set n=namespace(x=range(9999)) %}{% for a in range(99) %}{% set n.x=[n.x] %}{% endfor %}{{n.x|tojson(8)}}",
        "{{ 'a' * 1000000000 }}",
        "{% for a in range(100000) %}" + "x" * 1000 + "{% endfor %}",
    ],
)
def test_templates_of_strangers_end_soon(template: str) -> None:
    with pytest.raises(ConfigurationError, match=r"too l|recursion|numbers are expected"):
        ChatTemplate(template).render([])


def test_random_templates_render_or_are_refused_in_one_sentence() -> None:
    rng = np.random.default_rng(3)
    sources = list(TEMPLATES.values())
    for _ in range(300):
        source = sources[rng.integers(len(sources))]
        for _ in range(rng.integers(1, 4)):
            at, length = rng.integers(len(source)), rng.integers(1, 12)
            piece = "" if rng.random() < 0.5 else source[rng.integers(len(source)) :][:length]
            source = source[:at] + piece + source[at + length :]
        try:
            ChatTemplate(source).render(TALK)
        except ConfigurationError as error:
            assert "\n" not in str(error)


def test_a_file_turns_a_conversation_into_tokens(tmp_path: Path) -> None:
    words = byte_level_vocabulary("qwen2")
    write_llama(small_decoder("qwen3", vocab=len(words["tokens"])), tmp_path / "m.gguf", architecture="qwen3", **words)
    loaded = load_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigurationError, match="no chat template"):
        loaded.chat_tokens(TALK)
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    write_llama(
        small_decoder("qwen3", vocab=len(words["tokens"])),
        tmp_path / "m.gguf",
        architecture="qwen3",
        template=template,
        **words,
    )
    loaded, end = load_gguf(tmp_path / "m.gguf"), words["tokens"].index("<|im_end|>")
    assert loaded.tokenizer is not None
    assert loaded.chat_tokens(TALK[3:]) == [*loaded.tokenizer.encode("Why?"), end]
