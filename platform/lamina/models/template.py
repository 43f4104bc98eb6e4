"""The model's chat template: from messages to the text that the model was trained on.

Only templates that come with the base model are rendered, never a tenant's: a template is a program, and
the sandbox bounds what it may touch but not how long it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lamina.errors import InvalidRequest, UnsupportedModel

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]

# Marks where the last message ends in the rendered text. The space shows whether the template trims messages.
_END_MARK = "\ue000end of the last message\ue001"
_END_MARK_SPACE = _END_MARK + " "
# What a template may raise on a conversation it was not written for.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    `variables` are visible to the template besides the messages: bos_token, eos_token and so on.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises UnsupportedModel if `source` is no valid template."""
        self._variables = dict(variables)
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as error:
            raise UnsupportedModel(
                f"The model's chat template is not valid (line {error.lineno}: {error.message})."
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as text, special tokens included.

        `add_generation_prompt` opens the assistant's next turn. `continue_final_message` leaves the last
        message open instead, for the model to go on with. Fields that are None count as absent. Raises
        InvalidRequest if the template refuses the conversation, or if both options are set.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other. Set one of them.",
                param="continue_final_message",
            )
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if not continue_final_message:
            return self._render(chat, tools, add_generation_prompt)
        _append_end_mark(chat)
        return _cut_at_end_mark(self._render(chat, tools, add_generation_prompt))

    def _render(
        self,
        chat: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return self._template.render(
                self._variables,
                messages=chat,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except _REFUSALS as error:
            raise InvalidRequest(
                f"The model's chat template does not accept this conversation: {error}", param="messages"
            ) from error


def _append_end_mark(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _END_MARK_SPACE
        return
    texts = [i for i, part in enumerate(content or ()) if isinstance(part, Mapping) and "text" in part]
    if not content or not texts:
        raise InvalidRequest(
            "continue_final_message needs a last message with text to continue.",
            param="continue_final_message",
        )
    last = texts[-1]
    marked = {**content[last], "text": content[last]["text"] + _END_MARK_SPACE}
    chat[-1]["content"] = [*content[:last], marked, *content[last + 1 :]]


def _cut_at_end_mark(text: str) -> str:
    at = text.rfind(_END_MARK)
    if at < 0:
        raise InvalidRequest(
            "The model's chat template does not show the last message as it is, so it cannot be continued.",
            param="continue_final_message",
        )
    trims = not text.startswith(_END_MARK_SPACE, at)
    return text[:at].rstrip() if trims else text[:at]


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks words for training; here it only opens a scope."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 declares a mutable set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt, not for a page: jinja2's own filter would escape `<`, `>`, `&` and `'`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
