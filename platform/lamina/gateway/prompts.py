"""From messages and prompts to token ids, long ones off the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from lamina.config import GatewayConfig
from lamina.errors import InvalidRequest
from lamina.gateway.codec import TextCodec, off_loop_if_long
from lamina.gateway.sampling import check_token_id
from lamina.gateway.schemas.chat import Message
from lamina.types import EngineInfo

__all__ = ["Prompt", "chat_prompt", "completion_prompts"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what the client sent, or its token ids spelled out."""

    text: str
    token_ids: list[int]


async def chat_prompt(
    messages: Sequence[Message],
    codec: TextCodec,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> list[int]:
    """The conversation in the model's template, as tokens.

    By default the template opens the assistant's turn; `continue_final_message` leaves the last message open
    instead. Raises InvalidRequest if both are asked for, or if the template refuses the conversation.
    """
    going_on = bool(continue_final_message)
    if going_on and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other. Set only one of them.",
            param="continue_final_message",
        )
    if going_on and messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of role 'assistant'.", param="continue_final_message"
        )
    opening = not going_on if add_generation_prompt is None else add_generation_prompt

    def work() -> list[int]:
        text = codec.render_chat(
            [message.for_template() for message in messages],
            add_generation_prompt=opening,
            continue_final_message=going_on,
        )
        return codec.encode(text, add_special_tokens=False)  # the template writes them itself

    token_ids = await off_loop_if_long(sum(len(message.text) for message in messages), work)
    if not token_ids:
        raise InvalidRequest("The messages are empty: there is nothing to go on from.", param="messages")
    return token_ids


async def completion_prompts(
    prompt: str | list[str] | list[int] | list[list[int]],
    codec: TextCodec,
    *,
    config: GatewayConfig,
    info: EngineInfo,
) -> list[Prompt]:
    """One entry per prompt. Raises InvalidRequest for none, too many, an empty one or an unknown token id."""
    prompts = _listed(prompt)
    if len(prompts) > config.max_prompts:
        raise InvalidRequest(
            f"prompt has {len(prompts)} entries, but at most {config.max_prompts} are allowed in one call.",
            param="prompt",
        )
    return [await _prompt(each, codec, info) for each in prompts]


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, list) and not prompt:
        raise _empty()
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


async def _prompt(prompt: str | list[int], codec: TextCodec, info: EngineInfo) -> Prompt:
    if isinstance(prompt, str):
        encoded = await off_loop_if_long(len(prompt), lambda: codec.encode(prompt))
        found = Prompt(prompt, encoded)
    else:
        for token_id in prompt:
            check_token_id(token_id, info, "prompt")
        found = Prompt(
            await off_loop_if_long(len(prompt), lambda: codec.decode(prompt, skip_special_tokens=False)),
            prompt,
        )
    if not found.token_ids:
        raise _empty()
    return found


def _empty() -> InvalidRequest:
    return InvalidRequest(
        "The prompt is empty: there is nothing to go on from. Send at least one token.", param="prompt"
    )
