"""Text to tokens without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["TextCodec", "off_loop_if_long"]

T = TypeVar("T")

# Below this, tokenizing takes less time than a hop to a thread and back is worth.
LONG_CHARS = 16 * 1024


class TextCodec(Protocol):
    """What the gateway needs of `lamina.models.tokenizer.Tokenizer`. Thread-safe; raises InvalidRequest."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Raises InvalidRequest if the model's template refuses the conversation."""
        ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


async def off_loop_if_long(num_chars: int, work: Callable[[], T]) -> T:
    """Runs `work` in a thread if it handles `LONG_CHARS` characters or more, else in place."""
    if num_chars < LONG_CHARS:
        return work()
    return await asyncio.to_thread(work)
