"""Copies beside the step: a lane takes pieces of work in order and says of each when it is done.

    compute   ──step──●────────step────────step─────▶      ● `submit`: what was queued before it happens before the
    work lane              └──▶ work ──▶ done                   `Transfer.gate()`: what is queued after it happens
    after the work

On a GPU a lane is a side stream and the arrows are events: nothing here makes the host wait but `Transfer.wait`.
Elsewhere it is a thread, and the step is the host's own work: so `gate` has to wait, and a step goes on beside all
transfers but those that it gates.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = ["Lane", "Transfer", "copy_beside", "lane_for"]


class Transfer(Protocol):
    """Work under way. An exception in it surfaces in `wait` and `gate`, every time."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        ...

    def wait(self) -> None:
        """Blocks the host until it has ended; raises what went wrong."""
        ...

    def gate(self) -> None:
        """Work queued from now on, on the current stream of the device, runs after it. Blocks no host with a GPU."""
        ...


class Lane(Protocol):
    def submit(self, work: Callable[[], None]) -> Transfer:
        """Runs after all that is queued on the current stream, and after earlier work of this lane."""
        ...


def lane_for(device: torch.device) -> Lane:
    """A side stream of its own on a GPU, a thread elsewhere."""
    return _StreamLane(device) if device.type == "cuda" else _ThreadLane()


def copy_beside(target: Tensor, source: Tensor) -> None:
    """One block, contiguous bytes, as work of a lane.

    Within host memory by NumPy: it lets other threads run, and copies with one. torch would open a team of threads for
    each block, which beside a step that has its own costs far more than the copy.
    """
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)


class _ThreadLane:
    """One thread, started by the first work, which ends when the lane is forgotten. What was queued on the host before
    has happened by then, since the host waits for its own work."""

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copies")

    def submit(self, work: Callable[[], None]) -> Transfer:
        return _Threaded(self._thread.submit(work))


class _Threaded:
    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def gate(self) -> None:
        self._future.result()


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


def _attempt(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever it was, it belongs to whoever waits for the transfer
        return error
    return None
