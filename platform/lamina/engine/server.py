"""The engine process's loop: messages in, steps, events out.

    while not stopping:
        take every message that has come
        go on with errands: answers that wait for a store
        one step, if there is work; its events leave as one message
        otherwise sleep until a message or a signal comes, or what no request waits for may go on

All calls of the core come from this one thread. A second thread only sends heartbeats.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from lamina.engine.commons import Commons
from lamina.engine.errands import Errand
from lamina.engine.failures import context_of, failure_of
from lamina.engine.inspector import Inspector
from lamina.engine.link import Link, Pulse
from lamina.engine.wire import (
    AskCommons,
    AskPrefixes,
    AskStats,
    CallFailed,
    Cancel,
    CommonsCall,
    CommonsReply,
    Done,
    EraseNamespace,
    Events,
    ExplainPrefix,
    FromCore,
    InspectorCall,
    InspectorReply,
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
    Verify,
)
from lamina.errors import LaminaError
from lamina.types import EngineInfo, EngineStats, GenerationRequest, PrefixExplanation, TokenEvent, VerifyReport

__all__ = ["Core", "EngineServer"]

_log = logging.getLogger(__name__)

_MAX_DRAIN = 256  # messages between two steps, so that a flood of them cannot stop the steps
_IDLE_CHECK_S = 1.0  # quiet time before the books are checked
_ERRAND_S = 0.002  # between looks at an errand while there is nothing else to do
_FAREWELL_S = 3.0  # for the last events on the way out


class Core(Protocol):
    """What the loop needs of an engine core; `lamina.engine.core.EngineCore` is one."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def commons(self) -> Commons: ...

    @property
    def inspector(self) -> Inspector: ...

    def submit(self, request: GenerationRequest) -> None: ...

    def cancel(self, request_id: str, index: int | None = None) -> None: ...

    def unload_adapter(self, digest: str) -> None: ...

    def erase_namespace(self, namespace: str) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> list[TokenEvent]: ...

    def idle(self) -> float | None: ...

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
        self._unchecked_since: float | None = None  # when the last step was, if the books were not checked after it
        self._errands: dict[int, Errand[PrefixExplanation] | Errand[VerifyReport]] = {}  # by call
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
        self._run_errands()
        if self._core.has_work():
            self._step()
        elif not self._stopping:
            self._idle()

    def _step(self) -> None:
        events = self._core.step()
        self._unchecked_since = time.monotonic()
        if not events:
            return
        self._link.send(Events(tuple(events)))
        for event in events:
            if event.finish_reason is not None:
                self._finished(event.request_id)

    def _idle(self) -> None:
        if self._errands:
            self._sleep(_ERRAND_S)
            return
        until_check = self._seconds_until_check()
        if until_check is not None and until_check <= 0:
            self._core.check_integrity()
            self._unchecked_since = until_check = None
        pauses = [pause for pause in (self._core.idle(), until_check) if pause is not None]
        self._sleep(min(pauses, default=None))

    def _seconds_until_check(self) -> float | None:
        """None: the books are those that were checked last."""
        since = self._unchecked_since
        return None if since is None else since + _IDLE_CHECK_S - time.monotonic()

    def _sleep(self, seconds: float | None) -> None:
        """Until a message or a signal comes, or the time is over."""
        self._pulse.turned(busy=False)
        self._link.wait(seconds)

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
            case AskPrefixes() | ExplainPrefix() | Verify():
                self._answer(message.call, lambda: self._inspect(message))
            case _:
                self._answer(message.call, lambda: self._ask(message))

    def _answer(self, call: int, ask: Callable[[], FromCore | None]) -> None:
        """Sends what `ask` returns, or that it failed; None: nothing yet."""
        try:
            answer = ask()
        except Exception as error:  # noqa: BLE001 - one wish must not end everybody's requests
            if not isinstance(error, LaminaError):
                _log.exception("the core failed on a call")
            self._errands.pop(call, None)
            answer = CallFailed(call, failure_of(error), context_of(error))
        if answer is not None:
            self._link.send(answer)

    def _inspect(self, message: InspectorCall) -> FromCore | None:
        inspector = self._core.inspector
        match message:
            case AskPrefixes(call):
                return InspectorReply(call, prefixes=inspector.prefixes())
            case ExplainPrefix(call, order):
                self._errands[call] = inspector.explain(order)
            case Verify(call, wanted):
                self._errands[call] = inspector.verify(wanted)
        return None

    def _run_errands(self) -> None:
        for call in list(self._errands):
            self._answer(call, partial(self._advance, call))

    def _advance(self, call: int) -> FromCore | None:
        match self._errands[call].advance():
            case PrefixExplanation() as explanation:
                answer = InspectorReply(call, explanation=explanation)
            case VerifyReport() as verified:
                answer = InspectorReply(call, verified=verified)
            case None:
                return None
        del self._errands[call]
        return answer

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
            case EraseNamespace(call, namespace):
                self._core.erase_namespace(namespace)
                return Done(call)

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
