"""One request's events on their way from the client's reader task to whoever iterates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from lamina.engine.failures import error_of
from lamina.errors import LaminaError
from lamina.types import EngineFailure, FinishReason, TokenEvent

__all__ = ["RequestStream"]


class RequestStream:
    """A queue that the reader fills without ever waiting, and that knows which choices are still open.

    It holds at most what one request may produce (choices x max_tokens events), so a slow consumer costs its
    own request's memory and delays nobody. One consumer.
    """

    def __init__(self, request_id: str, choices: int) -> None:
        self.request_id = request_id
        self._unfinished = set(range(choices))  # as the core told us
        self._undelivered = set(range(choices))  # as the consumer has seen
        self._started = False
        self._items: asyncio.Queue[TokenEvent | LaminaError] = asyncio.Queue()

    @property
    def open(self) -> bool:
        """Whether the core still works on a choice of this request."""
        return bool(self._unfinished)

    def put(self, event: TokenEvent) -> None:
        """Takes an event of the core; events of finished or unknown choices are dropped."""
        if event.index not in self._unfinished:
            return
        self._started = True
        if event.finish_reason is not None:
            self._unfinished.discard(event.index)
        self._items.put_nowait(event)

    def refuse(self, error: LaminaError) -> None:
        """Ends the request by an exception."""
        self._unfinished.clear()
        self._items.put_nowait(error)

    def fail(self, failure: EngineFailure) -> None:
        """Ends every open choice with ERROR, or by the exception if nothing was produced yet.

        An exception before the first event lets a gateway answer with an honest status.
        """
        if not self.open:
            return
        if not self._started:
            self.refuse(error_of(failure))
            return
        for event in self._failed(failure):
            self.put(event)

    async def next(self) -> TokenEvent | None:
        """The next event; None after the last choice's last one. Raises the refusal, if there was one."""
        if not self._undelivered:
            return None
        item = await self._items.get()
        if isinstance(item, LaminaError):
            self._undelivered.clear()
            raise item
        if item.finish_reason is not None:
            self._undelivered.discard(item.index)
        return item

    def _failed(self, failure: EngineFailure) -> Iterator[TokenEvent]:
        for index in sorted(self._unfinished):
            yield TokenEvent(request_id=self.request_id, index=index, finish_reason=FinishReason.ERROR, error=failure)
