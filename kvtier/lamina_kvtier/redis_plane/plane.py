"""The data plane to one Redis server: lanes for blocks, one more for small questions, and a breaker over all.

    submit ──▶ data queue ────▶ lane, lane, ...   SET and GET of blocks
               control queue ─▶ lane              EXISTS, UNLINK, INFO: never behind megabytes

Whatever happens to the server, a batch ends: by its replies, or at its deadline, or at once while the breaker is open.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lamina_kvtier.redis_plane.address import RedisAddress
from lamina_kvtier.redis_plane.breaker import Backoff, Breaker, State
from lamina_kvtier.redis_plane.lane import Lane, LaneCounters, Server
from lamina_kvtier.redis_plane.resp import Bounds
from lamina_kvtier.redis_plane.work import Batch, Failure, WorkQueue

__all__ = ["PlaneConfig", "PlaneCounters", "RedisPlane"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneConfig:
    """Raises ValueError. Seconds and bytes.

    A server holds up to `lanes * window_bytes` of replies in its memory for us, beside the values.
    """

    lanes: int = 2
    window_bytes: int = 8 * 1024 * 1024  # under way on one lane; one block may always be
    window_requests: int = 128
    connect_s: float = 1.0
    breaker_failures: int = 3  # in a row, over all lanes
    backoff: Backoff = field(default_factory=Backoff)
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        for name in ("lanes", "window_bytes", "window_requests", "breaker_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.connect_s <= 0:
            raise ValueError(f"connect_s must be more than 0, not {self.connect_s}")


@dataclass(frozen=True, slots=True)
class PlaneCounters:
    """All lanes together, since the start."""

    connected: int  # connections made
    lost: int  # connections lost with requests under way, or not made
    retried: int  # requests sent a second time
    answered: int  # requests
    moved_bytes: int  # of answered requests, both directions
    refused: int  # requests not tried because the breaker was open
    breaker_opened: int  # times
    breaker: State
    trouble: str  # the last failure, for people; "" if there was none


class RedisPlane:
    """Connects when there is work. Any thread may submit; each batch ends on whatever thread."""

    def __init__(self, address: RedisAddress, config: PlaneConfig | None = None, *, name: str = "redis") -> None:
        """name: of the threads. Raises InvalidAddress if TLS cannot be set up."""
        self._config = config = config or PlaneConfig()
        self._address = address
        self._breaker = Breaker(config.breaker_failures, config.backoff)
        self._refused = 0
        self._data, self._control = WorkQueue(config.lanes), WorkQueue(1)
        server = Server(
            address=address,
            tls=address.tls_context(),
            bounds=config.bounds,
            breaker=self._breaker,
            backoff=config.backoff,
            connect_s=config.connect_s,
            failed=self._failed,
        )
        queues = [(f"{name}-{number}", self._data) for number in range(config.lanes)]
        queues.append((f"{name}-control", self._control))
        windows = {"window_bytes": config.window_bytes, "window_requests": config.window_requests}
        self._lanes = [Lane(title, server, queue, **windows) for title, queue in queues]

    def move(self, batch: Batch[Any]) -> None:
        """Starts a batch of Store and Fetch requests."""
        self._submit(batch, self._data)

    def ask(self, batch: Batch[Any]) -> None:
        """Starts a batch of small requests."""
        self._submit(batch, self._control)

    def counters(self) -> PlaneCounters:
        total = LaneCounters()
        for lane in self._lanes:
            for each in fields(LaneCounters):
                setattr(total, each.name, getattr(total, each.name) + getattr(lane.counters, each.name))
        return PlaneCounters(
            connected=total.connected,
            lost=total.lost,
            retried=total.retried,
            answered=total.answered,
            moved_bytes=total.moved_bytes,
            refused=self._refused,
            breaker_opened=self._breaker.opened,
            breaker=self._breaker.state,
            trouble=self._breaker.reason,
        )

    def close(self) -> None:
        """Ends every batch and every thread. Closing twice is nothing."""
        for queue in self._queues:
            queue.close()
        for lane in self._lanes:
            lane.stop()
        stuck = [lane for lane in self._lanes if not lane.join(self._config.connect_s + 1.0)]
        if stuck:  # in the system's name resolver, which cannot be interrupted; it holds no memory of anybody
            _log.warning("%d threads to %s still wait to connect", len(stuck), self._address)

    @property
    def _queues(self) -> Sequence[WorkQueue]:
        return self._data, self._control

    def _submit(self, batch: Batch[Any], queue: WorkQueue) -> None:
        if not batch.requests:
            return
        if not self._breaker.admit(batch.deadline):
            self._refused += len(batch.requests)
            batch.refuse(Failure.UNAVAILABLE)
            return
        batch.enter(queue)
        if self._breaker.state is State.OPEN:  # it opened meanwhile, and may have flushed before this was queued
            queue.flush(Failure.UNAVAILABLE)

    def _failed(self, reason: str) -> None:
        """Called by lanes."""
        if not self._breaker.failed(reason):
            return
        _log.warning("Redis at %s is not used for now: %s", self._address, reason)
        for queue in self._queues:
            queue.flush(Failure.UNAVAILABLE)
