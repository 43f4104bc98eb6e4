"""Every message of the process border survives the trip, and nothing else gets through."""

from __future__ import annotations

import enum
import math
import types
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.engine import wire
from lamina.types import SamplingParams, TokenEvent, TokenLogprob

# msgpack's range; floats as they are, but NaN, which equals nothing
_PLAIN: dict[object, st.SearchStrategy[typing.Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    type(None): st.none(),
}


def _values(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Any value of a type that occurs in a message."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Union | types.UnionType:
            return st.one_of([_values(argument) for argument in arguments])
        case origin if origin is list or (origin is tuple and arguments[-1] is ...):
            return st.lists(_values(arguments[0]), max_size=3).map(origin)
        case origin if origin is tuple:
            return st.tuples(*[_values(argument) for argument in arguments])
        case origin if origin is dict:
            return st.dictionaries(_values(arguments[0]), _values(arguments[1]), max_size=3)
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if not name.startswith("_")}
    return st.builds(kind, **{name: _values(hint) for name, hint in hints.items()})


_TO_CORE, _FROM_CORE = _values(wire.ToCore), _values(wire.FromCore)


@given(_TO_CORE)
@settings(deadline=None, max_examples=100)
def test_messages_to_the_core_round_trip(message: wire.ToCore) -> None:
    """What is decoded equals what was encoded, in type and value."""
    decoded = wire.decode_to_core(wire.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(_FROM_CORE)
@settings(deadline=None, max_examples=100)
def test_messages_from_the_core_round_trip(message: wire.FromCore) -> None:
    """What is decoded equals what was encoded, in type and value."""
    decoded = wire.decode_from_core(wire.encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_noise_is_garbled(noise: bytes) -> None:
    """Random bytes raise Garbled on either side and nothing else."""
    for decode in (wire.decode_to_core, wire.decode_from_core):
        with pytest.raises(wire.Garbled):
            decode(noise)


@given(_TO_CORE, st.data())
@settings(deadline=None, max_examples=100)
def test_a_truncated_frame_is_garbled(message: wire.ToCore, data: st.DataObject) -> None:
    """No prefix of a message is a message."""
    frame = wire.encode(message)
    with pytest.raises(wire.Garbled):
        wire.decode_to_core(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(_FROM_CORE)
@settings(deadline=None, max_examples=50)
def test_directions_are_not_interchangeable(message: wire.FromCore) -> None:
    """The core refuses what only a core may say."""
    with pytest.raises(wire.Garbled):
        wire.decode_to_core(wire.encode(message))


def test_infinity_is_carried() -> None:
    """A masked token's log-probability is -inf, and stays so."""
    event = TokenEvent(request_id="a", logprobs=(TokenLogprob(1, -math.inf, 1),))
    assert wire.decode_from_core(wire.encode(wire.Events((event,)))) == wire.Events((event,))


def test_deep_nesting_is_garbled() -> None:
    """A frame that would exhaust the stack does not."""
    with pytest.raises(wire.Garbled):
        wire.decode_to_core(b"\x91" * 100_000)


def test_wrong_types_are_garbled() -> None:
    """A text where token ids belong does not become token ids."""
    request = {
        "request_id": "a",
        "prompt_token_ids": "text",
        "sampling": msgspec.to_builtins(SamplingParams()),
    }
    frame = msgspec.msgpack.encode({"type": "submit", "request": request})
    with pytest.raises(wire.Garbled, match="prompt_token_ids"):
        wire.decode_to_core(frame)
