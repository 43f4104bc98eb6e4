"""The engine as the gateway sees it: an asyncio client of the engine process. Loads no torch.

The client binds a ROUTER socket and outlives any number of engine processes; each engine process connects
under an identity of its own, drawn by whoever started it. Frames of any other identity are dropped, so that a
late message of a dead core can never be taken for one of its successor.

    client.expect(identity)      a core is starting
    Ready                        `ready` becomes true
    client.core_lost(why)        the supervisor saw it die, or its heartbeat stopped: every request ends,
                                 `ready` becomes false, until the next `expect` and Ready
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import zmq
import zmq.asyncio

from lamina.engine.failures import error_of, failure_of
from lamina.engine.streams import RequestStream
from lamina.engine.wire import (
    PULSE,
    AskCommons,
    AskPrefixes,
    AskStats,
    CallFailed,
    Cancel,
    CommonsReply,
    Done,
    EraseNamespace,
    Events,
    ExplainPrefix,
    FromCore,
    Garbled,
    Heartbeat,
    InspectorReply,
    Pin,
    PinReply,
    PinsReply,
    Ready,
    Refused,
    RenewPin,
    RestorePins,
    SetQuotas,
    StatsReply,
    Submit,
    ToCore,
    UnloadAdapter,
    Unpin,
    Verify,
    decode_from_core,
    encode,
)
from lamina.errors import Conflict, EngineUnavailable
from lamina.types import (
    CommonsReport,
    EngineInfo,
    EngineStats,
    GenerationRequest,
    PinAnswer,
    PinOrder,
    PinRecord,
    PinState,
    PrefixExplanation,
    PrefixOrder,
    PrefixReport,
    QuotaPolicy,
    TokenEvent,
    VerifyOrder,
    VerifyReport,
)

__all__ = ["ZmqEngineClient"]

_log = logging.getLogger(__name__)

_TICKS = 4  # a core is lost after this many silent ticks in a row


class ZmqEngineClient:
    """Implements `lamina.engine.protocol.EngineClient`. Use from one event loop only.

    `address`: a ZeroMQ endpoint to bind, `ipc://<path>` in a directory that only this user can enter.
    `heartbeat_timeout_s`: a core silent for so long is lost. `stall_timeout_s`: so is one whose loop has
    something to do but has not turned for so long. `call_timeout_s`: how long `stats` waits.
    """

    def __init__(
        self,
        address: str,
        *,
        heartbeat_timeout_s: float = 10.0,
        stall_timeout_s: float = 300.0,
        call_timeout_s: float = 30.0,
    ) -> None:
        self.address = address
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._call_timeout_s = call_timeout_s
        self._identity: bytes | None = None
        self._info: EngineInfo | None = None
        self._retry_after_s = 5.0
        self._generation = 0
        self._heard = False
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._is_ready = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._why_lost = ""
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Binds the address and listens. Raises zmq.ZMQError if the address is in use or too long."""
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a dead core is an error, not silence
        self._socket.set(zmq.SNDHWM, 0)  # what is in flight is bounded by the core's max_waiting
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    # what EngineClient promises

    @property
    def ready(self) -> bool:
        return self._info is not None

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable(retry_after_s=self._retry_after_s)
        return self._info

    async def submit(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """See EngineClient. Raises Conflict if that id is running, EngineUnavailable without a core."""
        stream = self._open(request)
        try:
            self._send(Submit(request))
            while (event := await stream.next()) is not None:
                yield event
        finally:
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]
            if stream.open and self.ready:
                self._send_if_alive(Cancel(request.request_id))

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        if request_id in self._streams and self.ready:
            self._send_if_alive(Cancel(request_id, index))

    async def stats(self) -> EngineStats:
        """Raises EngineUnavailable without a core, or if it does not answer within `call_timeout_s`."""
        return cast("EngineStats", await self._call(AskStats))

    async def set_quotas(self, policies: Sequence[QuotaPolicy]) -> None:
        await self._call(lambda call: SetQuotas(call, tuple(policies)))

    async def commons(self) -> CommonsReport:
        return cast("CommonsReport", await self._call(AskCommons))

    async def pin(self, order: PinOrder) -> PinAnswer:
        return cast("PinAnswer", await self._call(lambda call: Pin(call, order)))

    async def renew_pin(self, namespace: str, pin_id: str, ttl_s: float) -> PinState:
        (pin,) = await self._call(lambda call: RenewPin(call, namespace, pin_id, ttl_s))
        return cast("PinState", pin)

    async def unpin(self, namespace: str, pin_id: str) -> None:
        await self._call(lambda call: Unpin(call, namespace, pin_id))

    async def restore_pins(self, records: Sequence[PinRecord]) -> tuple[PinState, ...]:
        return cast("tuple[PinState, ...]", await self._call(lambda call: RestorePins(call, tuple(records))))

    async def erase_namespace(self, namespace: str) -> None:
        await self._call(lambda call: EraseNamespace(call, namespace))

    async def prefixes(self) -> PrefixReport:
        return cast("PrefixReport", await self._call(AskPrefixes))

    async def explain_prefix(self, order: PrefixOrder) -> PrefixExplanation:
        return cast("PrefixExplanation", await self._call(lambda call: ExplainPrefix(call, order)))

    async def verify(self, order: VerifyOrder) -> VerifyReport:
        return cast("VerifyReport", await self._call(lambda call: Verify(call, order)))

    async def _call(self, message: Callable[[int], ToCore]) -> Any:
        """Sends what `message` makes of a call's number, and waits for the answer. Raises what the core refused."""
        call = next(self._call_ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(message(call))
        self._calls[call] = reply
        try:
            return await asyncio.wait_for(reply, self._call_timeout_s)
        except TimeoutError:
            raise EngineUnavailable(
                f"The engine did not answer within {self._call_timeout_s:g} s; retry shortly.",
                retry_after_s=self._retry_after_s,
            ) from None
        finally:
            del self._calls[call]

    async def unload_adapter(self, digest: str) -> None:
        """Raises EngineUnavailable without a core (a restarted core has no adapter loaded anyway)."""
        self._send(UnloadAdapter(digest))

    async def close(self) -> None:
        """Ends every request with EngineUnavailable and gives the address back. May be called twice."""
        self.core_lost("the gateway is shutting down")
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    # what the supervisor tells and asks

    def expect(self, identity: bytes) -> None:
        """A core was started that will speak under `identity`; what any other says is dropped from now on."""
        if self._identity is not None:
            self.core_lost("it was replaced")
        self._identity = identity
        self._is_lost.clear()

    def core_lost(self, why: str, *, retry_after_s: float | None = None) -> None:
        """The core is dead: ends every running request and refuses new ones. Further calls only set the hint.

        `retry_after_s`: when a caller should try again, to the best of the supervisor's knowledge.
        """
        if retry_after_s is not None:
            self._retry_after_s = retry_after_s
        if self._identity is None:
            return
        _log.info("the engine core is gone (%s); %d requests end", why, len(self._streams))
        self._identity = self._info = None
        self._why_lost = why
        self._is_ready.clear()
        self._is_lost.set()
        self.end_requests("The engine stopped while it worked on this request; it is being restarted. Retry shortly.")

    def end_requests(self, message: str) -> None:
        """Ends every running request with `message`, as if the core were lost; the core itself is not told."""
        unavailable = EngineUnavailable(message, retry_after_s=self._retry_after_s)
        failure = failure_of(unavailable)
        for stream in self._streams.values():
            stream.fail(failure)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error_of(failure))

    async def wait_ready(self) -> EngineInfo:
        """Returns once a core has reported ready."""
        await self._is_ready.wait()
        return self.info

    async def wait_lost(self) -> str:
        """Returns why, once the expected core is lost; at once if it is lost already."""
        await self._is_lost.wait()
        return self._why_lost

    # inside

    def _open(self, request: GenerationRequest) -> RequestStream:
        if not self.ready:
            raise EngineUnavailable(retry_after_s=self._retry_after_s)
        former = self._streams.get(request.request_id)
        if former is not None and former.open:
            raise Conflict(f"A request with the id {request.request_id!r} is running already.")
        stream = RequestStream(request.request_id, request.sampling.n)
        self._streams[request.request_id] = stream
        return stream

    def _send(self, message: ToCore) -> None:
        if self._identity is None or self._info is None:
            raise EngineUnavailable(retry_after_s=self._retry_after_s)
        frame = encode(message)
        # With NOBLOCK the future is done on return: a ROUTER without high-water mark never has to wait.
        sent = self._socket.send_multipart([self._identity, frame], flags=zmq.NOBLOCK)
        try:
            cast("asyncio.Future[Any]", sent).result()
        except zmq.ZMQError as error:
            self.core_lost(f"it has disconnected ({error})")
            raise EngineUnavailable(retry_after_s=self._retry_after_s) from error

    def _send_if_alive(self, message: ToCore) -> None:
        try:
            self._send(message)
        except EngineUnavailable:
            _log.debug("not sent, the core is gone: %s", type(message).__name__)

    async def _read(self) -> None:
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            sender = frames[0]
            if self._identity is None or sender not in (self._identity, self._identity + PULSE):
                _log.warning("dropped a message of an unknown sender")
                continue
            try:
                message = decode_from_core(frames[-1])
            except Garbled as error:
                _log.warning("dropped a garbled message of the engine core: %s", error)
                continue
            self._heard = True
            self._receive(message)

    def _receive(self, message: FromCore) -> None:
        match message:
            case Events(events):
                for event in events:
                    if (stream := self._streams.get(event.request_id)) is not None:
                        stream.put(event)
            case Refused(request_id, failure, context):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.refuse(error_of(failure, context))
            case StatsReply(call, answer) | CommonsReply(call, answer) | PinReply(call, answer):
                self._settle(call, answer)
            case PinsReply(call, pins):
                self._settle(call, pins)
            case InspectorReply(call, prefixes, explanation, verified):
                self._settle(call, prefixes or explanation or verified)
            case Done(call):
                self._settle(call, None)
            case CallFailed(call, failure, context):
                if (reply := self._calls.get(call)) is not None and not reply.done():
                    reply.set_exception(error_of(failure, context))
            case Ready(info):
                self._info = info
                self._generation += 1
                self._is_ready.set()
            case Heartbeat(stalled_s):
                if stalled_s > self._stall_timeout_s:
                    self.core_lost(f"its loop has not turned for {stalled_s:.0f} s")

    def _settle(self, call: int, answer: Any) -> None:
        if (reply := self._calls.get(call)) is not None and not reply.done():
            reply.set_result(answer)

    async def _watch(self) -> None:
        # Counts silent ticks instead of comparing clocks: when this very loop was held up, it ticks once and
        # reads what came meanwhile, and nobody is declared dead.
        silent = 0
        while True:
            await asyncio.sleep(self._heartbeat_timeout_s / _TICKS)
            silent = 0 if self._heard or not self.ready else silent + 1
            self._heard = False
            if silent >= _TICKS:
                self.core_lost(f"no heartbeat for {self._heartbeat_timeout_s:g} s")
                silent = 0

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            _log.critical("the engine client broke", exc_info=task.exception())
            self.core_lost("the client broke")
