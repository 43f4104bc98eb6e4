"""Calls of `ledger.lua`, and what their replies mean. Quotas of a store live in the store: there replicas agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TypeVar

from lamina_kvtier.identity import BlockId
from lamina_kvtier.quota import Quota
from lamina_kvtier.reasons import Reason
from lamina_kvtier.redis_plane.resp import ProtocolError, Reply
from lamina_kvtier.redis_plane.script import Script, ScriptCall

__all__ = ["LEDGER", "NO_LEDGER", "VALUES", "Admission", "LedgerCalls", "LedgerUsage", "Sweep"]

T = TypeVar("T")

LEDGER, VALUES = b"ledger1:", b"kv1:"  # what keys go on with behind the scope
NO_LEDGER = "NOLEDGER"  # the error of a store that has none (any more): install it, and ask again

_SCRIPT = Script(resources.files("lamina_kvtier.redis_plane").joinpath("ledger.lua").read_bytes())
_REASONS = {"q": Reason.OWN_QUOTA, "p": Reason.PRESSURE}
Victims = Mapping[tuple[str, Reason], int]


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a reservation. `fates`: per block "k" kept already, "w" write it, "q" own quota, "p" pressure."""

    base: int
    fates: str
    victims: Victims


@dataclass(frozen=True, slots=True)
class Sweep:
    """Where a comparison of values and entries goes on; b"done": not on this side. Victims: of the last part."""

    values: bytes = b"0"
    entries: bytes = b"0"
    victims: Victims = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.values == self.entries == b"done"


@dataclass(slots=True)
class LedgerUsage:
    """What the ledger says about itself, page by page. Bytes."""

    total: int = 0
    room: int = 0
    blocks: int = 0
    by_namespace: dict[str, int] = field(default_factory=dict)


class LedgerCalls:
    """Requests to the ledger of one deployment."""

    def __init__(self, scope: bytes, *, ttl_ms: int | None, lease_ms: int) -> None:
        """scope: what all its keys and those of blocks begin with, a hash tag in it.

        lease_ms: how long room is kept for a block that is announced and not yet there.
        """
        self.lease_ms = lease_ms
        self._keys = scope + LEDGER, scope
        self._ttl, self._lease = b"%d" % (ttl_ms or 0), b"%d" % lease_ms

    def install(self, room: int, quotas: Mapping[str, Quota]) -> ScriptCall[str]:
        """room: bytes that may be kept."""
        flat: list[bytes] = [b"install", b"%d" % room]
        for namespace, quota in quotas.items():
            rights = b"%d" % quota.reserved, b"%d" % quota.limit, repr(float(quota.weight)).encode()
            flat += (namespace.encode(), *rights)
        return self._call(flat, _text)

    def reserve(self, holder: bytes, blocks: Sequence[tuple[BlockId, int, str]]) -> ScriptCall[Admission]:
        """blocks: identity, bytes, namespace; head first."""
        flat: list[bytes] = [b"reserve", holder, self._lease, self._ttl]
        for block, size, namespace in blocks:
            flat += (_name(block), b"%d" % size, namespace.encode())

        def parse(reply: Reply) -> Admission:
            base, fates, victims = _elements(reply, 3)
            return Admission(_number(base), _letters(fates, len(blocks), "kwqp"), _victims(victims))

        return self._call(flat, parse)

    def commit(self, holder: bytes, written: Sequence[tuple[BlockId, int]], lost: Iterable[BlockId]) -> ScriptCall[str]:
        """written: with the tick of their use. Answered with a letter for each of them: "k" if it is kept, or "x"."""
        flat: list[bytes] = [b"commit", holder, self._ttl, b"%d" % len(written)]
        for block, tick in written:
            flat += (_name(block), b"%d" % tick)
        return self._call([*flat, *map(_name, lost)], lambda reply: _letters(reply, len(written), "kx"))

    def touch(self, ids: Iterable[BlockId]) -> ScriptCall[int]:
        """They were used, head first; what is not there is struck off."""
        return self._call([b"touch", self._ttl, *map(_name, ids)], _number)

    def delete(self, ids: Iterable[BlockId]) -> ScriptCall[int]:
        """Answered with how many there were."""
        return self._call([b"delete", *map(_name, ids)], _number)

    def forget(self, namespace: str, gone: list[int]) -> ScriptCall[bool]:
        """All of a namespace, so many at a time; what each time brought is appended to `gone`."""
        arguments = b"forget", namespace.encode()

        def parse(reply: Reply) -> bool:
            count, more = _elements(reply, 2)
            gone.append(_number(count))
            return bool(_number(more))

        return ScriptCall(_SCRIPT, self._keys, arguments, parse, lambda more: arguments if more else None)

    def sweep(self, at: Sweep, count: int) -> ScriptCall[Sweep]:
        """Compares about `count` values and as many entries; answered with where to go on."""

        def parse(reply: Reply) -> Sweep:
            values, entries, victims = _elements(reply, 3)
            return Sweep(_text(values).encode(), _text(entries).encode(), _victims(victims))

        return self._call([b"sweep", at.values, at.entries, b"%d" % count], parse)

    def usage(self, into: LedgerUsage) -> ScriptCall[bytes]:
        """Collects all pages."""

        def parse(reply: Reply) -> bytes:
            cursor, total, room, blocks, pairs = _elements(reply, 5)
            into.total, into.room, into.blocks = _number(total), _number(room), _number(blocks)
            into.by_namespace |= _pairs(pairs)
            return _text(cursor).encode()

        def go_on(cursor: bytes) -> Sequence[bytes] | None:
            return None if cursor == b"0" else (b"usage", cursor)

        return ScriptCall(_SCRIPT, self._keys, (b"usage", b"0"), parse, go_on)

    def _call(self, arguments: Sequence[bytes], parse: Callable[[Reply], T]) -> ScriptCall[T]:
        return ScriptCall(_SCRIPT, self._keys, arguments, parse)


# Replies. All raise ProtocolError.


def _victims(flat: Reply) -> Victims:
    """How many blocks each namespace lost, by reason."""
    named = _pairs(flat)
    if any(name[:1] not in _REASONS for name in named):
        raise _nonsense()
    return {(name[1:], _REASONS[name[:1]]): count for name, count in named.items()}


def _pairs(flat: Reply) -> dict[str, int]:
    if not isinstance(flat, list) or len(flat) % 2:
        raise _nonsense()
    return {_text(name): _number(count) for name, count in zip(flat[::2], flat[1::2], strict=True)}


def _elements(reply: Reply, count: int) -> list[Reply]:
    if not isinstance(reply, list) or len(reply) != count:
        raise _nonsense()
    return reply


def _letters(reply: Reply, count: int, allowed: str) -> str:
    text = _text(reply)
    if len(text) != count or set(text) - set(allowed):
        raise _nonsense()
    return text


def _text(reply: Reply) -> str:
    if not isinstance(reply, bytes):
        raise _nonsense()
    return reply.decode("utf-8", "replace")


def _number(reply: Reply) -> int:
    """An integer, or its digits: numbers of Lua beyond 2**53 are none."""
    if type(reply) is int:
        return reply
    text = _text(reply)
    if not text.lstrip("-").isdigit() or len(text) > 20:
        raise _nonsense()
    return int(text)


def _nonsense() -> ProtocolError:
    return ProtocolError("the ledger's script is not answered like that")


def _name(block: BlockId) -> bytes:
    """Behind the scope: where its value is, and what it is called in the ledger."""
    return VALUES + block.hex().encode()
