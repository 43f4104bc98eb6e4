"""The engine process's loop: messages in, steps, events out.

    while not stopping:
        take every message that has come
        one step, if there is work; its events leave as one message
        otherwise sleep until a message or a signal comes

All calls of the core come from this one thread. A second thread only sends heartbeats.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Protocol

from lamina.engine.commons import Commons
from lamina.engine.failures import context_of, failure_of
from lamina.engine.link import Link, Pulse
from lamina.engine.wire import (
    AskCommons,
    AskStats,
    CallFailed,
    Cancel,
    CommonsCall,
    CommonsReply,
    Done,
    Events,
    FromCore,
    Pin,
    PinReply,
    PinsReply,
    Ready,
    Refused,
    RenewPin,
    RestorePins,
    SetQuotas,
    Shutdown,
    StatsReply,
    Submit,
    ToCore,
    UnloadAdapter,
    Unpin,
)
from lamina.errors import LaminaError
from lamina.types import EngineInfo, EngineStats, GenerationRequest, TokenEvent

__all__ = ["Core", "EngineServer"]

_log = logging.getLogger(__name__)

_MAX_DRAIN = 256  # messages between two steps, so that a flood of them cannot stop the steps
_IDLE_CHECK_S = 1.0  # quiet time before the books are checked
_FAREWELL_S = 3.0  # for the last events on the way out


class Core(Protocol):
    """What the loop needs of an engine core; `lamina.engine.core.EngineCore` is one."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def commons(self) -> Commons: ...

    def submit(self, request: GenerationRequest) -> None: ...

    def cancel(self, request_id: str, index: int | None = None) -> None: ...

    def unload_adapter(self, digest: str) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> list[TokenEvent]: ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


class EngineServer:
    """Serves one client with one core until `stop`, Shutdown or a fatal error of the core."""

    def __init__(self, core: Core, link: Link, pulse: Pulse) -> None:
        self._core = core
        self._link = link
        self._pulse = pulse
        self._stopping = False
        self._unchecked = False  # whether requests ran since the last check of the books
        self._open: dict[str, int] = {}  # request id -> choices not yet finished

    def stop(self) -> None:
        """Ends `run` after the current step. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Blocks. Raises whatever the core raises outside a request's own fault: then nothing it holds can be
        trusted, and the process must end."""
        self._link.send(Ready(self._core.info, os.getpid()))
        while not self._stopping:
            self._turn()
        self._farewell()

    def _turn(self) -> None:
        self._pulse.turned(busy=True)
        for _ in range(_MAX_DRAIN):
            if (message := self._link.receive()) is None:
                break
            self._handle(message)
        if self._core.has_work():
            self._step()
        elif not self._stopping:
            self._idle()

    def _step(self) -> None:
        self._unchecked = True
        events = self._core.step()
        if not events:
            return
        self._link.send(Events(tuple(events)))
        for event in events:
            if event.finish_reason is not None:
                self._finished(event.request_id)

    def _idle(self) -> None:
        self._pulse.turned(busy=False)
        if self._link.wait(_IDLE_CHECK_S if self._unchecked else None):
            return
        self._core.check_integrity()
        self._unchecked = False

    def _handle(self, message: ToCore) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case Cancel(request_id, index):
                self._core.cancel(request_id, index)
            case AskStats(call):
                self._link.send(StatsReply(call, self._core.stats()))
            case UnloadAdapter(digest):
                self._core.unload_adapter(digest)
            case Shutdown():
                self.stop()
            case _:
                self._link.send(self._answer(message))

    def _answer(self, message: CommonsCall) -> FromCore:
        try:
            return self._ask(message)
        except LaminaError as error:
            return CallFailed(message.call, failure_of(error), context_of(error))
        except Exception as error:  # noqa: BLE001 - one wish must not end everybody's requests
            _log.exception("the core failed on a %s", type(message).__name__)
            return CallFailed(message.call, failure_of(error), context_of(error))

    def _ask(self, message: CommonsCall) -> FromCore:
        commons = self._core.commons
        match message:
            case SetQuotas(call, policies):
                commons.set_quotas(policies)
                return Done(call)
            case AskCommons(call):
                return CommonsReply(call, commons.report())
            case Pin(call, order):
                return PinReply(call, commons.pin(order))
            case RenewPin(call, namespace, pin_id, ttl_s):
                return PinsReply(call, (commons.renew(namespace, pin_id, ttl_s),))
            case Unpin(call, namespace, pin_id):
                commons.unpin(namespace, pin_id)
                return Done(call)
            case RestorePins(call, records):
                return PinsReply(call, commons.restore(records))

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self._core.submit(request)
        except LaminaError as error:
            self._refuse(request, error)
        except Exception as error:  # noqa: BLE001 - one request must not end everybody else's
            _log.exception("the core failed to take request %s", request.request_id)
            self._refuse(request, error)
        else:
            self._open[request.request_id] = request.sampling.n

    def _refuse(self, request: GenerationRequest, error: Exception) -> None:
        self._link.send(Refused(request.request_id, failure_of(error), context_of(error)))

    def _finished(self, request_id: str) -> None:
        left = self._open.get(request_id, 0) - 1
        if left > 0:
            self._open[request_id] = left
        else:
            self._open.pop(request_id, None)

    def _farewell(self) -> None:
        for request_id in list(self._open):
            self._core.cancel(request_id)
        deadline = time.monotonic() + _FAREWELL_S
        while self._core.has_work() and time.monotonic() < deadline:
            self._step()
