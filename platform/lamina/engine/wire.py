"""The language of the process border: one tagged msgpack message per ZeroMQ frame.

    to the core    Submit, Cancel, UnloadAdapter, AskStats, Shutdown
                   SetQuotas, AskCommons, Pin, RenewPin, Unpin, RestorePins, EraseNamespace
                   AskPrefixes, ExplainPrefix, Verify
    from the core  Ready, Events, Refused, StatsReply, Heartbeat
                   Done, CommonsReply, PinReply, PinsReply, InspectorReply, CallFailed

The values inside are those of `lamina.types`, typed on both sides: a frame that does not decode to exactly
these types raises `Garbled` and changes nothing. No code, class name or file name ever crosses.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from lamina.engine.failures import Context
from lamina.errors import InvalidRequest
from lamina.types import (
    CommonsReport,
    EngineFailure,
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

__all__ = [
    "PULSE",
    "AskCommons",
    "AskPrefixes",
    "AskStats",
    "CallFailed",
    "Cancel",
    "CommonsCall",
    "CommonsReply",
    "Done",
    "EraseNamespace",
    "Events",
    "ExplainPrefix",
    "FromCore",
    "Garbled",
    "Heartbeat",
    "InspectorCall",
    "InspectorReply",
    "Pin",
    "PinReply",
    "PinsReply",
    "Ready",
    "Refused",
    "RenewPin",
    "RestorePins",
    "SetQuotas",
    "Shutdown",
    "StatsReply",
    "Submit",
    "ToCore",
    "UnloadAdapter",
    "Unpin",
    "Verify",
    "decode_from_core",
    "decode_to_core",
    "encode",
]

PULSE = b".pulse"  # suffix of the identity under which a core's heartbeat thread speaks


class Garbled(Exception):
    """A frame is not a message of this protocol; drop it."""


class _Call(msgspec.Struct, frozen=True):
    """A question, or its answer: both have the number that the asker gave."""

    call: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a request. Answered by Events or by one Refused."""

    request: GenerationRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End one choice, or all when `index` is None. Unknown ids are ignored."""

    request_id: str
    index: int | None = None


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload"):
    """An adapter was deleted: drop it once nothing uses it, and the blocks that it computed."""

    digest: str


class AskStats(_Call, frozen=True, tag="ask_stats"):
    """Answered by StatsReply with the same `call`."""


class SetQuotas(_Call, frozen=True, tag="set_quotas"):
    """Replace all quotas, or none. Answered by Done or CallFailed, as are the next six by what they name."""

    policies: tuple[QuotaPolicy, ...]


class AskCommons(_Call, frozen=True, tag="ask_commons"):
    """CommonsReply."""


class Pin(_Call, frozen=True, tag="pin"):
    """PinReply with a PinAnswer."""

    order: PinOrder


class RenewPin(_Call, frozen=True, tag="renew_pin"):
    """PinsReply with one PinState."""

    namespace: str
    pin_id: str
    ttl_s: float


class Unpin(_Call, frozen=True, tag="unpin"):
    """Done."""

    namespace: str
    pin_id: str


class RestorePins(_Call, frozen=True, tag="restore_pins"):
    """PinsReply with those that are alive and were not here."""

    records: tuple[PinRecord, ...]


class EraseNamespace(_Call, frozen=True, tag="erase_namespace"):
    """Done: a deleted tenant's blocks are dropped, or will be when its requests end."""

    namespace: str


class AskPrefixes(_Call, frozen=True, tag="ask_prefixes"):
    """InspectorReply with a PrefixReport; so are the next two answered, perhaps some steps later."""


class ExplainPrefix(_Call, frozen=True, tag="explain_prefix"):
    """PrefixExplanation."""

    order: PrefixOrder


class Verify(_Call, frozen=True, tag="verify"):
    """VerifyReport."""

    order: VerifyOrder


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End everything with CANCELLED and exit 0; what SIGTERM does."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and the core takes requests."""

    info: EngineInfo
    pid: int


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Everything that one step produced."""

    events: tuple[TokenEvent, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The core did not take this request; `context` holds the error's typed attributes."""

    request_id: str
    failure: EngineFailure
    context: Context = {}


class StatsReply(_Call, frozen=True, tag="stats"):
    stats: EngineStats


class Done(_Call, frozen=True, tag="done"):
    """What was asked for is in force."""


class CommonsReply(_Call, frozen=True, tag="commons"):
    report: CommonsReport


class PinReply(_Call, frozen=True, tag="pin_answer"):
    answer: PinAnswer


class PinsReply(_Call, frozen=True, tag="pins"):
    pins: tuple[PinState, ...]


class InspectorReply(_Call, frozen=True, tag="inspector"):
    """One of the three, by what was asked."""

    prefixes: PrefixReport | None = None
    explanation: PrefixExplanation | None = None
    verified: VerifyReport | None = None


class CallFailed(_Call, frozen=True, tag="call_failed"):
    """The core refused a call; nothing changed."""

    failure: EngineFailure
    context: Context = {}


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent from a thread of its own, so that a long step does not look like death.

    `stalled_s` is how long ago the core's loop last turned while it had something to do.
    """

    stalled_s: float = 0.0


CommonsCall = SetQuotas | AskCommons | Pin | RenewPin | Unpin | RestorePins | EraseNamespace
InspectorCall = AskPrefixes | ExplainPrefix | Verify
ToCore = Submit | Cancel | UnloadAdapter | AskStats | Shutdown | CommonsCall | InspectorCall
_Reply = StatsReply | Done | CommonsReply | PinReply | PinsReply | InspectorReply | CallFailed
FromCore = Ready | Events | Refused | Heartbeat | _Reply

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)
_Message = TypeVar("_Message")


def encode(message: ToCore | FromCore) -> bytes:
    """One frame. Raises InvalidRequest for what msgpack cannot carry: an integer beyond 64 bits, a lone
    surrogate in a string."""
    try:
        return _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"The request holds a value that cannot be sent to the engine ({error}). "
            "Integers must fit 64 bits and text must be valid Unicode."
        ) from error


def decode_to_core(frame: bytes) -> ToCore:
    """Raises Garbled."""
    return _decode(_to_core, frame)


def decode_from_core(frame: bytes) -> FromCore:
    """Raises Garbled."""
    return _decode(_from_core, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes) -> _Message:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled(str(error)) from error
