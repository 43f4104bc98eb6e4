"""Looks at a store's ledger from outside, as an operator with a plain connection would: does it add up?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from lamina_kvtier.redis_plane.resp import Reply

__all__ = ["contradictions", "pass_time"]

Tell = Callable[..., Reply]

_SHIFT = b"""
for _, key in ipairs(redis.call('KEYS', KEYS[2] .. '*')) do
  local left = redis.call('PTTL', key)
  if left > 0 and left <= tonumber(ARGV[1]) then redis.call('DEL', key)
  elseif left > 0 then redis.call('PEXPIRE', key, left - ARGV[1]) end
end
for _, set in ipairs({ KEYS[1] .. 'expiry', KEYS[1] .. 'lease' }) do
  for _, id in ipairs(redis.call('ZRANGE', set, 0, -1)) do redis.call('ZINCRBY', set, -ARGV[1], id) end
end
return 0
"""


_SCORES = b"return redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')"  # as text, whatever the protocol


def pass_time(tell: Tell, scope: bytes, milliseconds: int) -> None:
    """As if so much time had passed: everything expires so much sooner."""
    tell(b"EVAL", _SHIFT, b"2", scope + b"ledger1:", scope + b"kv1:", b"%d" % milliseconds)


def contradictions(tell: Tell, scope: bytes) -> list[str]:
    """What disagrees, one sentence each. Everything must be settled, and nothing under way."""
    found: list[str] = []
    ledger, values = scope + b"ledger1:", scope + b"kv1:"
    entries = {name: text.split(b" ", 2) for name, text in _pairs(tell(b"HGETALL", ledger + b"block"))}
    used = {name: int(count) for name, count in _pairs(tell(b"HGETALL", ledger + b"used"))}
    meta = dict(_pairs(tell(b"HGETALL", ledger + b"meta")))
    charged: Counter[bytes] = Counter()
    for _, (size, _holder, namespace) in entries.items():
        charged[namespace] += int(size)
    if used != dict(charged):
        found.append(f"used is {used}, the entries say {dict(charged)}")
    if int(meta[b"total"]) != charged.total():
        found.append(f"total is {meta[b'total']!r}, the entries say {charged.total()}")
    if charged.total() > int(meta[b"room"]):
        found.append(f"{charged.total()} bytes are kept where {meta[b'room']!r} may be")
    stored = {key.removeprefix(scope): tell(b"STRLEN", key) for key in _list(tell(b"KEYS", values + b"*"))}
    if stored != {name: int(size) for name, (size, _, _) in entries.items()}:
        found.append(f"{len(stored)} values, {len(entries)} entries, or other lengths")
    queues = {key.removeprefix(ledger + b"use:"): key for key in _list(tell(b"KEYS", ledger + b"use:*"))}
    queued = {(space, name) for space, key in queues.items() for name in _list(tell(b"ZRANGE", key, b"0", b"-1"))}
    if queued != {(space, name) for name, (_, holder, space) in entries.items() if holder == b"-"}:
        found.append("the queues of use are not the kept blocks")
    quotas = {
        name: [float(part) for part in text.split()] for name, text in _pairs(tell(b"HGETALL", ledger + b"quota"))
    }
    shares = {name: float(score) for name, score in _pairs(tell(b"EVAL", _SCORES, b"1", ledger + b"over"))}
    expected = {name: _score(name, size, quotas, name in queues) for name, size in charged.items()}
    if shares != expected:
        found.append(f"the order of victims is {shares}, not {expected}")
    if leases := _list(tell(b"ZRANGE", ledger + b"lease", b"0", b"-1")):
        found.append(f"{len(leases)} leases")
    return found


def _score(namespace: bytes, used: int, quotas: dict[bytes, list[float]], has_kept: bool) -> float:
    if not has_kept:
        return math.inf
    reserved, _, weight = quotas.get(namespace, [0.0, math.inf, 1.0])
    return -(used - reserved) / weight if namespace else -math.inf


def _list(reply: Reply) -> list[bytes]:
    assert isinstance(reply, list)
    return [element for element in reply if isinstance(element, bytes)]


def _pairs(reply: Reply) -> list[tuple[bytes, bytes]]:
    flat = _list(reply)
    return list(zip(flat[::2], flat[1::2], strict=True))
