"""Copies beside the step: a lane takes pieces of work in order and says of each when it is done.

    compute   ──step──●────────step────────step─────▶      ● `submit`: what was queued before it happens before the
    work lane              └──▶ work ──▶ done                   `Transfer.gate()`: what is queued after it happens
    after the work

On a GPU a lane is a side stream and the arrows are events: nothing here makes the host wait but `Transfer.wait`.
Elsewhere work is done at once, behind the same interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["Lane", "Transfer", "lane_for"]


class Transfer(Protocol):
    """Work under way. An exception in it surfaces in `wait` and `gate`, every time."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        ...

    def wait(self) -> None:
        """Blocks the host until it has ended; raises what went wrong."""
        ...

    def gate(self) -> None:
        """Work queued from now on, on the current stream of the device, runs after it. Never blocks the host."""
        ...


class Lane(Protocol):
    def submit(self, work: Callable[[], None]) -> Transfer:
        """Runs after all that is queued on the current stream, and after earlier work of this lane."""
        ...


def lane_for(device: torch.device) -> Lane:
    """A side stream of its own on a GPU; at once elsewhere."""
    return _StreamLane(device) if device.type == "cuda" else _EagerLane()


class _Ended:
    """A transfer that needs no more waiting."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def gate(self) -> None:
        self.wait()


class _EagerLane:
    def submit(self, work: Callable[[], None]) -> Transfer:
        return _Ended(_attempt(work))


def _attempt(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever it was, it belongs to whoever waits for the transfer
        return error
    return None


# CUDA only from here on: not run where there is no GPU.


class _StreamLane:
    __slots__ = ("_stream",)

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None]) -> Transfer:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            error = _attempt(work)
            # Even after an error: the part that was queued may still run, and its blocks are not free before.
            return _Queued(self._stream.record_event(), error)


class _Queued:
    __slots__ = ("_error", "_event")

    def __init__(self, event: torch.cuda.Event, error: Exception | None) -> None:
        self._event = event
        self._error = error

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:  # the device failed: it will never be done otherwise
            self._error = self._error or error
            return True

    def wait(self) -> None:
        self._event.synchronize()
        if self._error is not None:
            raise self._error

    def gate(self) -> None:
        if self._error is not None:
            raise self._error
        self._event.wait()
