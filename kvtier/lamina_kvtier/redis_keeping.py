"""Who decides what a Redis server keeps: the server by itself, or quotas, by a ledger that lies beside the blocks.

Without quotas a block is one SET, and the server evicts by its own policy. Under quotas a put has three parts:

    reserve ──▶ SET with a short time to live ──▶ commit           scripts: one call each for a whole put
    room, victims                             the block's own time to live; only now it is OK

Whatever is cut off leaves nothing behind: a value that was never committed expires, and so does its promise of room. A
put that is late or cancelled is not cut off: it commits what it has written, and gives back the room for the rest. A
commit finds out whether block and promise are still there. Replicas that put the same block at once pay for it once.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Protocol

from lamina_kvtier.identity import BlockId
from lamina_kvtier.namespace_counts import NamespaceCounts
from lamina_kvtier.operations import Ended
from lamina_kvtier.quota import Quota
from lamina_kvtier.reasons import Reason
from lamina_kvtier.redis_blocks import COMMIT_GRACE_S, GROUP, RedisBlocks
from lamina_kvtier.redis_plane import Ask, ErrorReply, Failure, Request
from lamina_kvtier.redis_plane.chain import Chain, Stage
from lamina_kvtier.redis_plane.ledger import NO_LEDGER, Admission, LedgerCalls
from lamina_kvtier.tier import BlockKey, Operation, Outcome, Tally

__all__ = ["Keeping", "LedgerKeeping", "PlainKeeping"]

Outcomes = tuple[Outcome, ...]
Tallied = Callable[[Iterable[Outcome]], Outcomes]
_MOST_TOGETHER = 512  # blocks of one script call: a few milliseconds in which the server does nothing else
_FATES = {"k": Outcome.OK, "q": Outcome.REFUSED, "p": Outcome.REFUSED, "x": Outcome.REFUSED}
_REASONS = {"q": Reason.OWN_QUOTA, "p": Reason.PRESSURE}


class Keeping(Protocol):
    """The part of a StoreTier that changes what is kept. Views are checked already."""

    def put(self, keys: Sequence[BlockKey], views: Sequence[memoryview], tally: Tallied) -> Operation[Outcomes]:
        """`tally` is called once with the outcomes, when they are known."""
        ...

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]: ...

    def forget(self, namespace: str) -> Operation[Tally]: ...

    @property
    def notes_uses(self) -> bool:
        """Whether there is anything to tell the server about loaded blocks."""
        ...

    def touch(self, ids: Sequence[BlockId]) -> Request:
        """These were loaded, head first; some of them may not have been there."""
        ...


class PlainKeeping:
    """The server's own eviction."""

    def __init__(self, blocks: RedisBlocks) -> None:
        self._blocks = blocks
        self._ttl_ms = blocks.config.ttl_ms

    def put(self, keys: Sequence[BlockKey], views: Sequence[memoryview], tally: Tallied) -> Operation[Outcomes]:
        blocks = self._blocks
        stores = [blocks.store(key, view, self._ttl_ms) for key, view in zip(keys, views, strict=True)]
        return blocks.move(stores, blocks.config.put_s, lambda: tally(map(blocks.stored, stores)))

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        if not ids:
            return Ended(Tally(0, Outcome.OK))
        keys = [self._blocks.key(block) for block in ids]
        groups = [keys[start : start + GROUP] for start in range(0, len(keys), GROUP)]
        request = Ask([(b"UNLINK", *group) for group in groups], int)

        def deleted() -> Tally:
            if isinstance(request.result, Failure):
                return Tally(0, Outcome(request.result.value))
            refusals = [self._blocks.refusal(reply) for reply in request.result if isinstance(reply, ErrorReply)]
            gone = sum(reply for reply in request.result if isinstance(reply, int))
            return Tally(gone, refusals[0] if refusals else Outcome.OK)

        return self._blocks.ask([request], self._blocks.config.delete_s, deleted)

    def forget(self, namespace: str) -> Operation[Tally]:
        """Nothing is written down about who pays."""
        self._blocks.last_refusal = "without quotas the store does not know whose blocks it has"
        return Ended(Tally(0, Outcome.REFUSED))

    @property
    def notes_uses(self) -> bool:
        """The server sees uses itself; only the time to live begins anew."""
        return self._ttl_ms is not None

    def touch(self, ids: Sequence[BlockId]) -> Request:
        ttl = b"%d" % (self._ttl_ms or 0)
        return Ask([(b"PEXPIRE", self._blocks.key(block), ttl) for block in ids], int)


class LedgerKeeping:
    """Quotas, judged by the ledger in the store. Counts what this client's puts were refused, and cost others.

    Each namespace with a quota is counted by itself. Of the others only so many are: see `NamespaceCounts`.
    """

    def __init__(self, blocks: RedisBlocks, calls: LedgerCalls) -> None:
        self.policy: tuple[int, Mapping[str, Quota]] | None = None  # room in bytes, quotas; None: room is not known
        self.refusals: NamespaceCounts[Reason] = NamespaceCounts(self._has_quota)
        self.evictions: NamespaceCounts[Reason] = NamespaceCounts(self._has_quota)
        self.lock = threading.Lock()  # guards the counters
        self._blocks, self._calls = blocks, calls

    def put(self, keys: Sequence[BlockKey], views: Sequence[memoryview], tally: Tallied) -> Operation[Outcomes]:
        pairs = list(zip(keys, views, strict=True))
        deadline = time.monotonic() + self._blocks.config.put_s
        return Chain(lambda chain: self._put_all(chain, pairs, tally), deadline)

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        if not ids:
            return Ended(Tally(0, Outcome.OK))
        parts = [ids[start : start + _MOST_TOGETHER] for start in range(0, len(ids), _MOST_TOGETHER)]
        requests = [self._calls.delete(part) for part in parts]

        def deleted() -> Tally:
            gone = sum(request.result for request in requests if isinstance(request.result, int))
            troubles = [request.result for request in requests if isinstance(request.result, ErrorReply | Failure)]
            return Tally(gone, self._blocks.fate(troubles[0]) if troubles else Outcome.OK)

        return self._blocks.ask(requests, self._blocks.config.delete_s, deleted)

    def forget(self, namespace: str) -> Operation[Tally]:
        gone: list[int] = []
        request = self._calls.forget(namespace, gone)

        def forgotten() -> Tally:
            trouble = request.result
            return Tally(sum(gone), Outcome.OK if isinstance(trouble, bool) else self._blocks.fate(trouble))

        return self._blocks.ask([request], self._blocks.config.delete_s, forgotten)

    @property
    def notes_uses(self) -> bool:
        return True

    def touch(self, ids: Sequence[BlockId]) -> Request:
        return self._calls.touch(ids)

    def count_victims(self, victims: Mapping[tuple[str, Reason], int]) -> None:
        with self.lock:
            for (namespace, reason), count in victims.items():
                self.evictions.add(namespace, reason, count)

    def _has_quota(self, namespace: str) -> bool:
        policy = self.policy
        return policy is not None and namespace in policy[1]

    def _put_all(
        self, chain: Chain[Outcomes], pairs: Sequence[tuple[BlockKey, memoryview]], tally: Tallied
    ) -> Generator[Stage, None, Outcomes]:
        outcomes: list[Outcome] = []
        for start in range(0, len(pairs), _MOST_TOGETHER):
            outcomes += yield from self._put(chain, pairs[start : start + _MOST_TOGETHER])
        return tally(outcomes)

    def _put(
        self, chain: Chain[Outcomes], pairs: Sequence[tuple[BlockKey, memoryview]]
    ) -> Generator[Stage, None, list[Outcome]]:
        holder = secrets.token_hex(8).encode()
        answer = yield from self._reserve(holder, [key for key, _ in pairs])
        if isinstance(answer, Outcome):
            return [answer] * len(pairs)
        outcomes = [_FATES.get(fate, Outcome.CANCELLED) for fate in answer.fates]
        wanted = [at for at, fate in enumerate(answer.fates) if fate == "w"]
        if not wanted:
            return outcomes
        stores = {at: self._blocks.store(*pairs[at], self._calls.lease_ms) for at in wanted}
        if not chain.cancelled:
            yield Stage(list(stores.values()), self._blocks.plane.move)
            outcomes = [self._blocks.stored(stores[at]) if at in stores else old for at, old in enumerate(outcomes)]
        ticks = {at: answer.base + len(pairs) - at for at in wanted}
        committed = yield from self._commit(holder, [key for key, _ in pairs], outcomes, ticks)
        return [committed.get(at, outcome) for at, outcome in enumerate(outcomes)]

    def _reserve(self, holder: bytes, keys: Sequence[BlockKey]) -> Generator[Stage, None, Admission | Outcome]:
        """Installs the ledger where there is none, and asks again."""
        size = self._blocks.value_bytes
        blocks = [(key.id, size, key.namespace) for key in keys]
        request = self._calls.reserve(holder, blocks)
        yield Stage([request], self._blocks.plane.ask)
        missing, policy = request.result, self.policy
        if policy is not None and isinstance(missing, ErrorReply) and missing.code == NO_LEDGER:
            yield Stage([self._calls.install(*policy)], self._blocks.plane.ask)
            request = self._calls.reserve(holder, blocks)
            yield Stage([request], self._blocks.plane.ask)
        result = request.result
        if isinstance(result, ErrorReply | Failure):
            return self._blocks.fate(result)
        self._count(keys, result)
        return result

    def _commit(
        self, holder: bytes, keys: Sequence[BlockKey], outcomes: Sequence[Outcome], ticks: Mapping[int, int]
    ) -> Generator[Stage, None, dict[int, Outcome]]:
        """What became of the blocks that were written; the others' room is given back."""
        written = [at for at in ticks if outcomes[at] is Outcome.OK]
        lost = [keys[at].id for at in ticks if outcomes[at] is not Outcome.OK]
        request = self._calls.commit(holder, [(keys[at].id, ticks[at]) for at in written], lost)
        yield Stage([request], self._blocks.plane.ask, optional=False, grace_s=COMMIT_GRACE_S)
        result = request.result
        if isinstance(result, ErrorReply | Failure):
            return dict.fromkeys(written, self._blocks.fate(result))
        with self.lock:
            for at, fate in zip(written, result, strict=True):
                if fate == "x":
                    self.refusals.add(keys[at].namespace, Reason.PRESSURE)
        return {at: _FATES[letter] for at, letter in zip(written, result, strict=True)}

    def _count(self, keys: Sequence[BlockKey], answer: Admission) -> None:
        with self.lock:
            for key, fate in zip(keys, answer.fates, strict=True):
                if fate in _REASONS:
                    self.refusals.add(key.namespace, _REASONS[fate])
        self.count_victims(answer.victims)
