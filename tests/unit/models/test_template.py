"""ChatTemplate against transformers, on the styles of template that real models use (written for these tests)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamina.errors import InvalidRequest, UnsupportedModel
from lamina.models.template import ChatTemplate
from lamina.models.tokenizer import Tokenizer

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if system or tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
    {%- if tools is not none %}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson(indent=4)) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '<|python_tag|>' + call.function.name + '(' + (call.function.arguments | tojson) + ')' }}
        {%- endfor %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- (message['content'] | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

INSTRUCTION = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
{% else %}
{{ raise_exception('Only user and assistant roles are supported, not ' + message['role']) }}
{% endif %}
{% endfor %}"""

TURNS = """{{ bos_token }}{% set ns = namespace(first=true) %}{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
<start_of_turn>{{ role }}
{% if ns.first and messages[0]['role'] == 'system' %}
{{ messages[0]['content'] }}

{% set ns.first = false %}
{% endif %}
{{ message['content'] | trim }}<end_of_turn>
{% if loop.index > 90 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

STYLES = {"chatml": CHATML, "headers": HEADERS, "instruction": INSTRUCTION, "turns": TURNS}

SYSTEM = {"role": "system", "content": "Be <brief> & 'exact'."}
USER = {"role": "user", "content": "  What is 2+2?\n"}
ANSWER = {"role": "assistant", "content": "Four, größer als 3 😀. "}
CHATS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "And <|im_end|> {{ 7*7 }}?"}],
    "answered": [USER, ANSWER],
    "system-turns": [SYSTEM, USER, ANSWER, USER],
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' renderer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
        rendered, _ = render_jinja_template([messages], chat_template=source, **VARIABLES, **options)
        return str(rendered[0])

    return render


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("opens", [True, False], ids=["opens", "closed"])
def test_renders_like_transformers(reference: Any, style: str, chat: list[dict[str, Any]], opens: bool) -> None:
    """Every style gives transformers' text, or refuses where transformers' refuses."""
    template = ChatTemplate(STYLES[style], VARIABLES)
    if style == "instruction" and chat[0]["role"] == "system":
        with pytest.raises(InvalidRequest, match="Roles must alternate") as refused:
            template.render(chat, add_generation_prompt=opens)
        assert refused.value.param == "messages"
        return
    expected = reference(STYLES[style], chat, add_generation_prompt=opens)
    assert template.render(chat, add_generation_prompt=opens) == expected


@pytest.mark.parametrize("ending", ["Four", "Four, ", "Fo\n\n", " x"])
@pytest.mark.parametrize("style", STYLES)
def test_continues_like_transformers(reference: Any, style: str, ending: str) -> None:
    """The open last message ends where transformers ends it, trimmed or not."""
    chat = [USER, {"role": "assistant", "content": ending}]
    ours = ChatTemplate(STYLES[style], VARIABLES).render(chat, add_generation_prompt=False, continue_final_message=True)
    expected = reference(STYLES[style], chat, add_generation_prompt=False, continue_final_message=True)
    assert ours == expected
    assert chat[-1]["content"] == ending  # the caller's messages are untouched


def test_tools_and_tool_calls_like_transformers(reference: Any) -> None:
    """Tools go through tojson without HTML escapes; a message without content may hold tool calls."""
    function = {"name": "f", "description": "<b>'ünï'</b>", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    call = {"function": {"name": "f", "arguments": {"x": "a<b"}}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
    ours = ChatTemplate(HEADERS, VARIABLES).render(chat, tools=tools)
    plain = [{key: value for key, value in message.items() if value is not None} for message in chat]
    assert ours == reference(HEADERS, plain, tools=tools, add_generation_prompt=True)
    assert "<b>'ünï'</b>" in ours


@pytest.mark.model
def test_demo_model_chats_like_transformers(demo_model: Path) -> None:
    """SmolLM2's own template, from its folder, rendered and encoded as by apply_chat_template."""
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(demo_model), AutoTokenizer.from_pretrained(demo_model)
    for chat in CHATS.values():
        text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat) == text
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ours.encode_chat(chat) == ids


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"content": "no role"}],
    ],
    ids=["no content", "null content", "list content", "no role"],
)
def test_what_the_template_cannot_show_is_refused(chat: list[dict[str, Any]]) -> None:
    """A conversation that trips the template is the client's error, with its parameter named."""
    with pytest.raises(InvalidRequest, match="does not accept this conversation") as refused:
        ChatTemplate(CHATML, VARIABLES).render(chat)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("chat", [[], [{"role": "assistant"}], [{"role": "assistant", "content": ""}]])
def test_continuing_needs_text_to_continue(chat: list[dict[str, Any]]) -> None:
    """Without a last message that has content there is nothing to continue; an empty one is fine."""
    template = ChatTemplate(CHATML, VARIABLES)
    if chat and chat[-1].get("content") == "":
        rendered = template.render(chat, add_generation_prompt=False, continue_final_message=True)
        assert rendered == "<|im_start|>assistant\n"
        return
    with pytest.raises(InvalidRequest, match="needs a last message"):
        template.render(chat, add_generation_prompt=False, continue_final_message=True)


def test_continuing_the_last_text_part() -> None:
    """Of a message in parts, the last text is left open."""
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    rendered = ChatTemplate(source, {}).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "[a][b"


def test_continuing_refuses_templates_that_drop_the_message() -> None:
    """A template that hides the last message can't leave it open."""
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate("nothing", {}).render([USER], add_generation_prompt=False, continue_final_message=True)


def test_opening_and_continuing_exclude_each_other() -> None:
    """Both at once are refused."""
    with pytest.raises(InvalidRequest, match="exclude each other"):
        ChatTemplate(CHATML, VARIABLES).render([USER], continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages[0].__init__ }}{{ messages[0].__class__.__base__.__subclasses__() }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """Templates reach neither Python's internals nor the caller's objects nor huge ranges."""
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([USER])


def test_message_text_is_never_a_template() -> None:
    """Jinja in a message stays text."""
    rendered = ChatTemplate(CHATML, {}).render([{"role": "user", "content": "{{ 7*7 }}{% raw %}"}])
    assert "{{ 7*7 }}{% raw %}" in rendered


def test_strftime_now_and_syntax_errors() -> None:
    """Templates may ask for the date; a broken template is refused when the model is loaded."""
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]).startswith("2")
    with pytest.raises(UnsupportedModel, match="line 1"):
        ChatTemplate("{% for %}", {})
