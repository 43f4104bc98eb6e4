"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

__all__ = ["merge"]

T = TypeVar("T")
_END: Any = object()


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the items of all `sources` as they come, each source's in its order.

    The first failure is raised and ends all. However this ends, every source is closed.
    """
    if len(sources) == 1:  # the common case needs no task per item
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    waiting = {_next(source): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                item = task.result()
                source = waiting.pop(task)
                if item is _END:
                    continue
                waiting[_next(source)] = source
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _next(source: AsyncGenerator[T, None]) -> asyncio.Task[T]:
    async def step() -> T:
        return await anext(source, _END)

    return asyncio.create_task(step())
